"""What a CPU takes now beside an earlier commit, in turns: codecs, the outer loop without a sync, and syncs.

    python -m benchmarks.beside_before 198c627 [--rounds 5]

Each turn is a process of its own, in a checkout of its commit; a codec's figure is the median of several calls.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
# in either checkout, with what both of them have
MEASURE = """
import json, statistics, torch
from benchmarks import codecs, outer_loop, sync_cost
from isthmus.core import SyncSchedule
from isthmus.outer.adaptive_schedule import AdaptiveSchedule
from isthmus.recipes import RECIPES, load_config
from isthmus.train import assemble

torch.set_num_threads(1)
found = {}
x = torch.randn(4096, 4096, generator=torch.Generator().manual_seed(0))
for name, function in codecs.operations(x).items():
    function()
    found["codec", name] = statistics.median(codecs.seconds(function) for _ in range(5))
model = assemble.build_model_spec(load_config(sync_cost.CONFIG)).build(0)
for name in RECIPES.names():
    if name == "ddp":
        continue
    found["syncs of a round", name] = sync_cost.sync_seconds(name, model)
    training = outer_loop.Training(name)
    training.loop.state.schedule = AdaptiveSchedule(SyncSchedule(10**9))
    took = codecs.seconds(lambda: [training.loop.step() for _ in range(outer_loop.QUIET_STEPS)])
    found["step without a sync", name] = took / outer_loop.QUIET_STEPS
    training.loop.close()
print(json.dumps([[*key, value] for key, value in found.items()]))
"""


def measure(tree: Path) -> dict[tuple[str, str], float]:
    """Return the seconds of everything, by what it is and of what."""
    environment = os.environ | {"PYTHONPATH": f"{tree / 'src'}:{tree}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", MEASURE], cwd=tree, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return {(what, name): value for what, name, value in json.loads(done.stdout.splitlines()[-1])}


def main() -> None:
    """Measure both commits in turns, and write the result."""
    from benchmarks.results import write

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    found: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        before = Path(folder, "before")
        subprocess.run(["git", "worktree", "add", "-q", "--detach", before, arguments.commit], cwd=ROOT, check=True)
        try:
            for number in range(arguments.rounds):
                turns = (before, ROOT) if number % 2 else (ROOT, before)  # whoever is second has a warmer machine
                measured = {tree: measure(tree) for tree in turns}
                for key in measured[before].keys() & measured[ROOT].keys():
                    found[key].append((measured[before][key], measured[ROOT][key]))
                print(f"round {number + 1} of {arguments.rounds}", flush=True)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", before], cwd=ROOT, check=True)
    rows = []
    for (what, name), pairs in sorted(found.items()):
        ratios = [now / then for then, now in pairs]
        medians = [f"{1e3 * statistics.median(times):.3f}" for times in zip(*pairs, strict=True)]
        rows.append(
            [what, name, *medians, f"{statistics.median(ratios):.2f}", f"{min(ratios):.2f} to {max(ratios):.2f}"]
        )
    columns = [
        "what",
        "of what",
        f"at {arguments.commit}, ms",
        "now, ms",
        "now / then",
        f"of {arguments.rounds} rounds",
    ]
    notes = [
        "one thread; both commits in turns, each time in a process of its own",
        "codecs: 16M float32; syncs of a round: processor time, capture to merge (benchmarks.sync_cost)",
        "step without a sync: what the outer loop adds to an inner step",
    ]
    data = {"/".join(key): pairs for key, pairs in found.items()}
    print(write("beside-before", "A CPU, now and before", columns, rows, notes, data))


if __name__ == "__main__":
    main()
