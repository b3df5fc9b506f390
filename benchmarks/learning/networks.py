"""Small networks that an agent trains on its own records: a convolutional one for digits, a linear one for features.

They are ordinary modules without batch norm or dropout, so that they mean the same when many of them run at once
(`torch.func.functional_call` under `vmap`) and when gradients are taken per record: with batch norm, one record
would change what the network says about another in its batch.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from labeler.errors import BadData, InvalidSetting

SIDE = 28
"""Height and width of a digit in pixels."""

_MEAN, _DEVIATION = 0.1307, 0.3081
"""Mean and standard deviation of MNIST's training pixels in [0, 1], as published with the set: public constants."""


def small_convnet(num_classes: int = 10) -> nn.Module:
    """A network of 55,594 parameters (for ten classes) for grey images of 28 x 28.

    The first convolution moves in steps of two: at full size it would cost more than everything after it.

    Args:
        num_classes: C, at least 2.

    Returns:
        A module from float images of shape (n, 1, 28, 28) to logits of shape (n, num_classes). Its starting weights
        come from torch's global generator.
    """
    _check_classes(num_classes)
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=5, stride=2, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 32),
        nn.ReLU(),
        nn.Linear(32, num_classes),
    )


def linear_head(dimension: int, num_classes: int) -> nn.Module:
    """Multinomial logistic regression: one linear layer from features of shape (n, dimension) to logits."""
    _check_classes(num_classes)
    if dimension < 1:
        raise InvalidSetting(f"features have at least one dimension, found {dimension}")
    return nn.Linear(dimension, num_classes)


def image_tensor(images: NDArray[np.uint8]) -> Tensor:
    """Images as `small_convnet` takes them: shifted and scaled by MNIST's published mean and deviation.

    The constants are public and the same for every set, so normalising reads nothing off private images.

    Args:
        images: uint8, shape (n, 28, 28).

    Returns:
        float32, shape (n, 1, 28, 28).

    Raises:
        BadData: another type or shape.
    """
    if images.dtype != np.uint8 or images.shape[1:] != (SIDE, SIDE):
        raise BadData(f"images must be uint8 of shape (n, {SIDE}, {SIDE}), found {images.dtype} of {images.shape}")
    pixels = torch.from_numpy(np.array(images)).to(torch.float32).div_(255)
    return pixels.sub_(_MEAN).div_(_DEVIATION).unsqueeze(1)


def _check_classes(num_classes: int) -> None:
    if num_classes < 2:
        raise InvalidSetting(f"a classifier needs at least 2 classes, found {num_classes}")
