"""Labelled images: folders with a sub-folder for every class, tables, data sets by name, scikit-learn's digits."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from typing_extensions import override

from isthmus.core.types import UserError
from isthmus.data.errors import ErrorBudget, named_files
from isthmus.data.image_samples import Crop, Pixels, image_batch, open_image
from isthmus.data.sample_order import NumberedDataSet, NumberedSamples
from isthmus.data.shards import Shards
from isthmus.data.source import FileOptions, Source, find_sources, require
from isthmus.data.streamed_rows import BLOCK_ROWS, StreamedRows
from isthmus.data.streaming import open_splits
from isthmus.data.tables import bytes_in, file_in, load_files, load_splits
from isthmus.data.validation import own_parts, split_by_name, split_files

if TYPE_CHECKING:
    from PIL.Image import Image

Labelled = tuple[str, int]  # an image's name, and its label

_NUM_THREADS = 8  # that read and decode files: some wait for the disk while others compute


@dataclass(frozen=True)
class Images(FileOptions):
    """Labelled images as {"image": [batch, channels, size, size] float32 from -1 to 1, "label": [batch] int64}.

    A folder has a sub-folder of images for every class; classes are numbered in the order of their names. Where it has
    the sub-folders train and validation (or val), the classes lie in these. Tables (Parquet, Arrow, tar files) and data
    sets of the Hub hold an image and a label in every row. `validation` says what is held out.

    For training a square is cut out of an image, anywhere, of any size from `smallest_crop` to all of its shorter side,
    and half of the squares are mirrored. For validation it is the largest square in the middle.

    Streamed (for workers that are always the same) every worker reads its own shards, or its own rows where there are
    fewer shards than workers.
    """

    built_in: ClassVar = ("digits",)
    suffixes: ClassVar = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".pgm", ".ppm")

    source: str = "digits"  # or any (see `SourceOptions`); "digits": scikit-learn's 1,797 grey images of 8 x 8 pixels
    validation_fraction: float = 0.1
    smallest_crop: float = 0.75  # over the image's shorter side
    flip: bool | None = None  # mirror images; None: all but digits
    image_column: str = "image"  # of tables
    label_column: str = "label"  # of tables

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.smallest_crop <= 1:
            raise UserError(f"data: smallest_crop is {self.smallest_crop}; choose one above 0 and at most 1")

    @override
    def check_libraries(self) -> None:
        require("PIL", "vision", "images are read by Pillow")
        if self.source == "digits":
            require("sklearn", "vision", "the digits come with scikit-learn")

    @override
    def check_folder(self, root: Path) -> None:
        if not root.is_dir():
            raise UserError(
                f"data: {self.source!r} is no folder; give one with a sub-folder of images a class, or digits"
            )
        train, held_out = own_parts(root) or ("", "")
        classes = _classes(root / train)
        if not any(self._images(root / train / name) for name in classes):
            raise UserError(f"data: {str(root / train)!r} has no images in sub-folders: it needs one for every class")
        unknown = [name for name in _classes(root / held_out) if name not in classes]
        if unknown:
            raise UserError(
                f"data: class {unknown[0]!r} is in {held_out} but not in train of {self.source!r}: remove it"
            )

    def open(
        self, image_size: int, num_channels: int, num_classes: int | None = None
    ) -> NumberedDataSet | StreamedRows:
        """Find the images.

        Args:
            image_size: in pixels, that they are read at.
            num_channels: 1 (grey) or 3 (colour).
            num_classes: that the model knows; in a stream every label is compared with it as it comes.
        """
        self.check_source()
        flip = self.source != "digits" if self.flip is None else self.flip
        crop, budget = Crop(image_size, num_channels, self.smallest_crop, flip), ErrorBudget(self.max_bad_samples)
        each: Any = map if self.source == "digits" else ThreadPoolExecutor(_NUM_THREADS, "images").map

        def samples(found: Sequence[Labelled], load: Callable[[str], Image]) -> NumberedSamples:
            names, labels = [name for name, _ in found], [label for _, label in found]
            known = "\0".join(names).encode("utf-8", "surrogateescape") + np.array(labels, "<i8").tobytes()
            return NumberedSamples(
                names,
                hashlib.sha256(known).hexdigest()[:16],
                1,
                lambda number, seed: (crop.cut(load(names[number]), seed), labels[number]),
                image_batch,
                budget,
                each,
            )

        def load_table(source: Source) -> Any:
            columns = {"image_column": self.image_column, "label_column": self.label_column}
            dataset = load_files(source, columns, "Image", budget)
            if not getattr(dataset.features[self.label_column], "dtype", "").startswith(("int", "uint")):
                raise self._no_labels()
            return dataset

        if self.has_rows and self.streaming:
            return self._open_streamed(load_table, crop, num_classes, budget, each)
        if self.has_rows:
            return self._open_rows(load_table, samples)
        with named_files():
            load, splits = self._digits() if self.source == "digits" else self._folder()
        classes = 1 + max(label for split in splits for _, label in split)
        train, validation = (samples(split, load) for split in splits)
        return NumberedDataSet(train, validation, {"num_classes": classes})

    def _digits(self) -> tuple[Callable[[str], Image], list[list[Labelled]]]:
        from PIL import Image
        from sklearn.datasets import load_digits

        digits = load_digits()
        pixels = (digits.images * (255 / 16)).astype(np.uint8)
        found = [(str(number), int(label)) for number, label in enumerate(digits.target)]
        return lambda name: Image.fromarray(pixels[int(name)]), split_by_name(found, _name, self.validation_fraction)

    def _folder(self) -> tuple[Callable[[str], Image], list[list[Labelled]]]:
        """Training and validation images below a folder, named by their relative paths."""
        root = Path(self.source).expanduser()
        parts = own_parts(root)
        prefixes = ("",) if parts is None else [f"{part}/" for part in parts]
        found = [
            (f"{prefix}{name}/{file}", label)
            for prefix in prefixes
            for label, name in enumerate(_classes(root / prefixes[0]))
            for file in self._images(root / prefix / name)
        ]
        return lambda name: open_image(root / name), split_files(root, found, _name, _name, self.validation_fraction)

    def _open_rows(
        self,
        load_table: Callable[[Source], Any],
        samples: Callable[[Sequence[Labelled], Callable[[str], Image]], NumberedSamples],
    ) -> NumberedDataSet:
        numbered, classes = list[NumberedSamples](), 0
        for dataset, rows in load_splits(*find_sources(self), self.validation_fraction, load_table):
            column = dataset.select_columns([self.label_column]).with_format("numpy")[:][self.label_column]
            labels = np.asarray(column)
            if labels.dtype.kind not in "iu" or labels.min() < 0:
                raise self._no_labels()
            classes = max(
                classes, 1 + int(labels.max()), getattr(dataset.features[self.label_column], "num_classes", 0)
            )
            found = [(f"row {row} of {dataset.split}", int(labels[row])) for row in rows]
            numbered.append(samples(found, self._row_loader(dataset.select_columns([self.image_column]))))
        train, validation = numbered
        return NumberedDataSet(train, validation, {"num_classes": classes})

    def _row_loader(self, dataset: Any) -> Callable[[str], Image]:
        return lambda name: open_image(file_in(dataset[int(name.split()[1])][self.image_column]))

    def _open_streamed(
        self,
        load_table: Callable[[Source], Any],
        crop: Crop,
        num_classes: int | None,
        budget: ErrorBudget,
        each: Any,
    ) -> StreamedRows:
        def read(columns: dict[str, Any], name: str) -> tuple[bytes, int]:
            label = columns[self.label_column]
            if not isinstance(label, int) or label < 0:
                raise TypeError(f"its {self.label_column} is {label!r:.40}, not a number from 0 on")
            if num_classes is not None and label >= num_classes:
                raise UserError(
                    f"data: {name!r} has label {label}, and model.num_classes is {num_classes}: "
                    f"raise it to {label + 1} at least"
                )
            return bytes_in(columns[self.image_column], name), label

        def decode(row: tuple[bytes, int], seed: int | None) -> tuple[Pixels, int]:
            return crop.cut(open_image(BytesIO(row[0])), seed), row[1]

        splits = open_splits(
            *find_sources(self),
            self.validation_fraction,
            lambda source: Shards(load_table(source), read, source.name, budget),
        )
        classes = getattr(splits.train.features[self.label_column], "num_classes", None)
        sizes, form = {"num_classes": classes} if classes else {}, (self.image_column, self.label_column, BLOCK_ROWS)
        return StreamedRows(splits, sizes, 1, form, decode, image_batch, budget, each)

    def _no_labels(self) -> UserError:
        return UserError(
            f"data: column {self.label_column!r} of {self.source!r} does not hold a number from 0 on in every row: "
            "set data.label_column, or choose a split with labels"
        )

    def _images(self, folder: Path) -> list[str]:
        """The names of the images directly in a folder, which may be missing, sorted; not hidden ones."""
        names = os.listdir(folder) if folder.is_dir() else []
        return sorted(name for name in names if name.lower().endswith(self.suffixes) and name[0] != ".")


def _name(labelled: Labelled) -> str:
    return labelled[0]


def _classes(folder: Path) -> list[str]:
    """The names of the sub-folders, sorted; not hidden ones."""
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
