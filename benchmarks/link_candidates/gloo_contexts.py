"""gloo as torch has it, with several contexts: a device named S times makes S connections, and a tag chooses one."""

from __future__ import annotations

from datetime import timedelta

import torch
from torch.distributed import FileStore
from torch.distributed.distributed_c10d import ProcessGroupGloo

from benchmarks.link_candidates.link import WAIT_SECONDS, Meeting


class Link:
    """S connections, each with an equal part of every message.

    Args:
        meeting: where and how many.
    """

    def __init__(self, meeting: Meeting) -> None:
        options = ProcessGroupGloo._Options()
        device = ProcessGroupGloo.create_device(hostname=meeting.addresses[meeting.rank], lazy_init=False)
        options._devices = [device] * meeting.num_connections
        options._threads = 2 * meeting.num_connections
        options._timeout = timedelta(seconds=WAIT_SECONDS)
        store = FileStore(str(meeting.folder / f"gloo-{meeting.port}"), 2)
        self._group = ProcessGroupGloo(store, meeting.rank, 2, options)
        self._other, self._num_parts = 1 - meeting.rank, meeting.num_connections

    def exchange(self, outgoing: memoryview, incoming: memoryview) -> None:
        """Send one message and receive another."""
        sends, receives = (torch.frombuffer(m, dtype=torch.uint8).chunk(self._num_parts) for m in (outgoing, incoming))
        works = [self._group.recv([part], self._other, tag) for tag, part in enumerate(receives)]
        works += [self._group.send([part], self._other, tag) for tag, part in enumerate(sends)]
        for work in works:
            work.wait()

    def abort(self) -> None:
        """End the link, as far as the group can."""
        self._group.abort()
