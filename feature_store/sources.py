"""Sources of images, several labels per image, and the person of each image.

A source is a folder of class folders, a flat folder, Parquet, or a torchvision data set. It lists its images in a
stable order before any is decoded. Reading a damaged image raises, and the caller keeps a list of those: an image that
vanishes silently is a record that nobody misses.

**Attributes** come from a table beside a folder of images, in CelebA's own layout or as a CSV file.

CelebA's layout, as it is downloaded (Liu et al. 2015, "Deep learning face attributes in the wild").

    list_attr_celeba.txt      number of images; names of the attributes; then per image its name and 1 or -1 for each.
    list_eval_partition.txt   per image its name and 0 (train), 1 (valid) or 2 (test).
    img_align_celeba/         the images.

A CSV file has the heading `file` (or `image_id`), then a heading per attribute; below, 1 and 0, or 1 and -1. A site
that holds some of the images may keep the whole table: rows about other images belong to other sources.

Names of attributes are public, as a list of classes is. A row is as private as its image: a message names the line
that is wrong, and neither its image nor its content.

**Persons** come from a folder level, a table of file names, or a column of the source. Every image must have exactly
one person: an image of nobody would be protected as somebody else's, or not at all. Names of people are read, turned
into digests under the site's key, and forgotten; no message repeats one.

One name is one person however it is written in Unicode (composed or not: systems differ in file names) and whatever
blanks surround it. Nothing else is made equal. If two people were taken for one, a record of one that leaves could
admit a record of the other, and the person level would hold for neither.

More than 600 lines: every kind of source is read together with its tables.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Final, Protocol
from urllib.parse import parse_qsl

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image

from feature_store.array_reader import class_names
from feature_store.decode import MAX_PIXELS, decode_image, to_rgb
from feature_store.image_files import (
    ENDINGS,
    HEAD_BYTES,
    UNKNOWN,
    Skipped,
    format_of,
    in_words,
    leftover_row,
    list_images,
    what_it_is,
)
from feature_store.results.image_labels import FILE_HEADINGS
from labeler.errors import BadData, InvalidSetting, LabelerError, UnreadableFile, UnreadableImage
from labeler.settings import misspelt, one_spelling
from labeler.system.files import open_regular, read_named

_READ_BYTES = 1 << 20
_MOST_AT_ONCE = 64 << 20
_MOST_TABLE_BYTES: Final = 2**30
"""Of a table of attributes or persons."""


class ImageSource(Protocol):
    """A list of images that can be read in any order, from any thread.

    Attributes:
        names: one name per image, relative to the source; the order never changes.
        labels: label_names index per image, or None where there is none.
        label_names: names of the labels the source knows, in the source's order; empty without labels.
        names_are_declared: whether the source itself lists label_names (folders, metadata). Names collected from the
            labels of its records would change when a record does.
        labels_are_places: whether label_names are only numbers that stand for places in the class list, from 0.
        max_pixels: most width times height of an image.
        left_out: entries of the source that are no image of it.
        passed_over: files that are certainly no images (feature_store.image_files); reported to people.
    """

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def labels(self) -> Sequence[int | None]: ...

    @property
    def label_names(self) -> tuple[str, ...]: ...

    @property
    def names_are_declared(self) -> bool: ...

    @property
    def labels_are_places(self) -> bool: ...

    @property
    def left_out(self) -> tuple[Skipped, ...]: ...

    @property
    def passed_over(self) -> tuple[Skipped, ...]: ...

    @property
    def max_pixels(self) -> int: ...

    def read(self, index: int) -> Image.Image:
        """The image in RGB; raises UnreadableImage."""

    def file(self, index: int, /) -> bytes | Path | None:
        """The image's file, undecoded: its bytes, or its path where it is large; None where there is only `read`.

        Raises:
            UnreadableImage: there is none, or it cannot be read.
        """


def image_blocks(images: ImageSource, index: int) -> Iterator[bytes]:
    """Yield the bytes that are an image, in blocks: of its file, or of its pixels where there is none.

    Raises:
        UnreadableImage: there are none; in the first block or between two.
    """
    file = images.file(index)
    if file is None:
        image = images.read(index)
        yield f"{image.width} {image.height}\n".encode()
        yield image.tobytes()
    elif isinstance(file, bytes):
        yield file
    else:
        try:
            with file.open("rb") as opened:
                while block := opened.read(_READ_BYTES):
                    yield block
        except OSError as error:
            raise UnreadableFile(f"the file cannot be read ({error.strerror})") from None


def source_digest(source: ImageSource) -> str:
    """Return SHA-256 over names and labels: an interrupted job goes on with the list it began with."""
    listed: list[Any] = [list(source.names), list(source.labels), list(source.label_names)]
    if rows := getattr(source, "rows_digest", ""):  # own features: their names may stay when they change
        listed.append(rows)
    return hashlib.sha256(json.dumps(listed, ensure_ascii=False).encode("utf-8", "surrogateescape")).hexdigest()


class FolderSource:
    """CLASS/anything/file for labeled images, or files alone for unlabeled ones; names in sorted order.

    `feature_store.image_files` says which files are images.

    Args:
        public: take image files beside the class folders, too, without a label, since every public image is asked
            about. Private ones are left out.

    Raises:
        UnreadableFile: the folder, or folders or links in it, cannot be read or followed.
        BadData: it holds no image.
    """

    labels_are_places = False

    def __init__(self, path: Path, *, max_pixels: int = MAX_PIXELS, public: bool = False) -> None:
        self._path = path.resolve()
        self.max_pixels = max_pixels
        self._listing = found = list_images(path)
        self.label_names = found.folders
        self.names_are_declared = True
        self.passed_over = found.passed_over
        place = {name: label for label, name in enumerate(found.folders)}
        labelled = [(name, place.get(name.split("/")[0]) if "/" in name else None) for name in found.images]
        beside = [name for name, label in labelled if label is None] if place and not public else []
        self.left_out = (
            *(Skipped(name, "lies beside the class folders, in none of them") for name in beside),
            *found.left_out,
        )
        if beside:
            labelled = [(name, label) for name, label in labelled if label is not None]
        if not labelled:
            raise BadData(f"folder {path.name!r} holds no image: {_advice(self)}")
        self.names = [name for name, _ in labelled]
        self.labels = [label for _, label in labelled]

    def read(self, index: int) -> Image.Image:
        return decode_image(self._path / self.names[index], max_pixels=self.max_pixels)

    def file(self, index: int) -> bytes | Path:
        path = self._path / self.names[index]
        try:
            with open_regular(path) as file:
                return path if os.fstat(file.fileno()).st_size > _MOST_AT_ONCE else file.read()
        except FileNotFoundError:
            raise UnreadableFile("the file is gone") from None
        except PermissionError:
            raise UnreadableFile("no permission to read the file") from None
        except OSError as error:
            raise UnreadableFile(f"the file cannot be read ({error.strerror})") from None


def _advice(source: FolderSource) -> str:
    if files := (*source.left_out, *source.passed_over):
        return f"it holds {in_words(files)}"
    return "put images in it, or in one folder per class"


class ParquetSource:
    """A Parquet file with a column `image` (the bytes of an image file, or a struct with them in `bytes`).

    Optional columns: `label` (text, or whole numbers that the data set's own metadata may name) and `id` (names of
    the images, all different). A label that is missing, empty, or -1 is none; `datasets` writes none as -1. Whole
    numbers may be floats, as pandas writes them where one is missing. One row group is kept in memory.
    """

    labels_are_places = False
    left_out: tuple[Skipped, ...] = ()
    passed_over: tuple[Skipped, ...] = ()

    def __init__(self, path: Path, *, max_pixels: int = MAX_PIXELS) -> None:
        self.max_pixels = max_pixels
        self._path = path
        with self._reading():
            # Not mapped into memory: a file that somebody cuts short would end this process.
            self._file = pq.ParquetFile(path)
            self._list(path)
        self._pass_over_leftovers()
        self._lock = threading.Lock()
        self._group: tuple[int, list[Any]] = (-1, [])

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except LabelerError:
            raise
        # Arrow raises many kinds of exceptions on damaged files.
        except Exception as error:
            name = self._path.name
            raise BadData(f"{name!r} is no Parquet file, or damaged ({type(error).__name__})") from None

    def _list(self, path: Path) -> None:
        schema = self._file.schema_arrow
        if "image" not in schema.names or not _holds_bytes(schema.field("image").type):
            others = [one.name for one in schema if one.name != "image" and _holds_bytes(one.type)]
            raise BadData(
                f"{path.name!r} needs a column image of bytes (or a struct with a field bytes); "
                f"its columns are {', '.join(schema.names)}"
                + (f"; rename {others[0]!r} to 'image'" if len(others) == 1 and "image" not in schema.names else "")
            )
        metadata = self._file.metadata
        if not metadata.num_rows:
            raise BadData(f"{path.name!r} holds no rows")
        groups = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self._starts = np.concatenate([[0], np.cumsum(groups)])
        self.names = [f"{path.name}#{row}" for row in range(metadata.num_rows)]
        if "id" in schema.names:
            kind = schema.field("id").type
            if not _is_text_or_integer(kind):
                raise BadData(f"column id of {path.name!r} must hold text or whole numbers, found {kind}")
            self.names = row_names(self._file.read(columns=["id"])["id"].to_pylist(), path.name)
        self.labels, self.label_names = self._read_labels(path, schema)
        self.names_are_declared = bool(class_names(schema, "label"))
        kind = schema.field("image").type
        self._paths: list[str | None] = [None] * metadata.num_rows
        if pa.types.is_struct(kind) and kind.get_field_index("path") >= 0 and is_text(kind.field("path").type):
            cells = self._file.read(columns=["image.path"])["image"].to_pylist()
            self._paths = [cell and cell["path"] for cell in cells]

    def _pass_over_leftovers(self) -> None:
        """Take out rows whose names or paths are those of what a system left behind."""
        found = [leftover_row(name, path) for name, path in zip(self.names, self._paths, strict=True)]
        self._rows = [row for row, left in enumerate(found) if left is None]
        if len(self._rows) < len(found):
            self.passed_over = tuple(dict.fromkeys(left for left in found if left is not None))
            self.names = [self.names[row] for row in self._rows]
            self.labels = [self.labels[row] for row in self._rows]

    def __reduce__(self) -> tuple[Callable[..., ParquetSource], tuple[Path]]:
        """For another process, which opens the file itself."""
        return partial(ParquetSource, max_pixels=self.max_pixels), (self._path.resolve(),)

    def _read_labels(self, path: Path, schema: pa.Schema) -> tuple[list[int | None], tuple[str, ...]]:
        if "label" not in schema.names:
            return [None] * self._file.metadata.num_rows, ()
        kind = _inner(schema.field("label").type)
        cells = self._file.read(columns=["label"])["label"].to_pylist()
        is_float = pa.types.is_floating(kind)
        if is_float:
            cells = [None if value is None or np.isnan(value) else value for value in cells]
        is_fraction = is_float and any(value is not None and not value.is_integer() for value in cells)
        if is_fraction or not (is_float or pa.types.is_null(kind) or _is_text_or_integer(kind)):
            raise BadData(
                f"column label of {path.name!r} must hold whole numbers or text, and -1, an empty text or nothing "
                f"where there is no label; found {'a fraction' if is_fraction else kind}. Write class names as text"
            )
        none = "" if is_text(kind) else -1
        values = [None if value is None or value == none else int(value) if is_float else value for value in cells]
        present = {value for value in values if value is not None}
        if not is_text(kind):
            names = class_names(schema, "label")
            if names and present and not (min(present) >= 0 and max(present) < len(names)):
                raise BadData(
                    f"{path.name!r} holds labels outside the {len(names)} names in its own metadata; mend the "
                    "labels, or the names"
                )
            if names:
                return values, names
        ordered = sorted(present)
        index = {value: place for place, value in enumerate(ordered)}
        return [None if value is None else index[value] for value in values], tuple(str(value) for value in ordered)

    def column(self, name: str) -> list[str | None]:
        """A column as text, None where it says nothing.

        Raises:
            InvalidSetting: there is no such column, or it holds neither text nor whole numbers.
        """
        schema = self._file.schema_arrow
        if name not in schema.names:
            raise InvalidSetting(f"there is no column {name!r}; the file's columns are {', '.join(schema.names)}")
        kind = schema.field(name).type
        if not _is_text_or_integer(kind):
            raise InvalidSetting(f"column {name!r} must hold text or whole numbers, found {kind}")
        with self._reading():
            values = self._file.read(columns=[name])[name].to_pylist()
        return [None if values[row] is None else str(values[row]).strip() for row in self._rows]

    def file(self, index: int) -> bytes:
        index = self._rows[index]
        group = int(np.searchsorted(self._starts, index, side="right")) - 1
        with self._lock, self._reading():
            if self._group[0] != group:
                self._group = (group, self._file.read_row_group(group, columns=["image"])["image"].to_pylist())
            cell = self._group[1][index - int(self._starts[group])]
        found: bytes | None = cell.get("bytes") if isinstance(cell, dict) else cell
        if not found:
            is_named = isinstance(cell, dict) and cell.get("path")
            raise UnreadableImage(
                "no bytes in this row" + ", only the name of a file; write them into it" * bool(is_named)
            )
        return found

    def read(self, index: int) -> Image.Image:
        return decode_image(self.file(index), max_pixels=self.max_pixels)


def row_names(names: Sequence[Any], table: str) -> list[str]:
    """Return the names of a table's rows as text, letter for letter as they are written there.

    Args:
        names: texts, numbers and None, one for each row.
        table: name of the file, for messages.

    Raises:
        BadData: a row has no name, or that of another row; both are named by their numbers.
    """
    found = ["" if name is None else str(name) for name in names]
    seen: dict[str, int] = {}
    for row, one in enumerate(found):
        if not one.strip() or seen.setdefault(one, row) != row:
            twice = f"row {row} has the id of row {seen[one]}" if one.strip() else f"row {row} has an empty id"
            raise BadData(f"{table!r}: {twice}; every record needs an id of its own, counted from row 0")
    return found


def _inner(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def is_text(kind: pa.DataType) -> bool:
    """Return whether a column of this type holds text, in any of Arrow's forms."""
    kind, types = _inner(kind), pa.types
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _is_text_or_integer(kind: pa.DataType) -> bool:
    return is_text(kind) or bool(pa.types.is_integer(_inner(kind)))


