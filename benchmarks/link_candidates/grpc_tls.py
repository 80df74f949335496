"""grpcio with mutual TLS: S channels, on each a stream both ways that takes the next chunk when it is free."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import grpc

from benchmarks.link_candidates.link import HEADER, WAIT_SECONDS, Inbox, Meeting, chunks_of

OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),  # a connection a channel
    ("grpc.so_reuseport", 0),
]


class Link:
    """S connections over one port.

    Args:
        meeting: where and how many.
        chunk_bytes: of a chunk.
    """

    def __init__(self, meeting: Meeting, chunk_bytes: int = 1 << 19) -> None:
        self._inbox, self._chunk_bytes, self._number = Inbox(), chunk_bytes, 0
        self._chunks: queue.Queue[tuple[bytes, memoryview] | None] = queue.Queue()
        self._num_connections, self._channels, self._calls, self._server = meeting.num_connections, [], [], None
        key = (meeting.folder / f"{meeting.rank}.key").read_bytes()
        own = (meeting.folder / f"{meeting.rank}.pem").read_bytes()
        other = (meeting.folder / f"{1 - meeting.rank}.pem").read_bytes()
        address = f"{meeting.addresses[0]}:{meeting.port}"
        if meeting.rank == 0:
            self._server = grpc.server(ThreadPoolExecutor(2 * meeting.num_connections), options=OPTIONS)
            handler = grpc.stream_stream_rpc_method_handler(self._serve)
            self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("Link", {"Exchange": handler})])
            credentials = grpc.ssl_server_credentials([(key, own)], other, require_client_auth=True)
            self._server.add_secure_port(address, credentials)
            self._server.start()
            return
        credentials = grpc.ssl_channel_credentials(other, key, own)
        options = [*OPTIONS, ("grpc.ssl_target_name_override", "peer")]
        for _ in range(meeting.num_connections):
            channel = grpc.secure_channel(address, credentials, options=options)
            grpc.channel_ready_future(channel).result(WAIT_SECONDS)
            call = channel.stream_stream("/Link/Exchange")(self._outgoing())
            threading.Thread(target=self._receive, args=[call], daemon=True).start()
            self._channels.append(channel)
            self._calls.append(call)

    def exchange(self, outgoing: memoryview, incoming: memoryview) -> None:
        """Send one message and receive another."""
        self._number += 1
        self._inbox.open(self._number, incoming)
        for chunk in chunks_of(outgoing, self._number, self._chunk_bytes):
            self._chunks.put(chunk)
        self._inbox.wait()
        self._chunks.join()

    def _outgoing(self) -> Iterator[bytes]:
        """Yield chunks for one stream, each when the library asks for it."""
        while (chunk := self._chunks.get()) is not None:
            frame = b"".join(chunk)
            self._chunks.task_done()
            yield frame

    def _receive(self, frames: Iterator[bytes]) -> None:
        try:
            for frame in frames:
                self._inbox.place(frame[: HEADER.size], memoryview(frame)[HEADER.size :])
            raise ConnectionResetError("the other peer ended a stream")
        except Exception as error:
            self._inbox.fail(error)

    def _serve(self, frames: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        threading.Thread(target=self._receive, args=[frames], daemon=True).start()
        return self._outgoing()

    def abort(self) -> None:
        """End the link at once."""
        self._inbox.fail(ConnectionAbortedError("it was aborted"))
        for call in self._calls:
            call.cancel()
        for channel in self._channels:
            channel.close()
        with suppress(ValueError, queue.Empty):  # an exchange may wait in join
            while True:
                self._chunks.get_nowait()
                self._chunks.task_done()
        for _ in range(self._num_connections):
            self._chunks.put(None)
        if self._server is not None:
            self._server.stop(0).wait()
