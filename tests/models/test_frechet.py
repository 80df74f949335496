"""The Frechet distance against closed forms, and its features against images that are nearly right."""

import numpy as np
import pytest
import torch
from tests.blobs import Spots

from isthmus.models.frechet import class_agreement, frechet_distance, random_features


def spots(first: int, size: int = 400) -> tuple[torch.Tensor, np.ndarray]:
    batch = Spots(first, size, 8).read(np.arange(size), None)
    return batch["image"], batch["label"].numpy()


def test_of_itself_it_is_nothing_and_of_the_mean_alone_one():
    features = random_features(spots(0)[0])
    assert features.shape == (400, 64)
    assert frechet_distance(features, features) == pytest.approx(0, abs=1e-9)
    mean = np.repeat(features.mean(0, keepdims=True), 400, axis=0)
    assert frechet_distance(features, mean) == pytest.approx(1)


def test_it_is_the_published_formula():
    """Of arXiv 1706.08500, with the square root of the product by its own eigenvalues."""
    generator = np.random.default_rng(0)
    real, generated = generator.normal(size=(50, 5)), generator.normal(size=(40, 5)) @ generator.normal(size=(5, 5)) + 1
    covariances = [np.cov(features.T) for features in (real, generated)]
    root = np.sqrt(np.linalg.eigvals(covariances[0] @ covariances[1]).real).sum()
    distance = ((real.mean(0) - generated.mean(0)) ** 2).sum() + np.trace(covariances[0] + covariances[1]) - 2 * root
    assert frechet_distance(real, generated) == pytest.approx(distance / np.trace(covariances[0]))


def test_fresh_images_are_near_and_worse_ones_farther():
    """Noise with the pixels' own mean and covariance is what a linear feature would not tell from the images."""
    real, fresh = spots(0)[0], spots(400)[0]
    pixels = real.flatten(1).double().numpy()
    drawn = np.random.default_rng(0).multivariate_normal(pixels.mean(0), np.cov(pixels.T), size=400)
    alike = torch.from_numpy(drawn).float().view_as(real).clamp(-1, 1)
    noise = torch.rand(real.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    features = random_features(real)
    near, linear, far = (frechet_distance(features, random_features(images)) for images in (fresh, alike, noise))
    assert near < 0.05
    assert linear > 3 * near
    assert far > 3 * linear


def test_classes_agree_where_the_nearest_image_is_of_the_class_asked_for():
    (real, labels), (fresh, wanted) = spots(0), spots(400)
    features = [random_features(images) for images in (real, fresh)]
    assert class_agreement(features[0], labels, features[1], wanted) > 0.98
    assert class_agreement(features[0], labels, features[1], (wanted + 1) % 4) < 0.02


@pytest.mark.parametrize(("size", "channels"), [(8, 1), (32, 3), (128, 3)])
def test_features_of_any_images(size, channels):
    features = random_features(torch.zeros(2, channels, size, size))
    assert features.shape == (2, 64)
