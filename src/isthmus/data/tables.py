"""Rows of tables, and data sets by name: what the `datasets` library reads, and its errors in one line."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from isthmus.core.types import UserError, first_line
from isthmus.data.base import Positions
from isthmus.data.errors import TO_UTF_8, ErrorBudget
from isthmus.data.source import Source, SourceOptions, cannot_stream, find_sources
from isthmus.data.validation import held_out_rows

_KINDS = {"Image": "images", "Audio": "sound"}  # of files, and what they hold
_FOLDERS = frozenset({"imagefolder", "audiofolder"})  # builders that read one file a sample


def load_rows(source: Source, budget: ErrorBudget) -> Any:
    """Return the `datasets.Dataset`, or `IterableDataset` where it streams.

    Files here that cannot be read are left out and added to the budget; of a stream they are when their turn comes.

    Raises:
        UserError: it is not there, not for everybody, or not readable.
    """
    import datasets
    from pyarrow import ArrowInvalid

    arguments = source.arguments | {"split": source.split, "streaming": source.streaming}
    try:
        return datasets.load_dataset(**arguments)
    except (datasets.exceptions.DatasetGenerationError, ArrowInvalid) as error:
        good = _readable_files(source, budget) if source.is_here else []
        if not good:
            raise UserError(_explain(source, error.__cause__ or error)) from error
        return datasets.load_dataset(**arguments | {"data_files": {source.whole_split: good}})
    except Exception as error:  # builders raise whatever their libraries raise
        raise UserError(_explain(source, error)) from error


def load_splits(options: SourceOptions, load: Callable[[Source], Any]) -> list[tuple[Any, Positions]]:
    """Return the `datasets.Dataset` and the numbers of its rows to train on, and the same to evaluate with."""
    source, held_out = find_sources(options)
    dataset = load(source)
    rows = np.arange(len(dataset))
    if held_out is not None:
        validation = load(held_out)
        return [(dataset, rows), (validation, np.arange(len(validation)))]
    if len(rows) < 2:
        raise UserError(f"data: split {source.split!r} of {source.name!r} has fewer than 2 rows: set validation_split")
    chosen = held_out_rows(len(rows), options.validation_fraction)
    return [(dataset, np.setdiff1d(rows, chosen)), (dataset, chosen)]


def load_files(source: Source, columns: Mapping[str, str], kind: str, budget: ErrorBudget) -> Any:
    """Return the data set of these columns, the first of which holds files, as {"bytes", "path"}.

    Columns are named by the options that say them, the kind of the files by a feature of the library. Nothing is
    decoded: the library would end a shard at its first damaged file.

    Raises:
        UserError: as in `load_rows`; or files are not in the rows, a column is not there, or holds something else.
    """
    import datasets

    dataset = load_rows(source, budget)
    if source.streaming and (dataset.features is None or dataset.builder_name in _FOLDERS):
        raise cannot_stream(source.name)
    for option, column in columns.items():
        check_column(source.name, option, column, list(dataset.features))
    option, column = next(iter(columns.items()))
    if type(dataset.features[column]).__name__ != kind:
        raise UserError(f"data: column {column!r} of {source.name!r} does not hold {_KINDS[kind]}: set data.{option}")
    if source.streaming:  # rows are brought to the columns' features, which for sound needs a library to encode it
        plain = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}
        dataset = dataset.decode(False).cast_column(column, plain)
    else:
        dataset = dataset.cast_column(column, getattr(datasets, kind)(decode=False))
    return dataset.select_columns(list(columns.values()))


def map_once(
    dataset: Any,
    function: Callable[..., dict[str, Any]],
    columns: list[str],
    parts: list[Any],
    features: dict[str, Any],
    description: str,
    **options: Any,
) -> Any:
    """Return what `Dataset.map` makes of some columns: one process of a machine does it, others find it.

    Args:
        dataset: a `datasets.Dataset`.
        function: of the values of `columns`.
        columns: the names of the columns.
        parts: all on which the result depends beside the data.
        features: columns of the result, by name.
        description: what the progress bar says.
        options: more for `Dataset.map`.
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


def check_column(name: str, option: str, column: str, columns: list[str]) -> None:
    """Refuse a column that is not there, which this option names."""
    if column not in columns:
        raise UserError(
            f"data: {name!r} has no column {column!r}, its columns are {', '.join(columns)}: set data.{option}"
        )


def file_in(cell: dict[str, Any] | None) -> Path | BytesIO:
    """Return the file that a cell holds, or where it is; raise OSError where there is neither."""
    if cell and cell["bytes"] is not None:
        return BytesIO(cell["bytes"])
    if cell and cell["path"] is not None:
        return Path(cell["path"])
    raise OSError("it holds no file")


def file_in_row(dataset: Any, column: str) -> Callable[[str], Path | BytesIO]:
    """Return what finds the file of a row by the row's name."""
    return lambda name: file_in(dataset[int(name.split()[1])][column])


def row_name(dataset: Any, row: int) -> str:
    """Return what messages call a row of a `datasets.Dataset`."""
    return f"row {row} of {dataset.split}"


def streamed_file_in(cell: dict[str, Any] | None, name: str) -> BytesIO:
    """Return the file that a cell of a stream holds; refuse one that only says where the file is."""
    file = file_in(cell)
    if isinstance(file, Path):
        raise UserError(
            f"data: {name!r} only names a file, {str(file)!r}; streamed files lie in the rows of Parquet, Arrow or "
            "tar files: give such, or set data.streaming to false"
        )
    return file


def _readable_files(source: Source, budget: ErrorBudget) -> list[str]:
    """The files that can be read to their end; none where all can, so that something else is wrong."""
    import datasets

    arguments = source.arguments
    builder = datasets.load_dataset_builder(**arguments)
    files = [str(file) for file in builder.config.data_files[source.whole_split]]
    good = []
    for file in files:
        only = {"data_files": {source.whole_split: [file]}}
        try:
            for _ in datasets.load_dataset(**arguments | only, split=source.whole_split, streaming=True):
                pass
            good.append(file)
        except Exception as error:  # readers raise whatever their libraries raise
            budget.add(file, error)
    return good if len(good) < len(files) else []


def _explain(source: Source, error: BaseException) -> str:
    reason = first_line(error).rstrip(".")
    if isinstance(error, UnicodeDecodeError):
        return f"data: {source.name!r} is not UTF-8: {TO_UTF_8}"
    if source.is_here:
        return f"data: {source.name!r} cannot be loaded ({reason}); give a folder or files that hold {source.split!r}"
    if "gated" in reason:
        return f"data: {reason}; then log in with 'hf auth login', or set HF_TOKEN"
    if isinstance(error, ConnectionError):
        return (
            f"data: {source.name!r} is not on this machine, and the Hub cannot be reached ({reason}); "
            "check the network, or give a folder or files"
        )
    return f"data: {source.name!r} cannot be loaded ({reason}); check data.source, data.config and data.split"
