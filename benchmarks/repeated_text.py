"""How far methods stay behind `ddp` where a run reads its text again and again, at the 0.9M rung of the ladder.

Each text is a part of the standard library's; what is held out is always the same. What is in runs/ladder already is
not run again:

    python -m benchmarks.repeated_text --seeds 0 1 2
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from benchmarks import ladder, python_text
from benchmarks.questions import LRS
from benchmarks.results import write

RUNG, LOCAL_STEPS = "0.9M", 30
METHODS = ("ddp", "muloco", "sparseloco", "dilocox")
SIZES = (400_000, 1_300_000)  # bytes of text


def make_plan(num_bytes: int, seeds: list[int]) -> list[ladder.Run]:
    """Return the runs that read so much text."""
    source, plan = f"data.source={python_text.make_part(num_bytes)}", list[ladder.Run]()
    for seed in seeds:
        for method in METHODS:
            lr = LRS["sparse" if method in ladder.SPARSE else "muon"][RUNG]
            steps = 0 if method == "ddp" else LOCAL_STEPS
            plan.append(ladder.Run(RUNG, method, "muon", lr, seed, steps, more=(source,)))
    return plan


def main() -> None:
    """Run all methods on all texts; write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    seeds = parser.parse_args().seeds
    rung, rows, data = ladder.RUNGS[RUNG], list[list[Any]](), dict[int, list[dict[str, Any]]]()
    num_tokens = rung.steps * ladder.WORKERS * rung.num_tokens
    for num_bytes in SIZES:
        results = data[num_bytes] = ladder.run_all(make_plan(num_bytes, seeds))
        base = statistics.mean(result["loss"] for result in results if result["method"] == "ddp")
        for (method, *_), percents in ladder.gaps(results).items():
            spread = f"{min(percents):+.2f} to {max(percents):+.2f}" if len(percents) > 1 else "-"
            times = f"{num_tokens / num_bytes:.1f}"
            rows.append([num_bytes / 1e6, times, f"{base:.4f}", method, f"{statistics.mean(percents):+.2f} %", spread])
    columns = ["MB of text", "times read", "ddp", "method", "mean gap", "by seed, %"]
    notes = [f"{rung}", f"Muon inside, H = {LOCAL_STEPS}; seeds {seeds}; ddp has its mean loss"]
    print(write(f"repeated-text-{RUNG}", f"Text read again, {RUNG} parameters", columns, rows, notes, data))


if __name__ == "__main__":
    main()
