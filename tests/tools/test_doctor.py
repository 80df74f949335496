"""`isthmus doctor` with real workers over all three engines: what is amiss is named by all of them alike."""

from __future__ import annotations

import io
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console
from tests.launched import finish
from tests.program import Program
from tests.workers import CONTEXT
from typer.testing import CliRunner

from isthmus.cli import app
from isthmus.recipes import load_config
from isthmus.tools.doctor import doctor
from isthmus.train.assemble import transport_class
from isthmus.transport.address import free_port
from isthmus.version import __version__

ROOT = Path(__file__).parents[2]
ENGINES = ("torch_dist", "torchft", "hivemind")
RUN: dict[str, Any] = {
    "model": {
        "type": "module",
        "path": "tests.train.tiny:Bigram",
        "arguments": {"hidden_size": 4},
        "sequence_length": 8,
    },
    "data": {"type": "text", "source": str(ROOT / "src/isthmus/core")},
    "inner": {"batch_size": 2},
    "outer": {"recipe": "diloco", "schedule": {"local_steps": 5, "warm_start_steps": 0}},
    "train": {"eval_batches": 1, "workers": 2},
}
Unlike = Callable[[Path], Callable[[], float]]  # makes a worker unlike the others; returns its clock


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(RUN | {"train": RUN["train"] | {"run_dir": str(tmp_path / "run")}}))
    return path


def examine(
    config: Path,
    engine: str,
    *overrides: str,
    workers: int = 2,
    seconds: float = 20,
    unlike: Unlike | None = None,
    unlike_overrides: tuple[str, ...] = (),
) -> list[tuple[int, str]]:
    """Exit code and output of all workers that end; the last one is perhaps unlike the others."""
    options = {"type": engine, "sync_budget_seconds": seconds}
    options |= {"grace_seconds": 1.0} if engine != "torch_dist" else {"backend": "gloo"}
    common = [f"outer.transport={yaml.safe_dump(options, default_flow_style=True).strip()}", *overrides]
    loaded = load_config(config, common)
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(loaded.train.workers)}
    with transport_class(loaded).serve(loaded.outer.transport, config.parent) as served:
        named = [f"outer.transport.{name}={yaml.safe_dump(value).strip()}" for name, value in served.items()]
        results = CONTEXT.Queue()
        processes = []
        for rank in range(workers):
            last = rank == workers - 1
            own = [*common, *named, *(unlike_overrides if last else ())]
            arguments = (results, config, world | {"RANK": str(rank)}, own, unlike if last else None)
            processes.append(CONTEXT.Process(target=work, args=arguments))
            processes[-1].start()
        found = dict(results.get(timeout=90) for _ in range(workers - (unlike is stopping)))
        for process in processes:
            process.kill()
            process.join()
    return [found[rank] for rank in sorted(found)]


def work(results: Any, config: Path, world: dict[str, str], overrides: list[str], unlike: Unlike | None) -> None:
    torch.set_num_threads(1)
    os.environ.update(world)
    console = Console(file=io.StringIO(), width=1000, highlight=False)
    code = doctor(load_config(config, overrides), console, unlike(config.parent) if unlike else time.time)
    results.put((int(world["RANK"]), (code, console.file.getvalue())))


def of_another_version(folder: Path) -> Callable[[], float]:
    """Another isthmus and another torch are installed where this worker is."""
    for name, module in list(sys.modules.items()):
        if name.startswith("isthmus.") and hasattr(module, "__version__"):
            module.__version__ = "9.9"
    torch.__version__ = "2.9.9"
    return time.time


def stopping(folder: Path) -> Callable[[], float]:
    """A worker that has joined, and stops in the middle of what all do together."""

    def clock() -> float:
        os.kill(os.getpid(), signal.SIGSTOP)
        return time.time()

    return clock


def five_minutes_ahead(folder: Path) -> Callable[[], float]:
    return lambda: time.time() + 300


def rows(text: str, check: str) -> list[str]:
    """The rows of one check, single spaces between their words; several where workers found different things."""
    return [" ".join(row.split()) for row in text.splitlines() if row.strip().startswith(check)]


def row(text: str, check: str) -> str:
    """The row of a check of which all workers found the same."""
    (found,) = rows(text, check)
    return found


def links(text: str) -> dict[str, str]:
    """The rows of the links' table: what stands behind "worker-0 and worker-1", single spaces between."""
    rows = [" ".join(line.split()) for line in text.splitlines()]
    found = [re.fullmatch(r"(worker-\d (?:and|to) worker-\d) (.*)", line) for line in rows]
    return {match[1]: match[2] for match in found if match}


@pytest.mark.processes
@pytest.mark.parametrize("engine", ENGINES)
def test_two_healthy_workers(config: Path, engine: str) -> None:
    (code, text), (other_code, _) = examine(config, engine)
    assert (code, other_code) == (0, 0), text
    assert text.rstrip().endswith("all is well")
    free = rows(text, "disk")  # two rows where a file was written between the looks of the two workers
    assert free
    assert all(" ok " in found for found in free)
    own = ("run folder", "data", "host name", "rendezvous", "TCP")
    for check in (*own, "configuration", "clocks", "links", "sync", "pace"):
        assert " ok " in row(text, check)
    assert "all 2 are here and answer" in row(text, "workers")
    for measured in links(text).values():  # 4 connections where a busy machine took its time for the first round trip
        assert re.fullmatch(r"[\d.]+ ms [\d.]+ [MG]bit/s [14] [\d.]+ [MG]bit/s", measured), text
    assert links(text)
    assert [line.split()[:2] for line in text.splitlines()[-6:-2]] == [
        ["10", "ms"],
        ["100", "ms"],
        ["1", "s"],
        ["10", "s"],
    ]
    assert (" ok " in row(text, "samples")) if engine != "torch_dist" else ("samples" not in text)


