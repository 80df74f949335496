"""One worker of the doctor's: look around, meet the others, measure the ways to them, judge."""

from __future__ import annotations

import os
import platform
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import torch
from rich.console import Console

from isthmus.config import RunConfig
from isthmus.core import UserError
from isthmus.tools.doctor.check import Check
from isthmus.tools.doctor.compare import compare_clocks, compare_workers, judge_links
from isthmus.tools.doctor.link import Clock, Link, answer, measure
from isthmus.tools.doctor.surroundings import data_fingerprint, look_around
from isthmus.tools.doctor.tables import show
from isthmus.tools.doctor.world import World, build_world
from isthmus.tools.show import sync_bytes
from isthmus.train import assemble
from isthmus.transport import TransportError
from isthmus.transport.address import join_address, split_address
from isthmus.transport.elastic.worker_ranks import worker_number

_KNOCK_SECONDS = 5.0
_LONGEST_SHARE = 0.1  # of the sync budget that one transfer may take before the doctor has seen enough


def doctor(config: RunConfig, console: Console, now: Clock = time.time) -> int:
    """Examine a configuration from one of its workers, all of which call this.

    Which worker this is say RANK and WORLD_SIZE, as for training. The first worker on each machine prints what all of
    them found together, and each one that could not meet the others what it found alone.

    Args:
        config: of the run.
        console: for the tables.
        now: this machine's wall clock, in seconds.

    Returns:
        The exit code: 0 when all is well, 2 when something must be changed, 1 when the workers could not meet.

    Raises:
        UserError: the configuration names no transport that can be examined.
    """
    world = build_world(config, lambda line: console.print(line, soft_wrap=True))
    checks = look_around(config, worker_number())
    try:
        if any(check.name == "rendezvous" and check.status == "fail" for check in checks):
            raise TransportError("not tried: see rendezvous")
        with _state_door(world.state_host) if world.state_host else nullcontext("") as door:
            world.connect()
            examination = _Examination(world, now, config.outer.transport["sync_budget_seconds"])
            cards = examination.run(_introduce(config, checks, door))
    except (UserError, TransportError) as error:
        show(console, {world.name: [*checks, Check("meeting", "fail", str(error))]}, [])
        return 1
    finally:
        world.leave()
    findings = {name: [Check(**check) for check in card["checks"]] for name, card in cards.items()}
    links = [Link(**link) for card in cards.values() for link in card["links"]]
    findings["all"] = [*compare_workers(cards), *_judge(links, cards, config)]
    if os.environ.get("LOCAL_RANK", "0") == "0":
        show(console, findings, links)
    return 2 if any(check.status == "fail" for checks in findings.values() for check in checks) else 0


class _Examination:
    """What workers that met do: in every round each of them measures its way to one other.

    A meeting begins each round, so that nobody waits in vain for one who is still busy with another. Cards say which
    round a worker has come to; those who are ahead sit out until the others have caught up.
    """

    def __init__(self, world: World, now: Clock, budget_seconds: float) -> None:
        self._world, self._now, self._budget_seconds = world, now, budget_seconds

    def run(self, card: dict[str, Any]) -> dict[str, Any]:
        """Everybody's card in the end, by name; `card` is this worker's own, and collects what it finds.

        Raises:
            TransportError: the workers could not meet.
        """
        cards: dict[str, Any] = {}
        while True:
            try:
                cards = self._world.meet(card)
            except TransportError:
                if cards and self._is_over(cards):
                    return cards  # the others saw the same, and have gone
                raise
            names, stage = list(cards), _stage(cards)
            if not self._is_over(cards):
                if card["round"] == stage:
                    card["round"] += 1
                    for pair in rounds(names)[stage]:
                        if self._world.name in pair:
                            self._meet_one(card, cards, pair)
                continue
            try:
                self._world.peers(names).all_gather([torch.zeros(1)])  # nobody goes before all have seen the last cards
                return cards
            except TransportError:
                continue

    def _is_over(self, cards: dict[str, Any]) -> bool:
        return _stage(cards) >= len(rounds(list(cards)))

    def _meet_one(self, card: dict[str, Any], cards: dict[str, Any], pair: tuple[str, str]) -> None:
        here, there = pair
        other = there if self._world.name == here else here
        problem = _knock(cards[other]["door"])
        if problem:
            what = f"cannot reach {other} at {cards[other]['door']}, where it hands its state to who must catch up"
            advice = "let workers open connections to each other's machines; set outer.transport.host"
            card["checks"].append(asdict(Check("catching up", "fail", f"{what} ({problem})", advice)))
        try:
            peers = self._world.peers([here, there])
            if self._world.name == here:
                link = measure(peers, here, there, self._now, _LONGEST_SHARE * self._budget_seconds)
                card["links"].append(asdict(link))
            else:
                answer(peers, self._now)
        except TransportError as error:
            card["checks"].append(asdict(Check("link", "fail", f"{here} to {there}: {error}", "open the ways between")))


def rounds(names: list[str]) -> list[list[tuple[str, str]]]:
    """Who meets whom in which round: all pairs, nobody twice in a round (the circle method of tournaments)."""
    circle: list[str | None] = [*sorted(names), *[None][: len(names) % 2]]
    plan = []
    for _ in range(len(circle) - 1 if len(names) > 1 else 0):
        half = len(circle) // 2
        facing = zip(circle[:half], reversed(circle[half:]), strict=True)
        plan.append([(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return plan


def _stage(cards: dict[str, Any]) -> int:
    """The round to be carried out now."""
    return min(int(card["round"]) for card in cards.values())


def _introduce(config: RunConfig, checks: list[Check], door: str) -> dict[str, Any]:
    """What this worker tells the others at first."""
    shared = assemble.shared_keys(config)
    first = worker_number() == 0 and config.train.workers > 1
    return {
        "round": 0,
        "checks": [asdict(check) for check in checks],
        "links": [],
        "door": door,
        "config": {key: str(value) for key, value in shared.items()},
        "hash": assemble.config_hash(config),
        "isthmus": {"version": version("isthmus")},
        "data": {"fingerprint": data_fingerprint(config)} if door else {},
        "versions": {"python": platform.python_version(), "torch": str(torch.__version__)},
        "sync_bytes": sync_bytes(config) if first else {},
    }


def _judge(links: list[Link], cards: dict[str, Any], config: RunConfig) -> list[Check]:
    counts: dict[str, int] = next((card["sync_bytes"] for card in cards.values() if card["sync_bytes"]), {})
    if not links or not counts:
        return []
    return [compare_clocks(links, list(cards)), *judge_links(links, counts, config)]


@contextmanager
def _state_door(host: str) -> Iterator[str]:
    """An address like that at which this worker would hand out its state."""
    try:
        door = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise UserError(
            f"{host} is no address of this machine ({error.strerror}): correct outer.transport.host"
        ) from error
    with door:
        yield join_address(host, door.getsockname()[1])


def _knock(door: str) -> str:
    """Why nobody can be reached there; empty where somebody can, or nobody needs to be."""
    try:
        if door:
            socket.create_connection(split_address(door), _KNOCK_SECONDS).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""
