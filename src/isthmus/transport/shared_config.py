"""The comparison of the configurations that all workers must share."""

from __future__ import annotations

from isthmus.core.types import UserError
from isthmus.transport.peers import name_workers

_SHOWN = 3  # differing keys named in the message


def check_shared_configs(configs: list[dict[str, str]], names: list[str] | None = None) -> None:
    """Compare the workers' flat configurations, given in rank order or in the order of their names.

    A `UserError` names the first keys that differ, with the values and the workers that have them.
    """
    keys = list(dict.fromkeys(key for config in configs for key in config))
    differing = [key for key in keys if len({config.get(key) for config in configs}) > 1]
    if differing:
        shown = "; in ".join(f"{key}: {_values_by_worker(key, configs, names)}" for key in differing[:_SHOWN])
        more = f"; and in {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
        raise UserError(f"workers differ in {shown}{more}")


def _values_by_worker(key: str, configs: list[dict[str, str]], names: list[str] | None) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, config in enumerate(configs):
        ranks.setdefault(config.get(key, "nothing"), []).append(rank)

    def name(which: list[int]) -> str:
        return ", ".join(names[rank] for rank in which) if names else name_workers(which)

    return ", ".join(f"{name(which)} {'have' if len(which) > 1 else 'has'} {value}" for value, which in ranks.items())
