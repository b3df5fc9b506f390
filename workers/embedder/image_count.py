"""The number of images a requester is about to send: the number of questions when all of them are asked about."""

from __future__ import annotations

import zipfile
from pathlib import Path

from feature_store.image_files import leftover_row, list_images, zip_members
from labeler.errors import InvalidSetting


def count_images(images: Path) -> int:
    """Count images in a folder, a zip or a Parquet file; 1 for a file of another kind.

    Raises:
        InvalidSetting: it cannot be read, or there is no image in it.
        UnreadableFile: folders or links in it cannot be read or followed.
    """
    count = _count(images)
    if not count:
        raise InvalidSetting(f"there is no image in {images}")
    return count


def _count(images: Path) -> int:
    if images.is_dir():
        return len(list_images(images).images)
    if not images.is_file():
        raise InvalidSetting(f"there is no file or folder {images}")
    if images.suffix.lower() == ".zip":
        try:
            with zipfile.ZipFile(images) as archive:
                found = (one.no_image(archive) for one in zip_members(archive))
                return sum(one is None or not one.is_passed_over for one in found)
        # zipfile raises many exceptions on damaged files.
        except Exception:
            raise InvalidSetting(f"{images} is not a readable zip file") from None
    if images.suffix.lower() == ".parquet":
        import pyarrow.parquet as pq
        from pyarrow import ArrowException

        try:
            with pq.ParquetFile(images) as file:
                columns = dict.fromkeys(one.path for one in map(file.schema.column, range(len(file.schema))))
                named = next((one for one in ("name", "id") if one in columns), None)
                rows = file.metadata.num_rows
                names = [""] * rows if named is None else file.read(columns=[named])[named].to_pylist()
                paths: list[str | None] = [None] * rows
                if "image.path" in columns:
                    paths = [cell and cell["path"] for cell in file.read(columns=["image.path"])["image"].to_pylist()]
                return sum(leftover_row(str(one), path) is None for one, path in zip(names, paths, strict=True))
        except (OSError, ArrowException):
            raise InvalidSetting(f"{images} is not a readable Parquet file") from None
    return 1
