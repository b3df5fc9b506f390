"""One rule says what an image file is: the same files go through every door, and the same leftovers stay out of it."""

from __future__ import annotations

import io
import os
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import unicodedata
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from api.client import image_parts, not_sent
from api.coordinator.config import LimitsTable
from api.coordinator.uploads import Upload, UploadWriter
from feature_store.image_files import ENDINGS, FORMATS, Skipped, in_words, list_images
from feature_store.sources import FolderSource, ParquetSource, open_source
from labeler.errors import BadData, InvalidSetting, TooLarge, UnreadableFile, UnreadableImage
from tests.feature_store.test_dicom import RAMP, dicom, heic
from workers.embedder.image_count import count_images
from workers.embedder.shards import embed_queries

ROOT = Path(__file__).parents[2]
LIMITS = LimitsTable(max_images=500, max_upload_bytes=10 * 2**20, max_image_bytes=2**20, max_pixels=10_000)


def encoded(kind: str, seed: int = 0) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


def of_every_format() -> dict[str, bytes]:
    """One file for each ending of each format, some of them in capitals, and one of each format without an ending."""
    found = {}
    for number, one in enumerate(FORMATS):
        if one.extra == "dicom":
            data = dicom(RAMP)
        elif one.extra == "heic":
            data = heic(Image.new("RGB", (16, 16), (number, 20, 30)))
        else:
            data = encoded(one.pillow, number)
        for ending in one.endings:
            found[f"{one.pillow or one.name}-{ending[1:]}{ending.upper() if len(found) % 2 else ending}"] = data
        found[f"no ending {number}"] = data
    return found


LEFT = {
    "@eaDir/1.png/THUMB.jpg": "@eaDir/",
    "__MACOSX/._1.png": "__MACOSX/",
    ".DS_Store": ".DS_Store",
    "._1.png": "._1.png",
    "Thumbs.db": "Thumbs.db",
    "Desktop.ini": "Desktop.ini",
    ".ipynb_checkpoints/1-checkpoint.png": ".ipynb_checkpoints/",
    "$RECYCLE.BIN/S-1-5/1.png": "$RECYCLE.BIN/",
    "System Volume Information/1.png": "System Volume Information/",
    ".git/objects/1.png": ".git/",
    "__pycache__/1.png": "__pycache__/",
    "lost+found/1.png": "lost+found/",
    ".Trashes/501/1.png": ".Trashes/",
    ".thumbnails/normal/1.png": ".thumbnails/",
    "#recycle/1.png": "#recycle/",
    "@Recycle/1.png": "@Recycle/",
    "Icon\r": "Icon\r",
    "1.png:Zone.Identifier": "1.png:Zone.Identifier",
    "~$scan.png": "~$scan.png",
    "DICOMDIR": "DICOMDIR",
}
"""Paths that systems leave, each with an image in it, and how the first part that tells is named."""


