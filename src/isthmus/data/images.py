"""Labelled images: a folder with a sub-folder for every class, or scikit-learn's handwritten digits."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from isthmus.core.types import UserError
from isthmus.data.bad import ErrorBudget
from isthmus.data.indexed import IndexedDataSet, Indices
from isthmus.data.options import check_options
from isthmus.data.pictures import ImageSamples, View, open_image
from isthmus.data.split import held_out

if TYPE_CHECKING:
    from PIL.Image import Image

Labelled = tuple[list[str], Indices]  # names, and their labels [num_images]
Parts = tuple[Labelled, Labelled]  # training, validation
Load = Callable[[str], "Image"]  # by name

_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".pgm", ".ppm")
_NUM_THREADS = 8  # that read and decode files: some wait for the disk while others compute


@dataclass(frozen=True)
class Images:
    """Labelled images as {"image": [batch, channels, size, size] float32 from -1 to 1, "label": [batch] int64}.

    A folder has a sub-folder of images for every class; classes are numbered in the order of their names. Where it has
    the sub-folders train and validation (or val), the classes lie in these. Else a hash of an image's relative path
    says on which side it lies, so images that come or go leave the others where they are; digits are split by number.

    For training a square is cut out of an image, anywhere, of any size from `smallest_crop` to all of its shorter side,
    and half of the squares are mirrored. For validation it is the largest square in the middle.
    """

    source: str = "digits"  # a folder, or "digits": 1,797 grey images of 8 x 8 pixels that come with scikit-learn
    validation_fraction: float = 0.1
    smallest_crop: float = 0.75  # over the image's shorter side
    flip: bool | None = None  # mirror images; None: those of a folder, not digits
    max_bad_samples: int = 10  # images that cannot be read and are passed over; one more ends the run

    def __post_init__(self) -> None:
        check_options(self)

    def open(self, image_size: int, num_channels: int) -> IndexedDataSet:
        """Find the images, to be read at this size in pixels and with 1 (grey) or 3 (colour) channels."""
        flip = self.source != "digits" if self.flip is None else self.flip
        view = View(image_size, num_channels, self.smallest_crop, flip)
        try:
            load, parts = self._digits() if self.source == "digits" else self._folder()
        except ImportError as error:
            raise UserError(f"data: the digits need scikit-learn: pip install 'isthmus[vision]' ({error})") from error
        except OSError as error:
            raise UserError(f"data: cannot read {error.filename!r}: {error.strerror}") from error
        each = map if self.source == "digits" else ThreadPoolExecutor(_NUM_THREADS, "images").map
        bad = ErrorBudget(self.max_bad_samples)
        train, validation = (ImageSamples(*part, load, view, bad, each) for part in parts)
        num_classes = 1 + max(int(labels.max(initial=0)) for _, labels in parts)
        return IndexedDataSet(train, validation, {"num_classes": num_classes})

    def _digits(self) -> tuple[Load, Parts]:
        from PIL import Image
        from sklearn.datasets import load_digits

        digits = load_digits()
        pixels, labels = (digits.images * (255 / 16)).astype(np.uint8), digits.target.astype(np.int64)
        return lambda name: Image.fromarray(pixels[int(name)]), self._split(
            [f"{i}" for i in range(len(labels))], labels
        )

    def _folder(self) -> tuple[Load, Parts]:
        root = Path(self.source).expanduser()
        return lambda name: open_image(root / name), self._find(root)

    def _find(self, root: Path) -> Parts:
        """Training and validation images below a folder, named by their relative paths."""
        if not root.is_dir():
            raise UserError(
                f"data: {self.source!r} is no folder; give one with a sub-folder of images a class, or digits"
            )
        held = next((name for name in ("validation", "val") if (root / name).is_dir()), None)
        if held is None or not (root / "train").is_dir():
            return self._split(*_list(root, "", _classes(root)))
        classes = _classes(root / "train")
        unknown = [name for name in _classes(root / held) if name not in classes]
        if unknown:
            raise UserError(f"data: class {unknown[0]!r} is in {held} but not in train of {self.source!r}: remove it")
        return _list(root, "train/", classes), _list(root, f"{held}/", classes)

    def _split(self, names: list[str], labels: Indices) -> Parts:
        kept = held_out(names, self.validation_fraction)
        chosen = np.array([name in kept for name in names])
        return (list(compress(names, ~chosen)), labels[~chosen]), (list(compress(names, chosen)), labels[chosen])


def _classes(folder: Path) -> list[str]:
    """The names of the sub-folders, sorted; not hidden ones."""
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def _list(root: Path, prefix: str, classes: list[str]) -> Labelled:
    """All images of these classes, in the order of their paths."""
    names, labels = list[str](), list[int]()
    for label, name in enumerate(classes):
        folder = f"{prefix}{name}/"
        if (root / folder).is_dir():  # validation may lack a class
            files = [file for file in os.listdir(root / folder) if file.lower().endswith(_SUFFIXES) and file[0] != "."]
            names += [folder + file for file in sorted(files)]
            labels += [label] * len(files)
    if not names:
        raise UserError(f"data: {str(root / prefix)!r} has no images in sub-folders: it needs one for every class")
    return names, np.array(labels, dtype=np.int64)
