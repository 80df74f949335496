"""The baseline's wrapper: torch's `DistributedDataParallel`, measured."""

import math
import time
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from isthmus.core import SyncReport
from isthmus.core.torch_internals import keep_alive
from isthmus.outer import fingerprint
from isthmus.transport import Transport
from isthmus.transport.peers import ring_bytes


class DataParallel:
    """Averages gradients in every backward pass of what it wraps; driven like an `OuterLoop` that syncs at every step.

    The model itself takes the anchor's part. Buffers stay each worker's own, as with an outer loop. A worker alone
    trains the bare model.

    Args:
        model: equal on all workers.
        transport: joined here, left by `close`.
        sync_budget_seconds: bound on one all-reduce.
    """

    replicated = True

    def __init__(self, model: nn.Module, transport: Transport, sync_budget_seconds: float) -> None:
        self.transport, self._model = transport, model
        self._spans: list[tuple[float, float, bool]] = []  # of every bucket, in order: begin, end, whether a pass' last
        self._payload_bytes = 0
        self._steps = 0
        self._group: dist.ProcessGroup | None = None
        transport.join(self)
        if transport.num_workers > 1:
            self._group = dist.new_group(timeout=timedelta(seconds=sync_budget_seconds))

    def wrap(self, module: nn.Module) -> nn.Module:
        """The model, or one of its networks with a loss, whose backward passes average; alike on all workers."""
        if self._group is None:
            return module
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # newer torch has another word for it, older has not
            wrapped = DistributedDataParallel(module, process_group=self._group, broadcast_buffers=False)
        wrapped.register_comm_hook(None, self._all_reduce)
        return wrapped

    def step(self) -> list[SyncReport]:
        """What the last backward pass sent; to be called after every inner step."""
        self._steps += 1
        if not self._spans:
            return []
        busy, exposed, until = 0.0, 0.0, 0.0
        for begin, end, last in self._spans:
            busy += max(0.0, end - max(begin, until))
            until = max(until, end)
            exposed += (until - begin) if last else 0.0  # the last bucket is full when the backward pass is over
        num_peers = self.transport.num_workers
        sent = ring_bytes(self._payload_bytes, num_peers)
        self._spans, self._payload_bytes = [], 0
        hidden = max(0.0, busy - exposed)
        return [SyncReport(self._steps, "gradients", True, num_peers, sent, sent, busy, hidden, math.nan, math.nan)]

    def finish(self) -> list[SyncReport]:
        """Nothing is left to do."""
        return []

    def close(self) -> None:
        """Let go of the peers."""
        if self._group is not None:
            keep_alive(self._group)
            dist.destroy_process_group(self._group)
        self.transport.leave()

    def anchor_hash(self) -> str:
        """16 hexadecimal digits that differ when any bit of any parameter differs."""
        return fingerprint(self._model.parameters()).hex()

    def state_dict(self) -> dict[str, Any]:
        """The number of steps."""
        return {"steps": self._steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self._steps = state_dict["steps"]

    # torch compares the annotations of a hook with its own types: no `from __future__ import annotations` in this file
    def _all_reduce(self, state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """DDP's own averaging, with a clock: divide, then sum."""
        buffer = bucket.buffer().div_(self.transport.num_workers)
        self._payload_bytes += buffer.numel() * buffer.element_size()
        begin, last = time.monotonic(), bucket.is_last()
        work = dist.all_reduce(buffer, group=self._group, async_op=True)

        def note_end(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            self._spans.append((begin, time.monotonic(), last))
            return future.value()[0]

        return work.get_future().then(note_end)
