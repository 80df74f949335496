"""The ranks of torch.distributed: which of them make a worker, and how they find one another."""

from __future__ import annotations

import errno
import itertools
import json
import logging
import os
import socket
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from pydantic import TypeAdapter
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from isthmus.core.torch_internals import clone_default_store, skip_reverse_lookups, unconnected_gloo
from isthmus.core.types import UserError
from isthmus.link import Member
from isthmus.transport.address import INTERNET, resolve
from isthmus.transport.base import PeerLost, readable_message
from isthmus.transport.link_end import LinkEnd, LinkOptions, member_at

_LOGGER = logging.getLogger(__name__)
JOIN_BUDGETS = 10  # clusters do not start at the same moment: workers wait this many sync budgets for one another
_SEEN_SECONDS = 5.0  # for the last ones to see what all have written
_LOOK_SECONDS = 0.02  # between two looks whether rank 0 has come
_LOOPBACK = ("localhost", "127.0.0.1")
_num_stores = itertools.count()


@dataclass(frozen=True)
class RankLayout:
    """The ranks of all workers, one worker after the other, each of equally many ranks.

    Attributes:
        size: the number of all ranks.
        per_worker: the number of ranks of a worker.
    """

    size: int
    per_worker: int = 1

    def check(self, expected_workers: int | None) -> None:
        """Raise `UserError` where the ranks are not as many as the configuration says, or do not make whole workers."""
        started = f"{self.size} rank{'s' if self.size > 1 else ''} started"
        if expected_workers not in (None, self.size / self.per_worker):
            workers = f"{expected_workers} worker{'s' if expected_workers != 1 else ''}"
            of_ranks = f" of {self.per_worker} ranks" if self.per_worker > 1 else ""
            raise UserError(f"the configuration says {workers}{of_ranks}, but {started}")
        if self.size % self.per_worker:
            raise UserError(f"a worker has {self.per_worker} ranks, but {started}: start a multiple of that")

    def peers_of(self, rank: int) -> range:
        """Return the ranks that hold the same part of the model, one of each worker."""
        return range(rank % self.per_worker, self.size, self.per_worker)

    def of_worker(self, rank: int) -> range:
        """Return the ranks of the same worker."""
        first = rank - rank % self.per_worker
        return range(first, first + self.per_worker)

    def name(self, rank: int, host: str = "") -> str:
        """Return what to call a rank: 'worker 1', or 'worker 1 (rank 3, host x)'."""
        details = [f"rank {rank}"] if self.per_worker > 1 else []
        details += [f"host {host}"] if host else []
        return f"worker {rank // self.per_worker}" + (f" ({', '.join(details)})" if details else "")


class RankInfo(NamedTuple):
    """What a rank tells the others about itself."""

    host: str
    shared_config: dict[str, str]
    place: dict[str, Any]  # see `LinkEnd.place`

    def member(self, number: int, name: str) -> Member:
        """Return this rank as a member of a group of the link."""
        return member_at(self.place, name, number)


_RANK_INFO = TypeAdapter(RankInfo)


def follow_srun() -> None:
    """Say as torchrun does, in the environment, what srun says of the ranks that it has started, if they are several.

    A batch script sees the number of its job's tasks, too, though it is no task itself: only a step counts.
    """
    if "WORLD_SIZE" not in os.environ and os.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        for name, slurm in {"RANK": "PROCID", "LOCAL_RANK": "LOCALID", "WORLD_SIZE": "STEP_NUM_TASKS"}.items():
            os.environ.setdefault(name, os.environ[f"SLURM_{slurm}"])


