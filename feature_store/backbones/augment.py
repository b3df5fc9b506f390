"""Random views of a whole batch of images at once, for contrastive pretraining.

Every geometric change (crop, rotation, scale, shear, shift, flip, elastic bend) is one warp of the sampling grid, so a
batch costs one `grid_sample` however many changes are on; per-image transforms would cost more than the network.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Generator, Tensor
from torch.nn import functional

Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Amount = Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)]

_BLUR_TAPS = 5
_LUMA = (0.299, 0.587, 0.114)


class Augmentation(BaseModel):
    """How two views of one image may differ; each amount 0 (probability 0) turns its change off.

    Attributes:
        crop_area: smallest share of the area a random crop keeps (1 keeps all); aspect ratios from 3/4 to 4/3.
        flip: probability of a mirror image. Leave it 0 for digits and letters: a mirrored 2 is no 2.
        rotation_degrees: rotation uniform in plus or minus this many degrees.
        zoom: scale factor uniform in [1 - zoom, 1 + zoom].
        shear: shear coefficient uniform in plus or minus this.
        shift: translation uniform in plus or minus this share of the side.
        elastic: standard deviation of a smooth random displacement, as a share of the side.
        elastic_cells: side of the coarse grid that displacement is drawn on.
        outside: what lies beyond the border: "zeros" (black) or "reflection".
        brightness: shift of all values, uniform in plus or minus this (values are in [0, 1]).
        contrast: factor about the image's mean, uniform in [1 - contrast, 1 + contrast].
        saturation: the same towards the grey image, for colour images.
        grey: probability that a colour image becomes grey.
        blur: probability of a Gaussian blur of one pixel.
        noise: largest standard deviation of added pixel noise; each image draws its own, uniform from 0.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    crop_area: Annotated[float, Field(gt=0, le=1)] = 0.3
    flip: Share = 0.5
    rotation_degrees: Annotated[float, Field(ge=0, le=180)] = 0.0
    zoom: Annotated[float, Field(ge=0, lt=1)] = 0.0
    shear: Amount = 0.0
    shift: Share = 0.0
    elastic: Share = 0.0
    elastic_cells: Annotated[int, Field(ge=2, le=32)] = 4
    outside: Literal["zeros", "reflection"] = "reflection"
    brightness: Share = 0.3
    contrast: Annotated[float, Field(ge=0, lt=1)] = 0.4
    saturation: Annotated[float, Field(ge=0, le=1)] = 0.4
    grey: Share = 0.2
    blur: Share = 0.3
    noise: Share = 0.0


PHOTOS = Augmentation()
"""For photographs, close to the recipe of Chen et al. (2020), appendix A."""

DIGITS = Augmentation(
    crop_area=1.0,
    flip=0.0,
    rotation_degrees=15.0,
    zoom=0.15,
    shear=0.2,
    shift=0.1,
    elastic=0.03,
    outside="zeros",
    brightness=0.1,
    contrast=0.3,
    saturation=0.0,
    grey=0.0,
    blur=0.3,
    noise=0.1,
)
"""For handwritten digits and letters: nothing that turns one character into another."""


def random_views(images: Tensor, augmentation: Augmentation, *, generator: Generator) -> Tensor:
    """One random view of each image.

    Args:
        images: float, shape (n, channels, height, width), values in [0, 1].
        augmentation: what may change, and how far.
        generator: the source of every random number, on the images' device.

    Returns:
        Views of the same shape, values in [0, 1].
    """
    views = functional.grid_sample(
        images,
        _random_grid(images, augmentation, generator),
        mode="bilinear",
        padding_mode=augmentation.outside,
        align_corners=False,
    )
    return _random_tones(views, augmentation, generator).clamp_(0, 1)


def _uniform(generator: Generator, shape: tuple[int, ...], low: float, high: float) -> Tensor:
    return torch.empty(shape, device=generator.device).uniform_(low, high, generator=generator)


