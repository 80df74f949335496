"""The joiner's end of a state transfer: it fetches the replicated state from several donors at once.

Each donor has a connection and a thread of its own. First all tell their manifests, and the majority's is believed;
then each is asked for chunks that are still missing, two at a time. A donor that dies, stalls, or sends what is
not in the manifest is dropped; its chunks are asked of the others, and nothing that has arrived is asked again.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from isthmus.core.types import State
from isthmus.transport.base import TransportError
from isthmus.transport.heal.channel import Channel, shut_down
from isthmus.transport.heal.download import Download
from isthmus.transport.heal.snapshot import MAX_MANIFEST_BYTES, Incoming, Manifest

_WINDOW = 2  # chunks asked of a donor at a time, so that the link is not idle for a round trip after each
_MAX_REPLY_BYTES = 4096

Dial = Callable[[float], socket.socket]  # connects with a donor within so many seconds, or raises `OSError`


@dataclass(frozen=True)
class Fetched:
    """A fetched state, and which donors it came from."""

    id: str
    state: State
    digest: str  # hash of the manifest, and so of every byte of the state
    chunks: dict[str, int]  # how many came from each donor
    dropped: dict[str, str]  # donors that failed, and why


def fetch(
    donors: Mapping[str, Dial], want: str | None, progress_seconds: float, total_seconds: float, max_bytes: int
) -> Fetched:
    """Fetch a state from donors (`isthmus.transport.heal.donor.StateServer`).

    Nothing that arrives is executed or unpickled. Memory: what the believed manifest promises, and for each donor a
    manifest (at most 8 MiB, as text) and one chunk (at most 16 MiB).

    Args:
        donors: by name, the most trusted first.
        want: id of the state; None takes the one that most donors offer, in a tie the first donor's.
        progress_seconds: a donor from which nothing arrives for so long is dropped. At least 2: a donor that is
            making its snapshot gives a sign of life every 0.5 s.
        total_seconds: for everything.
        max_bytes: that the tensors of the state may take.

    Raises:
        TransportError: the donors could not give it, or disagree; the message says why, for each.
    """
    download = Download(list(donors), progress_seconds, time.monotonic() + total_seconds)
    asked = [_Donor(name, dial, want, max_bytes, download) for name, dial in donors.items()]
    for donor in asked:
        donor.start()
    try:
        incoming = Incoming(download.elect())
        download.receive(incoming)
    finally:
        download.end()
        for donor in asked:
            donor.disconnect()
    manifest = incoming.manifest
    state = incoming.finish()
    return Fetched(manifest.id, state, manifest.digest, dict(download.chunks), download.dropped)


class _Donor:
    """One donor, as the joiner sees it: a connection and a thread."""

    def __init__(self, name: str, dial: Dial, want: str | None, max_bytes: int, download: Download) -> None:
        self._name, self._dial, self._want, self._download = name, dial, want, download
        self._max_bytes = max_bytes
        self._connection: socket.socket | None = None

    def start(self) -> None:
        """Fetch from this donor in a thread, until everything is here or the donor has failed."""
        threading.Thread(target=self._run, name="isthmus-joiner", daemon=True).start()

    def disconnect(self) -> None:
        """End the connection, and the thread with it, now that the download is over."""
        if self._connection is not None:
            shut_down(self._connection)

    def _run(self) -> None:
        try:
            while not self._try():
                pass  # the connection broke, but had brought something: it is called again
        except TransportError as error:
            self._download.drop(self._name, str(error))
        except TimeoutError:
            if time.monotonic() < self._download.deadline:  # otherwise it is no fault of the donor
                self._download.drop(self._name, f"nothing came for {self._download.patience_seconds:g} s")
        except OSError as error:
            self._download.drop(self._name, error.strerror or str(error))

    def _try(self) -> bool:
        had = self._download.chunks[self._name]
        try:
            self._fetch()
        except ConnectionError:
            if self._download.ended or self._download.chunks[self._name] == had:
                raise
            return False
        return True

    def _fetch(self) -> None:
        with self._dial(self._download.patience()) as self._connection:
            if self._download.ended:
                return
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            channel = Channel(self._connection, self._download.patience)
            incoming = self._download.offer(self._name, self._ask_manifest(channel))
            if incoming is not None:
                self._want = incoming.manifest.id  # should the connection break
                self._fetch_chunks(channel, incoming)

    def _ask_manifest(self, channel: Channel) -> Manifest:
        channel.send({"get": "manifest", "id": self._want})
        while not _is_ready(channel):
            pass  # it gave a sign of life
        manifest = Manifest.parse(channel.receive_text(MAX_MANIFEST_BYTES), self._max_bytes)
        if self._want not in (None, manifest.id):
            raise TransportError(f"its state is {manifest.id}, not {self._want}")
        return manifest

    def _fetch_chunks(self, channel: Channel, incoming: Incoming) -> None:
        manifest = incoming.manifest
        buffer = memoryview(bytearray(min(manifest.chunk_bytes, manifest.num_bytes)))
        asked = deque[int]()
        try:
            while True:
                while len(asked) < _WINDOW and (index := self._download.reserve(wait=not asked)) is not None:
                    asked.append(index)
                    channel.send({"get": "chunk", "id": manifest.id, "index": index})
                if not asked:
                    return
                start, end = manifest.chunk_range(asked[0])
                data = buffer[: end - start]
                if not _is_ready(channel):
                    raise TransportError("it has no chunk ready")
                channel.receive_raw(data)
                if not incoming.check(asked[0], data):
                    raise TransportError(f"its chunk {asked[0]} is not what its manifest promised")
                self._download.put(self._name, asked.popleft(), data)
        finally:
            self._download.give_back(asked)


def _is_ready(channel: Channel) -> bool:
    """Return whether what was asked for comes next; False when it will take a while."""
    match channel.receive(_MAX_REPLY_BYTES):
        case {"ready": True}:
            return True
        case {"wait": True}:
            return False
        case {"error": str(reason)}:
            raise TransportError(reason)
    raise TransportError("it sent a reply unknown here")
