"""What people name as images to embed: the source itself, several labels per image, and whose image is whose.

**Attributes** stand in a table of attributes beside a folder of images, in CelebA's own layout or as a CSV file.

CelebA's layout, as it is downloaded (Liu et al. 2015, "Deep learning face attributes in the wild"):

    list_attr_celeba.txt      number of images; names of the attributes; then per image its name and 1 or -1 for each
    list_eval_partition.txt   per image its name and 0 (train), 1 (valid) or 2 (test)
    img_align_celeba/         the images

A CSV file has the heading `file` (or `image_id`), then a heading per attribute; below, 1 and 0, or 1 and -1. A site
that holds some of the images may keep the whole table: rows about other images are another source's.

Names of attributes are public, as a list of classes is. What stands in a row is as private as its image: a message
names the line that is wrong, and neither its image nor what it says.

**Persons** are said by a folder level, a table of file names, or a column of the source's own. Every image must have
its person, and exactly one: an image of nobody would be protected as somebody else's, or not at all. Names of people
are read, turned into digests under the site's key, and forgotten; no message repeats one.

One name is one person however it is written down in Unicode (composed or not: systems differ in file names) and
whatever blanks stand around it. Nothing else is made equal: were two people taken for one, a record of one of them that
leaves could let one of the other in, and the person level would hold for neither.
"""

from __future__ import annotations

import csv
import io
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Final

import numpy as np
from numpy.typing import NDArray

from feature_store.decode import MAX_PIXELS, Skipped
from feature_store.images import FolderSource, ImageSource, ParquetSource, TorchvisionSource
from feature_store.results.attribute_labels import FILE_HEADINGS
from labeler.errors import BadData, InvalidSetting

CELEBA_TABLE: Final = "list_attr_celeba.txt"
CELEBA_SPLITS: Final = "list_eval_partition.txt"
CELEBA_IMAGES: Final = "img_align_celeba"

SPLITS: Final = ("train", "valid", "test")
"""In the order of the numbers in CelebA's own file."""

UNKNOWN: Final = -1
"""Of an image that no row is about; public images only."""

_Line = tuple[int, list[str]]


@dataclass(frozen=True, eq=False)
class AttributeTable:
    """Which image has which attributes. Private where the images are; does not print.

    Attributes:
        names: of the attributes, in the table's order.
        rows: of each image by its name within the source, int8, shape (attributes,), 0 or 1.
    """

    names: tuple[str, ...]
    rows: dict[str, NDArray[np.int8]] = field(repr=False)


class AttributeSource(FolderSource):
    """A folder of images with a table of their attributes; folders within it say nothing about classes.

    Args:
        images: the folder.
        table: a CSV file, or one in CelebA's layout.
        split: only the images that CELEBA_SPLITS beside the table puts there; all where absent.
        max_pixels: see FolderSource.

    Attributes:
        attributes: int16, shape (images, attributes): 0 or 1, or UNKNOWN in the whole row.

    Raises:
        BadData: a table is malformed, or no image of the folder is in the split.
        InvalidSetting: a file cannot be read, or the split has no such name.
    """

    def __init__(self, images: Path, table: Path, *, split: str | None = None, max_pixels: int = MAX_PIXELS) -> None:
        super().__init__(images, max_pixels=max_pixels)
        # Every file counts here, in whatever folder: a label comes from the table.
        everything = sorted([*self.names, *(skipped.source for skipped in self.left_out)])
        self.left_out: tuple[Skipped, ...] = ()
        # A table among the images is none of them.
        tables = (one.resolve() for one in (table, table.with_name(CELEBA_SPLITS)))
        beside = {one.relative_to(self._path).as_posix() for one in tables if one.is_relative_to(self._path)}
        everything = [name for name in everything if name not in beside]
        if not everything:
            raise BadData(f"folder {images.name!r} holds a table of attributes and no image")
        if split is not None:
            belongs = _read_split(table.with_name(CELEBA_SPLITS), split)
            everything = [name for name in everything if name in belongs]
            if not everything:
                raise BadData(f"no image of folder {images.name!r} is in the split {split!r} of {CELEBA_SPLITS}")
        self.names = everything
        found = read_attributes(table, frozenset(everything))
        nobody = np.full(len(found.names), UNKNOWN, dtype=np.int8)
        self.label_names = found.names
        self.labels = [None] * len(everything)
        self.attributes = np.stack([found.rows.get(name, nobody) for name in everything]).astype(np.int16)

    def columns(self, classes: tuple[str, ...], *, public: bool) -> NDArray[np.int16]:
        """The attributes of each image, in the order of a public list of names; int16, shape (images, names).

        Raises:
            BadData: the table has no such attribute, or private images are not in the table.
        """
        place = {name: number for number, name in enumerate(self.label_names)}
        missing = [name for name in classes if name not in place]
        if missing:
            raise BadData(
                f"the table has no attribute {missing[0]!r}; its {len(place)} attributes are matched by name, so check "
                "the spelling in --classes"
            )
        chosen = self.attributes[:, [place[name] for name in classes]]
        silent = int((chosen == UNKNOWN).any(axis=1).sum())
        if silent and not public:
            raise BadData(
                f"{silent} of {len(chosen)} private images are not in the table of attributes; add their rows (names "
                "are relative to the folder of images), or take those images out"
            )
        return chosen


