"""Images and vectors out of zip and Parquet files that strangers made: sizes are bounded before and while unpacking.

A zip is refused whole where it is encrypted, declares more than is taken, or packs like a bomb. Its directory is read
through a gauge, so that a file of nothing but directory entries cannot fill the memory. A Parquet file's own account of
its rows and sizes is checked first, and it is read a few rows at a time.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from api.coordinator.config import LimitsTable
from labeler.errors import BadData, InvalidSetting, LabelerError, TooLarge

MAX_RATIO = 200
"""No photograph unpacks to more times its packed size; what is smaller than a mebibyte may."""

_SMALL_BYTES = 2**20
_DIRECTORY_BYTES_PER_IMAGE = 512
_IMAGE_ROWS = 8
_FEATURE_ROWS = 256
_DAMAGE = (
    zipfile.BadZipFile, zlib.error, struct.error, pa.ArrowException, EOFError, OSError, RuntimeError,
    ValueError, IndexError, KeyError, OverflowError,
)  # fmt: skip
"""What the two readers raise on damaged files, found by damaging many."""

_HIDDEN = ("__MACOSX", "Thumbs.db", "desktop.ini")


@dataclass(frozen=True, repr=False)
class ImageRows:
    """Some image files: name and bytes."""

    images: list[tuple[str, bytes]]


@dataclass(frozen=True, repr=False)
class FeatureRows:
    """Some feature vectors, shape (n, dimension), with their names."""

    names: list[str]
    features: NDArray[np.floating | np.int16]


def zip_images(file: BinaryIO, limits: LimitsTable) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of every file in a zip, in the zip's order.

    Raises:
        BadData: no zip, damaged, encrypted, packed in a way that is not taken, or like a bomb.
        TooLarge: its directory, a file in it, or all of it.
        InvalidSetting: no file in it.
    """
    gauge = _Gauge(file, 64 * 1024 + _DIRECTORY_BYTES_PER_IMAGE * limits.max_images)
    try:
        with zipfile.ZipFile(gauge) as archive:
            gauge.limit = None
            members = [info for info in archive.infolist() if not info.is_dir() and not _is_hidden(info.filename)]
            _check_members(members, limits)
            for info in members:
                with archive.open(info) as member:
                    data = member.read(limits.max_image_bytes + 1)
                if len(data) > limits.max_image_bytes:
                    raise _too_large(info.filename, limits)
                yield info.filename, data
    except LabelerError:
        raise
    except _DAMAGE as error:
        raise BadData(f"the zip cannot be read: it is damaged, or no zip ({type(error).__name__})") from None


def parquet_rows(file: BinaryIO, limits: LimitsTable, *, name: str) -> Iterator[ImageRows | FeatureRows]:
    """The rows of a Parquet file, a few at a time.

    Args:
        file: with a column `image` (bytes, or a struct with a field bytes), or a column `feature` (lists of numbers of
            one length); and, if wanted, a column `name` or `id`.
        limits: see `[limits]`.
        name: of the file, which rows without a name are called after.

    Raises:
        BadData: no Parquet, damaged, or without such a column.
        TooLarge: too many rows, or too many bytes.
    """
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    try:
        with pq.ParquetFile(file, pre_buffer=False, buffer_size=2**16) as parquet:
            _check_sizes(parquet.metadata, limits, size=size)
            schema = parquet.schema_arrow
            column = _column(schema)
            named = next((one for one in ("name", "id") if one in schema.names), None)
            columns = [column] if named is None else [column, named]
            step = _IMAGE_ROWS if column == "image" else _FEATURE_ROWS
            row = 0
            for batch in parquet.iter_batches(batch_size=step, columns=columns, use_threads=False):
                numbered = [f"{name}#{number}" for number in range(row, row + len(batch))]
                names = numbered if named is None else [_text(value, named) for value in batch.column(named)]
                row += len(batch)
                cells = batch.column(column)
                if column == "image":
                    yield ImageRows(list(zip(names, map(_bytes, cells), strict=True)))
                else:
                    yield FeatureRows(names, _vectors(cells))
    except LabelerError:
        raise
    except _DAMAGE as error:
        raise BadData(f"the Parquet file cannot be read: damaged, or no Parquet ({type(error).__name__})") from None


