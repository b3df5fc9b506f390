"""Image sources: a stable list, right colors whatever the file's mode, and nothing dropped silently."""

from __future__ import annotations

import gzip
import io
import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from feature_store.decode import Skipped, decode_image
from feature_store.sources import open_source
from labeler.errors import BadData, InvalidSetting, UnreadableImage


def encode(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return buffer.getvalue()


def solid(colour: tuple[int, int, int], size: tuple[int, int] = (4, 3)) -> bytes:
    return encode(Image.new("RGB", size, colour))


def folder_of_classes(root: Path) -> Path:
    for place, name in enumerate(["owl", "cat", "dog"]):
        (root / name).mkdir(parents=True)
        for number in range(2):
            (root / name / f"{number}.png").write_bytes(solid((place * 10, number * 10, 0)))
    return root


def test_a_folder_of_classes_is_listed_in_sorted_order(tmp_path: Path) -> None:
    source = open_source(folder_of_classes(tmp_path / "images"))
    assert source.label_names == ("cat", "dog", "owl")
    assert list(source.names) == [f"{name}/{n}.png" for name in ("cat", "dog", "owl") for n in range(2)]
    assert list(source.labels) == [0, 0, 1, 1, 2, 2]
    assert source.read(3).getpixel((0, 0)) == (20, 10, 0)


def test_a_flat_folder_has_no_labels(tmp_path: Path) -> None:
    (tmp_path / "b.png").write_bytes(solid((1, 2, 3)))
    (tmp_path / "a.png").write_bytes(solid((4, 5, 6)))
    (tmp_path / ".hidden").write_bytes(b"")
    source = open_source(tmp_path)
    assert (list(source.names), list(source.labels), source.label_names) == (["a.png", "b.png"], [None, None], ())


def test_a_file_beside_class_folders_is_reported(tmp_path: Path) -> None:
    root = folder_of_classes(tmp_path / "images")
    shutil.copy(root / "cat" / "0.png", root / "stray.png")
    assert open_source(root).left_out == (Skipped("stray.png", "lies beside the class folders, in none of them"),)


def test_what_is_certainly_no_image_is_passed_over_and_a_damaged_image_is_not(tmp_path: Path) -> None:
    root = folder_of_classes(tmp_path / "images")
    no_images = {
        "cat/.DS_Store": b"\0\0\0\1Bud1",
        "cat/Thumbs.db": b"\xd0\xcf\x11\xe0\0",
        "dog/notes.txt": b"three dogs\r\n",
        "owl/LIESMICH": "eine Eule, zwei K\u00e4uze\n".encode("cp1252"),
        "owl/windows.ini": "[owl]\r\n".encode("utf-16"),
        "readme.md": b"",
    }
    perhaps = {
        "dog/cut.png": b"\x89PNG\r\n",
        "dog/empty.jpg": b"",
        "owl/mislabeled.jpeg": b"a text",
        "owl/scan": b"\0\1",
    }
    for name, data in (no_images | perhaps).items():
        (root / name).write_bytes(data)
    source = open_source(root)
    assert set(source.passed_over) == no_images.keys()
    assert set(source.names) - {f"{name}/{n}.png" for name in ("cat", "dog", "owl") for n in range(2)} == perhaps.keys()
    assert source.left_out == ()


def test_an_empty_folder_and_a_wrong_path_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadData, match="holds no image"):
        open_source(tmp_path)
    with pytest.raises(InvalidSetting, match="check the path"):
        open_source(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"this is text", "not an image"),
        (b"", "not an image"),
        (encode(Image.effect_noise((64, 64), 50))[:900], "damaged or truncated"),
        (encode(Image.effect_noise((64, 64), 50), "JPEG")[:900], "damaged or truncated"),
        (encode(Image.new("1", (3000, 3000))), "too large: 3000 x 3000"),
        (encode(Image.new("F", (2, 2)), "TIFF"), "floating-point"),
    ],
)
def test_what_is_no_usable_image_says_why(data: bytes, reason: str) -> None:
    with pytest.raises(UnreadableImage, match=reason):
        decode_image(data, max_pixels=8_000_000)


def test_an_image_that_claims_to_be_gigantic_is_refused_before_decoding() -> None:
    data = bytearray(solid((0, 0, 0)))
    data[16:24] = struct.pack(">II", 60_000, 60_000)
    with pytest.raises(UnreadableImage):
        decode_image(bytes(data))


def test_sixteen_bit_grey_is_scaled_and_not_clipped() -> None:
    ramp = np.array([[0, 257, 32_896, 65_535]], dtype=np.uint16)
    pixels = np.asarray(decode_image(encode(Image.fromarray(ramp))))
    assert pixels[0, :, 0].tolist() == [0, 1, 128, 255]
    assert pixels.shape == (1, 4, 3)


def test_palettes_are_looked_up_and_transparency_lies_on_white() -> None:
    palette = Image.new("RGB", (2, 2), (200, 10, 30)).quantize(4)
    assert decode_image(encode(palette)).getpixel((0, 0)) == (200, 10, 30)
    assert decode_image(encode(palette, transparency=0)).getpixel((0, 0)) == (255, 255, 255)
    assert decode_image(encode(Image.new("RGBA", (1, 1), (0, 0, 0, 51)))).getpixel((0, 0)) == (204, 204, 204)
    assert decode_image(encode(Image.new("LA", (1, 1), (0, 0)))).getpixel((0, 0)) == (255, 255, 255)


