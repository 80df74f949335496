"""Measures of generated images: their Frechet distance from real ones, and whether they are of the class asked for.

The usual features (FID, arXiv 1706.08500) are those of a classifier of ImageNet, which has to be downloaded and knows
nothing of grey digits. Here they are those of a fixed random convolutional network: its few layers see strokes and
where these are, in images of any kind (arXiv 2002.09797 uses random networks where ImageNet's mislead). They are not
linear, so images that only have the real ones' pixel means and covariances are told apart.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import adaptive_avg_pool2d, avg_pool2d, conv2d, leaky_relu

_CHANNELS = 16
_GRID = 2  # features are kept by quarters of the image
_SEED = 0

Features = npt.NDArray[np.float64]  # [num_images, num_features]


@torch.no_grad()
def random_features(images: torch.Tensor) -> Features:
    """Compute 64 features of every image [num_images, channels, size, size], by layers with fixed random weights."""
    generator = np.random.RandomState(_SEED)  # whose numbers are the same in all versions
    x = images.float()
    for layer in range(4):
        weight = generator.standard_normal((_CHANNELS, x.shape[1], 3, 3)) * (2 / (9 * x.shape[1])) ** 0.5
        x = leaky_relu(conv2d(x, torch.from_numpy(weight).to(x), padding=1), 0.2)
        if layer and x.shape[-1] <= 2 * _GRID:
            break
        x = avg_pool2d(x, 2)
    features: Features = adaptive_avg_pool2d(x, _GRID).flatten(1).double().cpu().numpy()
    return features


def frechet_distance(real: Features, generated: Features) -> float:
    """Return the Frechet distance of two normal distributions with these moments, over the real ones' variance.

        (|m - m'|^2 + tr(C + C' - 2 (C C')^(1/2))) / tr(C)

    0: alike; 1: as far as if the mean of the real ones were all that is ever generated. Other than FID it does not
    depend on the features' scale. Few images make it larger: compare only what was measured with as many.
    """
    mean, covariance = _moments(real)
    other_mean, other_covariance = _moments(generated)
    root = _root(covariance)
    crossed = np.linalg.eigvalsh(root @ other_covariance @ root)  # those of C C', without its asymmetry
    variances = np.trace(covariance) + np.trace(other_covariance) - 2 * np.sqrt(crossed.clip(min=0)).sum()
    return float((np.square(mean - other_mean).sum() + variances) / np.trace(covariance))


def class_agreement(
    real: Features, labels: npt.NDArray[np.int64], generated: Features, wanted: npt.NDArray[np.int64]
) -> float:
    """Return the share of generated images whose nearest real one has the class that was asked for."""
    products = generated @ real.T
    nearest = (np.square(real).sum(1) - 2 * products).argmin(1)
    return float((labels[nearest] == wanted).mean())


def _moments(features: Features) -> tuple[Features, Features]:
    return features.mean(0), np.cov(features, rowvar=False)


def _root(covariance: Features) -> Features:
    """Return the symmetric square root of a covariance."""
    values, vectors = np.linalg.eigh(covariance)
    root: Features = (vectors * np.sqrt(values.clip(min=0))) @ vectors.T
    return root
