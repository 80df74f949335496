"""Data sets of the `datasets` library, on this machine or on the Hub, and what can be wrong with them in one line."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from isthmus.core.types import UserError
from isthmus.data.bad import ErrorBudget
from isthmus.data.retry import first_line

_BUILDERS = {
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "text",
    ".tar": "webdataset",
}
_PACKED = frozenset({".gz", ".zst", ".xz", ".bz2", ".lz4"})
_KINDS = {"Image": "images", "Audio": "sound"}  # of files, and what they hold
_FOLDERS = frozenset({"imagefolder", "audiofolder"})  # builders that read one file a sample


@dataclass(frozen=True)
class Source:
    """Where data are.

    Attributes:
        name: a folder, a file or pattern of files ("data/*.jsonl"), their address ("s3://..."), or a name on the Hub.
        config: which of the data set's configurations.
        split: which of its splits; on disk also a part of one ("train[:1%]").
        streaming: read it as it comes instead of having all of it on disk.
    """

    name: str
    config: str | None
    split: str
    streaming: bool = False

    @property
    def arguments(self) -> dict[str, Any]:
        """For `load_dataset`."""
        path = Path(self.name).expanduser()
        if self.is_folder:
            return {"path": str(path), "name": self.config}
        if not self.is_files:
            return {"path": self.name, "name": self.config}
        here = self.name if "://" in self.name else str(path)
        return {"path": self._builder, "data_files": {self.whole_split: here}}

    @property
    def is_files(self) -> bool:
        """Whether it names files: those that are not there, too."""
        if self.is_folder:
            return False
        looks_so = self.name.startswith(("/", ".", "~")) or "*" in self.name or "://" in self.name
        return looks_so or Path(self.name).is_file() or self._suffix in _BUILDERS

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder that is there."""
        return Path(self.name).expanduser().is_dir()

    @property
    def is_here(self) -> bool:
        """Whether it is on this machine."""
        return self.is_folder or (self.is_files and "://" not in self.name)

    @property
    def _builder(self) -> str:
        if self._suffix not in _BUILDERS:
            known = " ".join(_BUILDERS)
            exists = "://" in self.name or Path(self.name).expanduser().exists()
            wrong = f"files ending in {self._suffix!r} are of no known format" if exists else "does not exist"
            raise UserError(f"data: {self.name!r} {wrong}; give a folder, files in {known}, or a name on the Hub")
        return _BUILDERS[self._suffix]

    @property
    def _suffix(self) -> str:
        suffixes = [suffix for suffix in Path(self.name).suffixes if suffix not in _PACKED]
        return suffixes[-1] if suffixes else ""

    @property
    def whole_split(self) -> str:
        """The split without the brackets that cut a part out of it."""
        return re.split(r"[\[+]", self.split)[0]


_WELL_KNOWN = {  # name: where it is, and its validation split
    "c4": (Source("allenai/c4", "en", "train"), "validation"),
    "imagenet-1k": (Source("ILSVRC/imagenet-1k", None, "train"), "validation"),
    "librispeech": (Source("openslr/librispeech_asr", "clean", "train.100"), "validation"),
}


class Named(Protocol):
    """What descriptions of such data have in common: the options that say where they are."""

    name: str
    config: str | None
    split: str
    validation_split: str | None


def find_sources(spec: Named, streaming: bool = False) -> tuple[Source, Source | None]:
    """Where the training data are, and the validation data, where these have a split of their own."""
    known, held_out = _WELL_KNOWN.get(spec.name, (Source(spec.name, None, spec.split), None))
    config, held_out = spec.config or known.config, spec.validation_split or held_out
    split = known.split if spec.split == "train" else spec.split
    place = Source(known.name, config, split, streaming)
    if held_out is None:
        return place, None
    held_out_place = Source(known.name, config, held_out, streaming)
    if place.is_files and held_out_place.whole_split != place.whole_split:
        raise UserError(f"data: {spec.name!r} is one split: leave validation_split out, or give a folder with both")
    return place, held_out_place


