"""The simplest line of samples: each is its own position."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from isthmus.inner.step import Batch


@dataclass(frozen=True)
class Numbers:
    fingerprint: str = "numbers"
    tokens_per_sample: int = 1
    num_samples: int = 10**9  # of an epoch

    def read(self, positions: npt.NDArray[np.int64]) -> Batch:
        return {"position": torch.from_numpy(positions)}
