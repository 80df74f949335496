"""Point-to-point messages between the members of a gloo group, sent and received at the same time."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from datetime import timedelta

import torch
import torch.distributed as dist


class SendRecv:
    """All messages that one member sends and receives in a collective; takes the place of a `dist.Work`.

    In gloo's own collectives a send is posted before the receive of the same call, and both directions share a
    connection: the peer's permission to send waits behind the whole payload, so that on a slow link the directions
    follow one another. Here all receives are posted first.

    gloo cannot be asked whether a message is through, and loses one whose wait runs out of time: so a thread waits.

    `outgoing` and `incoming` are [n] uint8 for and of each member, in rank order, `incoming` to be filled. After
    `seconds` the thread gives up.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        rank: int,
        outgoing: Sequence[torch.Tensor],
        incoming: Sequence[torch.Tensor],
        seconds: float,
    ) -> None:
        self._result = Future[None]()
        others = [other for other in range(len(outgoing)) if other != rank]
        incoming[rank].copy_(outgoing[rank])
        works = [group.recv([incoming[other]], other, 0) for other in others if len(incoming[other])]
        works += [group.send([outgoing[other]], other, 0) for other in others if len(outgoing[other])]
        threading.Thread(target=self._wait, args=(works, timedelta(seconds=seconds)), daemon=True).start()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until all messages are through, and return True, or raise `RuntimeError` as a `dist.Work` does."""
        try:
            self._result.result(None if timeout is None else timeout.total_seconds())
        except TimeoutError as error:
            raise RuntimeError("the messages are not through yet") from error
        return True

    def is_completed(self) -> bool:
        """Return whether all messages are through, or have failed."""
        return self._result.done()

    def _wait(self, works: list[dist.Work], timeout: timedelta) -> None:
        try:
            for work in works:
                work.wait(timeout)
            self._result.set_result(None)
        except RuntimeError as error:
            self._result.set_exception(error)
