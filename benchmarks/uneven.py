"""Four hosts, one with a fifth of the others' bandwidth: what it costs the recipes, what two shots could gain (root).

    python -m benchmarks.uneven

In two-shot averaging every worker sums up an equal part. One of share w sends 1 - w messages and receives (M - 1) w in
the first shot, and the other way round in the second; as links work in both directions at once, the slow one needs
2 max(1 - w, (M - 1) w) message times: least for equal parts. The table has gloo's figures for this, and the recipes'.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from benchmarks.results import write
from benchmarks.wan.hosts import launch

OUTPUT = Path("runs/uneven").absolute()
MBIT = 10.0  # a float32 all-reduce takes about 4 s
SLOW = 5
HOSTS = 4
H, STEPS = 50, 200
RECIPES = {
    "diloco": ["outer.recipe=diloco"],
    "streaming": ["outer.recipe=streaming", "outer.schedule.overlap_steps=20"],
    "dilocox": ["outer.recipe=dilocox"],
    "sparseloco": ["outer.recipe=sparseloco"],
}
MESSAGE_BYTES = 430_000  # of wan.yaml's model in 4 bits
TURNS = 5
LINKS = {"even": [MBIT] * HOSTS, "uneven": [*[MBIT] * (HOSTS - 1), MBIT / SLOW]}
SHARES = {"equal parts": [1 / HOSTS] * HOSTS, "no part for the slow one": [*[1 / (HOSTS - 1)] * (HOSTS - 1), 0.0]}


def recipe(name: str, link: str) -> dict[str, Any]:
    """A run of a recipe."""
    sets = [f"train.steps={STEPS}", f"train.workers={HOSTS}", f"outer.schedule.local_steps={H}", *RECIPES[name]]
    command = ["ours", str(H), *sets]
    workers = launch(
        OUTPUT / f"{link}-{name}", LINKS[link], lambda result: ["benchmarks.wan.worker", str(result), *command]
    )
    marks = workers[0]["marks"]
    per_step = (marks[-1]["seconds"] - marks[0]["seconds"]) / (marks[-1]["step"] - marks[0]["step"])
    ceiling = max(sum(worker["step_seconds"]) / 2 for worker in workers)
    print(f"{link:7} {name:12} {100 * ceiling / per_step:.1f} %", flush=True)
    return {"link": link, "what": name, "utilisation": ceiling / per_step, "step_seconds": per_step}


def two_shots(shares: str, link: str) -> dict[str, Any]:
    """Seconds of two shots with parts of these shares."""
    folder = OUTPUT / f"{link}-{shares.replace(' ', '-')}"
    command = ["benchmarks.uneven", "--worker"]
    workers = launch(folder, LINKS[link], lambda result: [*command, str(result), json.dumps(SHARES[shares])])
    seconds = min(max(turn) for turn in zip(*workers, strict=True))
    print(f"{link:7} {shares:25} {seconds:.2f} s", flush=True)
    return {"link": link, "what": shares, "seconds": seconds}


def be_worker(result: Path, shares: list[float]) -> None:
    """Average `TURNS` times; write the seconds of each."""
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = [round(MESSAGE_BYTES * share) for share in shares]
    message = torch.zeros(sum(parts), dtype=torch.uint8)
    received = torch.empty(size * parts[rank], dtype=torch.uint8)
    seconds = []
    for _ in range(TURNS):
        dist.barrier()
        begin = time.perf_counter()
        dist.all_to_all_single(received, message, [parts[rank]] * size, parts)
        mean = received[: parts[rank]].repeat(size)
        dist.all_to_all_single(message, mean, parts, [parts[rank]] * size)
        seconds.append(time.perf_counter() - begin)
    result.write_text(json.dumps(seconds))
    os._exit(0)


def main() -> None:
    """Measure, write."""
    if sys.argv[1:2] == ["--worker"]:
        be_worker(Path(sys.argv[2]), json.loads(sys.argv[3]))
    shots = [two_shots(shares, link) for link in LINKS for shares in SHARES]
    runs = [recipe(name, link) for name in RECIPES for link in LINKS]
    rows = [[shot["what"], shot["link"], f"{shot['seconds']:.2f} s", ""] for shot in shots]
    rows += [[run["what"], run["link"], f"{run['step_seconds'] * H:.2f} s", f"{100 * run['utilisation']:.1f} %"]
             for run in runs]  # fmt: skip
    notes = [
        f"{HOSTS} workers on network namespaces, {MBIT:g} Mbit/s each, in `uneven` one {MBIT / SLOW:g} Mbit/s",
        f"two shots: {MESSAGE_BYTES / 1e6:.2f} MB, gloo's all-to-all twice, the best of {TURNS}, its slowest worker",
        f"recipes: benchmarks/wan/wan.yaml, H = {H}; utilisation: against inner steps alone in the same process",
    ]
    path = write(
        "uneven", "One slow link among four", ["what", "links", "seconds", "utilisation"], rows, notes, [*shots, *runs]
    )
    print(path.read_text())


if __name__ == "__main__":
    main()
