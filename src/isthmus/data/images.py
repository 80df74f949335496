"""Labelled images: folders with a sub-folder for every class, tables, data sets by name, scikit-learn's digits."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Union

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from isthmus.core.types import UserError
from isthmus.data.errors import ErrorBudget, named_files
from isthmus.data.sample_order import Decoder, NumberedDataSet, NumberedSamples
from isthmus.data.shards import Shards
from isthmus.data.source import FileOptions, Source, require
from isthmus.data.streamed_rows import BLOCK_ROWS, StreamedRows
from isthmus.data.streaming import open_shards
from isthmus.data.tables import file_in_row, load_files, load_splits, row_name, streamed_file_in
from isthmus.data.validation import own_parts, split_by_name, split_files
from isthmus.inner.step import Batch

if TYPE_CHECKING:
    from PIL.Image import Image

Pixels = npt.NDArray[np.uint8]  # [channels, height, width]
Labelled = tuple[str, int]  # an image's name, and its label
File = Union[Path, BytesIO, bytes, "Image"]
Found = tuple[list[Labelled], Callable[[str], File]]  # images, and what finds the file of a name

_MODES = {1: "L", 3: "RGB"}
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
    def check_source(self) -> None:
        require("PIL", "vision", "images are read by Pillow")
        if self.source == "digits":
            require("sklearn", "vision", "the digits come with scikit-learn")
        super().check_source()

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
        if num_channels not in _MODES:
            raise UserError(f"data: the model has {num_channels} channels; images have 1 (grey) or 3 (colour)")
        flip = self.source != "digits" if self.flip is None else self.flip
        sample = partial(_sample, size=image_size, mode=_MODES[num_channels], smallest=self.smallest_crop, flip=flip)
        threads = map if self.source == "digits" else ThreadPoolExecutor(_NUM_THREADS, "images").map
        decoder = Decoder(sample, _batch, 1, ErrorBudget(self.max_bad_samples), threads)
        if self.has_rows and self.streaming:
            return self._open_streamed(num_classes, decoder)
        if self.has_rows:
            splits, classes = self._rows(decoder.budget)
        else:
            with named_files():
                splits = self._digits() if self.source == "digits" else self._folder()
            classes = 1 + max(label for images, _ in splits for _, label in images)
        train, validation = (_numbered(*split, decoder) for split in splits)
        return NumberedDataSet(train, validation, {"num_classes": classes})

    def _digits(self) -> list[Found]:
        from PIL import Image
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = [Image.fromarray(pixels) for pixels in (digits.images * (255 / 16)).astype(np.uint8)]
        found = [(str(number), int(label)) for number, label in enumerate(digits.target)]
        splits = split_by_name(found, _name, self.validation_fraction)
        return [(split, lambda name: images[int(name)]) for split in splits]

    def _folder(self) -> list[Found]:
        """Images below a folder, named by their relative paths."""
        root = Path(self.source).expanduser()
        parts = own_parts(root) or ("",)
        found = [
            (f"{part}/{name}/{file}".lstrip("/"), label)
            for part in parts
            for label, name in enumerate(_classes(root / parts[0]))
            for file in self._images(root / part / name)
        ]
        splits = split_files(root, found, _name, _name, self.validation_fraction)
        return [(split, root.joinpath) for split in splits]

    def _rows(self, budget: ErrorBudget) -> tuple[list[Found], int]:
        """Images in the rows of tables, and how many classes there are."""
        splits, num_classes = list[Found](), 0
        for dataset, rows in load_splits(self, partial(self._load, budget=budget)):
            labels = np.asarray(dataset.select_columns([self.label_column]).with_format("numpy")[:][self.label_column])
            if labels.dtype.kind not in "iu" or labels.min() < 0:
                raise self._no_labels()
            known = getattr(dataset.features[self.label_column], "num_classes", 0)
            num_classes = max(num_classes, known, 1 + int(labels.max()))
            file = file_in_row(dataset.select_columns([self.image_column]), self.image_column)
            splits.append(([(row_name(dataset, row), int(labels[row])) for row in rows], file))
        return splits, num_classes

    def _open_streamed(self, num_classes: int | None, decoder: Decoder) -> StreamedRows:
        def read(columns: dict[str, Any], name: str) -> tuple[bytes, int]:
            label = columns[self.label_column]
            if not isinstance(label, int) or label < 0:
                raise TypeError(f"its {self.label_column} is {label!r:.40}, not a number from 0 on")
            if num_classes is not None and label >= num_classes:
                raise UserError(
                    f"data: {name!r} has label {label}, and model.num_classes is {num_classes}: "
                    f"raise it to {label + 1} at least"
                )
            return streamed_file_in(columns[self.image_column], name).getvalue(), label

        def load_shards(source: Source) -> Shards:
            return Shards(self._load(source, decoder.budget), read, source.name, decoder.budget)

        shards = open_shards(self, load_shards)
        classes = getattr(shards[1].features[self.label_column], "num_classes", None)
        form = (self.image_column, self.label_column, BLOCK_ROWS)
        return StreamedRows(*shards, {"num_classes": classes} if classes else {}, 1, form, decoder)

    def _load(self, source: Source, budget: ErrorBudget) -> Any:
        columns = {"image_column": self.image_column, "label_column": self.label_column}
        dataset = load_files(source, columns, "Image", budget)
        if not getattr(dataset.features[self.label_column], "dtype", "").startswith(("int", "uint")):
            raise self._no_labels()
        return dataset

    def _no_labels(self) -> UserError:
        return UserError(
            f"data: column {self.label_column!r} of {self.source!r} does not hold a number from 0 on in every row: "
            "set data.label_column, or choose a split with labels"
        )

    def _images(self, folder: Path) -> list[str]:
        """The names of the images directly in a folder, which may be missing, sorted; not hidden ones."""
        names = os.listdir(folder) if folder.is_dir() else []
        return sorted(name for name in names if name.lower().endswith(self.suffixes) and name[0] != ".")


def _numbered(images: list[Labelled], file: Callable[[str], File], decoder: Decoder) -> NumberedSamples:
    names, labels = [name for name, _ in images], [label for _, label in images]
    known = "\0".join(names).encode("utf-8", "surrogateescape") + np.array(labels, "<i8").tobytes()
    fingerprint = hashlib.sha256(known).hexdigest()[:16]
    return NumberedSamples(names, lambda number: (file(names[number]), labels[number]), decoder, fingerprint)


def _name(labelled: Labelled) -> str:
    return labelled[0]


def _classes(folder: Path) -> list[str]:
    """The names of the sub-folders, sorted; not hidden ones."""
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def _sample(
    labelled: tuple[File, int], seed: int | None, size: int, mode: str, smallest: float, flip: bool
) -> tuple[Pixels, int]:
    """Cut the square that a seed chooses out of an image, or the middle one, whole; make it [channels, size, size]."""
    from PIL.Image import Resampling

    file, label = labelled
    image = _open(file).convert(mode)
    smaller, across, down, mirrored = (0.0, 0.5, 0.5, 1.0) if seed is None else np.random.default_rng(seed).random(4)
    side = min(image.size) * (1 - (1 - smallest) * smaller)
    left, top = (image.width - side) * across, (image.height - side) * down
    box = (left, top, min(left + side, image.width), min(top + side, image.height))  # whatever rounding makes of it
    image = image.resize((size, size), Resampling.BILINEAR, box)
    pixels: Pixels = np.asarray(image).reshape(size, size, -1).transpose(2, 0, 1)
    return pixels[:, :, ::-1] if flip and mirrored < 0.5 else pixels, label


def _open(file: File) -> Image:
    """The image in a file, decoded, the right way up, in bytes: 16 bits, which Pillow would clip, become 8."""
    import PIL.Image
    import PIL.ImageOps

    if isinstance(file, PIL.Image.Image):
        return file
    try:
        with PIL.Image.open(BytesIO(file) if isinstance(file, bytes) else file) as image:
            PIL.ImageOps.exif_transpose(image, in_place=True)
            image.load()
    except PIL.UnidentifiedImageError as error:
        raise OSError("it is no image") from error  # Pillow names the file, or its buffer
    if not image.mode.startswith("I"):
        return image
    return PIL.Image.fromarray((np.asarray(image) / 256).clip(0, 255).astype(np.uint8))


def _batch(samples: Iterable[tuple[Pixels, int]]) -> Batch:
    pixels, labels = zip(*samples, strict=True)
    image = torch.from_numpy(np.stack(pixels)).float().div_(127.5).sub_(1)
    return {"image": image, "label": torch.tensor(labels)}