def _holds_bytes(kind: pa.DataType) -> bool:
    kind, types = _inner(kind), pa.types
    if types.is_struct(kind):
        return kind.get_field_index("bytes") >= 0 and _holds_bytes(kind.field("bytes").type)
    return bool(types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind))


class TorchvisionSource:
    """One torchvision classification data set.

    Args:
        address: `torchvision:NAME?root=DIR`, with `split=train` (default) or another split of that set, and
            `download=1` to fetch it; without that nothing is fetched.
    """

    left_out: tuple[Skipped, ...] = ()
    passed_over: tuple[Skipped, ...] = ()
    max_pixels = MAX_PIXELS

    def __init__(self, address: str) -> None:
        name, _, query = address.removeprefix("torchvision:").partition("?")
        options = dict(parse_qsl(query))
        unknown = options.keys() - {"root", "split", "download"}
        if unknown or "root" not in options:
            raise InvalidSetting(
                f"a torchvision source reads torchvision:NAME?root=DIR&split=train&download=1; "
                f"root is needed, and unknown here: {', '.join(sorted(unknown)) or 'nothing'}"
            )
        # Here and not above: it brings torch, which no other source needs.
        import torchvision

        factory = getattr(torchvision.datasets, name, None)
        if not isinstance(factory, type) or not issubclass(factory, torchvision.datasets.VisionDataset):
            raise InvalidSetting(f"torchvision has no data set {name!r}; see torchvision.datasets for their names")
        self._address = address
        self._data = _open(factory, name, options)
        self._name, self._split = name, options.get("split", "train")
        # Some sets read from one open file, so only one thread may ask at a time.
        self._lock = threading.Lock()
        count = len(self._data)
        if not count:
            raise BadData(f"torchvision's {name} holds no image in split {self._split!r}")
        self.names = [f"{name}/{self._split}/{row}" for row in range(count)]
        self.label_names = tuple(str(label) for label in getattr(self._data, "classes", ()))
        self.names_are_declared = bool(self.label_names)
        self.labels_are_places = not self.label_names
        self.labels = self._read_labels(count)

    def __reduce__(self) -> tuple[type[TorchvisionSource], tuple[str]]:
        """For another process, which opens the set itself."""
        return TorchvisionSource, (self._address,)

    def _read_labels(self, count: int) -> list[int | None]:
        for attribute in ("targets", "labels", "_labels", "y"):
            found = getattr(self._data, attribute, None)
            if found is not None and len(found) == count:
                labels = np.asarray(found).astype(np.int64)
                if not self.label_names:
                    self.label_names = tuple(str(label) for label in range(int(labels.max()) + 1))
                return [int(label) for label in labels]
        self.label_names = ()
        return [None] * count

    def read(self, index: int) -> Image.Image:
        with self._lock:
            image = self._data[index][0]
        if not isinstance(image, Image.Image):
            raise UnreadableImage(f"torchvision's {self._name} gave no image here")
        return to_rgb(image)

    def file(self, _: int) -> None:
        return None


