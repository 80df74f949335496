"""Attach an outer loop to a trainer that is not ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from isthmus.outer.loop import OuterLoop


class OuterLoopCallback:
    """A callback for the Hugging Face `Trainer`, which calls it by event names only (no import needed).

    The loop is made when training begins, once the model is on its device; `on_step_end` comes after every
    optimizer step, also one that a gradient scaler skipped, so that all workers count alike.

    Args:
        make_outer_loop: builds the outer loop for the trainer's model.
    """

    def __init__(self, make_outer_loop: Callable[[nn.Module], OuterLoop]) -> None:
        self.make_outer_loop = make_outer_loop
        self.outer_loop: OuterLoop | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **others: Any) -> None:
        """Join the other workers."""
        self.outer_loop = self.make_outer_loop(model)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Count an inner step."""
        assert self.outer_loop is not None
        self.outer_loop.step()

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Land what is in flight, then leave."""
        assert self.outer_loop is not None
        self.outer_loop.finish()
        self.outer_loop.close()

    def __getattr__(self, event: str) -> Any:
        """Every other event of the trainer is none of our business."""
        if event.startswith("on_"):
            return lambda *_, **__: None
        raise AttributeError(event)
