"""Outer state between syncs: it stays beside the parameters, or is offloaded and fetched fragment by fragment."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

from isthmus.core import Fragment, UserError
from isthmus.core.streams import copy_to
from isthmus.core.torch_internals import tree_map_only

Tree = TypeVar("Tree")  # a tensor, or dicts and lists of tensors and plain values


@dataclass(frozen=True)
class Offload:
    """Keeps outer state (anchors, outer optimizer, compressor memory, what is in flight) on `device`.

    Only a fragment that is captured, sent or finished has its state beside the parameters. Copies are exact, so
    results do not depend on it (docs/identities.md, 38). CPU memory is pinned where there is CUDA.
    """

    device: str | None = None  # "cpu", or any device that torch has here; None: the state stays beside the parameters

    def __post_init__(self) -> None:
        if self.device is None:
            return
        try:
            torch.zeros((), device=self.device).item()  # what holds no values (meta) is no place either
        except (RuntimeError, AssertionError, ImportError):
            raise UserError(f"offload: this machine has no device {self.device!r}: use cpu, or leave it out") from None

    def put(self, tree: Tree) -> Tree:
        """Offload tensors; on return the copies are complete."""
        if self.device is None:
            return tree
        device = torch.device(self.device)
        moved: Tree = tree_map_only(torch.Tensor, lambda tensor: copy_to(tensor, device), tree)
        return moved

    def get(self, tree: Tree, device: torch.device) -> Tree:
        """Return a copy on `device` of what `put` has kept."""
        copies = self.device is not None
        moved: Tree = tree_map_only(torch.Tensor, lambda t: t.to(device, copy=copies, non_blocking=True), tree)
        return moved

    @contextmanager
    def fetched(self, fragment: Fragment, outer_optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Have a fragment's anchor and outer optimizer state beside its parameters for a while."""
        if self.device is None:
            yield
            return
        _move(fragment, outer_optimizer, lambda tensor: self.get(tensor, fragment.device))
        yield
        self.put_fragment(fragment, outer_optimizer)

    def put_fragment(self, fragment: Fragment, outer_optimizer: torch.optim.Optimizer) -> None:
        """Offload a fragment's anchor and outer optimizer state."""
        if self.device is not None:
            _move(fragment, outer_optimizer, self.put)


def _move(
    fragment: Fragment, outer_optimizer: torch.optim.Optimizer, move: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Give anchors and optimizer state other memory; the anchors stay the objects that the optimizer knows."""
    for anchor in fragment.anchor:
        anchor.data = move(anchor.data)
        state = outer_optimizer.state.get(anchor, {})
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and name != "step":  # torch leaves step counts on the CPU
                state[name] = move(value)
