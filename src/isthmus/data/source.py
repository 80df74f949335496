"""The places where data are: folders, files, addresses, names on the Hub; found without opening them."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from glob import glob
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from isthmus.core.types import UserError
from isthmus.data.errors import TO_UTF_8, named_files

_TABLES = {  # their rows hold samples; read by a builder of `datasets`
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".csv": "csv",
    ".tsv": "csv",
    ".tar": "webdataset",
}
_BUILDERS = _TABLES | {".txt": "text"}  # a row a line
_PACKED = frozenset({".gz", ".zst", ".xz", ".bz2", ".lz4"})
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
_WIDE_MARKS = (b"\xff\xfe", b"\xfe\xff")  # how files in UTF-16 and UTF-32 begin
_FILES_LOOKED_INTO, _BYTES_LOOKED_INTO = 100, 4096


@dataclass(frozen=True)
class Source:
    """The place of one split of a data set that the `datasets` library reads.

    Attributes:
        name: a folder, a file or pattern of files ("data/*.jsonl"), their address ("s3://..."), or a name on the Hub.
        config: which of the data set's configurations.
        split: which of its splits; on disk also a part of one ("train[:1%]").
        streaming: read it as it comes instead of having all of it on disk.
        texts: files of plain text that are the data instead, a row a line.
    """

    name: str
    config: str | None
    split: str
    streaming: bool = False
    texts: tuple[str, ...] = ()

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments for `load_dataset`."""
        if self.texts:
            return {"path": "text", "data_files": {self.whole_split: list(self.texts)}}
        if self.is_one_split:
            return {"path": _builder(self.name), "data_files": {self.whole_split: _local(self.name)}}
        return {"path": _local(self.name), "name": self.config}

    @property
    def is_one_split(self) -> bool:
        """Whether it names files, which have no other split."""
        return bool(self.texts) or (names_files(self.name) and not Path(self.name).expanduser().is_dir())

    @property
    def is_here(self) -> bool:
        """Whether it is on this machine."""
        return names_files(self.name) and "://" not in self.name

    @property
    def whole_split(self) -> str:
        """The split without the brackets that cut a part out of it."""
        return re.split(r"[\[+]", self.split)[0]


_WELL_KNOWN = {  # name: where it is, its configuration, its training and validation splits
    "c4": ("allenai/c4", "en", "train", "validation"),
    "imagenet-1k": ("ILSVRC/imagenet-1k", None, "train", "validation"),
    "librispeech": ("openslr/librispeech_asr", "clean", "train.100", "validation"),
}


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """The options that say where data are and how they are read, of all modalities alike."""

    source: str = ""  # a folder, files ("data/*.parquet"), their address, a name on the Hub, or what is built in
    validation_fraction: float = 0.05  # where the data keep nothing for validation themselves
    streaming: bool = False
    max_bad_samples: int = 10  # samples that cannot be read and are passed over; one more ends the run
    config: str | None = None  # of a data set on the Hub
    split: str = "train"  # of tables, also a part of one: "train[:1%]"
    validation_split: str | None = None  # of tables

    @property
    def plain_texts(self) -> tuple[str, ...]:
        """The files of plain text that are the data, where rows are lines."""
        return ()

    def __post_init__(self) -> None:
        if not 0 < self.validation_fraction < 1:
            raise UserError(f"data: validation_fraction is {self.validation_fraction}; choose one between 0 and 1")
        if self.max_bad_samples < 0:
            raise UserError(f"data: max_bad_samples is {self.max_bad_samples}; choose at least 0")


def find_sources(options: SourceOptions) -> tuple[Source, Source | None]:
    """Return where the training data are, and the validation data, where these have a split of their own."""
    name, config, split, held_out = options.source, None, options.split, None
    if name in _WELL_KNOWN and not Path(name).exists():
        name, config, split, held_out = _WELL_KNOWN[name]
        split = split if options.split == "train" else options.split
    config, held_out = options.config or config, options.validation_split or held_out
    source = Source(name, config, split, options.streaming, options.plain_texts)
    if held_out is None:
        return source, None
    held_out_source = replace(source, split=held_out)
    if source.is_one_split and held_out_source.whole_split != source.whole_split:
        raise UserError(f"data: {name!r} is one split: leave validation_split out, or give a folder with both")
    return source, held_out_source


