"""Images that need no files: a bright spot, in another quarter of the image for every class."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from isthmus.data.base import Positions
from isthmus.data.sample_order import NumberedDataSet


@dataclass
class Spots:
    """Spot number n is where and as wide as a generator seeded with n says."""

    first: int
    size: int
    image_size: int
    fingerprint: str = "spots"
    tokens_per_sample: int = 1

    def __len__(self) -> int:
        return self.size

    def read(self, indices: Positions, seeds: Positions | None) -> dict[str, torch.Tensor]:
        numbers = indices + self.first
        noise = np.stack([np.random.RandomState(number).uniform(-1, 1, 3) for number in numbers])
        centres = 0.25 + 0.5 * np.stack([numbers % 4 // 2, numbers % 2], axis=1) + 0.08 * noise[:, :2]
        grid = (np.arange(self.image_size) + 0.5) / self.image_size
        squares = [np.square(grid - centres[:, axis, None]) for axis in range(2)]
        distances = squares[0][:, :, None] + squares[1][:, None, :]
        images = 2 * np.exp(-distances / (0.02 + 0.01 * noise[:, 2, None, None])) - 1
        return {"image": torch.from_numpy(images[:, None]).float(), "label": torch.from_numpy(numbers % 4)}


@dataclass(frozen=True)
class Blobs:
    """The data spec."""

    def open(self, image_size: int) -> NumberedDataSet:
        sizes = {"num_classes": 4, "num_channels": 1}
        return NumberedDataSet(Spots(0, 512, image_size), Spots(512, 128, image_size), sizes)
