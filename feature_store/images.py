"""Where images come from: a folder of class folders, a flat folder, Parquet, or a torchvision data set.

A source lists its images in a stable order before any is decoded. Reading one that is damaged raises; whoever reads
keeps a list of those, because an image that vanishes silently is a record nobody knows is missing.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qsl

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from feature_store.decode import MAX_PIXELS, Skipped, decode_image, to_rgb
from labeler.errors import BadData, InvalidSetting, UnreadableImage

_READ_BYTES = 1 << 20
_MOST_AT_ONCE = 64 << 20


class ImageSource(Protocol):
    """A list of images that can be read in any order, from any thread.

    Attributes:
        names: one name per image, relative to the source; the order never changes.
        labels: label_names index per image, or None where there is none.
        label_names: names of the labels the source knows, in the source's order; empty without labels.
        names_are_declared: whether label_names stand in the source itself (folders, metadata), and were not
            collected from the labels of its records, which would change when a record does.
        max_pixels: most width times height of an image.
        left_out: what lies in the source but is no image of it.
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
    def left_out(self) -> tuple[Skipped, ...]: ...

    @property
    def max_pixels(self) -> int: ...

    def read(self, index: int) -> Image.Image:
        """The image in RGB; raises UnreadableImage."""

    def file(self, index: int, /) -> bytes | Path | None:
        """The image's file, undecoded: its bytes, or its path where it is large; None where there is only `read`.

        Raises:
            UnreadableImage: there is none, or it cannot be read.
        """

    def blocks(self, index: int) -> Iterator[bytes]:
        """The bytes that are the image, in blocks: of its file, or of its pixels where there is none.

        Raises:
            UnreadableImage: there are none; in the first block or between two.
        """


def source_digest(source: ImageSource) -> str:
    """SHA-256 over names and labels: whether an interrupted job goes on with the list it began with."""
    listed = [list(source.names), list(source.labels), list(source.label_names)]
    return hashlib.sha256(json.dumps(listed, ensure_ascii=False).encode("utf-8", "surrogateescape")).hexdigest()


class FolderSource:
    """CLASS/anything/file for labelled images, or files alone for unlabelled ones; names in sorted order.

    Every file is tried, except hidden ones (a leading dot); one that is no image is reported by `read`. Files beside
    class folders have no class and are left out.
    """

    def __init__(self, path: Path, *, max_pixels: int = MAX_PIXELS) -> None:
        self._path = path.resolve()
        self.max_pixels = max_pixels
        entries = sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))
        folders = [entry for entry in entries if entry.is_dir()]
        files = [entry for entry in entries if entry.is_file()]
        self.label_names = tuple(folder.name for folder in folders)
        self.names_are_declared = True
        self.left_out: tuple[Skipped, ...] = ()
        labelled: list[tuple[Path, int | None]] = [(file, None) for file in files]
        if folders:
            self.left_out = tuple(
                Skipped(file.name, "lies beside the class folders, in none of them") for file in files
            )
            labelled = [
                (file, label) for label, folder in enumerate(folders) for file in sorted(_visible_files(folder))
            ]
        if not labelled:
            raise BadData(f"folder {path.name!r} holds no image: put images in it, or in one folder per class")
        self.names = [file.relative_to(path).as_posix() for file, _ in labelled]
        self.labels = [label for _, label in labelled]

    def read(self, index: int) -> Image.Image:
        return decode_image(self._path / self.names[index], max_pixels=self.max_pixels)

    def file(self, index: int) -> bytes | Path:
        path = self._path / self.names[index]
        try:
            return path if path.stat().st_size > _MOST_AT_ONCE else path.read_bytes()
        except FileNotFoundError:
            raise UnreadableImage("the file is gone") from None
        except PermissionError:
            raise UnreadableImage("no permission to read the file") from None
        except OSError as error:
            raise UnreadableImage(f"the file cannot be read ({error.strerror})") from None

    def blocks(self, index: int) -> Iterator[bytes]:
        try:
            with (self._path / self.names[index]).open("rb") as file:
                while block := file.read(_READ_BYTES):
                    yield block
        except OSError as error:
            raise UnreadableImage(f"the file cannot be read ({error.strerror})") from None


def _visible_files(folder: Path) -> list[Path]:
    return [
        file
        for file in folder.rglob("*")
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    ]


