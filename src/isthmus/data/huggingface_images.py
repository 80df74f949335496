"""Labelled images of the `datasets` library: files here, or a name on the Hub."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from isthmus.core.types import UserError
from isthmus.data.bad import BadSamples
from isthmus.data.hub import check_column, find_places
from isthmus.data.indexed import IndexedCorpus, Indices
from isthmus.data.options import check_options
from isthmus.data.packing import Rows
from isthmus.data.pictures import ImageSource, View
from isthmus.data.sides import load_sides

_NUM_THREADS = 8  # that decode


@dataclass(frozen=True)
class HuggingFaceImages:
    """Labelled images, on disk, in the batches and by the cutting of `images`.

    The validation data are `validation_split`, or else rows chosen by their number, alike on all machines.
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
    max_bad_samples: int = 10  # images that cannot be read: passed over; one more ends the run

    def __post_init__(self) -> None:
        check_options(self)

    def open(self, image_size: int, num_channels: int) -> IndexedCorpus:
        """Find the images, to be read at this size in pixels and with 1 (grey) or 3 (colour) channels."""
        bad, view = BadSamples(self.max_bad_samples), View(image_size, num_channels, self.smallest_crop, self.flip)
        each = ThreadPoolExecutor(_NUM_THREADS, "images").map
        sides = load_sides(*find_places(self), self.validation_fraction, bad)
        labels = [self._labels(dataset, rows) for dataset, rows in sides]
        train, held_out = (
            ImageSource([f"row {row} of {dataset.split}" for row in rows], own, self._loader(dataset), view, bad, each)
            for (dataset, rows), own in zip(sides, labels, strict=True)
        )
        classes = getattr(sides[0][0].features[self.label_column], "num_classes", 0)
        return IndexedCorpus(train, held_out, {"num_classes": max(classes, 1 + max(own.max() for own in labels))})

    def _labels(self, dataset: Any, rows: Rows) -> Indices:
        check_column(self.name, "image_column", self.image_column, dataset.column_names)
        check_column(self.name, "label_column", self.label_column, dataset.column_names)
        column = dataset.select_columns([self.label_column]).with_format("numpy")[:][self.label_column]
        labels = np.asarray(column)
        if labels.ndim != 1 or labels.dtype.kind not in "iu" or labels.min() < 0:
            raise UserError(
                f"data: column {self.label_column!r} of {self.name!r} does not hold a number from 0 on in every row: "
                "set data.label_column, or choose a split with labels"
            )
        return labels[rows].astype(np.int64)

    def _loader(self, dataset: Any) -> Any:
        from PIL.Image import Image

        pictures = dataset.select_columns([self.image_column])

        def load(name: str) -> Image:
            image = pictures[int(name.split()[1])][self.image_column]
            if not isinstance(image, Image):
                raise TypeError(f"its {self.image_column} is {type(image).__name__}, not an image")
            return image

        return load
