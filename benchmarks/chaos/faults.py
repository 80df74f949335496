"""What can befall a worker."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from benchmarks.chaos.machine import Machine
from benchmarks.chaos.world import World

_LASTS = (2.0, 8.0)  # seconds
PAUSE_SECONDS = 8.0  # in the mean, from the end of a fault to the next: about five faults a minute


@dataclass(frozen=True)
class Fault:
    """One of them, as it happened; seconds since the epoch."""

    kind: str
    victim: int
    begin: float
    end: float


def _kill(machine: Machine, rank: int, seconds: float) -> None:
    machine.signal(signal.SIGKILL, rank)


def _stop(machine: Machine, rank: int, seconds: float) -> None:
    machine.signal(signal.SIGSTOP, rank)
    time.sleep(seconds)
    machine.signal(signal.SIGCONT, rank)


def _unplug(machine: Machine, rank: int, seconds: float) -> None:
    machine.unplug()
    time.sleep(seconds)
    machine.replug()


def _poison(machine: Machine, rank: int, seconds: float) -> None:
    machine.signal(signal.SIGUSR1, rank)


def _fill_disk(machine: Machine, rank: int, seconds: float) -> None:
    ballast = machine.disk / "ballast"
    with suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:  # until no space is left
            file.write(bytes(2**16))
    time.sleep(seconds)
    ballast.unlink()


KINDS: dict[str, Callable[[Machine, int, float], None]] = {
    "SIGKILL": _kill,
    "SIGSTOP": _stop,
    "cable pulled": _unplug,
    "NaN": _poison,
    "disk full": _fill_disk,
}


def strike(world: World, number: int, seed: int, pause_seconds: float = PAUSE_SECONDS) -> list[Fault]:
    """So many faults at random moments, each kind equally often in random order, each on a random worker and rank."""
    dice = random.Random(seed)
    kinds = [list(KINDS)[index % len(KINDS)] for index in range(number)]
    dice.shuffle(kinds)
    faults = []
    for index, kind in enumerate(kinds):
        time.sleep(dice.expovariate(1 / pause_seconds))
        victim, seconds = dice.choice(world.training()), dice.uniform(*_LASTS)
        rank = dice.randrange(world.ranks) if world.ranks > 1 else 0
        begin = time.time()
        KINDS[kind](world.machines[victim], rank, seconds)
        faults.append(Fault(kind, victim, begin, time.time()))
        print(f"{index + 1}/{number}: {kind}, worker {victim}, {time.time() - begin:.1f} s", flush=True)
    return faults