def _open(factory: Any, name: str, options: dict[str, str]) -> Any:
    split = options.get("split", "train")
    settings: dict[str, Any] = {"root": options["root"]}
    if options.get("download") == "1":
        settings["download"] = True
    try:
        try:
            return factory(**settings, split=split)
        except TypeError:
            if split not in ("train", "test"):
                raise InvalidSetting(f"torchvision's {name} has the splits train and test, found {split!r}") from None
            return factory(**settings, train=split == "train")
    except (RuntimeError, FileNotFoundError):
        raise InvalidSetting(
            f"torchvision's {name} is not in the folder named; add download=1 to fetch it, or check root"
        ) from None
    except ValueError as error:
        raise InvalidSetting(f"torchvision's {name} refuses these options: {error}") from None
    except TypeError:
        raise InvalidSetting(f"torchvision's {name} cannot be opened by root and split; use a folder instead") from None


CELEBA_TABLE: Final = "list_attr_celeba.txt"
CELEBA_SPLITS: Final = "list_eval_partition.txt"
CELEBA_IMAGES: Final = "img_align_celeba"

SPLITS: Final = ("train", "valid", "test")
"""In the order of the numbers in CelebA's own file."""

NO_ROW: Final = -1
"""Of an image without a row in the table; public images only."""

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
        split: only the images that CELEBA_SPLITS, in the folder of the table, assigns to it; all where absent.
        max_pixels: see FolderSource.

    Attributes:
        attributes: int16, shape (images, attributes): 0 or 1, or NO_ROW in all of them.

    Raises:
        BadData: a table is malformed, or no image of the folder is in the split.
        InvalidSetting: a file cannot be read, or the split has no such name.
    """

    def __init__(self, images: Path, table: Path, *, split: str | None = None, max_pixels: int = MAX_PIXELS) -> None:
        super().__init__(images, max_pixels=max_pixels)
        # Every file counts here, in whatever folder: a label comes from the table.
        everything = sorted(self._listing.images)
        # A table among the images is none of them.
        tables = (one.resolve() for one in (table, table.with_name(CELEBA_SPLITS)))
        beside = {one.relative_to(self._path).as_posix() for one in tables if one.is_relative_to(self._path)}
        everything = [name for name in everything if name not in beside]
        self.left_out = tuple(one for one in self._listing.left_out if one.source not in beside)
        self.passed_over = tuple(one for one in self.passed_over if one.source not in beside)
        if not everything:
            raise BadData(f"folder {images.name!r} holds a table of attributes and no image")
        if split is not None:
            belongs = _read_split(table.with_name(CELEBA_SPLITS), split)
            image_of = image_finder(everything)
            chosen = {image_of(name) for name in belongs}
            everything = [name for name in everything if name in chosen]
            if not everything:
                raise BadData(f"no image of folder {images.name!r} is in the split {split!r} of {CELEBA_SPLITS}")
        self.names = everything
        found = read_attributes(table, frozenset(everything))
        nobody = np.full(len(found.names), NO_ROW, dtype=np.int8)
        self.label_names = found.names
        self.labels = [None] * len(everything)
        self.attributes = np.stack([found.rows.get(name, nobody) for name in everything]).astype(np.int16)

    def columns(self, classes: tuple[str, ...], *, public: bool) -> NDArray[np.int16]:
        """The attributes of each image, in the order of a public list of names; int16, shape (images, names).

        Raises:
            BadData: the table has no such attribute, or private images are not in the table.
        """
        place = {one_spelling(name): number for number, name in enumerate(self.label_names)}
        missing = [name for name in classes if one_spelling(name) not in place]
        if missing:
            raise BadData(
                f"the table has no attribute {missing[0]!r}; its {len(place)} attributes are matched by name, so check "
                f"the spelling in --classes{misspelt(classes, self.label_names)}"
            )
        chosen = self.attributes[:, [place[one_spelling(name)] for name in classes]]
        silent = int((chosen == NO_ROW).any(axis=1).sum())
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
    """Tell whether a folder holds CelebA's table of attributes."""
    return (folder / CELEBA_TABLE).is_file()


