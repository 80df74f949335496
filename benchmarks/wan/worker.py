"""One worker of one contender, in a network namespace: its own ceiling, then the run, then what its anchors learnt.

python -m benchmarks.wan.worker RESULT CONTENDER EVERY [KEY=VALUE]...

Speed is compared with inner steps alone in the same process, measured just before and just after; and, as machines
drift, with the processor time that the training thread spent in inner steps meanwhile.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import Store, TCPStore

from benchmarks.wan.contenders import CONTENDERS, Nothing
from isthmus.data import OrderedBatches
from isthmus.recipes import load_config
from isthmus.train import assemble
from isthmus.train.evaluate import evaluate

CONFIG = Path(__file__).with_name("wan.yaml")
_SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")
_CEILING_STEPS = 60
_PORT = 29600


class Run:
    """A contender at work.

    Args:
        contender: its name.
        overrides: of the configuration.
        every: inner steps between two marks.
    """

    def __init__(self, contender: str, overrides: list[str], every: int) -> None:
        self.config, self.every = load_config(CONFIG, overrides), every
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        spec = assemble.build_model_spec(self.config)
        data_set = assemble.open_data(self.config, spec)
        batch_size = self.config.inner.batch_size
        self.model = spec.build(self.config.train.seed)
        self.stream = OrderedBatches(data_set.sample_order(self.config.train.seed), batch_size, self.rank, self.size)
        self.validation = data_set.validation(batch_size, self.config.train.eval_batches * batch_size)
        self.store: Store = TCPStore(
            os.environ["MASTER_ADDR"], _PORT, self.size, self.rank == 0, timedelta(minutes=20), wait_for_workers=False
        )
        self.contender: Nothing = CONTENDERS[contender](self.config, self.model, self.store, self.rank)

    def ceiling(self, name: str) -> float:
        """Seconds of an inner step while nobody communicates."""
        model = copy.deepcopy(self.model)
        step = assemble.build_inner_step(self.config, model)
        batch = next(copy.deepcopy(self.stream))
        step(batch)
        self._meet(name)
        begin = time.perf_counter()
        for _ in range(_CEILING_STEPS):
            step(batch)
        seconds = (time.perf_counter() - begin) / _CEILING_STEPS
        self._meet(f"{name}, done")
        return seconds

    def train(self) -> list[dict[str, Any]]:
        """The run; a mark after every so many steps, with the values to evaluate."""
        step = assemble.build_inner_step(self.config, self.model, wrap=lambda _: self.contender.module)
        self.contender.begin(step.optimizer)
        self._meet("train")
        begin, sent = time.perf_counter(), int(_SENT.read_text())
        inner_seconds, marks = 0.0, []
        for number in range(1, self.config.train.steps + 1):
            inner_begin = time.thread_time()
            step(next(self.stream))
            inner_seconds += time.thread_time() - inner_begin
            self.contender.step()
            if number % self.every == 0:
                seconds = time.perf_counter() - begin
                with self.contender.evaluated():
                    values = [param.detach().clone() for param in self.model.parameters()]
                mark = {"step": number, "seconds": seconds, "inner_seconds": inner_seconds, "values": values}
                marks.append(mark | {"sent": int(_SENT.read_text()) - sent})
        return marks

    @torch.no_grad()
    def evaluate(self, marks: list[dict[str, Any]]) -> None:
        """Give every mark its loss, for its values."""
        for mark in marks:
            for param, value in zip(self.model.parameters(), mark.pop("values"), strict=True):
                param.copy_(value)
            mark["loss"] = evaluate(self.model, self.validation)["loss"] if self.rank == 0 else None

    def leave(self) -> None:
        """Together, as some take their time."""
        self._meet("leave")
        self.contender.close()
        self._meet("left")

    def _meet(self, name: str) -> None:
        self.store.set(f"{name}/{self.rank}", "")
        self.store.wait([f"{name}/{rank}" for rank in range(self.size)])


def main() -> None:
    """Be the worker."""
    result, contender, every, *overrides = sys.argv[1:]
    torch.set_num_threads(1)
    run = Run(contender, overrides, int(every))
    before = run.ceiling("before")
    marks = run.train()
    found = {"step_seconds": [before, run.ceiling("after")], "marks": marks}
    run.leave()
    run.evaluate(marks)
    Path(result).write_text(json.dumps(found))
    os._exit(0)  # threads of contenders may never end


if __name__ == "__main__":
    main()
