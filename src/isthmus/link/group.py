"""The members of a group and what they exchange, each directly with each."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from threading import Condition
from typing import Any

from isthmus.link.channel import Channel
from isthmus.link.errors import MemberLost, Misbehaviour

_NOTHING = memoryview(b"")


_MAX_NOTES, _MAX_NOTE_BYTES = 1 << 16, 1 << 10
_BROKEN_TICKS = 2  # of silence, after which a member is lost of whose lanes one is broken


@dataclass(frozen=True)
class Member:
    """How to reach a member of a group, and the key it must hold."""

    number: int  # in errors
    name: str  # for people
    address: tuple[str, int]
    fingerprint: str  # empty: of any key that is trusted
    id: str = ""  # of its link: addresses behind NATs may be equal, and so are keys made of one secret; empty: of any
    via: tuple[str, int] | None = None  # the address of a relay where it has registered


class Group:
    """Members that exchange messages, all of them in the same order. Made by `Link.open`.

    Whoever is silent for too long, or whose connection breaks, is lost, and with it the group: this member tells the
    others whom it lost and closes its connections, and so do they.

    Args:
        name: of the group, equal on all members.
        members: in rank order.
        rank: of this member.
        channels: to all other members, by rank.
        changed: is notified whenever anything happens; its lock guards the group.
        wake: has the link look at the channels.
        tick_seconds: of the link.
        patience_ticks: for which a member may be silent.
    """

    def __init__(
        self,
        name: str,
        members: Sequence[Member],
        rank: int,
        channels: dict[int, Channel],
        changed: Condition,
        wake: Callable[[], None],
        tick_seconds: float,
        patience_ticks: int,
    ) -> None:
        self.name, self.members, self.rank, self.channels = name, members, rank, channels
        self.lost: MemberLost | None = None
        self.dead: list[int] = []  # numbers of members that were lost as their connections broke, or they fell silent
        self.left = False
        self.bound: Group | None = None  # another group of this process, which is lost with this one
        self.notes: dict[str, str] = {}  # what any member shared, here or in a group that is bound to one of these
        self._changed, self._wake = changed, wake
        self._patience_ticks, self._tick_seconds = patience_ticks, tick_seconds
        self._num_exchanges = 0
        for channel in channels.values():
            channel.hear = self._hear

    def exchange(self, outgoing: Sequence[memoryview], incoming: Sequence[memoryview], seconds: float) -> None:
        """Send every member its message, and fill the memory of every member's; see `start` and `wait`."""
        self.wait(self.start(outgoing, incoming), seconds)

    def start(self, outgoing: Sequence[memoryview], incoming: Sequence[memoryview]) -> int:
        """Begin to send every member its message and to fill the memory of every member's; returns its number.

        Args:
            outgoing: by rank, possibly empty; what stands at this member's own rank is not looked at.
            incoming: by rank, of the sizes that the others send.

        Raises:
            MemberLost: the group is closed.
        """
        with self._changed:
            self.check()
            self._num_exchanges += 1
            for rank, channel in self.channels.items():
                try:
                    channel.expect(self._num_exchanges, incoming[rank])
                except Misbehaviour as error:
                    self.blame(rank, str(error))
                    self.check()
                channel.send(self._num_exchanges, outgoing[rank])
            self._wake()
            return self._num_exchanges

    def wait(self, number: int, seconds: float) -> None:
        """Wait until all messages of one `start` have been sent and received.

        Raises:
            MemberLost: somebody is gone, or did not take part within `seconds` from now.
        """
        with self._changed:
            self._wait(number, time.monotonic() + seconds, seconds)

    def num_bulk_lanes(self, rank: int) -> int:
        """Return how many connections carry large messages to a member."""
        return sum(lane.load == "bulk" for lane in self.channels[rank].lanes)

    def silent_seconds(self, rank: int) -> float:
        """Return for how long nothing has come from a member; of a group that is closed, until it was closed."""
        return self.channels[rank].silent_ticks * self._tick_seconds

    def use_bulk_lanes(self, most: int | None) -> None:
        """Have at most so many connections carry large messages to each member from now on; None: all."""
        with self._changed:
            for channel in self.channels.values():
                bulk = [lane for lane in channel.lanes if lane.load == "bulk"]
                for place, lane in enumerate(bulk):
                    lane.is_resting = most is not None and place >= most
            self._wake()

    def share(self, notes: dict[str, str]) -> None:
        """Tell all members small things, once and for all, before anything that is sent from now on; they pass it on.

        A note that is known already stays as it is.
        """
        with self._changed:
            new = {name: text for name, text in notes.items() if name not in self.notes}
            if not new:
                return
            self.notes |= new
            if self.lost is None and not self.left:
                self.tell(notes=new)
            if self.bound is not None:
                self.bound.share(new)
            self._changed.notify_all()
            self._wake()

    def check(self) -> None:
        """Raise `MemberLost` where the group is closed."""
        if self.lost is not None:
            raise MemberLost(self.lost.ranks, str(self.lost))
        if self.left:
            raise MemberLost([], "this member has left the group")

    def close(self) -> None:
        """Leave the group. A second call does nothing."""
        with self._changed:
            if not self.left and self.lost is None:
                self.left = True
                self.tell()
                self._forget()
            self._wake()

    def tell(self, **more: object) -> None:
        """Send all members a heartbeat."""
        for channel in self.channels.values():
            channel.tell({"exchanges": self._num_exchanges, "left": self.left, **more})

    def judge(self) -> None:
        """Look at what came since the last time; to be called every tick, with the lock.

        Ticks are counted, not seconds: a pause of this process must not look like the death of all others.
        """
        silent = []
        for rank, channel in self.channels.items():
            if channel.has_left:
                continue
            channel.silent_ticks += 1
            if channel.silent_ticks > self._patience_ticks:
                silent.append(rank)
            broken = next((lane.broken for lane in channel.lanes if lane.broken), "")
            is_parked = any(lane.is_parked for lane in channel.lanes)
            if broken and channel.silent_ticks > _BROKEN_TICKS and not is_parked:
                self.blame(rank, broken, is_dead=True)
        if silent:
            why = f"gave no sign of life for {self._patience_ticks * self._tick_seconds:.1f} s"
            self._give_up(silent, f"{self._name(silent)} {why}", are_dead=True)

    def blame(self, rank: int, why: str, is_dead: bool = False) -> None:
        """Close the group because of a member: its connection broke, or it does not keep to the rules."""
        beat = self.channels[rank].beat
        match beat.get("given_up"):
            case {"numbers": list(numbers), "names": str(names)} if all(isinstance(each, int) for each in numbers):
                are_dead = beat["given_up"].get("dead") is True
                self.close_for(numbers, names, f"another worker gave up on {names}", are_dead)
            case _ if beat.get("left"):
                self.channels[rank].has_left = True  # whoever needs nothing more of it goes on
                self._changed.notify_all()
            case _:
                self._give_up([rank], f"the connection to {self._name([rank])} broke: {why}", is_dead)

    def close_for(self, numbers: list[int], names: str, why: str, are_dead: bool) -> None:
        """Close the group because of members, of this one or another, and tell everybody."""
        if self.lost is None:
            self.lost, self.dead = MemberLost(numbers, why), numbers if are_dead else []
            self.tell(given_up={"numbers": numbers, "names": names, "dead": are_dead})
            self._forget()
            if self.bound is not None:
                self.bound.close_for(numbers, names, why, are_dead)
            self._changed.notify_all()
            self._wake()

    def note_end(self, rank: int) -> None:
        """Look whether a member has ended the group, as one of its lanes has broken, or it has said goodbye there.

        What it sent before on other lanes still counts where it has left, not where it has given up.
        """
        channel = self.channels[rank]
        gave_up = "given_up" in channel.beat and any(lane.has_ended for lane in channel.lanes)
        if not channel.has_left and (gave_up or all(lane.broken or lane.has_ended for lane in channel.lanes)):
            broken = next((lane.broken for lane in channel.lanes if lane.broken), "")
            self.blame(rank, broken or "it ended the group, and did not say why", is_dead=bool(broken))

    def may_meet_again(self, rank: int) -> bool:
        """Return whether the lanes to a member are good for another group, after this one has ended."""
        member, lanes = self.members[rank], self.channels[rank].lanes
        is_lost = self.lost is not None and member.number in self.lost.ranks
        return member.id != "" and not is_lost and not any(lane.broken for lane in lanes)

    def _forget(self) -> None:
        for channel in self.channels.values():
            channel.forget()

    def _hear(self, beat: dict[str, Any]) -> None:
        notes = beat.get("notes", {})
        if not isinstance(notes, dict) or not all(isinstance(text, str) for text in notes.values()):
            raise Misbehaviour("it shared notes that cannot be read")
        if len(json.dumps(notes)) > _MAX_NOTE_BYTES or len(self.notes) > _MAX_NOTES:
            raise Misbehaviour("it shared too much")
        self.share(notes)

    def _give_up(self, ranks: list[int], why: str, are_dead: bool = False) -> None:
        self.close_for([self.members[rank].number for rank in ranks], self._name(ranks) or "this sync", why, are_dead)

    def _wait(self, number: int, deadline: float, seconds: float) -> None:
        while True:
            self.check()  # first: what was lost has been forgotten, and must not look as if it were done
            if all(channel.is_done(number) for channel in self.channels.values()):
                return
            gone = [r for r, each in self.channels.items() if each.has_left and not each.is_done(number)]
            if gone:
                self._give_up(gone, f"{self._name(gone)} left the run")
            elif time.monotonic() > deadline:
                late = [r for r, channel in self.channels.items() if channel.beat.get("exchanges", 0) < number]
                whose = f"{self._name(late)} did not come, though alive" if late else "though all take part"
                advice = "if this is their usual pace, raise sync_budget_seconds or send less"
                are_dead = bool(late) and all(self.channels[r].silent_ticks > self._patience_ticks // 2 for r in late)
                self._give_up(late, f"not done in {seconds:g} s, {whose}; {advice}", are_dead)
            else:
                self._changed.wait(max(0.0, deadline - time.monotonic()) + 0.01)

    def _name(self, ranks: Iterable[int]) -> str:
        return ", ".join(self.members[rank].name for rank in ranks)
