"""Train under faults over each engine, and twice without, and say what the faults cost (about 50 minutes, as root).

    python -m benchmarks.chaos --faults torchft=100 hivemind=50

Four workers on machines of their own (network namespaces, cables of 100 Mbit/s, small disks). One that dies is started
again at once. All along every state that two workers reached by a commit must be one: same commits, same anchors, same
ledger.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.chaos.diaries import BIN_STEPS, Diaries, as_rows, largest_rise, usual_stall
from benchmarks.chaos.faults import PAUSE_SECONDS, strike
from benchmarks.chaos.world import World
from benchmarks.results import write

OUTPUT = Path("runs/chaos").absolute()
SETTLE_SECONDS = 20.0
COLUMNS = ["engine", "fault", "times", "survivors stall, s", "until the victim trains, s", "until it commits, s"]


def run(arguments: argparse.Namespace, engine: str, name: str, num_faults: int) -> dict[str, Any]:
    """One run with faults, or undisturbed for some time; what its diaries say."""
    folder = OUTPUT / f"{engine}-{name}"
    with World(engine, folder, ranks=arguments.ranks, round_trip_ms=arguments.rtt_ms) as world:
        world.wait_for_all()
        time.sleep(SETTLE_SECONDS)
        begin = time.time()
        faults = strike(world, num_faults, arguments.seed, arguments.pause_seconds) if num_faults else []
        time.sleep(SETTLE_SECONDS if num_faults else arguments.undisturbed_seconds)
        world.wait_for_all()
        end = time.time()
        time.sleep(SETTLE_SECONDS)
    diaries = Diaries(folder, world.num_workers)
    return {
        "engine": engine,
        "seconds": end - begin,
        "goodput": diaries.goodput(begin, end),
        "costs": diaries.costs(faults, end),
        "losses": diaries.losses(),
        "usual_stall": usual_stall(diaries, 10.0) if not faults else None,
        "restarts": world.num_restarts,
        **diaries.check(),
        **diaries.count(),
    }


def describe(disturbed: dict[str, Any], calm: list[dict[str, Any]]) -> list[str]:
    """Lines about one engine."""
    trained, minutes = disturbed["trained"] * 8, disturbed["seconds"] / 60
    goodput = statistics.mean(run["goodput"] for run in calm)
    lines = [
        f"{len(disturbed['costs'])} faults in {minutes:.0f} minutes, {disturbed['restarts']} restarts; "
        f"{disturbed['versions']} commits, {disturbed['refused']} refused syncs (counted per worker)",
        f"{disturbed['compared']} versions reached by several workers: equal chains, anchors and ledgers in all; "
        f"{disturbed['lost']} lost with all who had them, who were killed at the same time",
        f"goodput {disturbed['goodput']:.0f} committed samples a second, {goodput:.0f} undisturbed "
        f"({100 * disturbed['goodput'] / goodput:.0f} %); of {trained} samples trained "
        f"{100 * (1 - disturbed['samples'] / trained):.1f} % did not come to count",
        f"undisturbed, the longest time without a step in 10 s is {calm[0]['usual_stall']:.1f} s (median)",
        *compare_losses(disturbed, calm),
    ]
    return [f"{disturbed['engine']}: {line}" for line in lines]


def compare_losses(disturbed: dict[str, Any], calm: list[dict[str, Any]]) -> list[str]:
    """Return lines about training losses, with and without faults."""
    common = sorted(set.intersection(*(set(run["losses"]) for run in [disturbed, *calm])))[1:]
    if not common:
        return [f"training loss: not compared, as no run came past {BIN_STEPS} steps undisturbed"]
    bands = [sorted(run["losses"][start] for run in calm) for start in common]
    above = [disturbed["losses"][start] - band[-1] for start, band in zip(common, bands, strict=True)]
    width = max(band[-1] - band[0] for band in bands)
    rises = [largest_rise(run["losses"]) for run in [disturbed, *calm]]
    return [
        f"training loss by bins of {BIN_STEPS} steps, up to step {common[-1]}: at most {max(above):+.3f} above the "
        f"higher of two undisturbed runs, {statistics.mean(above):+.3f} in the mean; those differ by up to {width:.3f}",
        f"spikes: the largest rise of the loss above what it had come down to is {rises[0]:.3f} in all "
        f"{len(disturbed['losses'])} bins, {rises[1]:.3f} and {rises[2]:.3f} undisturbed "
        f"({len(calm[0]['losses'])} and {len(calm[1]['losses'])} bins)",
    ]


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Losses of all runs."""
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for result in results:
        label = (
            f"{result['engine']}, {len(result['costs'])} faults"
            if result["costs"]
            else f"{result['engine']}, undisturbed"
        )
        axes.plot(
            list(result["losses"]),
            list(result["losses"].values()),
            label=label,
            linestyle="-" if result["costs"] else ":",
        )
    axes.set(xlabel="steps of the run", ylabel=f"training loss, mean over workers and {BIN_STEPS} steps")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run, check, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", nargs="+", default=["torchft=100", "hivemind=50"], metavar="ENGINE=NUMBER")
    parser.add_argument("--undisturbed-seconds", type=float, default=180)
    parser.add_argument("--ranks", type=int, default=1, help="of each worker, by FSDP2")
    parser.add_argument("--rtt-ms", type=float, default=0, help="round-trip time between two machines")
    parser.add_argument("--pause-seconds", type=float, default=PAUSE_SECONDS, help="between two faults, in the mean")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    results, rows, notes = [], [], []
    for engine, number in (part.split("=") for part in arguments.faults):
        calm = [run(arguments, engine, f"undisturbed-{n}", 0) for n in range(2)]
        disturbed = run(arguments, engine, "faults", int(number))
        results += [*calm, disturbed]
        rows += [[engine, *row] for row in as_rows(disturbed["costs"])]
        notes += describe(disturbed, calm)
    if arguments.ranks > 1:
        notes.append(f"every worker has {arguments.ranks} ranks; a signal strikes one of them, and its worker goes")
    notes.append(
        f"seconds: median / largest; seed {arguments.seed}; SIGSTOP, pulled cables and full disks last 2 to 8 s"
    )
    data = [result | {"costs": [asdict(cost) for cost in result["costs"]]} for result in results]
    if arguments.rtt_ms:
        notes.append(f"{arguments.rtt_ms:g} ms from machine to machine and back, 100 Mbit/s")
    parts = {
        f"{arguments.ranks}-ranks": arguments.ranks > 1,
        "distant": arguments.rtt_ms > 0,
        "often": arguments.pause_seconds < PAUSE_SECONDS,
    }
    engines = dict.fromkeys(result["engine"] for result in results)
    name = "-".join(["chaos", *(part for part, holds in parts.items() if holds), *engines])
    path = write(name, "Faults at random moments", COLUMNS, rows, notes, data)
    plot(results, path.with_suffix(".png"))
    print(path.read_text())


if __name__ == "__main__":
    main()
