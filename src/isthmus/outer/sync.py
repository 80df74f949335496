"""One sync, from top to bottom, as it runs on the communication thread: quorum, guard, average, vote, report."""

import math
import time
from dataclasses import dataclass, field

import torch

from isthmus.compress.base import Compressor, NotFinite, is_finite
from isthmus.core import Fragment, Peers, State, SyncReport, Tensors
from isthmus.outer.anchor import fingerprint
from isthmus.outer.guard import Guard
from isthmus.outer.in_flight import Outcome, Sync, copy_dicts
from isthmus.outer.merge import Merge
from isthmus.outer.offload import Offloader
from isthmus.outer.rollback import Named
from isthmus.transport.base import Behind, Drift, Leaving, PeerLost, RankLost, Transport, TransportError

_MAX_ATTEMPTS = 4  # with those who are left, before a sync in an elastic world counts as refused
_PAUSE_SECONDS = 1.0


@dataclass
class _Average:
    """The result of one attempt's collectives, judged by the whole worker."""

    local: Tensors  # this worker's contribution; zeros where it was left out
    mean: Tensors = field(default_factory=list)
    buffers: Tensors = field(default_factory=list)
    restored: Named = field(default_factory=dict)
    left_out: dict[int, str] = field(default_factory=dict)
    reason: str = ""  # why this worker votes no
    norm: float = math.nan
    cosine: float = math.nan


@dataclass(frozen=True)
class Exchange:
    """The part of the method that runs on the communication thread."""

    compressor: Compressor  # how the mean is taken
    transport: Transport  # who takes part
    guard: Guard  # what a contribution must be like
    merge: Merge  # whether anchors are private
    hash_every: int  # rounds between two comparisons of a fragment's hash, unless anchors are private; 0: never
    num_fragments: int  # which are synced in turn
    offload: Offloader  # where outer state stays between syncs

    def run(self, sync: Sync, fragment: Fragment, state: State, sent: float) -> Outcome:
        """Take the mean of a fragment's pseudo-gradient and commit it; an elastic world may take several attempts.

        `state` is the compressor's memory, `sent` the transport's time at which the training thread handed it over.
        """
        self.transport.wait_until(sent)
        start = self.transport.now()
        state = self.offload.get(state)
        outcome = self._attempt(sync, fragment, copy_dicts(state), start)
        attempts = 1
        while self.transport.limits.elastic and not (outcome.report.committed or outcome.final):
            if attempts >= _MAX_ATTEMPTS and not outcome.undecided:
                break
            outcome = self._attempt(sync, fragment, copy_dicts(state), start, outcome)
            attempts += 1
        self._offload_outcome(sync, fragment, outcome)
        return outcome

    def _attempt(
        self, sync: Sync, fragment: Fragment, state: State, start: float, last: Outcome | None = None
    ) -> Outcome:
        """Form a quorum and sync with it; what the `last` attempt sent may have counted for the others."""
        undecided = last is not None and last.undecided
        try:
            peers = self.transport.quorum(sync.outer_step, sync.proposal)
        except TransportError as error:
            if self._is_fatal(error):
                raise
            state = last.compressor_state if last and undecided else state
            outcome = self._without_quorum(sync, fragment, state, start, error)
            if undecided and not outcome.final:
                outcome.undecided = True
                time.sleep(_PAUSE_SECONDS)
            return outcome
        sync.has_peers = True
        try:
            return self._with_quorum(sync, fragment, state, start, peers)
        finally:
            sync.has_peers = False

    def _with_quorum(self, sync: Sync, fragment: Fragment, state: State, start: float, peers: Peers) -> Outcome:
        average = self._average(sync, fragment, state, peers)
        sync.excluded = sync.excluded or peers.rank in average.left_out
        committed, undecided, reason = self._vote(sync, fragment, peers, average.reason)
        sent_bytes, received_bytes, message_fraction = traffic_of_worker(peers, self.compressor.message_fraction(state))
        end = self.transport.now()
        report = SyncReport(
            outer_step=sync.outer_step,
            fragment=fragment.name,
            committed=committed,
            num_peers=peers.size,
            sent_bytes=sent_bytes,
            received_bytes=received_bytes,
            seconds=end - start,
            norm=average.norm if committed else math.nan,
            cosine=average.cosine if committed else math.nan,
            message_fraction=message_fraction,
            reason="" if committed else reason or "a peer refused it",
            left_out=average.left_out,
        )
        mean, buffers = (average.mean, average.buffers) if committed else ([], [])
        weight = peers.weights[peers.rank]
        outcome = Outcome(report, mean, state, weight, end, undecided=undecided, buffers=buffers)
        outcome.restored = average.restored if committed else {}
        return self._with_elastic_state(outcome)

    def _average(self, sync: Sync, fragment: Fragment, state: State, peers: Peers) -> _Average:
        """Screen everybody's contributions, then average what is left of them."""
        average, faulty = _Average(sync.pseudo_gradient), list[int]()
        try:
            own, asks = (average.local, sync.num_steps, fragment.version), sync.offer is not None and sync.offer.asks
            screened = self.guard.screen(*own, state, peers, faulty=sync.excluded, asks_rollback=asks)
            peers.weights, average.local = screened.weights, screened.own
            average.left_out, average.reason = screened.left_out, screened.refusal
            if screened.asking is not None and sync.offer is not None:
                average.restored = sync.offer.restore(screened.asking, peers)
            elif not average.reason:
                average.mean, _ = self.compressor.average(average.local, state, peers, with_residual=False)
                average.buffers = peers.all_reduce_mean(sync.buffers) if sync.buffers else []
        except NotFinite as error:
            faulty = error.ranks
        except TransportError as error:
            if isinstance(error, PeerLost | Drift) and self._is_fatal(error):
                raise
            average.reason = str(error)
        average.norm, average.cosine, faulty = compare(average.mean, average.local, faulty, peers)
        if faulty:
            average.left_out = average.left_out | dict.fromkeys(faulty, "its message is not finite")
            average.reason = str(NotFinite(faulty))
        if not average.reason and not math.isfinite(average.norm):
            average.reason = "the mean pseudo-gradient is not finite"
        if not average.reason and not is_finite(*average.buffers):
            average.reason = "the mean of a buffer is not finite"
        return average

    def _vote(self, sync: Sync, fragment: Fragment, peers: Peers, reason: str) -> tuple[bool, bool, str]:
        """Vote yes where there is no reason against it; returns whether all did, whether nobody knows, and why not."""
        shared = self.compressor.replicated and self.merge.replicated
        round_number = sync.outer_step // self.num_fragments
        hashed = shared and self.hash_every > 0 and round_number % self.hash_every == 0
        anchor_hash = fingerprint(self.offload.anchor_of(fragment)) if hashed else b""
        try:
            return self.transport.commit(peers, not reason, anchor_hash), False, reason
        except TransportError as error:
            if self._is_fatal(error):
                raise
            return False, not reason, reason or str(error)

    def _without_quorum(
        self, sync: Sync, fragment: Fragment, state: State, start: float, error: TransportError
    ) -> Outcome:
        end = self.transport.now()
        report = SyncReport(sync.outer_step, fragment.name, False, seconds=end - start, reason=str(error))
        outcome = Outcome(report, [], state, end=end)
        outcome.behind, outcome.final = isinstance(error, Behind), isinstance(error, Behind | Leaving)
        return self._with_elastic_state(outcome)

    def _with_elastic_state(self, outcome: Outcome) -> Outcome:
        """Note what the elastic world remembers now; the training thread takes it over when it finishes the sync."""
        if (elastic := self.transport.elastic) is not None:
            outcome.elastic_state, outcome.relative_speed = elastic.state_dict(), elastic.relative_speed
        return outcome

    def _offload_outcome(self, sync: Sync, fragment: Fragment, outcome: Outcome) -> None:
        """Offload what is not needed before the finish."""
        put = self.offload.put
        outcome.compressor_state = put(outcome.compressor_state)
        if not self.offload.keeps_near(fragment):
            sync.pseudo_gradient = put(sync.pseudo_gradient)
            outcome.mean = put(outcome.mean)

    def _is_fatal(self, error: TransportError) -> bool:
        """A static world cannot go on without a worker, and no worker without one of its ranks."""
        return isinstance(error, RankLost) or not self.transport.limits.elastic