def read_attributes(path: Path, wanted: frozenset[str]) -> AttributeTable:
    """Read a table whole, checking every line, and keep the rows of some images.

    Raises:
        BadData: a line is malformed; the line is named by its number.
        InvalidSetting: it cannot be read.
    """
    lines = _csv_lines(path) if path.suffix.lower() == ".csv" else _celeba_lines(path)
    _, heading = next(lines)
    names, image_of = tuple(heading), image_finder(sorted(wanted))
    if not names or any(not name for name in names) or len(set(map(one_spelling, names))) != len(names):
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
        if (image := image_of(name)) is not None:
            if image in rows:
                raise BadData(f"{where}: an image that another line is about already, composed differently in Unicode")
            rows[image] = np.array([value == "1" for value in said], dtype=np.int8)
    return AttributeTable(names, rows)


def _celeba_lines(path: Path) -> Iterator[_Line]:
    """The names of the attributes, then a line per image, numbered as in the file."""
    lines = ((number, line.split()) for number, line in enumerate(_lines(path), start=1))
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
    lines = _csv_rows(path)
    _, heading = next(lines)
    if not heading or heading[0] not in FILE_HEADINGS:
        raise BadData(f"{path.name!r}, line 1: the first heading must be {FILE_HEADINGS[0]!r}")
    yield 1, heading[1:]
    for number, row in lines:
        yield number, [field.strip() for field in row]


