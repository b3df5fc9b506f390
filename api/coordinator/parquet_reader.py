"""A reader of untrusted Parquet files: images or vectors, a few rows at a time, in a separate process.

The rows and sizes that the file states are checked first, but they prove nothing. A page may unpack to more than its
column states, and a few bytes of run lengths can encode lists of any length. So the reader runs in its own process. The
system bounds the memory and time of that process, which imports little.

    coordinator   starts the reader with the file as its input  ----->  limits itself, reads a few rows at a time.
                  Checks each length, then takes the rows       <-----  head (JSON), then the bytes of the rows.

If the file fills the library's memory or crashes it, only that process is affected. The coordinator holds a few rows
at most, and reports that the file cannot be read. Only one file is read at a time, so memory stays within the bound.
The reader's memory is bounded only on Linux.
"""

from __future__ import annotations

import io
import json
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from labeler.errors import BadData, InvalidSetting, LabelerError, TooLarge, Unavailable
from labeler.system.process_pool import Frames, UnsoundProcess, bound_process, serve_process, start_process, write_frame

if TYPE_CHECKING:  # the reader process must not load the imports of a configuration
    from api.coordinator.config import LimitsTable

MAX_RATIO = 200
"""The largest allowed ratio of unpacked to packed size; no photograph reaches it. Not checked below a mebibyte."""

MAX_GROUP_BYTES = 512 * 2**20
"""The most bytes of one unpacked row group, because a reader may have to hold all of it."""

IMAGE_ROWS = 8
FEATURE_ROWS = 256
"""Rows of features passed on at once."""

MAX_NAME_CHARACTERS = 1000
"""Names are cut to this length. It is above the limit for names, so a cut name is still refused as too long."""

SMALL_BYTES = 2**20
_DAMAGE = (
    struct.error, pa.ArrowException, EOFError, OSError, RuntimeError, ValueError, IndexError, KeyError, OverflowError,
)  # fmt: skip
"""Exceptions that the reader raises on damaged files; found by damaging many files."""


@dataclass(frozen=True)
class RowLimits:
    """The limits of one file, from the configuration's `[limits]`."""

    max_images: int
    max_upload_bytes: int
    max_image_bytes: int
    max_feature_dimension: int


@dataclass(frozen=True, repr=False)
class ImageRows:
    """Some image files: name and bytes, and where each came from, as `datasets` notes it; "" where nobody says."""

    images: list[tuple[str, bytes]]
    paths: list[str]


@dataclass(frozen=True, repr=False)
class FeatureRows:
    """Some feature vectors, shape (n, dimension), with their names."""

    names: list[str]
    features: NDArray[np.floating | np.int16]


Rows = ImageRows | FeatureRows


def read_rows(
    file: BinaryIO, limits: RowLimits, *, before_rows: Callable[[int], None] = lambda _: None
) -> Iterator[Rows]:
    """Yield the rows of a Parquet file, a few at a time.

    Args:
        file: has a column `image` (bytes, or a struct with a field bytes), or a column `feature` (lists of numbers of
            one length); and optionally a column `name` or `id`. Without such a column the rows are numbered.
        before_rows: called with the stated size of the largest row group before any row is read.

    Raises:
        BadData: not Parquet, damaged, or without such a column.
        TooLarge: there are too many rows or bytes.
        InvalidSetting: there are no rows, or the column of names has gaps.
    """
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    try:
        with pq.ParquetFile(file, pre_buffer=False, buffer_size=2**16) as parquet:
            before_rows(_check_sizes(parquet.metadata, limits, size=size))
            schema = parquet.schema_arrow
            column = _column(schema)
            named = next((one for one in ("name", "id") if one in schema.names), None)
            columns = [column] if named is None else [column, named]
            step = IMAGE_ROWS if column == "image" else FEATURE_ROWS
            row = 0
            for batch in parquet.iter_batches(batch_size=step, columns=columns, use_threads=False):
                numbered = [f"upload.parquet#{number}" for number in range(row, row + len(batch))]
                names = numbered if named is None else _texts(batch.column(named), named, row)
                row += len(batch)
                cells = batch.column(column)
                if column == "image":
                    images = [(label, _bytes(cell, limits)) for label, cell in zip(names, cells, strict=True)]
                    yield ImageRows(images, [_path(cell) for cell in cells])
                else:
                    yield FeatureRows(names, _vectors(cells, limits))
    except (LabelerError, MemoryError):
        raise
    except _DAMAGE as error:
        raise BadData(f"the Parquet file cannot be read: damaged, or not Parquet ({type(error).__name__})") from None


