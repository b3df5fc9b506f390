"""An image whose feature half precision cannot hold is embedded all the same, and the same beside any other image.

On a processor, whose half precision is refused to users: there too it ends at 65,504.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from feature_store.backbones.network import NetworkBackbone
from feature_store.backbones.spec import Transform

TRANSFORM = Transform(resize=8, crop=8, mean=(0.0,) * 3, std=(1.0,) * 3)


class Large(nn.Module):
    """Features of up to 180,000 times the mean brightness: beyond 65,504 for bright images. Notes its passes."""

    def __init__(self, *, weight: float = 6e4) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.tensor([[1.0, 0.9, 1.0, 0.8], [0.9, 1.0, 1.0, 1.0], [1.0, 1.0, 0.9, 1.0]]))
        self.weights.data *= weight
        self.passes: list[tuple[torch.dtype, int]] = []

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.passes.append((images.dtype, len(images)))
        return images.mean(dim=(2, 3)) @ self.weights


def backbone(module: nn.Module) -> NetworkBackbone:
    made = NetworkBackbone(module, dimension=4, transform=TRANSFORM, spec={"kind": "test"}, device="cpu", batch_size=6)
    made._half, made._module, made._single = True, made._on_device(copy.deepcopy(module).half()), None
    return made


def images(*brightness: int) -> NDArray[np.uint8]:
    rng = np.random.default_rng(1)
    return np.stack([rng.integers(0, one + 1, (8, 8, 3)).astype(np.uint8) for one in brightness])


def test_bright_images_come_from_float32_and_dark_ones_do_not() -> None:
    pictures = images(255, 20, 250, 10)
    whole = NetworkBackbone(Large(), dimension=4, transform=TRANSFORM, spec={}, device="cpu", batch_size=6)
    exact = whole.embed_prepared(pictures)
    features = backbone(Large()).embed_prepared(pictures)
    assert np.isfinite(features).all()
    assert (exact[[0, 2]].max(axis=1) > 65504).all()
    assert np.array_equal(features[[0, 2]], exact[[0, 2]])
    assert not np.array_equal(features[[1, 3]], exact[[1, 3]])
    assert np.allclose(features, exact, rtol=5e-3)


def test_a_feature_does_not_depend_on_whether_another_image_overflows() -> None:
    dark, bright = images(20, 10), images(255, 255)
    alone = backbone(Large()).embed_prepared(dark)
    beside = backbone(Large()).embed_prepared(np.concatenate([dark, bright]))
    assert np.array_equal(beside[:2], alone)
    assert np.array_equal(beside[2:], backbone(Large()).embed_prepared(bright))


def test_the_pass_in_float32_has_the_one_shape_too_and_only_where_it_is_needed() -> None:
    made = backbone(Large())
    made.embed_prepared(images(20, 10))
    assert made._single is None
    made.embed_prepared(images(255))
    single = made._single
    assert isinstance(single, Large)
    assert single.passes[-1] == (torch.float32, 6)


@pytest.mark.parametrize("weight", [1.0, 1e6])
def test_a_copy_for_training_has_the_weights_as_they_were(weight: float) -> None:
    original = Large(weight=weight).weights.clone()
    copied = backbone(Large(weight=weight)).training_copy()
    assert isinstance(copied, Large)
    assert torch.equal(copied.weights, original)
    assert copied.weights.requires_grad
