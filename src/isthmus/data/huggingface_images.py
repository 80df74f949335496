"""Labelled images of the `datasets` library: files here, or a name on the Hub; on disk or streamed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from isthmus.core.types import UserError
from isthmus.data.bad import ErrorBudget
from isthmus.data.hub import Source, check_column, find_sources, load_files
from isthmus.data.indexed import IndexedDataSet, Indices
from isthmus.data.options import check_options
from isthmus.data.packing import RowNumbers
from isthmus.data.picture_rows import PictureRows
from isthmus.data.pictures import ImageSamples, View
from isthmus.data.shards import Shards
from isthmus.data.sides import load_splits
from isthmus.data.streamed import open_splits
from isthmus.data.streamed_rows import StreamedRows

_NUM_THREADS = 8  # that decode


@dataclass(frozen=True)
class HuggingFaceImages:
    """Labelled images, in the batches and by the cutting of `images`.

    The validation data are `validation_split`, or else, on disk, rows chosen by their number, alike on all machines;
    streamed, every so many rows of each shard.

    Streamed (for workers that are always the same) every worker reads its own shards, or its own rows where there are
    fewer shards than workers.
    """

    name: str  # a folder, a file or pattern of files, their address, or a name on the Hub
    config: str | None = None
    split: str = "train"
    validation_split: str | None = None
    validation_fraction: float = 0.05  # of the rows, where there is no validation_split
    image_column: str = "image"
    label_column: str = "label"
    smallest_crop: float = 0.75  # over the image's shorter side
    flip: bool = True  # mirror half of the training images
    streaming: bool = False
    max_bad_samples: int = 10  # images that cannot be read: passed over; one more ends the run

    def __post_init__(self) -> None:
        check_options(self)

    def open(self, image_size: int, num_channels: int, num_classes: int) -> IndexedDataSet | StreamedRows:
        """Find the images.

        Args:
            image_size: in pixels, that they are read at.
            num_channels: 1 (grey) or 3 (colour).
            num_classes: that the model knows; in a stream every label is compared with it as it comes.
        """
        bad, view = ErrorBudget(self.max_bad_samples), View(image_size, num_channels, self.smallest_crop, self.flip)
        places, each = find_sources(self, self.streaming), ThreadPoolExecutor(_NUM_THREADS, "images").map
        if self.streaming:
            return self._open_streamed(*places, view, num_classes, bad, each)
        return self._open_on_disk(*places, view, bad, each)

    def _open_on_disk(
        self, place: Source, held_out_place: Source | None, view: View, bad: ErrorBudget, each: Any
    ) -> IndexedDataSet:
        sides = load_splits(place, held_out_place, self.validation_fraction, bad)
        labels = [self._labels(dataset, rows) for dataset, rows in sides]
        train, held_out = (
            ImageSamples([f"row {row} of {dataset.split}" for row in rows], own, self._loader(dataset), view, bad, each)
            for (dataset, rows), own in zip(sides, labels, strict=True)
        )
        classes = getattr(sides[0][0].features[self.label_column], "num_classes", 0)
        return IndexedDataSet(train, held_out, {"num_classes": max(classes, 1 + max(own.max() for own in labels))})

    def _open_streamed(
        self, place: Source, held_out_place: Source | None, view: View, num_classes: int, bad: ErrorBudget, each: Any
    ) -> StreamedRows:
        columns = {"image_column": self.image_column, "label_column": self.label_column}
        reader = PictureRows(*columns.values(), view, num_classes)

        def load_shards(place: Source) -> Shards:
            return Shards(load_files(place, self.name, columns, "Image", bad), reader.hold, self.name, bad)

        sides = open_splits(place, held_out_place, self.validation_fraction, load_shards)
        labels = sides.train.features[self.label_column]
        if not getattr(labels, "dtype", "").startswith(("int", "uint")):
            raise self._no_labels()
        classes = getattr(labels, "num_classes", None)
        return StreamedRows(sides, reader, {"num_classes": classes} if classes else {}, bad, each)

    def _labels(self, dataset: Any, rows: RowNumbers) -> Indices:
        check_column(self.name, "image_column", self.image_column, dataset.column_names)
        check_column(self.name, "label_column", self.label_column, dataset.column_names)
        column = dataset.select_columns([self.label_column]).with_format("numpy")[:][self.label_column]
        labels = np.asarray(column)
        if labels.ndim != 1 or labels.dtype.kind not in "iu" or labels.min() < 0:
            raise self._no_labels()
        return labels[rows].astype(np.int64)

    def _no_labels(self) -> UserError:
        return UserError(
            f"data: column {self.label_column!r} of {self.name!r} does not hold a number from 0 on in every row: "
            "set data.label_column, or choose a split with labels"
        )

    def _loader(self, dataset: Any) -> Any:
        from PIL.Image import Image

        pictures = dataset.select_columns([self.image_column])

        def load(name: str) -> Image:
            image = pictures[int(name.split()[1])][self.image_column]
            if not isinstance(image, Image):
                raise TypeError(f"its {self.image_column} is {type(image).__name__}, not an image")
            return image

        return load
