"""pyzmq with CURVE: one DEALER that is bound, S that dial; a DEALER hands each chunk to a connection that has room."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from benchmarks.link_candidates.link import WAIT_SECONDS, Inbox, Meeting, chunks_of


class Link:
    """S connections over one port.

    Args:
        meeting: where and how many.
        chunk_bytes: of a chunk.
        io_threads: of libzmq.
    """

    def __init__(self, meeting: Meeting, chunk_bytes: int = 1 << 19, io_threads: int = 2) -> None:
        self._context = zmq.Context(io_threads=io_threads)
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve(domain="*", location=str(meeting.folder / "curve"))
        own, own_secret = zmq.auth.load_certificate(str(meeting.folder / "curve-secret" / f"{meeting.rank}.key_secret"))
        other, _ = zmq.auth.load_certificate(str(meeting.folder / "curve" / f"{1 - meeting.rank}.key"))
        self._sockets = [
            self._context.socket(zmq.DEALER) for _ in range(meeting.num_connections if meeting.rank else 1)
        ]
        self._poller = zmq.Poller()
        self._monitors = []
        address = f"tcp://{meeting.addresses[0]}:{meeting.port}"
        for sock in self._sockets:
            sock.linger, sock.sndhwm, sock.rcvhwm, sock.immediate = 0, 2, 2, 1
            sock.curve_publickey, sock.curve_secretkey = own, own_secret
            self._monitors.append(sock.get_monitor_socket(zmq.EVENT_DISCONNECTED))
            if meeting.rank:
                sock.curve_serverkey = other
                sock.connect(address)
            else:
                sock.curve_server = True
                sock.bind(address)
        for monitor in self._monitors:
            self._poller.register(monitor, zmq.POLLIN)
        self._inbox, self._chunk_bytes, self._number = Inbox(), chunk_bytes, 0
        self._busy = threading.Lock()

    def exchange(self, outgoing: memoryview, incoming: memoryview) -> None:
        """Send one message and receive another."""
        self._number += 1
        with self._busy:
            try:
                self._exchange(outgoing, incoming)
            except zmq.ContextTerminated:
                self._close()  # only the thread that uses sockets may
                raise ConnectionAbortedError("The link was aborted.") from None

    def _exchange(self, outgoing: memoryview, incoming: memoryview) -> None:
        self._inbox.open(self._number, incoming)
        chunks = deque(chunks_of(outgoing, self._number, self._chunk_bytes))
        for sock in self._sockets:
            self._poller.register(sock, zmq.POLLIN | zmq.POLLOUT)
        while chunks or not self._inbox.is_full():
            self._move(chunks)

    def _move(self, chunks: deque[tuple[bytes, memoryview]]) -> None:
        """Send and receive a chunk on every socket that is ready."""
        for sock, events in self._poller.poll(1000 * WAIT_SECONDS):
            if sock in self._monitors:
                raise ConnectionResetError("The other peer closed a connection.")
            if events & zmq.POLLIN:
                header, payload = sock.recv_multipart(copy=False)
                self._inbox.place(header.bytes, payload.buffer)
            if events & zmq.POLLOUT and chunks:
                with suppress(zmq.Again):  # the connection may be gone since
                    sock.send_multipart(chunks[0], zmq.NOBLOCK)  # copied: the library does not say when it is done
                    chunks.popleft()
            if not chunks:
                self._poller.modify(sock, zmq.POLLIN)

    def abort(self) -> None:
        """End the link at once."""
        self._authenticator.stop()
        if self._busy.acquire(blocking=False):
            self._close()
        self._context.term()  # an exchange under way raises

    def _close(self) -> None:
        for sock in [*self._sockets, *self._monitors]:
            sock.close(0)
