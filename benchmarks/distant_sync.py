"""Seconds of one sync between hosts with a round-trip time: what workers wait where nothing hides it.

Two or more hosts of `benchmarks/netlab`, one worker on each, 15.7M parameters, every recipe with H = 10 and no overlap.
Between syncs the parameters are only moved a little, so the link idles as while others compute:

    python -m benchmarks.distant_sync [--hosts 2] [--links 500x100x0.1] [--write NAME] [recipe ...]

Beside it stands what the model of the links says of the same collectives (`transport/link_model.py`). `--reread` models
what an earlier result measured.

With `--elastic` take recipes of one fragment: workers there take as many steps as they are fast, so that a step may end
the syncs of several fragments.

Where there are fewer cores than hosts, their work is what is measured; netlab needs root and iproute2.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.network import NETLAB, netlab
from benchmarks.results import write
from isthmus.recipes import RECIPES
from isthmus.recipes.base import Plan
from isthmus.transport.link_model import Collective, LinkModel
from isthmus.transport.local import Local, LocalWorld, run_workers
from isthmus.transport.torch_dist import TorchDist
from isthmus.transport.torchft.lighthouse import lighthouse
from isthmus.transport.torchft.transport import TorchFTTransport

NAMES = ("diloco", "opendiloco", "streaming", "sparseloco", "muloco", "dilocox")
LINKS = ((500, 2), (500, 100), (100, 300), (1000, 20))  # Mbit/s, ms
LIGHTHOUSE = "10.77.0.10:29510"
WIDTH, DEPTH = 512, 60  # of square matrices: 15.7M parameters
IDLE_SECONDS, WARM_UP, ROUNDS = 0.5, 2, 5
COLUMNS = ("link", "recipe", "MB sent", "link alone, s", "sync, s", "processor, s", "modelled, s", "rest / processor")


class Subject:
    """One worker's model and outer loop, which syncs a fragment at every step."""

    def __init__(self, name: str, transport: Any, num_workers: int, rank: int) -> None:
        self.model = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))
        equal = torch.Generator().manual_seed(0)  # on all workers, also where these are threads
        for param in self.model.parameters():
            nn.init.normal_(param, std=WIDTH**-0.5, generator=equal)
        recipe = RECIPES.get(name)(
            Plan(num_workers, steps=100_000, local_steps=10)
        )  # a long run, whose syncs send least
        self.num_fragments = recipe.schedule.num_fragments
        schedule = replace(recipe.schedule, local_steps=self.num_fragments, overlap_steps=0, warm_start_steps=0)
        self.loop = replace(recipe, schedule=schedule).outer_loop(self.model, transport)
        generator = torch.Generator().manual_seed(rank)
        self._noise = [0.01 * torch.randn(param.shape, generator=generator) for param in self.model.parameters()]

    def move(self, number: int) -> None:
        """Move the parameters a little, there and back."""
        with torch.no_grad():
            torch._foreach_add_(list(self.model.parameters()), self._noise, alpha=(-1) ** number)


def measure(name: str, num_workers: int, is_elastic: bool) -> None:
    """Sync as one of the workers, and print the seconds of every sync, its bytes and its processor time."""
    torch.set_num_threads(1)
    start_line = TorchDist(120.0)
    with ExitStack() as stack:
        if is_elastic:
            start_line.join(None)
            if start_line.rank == 0:
                stack.enter_context(lighthouse(LIGHTHOUSE, min_workers=num_workers))
            os.environ["ISTHMUS_WORKER"] = str(start_line.rank)
        transport = TorchFTTransport(LIGHTHOUSE, expected_workers=num_workers) if is_elastic else start_line
        measure_syncs(Subject(name, transport, num_workers, int(os.environ["RANK"])), start_line)


def measure_syncs(subject: Subject, start_line: TorchDist) -> None:
    """Print the figures of every sync; all begin it together."""
    loop, fragments = subject.loop, subject.num_fragments
    for number in range((WARM_UP + ROUNDS) * fragments):
        time.sleep(IDLE_SECONDS / fragments)
        subject.move(number)
        start_line.commit(start_line.quorum(0), True)
        start, busy = time.perf_counter(), time.process_time()
        (report,) = loop.step()
        seconds = time.perf_counter() - start
        assert report.committed, report.reason
        if number >= WARM_UP * fragments:
            print(json.dumps([seconds, time.process_time() - busy, report.sent_bytes]), flush=True)
    loop.close()


@cache
def traffic(name: str, num_workers: int) -> list[list[Collective]]:
    """Return the collectives of a sync of each fragment, as the same workers make them on threads of this process."""
    world = LocalWorld(num_workers)
    syncs: list[list[Collective]] = []

    def work(rank: int, transport: Local) -> None:
        subject = Subject(name, transport, num_workers, rank)
        for number in range(subject.num_fragments):
            if rank == 0:
                world.recorded = []
                syncs.append(world.recorded)
            subject.move(number)
            subject.loop.step()
        subject.loop.close()

    run_workers(world, work)
    return syncs


