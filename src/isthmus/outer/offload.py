"""Outer state between syncs: it stays beside the parameters, or is offloaded, and fetched fragment by fragment."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from isthmus.core import Fragment, Tensors, UserError
from isthmus.core.streams import Copying, CopyStream, drain, finish_copies, unused_bytes
from isthmus.core.torch_internals import tree_map_only

Tree = TypeVar("Tree")  # a tensor, or dicts and lists of tensors and plain values
Place = tuple[nn.Parameter, str]  # an anchor and the name of a tensor that belongs to it: "", or the optimizer's

_ANCHOR = ""


@dataclass(frozen=True)
class Offload:
    """Keeps outer state (anchors, outer optimizer, compressor memory, what is in flight) on `device`.

    Only a fragment that is captured, sent or finished has its state beside the parameters. Copies are exact, so
    results do not depend on it (docs/identities.md, 38).
    """

    device: str | None = None  # "cpu", or any device that torch has here; None: the state stays beside the parameters

    def __post_init__(self) -> None:
        if self.device is None:
            return
        try:
            torch.zeros((), device=self.device).item()  # what holds no values (meta) is no place either
        except (RuntimeError, AssertionError, ImportError):
            raise UserError(f"offload: this machine has no device {self.device!r}: use cpu, or leave it out") from None

    def allocate(self, like: torch.Tensor) -> torch.Tensor:
        """Return memory for an offloaded tensor; in CPU memory it is pinned where there is CUDA, so copies are fast."""
        assert self.device is not None, "nothing is offloaded"
        device = torch.device(self.device)
        pinned = torch.cuda.is_available() and device.type == "cpu"
        return torch.empty_like(like, device=device, pin_memory=pinned)


class Offloader:
    """Moves outer state as an `Offload` says: to the GPU ahead of the step that needs it, and back behind that step.

    One fragment's state is beside the parameters at a time. An anchor is offloaded as long as it is not changed; then
    it is the changed one until the copy back is complete. So whoever reads it, whenever, reads a whole state.

    The training thread calls this; `put`, `get`, `anchor_of` and `keeps_near` any thread.

    Args:
        offload: where to.
        fragments, optimizer: whose state; of a fragment's anchors and optimizer, memory is taken once.
    """

    def __init__(self, offload: Offload, fragments: list[Fragment], optimizer: torch.optim.Optimizer) -> None:
        self.device, self._offload, self._optimizer = offload.device, offload, optimizer
        self._params_device = next((each.device for each in fragments if each.params), torch.device("cpu"))
        self._stream = CopyStream(self._params_device)
        self._memory: dict[Place, torch.Tensor] = {}  # of what is offloaded
        self._near: Fragment | None = None  # whose state was fetched ahead, or is on its way
        self._fetched: dict[tuple[int, torch.Size], tuple[torch.Tensor, torch.Tensor]] = {}  # and itself by its address
        self._fitting_bytes = 0  # of what was fetched ahead at most
        self._fetching = self._leaving = Copying(None)
        self._left: dict[Place, torch.Tensor] = {}  # what a copy that is under way will have offloaded
        for fragment in fragments if self.device is not None else []:
            self._put_state(fragment)
            self.free(wait=True)

    def put(self, tree: Tree) -> Tree:
        """Offload tensors; on return the copies are complete."""
        if self.device is None:
            return tree
        moved: Tree = tree_map_only(torch.Tensor, lambda t: self._offload.allocate(t).copy_(t, non_blocking=True), tree)
        finish_copies(self._params_device)
        return moved

    def get(self, tree: Tree) -> Tree:
        """Return tensors beside the parameters: fetched ahead, copied now, or where none are offloaded themselves."""
        if self._fetched:
            self._fetching.join()
        moved: Tree = tree_map_only(torch.Tensor, self._get, tree)
        return moved

    def keeps_near(self, fragment: Fragment) -> bool:
        """Whether what comes back of a fragment's sync is needed so soon that it should not be offloaded."""
        return self._near is fragment

    def anchor_of(self, fragment: Fragment) -> Tensors:
        """Return a fragment's anchor for a thread beside training, while no sync of the fragment is finished."""
        if self.device is None:
            return [anchor.detach() for anchor in fragment.anchor]
        self._leaving.wait()
        return [self._memory[anchor, _ANCHOR] for anchor in fragment.anchor]

    def prefetch(self, fragment: Fragment, with_optimizer: bool, more: Tensors) -> None:
        """Begin to fetch a fragment's anchor, its part of the outer optimizer, and `more`, for the next step.

        Where another fragment's state has not left yet, or inner steps leave no memory for it, all this is fetched when
        it is needed.
        """
        if self.device is None or self._left:
            return
        state = [value for (_, name), value in self._state_of(fragment) if with_optimizer or name == _ANCHOR]
        sources = {_address(tensor): tensor for tensor in (*state, *more)}
        more_bytes = sum(tensor.nbytes for tensor in sources.values()) - self._fitting_bytes
        if more_bytes > 0:
            if more_bytes > unused_bytes(self._params_device):
                return
            self._fitting_bytes += more_bytes  # and they are no longer unused
        targets = [torch.empty_like(tensor, device=self._params_device) for tensor in sources.values()]
        self._fetching = self._stream.copy(list(sources.values()), targets)
        self._fetched = dict(zip(sources, zip(sources.values(), targets, strict=True), strict=True))
        self._near = fragment

    def release(self) -> None:
        """Forget what was fetched ahead: the step that needed it has been taken."""
        self._fetched, self._near = {}, None

    @contextmanager
    def fetched(self, fragment: Fragment) -> Iterator[None]:
        """Have a fragment's anchor and outer optimizer state beside its parameters, to be changed; then they leave."""
        if self.device is None:
            yield
            return
        self.free(wait=True)
        self._set(self.get(dict(self._state_of(fragment))))
        yield
        self.release()
        self._put_state(fragment)

    def free(self, wait: bool = False) -> None:
        """Free what has left the parameters' side; with `wait`, all that is leaving."""
        if self._left and (wait or self._leaving.done):
            self._leaving.wait()
            self._set(self._left)
            self._left = {}

    def put_all(self) -> None:
        """Have all outer state offloaded and nothing fetched, so that it can be written where it is."""
        self.free(wait=True)
        self.release()
        if self.device is not None:
            drain()  # who writes to CPU memory does not wait for copies from it

    def _put_state(self, fragment: Fragment) -> None:
        """Begin to offload a fragment's anchor and outer optimizer state, into the memory that they came from."""
        state = dict(self._state_of(fragment))
        for place, value in state.items():
            if place not in self._memory or self._memory[place].shape != value.shape:
                self._memory[place] = self._offload.allocate(value)
        self._left = {place: self._memory[place] for place in state}
        self._leaving = self._stream.copy(list(state.values()), list(self._left.values()))

    def _state_of(self, fragment: Fragment) -> Iterable[tuple[Place, torch.Tensor]]:
        for anchor in fragment.anchor:
            yield (anchor, _ANCHOR), anchor.data
            for name, value in self._optimizer.state.get(anchor, {}).items():
                if isinstance(value, torch.Tensor) and name != "step":  # torch leaves step counts on the CPU
                    yield (anchor, name), value

    def _set(self, state: dict[Place, torch.Tensor]) -> None:
        """Give anchors and their state other memory; anchors stay the objects that the optimizer knows."""
        for (anchor, name), value in state.items():
            if name == _ANCHOR:
                anchor.data = value
            else:
                self._optimizer.state[anchor][name] = value

    def _get(self, tensor: torch.Tensor) -> torch.Tensor:
        _, near = self._fetched.get(_address(tensor), (None, None))
        if near is not None:
            return near
        copies = self.device is not None and tensor.device.type == torch.device(self.device).type
        return tensor.to(self._params_device, copy=copies, non_blocking=True)


def _address(tensor: torch.Tensor) -> tuple[int, torch.Size]:
    return tensor.data_ptr(), tensor.shape
