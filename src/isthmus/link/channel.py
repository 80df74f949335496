"""All that is sent to and received from one member of a group, over however many lanes."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import override

from isthmus.link.errors import Misbehaviour
from isthmus.link.lane import BEAT, BYE, CHUNK_BYTES, DATA, MAX_CONTROL_BYTES, Frame, Lane, Load, Traffic
from isthmus.link.pacing import Pacing

_MAX_EARLY, _MAX_EARLY_BYTES = 64, 1 << 16  # messages that came before they were asked for and are kept


@dataclass
class _Message:
    """A message on its way out, or in."""

    view: memoryview
    offset: int = 0  # of what is to be taken next, on its way out
    num_done: int = 0  # bytes written, or received


@dataclass
class Channel(Traffic):
    """The connections to one member, and the messages on their way. Messages are numbered alike on both ends.

    A message is cut into chunks, which go over whichever lane of its direction is free: where both directions share a
    connection, what TCP has to acknowledge waits behind the data. Heartbeats and small messages have the first lane to
    themselves, so that they never wait behind the others. The memory of one that comes is there before:
    what comes for a message that nobody has asked for waits in the network, unless it is small.

    Attributes:
        name: of the member, for people.
        notify: is called when something has changed for whoever waits: a chunk, a heartbeat, a loss.
        hear: is called with every heartbeat.
    """

    name: str
    notify: Callable[[], None]
    hear: Callable[[dict[str, Any]], None] = lambda beat: None
    lanes: list[Lane] = field(default_factory=list)
    beat: dict[str, Any] = field(default_factory=dict)  # the last that came
    silent_ticks: int = 0
    has_left: bool = False  # and all that it sent before is here
    _outgoing: dict[int, _Message] = field(default_factory=dict)
    _incoming: dict[int, _Message] = field(default_factory=dict)
    _early: dict[int, bytes] = field(default_factory=dict)
    _coming_early: set[int] = field(default_factory=set)
    _control: deque[tuple[Frame, memoryview]] = field(default_factory=deque)
    _pacing: Pacing = field(default_factory=Pacing)

    def send(self, number: int, view: memoryview) -> None:
        """Send a message; the memory must not change until `is_done`."""
        if view:
            if not any(_load(message.view) == "bulk" for message in self._outgoing.values()):
                self._pacing.begin()
            self._outgoing[number] = _Message(view)

    def expect(self, number: int, view: memoryview) -> None:
        """Receive a message into this memory, which it fills exactly."""
        early = self._early.pop(number, None)
        if early is not None:
            self._check(number, len(early), len(view))
            view[:] = early
        elif view:
            self._incoming[number] = _Message(view)

    def is_done(self, number: int) -> bool:
        """Return whether the messages of this number are as a whole on their way, and here."""
        return number not in self._outgoing and number not in self._incoming

    def tell(self, beat: dict[str, Any]) -> None:
        """Send a heartbeat, before all that waits."""
        payload = memoryview(json.dumps(beat).encode())
        self._control.append((Frame(BEAT, len(payload)), payload))

    def forget(self) -> None:
        """Let go of all messages and their memory at once; a lane ends the chunk that it has begun to send."""
        self._outgoing.clear()
        self._incoming.clear()
        self._early.clear()
        for lane in self.lanes:
            lane.let_go()

    def last_words(self) -> list[tuple[Frame, memoryview]]:
        """Return the heartbeats that have not been sent; the last one says why the group ends."""
        words, self._control = list(self._control), deque()
        return words

    @override
    def next_frame(self, load: Load) -> tuple[Frame, memoryview] | None:
        if self._control and load == "small":
            return self._control.popleft()
        for number, message in self._outgoing.items():
            if message.offset < len(message.view) and _load(message.view) == load:
                if load == "bulk":
                    self._pacing.look([each.connection for each in self.lanes if each.load == load and not each.broken])
                chunk = message.view[message.offset : message.offset + CHUNK_BYTES]
                frame = Frame(DATA, len(chunk), number, message.offset)
                message.offset += len(chunk)
                return frame, chunk
        return None

    @override
    def written(self, frame: Frame) -> None:
        if frame.kind == DATA:
            message = self._outgoing.get(frame.message)
            if message is None:
                return  # it was forgotten meanwhile
            message.num_done += frame.num_bytes
            if message.num_done == len(message.view):
                del self._outgoing[frame.message]
                self.notify()

    @override
    def place(self, frame: Frame) -> memoryview | None:
        self.silent_ticks = 0
        if frame.kind == BEAT:
            return memoryview(bytearray(frame.num_bytes))
        if frame.kind == BYE and frame.num_bytes == 0:
            return memoryview(b"")
        if frame.kind != DATA:
            raise Misbehaviour(f"it sent a frame of kind {frame.kind}")
        message = self._incoming.get(frame.message)
        if message is not None:
            if frame.offset + frame.num_bytes > len(message.view):
                self._check(frame.message, frame.offset + frame.num_bytes, len(message.view))
            return message.view[frame.offset : frame.offset + frame.num_bytes]
        if frame.offset == 0 and frame.num_bytes <= _MAX_EARLY_BYTES and len(self._early) < _MAX_EARLY:
            self._coming_early.add(frame.message)
            return memoryview(bytearray(frame.num_bytes))
        return None

    @override
    def read(self, frame: Frame, payload: memoryview) -> None:
        if frame.kind == BEAT:
            self.beat = _parse(payload)
            self.hear(self.beat)
        elif frame.kind == BYE:
            pass  # the lane has taken note of it
        elif frame.message in self._coming_early:
            self._coming_early.discard(frame.message)
            message = self._incoming.pop(frame.message, None)  # it may have been asked for meanwhile
            self._early[frame.message] = bytes(payload)
            if message is not None:
                self.expect(frame.message, message.view)
        else:
            message = self._incoming[frame.message]
            message.num_done += frame.num_bytes
            if message.num_done == len(message.view):
                del self._incoming[frame.message]
        self.silent_ticks = 0
        self.notify()

    def _check(self, number: int, num_bytes: int, expected: int) -> None:
        if num_bytes != expected:
            raise Misbehaviour(
                f"it sent at least {num_bytes} bytes as message {number} where {expected} were expected: "
                "do all workers run the same model and configuration?"
            )


def _load(view: memoryview) -> Load:
    """Return which lanes a message goes over."""
    return "bulk" if len(view) > MAX_CONTROL_BYTES else "small"


def _parse(payload: memoryview) -> dict[str, Any]:
    try:
        beat = json.loads(bytes(payload))
    except (ValueError, RecursionError):
        beat = None
    if not isinstance(beat, dict):
        raise Misbehaviour("it sent a heartbeat that cannot be read")
    return beat
