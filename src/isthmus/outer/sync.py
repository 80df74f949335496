"""One sync, as it runs on the communication thread: quorum, average, commit."""

from __future__ import annotations

import math
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from isthmus.compress.base import Compressor, NotFinite, is_finite
from isthmus.core.fragment import Fragment
from isthmus.core.types import Peers, State, SyncReport, Tensors
from isthmus.outer.anchor import fingerprint
from isthmus.outer.guard import Guard
from isthmus.outer.offload import Offload
from isthmus.transport.base import Behind, Drift, Leaving, PeerLost, RankLost, Transport, TransportError

_ATTEMPTS = 4  # with those who are left, before a sync in an elastic world counts as refused
_PAUSE_SECONDS = 1.0


@dataclass
class Sync:
    """One fragment's round, from capture to finish."""

    fragment: int
    own: Tensors  # this worker's pseudo-gradient, float32
    detached: bool  # the local parameters were reset to the anchor since: they no longer hold `own`
    proposal: Any = None  # of the replicated state, made with `own`
    buffers: Tensors = field(default_factory=list)  # float32 copies of those that are averaged
    left_out: bool = False  # nothing of it reached the others, and nothing of it is kept
    outer_step: int = -1  # given when it is sent
    outcome: Future[Outcome] | None = field(default=None, repr=False)
    waited_seconds: float = 0.0  # of the training thread, for the outcome
    has_peers: bool = False  # they have met, and are not done yet


@dataclass
class Outcome:
    """What the communication thread brings back."""

    report: SyncReport
    mean: Tensors  # empty when refused
    message: Tensors  # what the others decoded of this worker's own; the whole pseudo-gradient where nobody asks
    state: State  # the compressor's memory after this sync
    share: float  # this worker's weight in the mean
    end: float  # the transport's time when it was done
    transport: State  # what the transport remembers after this sync
    undecided: bool = False  # this worker could not see whether the others committed
    behind: bool = False  # the others have committed without this worker
    relative_speed: float = 1.0  # of this worker, when it was done
    final: bool = False  # not to be tried again
    buffers: Tensors = field(default_factory=list)  # means of those that are averaged

    @classmethod
    def without_own(
        cls,
        fragment: Fragment,
        mean: Tensors,
        share: float,
        transport: State,
        now: float,
        step: int = -1,
        message_fraction: float = 1.0,
    ) -> Outcome:
        """Of a sync to which this worker gave nothing: `mean` is what the others agreed on, empty if they refused."""
        nothing = zeros(fragment)
        reason = "" if mean else "refused before this worker came"
        report = SyncReport(step, fragment.name, bool(mean), 0, 0, 0, 0.0, 0.0, 0.0, 0.0, message_fraction, reason)
        return cls(report, mean, nothing, fragment.state, share, now, transport)


