"""Plain sockets, with TLS 1.3 of the standard library or without: I/O threads that move chunks over whoever is free."""

from __future__ import annotations

import selectors
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from selectors import EVENT_READ, EVENT_WRITE

from benchmarks.link_candidates.link import HEADER, WAIT_SECONDS, Meeting, chunks_of

NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Transfer:
    """One message out and one in."""

    def __init__(self, number: int, outgoing: memoryview, incoming: memoryview, chunk_bytes: int) -> None:
        self.number, self.incoming = number, incoming
        self.chunks = deque(chunks_of(outgoing, number, chunk_bytes))
        self._missing_bytes = len(incoming)
        self._lock = threading.Lock()

    @property
    def is_received(self) -> bool:
        """Whether the whole message is here."""
        return not self._missing_bytes

    def target(self, header: bytearray) -> memoryview:
        """Return where a chunk goes."""
        _, offset, length = HEADER.unpack(header)
        if not 0 < length <= len(self.incoming) - offset:
            raise ConnectionError(f"The other peer sent a chunk that fits nowhere: {offset}, {length}.")
        return self.incoming[offset : offset + length]

    def received(self, length: int) -> bool:
        """Count a chunk; whether it was the last."""
        with self._lock:
            self._missing_bytes -= length
            return self.is_received


class Connection:
    """A non-blocking socket, the chunk that leaves through it and the one that arrives."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.socket = sock
        self._unsent: deque[memoryview] = deque()
        self._header = bytearray(HEADER.size)
        self._target = self._place = memoryview(self._header)  # what is read now, and what is missing of it

    def send(self, transfer: Transfer) -> bool:
        """Send what the socket takes; whether there is more."""
        try:
            while self._unsent or transfer.chunks:
                if not self._unsent:
                    self._unsent.extend(map(memoryview, transfer.chunks.popleft()))
                sent = self.socket.send(self._unsent[0])
                self._unsent[0] = self._unsent[0][sent:]
                if not self._unsent[0]:
                    self._unsent.popleft()
        except IndexError:  # another thread took the last chunk
            return False
        except NOT_NOW:
            return True
        return False

    def receive(self, transfer: Transfer) -> tuple[bool, bool]:
        """Read what is there; whether more of this message may come, and whether its last chunk is complete."""
        try:
            while self._place or not self._is_early(transfer):
                if not self._place:
                    self._target = self._place = transfer.target(self._header)
                size = self.socket.recv_into(self._place)
                if not size:
                    raise ConnectionResetError("The other peer closed the connection.")
                self._place = self._place[size:]
                if not self._place and self._target.obj is not self._header:
                    length, self._target = len(self._target), memoryview(self._header)
                    self._place = self._target
                    if transfer.received(length):
                        return False, True
        except NOT_NOW:
            return True, False
        return False, False

    def _is_early(self, transfer: Transfer) -> bool:
        """Whether the header that was read belongs to the message after this one."""
        number = HEADER.unpack(self._header)[0]
        if number not in (transfer.number, transfer.number + 1):
            raise ConnectionError(f"The other peer sent message {number} instead of {transfer.number}.")
        return number != transfer.number


class Link:
    """S connections over one port, served by a few I/O threads.

    Args:
        meeting: where and how many.
        encrypted: TLS 1.3, both sides show a certificate.
        chunk_bytes: of a chunk.
        num_threads: that serve the connections; 0: one for each.
        congestion: the kernel's algorithm by name; empty: the host's own.
    """

    def __init__(
        self,
        meeting: Meeting,
        encrypted: bool = True,
        chunk_bytes: int = 1 << 19,
        num_threads: int = 1,
        congestion: str = "",
    ) -> None:
        with ThreadPoolExecutor(meeting.num_connections) as pool:
            wrap = _tls(meeting) if encrypted else lambda sock: sock
            sockets = list(pool.map(wrap, _connect(meeting, congestion)))
        connections = [Connection(sock) for sock in sockets]
        num_threads = num_threads or meeting.num_connections
        self._shares = [connections[k::num_threads] for k in range(min(num_threads, len(connections)))]
        self._wakers = [socket.socketpair() for _ in self._shares]
        self._pool = ThreadPoolExecutor(len(self._shares))
        self._chunk_bytes, self._number, self._aborted, self._lock = chunk_bytes, 0, False, threading.Lock()

    def exchange(self, outgoing: memoryview, incoming: memoryview) -> None:
        """Send one message and receive another."""
        self._number += 1
        transfer = Transfer(self._number, outgoing, incoming, self._chunk_bytes)
        with self._lock:
            if self._aborted:
                raise ConnectionAbortedError("The link was aborted.")
            works = [self._pool.submit(self._serve, k, transfer) for k in range(len(self._shares))]
        for work in works:
            work.result()

    def abort(self) -> None:
        """End the link at once: what the kernel still holds is dropped, and the other peer told so."""
        with self._lock:
            self._aborted = True
            self._wake()
        self._pool.shutdown()  # I/O threads wait for nothing but sockets and wakers
        for pair in self._wakers:
            for end in pair:
                end.close()
        for share in self._shares:
            for connection in share:
                connection.socket.close()

    def _wake(self) -> None:
        for _, end in self._wakers:
            with suppress(OSError):  # closed since
                end.send(b"\0")

    def _serve(self, thread: int, transfer: Transfer) -> None:
        """Move chunks over one thread's connections until the transfer is complete."""
        waker = self._wakers[thread][0]
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(waker, EVENT_READ)
                ready: Iterable[tuple[Connection | None, int]] = [
                    (c, EVENT_READ | EVENT_WRITE) for c in self._shares[thread]
                ]
                wanted = dict.fromkeys(self._shares[thread], 0)
                while True:
                    for connection, events in ready:
                        if connection is None:
                            waker.recv(64)
                        else:
                            self._move(connection, events, transfer, wanted, selector)
                    if self._aborted:
                        raise ConnectionAbortedError("The link was aborted.")
                    if transfer.is_received and not any(mask & EVENT_WRITE for mask in wanted.values()):
                        return
                    ready = [(key.data, events) for key, events in selector.select()]
        except OSError:
            self._aborted = True
            self._wake()
            raise

    def _move(
        self,
        connection: Connection,
        events: int,
        transfer: Transfer,
        wanted: dict[Connection, int],
        selector: selectors.BaseSelector,
    ) -> None:
        """Send and receive what one connection is ready for, then wait for what it still needs."""
        before = mask = wanted[connection]
        if events & EVENT_READ:
            more, complete = connection.receive(transfer)
            mask = mask & ~EVENT_READ | (EVENT_READ if more else 0)
            if complete:
                self._wake()
        if events & EVENT_WRITE:
            mask = mask & ~EVENT_WRITE | (EVENT_WRITE if connection.send(transfer) else 0)
        if mask == before:
            return
        if not mask:
            selector.unregister(connection.socket)
        elif before:
            selector.modify(connection.socket, mask, connection)
        else:
            selector.register(connection.socket, mask, connection)
        wanted[connection] = mask


