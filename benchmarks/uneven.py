"""Four hosts, one with a fifth of the others' bandwidth: what it costs the recipes, what two shots could gain (root).

    python -m benchmarks.uneven [--repeats 3]

In two-shot averaging every worker sums up an equal part. One of share w sends 1 - w messages and receives (M - 1) w in
the first shot, and the other way round in the second; as links work in both directions at once, the slow one needs
2 max(1 - w, (M - 1) w) message times: least for equal parts. The table has what is measured, and the recipes.
Four workers share the machine's cores, so what counts is a recipe's speed against that of workers who send nothing, in
the same turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.results import write
from benchmarks.wan.hosts import launch
from isthmus.transport.torch_dist import TorchDist

OUTPUT = Path("runs/uneven").absolute()
MBIT = 10.0  # a float32 all-reduce takes about 4 s
SLOW = 5
HOSTS = 4
H, STEPS = 50, 150
NOTHING = "nothing sent"
RECIPES = {
    NOTHING: ["outer.recipe=diloco"],
    "diloco": ["outer.recipe=diloco"],
    "streaming": ["outer.recipe=streaming", "outer.schedule.overlap_steps=20"],
    "dilocox": ["outer.recipe=dilocox"],
    "sparseloco": ["outer.recipe=sparseloco"],
}
MESSAGE_BYTES = 430_000  # of wan.yaml's model in 4 bits
TURNS = 15
LINKS = {"even": [MBIT] * HOSTS, "uneven": [*[MBIT] * (HOSTS - 1), MBIT / SLOW]}
SHARES = {
    "equal parts": [1 / HOSTS] * HOSTS,
    "parts by bandwidth": [mbit / sum(LINKS["uneven"]) for mbit in LINKS["uneven"]],
    "no part for the slow one": [*[1 / (HOSTS - 1)] * (HOSTS - 1), 0.0],
}


def step_seconds(name: str, link: str, number: int) -> float:
    """Of one run of a recipe, from its first sync on."""
    sets = [f"train.steps={STEPS}", f"train.workers={HOSTS}", f"outer.schedule.local_steps={H}", *RECIPES[name]]
    command = ["nothing" if name == NOTHING else "ours", str(H), *sets]
    folder = OUTPUT / f"{link}-{name.replace(' ', '-')}-{number}"
    workers = launch(folder, LINKS[link], lambda result: ["benchmarks.wan.worker", str(result), *command])
    ends = [worker["marks"] for worker in workers]
    seconds = max((marks[-1]["seconds"] - marks[0]["seconds"]) / (STEPS - H) for marks in ends)
    print(f"{link:7} {name:12} {1e3 * seconds:.1f} ms a step", flush=True)
    return seconds


def two_shots(shares: str, link: str) -> dict[str, Any]:
    """Seconds of two shots with parts of these shares."""
    folder = OUTPUT / f"{link}-{shares.replace(' ', '-')}"
    command = ["benchmarks.uneven", "--worker"]
    workers = launch(folder, LINKS[link], lambda result: [*command, str(result), json.dumps(SHARES[shares])])
    seconds = statistics.median(max(turn) for turn in zip(*workers, strict=True))
    print(f"{link:7} {shares:25} {seconds:.2f} s", flush=True)
    return {"link": link, "what": shares, "seconds": seconds}


def be_worker(result: Path, shares: list[float]) -> None:
    """Average `TURNS` times; write the seconds of each."""
    transport = TorchDist()
    transport.join(None)
    peers = transport.quorum(0)
    parts = [[torch.zeros(round(MESSAGE_BYTES * share), dtype=torch.uint8)] for share in shares]
    largest = torch.zeros(round(MESSAGE_BYTES * max(shares)), dtype=torch.uint8)
    seconds = []
    for _ in range(TURNS):
        peers.all_gather([torch.zeros(1)])  # all begin at once
        begin = time.perf_counter()
        peers.all_to_all(parts)
        peers.all_gather([largest])
        seconds.append(time.perf_counter() - begin)
    result.write_text(json.dumps(seconds))
    transport.leave()


def main() -> None:
    """Measure, write."""
    if sys.argv[1:2] == ["--worker"]:
        be_worker(Path(sys.argv[2]), json.loads(sys.argv[3]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each recipe; the table has their median")
    repeats = parser.parse_args().repeats
    shots = [two_shots(shares, link) for link in LINKS for shares in SHARES]
    rows = [[shot["what"], shot["link"], f"{shot['seconds']:.2f} s", ""] for shot in shots]
    turns = [{(name, link): step_seconds(name, link, number) for link in LINKS for name in RECIPES}
             for number in range(repeats)]  # fmt: skip
    runs = []
    for name in RECIPES:
        for link in LINKS:
            seconds = [turn[name, link] for turn in turns]
            shares = sorted(100 * turn[NOTHING, link] / turn[name, link] for turn in turns)
            runs.append({"link": link, "what": name, "step_seconds": seconds, "shares": shares})
            speed = f"{statistics.median(shares):.1f} % ({shares[0]:.1f} to {shares[-1]:.1f})"
            rows.append([name, link, f"{statistics.median(seconds) * H:.2f} s", speed])
    notes = [
        f"{HOSTS} workers on network namespaces, {MBIT:g} Mbit/s each, in `uneven` one {MBIT / SLOW:g} Mbit/s",
        f"two shots: {MESSAGE_BYTES / 1e6:.2f} MB over the link, the slowest worker, median of {TURNS}",
        f"recipes: benchmarks/wan/wan.yaml, seconds of H = {H} steps, median of {repeats} runs; speed: against workers "
        "who send nothing, in the same turn, median and range",
    ]
    columns = ["what", "links", "seconds", "speed"]
    print(write("uneven", "One slow link among four", columns, rows, notes, [*shots, *runs]).read_text())


if __name__ == "__main__":
    main()
