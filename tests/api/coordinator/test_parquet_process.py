"""A hostile Parquet file costs the coordinator nothing: it is read in another process, and that one is bounded."""

from __future__ import annotations

import io
import json
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from api.coordinator import parquet_reader
from api.coordinator.config import LimitsTable
from api.coordinator.parquet_reader import FeatureRows, ImageRows, RowLimits, parquet_rows, read_rows
from labeler.errors import BadData, TooLarge, Unavailable
from tests.api.conftest import on_disk

ROOT = Path(__file__).parents[3]
LIMITS = LimitsTable(max_image_bytes=2**20)
MEBIBYTE = 2**20


def zigzag(value: int, length: int = 0) -> bytes:
    """A number as a footer holds it, padded to a length."""
    rest, data = 2 * value, bytearray()
    while rest or not data:
        data.append(rest & 0x7F | 0x80)
        rest >>= 7
    data += b"\x80" * (length - len(data))
    data[-1] &= 0x7F
    return bytes(data)


def lie_about_sizes(path: Path) -> None:
    """Let the footer say that the row group has a thousand bytes."""
    data = path.read_bytes()
    true = zigzag(pq.read_metadata(path).row_group(0).total_byte_size)
    assert true in data
    path.write_bytes(data.replace(true, zigzag(1000, len(true))))


def long_lists(path: Path) -> None:
    """Rows of two million equal numbers each: a gigabyte in a file that is small by its own account and in truth."""
    column = pa.array([np.ones(2_000_000, dtype=np.int16)], pa.list_(pa.int16()))
    with pq.ParquetWriter(path, pa.schema([("feature", column.type)]), compression="zstd") as writer:
        for _ in range(256):
            writer.write_table(pa.table({"feature": column}))


def one_large_image(path: Path) -> None:
    """A dictionary of one image of 150 MiB that every row names: 75 GiB of rows."""
    column = pa.DictionaryArray.from_arrays(np.zeros(500, dtype=np.int32), pa.array([bytes(150 * MEBIBYTE)]))
    pq.write_table(pa.table({"image": column}), path, compression="zstd", store_schema=False)
    lie_about_sizes(path)


def long_names(path: Path) -> None:
    """As many names of 150 MiB."""
    names = pa.DictionaryArray.from_arrays(np.zeros(500, dtype=np.int32), pa.array(["x" * (150 * MEBIBYTE)]))
    table = pa.table({"name": names, "image": pa.array([b"x"] * 500)})
    pq.write_table(table, path, compression="zstd", store_schema=False)