def _check_sizes(metadata: Any, limits: RowLimits, *, size: int) -> int:
    """Check the sizes that the file states; return the size of its largest row group."""
    if metadata.num_rows > limits.max_images:
        raise TooLarge(f"the file has {metadata.num_rows} rows; one job takes at most {limits.max_images} images")
    if not metadata.num_rows:
        raise InvalidSetting("the Parquet file has no rows")
    # Do not read the sizes of single columns: in a damaged file, that can crash the process inside the library.
    sizes = [metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)]
    if sum(sizes) > limits.max_upload_bytes:
        raise TooLarge(f"the file unpacks to more than the {limits.max_upload_bytes} bytes that one job takes")
    if sum(sizes) > max(SMALL_BYTES, MAX_RATIO * size):
        raise BadData(f"the file unpacks to more than {MAX_RATIO} times its size, as decompression bombs do")
    largest = max(sizes, default=0)
    if largest > MAX_GROUP_BYTES:
        raise TooLarge(
            f"a row group of the file has {largest} bytes, at most {MAX_GROUP_BYTES} are read at once; write it with "
            "fewer rows in a group (row_group_size=100)"
        )
    return int(largest)


def _column(schema: pa.Schema) -> str:
    for name, accepts in (("image", _holds_bytes), ("feature", _holds_numbers)):
        if name in schema.names and accepts(schema.field(name).type):
            return name
    shown = ", ".join(f"{field.name[:40]} ({str(field.type)[:40]})" for field in list(schema)[:10])
    raise BadData(
        "the Parquet file needs a column image of bytes (or a struct with a field bytes), or a column feature with "
        f"lists of floats or of int16; found {shown or 'no column'}"
    )


def _holds_bytes(kind: pa.DataType) -> bool:
    kind, types = kind.value_type if pa.types.is_dictionary(kind) else kind, pa.types
    if types.is_struct(kind):
        return kind.get_field_index("bytes") >= 0 and _holds_bytes(kind.field("bytes").type)
    return bool(types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind))


def _holds_numbers(kind: pa.DataType) -> bool:
    types = pa.types
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return bool(is_list and (types.is_floating(kind.value_type) or types.is_int16(kind.value_type)))


def _bytes(cell: pa.Scalar, limits: RowLimits) -> bytes:
    value = cell.as_py()
    if isinstance(value, dict):
        value = value.get("bytes")
    data: bytes = value or b""
    if len(data) > limits.max_image_bytes:
        raise TooLarge(
            f"an image in the Parquet file has {len(data)} bytes, more than the {limits.max_image_bytes} one may have"
        )
    return data


def _path(cell: pa.Scalar) -> str:
    path = cell.get("path") if isinstance(cell, pa.StructScalar) and "path" in cell else None
    found = None if path is None else path.as_py()
    return found[-MAX_NAME_CHARACTERS:] if isinstance(found, str) else ""


def _texts(cells: pa.Array, column: str, start: int) -> list[str]:
    kind = cells.type.value_type if pa.types.is_dictionary(cells.type) else cells.type
    kinds = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_integer)
    if not any(check(kind) for check in kinds):
        raise InvalidSetting(f"column {column} must hold text or whole numbers, found {str(kind)[:40]}")
    if cells.null_count:
        row = start + cells.to_pylist().index(None)
        raise InvalidSetting(
            f"column {column} has rows without a name, first row {row} (counted from 0); every image or vector needs "
            "one"
        )
    return [str(value)[:MAX_NAME_CHARACTERS] for value in cells.to_pylist()]


def _vectors(cells: pa.Array, limits: RowLimits) -> NDArray[np.floating | np.int16]:
    entries = cells.flatten()
    lengths = set(cells.value_lengths().to_pylist()) if not pa.types.is_fixed_size_list(cells.type) else set()
    if cells.null_count or entries.null_count or len(lengths) > 1:
        raise BadData("column feature needs one list of numbers per row, all of one length and without gaps")
    flat = entries.to_numpy(zero_copy_only=False)
    matrix: NDArray[np.floating | np.int16] = flat.reshape(len(cells), -1)
    if matrix.shape[1] > limits.max_feature_dimension:
        raise TooLarge(f"feature vectors have {matrix.shape[1]} entries, more than {limits.max_feature_dimension}")
    return matrix


ROOM_BYTES = 512 * 2**20
"""Memory of the reader besides the rows it holds: the libraries and the file's metadata."""

CPU_S = 120
WAIT_S = 30.0
"""How long an upload waits while another file is read."""

SILENCE_S = 150.0
"""The longest silence of a reader. It is above `CPU_S`, so that only a reader that hangs reaches it."""

