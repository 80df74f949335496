"""Peers that are connected by libp2p streams, two for each direction between every two of them.

One stream carries payloads. The other carries heartbeats, so that a worker that stopped is told from one that
is slow, and the reason when a worker gives up, so that nobody waits for what cannot come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

import torch

from isthmus.transport.base import TransportError
from isthmus.transport.hivemind import frames
from isthmus.transport.hivemind.frames import Frame, Kind
from isthmus.transport.peers import BufferPeers

ReaderWriter = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Views = dict[int, memoryview]  # by rank
_REASON_SECONDS = 2.0  # a stream has broken: the reason may still be on its way on the other one


class PeerConnections:
    """The streams between the peers of one sync. Lives on an event loop; every method is called there.

    `rendezvous` are 20 bytes that no other one has, `names` the peers in rank order. One transfer may take the sync
    budget; how often hearts beat follows from it.
    """

    def __init__(self, rendezvous: bytes, names: list[str], rank: int, sync_budget_seconds: float) -> None:
        self.rendezvous, self.names, self.rank = rendezvous, names, rank
        self._budget = sync_budget_seconds
        self._interval = min(1.0, sync_budget_seconds / 20)
        self._max_missed = round(min(10.0, sync_budget_seconds / 2) / self._interval)
        self._others = [other for other in range(len(names)) if other != rank]
        self._out: dict[Kind, dict[int, asyncio.StreamWriter]] = {Kind.OPEN_DATA: {}, Kind.OPEN_CONTROL: {}}
        self._in: dict[Kind, dict[int, asyncio.StreamReader]] = {Kind.OPEN_DATA: {}, Kind.OPEN_CONTROL: {}}
        self._waited_for = set[int]()  # in this transfer
        self._num_missed = dict.fromkeys(self._others, 0)
        self._left = set[int]()  # said goodbye
        self._collective = 0
        self._failure = asyncio.Future[str]()  # why these connections are over
        self._connected = asyncio.Event()
        self._closed = asyncio.Event()
        self._tasks = set[asyncio.Task[None]]()

    def open(self, dial: Callable[[int], Awaitable[ReaderWriter]]) -> None:
        """Begin to connect with the peers; transfers wait for it."""
        for rank in self._others:
            for kind in (Kind.OPEN_DATA, Kind.OPEN_CONTROL):
                self._start(self._dial(dial, rank, kind))
        self._start(self._beat())

    async def serve(self, frame: Frame, streams: ReaderWriter) -> None:
        """Use a stream that a peer opened with this frame, until this worker closes."""
        rank, kind, (reader, _) = frame.sender, frame.kind, streams
        if rank in self._in[kind]:
            return  # one is enough
        self._in[kind][rank] = reader
        self._check_connected()
        if kind is Kind.OPEN_CONTROL:
            self._start(self._listen(rank, reader))
        await self._closed.wait()

    async def transfer(self, what: str, outgoing: Views, incoming: Views) -> None:
        """Send every peer its bytes and receive its own: one collective. All sizes are known to both ends."""
        self._collective += 1
        work = asyncio.ensure_future(self._send_and_receive(outgoing, incoming))
        either: set[asyncio.Future[Any]] = {work, self._failure}
        await asyncio.wait(either, timeout=self._budget, return_when=asyncio.FIRST_COMPLETED)
        if work.done() and work.exception() is None:
            return
        if work.done():
            await asyncio.wait({self._failure}, timeout=_REASON_SECONDS)
            self._fail(str(work.exception()))
        work.cancel()
        self._fail(self._out_of_time())
        raise TransportError(f"{what} failed: {self._failure.result()}")

    async def close(self) -> None:
        """Tell the peers that this worker leaves; what is on its way still arrives."""
        if not self._closed.is_set():
            self._broadcast(Frame(Kind.GOODBYE, self.rendezvous, self.rank))
            self._failure.set_result("this worker has closed it")
            self._disconnect()

    async def _send_and_receive(self, outgoing: Views, incoming: Views) -> None:
        self._waited_for = set(self._others) - (self._in[Kind.OPEN_DATA].keys() & self._in[Kind.OPEN_CONTROL].keys())
        await self._connected.wait()
        self._waited_for = set(self._others)
        data = Frame(Kind.DATA, self.rendezvous, self.rank, self._collective)
        writers = self._out[Kind.OPEN_DATA]
        sends = [self._naming_peer(rank, frames.send(writers[rank], data, view)) for rank, view in outgoing.items()]
        receipts = [self._naming_peer(rank, self._receive(rank, view)) for rank, view in incoming.items()]
        await asyncio.gather(*sends, *receipts)

    def _out_of_time(self) -> str:
        names = ", ".join(self.names[rank] for rank in sorted(self._waited_for))
        return (
            f"not done in {self._budget:g} s, {names} did not come or is slow: raise sync_budget_seconds or send less"
        )

    async def _receive(self, rank: int, view: memoryview) -> None:
        frame = Frame(Kind.DATA, self.rendezvous, rank, self._collective)
        await frames.receive(self._in[Kind.OPEN_DATA][rank], frame, view)
        self._waited_for.discard(rank)

    async def _naming_peer(self, rank: int, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except (OSError, EOFError) as error:
            raise TransportError(f"{self.names[rank]} closed its connection") from error
        except TransportError as error:
            raise TransportError(f"{self.names[rank]} {error}") from error

    async def _dial(self, dial: Callable[[int], Awaitable[ReaderWriter]], rank: int, kind: Kind) -> None:
        try:
            _, writer = await dial(rank)
            writer.write(Frame(kind, self.rendezvous, self.rank).header())
            await writer.drain()
        except (OSError, EOFError, TransportError) as error:
            self._fail(f"{self.names[rank]} cannot be reached ({error})")
            return
        if self._closed.is_set():
            writer.close()
            return
        self._out[kind][rank] = writer
        self._check_connected()

    def _check_connected(self) -> None:
        """Wait for both kinds: without its second stream a worker could not say why it aborts."""
        counts = {*map(len, self._in.values()), *map(len, self._out.values())}
        if counts == {len(self._others)}:
            self._connected.set()

    async def _beat(self) -> None:
        """Send heartbeats, and count the others' silence in own beats: an own pause must not look like their death."""
        while True:
            await asyncio.sleep(self._interval)
            self._broadcast(Frame(Kind.HEARTBEAT, self.rendezvous, self.rank))
            for rank in set(self._others) - self._left:
                self._num_missed[rank] += 1
            silent = [rank for rank, missed in self._num_missed.items() if missed > self._max_missed]
            if silent:
                names, seconds = ", ".join(self.names[rank] for rank in silent), self._max_missed * self._interval
                self._fail(f"{names} gave no sign of life for {seconds:.1f} s")
                return

    async def _listen(self, rank: int, reader: asyncio.StreamReader) -> None:
        name = self.names[rank]
        try:
            while True:
                frame, text = await frames.receive_any(reader, frames.TEXT_BYTES)
                self._num_missed[rank] = 0
                if frame.kind is Kind.ABORT:
                    cause = _printable(text)
                    self._fail(f"{name} aborted: {cause}", cause)
                elif frame.kind is Kind.GOODBYE:
                    self._left.add(rank)
        except (OSError, EOFError):
            if rank not in self._left:
                self._fail(f"{name} closed its connection")
        except TransportError as error:
            self._fail(f"{name} {error}")

    def _fail(self, reason: str, cause: str = "") -> None:
        """End these connections.

        Everybody is told the cause, also one that another worker told: a third may see this one disconnect before it
        hears of that.
        """
        if self._failure.done():
            return
        self._failure.set_result(reason)
        text = (cause or reason).encode()[: frames.TEXT_BYTES]
        self._broadcast(Frame(Kind.ABORT, self.rendezvous, self.rank, length=len(text)), text)
        self._disconnect()

    def _broadcast(self, frame: Frame, payload: bytes = b"") -> None:
        for writer in self._out[Kind.OPEN_CONTROL].values():
            with suppress(OSError, RuntimeError):  # it is the one that is gone
                writer.write(frame.header(payload) + payload)

    def _disconnect(self) -> None:
        self._closed.set()
        for writers in self._out.values():
            for writer in writers.values():
                writer.close()
        for task in self._tasks - {asyncio.current_task()}:
            task.cancel()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class Libp2pPeers(BufferPeers):
    """The peers of one sync over libp2p, none without connections; `call` waits for a coroutine on their loop."""

    def __init__(
        self,
        connections: PeerConnections | None,
        rank: int,
        weights: list[float],
        call: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        super().__init__(rank, weights)
        self._connections, self._call = connections, call
        self._others = [other for other in range(self.size) if other != rank]

    def _all_reduce(self, buffer: torch.Tensor) -> torch.Tensor:
        """Sum one part on each worker, in rank order, and send all the sum: the same bits for all."""
        total = buffer.cpu()
        parts = list(total.tensor_split(self.size))
        own = parts[self.rank]
        received = {other: torch.empty_like(own) for other in self._others}
        self._transfer("all_reduce", dict(enumerate(parts)), received)
        sums = torch.zeros_like(own)
        for rank in range(self.size):
            sums += own if rank == self.rank else received[rank]
        own.copy_(sums)
        self._transfer("all_reduce", dict.fromkeys(self._others, sums), dict(enumerate(parts)))
        return total.to(buffer.device)

    def _all_gather(self, buffer: torch.Tensor) -> torch.Tensor:
        own = buffer.cpu()
        result = own.new_empty(self.size, len(own))
        result[self.rank] = own
        self._transfer("all_gather", dict.fromkeys(self._others, own), dict(enumerate(result)))
        return result.flatten().to(buffer.device)

    def _all_to_all(self, buffer: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        parts = torch.split(buffer.cpu(), sizes)
        result = parts[0].new_empty(self.size, sizes[self.rank])
        result[self.rank] = parts[self.rank]
        self._transfer("all_to_all", dict(enumerate(parts)), dict(enumerate(result)))
        return result.flatten().to(buffer.device)

    def _transfer(self, what: str, outgoing: dict[int, torch.Tensor], incoming: dict[int, torch.Tensor]) -> None:
        assert self._connections is not None
        views = [{other: _view(buffers[other]) for other in self._others} for buffers in (outgoing, incoming)]
        self._call(self._connections.transfer(what, *views))


def _view(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor, as bytes."""
    return tensor.view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")


def _printable(text: bytes) -> str:
    return "".join(letter for letter in text.decode(errors="replace") if letter.isprintable())
