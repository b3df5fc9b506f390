"""Moving images: exact where the move is exact, and nothing else."""

from __future__ import annotations

import pytest
import torch

from benchmarks.learning.together import NUMBERS, Jitter, moved
from labeler.errors import InvalidSetting


def _images() -> torch.Tensor:
    return torch.rand((3, 1, 28, 28), generator=torch.Generator().manual_seed(1))


def test_numbers_of_zero_move_nothing() -> None:
    images = _images()
    torch.testing.assert_close(moved(images, torch.zeros(3, NUMBERS), Jitter()), images, atol=1e-5, rtol=0)


def test_a_shift_of_whole_pixels_moves_whole_pixels_and_repeats_the_border() -> None:
    images, numbers = _images(), torch.zeros(3, NUMBERS)
    numbers[1, 0], numbers[2, 1] = 1.0, -1.0
    shifted = moved(images, numbers, Jitter(shift=2 / 28, rotation_degrees=0, zoom=0, shear=0))
    torch.testing.assert_close(shifted[0], images[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(shifted[1, 0, :, :26], images[1, 0, :, 2:], atol=1e-4, rtol=0)
    torch.testing.assert_close(shifted[1, 0, :, 27], images[1, 0, :, 27], atol=1e-4, rtol=0)
    torch.testing.assert_close(shifted[2, 0, 2:], images[2, 0, :26], atol=1e-4, rtol=0)


def test_a_quarter_turn_is_a_quarter_turn() -> None:
    images, numbers = _images(), torch.zeros(3, NUMBERS)
    numbers[:, 2] = 1.0
    turned = moved(images, numbers, Jitter(shift=0, rotation_degrees=90, zoom=0, shear=0))
    torch.testing.assert_close(turned, torch.rot90(images, 1, dims=(2, 3)), atol=1e-4, rtol=0)


def test_an_image_moves_by_its_own_numbers_alone() -> None:
    images, numbers = _images(), torch.rand(3, NUMBERS) * 2 - 1
    torch.testing.assert_close(moved(images, numbers, Jitter())[1:2], moved(images[1:2], numbers[1:2], Jitter()))


@pytest.mark.parametrize("amounts", [{"shift": -0.1}, {"rotation_degrees": 181}, {"zoom": 1.0}, {"shear": -1.0}])
def test_amounts_that_mean_nothing_are_refused(amounts: dict[str, float]) -> None:
    with pytest.raises(InvalidSetting, match="amounts"):
        Jitter(**amounts)
