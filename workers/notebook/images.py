"""Labelled images as a data set, and sorted into folders."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

from PIL import Image

from feature_store.durable import sync_folder
from labeler.errors import BadData, InvalidSetting


class ImageDataset:
    """Images with their labels; a torch data set by its shape (`__len__`, `__getitem__`), without needing torch.

    Args:
        root: the folder that was embedded.
        pairs: (name within it, label).
        classes: names in label order, as torchvision's data sets have them.
        transform: applied to each image where one is set.

    Raises:
        BadData: a file is not there.
    """

    def __init__(self, root: Path, pairs: Sequence[tuple[str, int]], classes: Sequence[str]) -> None:
        self.samples = [(_within(root, name), label) for name, label in pairs]
        self.classes = tuple(classes)
        self.transform = None

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> tuple[Image.Image, int]:
        path, label = self.samples[number]
        with Image.open(path) as image:
            picture = image.convert("RGB")
        return (picture if self.transform is None else self.transform(picture)), label


def sort_into_folders(
    out: Path, root: Path, pairs: Iterable[tuple[str, int]], classes: Sequence[str], *, copy: bool
) -> Path:
    """One folder for each class, with a link (or a copy) of each of its images.

    Names keep the folders they were in, with "-" for "/", so that no two meet.

    Raises:
        InvalidSetting: `out` holds something already.
        BadData: an image is not there.
    """
    if out.exists() and any(out.iterdir()):
        raise InvalidSetting(f"{out} is not empty; name a new folder")
    found = [(_within(root, name), name, label) for name, label in pairs]
    for name in classes:
        (out / _folder_name(name)).mkdir(parents=True, exist_ok=True)
    for path, name, label in found:
        target = out / _folder_name(classes[label]) / "-".join(PurePosixPath(name).parts)
        if copy:
            shutil.copyfile(path, target)
        else:
            target.symlink_to(os.path.relpath(path.resolve(), target.parent.resolve()))
    sync_folder(out)
    return out


def _folder_name(name: str) -> str:
    """A class name as the name of a folder: no separators, never the folder above."""
    plain = name.replace("/", "_").replace("\\", "_").replace("\0", "_")
    return plain if plain.strip(". ") else f"class {plain!r}"


def _within(root: Path, name: str) -> Path:
    path = root / name
    if not path.is_file() or not path.resolve().is_relative_to(root.resolve()):
        raise BadData(f"there is no image {name!r} in {root}; name the folder that was embedded")
    return path
