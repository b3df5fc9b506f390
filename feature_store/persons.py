"""Whose image is whose: a folder level, a table of file names, or a column of the source's own.

Every image must have its person, and exactly one: an image of nobody would be protected as somebody else's, or not at
all. Names of people are read, turned into digests under the site's key, and forgotten; no message repeats one.

One name is one person however it is written down in Unicode (composed or not: systems differ in file names) and
whatever blanks stand around it. Nothing else is made equal: were two people taken for one, a record of one of them that
leaves could let one of the other in, and the person level would hold for neither.
"""

from __future__ import annotations

import csv
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from feature_store.attributes import AttributeSource
from feature_store.images import ImageSource, ParquetSource
from labeler.errors import BadData, InvalidSetting

FILE_COLUMN, PERSON_COLUMN = "file", "person"
"""Headings of the table of file names."""

_SHOWN = 5


@dataclass(frozen=True)
class PersonColumn:
    """Where it is said whose images are whose: exactly one of three.

    Attributes:
        level: which folder on the way from the source to the image is the person, counted from 1: of CLASS/PERSON/IMAGE
            it is the second.
        table: a CSV file with the columns `file` (the image's name within the source) and `person`.
        column: a column of the Parquet file that holds the images.

    Raises:
        InvalidSetting: none of them, several, or a level below 1.
    """

    level: int | None = None
    table: Path | None = None
    column: str | None = None

    def __post_init__(self) -> None:
        if sum(way is not None for way in (self.level, self.table, self.column)) != 1:
            raise InvalidSetting(
                "say in one way whose images are whose: --person-level (a folder), --persons (a CSV file) or "
                "--person-column (a column of the Parquet file)"
            )
        if self.level is not None and self.level < 1:
            raise InvalidSetting(f"folders are counted from 1, found --person-level {self.level}")

    def of(self, images: ImageSource) -> list[str]:
        """The person of each image, in the source's order.

        Raises:
            BadData: an image without a person; its file is named, and a person never.
            InvalidSetting: the source has no such column.
        """
        if self.level is not None:
            return _complete(images, _from_folders(images, self.level), f"--person-level {self.level}")
        if self.table is not None:
            return _from_table(images, self.table)
        return _from_column(images, str(self.column))


def _from_folders(images: ImageSource, level: int) -> list[str]:
    if level == 1 and images.label_names and not isinstance(images, AttributeSource):
        raise InvalidSetting(
            "--person-level 1 is the folder of the class; the person's is a folder within it, so 2 or more"
        )
    folders = [PurePosixPath(name).parts[:-1] for name in images.names]
    short = [name for name, parts in zip(images.names, folders, strict=True) if len(parts) < level]
    if short:
        raise BadData(
            f"--person-level {level} means the folder number {level} on the way to each image, and {len(short)} of "
            f"{len(folders)} images lie less deep: {_some(short)}; put them into a folder per person, or name another "
            "level"
        )
    return [parts[level - 1] for parts in folders]


def _from_table(images: ImageSource, path: Path) -> list[str]:
    wanted = set(images.names)
    found: dict[str, str] = {}
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = csv.DictReader(file, strict=True)
            if not {FILE_COLUMN, PERSON_COLUMN} <= set(rows.fieldnames or ()):
                raise BadData(
                    f"{path.name!r} needs the headings {FILE_COLUMN!r} and {PERSON_COLUMN!r} in its first line; it has "
                    f"{len(rows.fieldnames or ())} others"
                )
            for row in rows:
                name, person = row[FILE_COLUMN], one_name(row[PERSON_COLUMN] or "")
                # Rows about images that are not here are another source's.
                if name not in wanted:
                    continue
                if found.setdefault(name, person) != person:
                    raise BadData(f"{path.name!r} gives the image {name!r} to two people; keep one of the two rows")
    except OSError as error:
        raise InvalidSetting(f"{path.name!r} cannot be read ({error.strerror})") from None
    except (csv.Error, UnicodeDecodeError):
        raise BadData(f"{path.name!r} is no table of comma-separated text in UTF-8") from None
    return _complete(images, [found.get(name) or None for name in images.names], f"{path.name!r}")


def _from_column(images: ImageSource, column: str) -> list[str]:
    if not isinstance(images, ParquetSource):
        raise InvalidSetting(
            "--person-column names a column of a Parquet file, and this source is none; use --person-level or --persons"
        )
    return _complete(images, images.column(column), f"column {column!r}")


def _complete(images: ImageSource, persons: Sequence[str | None], where: str) -> list[str]:
    named = [one_name(person or "") for person in persons]
    missing = [name for name, person in zip(images.names, named, strict=True) if not person]
    if missing:
        raise BadData(
            f"{where} names nobody for {len(missing)} of {len(named)} images: {_some(missing)}; name a person "
            "for each, or take those images out"
        )
    return named


def one_name(person: str) -> str:
    """A person's name in the one spelling that is digested."""
    return unicodedata.normalize("NFC", person).strip()


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(repr(name) for name in names[:_SHOWN]) + more
