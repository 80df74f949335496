"""Descriptors, threads and memory of workers over many syncs, while another one comes and goes.

Two workers sync after every inner step over torchft, on this machine; a third joins, catches up, takes part in a few
syncs and leaves, again and again, in one process: so all three show what a sync or a regrouping leaves behind.

    python -m benchmarks.steady [--syncs 10000] [--visits 150] [--write]
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

from benchmarks.results import write
from isthmus import attach
from isthmus.transport.torchft.lighthouse import lighthouse

WARM_UP, MARKS, SYNCS_PER_VISIT = 0.1, 10, 3
_LIFETIME_STEPS = 10_000_000


def figures() -> list[float]:
    """Return this process's descriptors, threads of any kind, and megabytes that are in use."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # glibc keeps what is freed, for each thread that has been
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return [
        len(os.listdir("/proc/self/fd")),
        len(os.listdir("/proc/self/task")),
        pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
    ]


def join(port: int) -> tuple[nn.Module, object]:
    """Return a small model and its outer loop."""
    torch.manual_seed(0)
    model = nn.Linear(200, 200)
    options = {"type": "torchft", "lighthouse": f"127.0.0.1:{port}", "min_workers": 1, "sync_budget_seconds": 20.0}
    return model, attach(
        "diloco", model, steps=_LIFETIME_STEPS, local_steps=1, warm_start_steps=0, transport=options, num_workers=2
    )


def sync(model: nn.Module, loop: object) -> int:
    """Take an inner step and sync; return the number of workers in it, 0 where it did not commit."""
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param), alpha=1e-6)
    reports = loop.step()
    return max((report.num_peers for report in reports if report.committed), default=0)


def stay(port: int, num_syncs: int, folder: Path) -> list[list[float]]:
    """Sync so often, and until the visitor has gone for good."""
    model, loop = join(port)
    marks, done, regroupings, before = [], 0, 0, 0
    while done < num_syncs or not (folder / "visited").exists():
        num_peers = sync(model, loop)
        done += num_peers > 0
        regroupings += num_peers not in (before, 0)
        before = num_peers or before
        if num_peers and done % (num_syncs // MARKS) == 0:
            marks.append([done, regroupings, *figures()])
            print(marks[-1], flush=True)
    loop.close()
    return marks


def visit(port: int, num_visits: int) -> list[list[float]]:
    """Join, sync, leave, so often."""
    marks = []
    for number in range(1, num_visits + 1):
        model, loop = join(port)
        done = 0
        while done < SYNCS_PER_VISIT:
            done += sync(model, loop) > 1
        loop.close()
        if number % max(1, num_visits // MARKS) == 0:
            marks.append([number * SYNCS_PER_VISIT, 2 * number, *figures()])
            print(marks[-1], flush=True)
    return marks


def main() -> None:
    """Run the three workers, and say what grew."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--syncs", type=int, default=10_000)
    parser.add_argument("--visits", type=int, default=150)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--worker", nargs=2)
    options = parser.parse_args()
    folder = Path("runs/steady").absolute()
    if options.worker:
        name, port = options.worker[0], int(options.worker[1])
        torch.set_num_threads(1)
        marks = visit(port, options.visits) if name == "visitor" else stay(port, options.syncs, folder)
        (folder / f"{name}.json").write_text(json.dumps(marks))
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "visited").unlink(missing_ok=True)
    names = ["first", "second", "visitor"]
    amounts = ["--syncs", str(options.syncs), "--visits", str(options.visits)]
    with lighthouse("127.0.0.1:0", grace_seconds=5.0) as port:
        command = [sys.executable, "-m", "benchmarks.steady", *amounts, "--worker"]
        workers = {
            name: subprocess.Popen(
                [*command, name, str(port)],
                env=os.environ | {"ISTHMUS_WORKER": str(number)},
                stdout=(folder / f"{name}.log").open("w"),
            )
            for number, name in enumerate(names)
        }
        codes = [workers["visitor"].wait()]
        (folder / "visited").touch()
        codes += [workers[name].wait() for name in names[:2]]
    if any(codes):
        sys.exit(f"workers ended with {codes}: see {folder}")
    rows = []
    for name in names:
        marks = json.loads((folder / f"{name}.json").read_text())
        rows += [[name, *(f"{value:,.0f}" for value in mark)] for mark in (marks[0], marks[len(marks) // 2], marks[-1])]
    for row in rows:
        print("  ".join(row))
    if options.write:
        columns = ["worker", "syncs", "regroupings", "descriptors", "threads", "MB resident"]
        notes = ["the first mark, the middle one and the last of each process; torchft, all on one machine"]
        write("steady", "What many syncs leave behind", columns, rows, notes, rows)


if __name__ == "__main__":
    main()
