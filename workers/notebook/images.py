"""Labelled images as a data set for training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from feature_store.exports.pictures import picture


class ImageDataset:
    """Images with their labels; a torch data set by its shape (`__len__`, `__getitem__`), without needing torch.

    Args:
        root: the folder that was embedded.
        pairs: (name within it, label).
        classes: names in label order, as torchvision's data sets have them.

    Attributes:
        samples: (file, label) of each image.
        classes: see above.
        transform: applied to each image; none at first, and to be set as on torchvision's data sets.

    Raises:
        BadData: a file is not there.
    """

    def __init__(self, root: Path, pairs: Sequence[tuple[str, int]], classes: Sequence[str]) -> None:
        self.samples = [(picture(root, name), label) for name, label in pairs]
        self.classes = tuple(classes)
        self.transform: Callable[[Image.Image], Any] | None = None

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> tuple[Any, int]:
        path, label = self.samples[number]
        with Image.open(path) as image:
            picture = image.convert("RGB")
        return (picture if self.transform is None else self.transform(picture)), label
