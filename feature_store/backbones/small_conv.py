"""A small convolutional network for small images: enough for digits, seconds to train on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from labeler.errors import InvalidSetting


class SmallConv(nn.Module):
    """Stages of 3x3 convolutions with batch norm and ReLU, halved between stages, averaged to a small grid.

    The first stage, at full size, has one convolution; each later one has two, the first of which halves the side.

    The final grid (rather than one average) keeps where a stroke is, which tells a 6 from a 9.

    Args:
        channels: of the input image, 1 or 3.
        widths: output channels per stage.
        grid: side of the final grid; the feature has widths[-1] * grid**2 numbers.

    Attributes:
        num_features: dimension of the feature.
    """

    def __init__(self, *, channels: int = 3, widths: Sequence[int] = (32, 64, 128), grid: int = 2) -> None:
        super().__init__()
        if not widths or min(widths) < 1 or grid < 1 or channels not in (1, 3):
            raise InvalidSetting(
                "small-conv needs 1 or 3 channels, at least one positive width and a grid of at least 1; "
                f"found channels {channels}, widths {list(widths)}, grid {grid}"
            )
        layers: list[nn.Module] = []
        before = channels
        for stage, width in enumerate(widths):
            layers += _convolution(before, width, stride=1 if stage == 0 else 2)
            if stage:
                layers += _convolution(width, width, stride=1)
            before = width
        self.stages = nn.Sequential(*layers)
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(grid), nn.Flatten())
        self.num_features = before * grid * grid

    def forward(self, images: Tensor) -> Tensor:
        """Features, shape (n, num_features), of images of shape (n, channels, height, width)."""
        features: Tensor = self.pool(self.stages(images))
        return features


def _convolution(before: int, after: int, *, stride: int) -> list[nn.Module]:
    convolution = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
    return [convolution, nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
