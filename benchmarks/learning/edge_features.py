"""Fixed features of grey digits: in which directions edges run, and where. Nothing is fitted, so nothing is learned
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
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter1d

from labeler.errors import BadData

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
