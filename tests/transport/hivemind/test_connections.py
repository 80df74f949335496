"""What the peers of a sync tell one another over their control streams."""

import asyncio

from isthmus.transport.hivemind.connections import PeerConnections
from isthmus.transport.hivemind.frames import Frame, Kind

RENDEZVOUS = bytes(20)


class Sink:
    """Keeps what is written to a peer."""

    def __init__(self) -> None:
        self.written = b""

    def write(self, data) -> None:
        self.written += bytes(data)

    async def drain(self) -> None:
        pass

    def close(self) -> None:
        pass


def test_who_hears_of_a_failure_passes_its_cause_on():
    """Else a third that hears only how this one hangs up would blame it."""

    async def hear(cause: bytes) -> dict[int, bytes]:
        written: dict[int, list[Sink]] = {0: [], 2: []}

        async def dial(rank):
            written[rank].append(Sink())
            return asyncio.StreamReader(), written[rank][-1]

        mesh = PeerConnections(RENDEZVOUS, ["a", "b", "c"], 1, 20.0)
        mesh.open(dial)
        await asyncio.sleep(0.01)
        from_a = asyncio.StreamReader()
        from_a.feed_data(Frame(Kind.ABORT, RENDEZVOUS, 0, length=len(cause)).header(cause) + cause)
        await mesh.serve(Frame(Kind.OPEN_CONTROL, RENDEZVOUS, 0), (from_a, None))
        return {rank: b"".join(sink.written for sink in sinks) for rank, sinks in written.items()}

    cause = b"c sent a frame that is not due"
    expected = Frame(Kind.ABORT, RENDEZVOUS, 1, length=len(cause)).header(cause) + cause
    assert asyncio.run(hear(cause))[2].endswith(expected)
