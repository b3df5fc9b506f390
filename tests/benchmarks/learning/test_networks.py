"""The small networks: shapes, sizes, and what a record's answer may depend on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from benchmarks.learning.networks import image_tensor, linear_head, small_convnet
from labeler.errors import BadData, InvalidSetting


def _digits(count: int) -> torch.Tensor:
    return image_tensor(np.random.default_rng(0).integers(0, 256, (count, 28, 28), dtype=np.uint8))


def test_the_convnet_has_the_parameters_it_says_and_one_logit_per_class() -> None:
    network = small_convnet(10)
    assert sum(weights.numel() for weights in network.parameters()) == 55_594
    assert network(_digits(3)).shape == (3, 10)
    assert small_convnet(4)(_digits(3)).shape == (3, 4)
    assert linear_head(7, 5)(torch.zeros(2, 7)).shape == (2, 5)


def test_a_record_is_answered_the_same_whoever_is_in_its_batch() -> None:
    network, images = small_convnet(), _digits(4)
    torch.testing.assert_close(network(images)[:1], network(images[:1]))


def test_gradients_per_record_come_from_vmap_and_sum_to_the_batch_gradient() -> None:
    network, images, labels = small_convnet(), _digits(5), torch.arange(5)
    weights = {name: value.detach() for name, value in network.named_parameters()}

    def loss(weights: dict[str, torch.Tensor], image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(functional_call(network, weights, (image[None],)), label[None])

    each = vmap(grad(loss), in_dims=(None, 0, 0))(weights, images, labels)
    functional.cross_entropy(network(images), labels, reduction="sum").backward()  # type: ignore[no-untyped-call]  # torch does not type it
    for name, value in network.named_parameters():
        torch.testing.assert_close(each[name].sum(dim=0), value.grad, rtol=1e-4, atol=1e-5)


def test_images_are_normalised_by_published_constants() -> None:
    black, white = np.zeros((1, 28, 28), dtype=np.uint8), np.full((1, 28, 28), 255, dtype=np.uint8)
    assert image_tensor(black)[0, 0, 3, 4] == pytest.approx(-0.1307 / 0.3081)
    assert image_tensor(white)[0, 0, 3, 4] == pytest.approx((1 - 0.1307) / 0.3081)
    assert image_tensor(black).shape == (1, 1, 28, 28)
    # Nothing about an image depends on the others: a statistic of the batch would be one of private data.
    torch.testing.assert_close(image_tensor(np.concatenate([black, white]))[:1], image_tensor(black))


def test_what_no_network_can_take_is_refused() -> None:
    with pytest.raises(BadData, match="uint8"):
        image_tensor(np.zeros((2, 28, 28)))  # type: ignore[arg-type]
    with pytest.raises(BadData, match="28"):
        image_tensor(np.zeros((2, 16, 16), dtype=np.uint8))
    with pytest.raises(InvalidSetting, match="2 classes"):
        small_convnet(1)
    with pytest.raises(InvalidSetting, match="dimension"):
        linear_head(0, 3)
