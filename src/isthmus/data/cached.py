"""What is computed of a data set once, and then found in the cache of `datasets`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any


def map_once(
    dataset: Any,
    function: Callable[..., dict[str, Any]],
    columns: list[str],
    parts: list[Any],
    features: dict[str, Any],
    description: str,
    **options: Any,
) -> Any:
    """The data set that `Dataset.map` makes of some columns: by one process of a machine, the others find it done.

    Args:
        dataset: a `datasets.Dataset`.
        function: of the values of `columns`.
        columns: that it is given.
        parts: all on which the result depends beside the data.
        features: columns of the result, by name.
        description: of what is done, for the progress bar.
        options: for `Dataset.map`.
    """
    from datasets import Features, config
    from filelock import FileLock

    fingerprint = hashlib.sha256(repr([dataset._fingerprint, columns, parts]).encode()).hexdigest()[:16]
    folder = Path(config.HF_DATASETS_CACHE).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / f"isthmus-{fingerprint}.lock"):
        return dataset.map(
            function,
            input_columns=columns,
            remove_columns=dataset.column_names,
            features=Features(features),
            new_fingerprint=fingerprint,
            desc=description,
            **options,
        )