def _connect(meeting: Meeting, congestion: str) -> list[socket.socket]:
    """Open the connections: rank 0 listens, rank 1 dials."""
    address = (meeting.addresses[0], meeting.port)
    if meeting.rank == 0:
        with socket.create_server(address, backlog=meeting.num_connections) as server:
            _set_options(server, congestion)
            server.settimeout(WAIT_SECONDS)
            sockets = [server.accept()[0] for _ in range(meeting.num_connections)]
        for sock in sockets:
            _set_options(sock, congestion)
            sock.settimeout(WAIT_SECONDS)
        return sockets
    return [_dial(address, congestion) for _ in range(meeting.num_connections)]


def _dial(address: tuple[str, int], congestion: str) -> socket.socket:
    deadline = time.monotonic() + WAIT_SECONDS
    while True:  # until the other peer listens
        sock = socket.socket()
        _set_options(sock, congestion)
        sock.settimeout(WAIT_SECONDS)
        try:
            sock.connect(address)
            return sock
        except ConnectionRefusedError:
            sock.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _set_options(sock: socket.socket, congestion: str) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing resets
    if congestion:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())


def _tls(meeting: Meeting) -> Callable[[socket.socket], socket.socket]:
    """Return what puts TLS on a socket, known by the one certificate of the other peer."""
    listens = meeting.rank == 0
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if listens else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(meeting.folder / f"{meeting.rank}.pem", meeting.folder / f"{meeting.rank}.key")
    context.load_verify_locations(meeting.folder / f"{1 - meeting.rank}.pem")
    return lambda sock: context.wrap_socket(sock, server_side=listens)
