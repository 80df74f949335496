"""The training and the validation side of a data set whose rows are found by number."""

from __future__ import annotations

from typing import Any

import numpy as np

from isthmus.core.types import UserError
from isthmus.data.bad import ErrorBudget
from isthmus.data.hub import Source, load
from isthmus.data.packing import RowNumbers, hold_out

Side = tuple[Any, RowNumbers]  # a `datasets.Dataset`, and which of its rows


def load_splits(place: Source, held_out_place: Source | None, fraction: float, bad: ErrorBudget) -> list[Side]:
    """Training and validation rows: a split each, or rows of one, chosen by their number.

    Args:
        place: of the training data.
        held_out_place: of the validation data, where they have one of their own.
        fraction: of the rows that is held out, where they have none.
        bad: where files go that cannot be read.
    """
    dataset = load(place, bad)
    rows = np.arange(len(dataset))
    if held_out_place is not None:
        held_out = load(held_out_place, bad)
        return [(dataset, rows), (held_out, np.arange(len(held_out)))]
    if len(rows) < 2:
        raise UserError(f"data: split {place.split!r} of {place.name!r} has {len(rows)} rows: set validation_split")
    chosen = hold_out(len(rows), fraction)
    return [(dataset, np.setdiff1d(rows, chosen)), (dataset, chosen)]