def written(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def zipped(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def tabled(path: Path, files: dict[str, bytes]) -> Path:
    pq.write_table(pa.table({"id": list(files), "image": list(files.values())}), path)
    return path


def uploaded(folder: Path, fill: Callable[[UploadWriter], None]) -> tuple[Upload, list[str]]:
    with UploadWriter(folder, LIMITS) as writer:
        fill(writer)
        upload = writer.finish()
    return upload, pq.read_table(upload.path)["name"].to_pylist()


def through_the_service(folder: Path, files: dict[str, bytes]) -> Iterator[tuple[str, list[str], tuple[Skipped, ...]]]:
    """Yield the door, the names that came through it, and what was passed over."""

    def form(writer: UploadWriter) -> None:
        for name, data in files.items():
            writer.add_image(name, data)

    with (
        zipped(folder / "all.zip", files).open("rb") as archive,
        tabled(folder / "all.parquet", files).open("rb") as table,
    ):
        for door, fill in (
            ("form", form),
            ("zip", lambda writer: writer.add_zip(archive)),
            ("parquet", lambda writer: writer.add_parquet(table)),
        ):
            upload, names = uploaded(folder / "incoming", fill)
            yield door, names, upload.passed_over


def test_a_file_of_every_format_goes_through_every_door(tmp_path: Path) -> None:
    files = of_every_format()
    folder = written(tmp_path / "images", files)
    source = FolderSource(folder)
    assert (set(source.names), source.left_out, source.passed_over) == (set(files), (), ())
    assert all(source.read(number).size[0] >= 3 for number in range(len(files)))
    assert {part.file_name for part in image_parts(folder, ())} == set(files)
    for door, names, passed_over in through_the_service(tmp_path, files):
        assert (set(names), passed_over) == (set(files), ()), door
    for path in (folder, tmp_path / "all.zip", tmp_path / "all.parquet"):
        assert count_images(path) == len(files)
    assert set(ParquetSource(tmp_path / "all.parquet").names) == set(files)


@pytest.mark.process
def test_the_documents_name_each_format_and_the_client_needs_no_decoder() -> None:
    text = (ROOT / "docs" / "images.md").read_text()
    assert [one.name for one in FORMATS if one.pillow != "MPO" and one.name not in text] == []
    code = "import sys, api.client\nprint(*{'PIL', 'torch', 'pyarrow', 'pydicom'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == []


def test_what_systems_leave_comes_through_no_door_and_is_named_at_each(tmp_path: Path) -> None:
    image = encoded("PNG")
    good = {"cat/1.png": image, "dog/1.png": encoded("PNG", 1)}
    below = {f"cat/{name}": image for name in LEFT} | {f"dog/P-7/{name}": image for name in LEFT}
    files = good | dict.fromkeys(LEFT, image) | below
    expected = {*LEFT.values(), *(f"{at}/{name}" for at in ("cat", "dog/P-7") for name in LEFT.values())}
    folder = written(tmp_path / "images", files)
    source = FolderSource(folder)
    assert (source.label_names, set(source.names), source.left_out) == (("cat", "dog"), set(good), ())
    assert {one.source for one in source.passed_over} == expected
    assert {one.source for one in not_sent(folder)} == expected
    assert {part.file_name for part in image_parts(folder, ())} == set(good)
    for door, names, passed_over in through_the_service(tmp_path, files):
        assert (set(names), {one.source for one in passed_over}) == (set(good), expected), door
    assert {one.source for one in not_sent(tmp_path / "all.zip")} == expected
    table = tabled(tmp_path / "few.parquet", good | {"@eaDir/1.png/THUMB.jpg": image})
    read = ParquetSource(table)
    assert (read.names, [one.source for one in read.passed_over]) == (list(good), ["@eaDir/"])
    assert (read.file(1), read.column("id"), count_images(table)) == (good["dog/1.png"], list(good), 2)
    assert count_images(folder) == count_images(tmp_path / "all.zip") == 2


def test_a_flat_folder_stays_flat_beside_a_folder_that_a_system_made(tmp_path: Path) -> None:
    files = {"a.png": encoded("PNG"), "b.png": encoded("PNG", 1), "@eaDir/a.png/THUMB.jpg": encoded("JPEG")}
    source = FolderSource(written(tmp_path / "images", files))
    assert (source.names, source.label_names, source.left_out) == (["a.png", "b.png"], (), ())
    (tmp_path / "images" / "a.png").unlink()
    (tmp_path / "images" / "b.png").unlink()
    with pytest.raises(BadData, match=r"holds no image: it holds @eaDir/ \(a Synology disk station keeps it\)"):
        FolderSource(tmp_path / "images")


def test_a_text_is_passed_over_and_what_may_be_an_image_is_not(tmp_path: Path) -> None:
    files = {"a.png": encoded("PNG"), "labels.csv": b"file,label\n", "README": "Käuze".encode("cp1252")}
    with zipped(tmp_path / "some.zip", files).open("rb") as archive:
        upload, names = uploaded(tmp_path, lambda writer: writer.add_zip(archive))
    assert (names, {one.source for one in upload.passed_over}) == (["a.png"], {"labels.csv", "README"})
    others = {"report.pdf": b"%PDF\0", "photo.NEF": b"II*\0", "drawing.psd": b"8BPS\0\1"}
    folder = written(tmp_path / "images", files | others)
    assert {one.source for one in FolderSource(folder).left_out} == set(others)
    assert {one.source for one in not_sent(folder)} == {*others, "labels.csv", "README"}
    with (
        zipped(tmp_path / "more.zip", files | others).open("rb") as archive,
        pytest.raises(UnreadableImage, match=r"3 of the images.*'photo.NEF' \(a camera's raw file"),
    ):
        uploaded(tmp_path, lambda writer: writer.add_zip(archive))
    with pytest.raises(InvalidSetting, match=r"without images.*it came with labels.csv \(a text\)"):
        uploaded(tmp_path, lambda writer: writer.add_image("labels.csv", b"file,label\n"))


def test_images_that_are_embedded_to_be_asked_about_pass_over_the_same_and_say_so(tmp_path: Path) -> None:
    files = {f"{number}.JFIF": encoded("JPEG", number) for number in range(3)}
    left = {"@eaDir/0.JFIF/THUMB.jpg": encoded("JPEG"), "notes.txt": b"three"}
    said: list[str] = []
    folder = written(tmp_path / "images", files | left)
    shard = embed_queries(folder, "pixels", tmp_path / "queries", classes=("cat", "dog"), warn=said.append)
    assert sorted(shard.sources) == sorted(files)
    listed = "@eaDir/ (a Synology disk station keeps it), notes.txt (a text)"
    assert said == [f"2 files are no images, and are not asked about: {listed}"]


def test_a_copy_or_download_that_has_not_ended_comes_through_no_door(tmp_path: Path) -> None:
    """Its first bytes are those of an image. Whole by chance, it was a record; cut off, it stopped an upload."""
    good = {"cat/1.png": encoded("PNG"), "dog.part/2.png": encoded("PNG", 1)}
    names = ("3.png.part", "4.jpg.CRDOWNLOAD", "5.png.tmp", "6.png.partial", "7.png.filepart", "8.png.download")
    partial = {f"cat/{name}": encoded("PNG", 2)[: 40 * (1 + number)] for number, name in enumerate(names)}
    source = FolderSource(written(tmp_path / "images", good | partial))
    assert (source.label_names, set(source.names)) == (("cat", "dog.part"), set(good))
    assert {one.source: one.reason for one in source.passed_over} == dict.fromkeys(
        partial, "a copy or download that has not ended"
    )
    assert {one.source for one in not_sent(tmp_path / "images")} == set(partial)
    for door, taken, passed_over in through_the_service(tmp_path, good | partial):
        assert (set(taken), {one.source for one in passed_over}) == (set(good), set(partial)), door
    assert count_images(tmp_path / "all.zip") == count_images(tmp_path / "all.parquet") == 2
    assert set(ParquetSource(tmp_path / "all.parquet").names) == set(good)


def test_a_large_text_in_a_zip_is_passed_over_as_one_in_a_folder(tmp_path: Path) -> None:
    files = {"1.png": encoded("PNG"), "all.csv": b"file,label\n" * 200_000, "large.png": bytes(2**20 + 1)}
    with zipped(tmp_path / "a.zip", dict(list(files.items())[:2])).open("rb") as archive:
        upload, names = uploaded(tmp_path / "incoming", lambda writer: writer.add_zip(archive))
    assert (names, [one.source for one in upload.passed_over]) == (["1.png"], ["all.csv"])
    with (
        zipped(tmp_path / "b.zip", files).open("rb") as archive,
        pytest.raises(TooLarge, match=r"'large\.png' in the zip has more than"),
    ):
        uploaded(tmp_path / "incoming", lambda writer: writer.add_zip(archive))


def test_a_file_that_is_no_image_is_named_for_what_it_is_at_every_door(tmp_path: Path) -> None:
    files = {"report.pdf": b"%PDF\0", "more.zip": zipped(tmp_path / "in.zip", {"1.png": encoded("PNG")}).read_bytes()}
    files["notes.docx"] = zipped(tmp_path / "notes.docx", {"[Content_Types].xml": b"<Types/>"}).read_bytes()
    with tarfile.open(tmp_path / "few.tar", "w") as archive:
        archive.add(tmp_path / "in.zip", "1.png")
    files["few.tar"] = (tmp_path / "few.tar").read_bytes()
    said = {"report.pdf": "a PDF", "more.zip": "an archive; unpack it", "few.tar": "an archive; unpack it"}
    said["notes.docx"] = "an office document"
    source = FolderSource(written(tmp_path / "images", {"1.png": encoded("PNG")} | files))
    assert {one.source: one.reason.removesuffix("; save its pictures as files") for one in source.left_out} == said
    with (
        zipped(tmp_path / "a.zip", files).open("rb") as archive,
        pytest.raises(UnreadableImage, match=r"4 of the images.*a PDF.*an archive; unpack it.*an archive; unpack it"),
    ):
        uploaded(tmp_path / "incoming", lambda writer: writer.add_zip(archive))
    for name, words in (
        ("few.tar", "unpack it"),
        ("in.zip", "unpack it"),
        ("images/1.png", "give the folder it is in"),
    ):
        with pytest.raises(InvalidSetting, match=words):
            open_source(tmp_path / name)


@pytest.mark.parametrize(
    "kind",
    [
        pa.large_binary(),
        pa.binary_view(),
        pa.dictionary(pa.int32(), pa.binary()),
        pa.struct([("bytes", pa.large_binary()), ("path", pa.string())]),
    ],
)
def test_a_table_of_images_is_read_in_every_form_of_bytes_and_text(tmp_path: Path, kind: pa.DataType) -> None:
    data = [encoded("PNG"), encoded("PNG", 1), encoded("PNG", 2)]
    cells: list[object] = [{"bytes": one, "path": None} for one in data] if pa.types.is_struct(kind) else [*data]
    image = pa.array(data).dictionary_encode() if pa.types.is_dictionary(kind) else pa.array(cells, kind)
    table = {"image": image, "id": pa.array(["a", "b", "c"], pa.string_view()), "label": pa.array([1.0, None, 0.0])}
    try:
        pq.write_table(pa.table(table), tmp_path / "images.PARQUET")
    except pa.ArrowNotImplementedError:
        pytest.skip("this version of pyarrow writes no views")
    source = open_source(tmp_path / "images.PARQUET")
    assert (list(source.names), source.label_names, list(source.labels)) == (["a", "b", "c"], ("0", "1"), [1, None, 0])
    assert [source.file(row) for row in range(3)] == data
    with (tmp_path / "images.PARQUET").open("rb") as file:
        assert uploaded(tmp_path, lambda writer: writer.add_parquet(file))[1] == ["a", "b", "c"]


def test_a_row_that_came_from_a_leftover_is_passed_over_by_the_path_in_its_image(tmp_path: Path) -> None:
    paths = ["cat/1.png", "@eaDir/1.png/THUMB.jpg", None, "cat/2.png.part"]
    cells = [{"bytes": encoded("PNG", row), "path": path} for row, path in enumerate(paths)]
    pq.write_table(pa.table({"image": cells}), tmp_path / "hf.parquet")
    source = ParquetSource(tmp_path / "hf.parquet")
    left = ["@eaDir/", "cat/2.png.part"]
    assert (source.names, [one.source for one in source.passed_over]) == (["hf.parquet#0", "hf.parquet#2"], left)
    assert source.file(1) == cells[2]["bytes"]
    with (tmp_path / "hf.parquet").open("rb") as file:
        upload, names = uploaded(tmp_path, lambda writer: writer.add_parquet(file))
    assert (names, [one.source for one in upload.passed_over]) == (["upload.parquet#0", "upload.parquet#2"], left)
    assert count_images(tmp_path / "hf.parquet") == 2


@pytest.mark.parametrize("name", ["a\nb.png", "tab\t.png", "back\\slash.png"])
def test_a_name_that_could_not_come_back_is_refused_before_anything_is_sent(tmp_path: Path, name: str) -> None:
    """Its label came back under another name, as `a%0Ab.png` or `back/slash.png`."""
    folder = written(tmp_path / "images", {name: encoded("PNG"), "Screenshot 3.04\u202fPM.png": encoded("PNG", 1)})
    with pytest.raises(InvalidSetting, match="rename it"):
        image_parts(folder, ())
    assert [part.file_name for part in image_parts(folder, (name,))] == ["Screenshot 3.04\u202fPM.png"]


def test_what_was_not_taken_is_named_up_to_a_bound() -> None:
    files = [Skipped(f"{number}.txt", "a text") for number in range(30)]
    assert in_words(files).endswith("9.txt (a text) and 20 more")


# Links, and what cannot be read.


def test_a_class_folder_that_is_a_link_is_followed_once(tmp_path: Path) -> None:
    images = {f"{number}.png": encoded("PNG", number) for number in range(3)}
    root = written(tmp_path / "images", {f"cat/{name}": data for name, data in images.items()})
    elsewhere = written(tmp_path / "disk" / "dogs", images | {f"deep/{name}": data for name, data in images.items()})
    (root / "dog").symlink_to(elsewhere)
    (root / "cat" / "more").symlink_to(written(tmp_path / "disk" / "more", images))
    (elsewhere / "up").symlink_to(elsewhere.parent)  # leads to itself, and to what `cat/more` leads to
    (root / "loop").symlink_to(root)
    (root / "again").symlink_to("cat")
    source = FolderSource(root)
    assert source.label_names == ("cat", "dog")
    assert len(source.names) == len(set(source.names)) == 12
    assert [source.label_names[label or 0] for label in source.labels] == ["cat"] * 6 + ["dog"] * 6
    assert source.read(source.names.index("dog/deep/0.png")).size == (16, 16)
    assert {(one.source, one.reason) for one in source.passed_over} == {
        ("again/", "a link to a folder that is listed already (cat)"),
        ("loop/", "a link to a folder that is listed already (.)"),
        ("dog/up/dogs/", "a link to a folder that is listed already (dog)"),
        ("dog/up/more/", "a link to a folder that is listed already (cat/more)"),
    }
    assert count_images(root) == 12


def test_a_link_to_nothing_is_an_error_with_its_path(tmp_path: Path) -> None:
    root = written(tmp_path / "images", {"cat/1.png": encoded("PNG")})
    (root / "dog").symlink_to(tmp_path / "not mounted")
    (root / "cat" / "2.png").symlink_to(tmp_path / "gone.png")
    (root / "cat" / "turn.png").symlink_to("turn.png")
    for door in (FolderSource, list_images, not_sent, count_images):
        with pytest.raises(UnreadableFile) as refused:
            door(root)
        said = str(refused.value)
        assert "(3 of its folders and links)" in said
        for words in ("dog (a link to nothing)", "cat/2.png (a link to nothing)", "cat/turn.png (Too many levels"):
            assert words in said


@contextmanager
def somebody() -> Iterator[None]:
    """Become a user who is not allowed everything."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


def test_a_folder_that_nobody_may_read_is_an_error_with_its_path() -> None:
    root = Path(tempfile.mkdtemp())  # not in a folder of pytest, which belongs to one user alone
    try:
        written(root, {"cat/1.png": encoded("PNG"), "dog/P-7/1.png": encoded("PNG", 1), "owl/1.png": b""})
        for folder in (root, root / "cat", root / "dog"):
            folder.chmod(0o755)
        (root / "dog" / "P-7").chmod(0)
        (root / "owl").chmod(0o311)
        with somebody(), pytest.raises(UnreadableFile) as refused:
            FolderSource(root)
        assert "dog/P-7 (Permission denied)" in str(refused.value)
        assert "owl (Permission denied)" in str(refused.value)
    finally:
        for folder in (root / "dog" / "P-7", root / "owl"):
            folder.chmod(0o755)
        shutil.rmtree(root)


# Names in zips, as programs of Windows, macOS and Linux write them.


def zip_of(names: list[tuple[bytes, int, bytes]], *, system: int = 0) -> bytes:
    """Write a zip byte by byte: a stored image under each name, with these flags and this extra field."""
    local, central = b"", b""
    for number, (name, flags, extra) in enumerate(names):
        data = b"" if name.endswith((b"/", b"\\")) else encoded("PNG", number)
        common = struct.pack(
            "<HHHHHIIIHH", 20, flags, 0, 0, 33, zlib.crc32(data), len(data), len(data), len(name), len(extra)
        )
        made_by = struct.pack("<BB", 20, system)
        central += b"PK\1\2" + made_by + common + struct.pack("<HHHII", 0, 0, 0, 0x20, len(local)) + name + extra
        local += b"PK\3\4" + common + name + extra + data
    end = struct.pack("<HHHHIIH", 0, 0, len(names), len(names), len(central), len(local), 0)
    return local + central + b"PK\5\6" + end


def unicode_path(raw: bytes, name: str) -> bytes:
    field = b"\1" + struct.pack("<I", zlib.crc32(raw)) + name.encode()
    return struct.pack("<HH", 0x7075, len(field)) + field


WRITTEN = ["für/Röntgen.png", "mélanome/bénin.png", "Straße 7/señor.png", "naïve_été.png"]


@pytest.mark.parametrize("coding", ["cp437", "cp850", "cp1252", "utf-8"])
@pytest.mark.parametrize("separator", ["/", "\\"])
def test_names_of_a_zip_of_windows_are_as_people_wrote_them(tmp_path: Path, coding: str, separator: str) -> None:
    names = [(name.replace("/", separator).encode(coding), 0, b"") for name in WRITTEN]
    folders = [(f"für{separator}".encode(coding), 0, b""), (f"leer{separator}".encode(coding), 0, b"")]
    left = [(f"für{separator}Thumbs.db".encode(coding), 0, b""), (b"desktop.ini", 0, b"")]
    data = zip_of([*folders, *names, *left])
    upload, found = uploaded(tmp_path, lambda writer: writer.add_zip(io.BytesIO(data)))
    assert found == WRITTEN
    assert [one.source for one in upload.passed_over] == ["für/Thumbs.db", "desktop.ini"]
    (tmp_path / "all.zip").write_bytes(data)
    assert count_images(tmp_path / "all.zip") == len(WRITTEN)


@pytest.mark.parametrize(
    ("coding", "name"),
    [
        ("cp437", "ÄÖÜ/MÜLLER_Ödem.png"),
        ("cp850", "São Paulo/Blåbær.png"),
        ("cp1252", "œuvre/Ångström.png"),
        ("cp1252", "é.png"),
        ("cp866", "Снимок 1/опухоль.png"),
        ("cp1251", "Снимок 1/опухоль.png"),
        ("cp932", "新しいフォルダー/写真.png"),
        ("gbk", "新建文件夹/肿瘤.png"),
    ],
)
def test_one_name_tells_its_code_page(tmp_path: Path, coding: str, name: str) -> None:
    data = zip_of([(name.encode(coding), 0, b"")])
    assert uploaded(tmp_path, lambda writer: writer.add_zip(io.BytesIO(data)))[1] == [name]


def test_names_of_a_zip_of_macos_are_as_people_wrote_them(tmp_path: Path) -> None:
    written_names = [unicodedata.normalize("NFD", name).encode() for name in WRITTEN]
    left = [b"__MACOSX/", b"__MACOSX/f\xc3\xbcr/._1.png", b".DS_Store", b"Icon\r"]
    data = zip_of([(name, 0, b"") for name in [*written_names, *left]], system=3)
    upload, found = uploaded(tmp_path, lambda writer: writer.add_zip(io.BytesIO(data)))
    assert [unicodedata.normalize("NFC", name) for name in found] == WRITTEN
    assert {one.source for one in upload.passed_over} == {"__MACOSX/", ".DS_Store", "Icon\r"}


def test_a_zip_that_says_its_names_in_unicode_is_believed(tmp_path: Path) -> None:
    said, meant = b"?.png", "猫.png"
    names = [("für.png".encode(), 0x800, b""), (said, 0, b"\x55\x54\1\0\0" + unicode_path(said, meant))]
    stale = (b"kept.png", 0, unicode_path(b"another.png", "wrong.png"))
    data = zip_of([*names, stale])
    assert uploaded(tmp_path, lambda writer: writer.add_zip(io.BytesIO(data)))[1] == ["für.png", meant, "kept.png"]


def test_endings_are_lower_case_and_belong_to_one_format() -> None:
    assert sum(len(one.endings) for one in FORMATS) == len(ENDINGS)
    assert all(one == one.lower() and one.startswith(".") for one in ENDINGS)