@dataclass(frozen=True, kw_only=True)
class FileOptions(SourceOptions, ABC):
    """The options of data that are files: each one of its own, or in the row of a table.

    Attributes:
        built_in: sources that are neither.
        suffixes: of the files.
    """

    built_in: ClassVar[tuple[str, ...]]
    suffixes: ClassVar[tuple[str, ...]]

    def check_source(self) -> None:
        """Refuse files that are not there, and libraries that are not installed, without reading a file."""
        if self.streaming and not self.has_rows:
            raise cannot_stream(self.source)
        with named_files():
            if self.has_rows:
                check_tables(self)
            elif self.source not in self.built_in:
                self.check_folder(Path(self.source).expanduser())

    @abstractmethod
    def check_folder(self, root: Path) -> None:
        """Refuse a source that is no folder with files as they should be."""

    @property
    def has_rows(self) -> bool:
        """Whether files lie in the rows of tables or of a data set on the Hub."""
        root, has_tables = Path(self.source).expanduser(), False
        if self.source in self.built_in:
            return False
        if not root.is_dir():
            name = self.source
            return is_table(name) or "*" in name or "://" in name or not names_files(name)
        for path in list_files(root):
            if path.suffix.lower() in self.suffixes:
                return False
            has_tables = has_tables or is_table(path.name)
        return has_tables


def names_files(name: str) -> bool:
    """Tell whether a source is a folder or files, also such that are not there, and no name on the Hub."""
    if name.startswith(("/", ".", "~")) or "*" in name or "://" in name or Path(name).exists():
        return True
    return _suffix(name) in _BUILDERS or not _HUB_NAME.fullmatch(name)


def is_table(name: str) -> bool:
    """Tell whether a file holds rows, by its suffix."""
    return _suffix(name) in _TABLES


def list_files(root: Path, skip: Collection[str] = ()) -> Iterator[Path]:
    """Yield all files below `root`; not hidden or compiled ones, nor those in folders named in `skip` or behind links.

    What Python compiles comes and goes while a run trains on source code.
    """
    skip = {*skip, "__pycache__"}
    for folder, folders, names in os.walk(root, onerror=_raise):
        folders[:] = [name for name in folders if name not in skip and not name.startswith(".")]
        yield from (Path(folder, name) for name in names if not name.startswith("."))


def require(module: str, extra: str, what: str) -> None:
    """Refuse what needs a library that is not installed, which is not imported to find that out."""
    if find_spec(module) is None:
        raise UserError(f"data: {what}, which is not installed: pip install 'isthmus[{extra}]'")


def cannot_stream(name: str) -> UserError:
    """Return the refusal of data that are no rows with files in them."""
    return UserError(
        f"data: {name!r} has no files in its rows: streams are of Parquet, Arrow or tar files that have; "
        "give such, or set data.streaming to false"
    )


def check_tables(options: SourceOptions) -> None:
    """Refuse rows that are not where the options say, as far as that can be known without the network."""
    require("datasets", "datasets", "tables, and data sets by name, are read by datasets")
    find_sources(options)
    name = options.source
    if not names_files(name) or "://" in name:
        return
    path = Path(name).expanduser()
    if path.is_dir():
        if next(list_files(path), None) is None:
            raise UserError(f"data: the folder {name!r} is empty; give one with files, or a name on the Hub")
        return
    _builder(name)
    files = sorted(glob(_local(name), recursive=True))
    if not files:
        raise UserError(f"data: {name!r} does not exist; give a folder, files, or a name on the Hub")
    check_utf_8([Path(file) for file in files if _builder(file) in ("json", "csv", "text")], whole=True)


def check_utf_8(files: list[Path], whole: bool) -> None:
    """Refuse text whose beginning shows that it is not in UTF-8.

    Args:
        files: of which the first are looked into; packed ones are not.
        whole: any byte that is not UTF-8 is refused; else only the marks of wider encodings, as bytes may be anything.
    """
    for file in [each for each in files if each.suffix not in _PACKED][:_FILES_LOOKED_INTO]:
        with file.open("rb") as opened:
            start = opened.read(_BYTES_LOOKED_INTO)
        try:
            if start.startswith(_WIDE_MARKS):
                raise UserError(f"data: {str(file)!r} is not UTF-8 but UTF-16 or UTF-32: {TO_UTF_8}")
            if whole:
                start.decode("utf-8")
        except UnicodeDecodeError as error:
            if error.start < len(start) - 3 or len(start) < _BYTES_LOOKED_INTO:  # else a letter is cut in two
                raise UserError(f"data: {str(file)!r} is not UTF-8: {TO_UTF_8}") from error


def _local(name: str) -> str:
    return name if "://" in name else str(Path(name).expanduser())


def _builder(name: str) -> str:
    if _suffix(name) not in _BUILDERS:
        exists = "://" in name or Path(name).expanduser().exists()
        wrong = f"files ending in {_suffix(name)!r} are of no known format" if exists else "does not exist"
        raise UserError(f"data: {name!r} {wrong}; give a folder, files in {' '.join(_BUILDERS)}, or a name on the Hub")
    return _BUILDERS[_suffix(name)]


def _suffix(name: str) -> str:
    suffixes = [suffix for suffix in Path(name).suffixes if suffix not in _PACKED]
    return suffixes[-1] if suffixes else ""


def _raise(error: OSError) -> None:
    raise error
