"""Work beside training on a GPU: a stream of its own, and copies to pinned memory. On a CPU these are plain calls."""

from collections.abc import Callable, Iterable
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
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()
    return copy


def drain() -> None:
    """Wait until the GPU has done all that this process gave it; on a CPU calls return when they are done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