def _csv_rows(path: Path) -> Iterator[_Line]:
    """The headings without blanks around them, then the rows as they are written, of comma-separated text."""
    # A quoted field may hold the end of a line, and a name whatever else some take for one.
    rows = csv.reader(io.StringIO(_text(path), newline=""), strict=True)
    try:
        heading = [field.strip() for field in next(rows, [])]
        for sign, name in ((";", "semicolons"), ("\t", "tabs")):
            if len(heading) == 1 and sign in heading[0]:
                raise BadData(f"{path.name!r}, line 1: the columns are separated by {name}; save it with commas")
        yield 1, heading
        for row in rows:
            if row:
                yield rows.line_num, row
    except csv.Error:
        raise BadData(f"{path.name!r}, line {rows.line_num}: no comma-separated text") from None


def _read_split(path: Path, split: str) -> set[str]:
    """Names of the images of a split."""
    if split not in SPLITS:
        raise InvalidSetting(f"--split must be one of {', '.join(SPLITS)}; found {split!r}")
    number = str(SPLITS.index(split))
    found: set[str] = set()
    for line, text in enumerate(_lines(path), start=1):
        fields = text.split()
        if fields and (len(fields) != 2 or fields[1] not in ("0", "1", "2")):
            raise BadData(f"{path.name!r}, line {line}: the name of an image and 0, 1 or 2 are needed")
        if fields and fields[1] == number:
            found.add(fields[0])
    return found


