"""Images brought to one shape, and found by number."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import numpy.typing as npt
import torch

from isthmus.core.types import UserError
from isthmus.data.bad import ErrorBudget
from isthmus.data.indexed import Indices
from isthmus.inner.step import Batch

if TYPE_CHECKING:
    from PIL.Image import Image

Pixels = npt.NDArray[np.uint8]  # [channels, height, width]
Draws = Sequence[float]  # four numbers from 0 to 1: how small the crop, where across, where down, which way round

_MIDDLE: Draws = (0.0, 0.5, 0.5, 1.0)
_MODES = {1: "L", 3: "RGB"}


@dataclass(frozen=True)
class View:
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
        try:
            import PIL  # noqa: F401 (so that it is missed now)
        except ImportError as error:
            raise UserError(f"data: images need Pillow: pip install 'isthmus[vision]' ({error})") from error

    def of(self, image: Image, draws: Draws) -> Pixels:
        """[num_channels, size, size]; of the largest square in the middle where the draws are (0, 0.5, 0.5, 1)."""
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
    """Labelled images by number: {"image": [batch, channels, size, size] float32 from -1 to 1, "label": [batch] int64}.

    Args:
        names: of the images.
        labels: [num_images] int64.
        load: opens an image by its name.
        view: brings it to its shape.
        bad: where images go that cannot be read; each is replaced by the next one that can.
        each: a `map`, or that of a pool of threads.
    """

    tokens_per_sample = 1

    def __init__(
        self,
        names: list[str],
        labels: Indices,
        load: Callable[[str], Image],
        view: View,
        bad: ErrorBudget,
        each: Callable[..., Iterable[tuple[Pixels, int]]] = map,
    ) -> None:
        self._names, self._labels, self._load, self._view = names, labels, load, view
        self._bad, self._each = bad, each
        text = "\0".join(names).encode("utf-8", "surrogateescape")
        self.fingerprint = hashlib.sha256(text + labels.astype("<i8").tobytes()).hexdigest()[:16]

    def __len__(self) -> int:
        """How many there are."""
        return len(self._names)

    def read(self, indices: Indices, seeds: Indices | None) -> Batch:
        """These images in their order; cropped and mirrored at random by `seeds`, one each, where given."""
        draws = [draws_of(seed) for seed in ([None] * len(indices) if seeds is None else seeds.tolist())]
        return batch_of(self._each(self._sample, indices.tolist(), draws))

    def _sample(self, index: int, draws: Draws) -> tuple[Pixels, int]:
        """Pixels and label of an image, or of the next one that can be read."""
        for number in chain(range(index, len(self)), range(index)):
            name = self._names[number]
            if name in self._bad:
                continue
            try:
                return self._view.of(self._load(name), draws), int(self._labels[number])
            except Exception as error:  # Pillow raises nearly anything for a damaged file
                self._bad.add(name, error)
        raise UserError("data: none of the images can be read; mend the data")


def draws_of(seed: int | None) -> Draws:
    """What a seed chooses; without one, the middle of the image as it is."""
    return _MIDDLE if seed is None else np.random.default_rng(seed).random(4).tolist()


def batch_of(samples: Iterable[tuple[Pixels, int]]) -> Batch:
    """Pixels and labels as {"image": [batch, channels, size, size] float32 from -1 to 1, "label": [batch] int64}."""
    pixels, labels = zip(*samples, strict=True)
    image = torch.from_numpy(np.stack(pixels)).float().div_(127.5).sub_(1)
    return {"image": image, "label": torch.tensor(labels)}


def open_image(file: Path | BinaryIO) -> Image:
    """The image in a file, decoded, the right way up."""
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