class _Gauge:
    """A file of which only so much may be read at once while a limit is set."""

    def __init__(self, file: BinaryIO, limit: int) -> None:
        self._file = file
        self.limit: int | None = limit

    def read(self, size: int = -1) -> bytes:
        if self.limit is None:
            return self._file.read(size)
        # What goes on to the end is read one byte beyond the limit at most.
        data = self._file.read(size if 0 <= size <= self.limit else self.limit + 1)
        if len(data) > self.limit:
            raise TooLarge(f"the zip's directory has more than {self.limit} bytes; put fewer files into it")
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        """The file belongs to the caller."""


def _check_members(members: list[zipfile.ZipInfo], limits: LimitsTable) -> None:
    if not members:
        raise InvalidSetting("the zip holds no file")
    if len(members) > limits.max_images:
        raise TooLarge(f"the zip holds {len(members)} files; one job takes at most {limits.max_images} images")
    if sum(info.file_size for info in members) > limits.max_upload_bytes:
        raise TooLarge(f"the zip unpacks to more than the {limits.max_upload_bytes} bytes that one job takes")
    for info in members:
        shown = info.filename[:100]
        if info.flag_bits & 1:
            raise BadData(f"{shown!r} in the zip is encrypted; send it without a password")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise BadData(f"{shown!r} in the zip is packed in an unusual way; use the ordinary one (deflate)")
        if info.file_size > limits.max_image_bytes:
            raise _too_large(info.filename, limits)
        if info.file_size > max(_SMALL_BYTES, MAX_RATIO * info.compress_size):
            raise BadData(
                f"{shown!r} unpacks from {info.compress_size} to {info.file_size} bytes, over {MAX_RATIO} times as "
                "much, as decompression bombs do; send it as an image file by itself if it is none"
            )


def _too_large(name: str, limits: LimitsTable) -> TooLarge:
    return TooLarge(f"{name[:100]!r} in the zip has more than the {limits.max_image_bytes} bytes one image may have")


def _is_hidden(name: str) -> bool:
    return any((part.startswith(".") and part not in (".", "..")) or part in _HIDDEN for part in name.split("/"))


def _check_sizes(metadata: Any, limits: LimitsTable, *, size: int) -> None:
    if metadata.num_rows > limits.max_images:
        raise TooLarge(f"the file has {metadata.num_rows} rows; one job takes at most {limits.max_images} images")
    if not metadata.num_rows:
        raise InvalidSetting("the Parquet file has no rows")
    # Sizes of single columns are not looked at: reading those of a damaged file can end the process inside the library.
    unpacked = sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))
    if unpacked > limits.max_upload_bytes:
        raise TooLarge(f"the file unpacks to more than the {limits.max_upload_bytes} bytes that one job takes")
    if unpacked > max(_SMALL_BYTES, MAX_RATIO * size):
        raise BadData(f"the file unpacks to more than {MAX_RATIO} times its size, as decompression bombs do")


def _column(schema: pa.Schema) -> str:
    for name, accepts in (("image", _holds_bytes), ("feature", _holds_numbers)):
        if name in schema.names and accepts(schema.field(name).type):
            return name
    shown = ", ".join(f"{field.name} ({str(field.type)[:40]})" for field in list(schema)[:10])
    raise BadData(
        "the Parquet file needs a column image of bytes (or a struct with a field bytes), or a column feature with "
        f"lists of floats or of int16; found {shown or 'no column'}"
    )


def _holds_bytes(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return kind.get_field_index("bytes") >= 0 and _holds_bytes(kind.field("bytes").type)
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _holds_numbers(kind: pa.DataType) -> bool:
    types = pa.types
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return bool(is_list and (types.is_floating(kind.value_type) or types.is_int16(kind.value_type)))


def _bytes(cell: pa.Scalar) -> bytes:
    value = cell.as_py()
    if isinstance(value, dict):
        value = value.get("bytes")
    return value or b""


def _text(cell: pa.Scalar, column: str) -> str:
    value = cell.as_py()
    if value is None:
        raise InvalidSetting(f"column {column} has rows without a name; every image or vector needs one")
    return value if isinstance(value, str) else str(value)[:1000]


def _vectors(cells: pa.Array) -> NDArray[np.floating | np.int16]:
    entries = cells.flatten()
    lengths = set(cells.value_lengths().to_pylist()) if not pa.types.is_fixed_size_list(cells.type) else set()
    if cells.null_count or entries.null_count or len(lengths) > 1:
        raise BadData("column feature needs one list of numbers per row, all of one length and without gaps")
    flat = entries.to_numpy(zero_copy_only=False)
    matrix: NDArray[np.floating | np.int16] = flat.reshape(len(cells), -1)
    return matrix
