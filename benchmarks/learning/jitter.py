"""Moved copies of small images: a digit that is shifted, turned or scaled a little is still that digit.

The random numbers are an argument, not drawn here: whoever trains many agents at once draws each agent's numbers from
that agent's own stream, so that one agent's model does not depend on who else is there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from labeler.errors import InvalidSetting

NUMBERS: Final = 5
"""How many random numbers moving one image takes."""


@dataclass(frozen=True)
class Jitter:
    """How far an image may be moved; each amount 0 turns its change off.

    Attributes:
        shift: in plus or minus this share of the side, down and right.
        rotation_degrees: in plus or minus this.
        zoom: scale factor in [1 - zoom, 1 + zoom].
        shear: shear coefficient in plus or minus this.
    """

    shift: float = 0.08
    rotation_degrees: float = 12.0
    zoom: float = 0.1
    shear: float = 0.15

    def __post_init__(self) -> None:
        if not (0 <= self.shift <= 1 and 0 <= self.rotation_degrees <= 180 and 0 <= self.zoom < 1 and self.shear >= 0):
            raise InvalidSetting(f"amounts of a jitter are not negative, and zoom below 1; found {self}")


def moved(images: Tensor, numbers: Tensor, jitter: Jitter) -> Tensor:
    """Move every image as its numbers say; what comes in from outside repeats the border.

    Args:
        images: float, shape (n, channels, height, width).
        numbers: float in [-1, 1], shape (n, NUMBERS): shift right, shift down, rotation, zoom, shear.
        jitter: the amounts that 1 stands for.

    Returns:
        Images of the same shape.
    """
    right, down, turn, scale, slant = numbers.T
    angle = math.pi / 180 * jitter.rotation_degrees * turn
    zoom, shear = 1 + jitter.zoom * scale, jitter.shear * slant
    cosine, sine = angle.cos() / zoom, angle.sin() / zoom
    # The grid spans [-1, 1], so a share of the side is twice as much in its units.
    matrix = torch.stack(
        [cosine, shear * cosine - sine, 2 * jitter.shift * right, sine, shear * sine + cosine, 2 * jitter.shift * down],
        dim=1,
    ).reshape(-1, 2, 3)
    grid = functional.affine_grid(matrix, list(images.shape), align_corners=False)
    return functional.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)
