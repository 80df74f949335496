"""Labelled images, brought to one shape: found by number, or in rows that are read as they come."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch

from isthmus.core.types import UserError
from isthmus.data.base import Positions
from isthmus.data.errors import ErrorBudget
from isthmus.data.streamed_rows import file_in
from isthmus.inner.step import Batch

if TYPE_CHECKING:
    from PIL.Image import Image

Pixels = npt.NDArray[np.uint8]  # [channels, height, width]
Draws = Sequence[float]  # four numbers from 0 to 1: how small the crop, where across, where down, which way round

_MIDDLE: Draws = (0.0, 0.5, 0.5, 1.0)
_MODES = {1: "L", 3: "RGB"}


@dataclass(frozen=True)
class Crop:
    """Cuts a square out of an image and makes it `size` pixels wide.

    Attributes:
        size: of the result, in pixels.
        num_channels: 1 makes colours grey, 3 gives grey images three equal channels.
        smallest_crop: side of the smallest random square, over the image's shorter side.
        flip: whether half of the images are mirrored, left to right.
    """

    size: int
    num_channels: int
    smallest_crop: float
    flip: bool

    def __post_init__(self) -> None:
        if self.num_channels not in _MODES:
            raise UserError(f"data: the model has {self.num_channels} channels; images have 1 (grey) or 3 (colour)")

    def cut(self, image: Image, draws: Draws) -> Pixels:
        """Return a square of an image, [num_channels, size, size]; draws of (0, 0.5, 0.5, 1) give the middle, whole."""
        from PIL.Image import Resampling

        image = _in_bytes(image).convert(_MODES[self.num_channels])
        smaller, across, down, mirrored = draws
        side = min(image.size) * (1 - (1 - self.smallest_crop) * smaller)
        left, top = (image.width - side) * across, (image.height - side) * down
        box = (left, top, min(left + side, image.width), min(top + side, image.height))  # whatever rounding makes of it
        image = image.resize((self.size, self.size), Resampling.BILINEAR, box)
        pixels: Pixels = np.asarray(image).reshape(self.size, self.size, self.num_channels).transpose(2, 0, 1)
        return pixels[:, :, ::-1] if self.flip and mirrored < 0.5 else pixels


class ImageSamples:
    """Labelled images by number; in the place of one that cannot be read stands the next one that can.

    Args:
        names: the names of the images, which `load` opens.
        labels: [num_images] int64.
        load: returns the image of a name.
        crop: brings an image to its shape.
        budget: counts those that cannot be read.
        each: a `map`, or that of a pool of threads.
    """

    tokens_per_sample = 1

    def __init__(
        self,
        names: list[str],
        labels: Positions,
        load: Callable[[str], Image],
        crop: Crop,
        budget: ErrorBudget,
        each: Callable[..., Iterable[tuple[Pixels, int]]] = map,
    ) -> None:
        self._names, self._labels, self._load, self._crop = names, labels, load, crop
        self._budget, self._each = budget, each
        text = "\0".join(names).encode("utf-8", "surrogateescape")
        self.fingerprint = hashlib.sha256(text + labels.astype("<i8").tobytes()).hexdigest()[:16]

    def __len__(self) -> int:
        return len(self._names)

    def read(self, indices: Positions, seeds: Positions | None) -> Batch:
        """Return these images in their order; cropped and mirrored at random by `seeds`, one each, where given."""
        draws = [draws_of(seed) for seed in ([None] * len(indices) if seeds is None else seeds.tolist())]
        return image_batch(self._each(self._sample, indices.tolist(), draws))

    def _sample(self, index: int, draws: Draws) -> tuple[Pixels, int]:
        """Pixels and label of an image, or of the next one that can be read."""
        for number in chain(range(index, len(self)), range(index)):
            name = self._names[number]
            if name in self._budget:
                continue
            try:
                return self._crop.cut(self._load(name), draws), int(self._labels[number])
            except Exception as error:  # Pillow raises nearly anything for a damaged file
                self._budget.add(name, error)
        raise UserError("data: none of the images can be read; mend the data")


class ImageRows:
    """Rows of an image's file and its label, below `num_classes` where that is known; a `streamed_rows.RowReader`."""

    tokens_per_sample = 1

    def __init__(self, image_column: str, label_column: str, crop: Crop, num_classes: int | None) -> None:
        self._image_column, self._label_column = image_column, label_column
        self._crop, self._num_classes = crop, num_classes
        self.form = (image_column, label_column)

    def hold(self, columns: dict[str, Any], name: str) -> tuple[bytes, int]:
        """Return the image's file, and its label."""
        label = columns[self._label_column]
        if not isinstance(label, int) or label < 0:
            raise TypeError(f"its {self._label_column} is {label!r:.40}, not a number from 0 on")
        if self._num_classes is not None and label >= self._num_classes:
            raise UserError(
                f"data: {name!r} has label {label}, and model.num_classes is {self._num_classes}: "
                f"raise it to {label + 1} at least"
            )
        return file_in(columns[self._image_column], name), label

    def decode(self, held: tuple[bytes, int], seed: int | None) -> tuple[Pixels, int]:
        """Return pixels and label; cropped and mirrored at random by the seed, where there is one."""
        from PIL import UnidentifiedImageError

        content, label = held
        try:
            image = open_image(BytesIO(content))
        except UnidentifiedImageError as error:
            raise OSError("it is no image") from error  # Pillow names the buffer
        return self._crop.cut(image, draws_of(seed)), label

    def batch(self, samples: list[tuple[Pixels, int]]) -> Batch:
        """Return the samples in the form of `images`."""
        return image_batch(samples)


def draws_of(seed: int | None) -> Draws:
    """Return what a seed chooses; without one, the middle of the image as it is."""
    return _MIDDLE if seed is None else np.random.default_rng(seed).random(4).tolist()


def image_batch(samples: Iterable[tuple[Pixels, int]]) -> Batch:
    """Return {"image": [batch, channels, size, size] float32 from -1 to 1, "label": [batch] int64}."""
    pixels, labels = zip(*samples, strict=True)
    image = torch.from_numpy(np.stack(pixels)).float().div_(127.5).sub_(1)
    return {"image": image, "label": torch.tensor(labels)}


def open_image(file: Path | BinaryIO) -> Image:
    """Return the image in a file, decoded, the right way up."""
    from PIL import Image as Images
    from PIL import ImageOps

    with Images.open(file) as image:
        ImageOps.exif_transpose(image, in_place=True)
        image.load()
        return image


def _in_bytes(image: Image) -> Image:
    """Images of 16 bits as such of 8, which Pillow would clip; others as they are."""
    from PIL import Image as Images

    if not image.mode.startswith("I"):
        return image
    return Images.fromarray((np.asarray(image) / 256).clip(0, 255).astype(np.uint8))
