"""Labelled images as other tools want them: a Hugging Face data set, Croissant, Label Studio, folders by class, CSV.

Every export takes the labels of all public images (feature_store.results.image_labels), says in its own way what they
reveal at most, and is read back in the tests by the tool it is for. An interrupted one leaves no file under its name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, get_args

if TYPE_CHECKING:
    import pyarrow as pa

ExportFormat = Literal["hf", "croissant", "label-studio", "image-folder", "csv"]
EXPORT_FORMATS: Final[tuple[ExportFormat, ...]] = get_args(ExportFormat)
FOLDER_FORMATS: Final[frozenset[str]] = frozenset({"hf", "croissant", "image-folder"})
"""What these write is a folder; of the others a file."""


@dataclass(frozen=True)
class Wanted:
    """What is to be written.

    Attributes:
        table: labels of every image.
        out: the folder or file to write.
        images: the folder that was embedded, whose names the table has; needed where pictures are linked or carried.
        image_root: put before each name where a tool fetches images itself (Label Studio).
        copy: copy pictures into class folders instead of linking them.
    """

    table: pa.Table
    out: Path
    images: Path | None = None
    image_root: str = ""
    copy: bool = False


def export_images(format: ExportFormat, wanted: Wanted) -> Path:
    """Write labels in a format.

    Returns:
        What was written: a folder, or a file.

    Raises:
        InvalidSetting: no such format, the folder of images is needed, or the place is taken.
        BadData: an image is not there, or the table is no table of image labels.
    """
    from feature_store.results.exports import croissant, hugging_face, plain
    from labeler.errors import InvalidSetting

    writers: dict[str, Callable[[Wanted], Path]] = {
        "hf": hugging_face.write_data_set,
        "croissant": croissant.write_croissant,
        "label-studio": plain.write_label_studio,
        "image-folder": plain.write_image_folder,
        "csv": plain.write_csv,
    }
    if format not in writers:
        raise InvalidSetting(f"unknown format {format!r}; choose one of {', '.join(EXPORT_FORMATS)}")
    return writers[format](wanted)
