"""Work beside training on a GPU: streams of their own, and copies to pinned memory. On a CPU these are plain calls."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch

Result = TypeVar("Result")


class SideStream:
    """A GPU stream for a thread that works beside the training thread.

    A job sees all that the thread which gave it had begun; when it returns, its work on the device is done too. So
    nobody has to wait for a result that is there, and what a job was given is free again.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def mark(self) -> torch.Event | None:
        """Mark how far the calling thread's stream has come, for `run`."""
        return None if self._stream is None else torch.cuda.current_stream(self._stream.device).record_event()

    def run(self, job: Callable[[], Result], after: torch.Event | None) -> Result:
        """Run a job on this stream once the device has come to `after`."""
        if self._stream is None or after is None:
            return job()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(after)
            try:
                return job()
            finally:
                self._stream.synchronize()


class CopyStream:
    """A GPU stream for copies between its memory and the CPU's, beside what the training thread has the GPU do."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def copy(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> "Copying":
        """Begin to copy once the device has done what the calling thread has given it so far; CPU memory is pinned."""
        if self._stream is None:
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source)
            return Copying(None)
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)
            hand_over([*sources, *targets])  # whoever drops one of them meanwhile does not give its memory away
            return Copying(self._stream.record_event())


class Copying:
    """Copies that a `CopyStream` has begun."""

    def __init__(self, end: torch.Event | None) -> None:
        self._end = end

    @property
    def done(self) -> bool:
        """Whether all of them are complete."""
        return self._end is None or self._end.query()

    def join(self) -> None:
        """Let what the calling thread gives the device from now on find the copies complete."""
        if self._end is not None:
            torch.cuda.current_stream(self._end.device).wait_event(self._end)

    def wait(self) -> None:
        """Wait until all of them are complete."""
        if self._end is not None:
            self._end.synchronize()


def hand_over(tensors: Iterable[torch.Tensor]) -> None:
    """Let the calling thread's stream use tensors of another one: their memory is not given away under its hands."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def copy_to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy, complete on return; in CPU memory it is pinned where there is CUDA, which makes it fast.

    Only the calling thread and its stream wait.
    """
    pinned = torch.cuda.is_available() and device.type == "cpu"
    copy = torch.empty_like(tensor, device=device, pin_memory=pinned).copy_(tensor, non_blocking=True)
    finish_copies(tensor.device)
    return copy


def finish_copies(device: torch.device) -> None:
    """Wait for what the calling thread has begun to copy from a device."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def unused_bytes(device: torch.device) -> float:
    """Return the bytes of a GPU's memory that nothing has needed so far; infinity on other devices."""
    if device.type != "cuda":
        return math.inf
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)


def drain() -> None:
    """Wait until the GPU has done all that this process gave it; on a CPU calls return when they are done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
