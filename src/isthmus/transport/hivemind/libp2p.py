"""A libp2p daemon and a DHT node of hivemind's, on an event loop in a thread of their own: no process is forked."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from typing import IO, Any, TypeVar

os.environ.setdefault("HIVEMIND_LOGLEVEL", "CRITICAL")  # what matters is raised here as an error

from hivemind.dht.node import DHTNode  # type: ignore[import-untyped]
from hivemind.dht.protocol import ValidationError  # type: ignore[import-untyped]
from hivemind.p2p import P2P, P2PDaemonError, P2PHandlerError, PeerID  # type: ignore[import-untyped]
from hivemind.utils.multiaddr import Multiaddr  # type: ignore[import-untyped]

from isthmus.core.types import UserError
from isthmus.transport.base import TransportError
from isthmus.transport.hivemind.introductions import PROTOCOL, Introductions
from isthmus.transport.hivemind.node_settings import (
    NodeSettings,
    PortInUse,
    check_ports,
    describe_failure,
    lock_identity,
)
from isthmus.transport.hivemind.signature_validator import SignatureValidator
from isthmus.transport.timeouts import LOOK_SECONDS
from isthmus.transport.trust import Trust

Result = TypeVar("Result")
_UNKNOWN = "this peer has shown no trusted key here"
_MESSAGE_BYTES = 4 << 20  # of hivemind's own, at most
_RPC_SECONDS = 2.0  # to wait for a peer's answer
_DIAL_SECONDS = 4.0  # to reach an initial peer
_RETRY_SECONDS = 0.5
_PORT_SECONDS = 5.0  # for a port to become free
_log = logging.getLogger(__name__)
logging.getLogger("asyncio").addFilter(lambda record: record.msg != "socket.send() raised exception.")  # nor is this
logging.getLogger("hivemind").setLevel(os.environ["HIVEMIND_LOGLEVEL"])  # it may have been imported before


class _Loop(asyncio.SelectorEventLoop):
    def subprocess_exec(self, *args: Any, **options: Any) -> Any:
        """Start the daemon in a session of its own: Ctrl-C in a terminal must not end it before the last sync."""
        return super().subprocess_exec(*args, **options, start_new_session=True)


class Node:
    """A peer of the swarm: its daemon, its DHT and its event loop."""

    trust: Trust  # of this node, from `start` on

    def __init__(self, settings: NodeSettings) -> None:
        self.settings = settings
        self.peer_id = ""
        self.dht: Any = None  # hivemind's DHTNode
        self.p2p: Any = None  # hivemind's P2P
        self._identity: IO[bytes] | None = None
        self._loop = _Loop()
        self._thread = threading.Thread(target=self._run, name="isthmus-libp2p", daemon=True)
        self._stopped = False

    def start(self, trust: Trust, connect_seconds: float) -> None:
        """Start the daemon and join the swarm; raise a `UserError` where that cannot be done in time."""
        self.trust = trust
        self._identity = lock_identity(self.settings.identity_path)
        self._thread.start()
        try:
            self.call(self._connect(connect_seconds))
        except BaseException:
            self.stop()
            raise

    def call(self, work: Coroutine[Any, Any, Result], gives_up: Callable[[], bool] = lambda: False) -> Result:
        """Run a coroutine on the loop and wait for it, from any other thread, unless the node is stopped.

        Raises:
            TransportError: the node is stopped, or the wait was given up.
        """
        if self._stopped or not self._thread.is_alive():
            work.close()
            raise TransportError("this worker has left, or has not connected")
        future: Future[Result] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            while not future.done():
                if gives_up() and future.cancel():
                    raise TransportError("given up")
                wait([future], LOOK_SECONDS)
            return future.result()
        except CancelledError as error:
            raise TransportError("this worker has left") from error

    def stop(self) -> None:
        """End everything that runs on the loop, the daemon and the thread. A second call does nothing."""
        if self._stopped:
            return
        self._stopped = True
        if self._thread.is_alive():
            with suppress(FutureTimeoutError, CancelledError):
                asyncio.run_coroutine_threadsafe(self._shut_down(), self._loop).result(10 * _RPC_SECONDS)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        if self._identity is not None:
            self._identity.close()

    async def ping(self, peer_id: str) -> bool:
        """Return whether a peer is alive: it answers a ping of the DHT's within seconds."""
        return await self.dht.protocol.call_ping(PeerID.from_base58(peer_id)) is not None

    async def remember_initial_peers(self) -> None:
        """Speak to the initial peers again: one that restarted knows nobody, and would found a second swarm."""
        await asyncio.gather(*map(self._remember, self.settings.initial_peers))

    async def _remember(self, address: str) -> None:
        if await self._dial(address):
            await self.ping(address.rpartition("/p2p/")[2])

    async def _dial(self, address: str) -> bool:
        """Connect with an initial peer, unless that is done; returns whether it could be reached in time."""
        address, _, peer_id = address.rpartition("/p2p/")
        with suppress(P2PDaemonError, OSError, EOFError, TimeoutError):
            async with asyncio.timeout(_DIAL_SECONDS):
                await self.p2p._client.connect(PeerID.from_base58(peer_id), [Multiaddr(address)])
                return True
        return False

    async def addresses(self) -> list[str]:
        """Return the multiaddrs of this node, with its peer id."""
        return [str(address) for address in await self.p2p.get_visible_maddrs(latest=True)]

    def _run(self) -> None:
        self._loop.set_exception_handler(lambda _, context: _log.debug("%s", context))  # hivemind forgets tasks
        self._loop.run_forever()
        self._loop.close()

    async def _connect(self, connect_seconds: float) -> None:
        """Retry: clusters do not start at the same moment, and a daemon outlives its killed worker by 2 s."""
        failure: UserError
        start, patience = time.monotonic(), connect_seconds
        while True:
            try:
                check_ports(self.settings.listen)
                await self._try_connect(max(start + patience - time.monotonic(), _RPC_SECONDS))
                return
            except PortInUse as error:
                patience, failure = min(connect_seconds, _PORT_SECONDS), error
            except ValidationError as error:
                patience, failure = 0.0, describe_failure(error, self.settings, connect_seconds)
            except (P2PDaemonError, RuntimeError, OSError, EOFError) as error:
                failure = describe_failure(error, self.settings, connect_seconds)
            await self._disconnect()
            await asyncio.sleep(_RETRY_SECONDS)
            if time.monotonic() > start + patience:
                raise failure

    async def _try_connect(self, seconds: float) -> None:
        settings = self.settings
        self.p2p = await TrustedP2P.create(  # without initial peers: it would ask one after the other, 5 s each
            host_maddrs=settings.listen,
            announce_maddrs=settings.announce or None,
            identity_path=str(settings.identity_path),
            check_if_identity_free=False,  # a worker that restarts at once would be taken for its own double
            use_auto_relay=settings.relay,
            startup_timeout=seconds,
        )
        self.peer_id = str(self.p2p.peer_id)
        await self.p2p.begin_introductions(Introductions(settings, self.trust, self.peer_id))
        await asyncio.gather(*map(self._dial, settings.initial_peers))
        self.dht = await DHTNode.create(
            p2p=self.p2p,
            initial_peers=settings.initial_peers,
            wait_timeout=_RPC_SECONDS,
            bootstrap_timeout=_RPC_SECONDS,
            blacklist_time=5 * _RPC_SECONDS,
            record_validator=SignatureValidator(self.trust.identity),
        )

    async def _disconnect(self) -> None:
        if self.dht is not None:
            await self.dht.shutdown()
        if self.p2p is not None:
            await self.p2p.shutdown()
        self.dht = self.p2p = None

    async def _shut_down(self) -> None:
        await self._disconnect()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class TrustedP2P(P2P):  # type: ignore[misc]
    """A daemon and its handlers that speak only with known peers, in messages of bounded size."""

    _introductions: Introductions
    open_stream = P2P.call_binary_stream_handler

    async def begin_introductions(self, introductions: Introductions) -> None:
        """Let peers show their keys; nothing can be asked or answered before."""
        self._introductions = introductions
        await super().add_binary_stream_handler(PROTOCOL, introductions.serve)

    async def add_binary_stream_handler(self, name: str, handler: Any, balanced: bool = False) -> None:
        """Serve streams of known peers."""

        async def guarded(info: Any, reader: Any, writer: Any) -> None:
            if self._introductions.knows(str(info.peer_id)):
                await handler(info, _BoundedReader(reader), writer)
            else:
                writer.close()

        await super().add_binary_stream_handler(name, guarded, balanced)

    async def call_binary_stream_handler(self, peer_id: Any, handler_name: str) -> Any:
        """Open a stream to a peer that can be reached, and shows its key."""
        try:
            async with asyncio.timeout(_RPC_SECONDS):
                await self._introductions.introduce(self, peer_id)
                info, reader, writer = await self.open_stream(peer_id, handler_name)
        except TimeoutError as error:
            raise P2PDaemonError(f"{peer_id} cannot be reached") from error
        return info, _BoundedReader(reader), writer

    async def _add_protobuf_unary_handler(self, name: str, handler: Any, *rest: Any, **options: Any) -> None:
        async def guarded(request: Any, context: Any) -> Any:
            if not self._introductions.knows(str(context.remote_id)):
                raise PermissionError(_UNKNOWN)
            return await handler(request, context)

        await super()._add_protobuf_unary_handler(name, guarded, *rest, **options)

    async def _call_unary_protobuf_handler(self, peer_id: Any, *request: Any) -> Any:
        await self._introductions.introduce(self, peer_id)
        try:
            return await super()._call_unary_protobuf_handler(peer_id, *request)
        except P2PHandlerError as error:
            if _UNKNOWN not in str(error):
                raise
        await self._introductions.introduce(self, peer_id, again=True)  # it has started again meanwhile
        return await super()._call_unary_protobuf_handler(peer_id, *request)


class _BoundedReader:
    """Refuses the lengths that hivemind would believe, whatever comes before a message of its streams."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader

    async def readexactly(self, size: int) -> bytes:
        if size > _MESSAGE_BYTES:
            raise ValueError(f"a message of {size} bytes where {_MESSAGE_BYTES} are allowed")
        return await self._reader.readexactly(size)
