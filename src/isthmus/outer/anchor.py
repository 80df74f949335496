"""Anchors: what workers agree on. Their hash, and a look at the model through them."""

import hashlib
import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from isthmus.core import Fragment, WorkerGroup
from isthmus.transport.base import Behind, Drift, Leaving, RankLost, Transport, TransportError
from isthmus.transport.peers import hash_of_worker

_LOGGER = logging.getLogger(__name__)
_PAUSE_SECONDS = 0.2


def anchors(fragments: list[Fragment]) -> list[nn.Parameter]:
    """This rank's part of all of them, in order."""
    return [anchor for fragment in fragments for anchor in fragment.anchor]


def fingerprint(tensors: Iterable[torch.Tensor]) -> bytes:
    """8 bytes that differ when any bit of any tensor differs."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().data)
    return digest.digest()


def worker_fingerprint(fragments: list[Fragment], worker_group: WorkerGroup) -> bytes:
    """8 bytes of the anchors on all ranks of this worker, which make the call together."""
    of_ranks = worker_group.all_gather_object(fingerprint(anchors(fragments)).hex())
    return hash_of_worker([bytes.fromhex(theirs) for theirs in of_ranks])


def compare_anchors(fragments: list[Fragment], transport: Transport, proposal: Any) -> None:
    """Meet the other workers before the first step, to refuse to start from different weights.

    Where workers come and go, a meeting that fails is tried again: one of them may have died, or train on for longer
    than a meeting may take.

    Raises:
        Drift: anchors that must be equal are not.
        Behind: the others have committed meanwhile.
    """
    while True:
        try:
            peers = transport.quorum(0, proposal)
            transport.commit(peers, True, fingerprint(anchors(fragments)))
            return
        except TransportError as error:
            if transport.elastic is None or isinstance(error, Behind | Leaving | Drift | RankLost):
                raise
            _LOGGER.info("the first meeting is tried again: %s", error)
            time.sleep(_PAUSE_SECONDS)


def adopt_anchors(fragments: list[Fragment]) -> None:
    """Let the local parameters be the anchors."""
    for fragment in fragments:
        for param, anchor in zip(fragment.params, fragment.anchor, strict=True):
            param.copy_(anchor.detach())


@contextmanager
def anchored(fragments: list[Fragment]) -> Iterator[None]:
    """Let the model hold the anchors for a while, to evaluate or export it; its own values come back afterwards."""
    params = [param for fragment in fragments for param in fragment.params]
    own = [param.clone() for param in params]
    adopt_anchors(fragments)
    try:
        yield
    finally:
        for param, value in zip(params, own, strict=True):
            param.copy_(value)
