"""Point-to-point messages between the members of a gloo group, sent and received at the same time."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist


class SendRecv:
    """All messages that one member sends and receives in a collective; takes the place of a `dist.Work`.

    In gloo's own collectives a send is posted before the receive of the same call, and both directions share a
    connection: the peer's permission to send waits behind the whole payload, so that on a slow link the directions
    follow one another. Here all receives are posted first.

    gloo cannot be asked whether a message is through, and loses one whose wait runs out of time: so a thread waits.

    Args:
        group: of gloo.
        rank: of this member.
        outgoing: [n] uint8 for each member, in rank order.
        incoming: [n] uint8 of each member, in rank order: to be filled.
        seconds: after which the thread gives up.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        rank: int,
        outgoing: Sequence[torch.Tensor],
        incoming: Sequence[torch.Tensor],
        seconds: float,
    ) -> None:
        self._error: RuntimeError | None = None
        self._over = threading.Event()
        others = [other for other in range(len(outgoing)) if other != rank]
        incoming[rank].copy_(outgoing[rank])
        works = [group.recv([incoming[other]], other, 0) for other in others if len(incoming[other])]
        works += [group.send([outgoing[other]], other, 0) for other in others if len(outgoing[other])]
        threading.Thread(target=self._wait, args=(works, timedelta(seconds=seconds)), daemon=True).start()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until all messages are through, and return True.

        Raises:
            RuntimeError: a connection broke, or they are not yet through.
        """
        if not self._over.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError("the messages are not through yet")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Return whether all messages are through, or have failed."""
        return self._over.is_set()

    def _wait(self, works: list[dist.Work], timeout: timedelta) -> None:
        try:
            for work in works:
                work.wait(timeout)
        except RuntimeError as error:
            self._error = error
        self._over.set()
