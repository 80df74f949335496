"""Labelled images: folders with a sub-folder for every class, tables, data sets by name, scikit-learn's digits."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from isthmus.core.types import UserError
from isthmus.data.base import Positions
from isthmus.data.errors import ErrorBudget, named_files
from isthmus.data.image_samples import Crop, ImageRows, ImageSamples, open_image
from isthmus.data.sample_order import NumberedDataSet
from isthmus.data.shards import Shards
from isthmus.data.source import SourceOptions, cannot_stream, check_tables, find_sources, has_rows, require
from isthmus.data.streamed_rows import StreamedRows
from isthmus.data.streaming import open_splits
from isthmus.data.tables import check_column, load_files, load_splits
from isthmus.data.validation import RowNumbers, held_out_names, own_parts

if TYPE_CHECKING:
    from PIL.Image import Image

Labelled = tuple[list[str], Positions]  # names, and their labels [num_images]
Parts = tuple[Labelled, Labelled]  # training, validation
Load = Callable[[str], "Image"]  # by name

_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".pgm", ".ppm")
_NUM_THREADS = 8  # that read and decode files: some wait for the disk while others compute


@dataclass(frozen=True)
class Images(SourceOptions):
    """Labelled images as {"image": [batch, channels, size, size] float32 from -1 to 1, "label": [batch] int64}.

    A folder has a sub-folder of images for every class; classes are numbered in the order of their names. Where it has
    the sub-folders train and validation (or val), the classes lie in these. Tables (Parquet, Arrow, tar files) and data
    sets of the Hub hold an image and a label in every row. `validation` says what is held out.

    For training a square is cut out of an image, anywhere, of any size from `smallest_crop` to all of its shorter side,
    and half of the squares are mirrored. For validation it is the largest square in the middle.

    Streamed (for workers that are always the same) every worker reads its own shards, or its own rows where there are
    fewer shards than workers.
    """

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

    def check_source(self) -> None:
        """Refuse images that are not there, and libraries that are not installed, without reading an image."""
        require("PIL", "vision", "images are read by Pillow")
        if self.source == "digits":
            require("sklearn", "vision", "the digits come with scikit-learn")
        if self.streaming and not self._has_rows:
            raise cannot_stream(self.source)
        with named_files():
            if self._has_rows:
                check_tables(self)
            elif self.source != "digits":
                self._check_folder(Path(self.source).expanduser())

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
        if self._has_rows and self.streaming:
            return self._open_streamed(crop, num_classes, budget, each)
        if self._has_rows:
            return self._open_rows(crop, budget, each)
        with named_files():
            load, parts = self._digits() if self.source == "digits" else self._folder()
        train, validation = (ImageSamples(*part, load, crop, budget, each) for part in parts)
        classes = 1 + max(int(labels.max(initial=0)) for _, labels in parts)
        return NumberedDataSet(train, validation, {"num_classes": classes})

    @property
    def _has_rows(self) -> bool:
        """Whether images lie in the rows of tables rather than in files of their own."""
        return self.source != "digits" and has_rows(self.source, _SUFFIXES)

    def _check_folder(self, root: Path) -> None:
        if not root.is_dir():
            raise UserError(
                f"data: {self.source!r} is no folder; give one with a sub-folder of images a class, or digits"
            )
        train, held_out = own_parts(root) or ("", "")
        classes = _classes(root / train)
        if not any(_images(root / train / name) for name in classes):
            raise UserError(f"data: {str(root / train)!r} has no images in sub-folders: it needs one for every class")
        unknown = [name for name in _classes(root / held_out) if name not in classes]
        if unknown:
            raise UserError(
                f"data: class {unknown[0]!r} is in {held_out} but not in train of {self.source!r}: remove it"
            )

    def _digits(self) -> tuple[Load, Parts]:
        from PIL import Image
        from sklearn.datasets import load_digits

        digits = load_digits()
        pixels, labels = (digits.images * (255 / 16)).astype(np.uint8), digits.target.astype(np.int64)
        names = [f"{i}" for i in range(len(labels))]
        return lambda name: Image.fromarray(pixels[int(name)]), self._split(names, labels)

    def _folder(self) -> tuple[Load, Parts]:
        """Training and validation images below a folder, named by their relative paths."""
        root = Path(self.source).expanduser()
        if own := own_parts(root):
            classes = _classes(root / own[0])
            train, held_out = (_list(root, f"{part}/", classes) for part in own)
            parts = train, held_out
        else:
            parts = self._split(*_list(root, "", _classes(root)))
        return lambda name: open_image(root / name), parts

    def _split(self, names: list[str], labels: Positions) -> Parts:
        kept = held_out_names(names, self.validation_fraction)
        chosen = np.array([name in kept for name in names])
        return (list(compress(names, ~chosen)), labels[~chosen]), (list(compress(names, chosen)), labels[chosen])

    def _open_rows(self, crop: Crop, budget: ErrorBudget, each: Any) -> NumberedDataSet:
        splits = load_splits(*find_sources(self), self.validation_fraction, budget)
        labels = [self._labels(dataset, rows) for dataset, rows in splits]
        train, validation = (
            ImageSamples(
                [f"row {row} of {dataset.split}" for row in rows], own, self._row_loader(dataset), crop, budget, each
            )
            for (dataset, rows), own in zip(splits, labels, strict=True)
        )
        classes = getattr(splits[0][0].features[self.label_column], "num_classes", 0)
        return NumberedDataSet(train, validation, {"num_classes": max(classes, 1 + max(own.max() for own in labels))})

    def _open_streamed(self, crop: Crop, num_classes: int | None, budget: ErrorBudget, each: Any) -> StreamedRows:
        columns = {"image_column": self.image_column, "label_column": self.label_column}
        reader = ImageRows(self.image_column, self.label_column, crop, num_classes)

        splits = open_splits(
            *find_sources(self),
            self.validation_fraction,
            lambda each: Shards(load_files(each, columns, "Image", budget), reader.hold, each.name, budget),
        )
        labels = splits.train.features[self.label_column]
        if not getattr(labels, "dtype", "").startswith(("int", "uint")):
            raise self._no_labels()
        classes = getattr(labels, "num_classes", None)
        return StreamedRows(splits, reader, {"num_classes": classes} if classes else {}, budget, each)

    def _labels(self, dataset: Any, rows: RowNumbers) -> Positions:
        check_column(self.source, "image_column", self.image_column, dataset.column_names)
        check_column(self.source, "label_column", self.label_column, dataset.column_names)
        column = dataset.select_columns([self.label_column]).with_format("numpy")[:][self.label_column]
        labels = np.asarray(column)
        if labels.ndim != 1 or labels.dtype.kind not in "iu" or labels.min() < 0:
            raise self._no_labels()
        return labels[rows].astype(np.int64)

    def _no_labels(self) -> UserError:
        return UserError(
            f"data: column {self.label_column!r} of {self.source!r} does not hold a number from 0 on in every row: "
            "set data.label_column, or choose a split with labels"
        )

    def _row_loader(self, dataset: Any) -> Load:
        from PIL.Image import Image

        column = dataset.select_columns([self.image_column])

        def load(name: str) -> Image:
            image = column[int(name.split()[1])][self.image_column]
            if not isinstance(image, Image):
                raise TypeError(f"its {self.image_column} is {type(image).__name__}, not an image")
            return image

        return load


def _classes(folder: Path) -> list[str]:
    """The names of the sub-folders, sorted; not hidden ones."""
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def _images(folder: Path) -> list[str]:
    """The names of the images directly in a folder, sorted; not hidden ones."""
    return sorted(file for file in os.listdir(folder) if file.lower().endswith(_SUFFIXES) and file[0] != ".")


def _list(root: Path, prefix: str, classes: list[str]) -> Labelled:
    """All images of these classes, in the order of their paths."""
    names, labels = list[str](), list[int]()
    for label, name in enumerate(classes):
        folder = f"{prefix}{name}/"
        if (root / folder).is_dir():  # validation may lack a class
            files = _images(root / folder)
            names += [folder + file for file in files]
            labels += [label] * len(files)
    return names, np.array(labels, dtype=np.int64)
