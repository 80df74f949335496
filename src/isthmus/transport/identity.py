"""Are all workers set up alike?"""

from __future__ import annotations

from isthmus.core.types import UserError
from isthmus.transport.peers import name_workers

_SHOWN = 3  # differing keys named in the message


def check_identities(identities: list[dict[str, str]], names: list[str] | None = None) -> None:
    """Compare the workers' flat configurations, given in rank order or in the order of their names.

    Raises:
        UserError: names the first keys that differ, with the values and who has them.
    """
    keys = list(dict.fromkeys(key for identity in identities for key in identity))
    differing = [key for key in keys if len({identity.get(key) for identity in identities}) > 1]
    if differing:
        shown = "; in ".join(f"{key}: {_who_has_what(key, identities, names)}" for key in differing[:_SHOWN])
        more = f"; and in {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
        raise UserError(f"workers differ in {shown}{more}")


def _who_has_what(key: str, identities: list[dict[str, str]], names: list[str] | None) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, identity in enumerate(identities):
        ranks.setdefault(identity.get(key, "nothing"), []).append(rank)

    def name(who: list[int]) -> str:
        return ", ".join(names[rank] for rank in who) if names else name_workers(who)

    return ", ".join(f"{name(who)} {'have' if len(who) > 1 else 'has'} {what}" for what, who in ranks.items())
