"""Whether methods learn on a GPU as they should: short runs of the same model, their losses beside those of `ddp`."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from benchmarks import subject
from benchmarks.gpu.figures import Figure
from isthmus.recipes import load_config
from isthmus.tools.finished_run import FinishedRun
from isthmus.tools.fork_server import ForkServer
from isthmus.tools.launch import launch

_ADAMW = "inner.optimizer={type: adamw, lr: 1.0e-3}"  # the best for ddp at this size; muloco has Muon


def measure(folder: Path) -> Iterator[Figure]:
    """Yield the last evaluation loss of every method; one that fails leaves the others."""
    console, reference = Console(width=120), dict[int, float]()
    with ForkServer() as server:
        for recipe in subject.LEARNING_RECIPES:
            try:
                run = _run(recipe, folder / recipe, console, server)
            except Exception:
                traceback.print_exc()
                yield Figure(f"{recipe}: the run failed", 1, "", 0, details=traceback.format_exc())
                continue
            losses = run.losses()
            reference = reference or losses
            last = max(losses)
            yield Figure(
                f"{recipe}: loss after {last} steps, {run.sent_bytes / 1e6:,.1f} MB sent by a worker",
                losses[last],
                details={"losses": losses, "sent_bytes": run.sent_bytes, "summary": run.summary},
            )
            if recipe != subject.LEARNING_RECIPES[0] and last in reference:
                curve = {step: 100 * (loss / reference[step] - 1) for step, loss in losses.items()}
                apart = " -> ".join(f"{percent:+.1f}" for percent in curve.values())
                yield Figure(
                    f"{recipe}: against {subject.LEARNING_RECIPES[0]} ({apart} %)", curve[last], " %", details=curve
                )


def _run(recipe: str, run_dir: Path, console: Console, server: ForkServer) -> FinishedRun:
    """Return one run of all workers."""
    overrides = [
        *subject.LEARNING,
        f"outer.recipe={recipe}",
        "data={type: text, source: stdlib}",
        "train.checkpoint_every=0",
        f"train.run_dir={run_dir}",
        f"inner.precision={subject.PRECISION}",
    ]
    overrides += [] if recipe == "muloco" else [_ADAMW]
    overrides += [] if recipe == "ddp" else [f"outer.schedule.local_steps={subject.LEARNING_LOCAL_STEPS}"]
    run = launch(load_config(overrides=overrides, workers=subject.LEARNING_WORKERS), console, server, name=recipe)
    assert run is not None, "nobody stopped it"
    return run
