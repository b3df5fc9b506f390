"""A stranger's Parquet file is read in a process of its own, whose memory and time are bounded by the system.

    coordinator   starts the reader with the file as its input  ----->  limits itself, reads a few rows at a time
                  checks each length, then takes the rows       <-----  head (JSON), then the bytes of the rows

Whatever the file does to the library, fill its memory or crash it, happens over there: the coordinator holds a few rows
at most, and says that the file cannot be read. One file is read at a time, so that many are no way around the bound.
On systems other than Linux the memory of the reader is not bounded.
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
from typing import IO, TYPE_CHECKING, BinaryIO

import numpy as np

from api.coordinator.parquet_rows import IMAGE_ROWS, FeatureRows, ImageRows, RowLimits, Rows, feature_rows, read_rows
from labeler.errors import BadData, InvalidSetting, LabelerError, TooLarge, Unavailable
from labeler.system.process_pool import Frames, UnsoundProcess, bound_process, start_process, write_frame

if TYPE_CHECKING:  # the reader does without all that a configuration needs
    from api.coordinator.config import LimitsTable

ROOM_BYTES = 512 * 2**20
"""What the reader may use besides the rows it holds: the libraries, and what the file says about itself."""

CPU_S = 120
WAIT_S = 30.0
"""How long an upload waits for another one that is being read."""

SILENCE_S = 150.0
"""How long a reader may say nothing; more than `CPU_S`, so that this meets only one that hangs."""

_MAX_HEAD_BYTES = 2**24  # the longest names of `MOST_FEATURE_ROWS`, each letter spelt as six
_DTYPES = ("<i2", "<f2", "<f4", "<f8")
_REFUSALS: dict[str, type[LabelerError]] = {one.problem_type: one for one in (BadData, TooLarge, InvalidSetting)}
_GONE = "the Parquet file cannot be read: it is damaged, or needs more memory or time than a reader is given"


_turn = threading.BoundedSemaphore(1)
MODULE = "api.coordinator.parquet_process"


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
    process = start_process(MODULE, json.dumps([asdict(limits), name]), stdin=file, answers=True)
    try:
        yield from _taken(Frames(process.stdout, most_head_bytes=_MAX_HEAD_BYTES, silence_s=SILENCE_S), limits)
    except UnsoundProcess:
        raise BadData(_GONE) from None
    finally:
        process.kill()
        process.communicate()


def _taken(frames: Frames, limits: RowLimits) -> Iterator[Rows]:
    while True:
        match frames.head():
            case {"kind": "end"}:
                return
            case {"kind": "refused", "problem": problem, "sentence": sentence}:
                raise _REFUSALS.get(str(problem), BadData)(str(sentence)[:2000])
            case {"kind": "images", "names": names, "sizes": [*sizes]} if len(sizes) == len(
                _texts(names, IMAGE_ROWS)
            ) and all(type(size) is int and 0 <= size <= limits.max_image_bytes for size in sizes):
                yield ImageRows([(name, frames.exactly(size)) for name, size in zip(names, sizes, strict=True)])
            case {"kind": "features", "names": names, "dimension": int(dimension), "dtype": str(kind)} if (
                kind in _DTYPES and 0 <= dimension <= limits.max_feature_dimension
            ):
                dtype = np.dtype(kind)
                _texts(names, feature_rows(dimension * dtype.itemsize))
                data = frames.exactly(len(names) * dimension * dtype.itemsize)
                yield FeatureRows(names, np.frombuffer(data, dtype=dtype).reshape(len(names), dimension))
            case _:
                raise UnsoundProcess


def _texts(value: object, most: int) -> list[str]:
    if not isinstance(value, list) or len(value) > most or not all(isinstance(one, str) for one in value):
        raise UnsoundProcess
    return value


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


def _bound(limits: RowLimits, largest_group: int) -> None:
    """Room for some images twice over, and for a row group packed, unpacked, and as rows."""
    bound_process(ROOM_BYTES + 2 * IMAGE_ROWS * limits.max_image_bytes + 3 * largest_group, CPU_S)


if __name__ == "__main__":
    with open(0, "rb", closefd=False) as given, open(1, "wb", closefd=False) as answer:
        _main(sys.argv[1], given, answer)
