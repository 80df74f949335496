"""Rollback: where an evaluation explodes, all workers go back to the last good anchors, in one and the same sync.

One worker evaluates, and keeps a copy of what it found good. Where the loss explodes, its next report asks all to go
back, and then the copy crosses instead of a mean. So all go back or, where that sync is refused, nobody does.
"""

import math
from dataclasses import dataclass

import torch

from isthmus.core import Fragment, Peers, State, Tensors, UserError
from isthmus.outer.anchor import anchors

Named = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Rollback:
    """When a run goes back to its last good anchors, and how often it may."""

    max_loss_factor: float = 1.5  # a loss above so many times the best one has exploded
    max_rollbacks: int = 3  # where one more is needed the run ends

    def __post_init__(self) -> None:
        if not self.max_loss_factor > 1:
            raise UserError(f"rollback: max_loss_factor {self.max_loss_factor} must be above 1")
        if self.max_rollbacks < 1:
            raise UserError(f"rollback: max_rollbacks {self.max_rollbacks} must be at least 1")


@dataclass(frozen=True)
class Offer:
    """What a worker brings to a sync in which all may go back."""

    asks: bool  # its evaluation has exploded
    tensors: Named  # in CPU memory: those of the last good evaluation where it asks, else zeros in their shapes

    def restore(self, asking: int, peers: Peers) -> Named:
        """Return what the worker `asking` has brought, the same bits on all peers."""
        weights, peers.weights = peers.weights, [float(rank == asking) for rank in range(peers.size)]
        try:
            received = peers.all_reduce_mean(list(self.tensors.values()))
        finally:
            peers.weights = weights
        return dict(zip(self.tensors, received, strict=True))


class Rollbacks:
    """The rollbacks of a run, and on the worker that evaluates what it found good last, in CPU memory.

    Args:
        rollback: None: the run never goes back.
        fragments, outer_optimizer: what goes back.
    """

    def __init__(
        self, rollback: Rollback | None, fragments: list[Fragment], outer_optimizer: torch.optim.Optimizer
    ) -> None:
        self.rollback, self.number = rollback, 0
        self._fragments, self._outer_optimizer = fragments, outer_optimizer
        self._best_loss, self._good_step, self._wanted = math.inf, 0, False
        self._good: Named = {}

    def note_evaluation(self, loss: float, step: int) -> str:
        """Judge the loss of the present anchors; return a line where it has exploded and the next sync will ask."""
        if self.rollback is None or self._wanted:
            return ""
        if math.isfinite(loss) and not loss > self._limit:
            self._best_loss, self._good_step = min(loss, self._best_loss), step
            self._good = {name: _copy(tensor) for name, tensor in self._shared().items()}
            return ""
        self._wanted = bool(self._good)
        found = f"the evaluation after step {step} has exploded (loss {loss:.4g}, the best was {self._best_loss:.4g})"
        return found + (
            f": all workers go back to the anchors of step {self._good_step} with the next sync"
            if self._wanted
            else ", and none before it was good: there is nothing to go back to"
        )

    @property
    def wanted(self) -> bool:
        """Whether the last evaluation has exploded, and no sync has taken the workers back since."""
        return self._wanted

    def offer(self, asks: bool) -> Offer | None:
        """Return what this worker brings to a sync, in which it asks all to go back or does not."""
        if self.rollback is None:
            return None
        good = self._good if asks else {}
        return Offer(asks, {name: _or_zeros(good.get(name), like) for name, like in self._shared().items()})

    def go_back(self, restored: Named) -> None:
        """Put back what a sync has brought, and forget what compressors and the guard remember.

        Raises:
            UserError: the run has gone back as often as it may.
        """
        assert self.rollback is not None, "who never goes back brings nothing to a sync"
        if self.number == self.rollback.max_rollbacks:
            raise UserError(
                f"the evaluation has exploded again after {self.number} rollbacks: lower inner.optimizer.lr or "
                "outer.optimizer.lr, choose a robust outer.aggregation, or raise outer.rollback.max_rollbacks"
            )
        self.number, self._wanted = self.number + 1, False
        for name, live in self._shared().items():
            live.copy_(restored[name]) if name in restored else live.zero_()
        for fragment in self._fragments:
            fragment.state = {}

    def state_dict(self) -> State:
        """Return what all workers share of this ("num_rollbacks") and what this one keeps; empty without rollbacks."""
        if self.rollback is None:
            return {}
        kept = {"best_loss": self._best_loss, "step": self._good_step, "wanted": self._wanted, "tensors": self._good}
        return {"num_rollbacks": self.number} | ({"last_good": kept} if self._good else {})

    def load_shared(self, state: State) -> None:
        """Go on from what all workers share."""
        self.number = state.get("num_rollbacks", 0)

    def load_own(self, state: State) -> None:
        """Go on from what this worker has kept; without it the next evaluation is the first one."""
        if self.rollback is not None and (kept := state.get("last_good")):
            self._best_loss, self._good_step, self._wanted = kept["best_loss"], kept["step"], kept["wanted"]
            self._good = dict(kept["tensors"])

    @property
    def _limit(self) -> float:
        assert self.rollback is not None
        return self.rollback.max_loss_factor * self._best_loss if self._best_loss > 0 else math.inf

    def _shared(self) -> Named:
        """Return what goes back, by name: anchors, the outer optimizer's state, buffers that all have alike."""
        found = {}
        for number, anchor in enumerate(anchors(self._fragments)):
            found[f"{number}.anchor"] = anchor.detach()
            memory = self._outer_optimizer.state.get(anchor, {})
            found |= {f"{number}.{name}": memory[name] for name in sorted(memory) if _is_tensor(memory[name])}
        buffers: Tensors = [buffer for fragment in self._fragments for buffer in fragment.shared_buffers]
        return found | {f"{number}.buffer": buffer for number, buffer in enumerate(buffers)}


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", torch.float32, copy=True)


def _or_zeros(good: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    return torch.zeros(()).expand(like.shape) if good is None else good


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)
