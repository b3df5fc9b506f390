"""Small networks that an agent trains on its own records: a convolutional one for digits, a linear one for features.

They are ordinary modules without batch norm or dropout, so that they mean the same when many of them run at once
(`torch.func.functional_call` under `vmap`) and when gradients are taken per record: with batch norm, one record
would change what the network says about another in its batch.

Fixed features of grey digits: in which directions edges run, and where. Nothing is fitted, so nothing is learned
from data.

    image --blur--> gradient --> its length, dealt to the two nearest of 8 directions --> summed over 7 x 7 overlapping
    cells --> square roots --> divided by the row's own norm

A linear layer on such features learns digits from few records and much noise (Tramer, Boneh 2021 make the point for
scattering features). Every number is a function of the one image.

References:
    Dalal, Triggs 2005, "Histograms of oriented gradients for human detection".
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter1d
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


DIRECTIONS, CELLS, SIDE = 8, 7, 28
DIMENSION = DIRECTIONS * CELLS * CELLS

_BLUR = 0.7
_ROWS_AT_ONCE = 2_000


def edge_features(images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Features of norm 1 (0 for an empty image).

    Args:
        images: uint8, shape (n, 28, 28).

    Returns:
        float32, shape (n, 392).

    Raises:
        BadData: another type or shape.
    """
    if images.dtype != np.uint8 or images.shape[1:] != (SIDE, SIDE):
        raise BadData(f"images must be uint8 of shape (n, {SIDE}, {SIDE}), found {images.dtype} of {images.shape}")
    features = np.empty((len(images), DIMENSION), dtype=np.float32)
    for start in range(0, len(images), _ROWS_AT_ONCE):
        features[start : start + _ROWS_AT_ONCE] = _features(images[start : start + _ROWS_AT_ONCE])
    return features


def _features(images: NDArray[np.uint8]) -> NDArray[np.float32]:
    grey = images.astype(np.float32) / 255
    for axis in (1, 2):
        grey = gaussian_filter1d(grey, _BLUR, axis=axis)
    down, right = np.zeros_like(grey), np.zeros_like(grey)
    down[:, 1:-1] = (grey[:, 2:] - grey[:, :-2]) / 2
    right[:, :, 1:-1] = (grey[:, :, 2:] - grey[:, :, :-2]) / 2
    length = np.hypot(down, right)
    place = np.arctan2(down, right) * np.float32(DIRECTIONS / (2 * np.pi))
    width = SIDE / CELLS
    centres = (np.arange(CELLS) + 0.5) * width - 0.5
    cells = np.maximum(0, 1 - np.abs(np.arange(SIDE) - centres[:, None]) / width).astype(np.float32)
    parts = []
    for direction in range(DIRECTIONS):
        away = np.abs((place - direction + DIRECTIONS / 2) % DIRECTIONS - DIRECTIONS / 2)
        parts.append(cells @ (length * np.maximum(0, 1 - away)) @ cells.T)
    rooted = np.sqrt(np.stack(parts, axis=1).reshape(len(images), -1))
    norms = np.linalg.norm(rooted, axis=1, keepdims=True)
    scaled: NDArray[np.float32] = (rooted / np.maximum(norms, 1e-9) * (1 - 1e-6)).astype(np.float32)
    return scaled