class ParquetSource:
    """A Parquet file with a column `image` (the bytes of an image file, or a struct with them in `bytes`).

    Optional columns: `label` (text, or whole numbers: names from the data set's own metadata where it has them, else
    the numbers) and `id` (names of the images). One row group is kept in memory.
    """

    def __init__(self, path: Path, *, max_pixels: int = MAX_PIXELS) -> None:
        self.max_pixels = max_pixels
        self._path = path
        try:
            self._file = pq.ParquetFile(path, memory_map=True)
        except (pa.ArrowInvalid, OSError) as error:
            raise BadData(f"{path.name!r} is no Parquet file, or damaged ({type(error).__name__})") from None
        schema = self._file.schema_arrow
        if "image" not in schema.names or not _holds_bytes(schema.field("image").type):
            raise BadData(
                f"{path.name!r} needs a column image of bytes (or a struct with a field bytes); "
                f"its columns are {', '.join(schema.names)}"
            )
        metadata = self._file.metadata
        if not metadata.num_rows:
            raise BadData(f"{path.name!r} holds no rows")
        groups = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self._starts = np.concatenate([[0], np.cumsum(groups)])
        self.left_out: tuple[Skipped, ...] = ()
        self.names = self._read_names(path, schema)
        self.labels, self.label_names = self._read_labels(path, schema)
        self.names_are_declared = bool(_metadata_label_names(schema))
        self._lock = threading.Lock()
        self._group: tuple[int, list[Any]] = (-1, [])

    def __reduce__(self) -> tuple[Callable[..., ParquetSource], tuple[Path]]:
        """For another process, which opens the file itself."""
        return partial(ParquetSource, max_pixels=self.max_pixels), (self._path.resolve(),)

    def _read_names(self, path: Path, schema: pa.Schema) -> list[str]:
        if "id" in schema.names:
            return [str(name) for name in self._file.read(columns=["id"])["id"].to_pylist()]
        return [f"{path.name}#{row}" for row in range(self._file.metadata.num_rows)]

    def _read_labels(self, path: Path, schema: pa.Schema) -> tuple[list[int | None], tuple[str, ...]]:
        if "label" not in schema.names:
            return [None] * self._file.metadata.num_rows, ()
        kind = schema.field("label").type
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
        values = self._file.read(columns=["label"])["label"].to_pylist()
        present = {value for value in values if value is not None}
        if pa.types.is_integer(kind):
            names = _metadata_label_names(schema)
            if names and present and not (min(present) >= 0 and max(present) < len(names)):
                raise BadData(f"{path.name!r} holds labels outside the {len(names)} names in its own metadata")
            if names:
                return values, names
        elif not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise BadData(f"column label of {path.name!r} must hold text or whole numbers, found {kind}")
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
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_integer(kind)):
            raise InvalidSetting(f"column {name!r} must hold text or whole numbers, found {kind}")
        values = self._file.read(columns=[name])[name].to_pylist()
        return [None if value is None else str(value).strip() for value in values]

    def blocks(self, index: int) -> Iterator[bytes]:
        yield self.file(index)

    def file(self, index: int) -> bytes:
        group = int(np.searchsorted(self._starts, index, side="right")) - 1
        with self._lock:
            if self._group[0] != group:
                self._group = (group, self._file.read_row_group(group, columns=["image"])["image"].to_pylist())
            cell = self._group[1][index - int(self._starts[group])]
        found: bytes | None = cell.get("bytes") if isinstance(cell, dict) else cell
        if not found:
            raise UnreadableImage("no bytes in this row")
        return found

    def read(self, index: int) -> Image.Image:
        return decode_image(self.file(index), max_pixels=self.max_pixels)


def _holds_bytes(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return kind.get_field_index("bytes") >= 0 and _holds_bytes(kind.field("bytes").type)
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _metadata_label_names(schema: pa.Schema) -> tuple[str, ...]:
    # The `datasets` library writes class names there; any other content simply means there are none.
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return tuple(str(name) for name in features["label"]["names"])
    except (KeyError, TypeError, ValueError):
        return ()


class TorchvisionSource:
    """One torchvision classification data set.

    Args:
        address: `torchvision:NAME?root=DIR`, with `split=train` (default) or another split of that set, and
            `download=1` to fetch it; without that nothing is fetched.
    """

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
        self.labels = self._read_labels(count)
        self.left_out: tuple[Skipped, ...] = ()
        self.max_pixels = MAX_PIXELS

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

    def blocks(self, index: int) -> Iterator[bytes]:
        image = self.read(index)
        yield f"{image.width} {image.height}\n".encode()
        yield image.tobytes()


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