_MAX_HEAD_BYTES = 2**24  # room for `FEATURE_ROWS` of the longest names, with each character written as six
_DTYPES = ("<i2", "<f2", "<f4", "<f8")
_REFUSALS: dict[str, type[LabelerError]] = {one.problem_type: one for one in (BadData, TooLarge, InvalidSetting)}
_GONE = "the Parquet file cannot be read: it is damaged, or needs more memory or time than a reader is given"


_turn = threading.BoundedSemaphore(1)
MODULE = "api.coordinator.parquet_reader"


def parquet_rows(file: BinaryIO, limits: LimitsTable) -> Iterator[Rows]:
    """Yield the rows of a Parquet file on disk, a few at a time, from the reader process; see `read_rows`.

    Raises:
        BadData, TooLarge, InvalidSetting: as in `read_rows`; or reading took too much memory or time.
        Unavailable: another file was being read for too long.
    """
    rows = RowLimits(limits.max_images, limits.max_upload_bytes, limits.max_image_bytes, limits.max_feature_dimension)
    if not _turn.acquire(timeout=WAIT_S):
        raise Unavailable("another Parquet file is being read; send this one again in a moment")
    try:
        file.flush()
        process = start_process(MODULE, json.dumps(asdict(rows)), stdin=file, answers=True)
        try:
            yield from _taken(Frames(process.stdout, most_head_bytes=_MAX_HEAD_BYTES, silence_s=SILENCE_S), rows)
        except UnsoundProcess:
            raise BadData(_GONE) from None
        finally:
            process.kill()
            process.communicate()
    finally:
        _turn.release()


def _taken(frames: Frames, limits: RowLimits) -> Iterator[Rows]:
    while True:
        match frames.head():
            case {"kind": "end"}:
                return
            case {"kind": "refused", "problem": problem, "sentence": sentence}:
                raise _REFUSALS.get(str(problem), BadData)(str(sentence)[:2000])
            case {"kind": "images", "names": names, "paths": paths, "sizes": [*sizes]} if len(sizes) == len(
                _checked_texts(names, IMAGE_ROWS)
            ) == len(_checked_texts(paths, IMAGE_ROWS)) and all(
                type(size) is int and 0 <= size <= limits.max_image_bytes for size in sizes
            ):
                images = [(name, frames.exactly(size)) for name, size in zip(names, sizes, strict=True)]
                yield ImageRows(images, paths)
            case {"kind": "features", "names": names, "dimension": int(dimension), "dtype": str(kind)} if (
                kind in _DTYPES and 0 <= dimension <= limits.max_feature_dimension
            ):
                dtype = np.dtype(kind)
                _checked_texts(names, FEATURE_ROWS)
                data = frames.exactly(len(names) * dimension * dtype.itemsize)
                yield FeatureRows(names, np.frombuffer(data, dtype=dtype).reshape(len(names), dimension))
            case _:
                raise UnsoundProcess


def _checked_texts(value: object, most: int) -> list[str]:
    if not isinstance(value, list) or len(value) > most or not all(isinstance(one, str) for one in value):
        raise UnsoundProcess
    return value


# The reader's side.


def serve(arguments: Sequence[str], file: BinaryIO, out: BinaryIO) -> int:
    """Send the rows of a file; the only argument is the limits in JSON."""
    limits = RowLimits(**json.loads(arguments[0]))
    _bound(limits, 0)
    try:
        for rows in read_rows(file, limits, before_rows=lambda largest: _bound(limits, largest)):
            if isinstance(rows, ImageRows):
                sizes = [len(data) for _, data in rows.images]
                names = [label for label, _ in rows.images]
                head = {"kind": "images", "names": names, "paths": rows.paths, "sizes": sizes}
                write_frame(out, head, *(data for _, data in rows.images))
            else:
                matrix = rows.features.astype(rows.features.dtype.newbyteorder("<"), copy=False)
                head = {
                    "kind": "features",
                    "names": rows.names,
                    "dimension": matrix.shape[1],
                    "dtype": matrix.dtype.str,
                }
                write_frame(out, head, matrix.tobytes())
        write_frame(out, {"kind": "end"})
    except LabelerError as error:
        write_frame(out, {"kind": "refused", "problem": error.problem_type, "sentence": str(error)})
    except MemoryError:
        write_frame(out, {"kind": "refused", "problem": BadData.problem_type, "sentence": _GONE})
    return 0


def _bound(limits: RowLimits, largest_group: int) -> None:
    """Limit this process's memory to hold `IMAGE_ROWS` images twice, and a row group packed, unpacked and as rows."""
    bound_process(ROOM_BYTES + 2 * IMAGE_ROWS * limits.max_image_bytes + 3 * largest_group, CPU_S)


if __name__ == "__main__":
    # Arrow would import pandas (0.3 s) only to find that a column of numbers does not use it.
    sys.modules["pandas"] = None  # type: ignore[assignment]
    serve_process(serve)