def traffic_of_worker(peers: Peers, message_fraction: float) -> tuple[int, int, float]:
    """Return the bytes sent and received by all ranks of this worker, and the largest of their message fractions."""
    own = torch.tensor([peers.sent_bytes, peers.received_bytes, message_fraction], dtype=torch.float64)
    parts = torch.stack([part for (part,) in peers.worker_group.all_gather([own])])
    return int(parts[:, 0].sum()), int(parts[:, 1].sum()), float(parts[:, 2].amax())


def compare(mean: Tensors, local: Tensors, faulty: list[int], peers: Peers) -> tuple[float, float, list[int]]:
    """Return, of the whole worker, the mean's norm, its cosine with the local one, and the ranks found faulty."""
    flat = [(m.reshape(-1), o.reshape(-1)) for m, o in zip(mean, local, strict=False)]
    dots = [torch.stack([torch.dot(m, m), torch.dot(o, o), torch.dot(m, o)]) for m, o in flat]
    squares, own_squares, product = 0.0, 0.0, 0.0
    for square, own_square, dot in torch.stack(dots).tolist() if dots else []:  # a GPU is waited for once
        squares += square
        own_squares += own_square
        product += dot
    bad = [float(rank in faulty) for rank in range(peers.size)]
    sums = torch.tensor([squares, own_squares, product, *bad], dtype=torch.float64)
    parts = peers.worker_group.all_gather([sums])
    squares, own_squares, product, *bad = torch.stack([part for (part,) in parts]).sum(0).tolist()
    norm = math.sqrt(squares) if squares >= 0 else math.nan
    cosine = product / max(math.sqrt(squares * own_squares), 1e-30) if math.isfinite(norm) else math.nan
    return norm, cosine, [rank for rank, count in enumerate(bad) if count]
