"""A stranger's Parquet file is read in a process of its own, whose memory and time are bounded by the system.

    coordinator   starts the reader with the file as its input  ----->  limits itself, reads a few rows at a time
                  checks each length, then takes the rows       <-----  head (JSON), then the bytes of the rows

Whatever the file does to the library, fill its memory or crash it, happens over there: the coordinator holds a few rows
at most, and says that the file cannot be read. One file is read at a time, so that many are no way around the bound.
A reader is a fork of a process that has loaded the library and met no file (`feature_store.warm_process`); one that did
not come to a sound end takes that process with it. On systems other than Linux the memory of the reader is not bounded.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from typing import IO, TYPE_CHECKING, Any, BinaryIO

import numpy as np

from api.coordinator.parquet_rows import IMAGE_ROWS, FeatureRows, ImageRows, RowLimits, Rows, feature_rows, read_rows
from feature_store.own_process import bound_process
from feature_store.warm_process import Warm
from labeler.errors import BadData, InvalidSetting, LabelerError, TooLarge, Unavailable

if TYPE_CHECKING:  # the reader does without all that a configuration needs
    from api.coordinator.config import LimitsTable

ROOM_BYTES = 512 * 2**20
"""What the reader may use besides the rows it holds: the libraries, and what the file says about itself."""

CPU_S = 120
WAIT_S = 30.0
"""How long an upload waits for another one that is being read."""

_HEAD_BYTES = 8
_MAX_HEAD_BYTES = 2**24  # the longest names of `MOST_FEATURE_ROWS`, each letter spelt as six
_DTYPES = ("<i2", "<f2", "<f4", "<f8")
_REFUSALS: dict[str, type[LabelerError]] = {one.problem_type: one for one in (BadData, TooLarge, InvalidSetting)}
_GONE = "the Parquet file cannot be read: it is damaged, or needs more memory or time than a reader is given"


class _Unsound(Exception):
    """A reader that broke off, or said what no reader says."""


_turn = threading.BoundedSemaphore(1)
MODULE = "api.coordinator.parquet_process"
readers = Warm(lambda: (MODULE,))
"""What readers are forks of; of this process."""


def parquet_rows(file: BinaryIO, limits: LimitsTable, *, name: str) -> Iterator[Rows]:
    """The rows of a Parquet file, a few at a time; see `api.coordinator.parquet_rows.read_rows`.

    Raises:
        BadData, TooLarge, InvalidSetting: as there; or reading it took too much memory or time.
        Unavailable: another file is being read for too long.
    """
    rows = RowLimits(limits.max_images, limits.max_upload_bytes, limits.max_image_bytes, limits.max_feature_dimension)
    if not _turn.acquire(timeout=WAIT_S):
        raise Unavailable("another Parquet file is being read; send this one again in a moment")
    try:
        with tempfile.TemporaryFile() as copy:
            yield from _from_reader(_on_disk(file, copy), rows, name)
    finally:
        _turn.release()


def _on_disk(file: BinaryIO, copy: IO[bytes]) -> IO[bytes]:
    """A file the reader can have as its input: the one given, or a copy of what is only in memory."""
    with suppress(OSError, AttributeError):
        file.flush()
        file.fileno()
        return file
    file.seek(0)
    shutil.copyfileobj(file, copy)
    copy.flush()
    return copy


def _from_reader(file: IO[bytes], limits: RowLimits, name: str) -> Iterator[Rows]:
    order = json.dumps([asdict(limits), name])
    process = readers.start(MODULE, order, stdin=file, answers=True)
    try:
        assert process.stdout is not None  # noqa: S101  # a pipe was asked for
        with process.stdout as pipe:
            yield from _taken(pipe, limits)
    finally:
        process.kill()
        process.wait()


def _taken(pipe: IO[bytes], limits: RowLimits) -> Iterator[Rows]:
    """What the reader sent; what it was forked from goes with one that is not sound."""
    try:
        yield from _said(pipe, limits)
    except _Unsound:
        readers.forget()
        raise BadData(_GONE) from None


def _said(pipe: IO[bytes], limits: RowLimits) -> Iterator[Rows]:
    """A reader has read hostile bytes, so nothing it says is believed without a bound."""
    while True:
        head = _head(pipe)
        match head.get("kind"):
            case "end":
                return
            case "refused":
                error = _REFUSALS.get(str(head.get("problem")), BadData)
                raise error(str(head.get("sentence"))[:2000])
            case "images":
                yield ImageRows(_images(pipe, head, limits))
            case "features":
                yield _features(pipe, head, limits)
            case _:
                raise _Unsound


def _head(pipe: IO[bytes]) -> dict[str, Any]:
    size = int.from_bytes(_exactly(pipe, _HEAD_BYTES), "big")
    if size > _MAX_HEAD_BYTES:
        raise _Unsound
    with suppress(ValueError, RecursionError):
        head = json.loads(_exactly(pipe, size))
        if isinstance(head, dict):
            return head
    raise _Unsound


def _images(pipe: IO[bytes], head: dict[str, Any], limits: RowLimits) -> list[tuple[str, bytes]]:
    names, sizes = _texts(head.get("names"), IMAGE_ROWS), head.get("sizes")
    if (
        not isinstance(sizes, list)
        or len(sizes) != len(names)
        or not all(type(size) is int and 0 <= size <= limits.max_image_bytes for size in sizes)
    ):
        raise _Unsound
    return [(name, _exactly(pipe, size)) for name, size in zip(names, sizes, strict=True)]


def _features(pipe: IO[bytes], head: dict[str, Any], limits: RowLimits) -> FeatureRows:
    dimension, kind = head.get("dimension"), head.get("dtype")
    if kind not in _DTYPES or type(dimension) is not int or not 0 <= dimension <= limits.max_feature_dimension:
        raise _Unsound
    dtype = np.dtype(kind)
    names = _texts(head.get("names"), feature_rows(dimension * dtype.itemsize))
    data = _exactly(pipe, len(names) * dimension * dtype.itemsize)
    return FeatureRows(names, np.frombuffer(data, dtype=dtype).reshape(len(names), dimension))


def _texts(value: object, most: int) -> list[str]:
    if not isinstance(value, list) or len(value) > most or not all(isinstance(one, str) for one in value):
        raise _Unsound
    return value


def _exactly(pipe: IO[bytes], size: int) -> bytes:
    data = pipe.read(size)
    if len(data) != size:
        raise _Unsound
    return data


# The reader's side.


def _main(arguments: str, file: BinaryIO, out: BinaryIO) -> None:
    settings, name = json.loads(arguments)
    limits = RowLimits(**settings)
    _bound(limits, 0)
    # Arrow would load it (0.3 s) to learn that a column of numbers holds nothing of it.
    sys.modules["pandas"] = None  # type: ignore[assignment]
    try:
        for rows in read_rows(file, limits, name=name, before_rows=lambda largest: _bound(limits, largest)):
            if isinstance(rows, ImageRows):
                sizes = [len(data) for _, data in rows.images]
                head = {"kind": "images", "names": [label for label, _ in rows.images], "sizes": sizes}
                _write(out, head, *(data for _, data in rows.images))
            else:
                matrix = rows.features.astype(rows.features.dtype.newbyteorder("<"), copy=False)
                head = {
                    "kind": "features",
                    "names": rows.names,
                    "dimension": matrix.shape[1],
                    "dtype": matrix.dtype.str,
                }
                _write(out, head, matrix.tobytes())
        _write(out, {"kind": "end"})
    except LabelerError as error:
        _write(out, {"kind": "refused", "problem": error.problem_type, "sentence": str(error)})
    except MemoryError:
        _write(out, {"kind": "refused", "problem": BadData.problem_type, "sentence": _GONE})


def _bound(limits: RowLimits, largest_group: int) -> None:
    """Room for some images twice over, and for a row group packed, unpacked, and as rows."""
    bound_process(ROOM_BYTES + 2 * IMAGE_ROWS * limits.max_image_bytes + 3 * largest_group, CPU_S)


def _write(out: BinaryIO, head: dict[str, Any], *parts: bytes) -> None:
    text = json.dumps(head).encode()
    out.write(len(text).to_bytes(_HEAD_BYTES, "big") + text)
    for part in parts:
        out.write(part)
    out.flush()


if __name__ == "__main__":
    with open(0, "rb", closefd=False) as given, open(1, "wb", closefd=False) as answer:
        _main(sys.argv[1], given, answer)
