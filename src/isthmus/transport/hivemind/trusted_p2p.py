"""hivemind's `P2P` for a swarm in which not every peer is trusted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from hivemind.p2p import P2P, P2PDaemonError  # type: ignore[import-untyped]

_MESSAGE_BYTES = 4 << 20  # of hivemind's own, at most
_DIAL_SECONDS = 2.0


class TrustedP2P(P2P):  # type: ignore[misc]
    """A daemon and its handlers that refuse peers that are not trusted, and messages beyond a limit."""

    trusts: Callable[[str], bool]
    open_stream = P2P.call_binary_stream_handler

    async def add_stream_handler(self, name: str, handler: Any, balanced: bool = False) -> None:
        """Serve streams of trusted peers."""

        async def guarded(info: Any, reader: Any, writer: Any) -> None:
            if self.trusts(str(info.peer_id)):
                await handler(info, reader, writer)
            else:
                writer.close()

        await super().add_binary_stream_handler(name, guarded, balanced)

    async def add_binary_stream_handler(self, name: str, handler: Any, balanced: bool = False) -> None:
        """Serve streams of hivemind's messages, bounded in size."""

        async def bounded(info: Any, reader: Any, writer: Any) -> None:
            await handler(info, _BoundedReader(reader), writer)

        await self.add_stream_handler(name, bounded, balanced)

    async def call_binary_stream_handler(self, peer_id: Any, handler_name: str) -> Any:
        """Open a stream of hivemind's messages, bounded in size; `open_stream` is the same without bounds."""
        try:
            async with asyncio.timeout(_DIAL_SECONDS):
                info, reader, writer = await super().call_binary_stream_handler(peer_id, handler_name)
        except TimeoutError as error:
            raise P2PDaemonError(f"{peer_id} cannot be reached") from error
        return info, _BoundedReader(reader), writer

    async def _add_protobuf_unary_handler(self, name: str, handler: Any, *rest: Any, **options: Any) -> None:
        async def guarded(request: Any, context: Any) -> Any:
            if not self.trusts(str(context.remote_id)):
                raise PermissionError("this peer is not on the list")
            return await handler(request, context)

        await super()._add_protobuf_unary_handler(name, guarded, *rest, **options)


class _BoundedReader:
    """Refuses the lengths that hivemind would believe, whatever comes before a message of its streams."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader

    async def readexactly(self, size: int) -> bytes:
        if size > _MESSAGE_BYTES:
            raise ValueError(f"a message of {size} bytes where {_MESSAGE_BYTES} are allowed")
        return await self._reader.readexactly(size)
