"""A small convolutional network for small images: enough for digits, seconds to train on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from labeler.errors import InvalidSetting


class SmallConv(nn.Module):
    """Stages of (3x3 convolution, batch norm, ReLU) twice, halved between stages, averaged to a small grid.

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
            layers += [
                nn.Conv2d(before, width, 3, stride=1 if stage == 0 else 2, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
            ]
            before = width
        self.stages = nn.Sequential(*layers)
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(grid), nn.Flatten())
        self.num_features = before * grid * grid

    def forward(self, images: Tensor) -> Tensor:
        """Features, shape (n, num_features), of images of shape (n, channels, height, width)."""
        features: Tensor = self.pool(self.stages(images))
        return features
