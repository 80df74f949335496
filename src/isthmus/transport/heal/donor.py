"""The donor's end of a state transfer (`heal.fetch` is the joiner's): a server in threads of its own."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any

from isthmus.transport.base import TransportError
from isthmus.transport.heal.channel import Channel, shut_down
from isthmus.transport.heal.snapshot import CHUNK_BYTES, Outgoing, Snapshot

Provide = Callable[[float], Snapshot]

_MAX_KEPT = 2  # snapshots: the newest, and one that slow joiners are still fetching
_MAX_REQUEST_BYTES = 4096
_SIGN_OF_LIFE_SECONDS = 0.5  # while a snapshot is being made


class StateServer:
    """Serves snapshots of this worker's state to joiners.

    Joiners that ask while the state stays the same share one snapshot. It is kept until nobody has asked for a part of
    it for a while, so a joiner whose connection broke can go on with it.

    Args:
        provide: makes a consistent snapshot, in a thread of the server; blocks until training allows it, at most the
            given `provide_seconds`, then raises.
        version: returns what differs as soon as the state moves on; an older snapshot is for those alone who name it.
        keep_seconds: how long a snapshot, or a connection, is kept idle.
        chunk_bytes: equal on all workers, at most 16 MiB.
    """

    def __init__(
        self,
        provide: Provide,
        version: Callable[[], object],
        *,
        provide_seconds: float = 60.0,
        keep_seconds: float = 60.0,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._keep_seconds = keep_seconds
        self._snapshots = _SnapshotCache(provide, version, provide_seconds, keep_seconds, chunk_bytes)
        self._connections = set[socket.socket]()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._sweep, name="isthmus-donor", daemon=True)
        self._thread.start()

    def is_serving(self) -> bool:
        """Return whether any joiner is connected."""
        return bool(self._connections)

    def serve(self, connection: socket.socket) -> None:
        """Serve a joiner until it hangs up, and close the connection."""
        self._connections.add(connection)
        with connection, suppress(OSError, TransportError):  # the joiner is gone, or is none of ours
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            channel = Channel(connection, lambda: self._keep_seconds)
            while not self._closed.is_set():
                self._reply(channel, channel.receive(_MAX_REQUEST_BYTES))
        self._connections.discard(connection)

    def close(self) -> None:
        """Stop serving; joiners go on with other donors. A second call does nothing."""
        self._closed.set()
        for connection in list(self._connections):
            shut_down(connection)
        self._thread.join()

    def _sweep(self) -> None:
        while not self._closed.wait(min(1.0, self._keep_seconds)):
            self._snapshots.sweep()

    def _reply(self, channel: Channel, request: dict[str, Any]) -> None:
        match request:
            case {"get": "manifest", "id": str() | None as want}:
                self._send_manifest(channel, want)
            case {"get": "chunk", "id": str(want), "index": int(index)} if index >= 0:
                outgoing = self._snapshots.find(want)
                chunk = outgoing.chunk(index) if outgoing else []
                channel.send({"ready": True} if chunk else {"error": f"it does not hold state {want} any more"})
                channel.send_raw(chunk)
            case _:
                raise TransportError(
                    "the joiner asks for something unknown: install the same version of isthmus everywhere"
                )

    def _send_manifest(self, channel: Channel, want: str | None) -> None:
        future = self._snapshots.ask(want)
        while not wait([future], _SIGN_OF_LIFE_SECONDS).done:
            channel.send({"wait": True})
        error = future.exception()
        if error is not None:
            channel.send({"error": f"it cannot make a snapshot: {type(error).__name__}: {str(error)[:200]}"})
        elif want not in (None, future.result().id):
            channel.send({"error": f"its state is {future.result().id} now, not {want}"})
        else:
            channel.send({"ready": True})
            channel.send_text(future.result().manifest)


class _SnapshotCache:
    """Makes snapshots, and keeps them ready to be sent."""

    def __init__(
        self,
        provide: Provide,
        version: Callable[[], object],
        provide_seconds: float,
        keep_seconds: float,
        chunk_bytes: int,
    ) -> None:
        self._provide, self._version, self._provide_seconds = provide, version, provide_seconds
        self._keep_seconds, self._chunk_bytes = keep_seconds, chunk_bytes
        self._lock, self._providing = threading.Lock(), threading.Lock()
        self._kept: dict[str, Future[Outgoing]] = {}  # by id, oldest first; all of them done
        self._used_at: dict[str, float] = {}
        self._newest: str | None = None  # of those kept
        self._coming: Future[Outgoing] | None = None
        self._seen: object = None  # the version of the state when the newest, or the one to come, was begun

    def ask(self, want: str | None) -> Future[Outgoing]:
        """Return the snapshot `want`, or where it is None or not kept a new one, which all who ask meanwhile share."""
        with self._lock:
            if (version := self._version()) != self._seen:  # what is being made goes to those who wait for it already
                self._newest, self._coming, self._seen = None, None, version
            kept = self._use(self._newest if want is None else want)
            if kept is not None:
                return kept
            if self._coming is None:
                self._coming = Future()
                threading.Thread(target=self._make, args=[self._coming], name="isthmus-snapshot", daemon=True).start()
            return self._coming

    def find(self, want: str) -> Outgoing | None:
        """Return the snapshot `want`, if it is still kept."""
        with self._lock:
            kept = self._use(want)
        return None if kept is None else kept.result()

    def sweep(self) -> None:
        """Drop what nobody has used for a while."""
        with self._lock:
            idle_since = time.monotonic() - self._keep_seconds
            self._drop([name for name, used_at in self._used_at.items() if used_at < idle_since])

    def _use(self, name: str | None) -> Future[Outgoing] | None:
        if name is None or name not in self._kept:
            return None
        self._used_at[name] = time.monotonic()
        return self._kept[name]

    def _drop(self, names: list[str]) -> None:
        for name in names:
            del self._kept[name], self._used_at[name]
            if name == self._newest:
                self._newest = None

    def _make(self, future: Future[Outgoing]) -> None:
        try:
            with self._providing:
                outgoing = Outgoing(self._provide(self._provide_seconds), self._chunk_bytes)
        except Exception as error:  # told to the joiners by whoever waits for the future
            with self._lock:
                if self._coming is future:
                    self._coming = None
            future.set_exception(error)
            return
        with self._lock:
            future.set_result(outgoing)
            self._kept.pop(outgoing.id, None)  # it becomes the youngest
            self._kept[outgoing.id] = future
            self._used_at[outgoing.id] = time.monotonic()
            if self._coming is future:
                self._newest, self._coming = outgoing.id, None
            self._drop(list(self._kept)[:-_MAX_KEPT])
