"""A worker that keeps a diary, and falls ill when it is told to: `isthmus train`, watched from within.

python -m benchmarks.chaos.worker CONFIG [--set KEY=VALUE]... [--resume]

The diary, beside its metrics: `steps.bin`, the time of every inner step as a float64; `commits.jsonl`, a line for
every state that it reached by a commit. SIGUSR1 makes a parameter NaN before the next step.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
import time
from pathlib import Path
from typing import Any

from torch.distributed.tensor import DTensor

from isthmus import cli
from isthmus.train.trainer import Trainer


class Diary:
    """Watches one worker.

    Args:
        folder: where to write.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._steps = (folder / "steps.bin").open("ab", buffering=0)
        self._commits = (folder / "commits.jsonl").open("ab", buffering=0)
        self._ill = False

    def watch(self) -> None:
        """Write down every step and commit of this process's trainer from now on."""
        train_step, note, diary = Trainer._train_step, Trainer._note, self

        def _train_step(trainer: Trainer) -> None:
            if diary._ill:
                diary._ill = False
                parameter = next(trainer.model.parameters()).data
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                local.view(-1)[0] = float("nan")
            train_step(trainer)
            if trainer.process.is_first_rank:
                diary._steps.write(struct.pack("<d", time.time()))

        def _note(trainer: Trainer, reports: list[Any]) -> None:
            note(trainer, reports)
            if any(report.committed for report in reports):
                anchor = trainer.method.anchor_hash()  # of all ranks
                if trainer.process.is_first_rank:
                    diary._write_commit(trainer, reports, anchor)

        Trainer._train_step, Trainer._note = _train_step, _note  # type: ignore[method-assign]
        signal.signal(signal.SIGUSR1, lambda number, frame: setattr(diary, "_ill", True))

    def _write_commit(self, trainer: Trainer, reports: list[Any], anchor: str) -> None:
        state = trainer.method.state_dict()["elastic"]
        line = {
            "time": time.time(),
            "pid": os.getpid(),
            "version": state["version"],
            "chain": state["chain"],
            "anchor": anchor,
            "samples": state["replicated_state"]["samples"],
            "frontier": state["replicated_state"]["frontier"],
            "workers": [report.num_peers for report in reports if report.committed][-1],
            "contributed": state["contributed"].get(f"worker-{trainer.process.worker}", -1),
        }
        self._commits.write(json.dumps(line).encode() + b"\n")


def main() -> None:
    """Be the worker."""
    folder = next(value.split("=", 1)[1] for value in sys.argv if value.startswith("train.run_dir="))
    Diary(Path(folder) / "diary").watch()
    sys.argv = ["isthmus", "train", *sys.argv[1:]]
    cli.main()


if __name__ == "__main__":
    main()
