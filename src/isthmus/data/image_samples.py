"""Labelled images, brought to one shape."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import numpy.typing as npt
import torch

from isthmus.core.types import UserError
from isthmus.inner.step import Batch

if TYPE_CHECKING:
    from PIL.Image import Image

Pixels = npt.NDArray[np.uint8]  # [channels, height, width]

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

    def cut(self, image: Image, seed: int | None) -> Pixels:
        """Return the square that a seed chooses, [num_channels, size, size]; without one, the middle, whole."""
        from PIL.Image import Resampling

        image = _in_bytes(image).convert(_MODES[self.num_channels])
        smaller, across, down, mirrored = (
            (0.0, 0.5, 0.5, 1.0) if seed is None else np.random.default_rng(seed).random(4)
        )
        side = min(image.size) * (1 - (1 - self.smallest_crop) * smaller)
        left, top = (image.width - side) * across, (image.height - side) * down
        box = (left, top, min(left + side, image.width), min(top + side, image.height))  # whatever rounding makes of it
        image = image.resize((self.size, self.size), Resampling.BILINEAR, box)
        pixels: Pixels = np.asarray(image).reshape(self.size, self.size, self.num_channels).transpose(2, 0, 1)
        return pixels[:, :, ::-1] if self.flip and mirrored < 0.5 else pixels


def image_batch(samples: Iterable[tuple[Pixels, int]]) -> Batch:
    """Return {"image": [batch, channels, size, size] float32 from -1 to 1, "label": [batch] int64}."""
    pixels, labels = zip(*samples, strict=True)
    image = torch.from_numpy(np.stack(pixels)).float().div_(127.5).sub_(1)
    return {"image": image, "label": torch.tensor(labels)}


def open_image(file: Path | BinaryIO) -> Image:
    """Return the image in a file, decoded, the right way up."""
    from PIL import Image as Images
    from PIL import ImageOps, UnidentifiedImageError

    try:
        with Images.open(file) as image:
            ImageOps.exif_transpose(image, in_place=True)
            image.load()
            return image
    except UnidentifiedImageError as error:
        raise OSError("it is no image") from error  # Pillow names the file, or its buffer


def _in_bytes(image: Image) -> Image:
    """Images of 16 bits as such of 8, which Pillow would clip; others as they are."""
    from PIL import Image as Images

    if not image.mode.startswith("I"):
        return image
    return Images.fromarray((np.asarray(image) / 256).clip(0, 255).astype(np.uint8))
