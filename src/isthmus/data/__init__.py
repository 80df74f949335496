"""The data that models are trained on."""

import logging
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Any

from isthmus.core.registry import Registry
from isthmus.data.base import DataSet, DataSpec, check_source
from isthmus.data.leased_batches import LeasedBatches, LeasesExhausted
from isthmus.data.ledger import Ledger
from isthmus.data.sample_order import OrderedBatches, open_batches
from isthmus.data.text import Text

DATA = Registry(
    "data",
    {
        "text": "isthmus.data.text:Text",
        "images": "isthmus.data.images:Images",
        "speech": "isthmus.data.speech:Speech",
    },
)
# former names: what they are called now, and the defaults that they had instead of today's
_FORMER: dict[str, tuple[str, dict[str, Any]]] = {
    "huggingface": ("text", {"text_column": "text"}),
    "huggingface_images": ("images", {"validation_fraction": 0.05, "flip": True}),
    "huggingface_speech": ("speech", {}),
}
_log = logging.getLogger(__name__)


def current_spec(spec: Any) -> Any:
    """Return a spec of data by today's names; log once what a former one is called now."""
    former = spec.get("type") if isinstance(spec, Mapping) else None
    if isinstance(former, str) and former in _FORMER:
        _log_new_name(former)
    return _renamed(spec)


def without_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flat settings of a run with its data by today's names and without what is at its default.

    So a run of a former version, whose data had other names and fewer options, is known to be the same.
    """
    data = {key.removeprefix("data."): value for key, value in settings.items() if key.startswith("data.")}
    spec = _renamed(data)
    if spec.get("type") in DATA.names():
        defaults = {each.name: each.default for each in fields(DATA.get(spec["type"]))}
        spec = {key: value for key, value in spec.items() if key not in defaults or value != defaults[key]}
    rest = {key: value for key, value in settings.items() if not key.startswith("data.")}
    return rest | {f"data.{key}": value for key, value in spec.items()}


def _renamed(spec: Any) -> Any:
    if not isinstance(spec, Mapping) or spec.get("type") not in _FORMER:
        return spec
    name, defaults = _FORMER[spec["type"]]
    values = {"source" if key == "name" else key: value for key, value in spec.items()}
    return {"source": None, **defaults, **values, "type": name}


@cache
def _log_new_name(former: str) -> None:
    name, defaults = _FORMER[former]
    more = "".join(f", {key}: {value}" for key, value in defaults.items()).lower()
    _log.warning(
        "data.type %s is now called %s, and its name source: {type: %s, source: ...%s}", former, name, name, more
    )


__all__ = [
    "DATA",
    "DataSet",
    "DataSpec",
    "LeasedBatches",
    "LeasesExhausted",
    "Ledger",
    "OrderedBatches",
    "Text",
    "check_source",
    "current_spec",
    "open_batches",
    "without_defaults",
]