def _random_grid(images: Tensor, augmentation: Augmentation, generator: Generator) -> Tensor:
    count = len(images)
    one = (count,)
    area = _uniform(generator, one, augmentation.crop_area, 1.0)
    spread = math.log(4 / 3) if augmentation.crop_area < 1 else 0.0
    ratio = _uniform(generator, one, -spread, spread).exp()
    width = (area * ratio).sqrt().clamp_(max=1.0)
    height = (area / ratio).sqrt().clamp_(max=1.0)
    left = (1 - width) * _uniform(generator, one, -1.0, 1.0)
    top = (1 - height) * _uniform(generator, one, -1.0, 1.0)

    angle = math.pi / 180 * _uniform(generator, one, -augmentation.rotation_degrees, augmentation.rotation_degrees)
    zoom = _uniform(generator, one, 1 - augmentation.zoom, 1 + augmentation.zoom)
    shear = _uniform(generator, one, -augmentation.shear, augmentation.shear)
    # The grid spans [-1, 1], so a share of the side is twice as much in its units.
    right, down = 2 * _uniform(generator, (2, count), -augmentation.shift, augmentation.shift)
    mirror = 1 - 2 * (_uniform(generator, one, 0.0, 1.0) < augmentation.flip).float()

    cosine, sine = angle.cos() / zoom, angle.sin() / zoom
    matrix = torch.stack(
        [
            torch.stack([mirror * width * cosine, width * (shear * cosine - sine), left + right], dim=1),
            torch.stack([mirror * height * sine, height * (shear * sine + cosine), top + down], dim=1),
        ],
        dim=1,
    )
    grid = functional.affine_grid(matrix, list(images.shape), align_corners=False)
    if augmentation.elastic:
        cells = augmentation.elastic_cells
        coarse = torch.randn((count, 2, cells, cells), device=generator.device, generator=generator)
        bend = functional.interpolate(coarse, size=images.shape[2:], mode="bicubic", align_corners=True)
        grid = grid + 2 * augmentation.elastic * bend.permute(0, 2, 3, 1)
    return grid


def _random_tones(views: Tensor, augmentation: Augmentation, generator: Generator) -> Tensor:
    per_image = (len(views), 1, 1, 1)
    if augmentation.contrast or augmentation.brightness:
        mean = views.mean(dim=(1, 2, 3), keepdim=True)
        factor = _uniform(generator, per_image, 1 - augmentation.contrast, 1 + augmentation.contrast)
        shift = _uniform(generator, per_image, -augmentation.brightness, augmentation.brightness)
        views = (views - mean) * factor + mean + shift
    if views.shape[1] == 3 and (augmentation.saturation or augmentation.grey):
        luma = views.new_tensor(_LUMA).view(1, 3, 1, 1)
        grey = (views * luma).sum(dim=1, keepdim=True)
        keep = _uniform(generator, per_image, 1 - augmentation.saturation, 1 + augmentation.saturation)
        keep = keep * (_uniform(generator, per_image, 0.0, 1.0) >= augmentation.grey)
        views = grey + (views - grey) * keep
    if augmentation.blur:
        offsets = torch.arange(_BLUR_TAPS, device=views.device, dtype=views.dtype) - _BLUR_TAPS // 2
        taps = torch.exp(-offsets.square() / 2)
        kernel = torch.outer(taps, taps) / taps.sum().square()
        channels = views.shape[1]
        blurred = functional.conv2d(views, kernel.expand(channels, 1, -1, -1), padding=_BLUR_TAPS // 2, groups=channels)
        chosen = _uniform(generator, per_image, 0.0, 1.0) < augmentation.blur
        views = torch.where(chosen, blurred, views)
    if augmentation.noise:
        deviation = _uniform(generator, per_image, 0.0, augmentation.noise)
        views = views + deviation * torch.randn(views.shape, device=generator.device, generator=generator)
    return views
