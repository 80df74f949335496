"""The workers as the doctor meets them: all of them with their cards, and any of them as peers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from isthmus.config import RunConfig
from isthmus.core import UserError
from isthmus.core.types import Peers
from isthmus.spec import build
from isthmus.tools.doctor.check import Card
from isthmus.train.assemble import transport_class
from isthmus.transport import TRANSPORTS, TransportError
from isthmus.transport.elastic.membership import Rendezvous
from isthmus.transport.elastic.rank_consensus import rendezvous
from isthmus.transport.elastic.transport import ElasticTransport
from isthmus.transport.elastic.worker_ranks import worker_name
from isthmus.transport.peers import BufferPeers
from isthmus.transport.readable import readable_message
from isthmus.transport.single_rank import SINGLE_RANK
from isthmus.transport.torch_dist import TorchDist

_JOIN_BUDGETS = 10  # the first meeting waits so many sync budgets: as a run does
_LATER_BUDGETS = 2
_PAUSE_SECONDS = 0.2


class World(Protocol):
    """All workers of a configuration. The same calls are made by each of them."""

    name: str
    state_host: str  # where workers hand their state to those who must catch up; empty in a static world

    def connect(self) -> None:
        """Reach the rendezvous; raises `UserError` or `TransportError`."""
        ...

    def meet(self, card: Card) -> dict[str, Card]:
        """Show a card and see everybody's, by name; raises `TransportError` where not all came."""
        ...

    def peers(self, names: list[str]) -> Peers:
        """Some of those who met last, in rank order, this worker among them."""
        ...

    def leave(self) -> None:
        """Say goodbye."""
        ...


def build_world(config: RunConfig, say: Callable[[str], None]) -> World:
    """The world of a configuration. Its workers need not agree on anything yet."""
    spec, workers = config.outer.transport, config.train.workers
    spec = transport_class(config).apart_from_a_run(spec)
    transport = build(TRANSPORTS, spec, shared_config={}, expected_workers=workers)
    match transport:
        case TorchDist():
            return StaticWorld(transport)
        case ElasticTransport():
            return ElasticWorld(transport, workers, say)
    raise UserError(
        f"doctor cannot examine outer.transport.type {spec['type']}: it knows torch_dist and the elastic ones"
    )


class StaticWorld:
    """All ranks of torch.distributed; a pair talks over the same backend, point to point."""

    state_host = ""

    def __init__(self, transport: TorchDist) -> None:
        self.name = worker_name()
        self._transport = transport
        self._names: list[str] = []

    def connect(self) -> None:
        """See `World.connect`."""
        nobody: Any = None  # in a static world no state is ever asked for
        self._transport.join(nobody)

    def meet(self, card: Card) -> dict[str, Card]:
        """See `World.meet`."""
        own = json.dumps(card | {"name": self.name}).encode()
        everybody = self._transport.quorum(0)
        longest = max(int(length) for (length,) in everybody.all_gather([torch.tensor([len(own)])]))
        texts = everybody.all_gather([torch.tensor(list(own.ljust(longest)), dtype=torch.uint8)])
        cards = [json.loads(bytes(text.tolist())) for (text,) in texts]
        self._names = [card["name"] for card in cards]
        return dict(zip(self._names, cards, strict=True))

    def peers(self, names: list[str]) -> Peers:
        """See `World.peers`: all, or a pair."""
        if len(names) == len(self._names):
            return self._transport.quorum(0)
        (other,) = set(names) - {self.name}
        device = "cpu" if self._transport.backend == "gloo" else "cuda"
        budget = self._transport.sync_budget_seconds
        return _Pair(names.index(self.name), self._names.index(other), device, budget)

    def leave(self) -> None:
        """See `World.leave`."""
        self._transport.leave()


class _Pair(BufferPeers):
    """Two ranks of the default process group."""

    def __init__(self, rank: int, other: int, device: str, budget_seconds: float) -> None:
        super().__init__(rank, [0.5, 0.5])
        self._other, self._device, self._timeout = other, device, timedelta(seconds=budget_seconds)

    def _all_to_all(self, buffer: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        parts = list(torch.split(buffer.to(self._device), sizes))
        received = [part.new_empty(sizes[self.rank]) for part in parts]
        received[self.rank] = parts[self.rank]
        sent, got = parts[1 - self.rank], received[1 - self.rank]
        try:
            work = [dist.isend(sent, self._other)] if len(sent) else []
            work += [dist.irecv(got, self._other)] if len(got) else []
            for each in work:
                assert each is not None
                each.wait(self._timeout)
        except RuntimeError as error:
            raise TransportError(f"rank {self._other} does not answer ({readable_message(error)})") from error
        return torch.cat(received).to(buffer.device)


class ElasticWorld:
    """Workers that meet through an elastic engine."""

    def __init__(self, transport: ElasticTransport, expected_workers: int, say: Callable[[str], None]) -> None:
        self._engine, self._budget_seconds = transport.membership, transport.sync_budget_seconds
        self.name, self.state_host = self._engine.name, transport.state_host
        self._expected, self._say = expected_workers, say
        self._known: set[str] = set()  # who was at the first meeting
        self._rendezvous = Rendezvous("", {})

    def connect(self) -> None:
        """See `World.connect`."""
        self._engine.connect()

    def meet(self, card: Card) -> dict[str, Card]:
        """See `World.meet`."""
        seconds = (_LATER_BUDGETS if self._known else _JOIN_BUDGETS) * self._budget_seconds
        deadline, said = time.monotonic() + seconds, ""
        while missing := self._try_to_meet(card):
            if time.monotonic() > deadline:
                raise TransportError(f"the workers did not meet within {seconds:g} s: {missing}")
            if missing != said:
                self._say(f"{self.name} waits: {missing}")
                said = missing
            time.sleep(_PAUSE_SECONDS)
        self._known = self._known or set(self._rendezvous.members)
        return {name: self._rendezvous.members[name] for name in sorted(self._known)}

    def peers(self, names: list[str]) -> Peers:
        """See `World.peers`."""
        return self._engine.connect_peers(self._rendezvous, names, [1 / len(names)] * len(names))

    def leave(self) -> None:
        """See `World.leave`."""
        self._engine.leave()

    def _try_to_meet(self, card: Card) -> str:
        """Why this was no meeting of all; empty when it was one."""
        try:
            self._rendezvous = rendezvous(SINGLE_RANK, self._engine, card, self._budget_seconds)
        except TransportError as error:
            return str(error)
        here = set(self._rendezvous.members)
        strangers = [name for name, card in self._rendezvous.members.items() if "round" not in card]
        if strangers:
            return f"{', '.join(strangers)} train here already: examine before a run, or through another rendezvous"
        if self._known - here:
            return f"{', '.join(sorted(self._known - here))} went away"
        if len(here) < self._expected:
            return f"{len(here)} of train.workers = {self._expected} workers are here ({', '.join(sorted(here))})"
        return ""
