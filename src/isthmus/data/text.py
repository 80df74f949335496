"""Text as bytes: a file, a folder, or the Python standard library's own source."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from isthmus.core.types import UserError
from isthmus.data.options import check_options
from isthmus.data.split import held_out, walk
from isthmus.data.tokens import TokenDataSet, Tokens

_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
_END_OF_FILE = b"\0"


@dataclass(frozen=True)
class Text:
    """Text whose tokens are its bytes.

    A folder is read whole, hidden files excepted, in the order of the paths, and split by file: a hash of the
    relative path says on which side a file lies, so files that come or go leave the others where they are. A single
    file is mapped, not read, and split by position: its end is the validation data.
    """

    source: str = "stdlib"  # a file, a folder, or "stdlib": the running interpreter's library without its tests
    validation_fraction: float = 0.05
    tokenizer: ClassVar[str] = "bytes"

    def __post_init__(self) -> None:
        check_options(self)

    def open(self, sequence_length: int) -> TokenDataSet:
        """Read the text and cut it into samples of `sequence_length` bytes."""
        root = Path(sysconfig.get_path("stdlib") if self.source == "stdlib" else self.source).expanduser()
        try:
            if not root.exists():
                raise UserError(f"data: {self.source!r} does not exist; give a file, a folder or stdlib")
            files = self._files(root)
            if not files:
                raise UserError(f"data: {self.source!r} holds no text; give a file or folder that is not empty")
            train, validation = self._split_file(*files) if len(files) == 1 else self._split_folder(root, files)
        except OSError as error:
            raise UserError(f"data: cannot read {error.filename!r}: {error.strerror}") from error
        return TokenDataSet(train, validation, sequence_length, vocab_size=256)

    def _files(self, root: Path) -> list[Path]:
        """All files that are not empty, sorted by path."""
        if root.is_file():
            found = [root]
        elif self.source == "stdlib":
            found = [path for path in walk(root, skip=_NOT_STDLIB) if path.suffix == ".py"]
        else:
            found = walk(root)
        return [path for path in found if path.is_file() and path.stat().st_size > 0]

    def _split_file(self, path: Path) -> tuple[Tokens, Tokens]:
        data = np.memmap(path, dtype=np.uint8, mode="r")
        cut = round(len(data) * (1 - self.validation_fraction))
        return data[:cut], data[cut:]

    def _split_folder(self, root: Path, files: list[Path]) -> tuple[Tokens, Tokens]:
        names = {path: path.relative_to(root).as_posix() for path in files}
        kept = held_out(names.values(), self.validation_fraction)
        train, validation = ([path for path in files if (names[path] in kept) == side] for side in (False, True))
        return _read(train), _read(validation)


def _read(files: Iterable[Path]) -> Tokens:
    """The bytes of all files, a zero byte after each."""
    return np.frombuffer(b"".join(path.read_bytes() + _END_OF_FILE for path in files), dtype=np.uint8)
