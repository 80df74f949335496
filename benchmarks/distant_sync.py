"""Seconds of one sync between hosts with a round-trip time: what workers wait where nothing hides it.

Two or more hosts of `benchmarks/netlab`, one worker on each, 15.7M parameters, every recipe with H = 10 and no overlap.
Between syncs the parameters are only moved a little, so the link idles as while others compute:

    python -m benchmarks.distant_sync [--hosts 2] [--write] [recipe ...]

One core a host is the machine's that many are; netlab needs root and iproute2.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace

import torch
from torch import nn

from benchmarks.network import NETLAB, netlab
from benchmarks.results import write
from isthmus.recipes import RECIPES
from isthmus.recipes.base import Plan
from isthmus.transport.torch_dist import TorchDist

NAMES = ("diloco", "opendiloco", "streaming", "sparseloco", "muloco", "dilocox")
LINKS = ((500, 2), (500, 100), (100, 300), (1000, 20))  # Mbit/s, ms
WIDTH, DEPTH = 512, 60  # of square matrices: 15.7M parameters
IDLE_SECONDS, WARM_UP, ROUNDS = 0.5, 2, 5


def measure(name: str, num_workers: int) -> None:
    """Sync as one of the workers, and print the seconds of every sync, its bytes and its processor time."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))
    recipe = RECIPES.get(name)(Plan(num_workers, 1000, 10))
    fragments = recipe.schedule.num_fragments
    recipe = replace(
        recipe, schedule=replace(recipe.schedule, local_steps=fragments, overlap_steps=0, warm_start_steps=0)
    )
    loop = recipe.outer_loop(model, TorchDist(120.0))
    generator = torch.Generator().manual_seed(loop.transport.rank)
    noise = [0.01 * torch.randn(param.shape, generator=generator) for param in model.parameters()]
    for number in range((WARM_UP + ROUNDS) * fragments):
        time.sleep(IDLE_SECONDS / fragments)
        with torch.no_grad():
            torch._foreach_add_(list(model.parameters()), noise, alpha=(-1) ** number)
        loop.transport.commit(loop.transport.quorum(0), True)  # all begin together
        start, busy = time.perf_counter(), time.process_time()
        (report,) = loop.step()
        seconds = time.perf_counter() - start
        assert report.committed, report.reason
        if number >= WARM_UP * fragments:
            print(json.dumps([seconds, time.process_time() - busy, report.sent_bytes]), flush=True)
    loop.close()


def on_hosts(name: str, num_hosts: int) -> tuple[float, float, float]:
    """Return the median seconds of a sync, processor seconds, and megabytes sent, on hosts that are up."""
    environment = os.environ | {"MASTER_ADDR": "10.77.0.10", "MASTER_PORT": "29555", "WORLD_SIZE": str(num_hosts)}
    command = [sys.executable, "-m", "benchmarks.distant_sync", "--worker", name, "--hosts", str(num_hosts)]
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


def main() -> None:
    """Measure the recipes on all links."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--links", default=",".join(f"{rate}x{rtt}" for rate, rtt in LINKS))
    parser.add_argument("--worker", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    if options.worker:
        measure(options.names[0], options.hosts)
        return
    rows = []
    for link in options.links.split(","):
        rate, rtt = link.split("x")
        netlab("up", str(options.hosts), rate, rtt)
        try:
            for name in options.names:
                seconds, busy, megabytes = on_hosts(name, options.hosts)
                alone = megabytes * 8 / float(rate) + float(rtt) / 2000
                rows.append([f"{rate} Mbit/s, {rtt} ms", name, f"{megabytes:.2f}", f"{alone:.2f}", f"{seconds:.2f}"])
                rows[-1] += [f"{busy:.2f}"]
                print("  ".join(rows[-1]), flush=True)
        finally:
            netlab("down")
    if options.write:
        columns = ["link", "recipe", "MB sent", "link alone, s", "sync, s", "processor, s"]
        notes = [
            f"{options.hosts} hosts of benchmarks/netlab, a core each; the network's switch shares these cores",
            f"medians of {ROUNDS} syncs behind {WARM_UP}; {IDLE_SECONDS:g} s of idleness before each",
            "link alone: all bytes at the link's rate, and one way across",
        ]
        write("distant-sync", "One sync at a distance", columns, rows, notes, rows)


if __name__ == "__main__":
    main()
