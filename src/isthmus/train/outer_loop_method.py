"""An outer loop as the trainer sees it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from isthmus.core import SyncReport
from isthmus.outer import OuterLoop, anchored
from isthmus.train.method import Method


class OuterLoopMethod(Method):
    """Answers for an outer loop what the trainer asks of every method.

    Args:
        loop: has joined the other workers.
    """

    evaluates = "anchor"
    averages_gradients = False

    def __init__(self, loop: OuterLoop) -> None:
        self.loop, self.transport = loop, loop.transport
        self._finished_rounds: list[int] = []

    @property
    @override
    def inner_steps(self) -> int:
        return self.loop.state.inner_steps

    @property
    @override
    def is_training(self) -> bool:
        return self.loop.state.phase == "training"

    @property
    @override
    def is_finished(self) -> bool:
        return self.loop.state.phase == "finished"

    @property
    @override
    def param_names(self) -> list[list[str]]:
        return [fragment.param_names for fragment in self.loop.state.fragments]

    @override
    def wrap(self, module: nn.Module) -> nn.Module:
        return module

    @override
    def begin_step(self) -> None:
        self.loop.local_steps.start_step(self.transport.now())

    @override
    def step(self) -> list[SyncReport]:
        return self._note_rounds(self.loop.step())

    @override
    def skip(self) -> list[SyncReport]:
        return self._note_rounds(self.loop.skip())

    @override
    def finish(self) -> list[SyncReport]:
        return self._note_rounds(self.loop.finish())

    @override
    def close(self) -> None:
        self.loop.close()

    @override
    @contextmanager
    def anchored(self) -> Iterator[None]:
        with torch.no_grad(), anchored(self.loop.state.fragments):
            yield

    @override
    def take_finished_rounds(self) -> list[int]:
        rounds, self._finished_rounds = self._finished_rounds, []
        return rounds

    @override
    def anchor_hash(self) -> str:
        return self.loop.anchor_hash()

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.loop.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loop.load_state_dict(state_dict)

    def _note_rounds(self, reports: list[SyncReport]) -> list[SyncReport]:
        """Note a round for every sync of the last fragment that was committed."""
        last = self.loop.state.fragments[-1].name
        ends = [report for report in reports if report.committed and report.fragment == last]
        self._finished_rounds += [self.loop.state.schedule.round_steps(self.inner_steps)] * len(ends)
        return reports
