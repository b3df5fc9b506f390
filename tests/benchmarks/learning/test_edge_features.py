"""Edge features are a function of one image, of norm 1, and tell digits apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.data import mnist
from benchmarks.learning.networks import DIMENSION, edge_features
from labeler.errors import BadData


def test_a_feature_depends_on_its_own_image_alone(rng: np.random.Generator) -> None:
    images = rng.integers(0, 256, size=(5, 28, 28)).astype(np.uint8)
    together = edge_features(images)
    assert together.shape == (5, DIMENSION)
    assert together.dtype == np.float32
    for image, feature in zip(images, together, strict=True):
        assert edge_features(image[None])[0] == pytest.approx(feature, abs=1e-6)


def test_rows_have_norm_one_and_an_empty_image_none(rng: np.random.Generator) -> None:
    images = rng.integers(0, 256, size=(3, 28, 28)).astype(np.uint8)
    images[1] = 0
    norms = np.linalg.norm(edge_features(images).astype(np.float64), axis=1)
    assert norms[[0, 2]] == pytest.approx(1, abs=1e-5)
    assert (norms <= 1).all()
    assert norms[1] == 0


def test_directions_turn_with_the_image() -> None:
    """A turn by 90 degrees moves every direction on by two of eight, and every cell with it."""
    image = np.zeros((28, 28), dtype=np.uint8)
    image[4:12, 6:20] = 200
    plain, turned = (edge_features(part[None])[0].reshape(8, 7, 7) for part in (image, np.rot90(image)))
    assert turned == pytest.approx(np.rot90(np.roll(plain, -2, axis=0), axes=(1, 2)), abs=1e-5)


def test_other_types_and_shapes_are_refused() -> None:
    with pytest.raises(BadData, match="float64"):
        edge_features(np.zeros((2, 28, 28)))  # type: ignore[arg-type]
    with pytest.raises(BadData, match=r"\(2, 27, 28\)"):
        edge_features(np.zeros((2, 27, 28), dtype=np.uint8))


def test_class_means_of_real_digits_already_name_most_of_them(data_root: Path) -> None:
    digits = mnist(data_root)
    features, labels = edge_features(digits.train.inputs[:2000]), digits.train.labels[:2000]
    means = np.stack([features[labels == digit].mean(0) for digit in range(10)])
    found = (edge_features(digits.test.inputs[:1000]) @ means.T).argmax(1)
    assert (found == digits.test.labels[:1000]).mean() > 0.75