def modelled_seconds(name: str, num_workers: int, link: str) -> float:
    """Return the seconds of a sync on the model of this link (500x100), without the workers' own work."""
    links = LinkModel.even(num_workers, *map(float, link.split("x")[:2]))
    return statistics.median(sum(map(links.seconds, sync)) for sync in traffic(name, num_workers))


def on_hosts(name: str, num_hosts: int, is_elastic: bool) -> tuple[float, float, float]:
    """Return the median seconds of a sync, processor seconds, and megabytes sent, on hosts that are up."""
    environment = os.environ | {"MASTER_ADDR": "10.77.0.10", "MASTER_PORT": "29555", "WORLD_SIZE": str(num_hosts)}
    command = [sys.executable, "-m", "benchmarks.distant_sync", "--worker", name, "--hosts", str(num_hosts)]
    command += ["--elastic"] if is_elastic else []
    workers = [
        subprocess.Popen(
            [NETLAB, "exec", str(host), "taskset", "-c", str(host % os.cpu_count()), *command],
            env=environment | {"RANK": str(host)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for host in range(num_hosts)
    ]
    outputs = [worker.communicate(timeout=300)[0] for worker in workers]
    rows = [json.loads(line) for line in outputs[0].splitlines()]
    seconds, busy, sent = zip(*rows, strict=True)
    return statistics.median(seconds), statistics.median(busy), statistics.median(sent) / 1e6


def make_row(link: str, name: str, num_hosts: int, megabytes: float, seconds: float, busy: float) -> list[str]:
    """Return a row of the table."""
    rate, rtt, *lost = map(float, link.split("x"))
    way = f"{rate:g} Mbit/s, {rtt:g} ms" + "".join(f", {percent:g} % lost" for percent in lost)
    alone, modelled = megabytes * 8 / rate + rtt / 2000, modelled_seconds(name, num_hosts, link)
    figures = (megabytes, alone, seconds, busy, modelled, (seconds - modelled) / busy)
    return [way, name, *(f"{figure:.2f}" for figure in figures)]


def reread(path: Path, num_hosts: int) -> list[list[str]]:
    """Return the rows of an earlier result with what is modelled now."""
    rows = []
    for way, name, megabytes, _, seconds, busy, *_ in json.loads(path.read_text())["results"]:
        link = way.removesuffix(" % lost").replace(" ms, ", "x").removesuffix(" ms").replace(" Mbit/s, ", "x")
        rows.append(make_row(link, name, num_hosts, float(megabytes), float(seconds), float(busy)))
    return rows


def main() -> None:
    """Measure the recipes on all links, or model what an earlier result measured."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--links", default=",".join(f"{rate}x{rtt}" for rate, rtt in LINKS))
    parser.add_argument("--elastic", action="store_true", help="over torchft, its lighthouse on the first host")
    parser.add_argument("--worker", action="store_true")
    parser.add_argument("--write", metavar="NAME", help="write a dated result of this name")
    parser.add_argument("--reread", type=Path, metavar="RESULT.json")
    options = parser.parse_args()
    if options.worker:
        measure(options.names[0], options.hosts, options.elastic)
        return
    print("  ".join(COLUMNS))
    if options.reread:
        for row in reread(options.reread, options.hosts):
            print("  ".join(row))
        return
    rows = []
    for link in options.links.split(","):
        netlab("up", str(options.hosts), *link.split("x"))
        try:
            for name in options.names:
                seconds, busy, megabytes = on_hosts(name, options.hosts, options.elastic)
                rows.append(make_row(link, name, options.hosts, megabytes, seconds, busy))
                print("  ".join(rows[-1]), flush=True)
        finally:
            netlab("down")
    if options.write:
        notes = [
            f"{options.hosts} hosts of benchmarks/netlab and the network's switch share the cores of this machine",
            f"medians of {ROUNDS} syncs behind {WARM_UP}; {IDLE_SECONDS:g} s of idleness before each",
            "link alone: all bytes at the link's rate, and one way across",
            "modelled: the collectives of the sync on the model of this link, which knows nothing of the workers' work",
            "rest: what was measured beyond the model, over the processor time of the sync. Up to 1 it is that work, "
            "as far as it does not go on beside the sending; what is more waited for a core that the switch had",
        ]
        if options.elastic:
            notes.append("over torchft, its lighthouse on the first host; the model is that of a static world")
        write(options.write, "One sync at a distance", list(COLUMNS), rows, notes, rows)


if __name__ == "__main__":
    main()
