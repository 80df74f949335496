"""What a worker tells the others at a rendezvous, and the check of what comes from another machine."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from isthmus.core.types import UserError
from isthmus.link import Member
from isthmus.link.identity import check_fingerprint
from isthmus.transport.address import split_address
from isthmus.transport.link_end import member_at

MemberInfo = dict[str, Any]  # plain JSON values, at most a few kilobytes


def _address(text: str) -> str:
    try:
        split_address(text)
    except UserError as error:
        raise ValueError(str(error)) from error
    return text


def _key(text: str) -> str:
    try:
        check_fingerprint(text)
    except UserError as error:
        raise ValueError(str(error)) from error
    return text


_Count = Annotated[int, Field(ge=0)]
_Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class RankAddress(TypedDict):
    """How the link of a rank is reached, and the key that it holds; see `isthmus.link.Member`."""

    address: Annotated[str, AfterValidator(_address)]
    key: Annotated[str, AfterValidator(_key)]
    id: Annotated[str, Field(min_length=1, max_length=64)]
    via: Annotated[str, AfterValidator(_address)] | None


class Told(TypedDict):
    """The whole of what a worker tells.

    Attributes:
        links: of its ranks.
        groups: of the link that its ranks have; empty where a rank has none.
        shared_config: the flat configuration that all workers must share.
        version, chain: how many commits its state holds, and which they were.
        outer_step: the sync that it asks for.
        needed_workers: with fewer it does not commit.
        last_members: the workers that made the last commit, of whom it needs more than half; empty where it does not.
        healed: it has caught up, and has been in no commit since.
        proposal: what it wants committed with the sync.
        finished: it has come to the end of the run.
        speed: inner steps a second.
        download_seconds, adopt_seconds: what catching up has taken, until it takes part in a commit.
        samples_per_step: of this worker.
        meets_directly: it meets with those who are left after a death, and only asks the engine who else is there.
    """

    links: Annotated[list[RankAddress], Field(min_length=1)]
    groups: Annotated[list[str], Field(min_length=1)]
    shared_config: dict[str, str]
    version: _Count
    chain: str
    outer_step: _Count
    needed_workers: _Count
    last_members: list[str]
    healed: bool
    proposal: Any
    finished: bool
    speed: _Amount
    download_seconds: _Amount
    adopt_seconds: _Amount
    samples_per_step: _Count
    meets_directly: bool


_TOLD = TypeAdapter(Told)


def read_told(info: Any) -> MemberInfo:
    """Return what another worker told, with all that a worker tells; raises `ValueError` else."""
    try:
        _TOLD.validate_python(info, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise ValueError(f"{where}: {first['msg']}: install the same version of isthmus everywhere") from None
    if len(info["links"]) != len(info["groups"]):
        raise ValueError("links and groups are not of the same ranks: install the same version of isthmus everywhere")
    read: MemberInfo = info
    return read


def member_of(name: str, info: MemberInfo, rank: int, number: int = 0) -> Member:
    """Return how a rank of a worker is reached over the link, and the key that it must hold."""
    return member_at(info["links"][rank], f"worker {name}", number)
