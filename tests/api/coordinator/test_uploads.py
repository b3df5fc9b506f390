"""Uploads: what is good is kept byte for byte, what is bad is named, and a refusal leaves nothing behind."""

from __future__ import annotations

import hashlib
import io
import re
import struct
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray
from PIL import Image

from api.coordinator.config import LimitsTable
from api.coordinator.parquet_reader import FEATURE_ROWS, RowLimits, read_rows
from api.coordinator.uploads import Upload, UploadWriter, tidy_name
from feature_store.rows import on_grid, quantize
from labeler.errors import BadData, InvalidSetting, LabelerError, NotReady, StorageFull, TooLarge, UnreadableImage
from tests.api.conftest import on_disk

LIMITS = LimitsTable(max_images=50, max_upload_bytes=10 * 2**20, max_image_bytes=2**20, max_pixels=10_000)
ROW_LIMITS = RowLimits(50, 10 * 2**20, 2**20, LIMITS.max_feature_dimension)


def png(number: int = 0, side: int = 8, mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    Image.new(mode, (side, side), number % 256 if mode == "L" else (number % 256, 20, 30)).save(file, "PNG")
    return file.getvalue()


def zipped(files: dict[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> io.BytesIO:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    file.seek(0)
    return file


def parquet(columns: dict[str, Any]) -> BinaryIO:
    with io.BytesIO() as file:
        pq.write_table(pa.table(columns), file)
        return on_disk(file.getvalue())


def uploaded(folder: Path, fill: Callable[[UploadWriter], None], limits: LimitsTable = LIMITS) -> Upload:
    with UploadWriter(folder, limits) as writer:
        fill(writer)
        return writer.finish()


def rows(upload: Upload) -> list[dict[str, Any]]:
    return pq.read_table(upload.path).to_pylist()  # type: ignore[no-any-return]


def test_images_are_kept_byte_for_byte_in_their_order(tmp_path: Path) -> None:
    files = {f"set/{number}.png": png(number) for number in (3, 1, 2)}

    def fill(writer: UploadWriter) -> None:
        for name, data in files.items():
            writer.add_image(name, data)

    upload = uploaded(tmp_path, fill)
    assert (upload.count, upload.source, upload.dimension) == (3, "images", None)
    assert rows(upload) == [{"name": name, "image": data} for name, data in files.items()]
    assert upload.path.stat().st_mode & 0o077 == 0


def test_a_zip_and_a_parquet_file_give_the_same_as_single_files(tmp_path: Path) -> None:
    files = {"a.png": png(1), "b.png": png(2)}
    single = uploaded(tmp_path, lambda writer: [writer.add_image(*item) for item in files.items()] and None)
    archive = zipped(files | {".DS_Store": b"x", "__MACOSX/a.png": b"x"})
    packed = uploaded(tmp_path, lambda writer: writer.add_zip(archive))
    table = {"name": list(files), "image": [{"bytes": data, "path": None} for data in files.values()]}
    tabled = uploaded(tmp_path, lambda writer: writer.add_parquet(parquet(table)))
    assert rows(packed) == rows(single) == rows(tabled)
    assert packed.digest == single.digest == tabled.digest


def test_rows_of_a_parquet_file_without_names_are_numbered(tmp_path: Path) -> None:
    file = parquet({"image": [png(1), png(2)]})
    upload = uploaded(tmp_path, lambda writer: writer.add_parquet(file))
    assert [row["name"] for row in rows(upload)] == ["upload.parquet#0", "upload.parquet#1"]


def test_vectors_are_quantised_and_quantised_ones_are_taken_as_they_are(tmp_path: Path) -> None:
    vectors = np.array([[1.0, 2.0, -3.0], [0.1, 0.0, 0.0]])
    upload = uploaded(tmp_path, lambda writer: writer.add_features(vectors.tolist(), ["a", "b"]))
    assert (upload.count, upload.source, upload.dimension) == (2, "features", 3)
    assert pq.read_schema(upload.path).field("feature").type == pa.list_(pa.int16(), 3)
    assert [row["feature"] for row in rows(upload)] == quantize(vectors).tolist()
    ready = uploaded(tmp_path, lambda writer: writer.add_features(quantize(vectors).tolist(), ["a", "b"]))
    assert ready.digest == upload.digest
    table = {"id": ["a", "b"], "feature": vectors.astype(np.float32).tolist()}
    assert uploaded(tmp_path, lambda writer: writer.add_parquet(parquet(table))).digest == upload.digest
    short = {"id": ["a", "b"], "feature": pa.array(quantize(vectors).tolist(), pa.list_(pa.int16()))}
    assert uploaded(tmp_path, lambda writer: writer.add_parquet(parquet(short))).digest == upload.digest


@pytest.mark.parametrize("dimension", [1, *(pytest.param(one, marks=pytest.mark.long) for one in (2, 3, 64)), 2048])
def test_quantised_vectors_are_kept_exactly_however_they_are_sent(tmp_path: Path, dimension: int) -> None:
    vectors = np.random.default_rng(dimension).normal(size=(40, dimension)) ** 3
    exact = quantize(vectors)
    assert on_grid(exact.astype(np.float64)).all()
    limits = LIMITS.model_copy(update={"max_images": 100})

    def kept(fill: Callable[[UploadWriter], None]) -> NDArray[np.int16]:
        return np.array([row["feature"] for row in rows(uploaded(tmp_path, fill, limits))], dtype=np.int16)

    lists = pa.array(exact.tolist(), pa.list_(pa.int16()))
    floats = pa.array(exact.tolist(), pa.list_(pa.float32()))
    for fill in (
        lambda writer: writer.add_features(exact.tolist()),
        lambda writer: writer.add_parquet(parquet({"feature": lists})),
        lambda writer: writer.add_parquet(parquet({"feature": floats})),
    ):
        assert np.array_equal(kept(fill), exact)
    mixed = np.concatenate([exact.astype(np.float64), vectors])
    assert np.array_equal(kept(lambda writer: writer.add_features(mixed.tolist())), np.concatenate([exact, exact]))


def test_whole_numbers_of_another_length_are_quantised(tmp_path: Path) -> None:
    vectors = [[3.0, 4.0], [2048.0, 2048.0], [2050.0, 0.0], [32768.0, 0.0], [1e300, 1.0], [2047.5, 0.0]]
    assert not on_grid(np.array([*vectors, [np.nan, 2048.0], [np.inf, 0.0], [0.0, 0.0]])).any()
    upload = uploaded(tmp_path, lambda writer: writer.add_features(vectors))
    assert [row["feature"] for row in rows(upload)] == quantize(np.array(vectors)).tolist()


def test_the_digest_is_of_names_content_and_order(tmp_path: Path) -> None:
    def digest(*items: tuple[str, bytes]) -> str:
        return uploaded(tmp_path, lambda writer: [writer.add_image(*item) for item in items] and None).digest

    first = digest(("a", png(1)), ("b", png(2)))
    assert first == digest(("a", png(1)), ("b", png(2)))
    assert len({first, digest(("b", png(2)), ("a", png(1))), digest(("a", png(1)), ("c", png(2)))}) == 3


def test_many_vectors_are_hashed_as_one_after_the_other_however_they_are_split(tmp_path: Path) -> None:
    vectors = quantize(np.random.default_rng(4).normal(size=(3 * FEATURE_ROWS + 3, 4)))
    names = [f"caf\u00e9-{number}" for number in range(len(vectors))]
    sha256 = hashlib.sha256(b"labeler-upload/1\nfeatures 4\n")
    for name, row in zip(names, vectors, strict=True):
        sha256.update(f"{len(name.encode())} 8\n{name}".encode() + row.astype("<i2").tobytes())
    limits = LIMITS.model_copy(update={"max_images": 10_000})
    table = {"name": names, "feature": pa.array(list(vectors), pa.list_(pa.int16(), 4))}
    for fill in (
        lambda writer: writer.add_features(vectors.tolist(), names),
        lambda writer: [writer.add_features([vectors[n].tolist()], [names[n]]) for n in range(len(names))] and None,
        lambda writer: writer.add_parquet(parquet(table)),
    ):
        upload = uploaded(tmp_path, fill, limits)
        assert (upload.digest, upload.count) == (sha256.hexdigest(), len(names))
        assert [row["feature"] for row in rows(upload)] == vectors.tolist()
    for repeated in (["x", "y", "x"], ["x", "y", names[0]]):
        writer = UploadWriter(tmp_path, limits)
        writer.add_features(vectors[:1].tolist(), names[:1])
        with pytest.raises(InvalidSetting, match=repeated[2]):
            writer.add_features(vectors[:3].tolist(), repeated)


def test_names_are_only_names(tmp_path: Path) -> None:
    assert tidy_name("../../etc/passwd") == "etc/passwd"
    assert tidy_name("\\\\host\\dir\\.\\x.png") == "host/dir/x.png"
    for kept in (
        "Screenshot 3.04\u202fPM.png",
        "no\u00a0break.png",
        "\U0001f468\u200d\U0001f469\u200d\U0001f467.png",
        "'+#&%?",
    ):
        assert tidy_name(kept) == kept  # macOS writes the first
    for wrong in ("a\nb.png", "tab\t.png", "a\u2028b.png", "\x7f.png", "turn\u202egnp.exe"):
        with pytest.raises(InvalidSetting, match=r"control character.*rename it"):
            tidy_name(wrong)
    assert tidy_name("caf\u0065\u0301.png") == "caf\u0065\u0301.png"  # as it came: its label is found by this name
    with UploadWriter(tmp_path, LimitsTable()) as writer:
        writer.add_image("caf\u0065\u0301.png", png())
        with pytest.raises(InvalidSetting, match="rename one"):
            writer.add_image("caf\u00e9.png", png())
    upload = uploaded(tmp_path, lambda writer: writer.add_zip(zipped({"../up.png": png(), "/root.png": png()})))
    assert [row["name"] for row in rows(upload)] == ["up.png", "root.png"]
    assert not (tmp_path.parent / "up.png").exists()


def test_up_to_ten_bad_images_are_named_in_one_refusal(tmp_path: Path) -> None:
    def some(writer: UploadWriter) -> None:
        writer.add_image("good.png", png())
        writer.add_image("text.png", b"hello")
        writer.add_image("empty.png", b"")
        writer.add_image("cut.png", png()[:20])
        writer.add_image("large.png", png(side=101))

    with pytest.raises(UnreadableImage) as refused:
        uploaded(tmp_path, some)
    text = str(refused.value)
    assert text.startswith("4 of the images cannot be used")
    assert "'text.png' (not an image of a known format, but a text)" in text
    assert "'empty.png' (an empty file)" in text
    assert "'large.png' (101 x 101 pixels, at most 10000 are taken)" in text
    assert "good.png" not in text
    with pytest.raises(UnreadableImage, match="at least 10 of the images"):
        uploaded(tmp_path, lambda writer: writer.add_zip(zipped({f"{one}.png": b"x" for one in range(30)})))
    assert list(tmp_path.iterdir()) == []


def encrypted() -> io.BytesIO:
    data = bytearray(zipped({"a.png": png()}).getvalue())
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        place = data.index(signature) + offset
        data[place] |= 1
    return io.BytesIO(bytes(data))


def linked() -> io.BytesIO:
    """A picture, and a link to a file of whoever unpacks it."""
    file = zipped({"a.png": png()})
    link = zipfile.ZipInfo("b.png")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr(link, "/etc/hostname")
    file.seek(0)
    return file


def lying() -> io.BytesIO:
    """Declares 10 bytes and unpacks to 100,000."""
    data = bytearray(zipped({"a.png": b"\0" * 100_000}).getvalue())
    for signature, offset in ((b"PK\x03\x04", 22), (b"PK\x01\x02", 24)):
        place = data.index(signature) + offset
        data[place : place + 4] = struct.pack("<I", 10)
    return io.BytesIO(bytes(data))


def broken() -> io.BytesIO:
    data = bytearray(zipped({"a.png": png()}, zipfile.ZIP_STORED).getvalue())
    data[50] ^= 0xFF
    return io.BytesIO(bytes(data))


def directory_only() -> io.BytesIO:
    """A large directory of nothing."""
    return zipped({f"{number:0100d}": b"" for number in range(2000)}, zipfile.ZIP_STORED)


@pytest.mark.parametrize(
    ("file", "error", "said"),
    [
        (lambda: io.BytesIO(b"no zip at all"), BadData, "not a zip"),
        (lambda: io.BytesIO(zipped({"a.png": png()}).getvalue()[:-30]), BadData, "not a zip"),
        (encrypted, BadData, "encrypted"),
        (linked, BadData, "'b.png' in the zip is a link"),
        (broken, BadData, "damaged"),
        (lying, BadData, "damaged"),
        (directory_only, TooLarge, "directory"),
        (lambda: zipped({}), InvalidSetting, "no file"),
        (lambda: zipped({"folder/": b""}), InvalidSetting, "no file"),
        (lambda: zipped({"a": b"\0" * (2**20 + 1)}), TooLarge, "1048576 bytes"),
        (lambda: zipped({f"{one}": png(one) for one in range(51)}), TooLarge, "51 files"),
        (lambda: zipped({"a.png": png()}, zipfile.ZIP_LZMA), BadData, "unsupported method"),
        (lambda: zipped({"a.png": png(), "../a.png": png()}), InvalidSetting, "two images"),
        (lambda: zipped({"in.zip": zipped({"a.png": png()}).getvalue()}), UnreadableImage, "'in.zip'"),
    ],
)
def test_a_zip_that_cannot_be_taken_is_refused_in_a_sentence(
    tmp_path: Path, file: Callable[[], io.BytesIO], error: type[LabelerError], said: str
) -> None:
    with pytest.raises(error, match=re.escape(said)):
        uploaded(tmp_path, lambda writer: writer.add_zip(file()))
    assert list(tmp_path.iterdir()) == []


def test_a_decompression_bomb_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    limits = LIMITS.model_copy(update={"max_image_bytes": 2**30, "max_upload_bytes": 2**34})
    file = zipped({"bomb.png": b"\0" * (100 * 2**20)})
    assert len(file.getvalue()) < 200_000
    tracemalloc.start()
    with pytest.raises(BadData, match="decompression bombs"):
        uploaded(tmp_path, lambda writer: writer.add_zip(file), limits)
    assert tracemalloc.get_traced_memory()[1] < 10 * 2**20  # of every thread of this process
    tracemalloc.stop()


def test_an_image_bomb_is_refused_by_its_header(tmp_path: Path) -> None:
    data = bytearray(png())
    data[16:24] = struct.pack(">II", 60_000, 60_000)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    with pytest.raises(UnreadableImage, match="pixels"):
        uploaded(tmp_path, lambda writer: writer.add_image("bomb.png", bytes(data)))


def test_memory_stays_bounded_while_much_is_written(tmp_path: Path) -> None:
    noise = np.random.default_rng(1).integers(0, 255, (500, 500, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "BMP")
    limits = LimitsTable(max_images=200)
    tracemalloc.start()
    upload = uploaded(
        tmp_path,
        lambda writer: [writer.add_image(f"{n}.bmp", file.getvalue()) for n in range(100)] and None,
        limits,
    )
    assert upload.path.stat().st_size > 70 * 2**20
    assert tracemalloc.get_traced_memory()[1] < 30 * 2**20
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("columns", "error", "said"),
    [
        ({"picture": [png()]}, BadData, "needs a column image"),
        ({"image": ["text"]}, BadData, "image (string)"),
        ({"image": [png(), None]}, UnreadableImage, "an empty file"),
        ({"image": pa.array([], pa.binary())}, InvalidSetting, "no rows"),
        ({"image": [png()] * 51}, TooLarge, "51 rows"),
        ({"image": [png(), png()], "name": ["a", None]}, InvalidSetting, "without a name"),
        ({"image": [png(), png()], "name": ["a", "a"]}, InvalidSetting, "two images"),
        ({"image": [png(), b"\0" * (40 * 2**20)]}, TooLarge, "unpacks to more"),
        ({"feature": [[1.0, 2.0], [1.0]]}, BadData, "all of one length"),
        ({"feature": [[1.0, 2.0], None]}, BadData, "all of one length"),
        ({"feature": [[1.0, float("nan")]]}, BadData, "zero or not finite"),
        ({"feature": [[0.0, 0.0]]}, BadData, "zero or not finite"),
        ({"feature": [[1, 2]]}, BadData, "lists of floats or of int16"),
        ({"feature": pa.array([[30_000, 30_000]], pa.list_(pa.int16()))}, BadData, "use quantize"),
    ],
)
def test_a_parquet_file_that_cannot_be_taken_is_refused_in_a_sentence(
    tmp_path: Path, columns: dict[str, Any], error: type[LabelerError], said: str
) -> None:
    with pytest.raises(error, match=re.escape(said)):
        uploaded(tmp_path, lambda writer: writer.add_parquet(parquet(columns)))
    assert list(tmp_path.iterdir()) == []


def test_a_file_with_damaged_bytes_is_taken_or_refused_in_a_sentence(tmp_path: Path) -> None:
    generator = np.random.default_rng(11)
    whole = [
        ("add_zip", zipped({f"{number}.png": png(number) for number in range(3)})),
        ("add_parquet", parquet({"image": [png(1), png(2)], "name": ["a", "b"]})),
        ("add_parquet", parquet({"feature": [[1.0, 2.0], [3.0, 4.0]]})),
    ]
    refused = 0
    for number in range(600):
        method, file = whole[number % 3]
        through_a_process = number < 12
        data = bytearray(file.read())
        file.seek(0)
        for place in generator.integers(0, len(data), 1 + number % 3):
            data[place] = generator.integers(0, 256)
        damaged = on_disk(bytes(data)) if through_a_process else io.BytesIO(data)
        try:
            if method == "add_zip" or through_a_process:
                uploaded(tmp_path, lambda writer, add=method, file=damaged: getattr(writer, add)(file)).discard()
            else:
                list(read_rows(damaged, ROW_LIMITS))
        except LabelerError:
            refused += 1
        assert list(tmp_path.iterdir()) == []
    assert refused > 300


@pytest.mark.parametrize("data", [b"", b"PAR1", b"PAR1 and then nothing PAR1"])
def test_what_is_no_parquet_is_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(BadData, match="not Parquet"):
        uploaded(tmp_path, lambda writer: writer.add_parquet(on_disk(data)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("vectors", "ids", "error", "said"),
    [
        ([[1.0], [1.0, 2.0]], None, InvalidSetting, "one length"),
        ([], None, InvalidSetting, "one length"),
        ([[]], None, BadData, "shape"),
        ([[1.0, 2.0]], ["a", "b"], InvalidSetting, "1 feature vectors came with 2"),
        ([[1.0], [2.0]], ["a", "a"], InvalidSetting, "two images or vectors"),
        ([[1.0]], [" / "], InvalidSetting, "needs a name"),
        ([[1.0, float("inf")]], None, BadData, "not finite"),
        ([[1.0] * 20_000], None, TooLarge, "20000 entries"),
        ([[1.0]] * 51, None, TooLarge, "at most 50"),
    ],
)
def test_vectors_that_cannot_be_taken_are_refused_in_a_sentence(
    tmp_path: Path, vectors: Any, ids: list[str] | None, error: type[LabelerError], said: str
) -> None:
    with pytest.raises(error, match=re.escape(said)):
        uploaded(tmp_path, lambda writer: writer.add_features(vectors, ids))
    assert list(tmp_path.iterdir()) == []


def test_one_job_takes_images_or_vectors_and_so_much_of_them(tmp_path: Path) -> None:
    def both(writer: UploadWriter) -> None:
        writer.add_image("a", png())
        writer.add_features([[1.0]])

    with pytest.raises(InvalidSetting, match="not both"):
        uploaded(tmp_path, both)
    small = LIMITS.model_copy(update={"max_upload_bytes": 100})
    with pytest.raises(TooLarge, match="at most 100 bytes"):
        uploaded(tmp_path, lambda writer: [writer.add_image(str(n), png()) for n in range(9)] and None, small)
    with pytest.raises(TooLarge, match="more than the 1048576 bytes"):
        uploaded(tmp_path, lambda writer: writer.add_image("a", b"\0" * 3 * 2**19))
    with pytest.raises(InvalidSetting, match="without images"):
        uploaded(tmp_path, lambda _: None)
    assert list(tmp_path.iterdir()) == []


def test_an_upload_that_ended_takes_nothing_more(tmp_path: Path) -> None:
    writer = UploadWriter(tmp_path, LIMITS)
    with pytest.raises(InvalidSetting):
        writer.add_features([[1.0], [1.0, 2.0]])
    with pytest.raises(NotReady, match="has ended"):
        writer.add_image("a", png())
    assert list(tmp_path.iterdir()) == []


def test_an_upload_is_moved_to_its_job_or_discarded(tmp_path: Path) -> None:
    upload = uploaded(tmp_path, lambda writer: writer.add_image("a", png()))
    upload.move_to(tmp_path / "jobs" / "job-1" / "upload.parquet")
    assert [folder.stat().st_mode & 0o777 for folder in (tmp_path / "jobs", tmp_path / "jobs" / "job-1")] == [0o700] * 2
    upload.discard()
    assert [path.name for path in tmp_path.rglob("*.parquet")] == ["upload.parquet"]


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: pq.ParquetWriter, table: pa.Table) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq.ParquetWriter, "write_table", full)
    with pytest.raises(StorageFull, match="the disk is full"):
        uploaded(tmp_path, lambda writer: writer.add_image("a", png()))
    assert list(tmp_path.iterdir()) == []


def test_the_pixels_of_all_images_together_are_bounded_by_their_headers(tmp_path: Path) -> None:
    """A small archive of large black images: refused at the first image beyond the bound, and nothing is kept."""
    limits = LimitsTable(max_pixels=64_000_000, max_job_pixels=100_000)
    black = png(0, side=100, mode="L")
    with UploadWriter(tmp_path, limits) as writer:
        writer.add_zip(zipped({f"{number}.png": black for number in range(10)}))
        assert writer.finish().count == 10
    writer = UploadWriter(tmp_path / "second", limits)
    with pytest.raises(TooLarge, match="the first 11 images have 110000 pixels together, more than the 100000"):
        writer.add_zip(zipped({f"{number}.png": black for number in range(20)}))
    assert list((tmp_path / "second").iterdir()) == []