def large_page(path: Path) -> None:
    """A page of 800 MiB, and a footer that calls it a kilobyte."""
    ends = np.arange(101, dtype=np.int32) * (8 * MEBIBYTE)
    zeros = mmap.mmap(-1, 800 * MEBIBYTE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    zeros.madvise(mmap.MADV_HUGEPAGE)  # read only, so none of it is ever there: else it takes seconds to fill memory
    column = pa.Array.from_buffers(pa.binary(), 100, [None, pa.py_buffer(ends), pa.py_buffer(zeros)])
    table = pa.table({"image": column})
    pq.write_table(table, path, compression="zstd", use_dictionary=False, write_statistics=False)
    lie_about_sizes(path)


@pytest.mark.parametrize(
    "make",
    [one_large_image, *(pytest.param(one, marks=pytest.mark.long) for one in (large_page, long_names, long_lists))],
)
@pytest.mark.process
def test_a_bomb_is_refused_and_neither_process_grows(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "bomb.parquet"
    make(path)
    assert path.stat().st_size < MEBIBYTE
    code = """
import json, resource, sys
from pathlib import Path
from typing import BinaryIO
from api.coordinator.config import LimitsTable
from api.coordinator.uploads import UploadWriter
from labeler.errors import LabelerError
def peak(who):
    return resource.getrusage(who).ru_maxrss * 1024
before = peak(resource.RUSAGE_SELF)
limits = LimitsTable(max_image_bytes=2**20)
try:
    with UploadWriter(Path(sys.argv[2]), limits) as writer, open(sys.argv[1], "rb") as file:
        writer.add_parquet(file)
    said = ["taken", ""]
except LabelerError as error:
    said = [type(error).__name__, str(error)]
grown = peak(resource.RUSAGE_SELF) - before
print(json.dumps([*said, grown, peak(resource.RUSAGE_CHILDREN)]))
"""
    result = subprocess.run(
        [sys.executable, "-c", code, str(path), str(tmp_path / "incoming")],
        capture_output=True, text=True, check=True, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    kind, sentence, grown, reader = json.loads(result.stdout)
    assert kind in ("BadData", "TooLarge"), sentence
    assert grown < 64 * MEBIBYTE
    assert 16 * MEBIBYTE < reader < parquet_reader.ROOM_BYTES + 256 * MEBIBYTE
    assert list((tmp_path / "incoming").iterdir()) == []


def written(table: pa.Table) -> BinaryIO:
    with io.BytesIO() as file:
        pq.write_table(table, file)
        return on_disk(file.getvalue())


def test_rows_come_through_as_they_are(tmp_path: Path) -> None:
    images = [bytes([number]) * number for number in range(20)]
    path = tmp_path / "images.parquet"
    pq.write_table(pa.table({"image": images, "name": [f"n\u00e4me {number}" for number in range(20)]}), path)
    found: list[tuple[str, bytes]] = []
    with path.open("rb") as file:
        for rows in parquet_rows(file, LIMITS):
            assert isinstance(rows, ImageRows)
            found += rows.images
    assert found == [(f"n\u00e4me {number}", data) for number, data in enumerate(images)]
    for kind in (np.int16, np.float16, np.float32, np.float64):
        matrix = np.arange(1, 1201).reshape(300, 4).astype(kind)
        table = pa.table({"feature": pa.FixedSizeListArray.from_arrays(pa.array(matrix.ravel()), 4)})
        parts = [rows for rows in parquet_rows(written(table), LIMITS) if isinstance(rows, FeatureRows)]
        joined = np.concatenate([rows.features for rows in parts])
        assert joined.dtype == kind
        assert np.array_equal(joined, matrix)


def test_an_image_or_a_row_group_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    large = pa.table({"image": [np.random.default_rng(1).bytes(MEBIBYTE + 1)]})
    with pytest.raises(TooLarge, match="an image in the Parquet file has 1048577 bytes"):
        list(parquet_rows(written(large), LIMITS))
    monkeypatch.setattr(parquet_reader, "MAX_GROUP_BYTES", MEBIBYTE)
    with pytest.raises(TooLarge, match="row_group_size=100"):
        list(read_rows(written(large), RowLimits(10, 2**30, 2**30, 10)))


def test_one_file_is_read_at_a_time_and_a_reader_that_is_left_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_reader, "WAIT_S", 0.05)
    table = pa.table({"image": [b"x"] * 100})
    first = parquet_rows(written(table), LIMITS)
    next(first)
    with pytest.raises(Unavailable, match="in a moment"):
        list(parquet_rows(written(table), LIMITS))
    first.close()  # type: ignore[attr-defined]  # a generator
    assert len(list(parquet_rows(written(table), LIMITS))) == 13


def head(content: dict[str, object]) -> bytes:
    text = json.dumps(content).encode()
    return len(text).to_bytes(4, "big") + text


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        (2**31).to_bytes(4, "big"),
        b"\0" * 3 + b"\x02[]",
        head({"kind": "images", "names": ["a"], "sizes": [2**30]}),
        head({"kind": "images", "names": ["a"] * 9, "sizes": [0] * 9}),
        head({"kind": "images", "names": ["a"], "sizes": [5]}) + b"abc",
        head({"kind": "features", "names": ["a"], "dtype": "<f8", "dimension": 10**9}),
        head({"kind": "features", "names": ["a"], "dtype": "|O", "dimension": 1}) + b"\0" * 8,
        head({"kind": "other"}),
    ],
)
@pytest.mark.process
def test_a_reader_that_dies_or_lies_is_bad_data(monkeypatch: pytest.MonkeyPatch, answer: bytes) -> None:
    said = f"import sys; sys.stdout.buffer.write({answer!r})"

    def start(*_: object, stdin: object, answers: bool) -> subprocess.Popen[bytes]:
        assert answers
        return subprocess.Popen([sys.executable, "-c", said], stdout=subprocess.PIPE)

    monkeypatch.setattr(parquet_reader, "start_process", start)
    with pytest.raises(BadData, match="more memory or time"):
        list(parquet_rows(io.BytesIO(b"file"), LIMITS))
