"""Heartbeats: every rank writes its own to the store, and reads all others', on a connection of its own."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Beat:
    """One heartbeat of a rank."""

    number: int = 0
    collectives: dict[str, int] = field(default_factory=dict)  # how many it has entered, by the kind of group
    left: bool = False
    given_up: tuple[int, ...] = ()  # ranks it waited for in vain


@dataclass(frozen=True)
class Verdict:
    """The judgement that some ranks cannot be waited for, and why."""

    ranks: list[int]
    reason: str


class Heartbeat:
    """Sends this rank's heartbeats and watches all others', on a daemon thread.

    Silence is counted in rounds and looks that this rank itself completed, not in seconds: a pause of its own
    (a long call that holds the interpreter, a suspended machine) must not look like the death of all others.

    The connection to the store is used by nothing else, so that bulk traffic cannot delay a beat. The death of the rank
    `store_rank` takes the store with it; None: it lives elsewhere (torchrun's agent).
    """

    def __init__(
        self, store: Store, rank: int, num_ranks: int, store_rank: int | None, interval_seconds: float
    ) -> None:
        self.num_ranks, self.interval_seconds = num_ranks, interval_seconds
        self.collectives = Counter[str]()  # entered so far, by the kind of group
        self._store, self._rank, self._store_rank = store, rank, store_rank
        self._names = [f"worker {r}" for r in range(num_ranks)]
        self._keys = [f"beat/{r}" for r in range(num_ranks)]
        self._number = 0  # rounds completed
        self._left = False
        self._given_up: tuple[int, ...] = ()
        self._beats = [Beat() for _ in self._keys]
        self._silent_rounds = [0 for _ in self._keys]
        self._number_seen, self._looks_in_vain = 0, 0
        self._wake, self._stopped = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="isthmus-heartbeat", daemon=True)
        self._beat()

    def wait_for_all(self, timeout_seconds: float) -> list[int]:
        """Wait until all ranks have sent a heartbeat; returns those that have not."""
        try:
            self._store.wait(self._keys, timedelta(seconds=timeout_seconds))
        except RuntimeError:
            return [rank for rank, key in enumerate(self._keys) if not self._store.check([key])]
        return []

    def start(self, names: list[str]) -> None:
        """Begin to watch the ranks, which people know by these names, once all have sent a heartbeat."""
        self._names = names
        self._thread.start()

    def look(self, patience_rounds: int, members: Sequence[int]) -> Verdict | None:
        """Judge the others by their silence; None while everybody seems alive. To be called every interval.

        Only the members of the group in which this rank waits may not have left.
        """
        self._looks_in_vain = self._looks_in_vain + 1 if self._number == self._number_seen else 0
        self._number_seen = self._number
        told = sorted({rank for beat in self._beats for rank in beat.given_up})
        if told:
            return Verdict(told, f"another worker gave up on {self._name(told)}")
        if self._looks_in_vain >= patience_rounds:
            return self._store_lost()
        silent = [r for r, rounds in enumerate(self._silent_rounds) if r != self._rank and rounds >= patience_rounds]
        left = [r for r in silent if self._beats[r].left and r in members]
        if left:
            return Verdict(left, f"{self._name(left)} left the run")
        silent = [r for r in silent if not self._beats[r].left]
        if not silent:
            return None
        seconds = patience_rounds * self.interval_seconds
        return Verdict(silent, f"{self._name(silent)} gave no sign of life for {seconds:.1f} s")

    def late(self, kind: str, members: Sequence[int]) -> Verdict | None:
        """Return the members of a group that have not entered the collective in which this rank waits."""
        entered = {r: self._beats[r].collectives.get(kind, 0) for r in members if r != self._rank}
        ranks = [r for r, number in entered.items() if number < self.collectives[kind]]
        return Verdict(ranks, f"{self._name(ranks)} did not come, though alive") if ranks else None

    def give_up(self, ranks: list[int]) -> None:
        """Tell the others which ranks this one waited for in vain, so that they need not."""
        self._given_up = tuple(ranks)
        self._tell()

    def leave(self, linger_seconds: float) -> None:
        """Tell the others that this rank leaves, and end; the rank that holds the store lets the others go first."""
        if self._left:
            return
        self._left = True
        self._tell()
        deadline = time.monotonic() + linger_seconds
        while self._rank == self._store_rank and self._waited_for() and time.monotonic() < deadline:
            self._tell()
        self._stopped.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(self.interval_seconds)

    def _waited_for(self) -> bool:
        done = {self._rank, *self._given_up}
        return any(rank not in done and not beat.left for rank, beat in enumerate(self._beats))

    def _store_lost(self) -> Verdict:
        if self._store_rank is None:
            return Verdict([], "torchrun's store does not answer: its agent is gone, or this worker is cut off")
        name = self._names[self._store_rank]
        return Verdict([self._store_rank], f"{name}, which holds the store, is gone, or this worker is cut off")

    def _name(self, ranks: list[int]) -> str:
        return ", ".join(self._names[rank] for rank in ranks)

    def _tell(self) -> None:
        """Have a heartbeat written now, and wait for it, but not for ever."""
        number, deadline = self._number, time.monotonic() + 2 * self.interval_seconds
        while self._thread.is_alive() and self._number < number + 2 and time.monotonic() < deadline:
            self._wake.set()
            time.sleep(0.01)

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                self._beat()
                self._listen()
                self._number += 1
                self._wake.wait(self.interval_seconds)
                self._wake.clear()
        except RuntimeError:
            return  # the store is gone: `look` notices that the rounds have ended

    def _beat(self) -> None:
        beat = [self._number, dict(self.collectives), self._left, self._given_up]
        self._store.set(self._keys[self._rank], json.dumps(beat))

    def _listen(self) -> None:
        for rank, value in enumerate(self._store.multi_get(self._keys)):
            number, collectives, left, given_up = json.loads(value)
            beat = Beat(number, collectives, left, tuple(given_up))
            self._silent_rounds[rank] = 0 if beat != self._beats[rank] else self._silent_rounds[rank] + 1
            self._beats[rank] = beat
