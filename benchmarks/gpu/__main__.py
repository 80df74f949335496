"""One command for a rented hour: `python -m benchmarks.gpu`, under nine minutes on one GPU, without a network.

The parts run one after the other, each in a process of its own with a limit, the most important first; the results
are written after each of them. What needs a package that is not installed, or finds no time any more, is left out by
name. On a CPU the same code runs with small sizes (`benchmarks/subject.py`), and the goals wait.

    PYTHONPATH=src python -m benchmarks.gpu [--output FOLDER] [--limit SECONDS] [--only NAME ...]
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import results
from benchmarks.gpu.figures import Figure
from benchmarks.gpu.processes import Part, PartOutcome, run_part

_ROOT = Path(__file__).parents[2]
LINK = ("cryptography", "pydantic")  # workers exchange over the link
PARTS = (
    Part("tests", "benchmarks.gpu.marked_tests:measure", 100, ("pytest", "pydantic")),
    Part("codecs", "benchmarks.gpu.codecs:measure", 50),
    Part("finish", "benchmarks.gpu.sync_steps:measure", 60, ("pydantic",), (None,)),
    Part("offloaded", "benchmarks.gpu.sync_steps:measure", 70, ("pydantic",), ("cpu",)),
    Part("start", "benchmarks.gpu.start:measure", 90, LINK),
    Part("utilisation", "benchmarks.gpu.utilisation:measure", 170, ("pydantic",)),
    Part("learning", "benchmarks.gpu.learning:measure", 200, LINK),
)
LIMIT_SECONDS = 530.0
_LEAST_SECONDS = 10.0  # with less a part is not begun
_COLUMNS = ["part", "what", "measured", "goal", ""]


def main() -> None:
    """Run all parts, printing and writing what they find as it comes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=results.FOLDER, help="folder of the results")
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS, help="seconds for everything")
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS], metavar="NAME", help="parts")
    options = parser.parse_args()
    # for the processes of the parts and theirs, wherever they are started
    os.environ["PYTHONPATH"] = os.pathsep.join([str(_ROOT / "src"), str(_ROOT), os.environ.get("PYTHONPATH", "")])
    deadline, on_gpu = time.monotonic() + options.limit, torch.cuda.is_available()
    if not on_gpu:
        print("there is no GPU here: the same code runs with small sizes, and every goal waits for a GPU", flush=True)
    outcomes: dict[str, PartOutcome] = {}
    path = None
    for part in PARTS:
        if not options.only or part.name in options.only:
            outcomes[part.name] = _outcome(part, deadline - time.monotonic(), on_gpu)
            path = _write(outcomes, on_gpu, options.output)
    print(f"\n{path}\n{_judgement(outcomes, on_gpu)}")


def _outcome(part: Part, seconds: float, on_gpu: bool) -> PartOutcome:
    """Run a part, or say why not."""

    def tell(figure: Figure) -> None:
        print("  ".join(cell for cell in figure.row(part.name, on_gpu) if cell), flush=True)

    if part.missing:
        outcome = PartOutcome(trouble=f"left out: {', '.join(part.missing)} is not installed")
    elif seconds < _LEAST_SECONDS:
        outcome = PartOutcome(trouble="left out: no time was left")
    else:
        outcome = run_part(part, min(part.seconds, seconds), tell)
    if outcome.trouble:
        print(f"{part.name}: {outcome.trouble}", *outcome.log, sep="\n  ", flush=True)
    return outcome


def _write(outcomes: dict[str, PartOutcome], on_gpu: bool, folder: Path) -> Path:
    """Write what is known by now; returns the path of the table."""
    rows: list[list[Any]] = []
    for name, outcome in outcomes.items():
        rows += [figure.row(name, on_gpu) for figure in outcome.figures]
        rows += [[name, outcome.trouble, "", "", ""]] if outcome.trouble else []
    where = torch.cuda.get_device_name() if on_gpu else "a CPU, NOT on a GPU: small sizes by the same code; goals wait"
    notes = [
        f"on {where}; seconds of the parts: " + ", ".join(f"{name} {o.seconds:.0f}" for name, o in outcomes.items()),
        "codecs: bytes that one pass must touch, over the time, over the same of `torch.Tensor.clone`, in turns",
        "finish, offloaded: KeepProgress and E3M0 over a slow link, AdamW; medians; sizes in benchmarks/subject.py",
        "start: two workers on this machine; utilisation: of the fastest matrix product here; learning: one seed",
    ]
    data = {name: vars(outcome) | {"figures": [vars(f) for f in outcome.figures]} for name, outcome in outcomes.items()}
    return results.write("gpu", "isthmus on one GPU", _COLUMNS, rows, notes, data, folder)


def _judgement(outcomes: dict[str, PartOutcome], on_gpu: bool) -> str:
    figures = [figure for outcome in outcomes.values() for figure in outcome.figures if figure.goal]
    if not on_gpu:
        return f"{len(figures)} goals wait for a GPU"
    missed = [figure.what for figure in figures if figure.verdict(on_gpu) == "missed"]
    said = f"{len(figures) - len(missed)} of {len(figures)} goals met"
    return said + "".join(f"\n  missed: {what}" for what in missed)


if __name__ == "__main__":
    main()
