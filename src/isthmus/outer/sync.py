"""One sync, as it runs on the communication thread: quorum, average, commit."""

from __future__ import annotations

import math
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from isthmus.compress.base import Compressor
from isthmus.core.fragment import Fragment
from isthmus.core.types import State, SyncReport, Tensors
from isthmus.outer.anchor import fingerprint
from isthmus.transport.base import Drift, PeerLost, Transport, TransportError


@dataclass
class Sync:
    """One fragment's round, from capture to finish."""

    fragment: int
    own: Tensors  # this worker's pseudo-gradient, float32
    detached: bool  # the local parameters were reset to the anchor since: they no longer hold `own`
    outer_step: int = -1  # given when it is sent
    outcome: Future[Outcome] | None = field(default=None, repr=False)


@dataclass
class Outcome:
    """What the communication thread brings back."""

    report: SyncReport
    mean: Tensors  # empty when refused
    message: Tensors  # what the others decoded of this worker's own; the whole pseudo-gradient where nobody asks
    state: State  # the compressor's memory after this sync
    share: float  # this worker's weight in the mean
    end: float  # the transport's time when it was done


@dataclass(frozen=True)
class Exchange:
    """The part of the method that the communication thread needs."""

    compressor: Compressor
    transport: Transport
    wants_message: bool  # the merge looks at this worker's own message
    hash_every: int  # 0: anchors are private, nothing to compare

    def run(self, sync: Sync, fragment: Fragment, state: State, sent: float) -> Outcome:
        """Take the mean of a fragment's pseudo-gradient and commit it.

        Args:
            sync: what was captured.
            fragment: whose it is.
            state: a copy of the compressor's memory, which may be changed.
            sent: the transport's time at which the training thread handed it over.
        """
        self.transport.wait_until(sent)
        start = self.transport.now()
        peers = self.transport.quorum(sync.outer_step)
        mean, residual, reason = list[torch.Tensor](), list[torch.Tensor](), ""
        try:
            mean, residual = self.compressor.average(sync.own, state, peers)
        except (PeerLost, Drift):
            raise
        except TransportError as error:
            reason = str(error)
        norm, cosine = _compare(mean, sync.own)
        if not reason and not math.isfinite(norm):
            reason = "the mean pseudo-gradient is not finite"
        hashed = self.hash_every > 0 and sync.outer_step % self.hash_every == 0
        committed = self.transport.commit(peers, not reason, fingerprint(fragment.anchor) if hashed else b"")
        if committed and self.wants_message:
            message = [own - rest for own, rest in zip(sync.own, residual, strict=True)]
        else:
            message = sync.own
        end = self.transport.now()
        report = SyncReport(
            outer_step=sync.outer_step,
            fragment=fragment.name,
            committed=committed,
            num_peers=peers.size,
            sent_bytes=peers.sent_bytes,
            received_bytes=peers.received_bytes,
            seconds=end - start,
            hidden_seconds=0.0,
            norm=norm if committed else math.nan,
            cosine=cosine if committed else math.nan,
            reason="" if committed else reason or "a peer refused it",
        )
        return Outcome(report, mean if committed else [], message, state, peers.weights[peers.rank], end)


def copy_dicts(state: State) -> State:
    """A copy of nested dicts that shares its tensors."""
    return {key: copy_dicts(value) if isinstance(value, dict) else value for key, value in state.items()}


def _compare(mean: Tensors, own: Tensors) -> tuple[float, float]:
    """Norm of the mean, and the cosine between it and this worker's own."""
    squares, own_squares, product = 0.0, 0.0, 0.0
    for m, o in zip(mean, own, strict=False):
        m, o = m.reshape(-1), o.reshape(-1)
        squares += float(torch.dot(m, m))
        own_squares += float(torch.dot(o, o))
        product += float(torch.dot(m, o))
    norm = math.sqrt(squares) if squares >= 0 else math.nan
    return norm, product / max(math.sqrt(squares * own_squares), 1e-30) if math.isfinite(norm) else math.nan
