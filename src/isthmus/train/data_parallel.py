"""The baseline: torch's `DistributedDataParallel`, measured."""

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from isthmus.core import State, SyncReport
from isthmus.core.torch_internals import keep_alive
from isthmus.outer import fingerprint
from isthmus.train.method import Method
from isthmus.transport import Transport
from isthmus.transport.peers import ring_bytes


class DataParallel(Method):
    """Averages gradients in every backward pass of what it wraps: every step is a round.

    The model itself takes the anchor's part. Buffers stay each worker's own, as with an outer loop. A worker alone
    trains the bare model. The transport is joined here, and left by `close`; `sync_budget_seconds` bounds one
    all-reduce.
    """

    evaluates = "model"
    averages_in_backward = True
    inner_steps = 0
    is_finished = False

    def __init__(self, model: nn.Module, transport: Transport, sync_budget_seconds: float) -> None:
        self.transport, self._model = transport, model
        self._spans: list[tuple[float, float, bool]] = []  # of every bucket, in order: begin, end, whether a pass' last
        self._payload_bytes = 0
        self._num_new_steps = 0  # since `take_finished_rounds`
        self._group: dist.ProcessGroup | None = None
        transport.join(self)
        if transport.num_workers > 1:
            self._group = dist.new_group(timeout=timedelta(seconds=sync_budget_seconds))

    def shared_state(self, wait_seconds: float) -> State:
        """Refuse: the workers are always the same, so none ever has to catch up."""
        raise AssertionError("ddp is for a world whose workers do not change")

    @override
    def wrap(self, module: nn.Module) -> nn.Module:
        if self._group is None:
            return module
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # newer torch has another word for it, older has not
            wrapped = DistributedDataParallel(module, process_group=self._group, broadcast_buffers=False)
        wrapped.register_comm_hook(None, self._all_reduce)
        return wrapped

    @override
    def step(self) -> list[SyncReport]:
        self.inner_steps += 1
        self._num_new_steps += 1
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
        return [SyncReport(self.inner_steps, "gradients", True, num_peers, sent, sent, busy, hidden)]

    @override
    def finish(self) -> list[SyncReport]:
        self.is_finished = True
        return []

    @override
    def close(self) -> None:
        if self._group is not None:
            keep_alive(self._group)
            dist.destroy_process_group(self._group)
        self.transport.leave()

    @override
    @contextmanager
    def anchored(self) -> Iterator[None]:
        with torch.no_grad():
            yield

    @override
    def take_finished_rounds(self) -> list[int]:
        rounds, self._num_new_steps = [1] * self._num_new_steps, 0
        return rounds

    @override
    def anchor_hash(self) -> str:
        return fingerprint(self._model.parameters()).hex()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.inner_steps}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner_steps = state_dict["steps"]

    # torch compares the annotations of a hook with its own types: no `from __future__ import annotations` in this file
    def _all_reduce(
        self,
        state: None,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[torch.Tensor]:
        """Average as DDP does, divide and then sum, with a clock."""
        buffer = bucket.buffer().div_(self.transport.num_workers)
        self._payload_bytes += buffer.numel() * buffer.element_size()
        begin, last = time.monotonic(), bucket.is_last()
        work = dist.all_reduce(buffer, group=self._group, async_op=True)

        def note_end(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            self._spans.append((begin, time.monotonic(), last))
            return future.value()[0]

        averaged: torch.futures.Future[torch.Tensor] = work.get_future().then(note_end)
        return averaged