@pytest.mark.processes
@pytest.mark.parametrize("engine", ENGINES)
def test_a_worker_of_another_version_is_named(config: Path, engine: str) -> None:
    results = examine(config, engine, unlike=of_another_version)
    for code, text in results:
        assert code == 2, text
        differ = f"workers differ in version: worker-0 has {__version__}, worker-1 has 9.9 install the same"
        assert row(text, "isthmus").startswith(f"isthmus all fail {differ}")
        assert f"torch: worker-0 has {torch.__version__}, worker-1 has 2.9.9" in row(text, "versions")
        assert " warn " in row(text, "versions")
        assert "1 to change before this run can go well, 1 to look at" in text


@pytest.mark.processes
@pytest.mark.parametrize("engine", ENGINES)
def test_a_worker_that_stops_is_named(config: Path, engine: str) -> None:
    begin = time.monotonic()
    ((code, text),) = examine(config, engine, seconds=3, unlike=stopping)
    assert code == 1, text
    found = row(text, "workers")
    assert found.startswith("workers worker-0 fail"), text
    assert ("worker 1" in found) or ("worker-1" in found), text
    assert time.monotonic() - begin < 60


@pytest.mark.processes
@pytest.mark.parametrize("engine", ENGINES)
def test_a_worker_that_does_not_come(config: Path, engine: str) -> None:
    ((code, text),) = examine(config, engine, workers=1, seconds=0.5 if engine != "hivemind" else 1.0)
    assert code == 1, text
    expected = {
        "torch_dist": "worker 1 did not join within 5 s",
        "torchft": "not all came within 5.5 s: waiting: 1 of at least 2 workers are here (worker-0)",
        "hivemind": "not all came within 11 s: waiting: 1 of at least 2 workers are here (worker-0)",
    }
    assert expected[engine] in row(text, "workers"), text
    assert " ok " in row(text, "data")  # what this worker found alone is told all the same


@pytest.mark.processes
def test_of_three_workers_each_is_measured_and_what_one_of_them_has_alone_is_told_to_all(
    config: Path, tmp_path: Path
) -> None:
    """The last one has another configuration, other data, a clock ahead and a run folder that cannot be written."""
    (tmp_path / "file").touch()
    folder, source = tmp_path / "file" / "run", ROOT / "src/isthmus/compress"
    unlike_overrides = ("inner.batch_size=3", f"data.source={source}", f"train.run_dir={folder}")
    options = {"workers": 3, "unlike": five_minutes_ahead, "unlike_overrides": unlike_overrides}
    results = examine(config, "torchft", "train.workers=3", **options)
    assert [code for code, _ in results] == [2, 2, 2]
    for _, text in results:
        pairs = {frozenset(re.split(" and | to ", link)) for link in links(text)}
        assert pairs == {frozenset({f"worker-{a}", f"worker-{b}"}) for a, b in ((0, 1), (0, 2), (1, 2))}
        assert "in inner.batch_size: worker-0, worker-1 have 2, worker-2 has 3" in row(text, "configuration")
        assert row(text, "samples").startswith("samples all fail workers differ in fingerprint")
        assert "clocks all fail worker-2 is 300.0 s ahead of worker-" in row(text, "clocks")
        (unwritable,) = [line for line in text.splitlines() if "Not a directory" in line and "run folder" in line]
        assert f"worker-2 fail {folder}: Not a directory" in " ".join(unwritable.split())


def test_a_lighthouse_that_is_not_there(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    port, console = free_port(), Console(file=io.StringIO(), width=1000)
    transport = f"{{type: torchft, lighthouse: '127.0.0.1:{port}', sync_budget_seconds: 1}}"
    assert doctor(load_config(config, [f"outer.transport={transport}"]), console) == 1
    assert f"no lighthouse answers at 127.0.0.1, port {port}" in console.file.getvalue()


def test_a_port_in_use_and_a_name_without_address(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        advice = {"127.0.0.1": "set MASTER_PORT to a free one", "no-such-host.invalid": "correct MASTER_ADDR"}
        for address, message in advice.items():
            monkeypatch.setenv("MASTER_ADDR", address)
            console = Console(file=io.StringIO(), width=1000)
            assert doctor(load_config(config), console) == 1
            assert message in row(console.file.getvalue(), "rendezvous")


def test_one_worker_alone(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    result = CliRunner().invoke(app, ["doctor", str(config), "--set", "train.workers=1"])
    assert result.exit_code == 0
    assert "all is well" in result.output


@pytest.mark.processes
def test_workers_on_this_machine_are_started_as_the_launcher_does(config: Path) -> None:
    code, out, err = finish(
        Program("doctor", config, "--workers", 2, "--step-seconds", 0.5, "--set", "outer.transport.type=hivemind")
    )
    assert code == 0, out + err
    assert out.rstrip().endswith("all is well")
    assert "every 5 inner steps: 0." in row(out, "pace")
    assert "500 ms" in out
