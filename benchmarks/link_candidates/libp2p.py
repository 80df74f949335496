"""libp2p through hivemind's p2pd: S streams; a daemon has one connection to another, which its streams share."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from typing import Any

from hivemind.p2p import P2P, PeerID

from benchmarks.link_candidates.link import HEADER, WAIT_SECONDS, Inbox, Meeting, chunks_of

SETTINGS: dict[str, Any] = {"auto_nat": False, "nat_port_map": False, "use_relay": False}


class Link:
    """S streams.

    Args:
        meeting: where and how many.
        chunk_bytes: of a chunk.
        several: a daemon for each stream, so that each has a connection, on ports that follow one another.
    """

    def __init__(self, meeting: Meeting, chunk_bytes: int = 1 << 18, several: bool = False) -> None:
        self._inbox, self._chunk_bytes, self._number = Inbox(), chunk_bytes, 0
        self._chunks: deque[tuple[bytes, memoryview]] = deque()
        self._streams: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._daemons: list[P2P] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._run(self._connect(meeting, meeting.num_connections if several else 1))

    def _run(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_SECONDS)

    async def _connect(self, meeting: Meeting, num_daemons: int) -> None:
        for index in range(num_daemons):
            path, port = meeting.folder / f"libp2p-{meeting.port}-{index}", meeting.port + index
            if meeting.rank == 0:
                daemon = await P2P.create(host_maddrs=[f"/ip4/{meeting.addresses[0]}/tcp/{port}"], **SETTINGS)
                await daemon.add_binary_stream_handler("link", self._accept)
                path.with_suffix(".new").write_text(daemon.peer_id.to_base58())
                path.with_suffix(".new").rename(path)
                self._daemons.append(daemon)
                continue
            while not path.exists():
                await asyncio.sleep(0.05)
            known = f"/ip4/{meeting.addresses[0]}/tcp/{port}/p2p/{path.read_text()}"
            daemon = await P2P.create(initial_peers=[known], no_listen=True, host_maddrs=None, **SETTINGS)
            self._daemons.append(daemon)
            for _ in range(meeting.num_connections // num_daemons):
                peer = PeerID.from_base58(path.read_text())
                _, reader, writer = await daemon.call_binary_stream_handler(peer, "link")
                writer.write(HEADER.pack(0, 0, 0))  # a stream is seen when something comes through it
                await self._accept(None, reader, writer)
        while len(self._streams) < meeting.num_connections:
            await asyncio.sleep(0.01)

    async def _accept(self, info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._streams.append((reader, writer))
        task = asyncio.create_task(self._receive(reader))
        if info is not None:  # the stream is closed when its handler returns
            await task

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                header = await reader.readexactly(HEADER.size)
                number, _, length = HEADER.unpack(header)
                if number:
                    self._inbox.place(header, await reader.readexactly(min(length, self._chunk_bytes)))
        except Exception as error:
            self._inbox.fail(error)

    def exchange(self, outgoing: memoryview, incoming: memoryview) -> None:
        """Send one message and receive another."""
        self._number += 1
        self._inbox.open(self._number, incoming)
        self._chunks.extend(chunks_of(outgoing, self._number, self._chunk_bytes))
        sends = asyncio.run_coroutine_threadsafe(self._send_all(), self._loop)
        self._inbox.wait()
        sends.result(WAIT_SECONDS)

    async def _send_all(self) -> None:
        await asyncio.gather(*[self._send(writer) for _, writer in self._streams])

    async def _send(self, writer: asyncio.StreamWriter) -> None:
        while self._chunks:
            header, chunk = self._chunks.popleft()
            writer.write(header)
            writer.write(chunk)
            await writer.drain()

    def abort(self) -> None:
        """End the link at once, and the daemons with it."""
        self._inbox.fail(ConnectionAbortedError("it was aborted"))
        self._chunks.clear()
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self) -> None:
        for _, writer in self._streams:
            writer.transport.abort()
        for daemon in self._daemons:
            await daemon.shutdown()
