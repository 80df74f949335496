"""One worker's part: check this machine, join the others as training does, compare, measure, judge, print."""

from __future__ import annotations

import os
import platform
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from threading import Timer
from typing import Any

import torch
import yaml
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from isthmus.config import RunConfig, dump
from isthmus.core import UserError
from isthmus.core.types import Peers
from isthmus.parallel import ParallelDims
from isthmus.tools.doctor.compare import Check, compare_clocks, compare_workers
from isthmus.tools.doctor.links import hiding_table, judge_links, judge_sync, judge_tcp, link_table, sync_seconds
from isthmus.tools.doctor.measure import Clock, Network, measure
from isthmus.tools.doctor.this_machine import check_this_machine, data_fingerprint, tcp_settings
from isthmus.tools.fork_server import ForkServer, end
from isthmus.tools.sync_traffic import sync_traffic
from isthmus.tools.workers import world_environment
from isthmus.train import assemble
from isthmus.train.run_folder import name_of
from isthmus.transport import Transport, TransportError
from isthmus.transport.address import split_address
from isthmus.transport.base import Behind, Leaving
from isthmus.transport.elastic.worker_ranks import worker_name, worker_number
from isthmus.transport.peers import BufferPeers
from isthmus.transport.rendezvous import JOIN_BUDGETS
from isthmus.transport.wire import all_gather_object
from isthmus.version import __version__

_DIAL_SECONDS, _PAUSE_SECONDS = 5.0, 0.2
_POLL_SECONDS = 0.1
_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}
_LONGEST_SHARE = 0.1  # of the sync budget that one transfer may take before the doctor has seen enough
_COMPARED_LATER = {"isthmus version": "that of isthmus doctor"}  # a difference is told, and does not end the meeting

Report = dict[str, Any]  # what a worker tells the others: plain JSON values


def doctor(config: RunConfig, console: Console, now: Clock = time.time, step_seconds: float | None = None) -> int:
    """Examine a configuration from one of its workers, all of which call this.

    RANK and WORLD_SIZE say which worker this is, as for training; a worker is one process here, whatever its mesh. The
    first worker on each machine prints what all of them found together, and each one that could not meet the others
    what it found alone.

    Args:
        config: of the run.
        console: to print on.
        now: this machine's wall clock, in seconds.
        step_seconds: of an inner step, if that is known.

    Returns:
        The exit code: 0 when all is well, 2 when something must be changed, 1 when the workers could not meet.
    """
    options = assemble.transport_class(config).apart_from_a_run(config.outer.transport)
    outer = config.outer.model_copy(update={"transport": options})
    config = config.model_copy(update={"outer": outer, "mesh": ParallelDims()})
    checks = check_this_machine(config, worker_number())
    try:
        if any(check.name == "rendezvous" and check.status == "fail" for check in checks):
            raise TransportError("not tried, because of the rendezvous")
        reports, network = _meet(config, _report(config, checks), now)
    except (UserError, TransportError) as error:
        show_findings(console, {worker_name(): [*checks, Check("workers", "fail", str(error))]})
        return 1
    findings = {name: [Check(**check) for check in report["checks"]] for name, report in reports.items()}
    findings["all"] = compare_workers(reports, config.train.workers)
    tables = []
    if network is not None:
        names, traffic = list(reports), sync_traffic(config)
        for rank, (name, report) in enumerate(reports.items()):
            findings[name].append(judge_tcp(rank, report["tcp"], network))
        findings["all"] += [compare_clocks(names, network), judge_links(names, network)]
        findings["all"] += judge_sync(names, network, traffic, config, step_seconds)
        tables.append(link_table(names, network))
        if config.outer.schedule is not None:
            tables.append(hiding_table(sync_seconds(network, traffic), step_seconds))
    elif len(reports) > 1:
        findings["all"].append(Check("links", "warn", "not measured: this transport moves its bytes in its own way"))
    if os.environ.get("LOCAL_RANK", "0") == "0":
        show_findings(console, findings, tables)
    return 2 if any(check.status == "fail" for checks in findings.values() for check in checks) else 0


def _report(config: RunConfig, checks: list[Check]) -> Report:
    """Return what this worker tells the others."""
    return {
        "name": worker_name(),
        "checks": [asdict(check) for check in checks],
        "config": {key: str(value) for key, value in assemble.shared_keys(config).items()},
        "config_hash": assemble.config_hash(config),
        "isthmus": {"version": __version__},
        "versions": {"python": platform.python_version(), "torch": str(torch.__version__)},
        "data": {"fingerprint": data_fingerprint(config)} if assemble.is_elastic(config) else {},
        "tcp": tcp_settings(),
        "addresses": [],
    }


