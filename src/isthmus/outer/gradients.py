"""The start of a run: before every inner step the workers' gradients become their mean."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from isthmus.compress.base import Codec, Compressor, NotFinite, is_finite
from isthmus.compress.cast import Cast
from isthmus.compress.robust import RobustMean
from isthmus.core import State, SyncReport, SyncSchedule, Tensors, UserError
from isthmus.core.fragment import local_view, sharded_like
from isthmus.core.streams import hand_over
from isthmus.outer.communication_thread import CommunicationThread
from isthmus.outer.guard import Guard
from isthmus.outer.in_flight import copy_dicts
from isthmus.outer.sync import compare, traffic_of_worker
from isthmus.transport.base import Transport

GRADIENTS = "gradients"  # in the place of a fragment's name, in reports


def check_gradient_compressor(compressor: Compressor | None, schedule: SyncSchedule, elastic: bool) -> None:
    """Refuse what cannot take the mean of gradients, or a start that overshoots; `elastic`: workers come and go."""
    if compressor is None:
        return
    if elastic:
        raise UserError(
            "outer.gradient_compressor: gradients are averaged where the workers stay the same, as with the transport "
            "torch_dist: set it to null where they come and go"
        )
    if not isinstance(compressor, Codec | RobustMean):
        raise UserError(
            "outer.gradient_compressor: gradients are averaged without a memory of what was not sent: choose a codec, "
            "such as cast, float4 or quantize"
        )
    if schedule.warm_start_steps and schedule.warm_start_lr != 1:
        raise UserError(
            f"outer.schedule.warm_start_lr is {schedule.warm_start_lr}, but workers that average their gradients step "
            "alike, and longer steps overshoot: set it to 1, or outer.gradient_compressor to null"
        )


def weight_compressor(gradient_compressor: Compressor) -> Compressor:
    """Return what takes the mean of weights in a start that averages gradients: float32, whatever rounds send.

    Workers step alike there, so nothing is averaged, and what a shorter format rounds away would be lost.
    """
    if isinstance(gradient_compressor, RobustMean):
        return replace(gradient_compressor, codec=Cast())
    return Cast()


@dataclass
class GradientMean:
    """How the mean of gradients is taken, as in post-local SGD (Lin et al., arXiv 1808.07217)."""

    compressor: Compressor  # a codec, or a robust mean over one
    transport: Transport  # static
    guard: Guard  # what a gradient must be like
    state: State  # the guard's and the codec's memory; entries are replaced
    is_taken: bool = False  # in the present inner step

    def end_step(self) -> None:
        """End an inner step of the start, in which the mean must have been taken."""
        if not self.is_taken:
            raise UserError(
                "workers average their gradients in the start of this run: call "
                "outer_loop.average_gradients(model.parameters()) between backward() and the step of the optimizer"
            )
        self.is_taken = False

    def replace(self, params: Iterable[nn.Parameter], step: int, thread: CommunicationThread) -> SyncReport:
        """Replace gradients by their mean over workers; what a worker has no gradient of counts as zero.

        Where that mean is not finite it is nan on all workers.

        Args:
            params: that the next step of an inner optimizer changes, alike on all workers.
            step: number of the inner step, for whoever reads of a failure.
            thread: that all collectives run on.

        Raises:
            PeerLost: workers died.
        """
        trained = [param for param in params if param.requires_grad]
        local = [_gradient(param) for param in trained]
        mean, report, end = thread.run(partial(self._take, local, step, self.transport.now()))
        self.transport.wait_until(end)
        self.is_taken = True
        hand_over([*mean, *local])
        for param, value in zip(trained, mean, strict=True):
            if param.grad is None:
                param.grad = sharded_like(value.to(param.dtype), param)
            else:
                local_view(param.grad).copy_(value)
        return report

    def _take(self, local: Tensors, step: int, sent: float) -> tuple[Tensors, SyncReport, float]:
        """Take the mean, on the communication thread; training waits from `sent` to the end, which is returned, too."""
        self.transport.wait_until(sent)
        peers, state = self.transport.quorum(step), copy_dicts(self.state)
        mean, reason, left_out = list[torch.Tensor](), "", dict[int, str]()
        try:
            screened = self.guard.screen(local, 1, 0, state, peers, remembers_largest=True)
            peers.weights, left_out, reason = screened.weights, screened.left_out, screened.refusal
            if not reason:
                mean, _ = self.compressor.average(screened.own, state, peers, with_residual=False)
        except NotFinite as error:
            reason = str(error)
        norm, cosine, _ = compare(mean, local, [], peers)
        if not reason and not is_finite(*mean):
            reason = "the mean gradient is not finite"
        if reason:
            mean = [torch.full_like(tensor, math.nan) for tensor in local]
        else:
            self.state.update(state)
        sent_bytes, received_bytes, _ = traffic_of_worker(peers, 1.0)
        end = self.transport.now()
        report = SyncReport(
            outer_step=-1,
            fragment=GRADIENTS,
            committed=not reason,
            num_peers=peers.size,
            sent_bytes=sent_bytes,
            received_bytes=received_bytes,
            seconds=end - sent,
            norm=math.nan if reason else norm,
            cosine=math.nan if reason else cosine,
            reason=reason,
            left_out=left_out,
        )
        return mean, report, end


def _gradient(param: nn.Parameter) -> torch.Tensor:
    """Return this rank's own part of a gradient in float32; zeros where there is none."""
    if param.grad is None:
        return torch.zeros_like(local_view(param), dtype=torch.float32)
    return local_view(param.grad).float()