def _lines(path: Path) -> list[str]:
    return io.StringIO(_text(path), newline=None).read().split("\n")


def _text(path: Path) -> str:
    try:
        return read_named(path, most_bytes=_MOST_TABLE_BYTES).decode("utf-8-sig")
    except OSError as error:
        raise InvalidSetting(f"{path.name!r} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise BadData(f"{path.name!r} is no text in UTF-8") from None


def image_finder(names: Sequence[str]) -> Callable[[str], str | None]:
    """Return what finds an image by a name of a table: letter for letter, or else however its letters are composed.

    A path may also be written as Windows does, or from "./" on. None where there is no such image, or where only the
    composition tells two of them apart.
    """
    exact, spelled = frozenset(names), dict[str, str | None]()
    for name in names:
        key = one_spelling(name)
        spelled[key] = None if key in spelled else name

    def find(name: str) -> str | None:
        if name in exact:
            return name
        plain = one_spelling(name)
        return spelled[plain] if plain in spelled else spelled.get(plain.replace("\\", "/").removeprefix("./"))

    return find


FILE_COLUMN, PERSON_COLUMN = "file", "person"
"""Headings of the table of file names."""

_SHOWN = 5


@dataclass(frozen=True)
class PersonColumn:
    """The place that names the person of each image: exactly one of three.

    Attributes:
        level: number of the folder that is the person on the way from the source to the image, counted from 1: of
            CLASS/PERSON/IMAGE it is the second.
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
        read: Callable[[str], list[str | None]] | None = getattr(images, "column", None)
        if read is None:
            raise InvalidSetting(
                "--person-column names a column of a Parquet file, and this source is none; use --person-level or "
                "--persons"
            )
        return _complete(images, read(str(self.column)), f"column {self.column!r}")


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
    image_of = image_finder(images.names)
    found: dict[str, str] = {}
    lines = _csv_rows(path)
    _, heading = next(lines)
    for needed in (FILE_COLUMN, PERSON_COLUMN):
        if needed not in heading:
            raise BadData(
                f"{path.name!r} needs the headings {FILE_COLUMN!r} and {PERSON_COLUMN!r} in its first line; it has "
                f"{len(heading)} others"
            )
        if heading.count(needed) > 1:
            raise BadData(f"{path.name!r} has the heading {needed!r} twice; keep one of the two columns")
    for number, row in lines:
        if any(row[len(heading) :]):  # the rest of a name would be cut off, and two people be one
            raise BadData(
                f"{path.name!r}, line {number}: {len(row)} values for {len(heading)} headings; a name with a comma "
                "in it stands in quotes"
            )
        values = dict(zip(heading, row, strict=False))
        name, person = image_of(values.get(FILE_COLUMN, "")), one_name(values.get(PERSON_COLUMN, ""))
        # Rows about images that are not here are another source's.
        if name is not None and found.setdefault(name, person) != person:
            raise BadData(f"{path.name!r} gives the image {name!r} to two people; keep one of the two rows")
    return _complete(images, [found.get(name) or None for name in images.names], f"{path.name!r}")


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
    return one_spelling(person).strip()


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(repr(name) for name in names[:_SHOWN]) + more


def open_source(source: str | Path, *, max_pixels: int = MAX_PIXELS, public: bool = False) -> ImageSource:
    """Open a source of images.

    Args:
        source: a folder, also one in CelebA's layout (feature_store.sources), a `.parquet` file, or
            `torchvision:NAME?root=DIR&split=train` (add `&download=1` to fetch).
        max_pixels: larger images are skipped.
        public: see `FolderSource`.

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
        return FolderSource(path, max_pixels=max_pixels, public=public)
    if path.is_file() and path.suffix.lower() == ".parquet":
        return ParquetSource(path, max_pixels=max_pixels)
    raise InvalidSetting(
        f"{path.name!r} is no folder, no .parquet file and no torchvision:NAME?root=DIR; {_instead(path)}"
    )


def _instead(path: Path) -> str:
    """Return what to do with a file that is no source of images."""
    head = b""
    with suppress(OSError), open_regular(path) as file:
        head = file.read(HEAD_BYTES)
    if head and (format_of(head) or path.suffix.lower() in ENDINGS):
        return "it is one image: give the folder it is in"
    found = what_it_is(head) if head else UNKNOWN
    return "check the path" if found.startswith(UNKNOWN) else f"it is {found}"