def celeba_source(folder: Path, *, split: str | None = None, max_pixels: int = MAX_PIXELS) -> AttributeSource:
    """A folder in CelebA's layout; see the module.

    Raises:
        InvalidSetting: a part of it is missing.
    """
    if not (folder / CELEBA_IMAGES).is_dir():
        raise InvalidSetting(f"{folder.name!r} holds {CELEBA_TABLE} and no folder {CELEBA_IMAGES!r} of images")
    return AttributeSource(folder / CELEBA_IMAGES, folder / CELEBA_TABLE, split=split, max_pixels=max_pixels)


def is_celeba(folder: Path) -> bool:
    """Whether a folder has CelebA's table of attributes in it."""
    return (folder / CELEBA_TABLE).is_file()


def read_attributes(path: Path, wanted: frozenset[str]) -> AttributeTable:
    """Read a table whole, checking every line, and keep the rows of some images.

    Args:
        path: a CSV file (`.csv`), or one in CelebA's layout.
        wanted: names of images.

    Raises:
        BadData: a line is malformed; the line is named by its number.
        InvalidSetting: it cannot be read.
    """
    lines = _csv_lines(path) if path.suffix.lower() == ".csv" else _celeba_lines(path)
    _, heading = next(lines)
    names = tuple(heading)
    if not names or any(not name for name in names) or len(set(names)) != len(names):
        raise BadData(f"{path.name!r} needs a heading for each attribute, all different; found {len(names)} of them")
    rows: dict[str, NDArray[np.int8]] = {}
    seen: dict[str, int] = {}
    written: set[str] = set()
    for number, (name, *said) in lines:
        where = f"{path.name!r}, line {number}"
        if len(said) != len(names):
            raise BadData(f"{where}: {len(said)} values for {len(names)} attributes")
        if not name or seen.setdefault(name, number) != number:
            raise BadData(f"{where}: " + (f"an image that line {seen[name]} is about already" if name else "no image"))
        written |= set(said)
        if not written <= {"1", "0"} and not written <= {"1", "-1"}:
            raise BadData(f"{where}: attributes are written 1 and 0, or 1 and -1, and one way in the whole file")
        if name in wanted:
            rows[name] = np.array([value == "1" for value in said], dtype=np.int8)
    return AttributeTable(names, rows)


def _celeba_lines(path: Path) -> Iterator[_Line]:
    """The names of the attributes, then a line per image, numbered as in the file."""
    lines = ((number, line.split()) for number, line in enumerate(_text(path).split("\n"), start=1))
    _, stated = next(lines, (1, [""]))
    if len(stated) != 1 or not stated[0].isdecimal():
        raise BadData(f"{path.name!r}, line 1: the number of images is needed; a table of other kind ends in .csv")
    yield next(lines, (2, []))
    count = 0
    for number, fields in lines:
        if fields:
            count += 1
            yield number, fields
    # As text: Python reads no number of thousands of digits.
    if str(count) != stated[0].lstrip("0").rjust(1, "0"):
        raise BadData(
            f"{path.name!r} states {stated[0][:20]} images in its first line and has {count}; it was cut short"
        )


def _csv_lines(path: Path) -> Iterator[_Line]:
    # A quoted field may hold the end of a line, and a name whatever else some take for one.
    rows = csv.reader(io.StringIO(_text(path), newline=""), strict=True)
    try:
        heading = [field.strip() for field in next(rows, [])]
        if not heading or heading[0] not in FILE_HEADINGS:
            raise BadData(f"{path.name!r}, line 1: the first heading must be {FILE_HEADINGS[0]!r}")
        yield 1, heading[1:]
        for row in rows:
            if row:
                yield rows.line_num, [field.strip() for field in row]
    except csv.Error:
        raise BadData(f"{path.name!r}, line {rows.line_num}: no comma-separated text") from None


def _read_split(path: Path, split: str) -> set[str]:
    """Names of the images of a split."""
    if split not in SPLITS:
        raise InvalidSetting(f"--split must be one of {', '.join(SPLITS)}; found {split!r}")
    number = str(SPLITS.index(split))
    found: set[str] = set()
    for line, text in enumerate(_text(path).split("\n"), start=1):
        fields = text.split()
        if fields and (len(fields) != 2 or fields[1] not in ("0", "1", "2")):
            raise BadData(f"{path.name!r}, line {line}: the name of an image and 0, 1 or 2 are needed")
        if fields and fields[1] == number:
            found.add(fields[0])
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InvalidSetting(f"{path.name!r} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise BadData(f"{path.name!r} is no text in UTF-8") from None


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


def open_source(source: str | Path, *, max_pixels: int = MAX_PIXELS) -> ImageSource:
    """Open a source of images.

    Args:
        source: a folder, also one in CelebA's layout (feature_store.sources), a `.parquet` file, or
            `torchvision:NAME?root=DIR&split=train` (add `&download=1` to fetch).
        max_pixels: larger images are skipped.

    Raises:
        InvalidSetting: no such folder or file, or another kind of file.
        BadData: no image in it.
    """
    if str(source).startswith("torchvision:"):
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
