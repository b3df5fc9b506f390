"""What people name as a source of images, opened: a folder, one in CelebA's layout, Parquet, a torchvision data set."""

from __future__ import annotations

from pathlib import Path

from feature_store.attributes import celeba_source, is_celeba
from feature_store.decode import MAX_PIXELS
from feature_store.images import FolderSource, ImageSource, ParquetSource
from labeler.errors import InvalidSetting


def open_source(source: str | Path, *, max_pixels: int = MAX_PIXELS) -> ImageSource:
    """Open a source of images.

    Args:
        source: a folder, also one in CelebA's layout (feature_store.attributes), a `.parquet` file, or
            `torchvision:NAME?root=DIR&split=train` (add `&download=1` to fetch).
        max_pixels: larger images are skipped.

    Raises:
        InvalidSetting: no such folder or file, or another kind of file.
        BadData: no image in it.
    """
    if str(source).startswith("torchvision:"):
        from feature_store.backbones.torchvision_sets import TorchvisionSource

        return TorchvisionSource(str(source))
    path = Path(source)
    if path.is_dir():
        if is_celeba(path):
            return celeba_source(path, max_pixels=max_pixels)
        return FolderSource(path, max_pixels=max_pixels)
    if path.is_file() and path.suffix == ".parquet":
        return ParquetSource(path, max_pixels=max_pixels)
    raise InvalidSetting(
        f"{path.name!r} is no folder, no .parquet file and no torchvision:NAME?root=DIR; check the path"
    )