def test_the_orientation_in_exif_is_applied() -> None:
    image = Image.new("RGB", (4, 2))
    exif = image.getexif()
    exif[0x0112] = 6
    assert decode_image(encode(image, "JPEG", exif=exif)).size == (2, 4)


@pytest.mark.parametrize("nested", [True, False])
def test_parquet_images_are_read_across_row_groups(tmp_path: Path, nested: bool) -> None:
    cells: list[Any] = [solid((row, 0, 0)) for row in range(5)]
    if nested:
        cells = [{"bytes": cell, "path": None} for cell in cells]
    table = pa.table({"image": cells, "label": ["b", "a", None, "b", "a"], "id": list("vwxyz")})
    pq.write_table(table, tmp_path / "set.parquet", row_group_size=2)
    source = open_source(tmp_path / "set.parquet")
    assert list(source.names) == list("vwxyz")
    assert (list(source.labels), source.label_names) == ([1, 0, None, 1, 0], ("a", "b"))
    assert [source.read(row).getpixel((0, 0)) for row in (4, 0, 3)] == [(4, 0, 0), (0, 0, 0), (3, 0, 0)]


def test_parquet_label_numbers_take_their_names_from_the_metadata(tmp_path: Path) -> None:
    names = {"info": {"features": {"label": {"names": ["cat", "dog"]}}}}
    table = pa.table({"image": [solid((0, 0, 0))] * 2, "label": [1, 1]})
    pq.write_table(table, tmp_path / "plain.parquet")
    pq.write_table(table.replace_schema_metadata({"huggingface": json.dumps(names)}), tmp_path / "named.parquet")
    assert open_source(tmp_path / "plain.parquet").label_names == ("1",)
    named = open_source(tmp_path / "named.parquet")
    assert (named.label_names, list(named.labels)) == (("cat", "dog"), [1, 1])


def test_parquet_without_images_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"picture": [b"x"]}), tmp_path / "set.parquet")
    with pytest.raises(BadData, match="needs a column image"):
        open_source(tmp_path / "set.parquet")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(BadData, match="no Parquet file"):
        open_source(tmp_path / "bad.parquet")


def test_a_parquet_row_without_bytes_is_unreadable(tmp_path: Path) -> None:
    pq.write_table(pa.table({"image": pa.array([None], pa.binary())}), tmp_path / "set.parquet")
    with pytest.raises(UnreadableImage, match="no bytes"):
        open_source(tmp_path / "set.parquet").read(0)


def test_a_torchvision_set_is_read_by_name(tmp_path: Path) -> None:
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    pixels = np.arange(3 * 28 * 28, dtype=np.uint32).astype(np.uint8)
    for part in ("train", "t10k"):
        (raw / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">4I", 2051, 3, 28, 28) + pixels.tobytes())
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 2049, 3) + bytes([7, 0, 3]))
    source = open_source(f"torchvision:MNIST?root={tmp_path}&split=test")
    assert list(source.names) == ["MNIST/test/0", "MNIST/test/1", "MNIST/test/2"]
    assert list(source.labels) == [7, 0, 3]
    assert source.read(0).mode == "RGB"
    assert np.array_equal(np.asarray(source.read(1))[..., 0].ravel(), pixels[784:1568])


def test_a_torchvision_set_that_is_not_there_is_not_fetched_unasked(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="add download=1"):
        open_source(f"torchvision:MNIST?root={tmp_path}")
    with pytest.raises(InvalidSetting, match="no data set"):
        open_source(f"torchvision:NoSuchSet?root={tmp_path}")
    with pytest.raises(InvalidSetting, match="unknown here: spilt"):
        open_source(f"torchvision:MNIST?root={tmp_path}&spilt=test")


def test_the_original_mnist_files_are_read(data_root: Path, tmp_path: Path) -> None:
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for packed in sorted((data_root / "mnist").glob("t10k*.gz")):
        with gzip.open(packed) as source, (raw / packed.stem).open("wb") as target:
            shutil.copyfileobj(source, target)
    for name in ("images-idx3", "labels-idx1"):
        shutil.copyfile(raw / f"t10k-{name}-ubyte", raw / f"train-{name}-ubyte")
    mnist = open_source(f"torchvision:MNIST?root={tmp_path}&split=test")
    assert len(mnist.names) == 10_000
    assert list(mnist.labels)[:5] == [7, 2, 1, 0, 4]


def test_warnings_of_decoders_go_to_the_log_once_and_quote_no_image() -> None:
    """12.8 MB of them went to the standard error beside the log: each image had words of its own."""
    code = (
        "import io, logging, warnings\n"
        "from PIL import Image\n"
        "from feature_store.decode import decode_image\n"
        "logging.basicConfig(format='%(message)s %(kind)s %(where)s')\n"
        "data = io.BytesIO()\n"
        "Image.new('P', (4, 4)).save(data, 'PNG', transparency=bytes([0, 9]))\n"
        "Image.open(data).convert('RGB')\n"  # Pillow warns of transparency expressed in bytes
        "for number in range(300):\n"
        "    warnings.warn_explicit(f'secret {number}', UserWarning, '/x/PIL/TiffImagePlugin.py', 7, 'PIL.Tiff')\n"
        "    decode_image(data.getvalue())\n"
        "warnings.warn('of somebody else')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "a decoder warned of an image UserWarning PIL/TiffImagePlugin.py:7" in done.stderr
    assert "of somebody else" in done.stderr
    assert "secret" not in done.stderr
    assert len(done.stderr) < 1000