def load(place: Source, bad: ErrorBudget) -> Any:
    """The `datasets.Dataset`, or `IterableDataset` where it streams.

    Args:
        place: of the data.
        bad: where files here go that cannot be read and are left out; a streamed one does so when it is its turn.

    Raises:
        UserError: it is not there, not for everybody, or not readable.
    """
    datasets = import_datasets()
    from pyarrow import ArrowInvalid

    arguments = place.arguments | {"split": place.split, "streaming": place.streaming}
    try:
        return datasets.load_dataset(**arguments)
    except (datasets.exceptions.DatasetGenerationError, ArrowInvalid) as error:
        good = _readable_files(datasets, place, bad) if place.is_here else []
        if not good:
            raise UserError(_explain(place, error.__cause__ or error)) from error
        return datasets.load_dataset(**arguments | {"data_files": {place.whole_split: good}})
    except Exception as error:  # builders raise whatever their libraries raise
        raise UserError(_explain(place, error)) from error


def load_files(place: Source, name: str, columns: dict[str, str], kind: str, bad: ErrorBudget) -> Any:
    """The `datasets.IterableDataset` of these columns, the first of which holds files, as {"bytes", "path"}.

    Nothing is decoded: the library would end a shard at its first damaged file.

    Args:
        place: of the data, which are streamed.
        name: of the data, for messages.
        columns: their names, by the options that say them.
        kind: of the files: a feature of the library.
        bad: see `load`.

    Raises:
        UserError: as in `load`; or files are not in the rows, a column is not there, or holds something else.
    """
    datasets, dataset = import_datasets(), load(place, bad)
    if dataset.features is None or dataset.builder_name in _FOLDERS:
        raise UserError(
            f"data: {name!r} has no files in its rows: streams are of Parquet, Arrow or tar files that have; give "
            "such, or set data.streaming to false"
        )
    for option, column in columns.items():
        check_column(name, option, column, list(dataset.features))
    option, column = next(iter(columns.items()))
    check_kind(name, option, column, dataset.features[column], kind)
    plain = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}
    return dataset.decode(False).cast_column(column, plain).select_columns(list(columns.values()))


def import_datasets() -> ModuleType:
    """The library; it takes seconds to import."""
    try:
        import datasets
    except ImportError as error:
        raise UserError(f"datasets is not installed: pip install 'isthmus[datasets]' ({error})") from error
    return datasets


def check_column(name: str, option: str, column: str, columns: list[str]) -> None:
    """Refuse a column that is not there.

    Args:
        name: of the data.
        option: that names the column.
        column: the name.
        columns: that there are.
    """
    if column not in columns:
        raise UserError(
            f"data: {name!r} has no column {column!r}, its columns are {', '.join(columns)}: set data.{option}"
        )


def check_kind(name: str, option: str, column: str, feature: Any, kind: str) -> None:
    """Refuse a column of something else than files of one kind.

    Args:
        name: of the data.
        option: that names the column.
        column: the name.
        feature: that the column is.
        kind: that it must be.
    """
    if type(feature).__name__ != kind:
        raise UserError(f"data: column {column!r} of {name!r} does not hold {_KINDS[kind]}: set data.{option}")


def _readable_files(datasets: ModuleType, place: Source, bad: ErrorBudget) -> list[str]:
    """The files that can be read to their end; none where all can, so that something else is wrong."""
    arguments = place.arguments
    builder = datasets.load_dataset_builder(**arguments)
    files = [str(file) for file in builder.config.data_files[place.whole_split]]
    good = []
    for file in files:
        split = {place.whole_split: [file]}
        try:
            for _ in datasets.load_dataset(
                **arguments | {"data_files": split}, split=place.whole_split, streaming=True
            ):
                pass
            good.append(file)
        except Exception as error:  # readers raise whatever their libraries raise
            bad.add(file, error)
    return good if len(good) < len(files) else []


def _explain(place: Source, error: BaseException) -> str:
    reason = first_line(error).rstrip(".")
    if place.is_here:
        return f"data: {place.name!r} cannot be loaded ({reason}); give a folder or files that hold {place.split!r}"
    if "gated" in reason:
        return f"data: {reason}; then log in with 'hf auth login', or set HF_TOKEN"
    if isinstance(error, ConnectionError):
        return (
            f"data: {place.name!r} is not on this machine, and the Hub cannot be reached ({reason}); "
            "check the network, or give a folder or files"
        )
    return f"data: {place.name!r} cannot be loaded ({reason}); check data.name, data.config and data.split"