def _meet(config: RunConfig, report: Report, now: Clock) -> tuple[dict[str, Report], Network | None]:
    """Join the other workers; return everybody's report by name, and the network between them if there are others."""
    transport = assemble.build_transport(config, shared_config=_COMPARED_LATER)
    budget_seconds: float = config.outer.transport["sync_budget_seconds"]
    nobody: Any = None  # whose state nobody asks for: no worker is ahead of another
    try:
        transport.join(nobody)
        report["addresses"] = transport.elastic.addresses if transport.elastic is not None else []
        peers, reports = _first_quorum(transport, report, (JOIN_BUDGETS + 1) * budget_seconds)
        network = None
        if peers.size > 1 and isinstance(peers, BufferPeers):
            network = measure(peers, now, _LONGEST_SHARE * budget_seconds)
        report["checks"] += [asdict(check) for check in _dial(report["name"], reports)]
        reports = all_gather_object(peers.all_gather, report)
        with suppress(TransportError):  # a vote ends a sync: who has seen it may go
            transport.commit(peers, True)
    finally:
        transport.leave()
    return {each["name"]: each for each in reports}, network


def _first_quorum(transport: Transport, report: Report, most_seconds: float) -> tuple[Peers, list[Report]]:
    """Wait for the other workers, so many seconds at most; return them with their reports."""
    problem, elastic = "", transport.elastic
    timer = Timer(most_seconds, elastic.interrupt if elastic is not None else lambda: None)
    timer.daemon = True
    timer.start()
    try:
        while True:
            try:
                peers = transport.quorum(0)
                return peers, all_gather_object(peers.all_gather, report)
            except (Behind, UserError) as error:
                advice = "examine before a run, or through another rendezvous"
                raise TransportError(f"a run is under way at this rendezvous ({error}): {advice}") from error
            except Leaving as error:
                raise TransportError(f"not all came within {most_seconds:g} s: {error}{problem}") from error
            except TransportError as error:
                if elastic is None:
                    raise
                problem = f" (before: {error})"
                time.sleep(_PAUSE_SECONDS)
    finally:
        timer.cancel()


def _dial(name: str, reports: list[Report]) -> Iterator[Check]:
    """Check that the others' state can be fetched, which whoever has to catch up must."""
    for other in reports:
        for address in other["addresses"] if other["name"] != name else []:
            try:
                socket.create_connection(split_address(address), _DIAL_SECONDS).close()
            except OSError as error:
                what = f"cannot reach {other['name']} at {address}, where it hands its state to who must catch up"
                advice = "let workers open connections to each other's machines; set outer.transport.host"
                yield Check("catching up", "fail", f"{what} ({error.strerror or error})", advice)


def doctor_on_this_machine(config: RunConfig, step_seconds: float | None = None) -> int:
    """Start `isthmus doctor` once for each worker; print what the first one has printed, and return the exit code."""
    options, num_workers = config.outer.transport, config.train.workers
    with (
        ForkServer() as server,  # it imports while this process makes what the workers meet at
        tempfile.TemporaryDirectory(prefix="isthmus-doctor-") as name,
        assemble.transport_class(config).serve(options, Path(name)) as served,
    ):
        path, logs = Path(name) / "config.yaml", [Path(name) / f"{name_of(k)}.log" for k in range(num_workers)]
        outer = config.outer.model_copy(update={"transport": options | served})
        path.write_text(yaml.safe_dump(dump(config.model_copy(update={"outer": outer})), sort_keys=False))
        world = world_environment(num_workers) | {"LOCAL_WORLD_SIZE": str(num_workers)}
        server.import_modules(["isthmus.tools.doctor"])
        more = [] if step_seconds is None else ["--step-seconds", str(step_seconds)]
        children = [
            server.start(["doctor", str(path), *more], world | {"RANK": str(k), "LOCAL_RANK": str(k)}, log, name_of(k))
            for k, log in enumerate(logs)
        ]
        try:
            while None in [child.poll() for child in children]:
                time.sleep(_POLL_SECONDS)
        finally:
            end(children)
        print(logs[0].read_text(errors="replace"), end="")
        codes = [child.returncode for child in children]
    return next((code if code > 0 else 1 for code in codes if code), 0)


def show_findings(console: Console, findings: dict[str, list[Check]], tables: Sequence[Table] = ()) -> None:
    """Print the findings by worker, the tables, and a verdict."""
    table = Table("check", "worker", "", box=SIMPLE_HEAD)
    table.add_column("found", overflow="fold")
    table.add_column("what to do", overflow="fold")
    grouped: dict[Check, list[str]] = {}
    for worker, checks in findings.items():
        for check in checks:
            grouped.setdefault(check, []).append(worker)
    order = list(dict.fromkeys(check.name for check in grouped))
    for check, workers in sorted(grouped.items(), key=lambda item: order.index(item[0].name)):
        status = f"[{_COLOURS[check.status]}]{check.status}[/]"
        table.add_row(check.name, ", ".join(workers), status, escape(check.found), escape(check.advice))
    console.print(table)
    for more in tables:
        console.print(more)
    counts = {status: sum(check.status == status for check in grouped) for status in _COLOURS}
    if counts["fail"]:
        console.print(f"{counts['fail']} to change before this run can go well, {counts['warn']} to look at")
    else:
        console.print("all is well" + (f", but look at {counts['warn']}" if counts["warn"] else ""))