def find_world() -> tuple[int, int]:
    """Return rank and number of ranks as torch.distributed says, or else the launcher, or else 0 and 1."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return 0, 1
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise UserError(
            f"WORLD_SIZE is {size}, but {', '.join(missing)} not set: start with torchrun or isthmus launch"
        )
    return int(os.environ["RANK"]), size


def initialise(backend: str, timeout_seconds: float, names: Sequence[str]) -> None:
    """Initialise torch.distributed, unless it is, from the launcher's environment, with the ranks of these names.

    Raises:
        UserError: the store cannot be reached.
        PeerLost: names the ranks that did not come within the timeout.
    """
    if dist.is_initialized():
        return
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    try:
        resolve(address, "it is waited for")
    except UserError as error:
        _LOGGER.warning("MASTER_ADDR: %s", error)
    skip_reverse_lookups()
    timeout = timedelta(seconds=timeout_seconds)
    try:
        with unconnected_gloo():  # between workers it is the link that connects
            dist.init_process_group(backend, timeout=timeout, **_own_store(address, int(port), timeout, names))
    except (OSError, RuntimeError, ValueError) as error:
        if "EADDRINUSE" in str(error) or getattr(error, "errno", 0) == errno.EADDRINUSE:
            raise UserError(f"port {port} is in use on this machine: set MASTER_PORT to a free one") from error
        raise UserError(
            f"{names[int(os.environ['RANK'])]} cannot meet the others at {address}:{port}: have all "
            f"{os.environ['WORLD_SIZE']} ranks started, and can they reach that port? ({readable_message(error)})"
        ) from error
    _wait_until_all_came(names, timeout_seconds)


def _wait_until_all_came(names: Sequence[str], seconds: float) -> None:
    """Wait for all ranks: if one went on, failed and ended, the others could wait for it, or for its store, in vain."""
    store, rank = open_store(), dist.get_rank()
    came = [f"came/{r}" for r in range(len(names))]
    store.set(came[rank], "")
    _wait_for(store, came, names, seconds)
    _tell_seen(store, rank, len(names))


def _tell_seen(store: Store, rank: int, size: int) -> None:
    """Tell that this rank has seen what it waited for; rank 0, whose store may end with it, waits for all to tell."""
    seen = [f"seen/{r}" for r in range(size)]
    store.set(seen[rank], "")
    if rank == 0:
        with suppress(RuntimeError):
            store.wait(seen, timedelta(seconds=_SEEN_SECONDS))


def _wait_for(store: Store, keys: list[str], names: Sequence[str], seconds: float) -> None:
    """Wait for a key of every rank; raise `PeerLost` where some did not come."""
    try:
        store.wait(keys, timedelta(seconds=seconds))
    except RuntimeError as error:
        missing = [r for r, key in enumerate(keys) if not store.check([key])]
        late = ", ".join(names[r] for r in missing)
        how = f"have all {len(names)} ranks started, and can they reach MASTER_PORT?"
        raise PeerLost(missing, f"{late} did not join within {seconds:g} s: {how}") from error


def _own_store(address: str, port: int, timeout: timedelta, names: Sequence[str]) -> dict[str, Any]:
    """Return what `init_process_group` is told where its own way to a store would not do.

    Where all ranks are on this machine, torch's store would listen on all of its addresses. And where torchrun has
    started the ranks again it keeps its store, and they would find there where the dead have listened.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store: Store
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = TCPStore(address, port, is_master=False, timeout=timeout)
        store = _store_of_the_living(store, rank, names, timeout.total_seconds())
    elif address not in _LOOPBACK:
        return {}
    elif rank == 0:
        listening = socket.create_server((address, port)).detach()
        store = TCPStore(address, port, size, True, timeout, wait_for_workers=False, master_listen_fd=listening)
    else:
        store = TCPStore(address, port, is_master=False, timeout=timeout)
    return {"store": store, "rank": rank, "world_size": size}


def _store_of_the_living(store: Store, rank: int, names: Sequence[str], seconds: float) -> Store:
    """Return a part of a store in which nothing is from ranks of before, which torchrun has started again.

    Its agents count that each for itself, so no number names the present ranks. Rank 0 names them anew; the others
    answer with a name of their own, and know by seeing it repeated that this rank 0 is none of before.
    """
    own = uuid.uuid4().hex
    if rank == 0:
        answers = [f"{own}/{r}" for r in range(len(names))]
        store.set(answers[0], own)
        store.set("living", own)
        _wait_for(store, answers, names, seconds)
        store.set(f"{own}/all", " ".join(name.decode() for name in store.multi_get(answers)))
        return PrefixStore(own, store)
    deadline, living = time.monotonic() + seconds, ""
    while time.monotonic() < deadline:
        if store.check(["living"]) and (told := store.get("living").decode()) != living:
            living = told
            store.set(f"{living}/{rank}", own)
        if living and store.check([f"{living}/all"]) and own in store.get(f"{living}/all").decode().split():
            return PrefixStore(living, store)
        time.sleep(_LOOK_SECONDS)
    raise PeerLost([0], f"{names[0]} did not join within {seconds:g} s: have all {len(names)} ranks started?")


def open_store() -> Store:
    """Open the store of torch.distributed anew, for keys of its own."""
    return PrefixStore(f"isthmus/{next(_num_stores)}", clone_default_store())


class RankLink(LinkEnd):
    """A link among ranks that find one another at the store of torch.distributed, and let in nobody else."""

    def __init__(self, sync_budget_seconds: float, options: LinkOptions) -> None:
        self._seconds = JOIN_BUDGETS * sync_budget_seconds
        super().__init__(
            options,
            towards=os.environ.get("MASTER_ADDR", INTERNET),
            tick_seconds=min(1.0, sync_budget_seconds / 20),
            patience_seconds=min(30.0, sync_budget_seconds / 3),
        )

    def exchange_info(self, rank: int, names: list[str], shared_config: dict[str, str]) -> list[RankInfo]:
        """Tell the others about this rank, and return what all ranks told, in rank order.

        Raises:
            PeerLost: names the ranks that did not come within the timeout.
            UserError: one of them is not trusted.
        """
        store = open_store()
        keys = [f"rank-info/{r}" for r in range(len(names))]
        own = RankInfo(socket.gethostname(), shared_config, self.place)
        store.set(keys[rank], json.dumps(self.trust.sign(keys[rank], own)))
        _wait_for(store, keys, names, self._seconds)
        try:
            told = store.multi_get(keys)
        except RuntimeError as error:
            raise PeerLost([], f"somebody else writes into the store: {readable_message(error)}") from error
        _tell_seen(store, rank, len(names))
        infos = [self._read(key, name, value) for key, name, value in zip(keys, names, told, strict=True)]
        self.named = [info.place["key"] for info in infos]
        return infos

    def _read(self, key: str, name: str, value: bytes) -> RankInfo:
        try:
            told = self.trust.read(key, json.loads(value))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{name} cannot take part: what stands at the store under {key}: {error}") from error
        try:
            info = _RANK_INFO.validate_python(told)
            info.member(0, name)
            return info
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(
                f"{name} cannot take part: it told something unreadable: install the same version of isthmus everywhere"
            ) from error