@dataclass(frozen=True)
class Exchange:
    """The part of the method that the communication thread needs."""

    compressor: Compressor
    transport: Transport
    guard: Guard
    wants_message: bool  # the merge looks at this worker's own message
    hash_every: int  # 0: anchors are private, nothing to compare
    offload: Offload

    def run(self, sync: Sync, fragment: Fragment, state: State, sent: float) -> Outcome:
        """Take the mean of a fragment's pseudo-gradient and commit it, in an elastic world at the second try or later.

        Args:
            sync: what was captured.
            fragment: whose it is.
            state: the compressor's memory.
            sent: the transport's time at which the training thread handed it over.
        """
        self.transport.wait_until(sent)
        start = self.transport.now()
        state = self.offload.get(state, fragment.device)
        outcome = self._attempt(sync, fragment, copy_dicts(state), start)
        attempts = 1
        while self.transport.limits.elastic and not (outcome.report.committed or outcome.final):
            if attempts >= _ATTEMPTS and not outcome.undecided:
                break
            outcome = self._attempt(sync, fragment, copy_dicts(state), start, outcome)
            attempts += 1
        self._put_away(sync, outcome)
        return outcome

    def _put_away(self, sync: Sync, outcome: Outcome) -> None:
        """Offload what is not needed before the finish; most messages are the pseudo-gradient itself."""
        own = self.offload.put(sync.own)
        outcome.message = own if outcome.message is sync.own else self.offload.put(outcome.message)
        outcome.mean, outcome.state = self.offload.put(outcome.mean), self.offload.put(outcome.state)
        sync.own = own

    def _attempt(
        self, sync: Sync, fragment: Fragment, state: State, start: float, last: Outcome | None = None
    ) -> Outcome:
        """Once through quorum, average and commit; the `last` attempt may have counted for the others."""
        undecided = last is not None and last.undecided
        try:
            peers = self.transport.quorum(sync.outer_step, sync.proposal)
        except TransportError as error:
            if self._is_fatal(error):
                raise
            outcome = self._without_peers(sync, fragment, last.state if last and undecided else state, start, error)
            if undecided and not outcome.final:
                outcome.undecided = True
                time.sleep(_PAUSE_SECONDS)
            return outcome
        sync.has_peers = True
        try:
            return self._with_peers(sync, fragment, state, start, peers)
        finally:
            sync.has_peers = False

    def _with_peers(self, sync: Sync, fragment: Fragment, state: State, start: float, peers: Peers) -> Outcome:
        mean, residual, buffers, reason = list[torch.Tensor](), list[torch.Tensor](), list[torch.Tensor](), ""
        own, left_out, faulty = sync.own, dict[int, str](), list[int]()
        try:
            screened = self.guard.screen(own, fragment.version, state, peers, faulty=sync.left_out)
            peers.weights, own, left_out, reason = screened.weights, screened.own, screened.left_out, screened.refusal
            if not reason:
                mean, residual = self.compressor.average(own, state, peers)
                buffers = peers.all_reduce_mean(sync.buffers) if sync.buffers else []
        except NotFinite as error:
            faulty = error.ranks
        except TransportError as error:
            if isinstance(error, PeerLost | Drift) and self._is_fatal(error):
                raise
            reason = str(error)
        norm, cosine, faulty = _compare(mean, own, faulty, peers)
        if faulty:
            left_out, reason = left_out | dict.fromkeys(faulty, "its message is not finite"), str(NotFinite(faulty))
        sync.left_out = sync.left_out or peers.rank in left_out
        if not reason and not math.isfinite(norm):
            reason = "the mean pseudo-gradient is not finite"
        if not reason and not all(map(is_finite, buffers)):
            reason = "the mean of a buffer is not finite"
        hashed = self.hash_every > 0 and sync.outer_step % self.hash_every == 0
        committed = undecided = False
        try:
            committed = self.transport.commit(peers, not reason, fingerprint(fragment.anchor) if hashed else b"")
        except TransportError as error:
            if self._is_fatal(error):
                raise
            reason, undecided = reason or str(error), not reason
        if committed and self.wants_message:
            message = [mine - rest for mine, rest in zip(own, residual, strict=True)]
        else:
            message = own
        sent, received, message_fraction = _of_worker(peers, self.compressor.message_fraction(state))
        end = self.transport.now()
        report = SyncReport(
            outer_step=sync.outer_step,
            fragment=fragment.name,
            committed=committed,
            num_peers=peers.size,
            sent_bytes=sent,
            received_bytes=received,
            seconds=end - start,
            hidden_seconds=0.0,
            norm=norm if committed else math.nan,
            cosine=cosine if committed else math.nan,
            message_fraction=message_fraction,
            reason="" if committed else reason or "a peer refused it",
            left_out=left_out,
        )
        share, transport = peers.weights[peers.rank], self._transport_state()
        outcome = Outcome(report, mean if committed else [], message, state, share, end, transport, undecided)
        outcome.buffers = buffers if committed else []
        outcome.relative_speed = self.transport.elastic.relative_speed if self.transport.elastic else 1.0
        return outcome

    def _without_peers(
        self, sync: Sync, fragment: Fragment, state: State, start: float, error: TransportError
    ) -> Outcome:
        end = self.transport.now()
        report = SyncReport(
            sync.outer_step, fragment.name, False, 0, 0, 0, end - start, 0.0, math.nan, math.nan, reason=str(error)
        )
        outcome = Outcome(report, [], sync.own, state, 0.0, end, self._transport_state())
        outcome.behind, outcome.final = isinstance(error, Behind), isinstance(error, Behind | Leaving)
        outcome.relative_speed = self.transport.elastic.relative_speed if self.transport.elastic else 1.0
        return outcome

    def _transport_state(self) -> State:
        return self.transport.elastic.state_dict() if self.transport.elastic else {}

    def _is_fatal(self, error: TransportError) -> bool:
        """A static world cannot go on without a worker, no worker without one of its ranks."""
        return isinstance(error, RankLost) or not self.transport.limits.elastic


def arrived(outcome: Outcome) -> Future[Outcome]:
    """An outcome that is there already."""
    future: Future[Outcome] = Future()
    future.set_result(outcome)
    return future


def pseudo_gradient(fragment: Fragment, offload: Offload) -> Tensors:
    """Anchor - params, beside the parameters."""
    pairs = zip(fragment.anchor, fragment.params, strict=True)
    return [offload.get(anchor.detach(), fragment.device) - param.float() for anchor, param in pairs]


def averaged_buffers(fragment: Fragment) -> Tensors:
    """Float32 copies of the buffers that are averaged."""
    return [buffer.detach().to(torch.float32, copy=True) for buffer in fragment.averaged]


def zeros(fragment: Fragment) -> Tensors:
    """Zeros in the shapes of the fragment, without memory of their own."""
    return [torch.zeros((), device=param.device).expand(param.shape) for param in fragment.params]


def copy_dicts(state: State) -> State:
    """A copy of nested dicts that shares its tensors."""
    return {key: copy_dicts(value) if isinstance(value, dict) else value for key, value in state.items()}


def _of_worker(peers: Peers, message_fraction: float) -> tuple[int, int, float]:
    """Bytes sent and received by all ranks of this worker, and the largest of their message_fractions."""
    own = torch.tensor([peers.sent_bytes, peers.received_bytes, message_fraction], dtype=torch.float64)
    parts = torch.stack([part for (part,) in peers.worker_group.all_gather([own])])
    return int(parts[:, 0].sum()), int(parts[:, 1].sum()), float(parts[:, 2].amax())


def _compare(mean: Tensors, own: Tensors, faulty: list[int], peers: Peers) -> tuple[float, float, list[int]]:
    """Of the whole worker: norm of the mean, cosine between it and its own, and whose messages any rank found bad."""
    squares, own_squares, product = 0.0, 0.0, 0.0
    for m, o in zip(mean, own, strict=False):
        m, o = m.reshape(-1), o.reshape(-1)
        squares += float(torch.dot(m, m))
        own_squares += float(torch.dot(o, o))
        product += float(torch.dot(m, o))
    bad = [float(rank in faulty) for rank in range(peers.size)]
    parts = peers.worker_group.all_gather([torch.tensor([squares, own_squares, product, *bad], dtype=torch.float64)])
    squares, own_squares, product, *bad = torch.stack([part for (part,) in parts]).sum(0).tolist()
    norm = math.sqrt(squares) if squares >= 0 else math.nan
    cosine = product / max(math.sqrt(squares * own_squares), 1e-30) if math.isfinite(norm) else math.nan
    return norm, cosine, [rank for rank, count in enumerate(bad) if count]
