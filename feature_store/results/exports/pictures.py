"""Where the pictures of an export are."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from labeler.errors import BadData, InvalidSetting


def picture(root: Path, name: str) -> Path:
    """The file of an image.

    Raises:
        BadData: it is not there, or lies outside of the folder.
    """
    path = root / name
    if not path.is_file() or not path.resolve().is_relative_to(root.resolve()):
        raise BadData(f"there is no image {name!r} in {root}; name the folder that was embedded")
    return path


def pictures(root: Path | None, names: Iterable[str]) -> list[Path]:
    """All of them, looked for before anything is written.

    Raises:
        InvalidSetting: no folder was named.
        BadData: one is not there.
    """
    if root is None:
        raise InvalidSetting("name the folder of images that was embedded (`images`), since the pictures go along")
    return [picture(root, name) for name in names]


def check_new(out: Path) -> None:
    """Refuse to write over something.

    Raises:
        InvalidSetting: it is there, and not an empty folder.
    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise InvalidSetting(f"{out} is there already; name a new place")
