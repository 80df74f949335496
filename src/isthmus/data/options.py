"""Options that many kinds of data have, and what is wrong with them in one line."""

from __future__ import annotations

from typing import Any

from isthmus.core.types import UserError


def check_options(spec: Any) -> None:
    """Refuse a `validation_fraction`, and where there is one a `smallest_crop` or `max_bad_samples`, out of range."""
    if not 0 < spec.validation_fraction < 1:
        raise UserError(f"data: validation_fraction is {spec.validation_fraction}; choose one between 0 and 1")
    if not 0 < getattr(spec, "smallest_crop", 1) <= 1:
        raise UserError(f"data: smallest_crop is {spec.smallest_crop}; choose one above 0 and at most 1")
    if getattr(spec, "max_bad_samples", 0) < 0:
        raise UserError(f"data: max_bad_samples is {spec.max_bad_samples}; choose at least 0")
