"""The number of images a requester is about to send: the number of questions when all of them are asked about."""

from __future__ import annotations

import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import Final

from labeler.errors import InvalidSetting

_NOT_IMAGES: Final = frozenset({"__MACOSX", "Thumbs.db", "desktop.ini"})
"""Files that systems put into archives by themselves; a service skips them, and names that begin with a dot."""


def count_images(images: Path, *, endings: Collection[str]) -> int:
    """Count images in a folder, a zip or a Parquet file; 1 for a file of another kind.

    Args:
        endings: of image files in a folder, lower case, with the dot.

    Raises:
        InvalidSetting: it cannot be read, or there is no image in it.
    """
    count = _count(images, endings)
    if not count:
        raise InvalidSetting(f"there is no image in {images}")
    return count


def _count(images: Path, endings: Collection[str]) -> int:
    if images.is_dir():
        return sum(path.suffix.lower() in endings and path.is_file() for path in images.rglob("*"))
    if not images.is_file():
        raise InvalidSetting(f"there is no file or folder {images}")
    if images.suffix.lower() == ".zip":
        try:
            with zipfile.ZipFile(images) as archive:
                return sum(not one.is_dir() and _is_shown(one.filename) for one in archive.infolist())
        # zipfile raises many exceptions on damaged files.
        except Exception:
            raise InvalidSetting(f"{images} is not a readable zip file") from None
    if images.suffix.lower() == ".parquet":
        import pyarrow.parquet as pq
        from pyarrow import ArrowException

        try:
            return int(pq.read_metadata(images).num_rows)
        except (OSError, ArrowException):
            raise InvalidSetting(f"{images} is not a readable Parquet file") from None
    return 1


def _is_shown(name: str) -> bool:
    return not any(part.startswith(".") or part in _NOT_IMAGES for part in name.split("/"))
