"""Image sources and decoders: a stable list, right colors whatever the file's mode, and nothing dropped silently."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from api.client_http import image_parts
from feature_store.backbones import Transform, load_backbone, parse_spec
from feature_store.backbones.backbone import decode_for, decode_reduced, least_side, prepare_image, region
from feature_store.decode import Skipped, decode_image, header_pixels
from feature_store.embedding import embed_source
from feature_store.shard import Shard
from feature_store.sources import AttributeSource, ImageSource, PersonColumn, open_source
from labeler.errors import BadData, InvalidSetting, LabelerError, UnreadableImage
from workers.embedder.shards import lines_of
from workers.run.task_file import read_task_file


def encode(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return buffer.getvalue()


def solid(colour: tuple[int, int, int], size: tuple[int, int] = (4, 3)) -> bytes:
    return encode(Image.new("RGB", size, colour), "PNG")


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


def test_every_public_image_is_asked_about_whatever_folder_it_is_in(tmp_path: Path) -> None:
    """One folder among many images, and those images were not labeled; `labeler submit` sent them all."""
    for name in ("a.png", "sub/b.png", "z.png"):
        (tmp_path / "scans" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "scans" / name).write_bytes(solid((0, 0, len(name))))
    report = embed_source(tmp_path / "scans", load_backbone("pixels:2"), tmp_path / "out", public=True)
    shard = Shard.open(tmp_path / "out")
    assert (shard.sources, report.skipped) == (["a.png", "sub/b.png", "z.png"], ())
    assert shard.labels.tolist() == [-1, 0, -1]
    assert [part.file_name for part in image_parts(tmp_path / "scans", ())] == shard.sources


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
        "owl/begun.dcm": b"\0\1",
    }
    others = {"owl/scan": b"\0\1", "dog/report.pdf": b"%PDF-1.7\n\0", "cat/camera.NEF": b"MM\0*"}
    for name, data in (no_images | perhaps | others).items():
        (root / name).write_bytes(data)
    source = open_source(root)
    assert {one.source for one in source.passed_over} == no_images.keys()
    assert set(source.names) - {f"{name}/{n}.png" for name in ("cat", "dog", "owl") for n in range(2)} == perhaps.keys()
    assert {one.source for one in source.left_out} == others.keys()


@pytest.mark.parametrize("attributes", [False, True])
def test_what_is_no_file_is_listed_and_a_link_to_a_file_is_the_file(tmp_path: Path, attributes: bool) -> None:
    root = folder_of_classes(tmp_path / "images")
    os.mkfifo(root / "cat" / "pipe.png")
    (root / "dog" / "device.png").symlink_to("/dev/zero")
    (root / "owl" / ".gone").symlink_to("nowhere")
    (tmp_path / "elsewhere.png").write_bytes(solid((9, 9, 9)))
    (root / "owl" / "elsewhere.png").symlink_to(tmp_path / "elsewhere.png")
    os.mkfifo(root / "stray")
    source = open_source(root)
    if attributes:
        (tmp_path / "table.csv").write_text("file,tame\n" + "".join(f"{name},1\n" for name in source.names))
        source = AttributeSource(root, tmp_path / "table.csv")
    assert {one.source for one in source.left_out} == {"cat/pipe.png", "dog/device.png", "stray"}
    assert all("is no file, but a pipe" in one.reason for one in source.left_out)
    assert len(source.names) == 7
    assert source.read(list(source.names).index("owl/elsewhere.png")).getpixel((0, 0)) == (9, 9, 9)


@pytest.mark.parametrize("what", ["table", "persons", "names", "task"])
def test_a_table_that_is_a_pipe_holds_nobody_up(tmp_path: Path, what: str) -> None:
    root = folder_of_classes(tmp_path / "images")
    os.mkfifo(pipe := tmp_path / "pipe.csv")
    reads: dict[str, Callable[[], object]] = {
        "table": lambda: AttributeSource(root, pipe),
        "persons": lambda: PersonColumn(table=pipe).of(open_source(root)),
        "names": lambda: lines_of(pipe),
        "task": lambda: read_task_file(pipe),
    }
    with suppress(LabelerError):
        reads[what]()


@pytest.mark.process
def test_a_parquet_file_that_is_cut_short_while_it_is_read_is_a_sentence(tmp_path: Path) -> None:
    """In another process, since the file was mapped into memory: the system ended who read it (SIGBUS)."""
    program = """if True:
        import os, sys
        from pathlib import Path
        from feature_store.sources import open_source
        from labeler.errors import LabelerError
        source = open_source(Path(sys.argv[1]))
        os.truncate(sys.argv[1], 10)
        try:
            source.file(7)
        except LabelerError as error:
            print(error)
    """
    path = tmp_path / "images.parquet"
    images = [np.random.default_rng(number).bytes(2**16) for number in range(8)]
    pq.write_table(pa.table({"image": images}), path, row_group_size=2)
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "'images.parquet' is no Parquet file, or damaged" in done.stdout


def test_a_damaged_page_of_a_parquet_file_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "images.parquet"
    pq.write_table(pa.table({"image": [solid((1, 2, 3))] * 4, "label": [0, 1, 0, 1]}), path, compression="zstd")
    whole = path.read_bytes()
    refused = 0
    for place in range(4, len(whole) - 8, max(1, len(whole) // 60)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        try:
            source = open_source(path)
            for number in range(len(source.names)):
                source.file(number)
        except LabelerError:
            refused += 1
    assert refused


def test_no_program_is_started_for_an_image() -> None:
    """Pillow hands PostScript to Ghostscript, a program that opens files by itself."""
    postscript = (
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 2 2\n%%EndComments\n(/etc/passwd) (r) file\nshowpage\n%%EOF\n"
    )
    with pytest.raises(UnreadableImage, match="a PostScript file"):
        decode_image(postscript)
    assert header_pixels(postscript) == 0


def test_an_empty_folder_and_a_wrong_path_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadData, match="holds no image"):
        open_source(tmp_path)
    with pytest.raises(InvalidSetting, match="check the path"):
        open_source(tmp_path / "nowhere")


def test_a_large_image_is_refused_by_its_header() -> None:
    with pytest.raises(UnreadableImage, match="too large: 3000 x 3000"):
        decode_image(encode(Image.new("1", (3000, 3000)), "PNG"), max_pixels=8_000_000)


def test_an_image_that_claims_to_be_gigantic_is_refused_before_decoding() -> None:
    data = bytearray(solid((0, 0, 0)))
    data[16:24] = struct.pack(">II", 60_000, 60_000)
    with pytest.raises(UnreadableImage):
        decode_image(bytes(data))


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


def test_parquet_without_images_or_bytes_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"picture": [b"x"]}), tmp_path / "set.parquet")
    with pytest.raises(BadData, match="needs a column image"):
        open_source(tmp_path / "set.parquet")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(BadData, match="no Parquet file"):
        open_source(tmp_path / "bad.parquet")
    pq.write_table(pa.table({"image": pa.array([None], pa.binary())}), tmp_path / "set.parquet")
    with pytest.raises(UnreadableImage, match="no bytes"):
        open_source(tmp_path / "set.parquet").read(0)


def test_labels_of_a_table_are_whole_numbers_or_text_and_a_refusal_says_how_to_write_them(tmp_path: Path) -> None:
    """pandas makes fractions of whole numbers where one is missing."""
    names = {"info": {"features": {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}}}
    path = tmp_path / "set.parquet"

    def opened(labels: Any, metadata: dict[str, Any] | None = None) -> ImageSource:
        table = pa.table({"image": [solid((0, 0, 0))] * len(labels), "label": labels})
        pq.write_table(table.replace_schema_metadata(metadata and {"huggingface": json.dumps(metadata)}), path)
        return open_source(path)

    whole = opened(pa.array([0.0, 1.0, None, -1.0, float("nan")]), names)
    assert (whole.label_names, list(whole.labels)) == (("cat", "dog"), [0, 1, None, None, None])
    assert opened(pa.array([None, None])).label_names == ()
    for wrong, found in ((pa.array([0.5]), "a fraction"), (pa.array([True]), "bool"), (pa.array([b"cat"]), "binary")):
        with pytest.raises(BadData, match=f"whole numbers or text.*found {found}"):
            opened(wrong)
    with pytest.raises(BadData, match=r"outside the 2 names .* mend the labels, or the names"):
        opened(pa.array([0, 2]), names)
    pq.write_table(pa.table({"img": [solid((0, 0, 0))], "label": [1]}), path)
    with pytest.raises(BadData, match="rename 'img' to 'image'"):
        open_source(path)


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


@pytest.mark.process
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


SLOW = Transform(resize=72, crop=64, mean=(0.5,) * 3, std=(0.5,) * 3, interpolation="bicubic")
FAST = SLOW.model_copy(update={"decoder": "turbo"})
GREY = FAST.model_copy(update={"mean": (0.5,), "std": (0.5,)})


def photo(width: int, height: int, seed: int = 0) -> Image.Image:
    """Soft shapes with some texture, as photographs have."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
    pixels = np.asarray(small.resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    return Image.fromarray((pixels + rng.integers(-8, 9, pixels.shape)).clip(0, 255).astype(np.uint8))


def prepared(data: bytes, transform: Transform) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return prepare_image(decode_for(data, transform), transform)


def sixteen_bits() -> Image.Image:
    return Image.fromarray(np.linspace(0, 65_535, 200 * 300).astype(np.uint16).reshape(200, 300))


def animation() -> bytes:
    return encode(photo(200, 150), "GIF", save_all=True, append_images=[Image.new("RGB", (200, 150))])


KINDS = {
    "jpeg": encode(photo(500, 375)),
    "large": encode(photo(1300, 900)),
    "small": encode(photo(40, 30)),
    "panorama": encode(photo(2000, 100)),
    "one row": encode(photo(300, 1)),
    "progressive": encode(photo(300, 300), progressive=True, quality=60),
    "grey jpeg": encode(photo(300, 200).convert("L")),
    "cmyk": encode(photo(300, 200).convert("CMYK")),
    "png": encode(photo(700, 500), "PNG"),
    "webp": encode(photo(300, 200), "WEBP"),
    "alpha": encode(Image.merge("RGBA", (*photo(300, 200).split(), photo(300, 200, 1).getchannel(0))), "PNG"),
    "palette": encode(photo(300, 200).quantize(16), "PNG"),
    "16 bits": encode(sixteen_bits(), "PNG"),
    "animation": animation(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_both_decoders_see_nearly_the_same_picture(kind: str) -> None:
    slow, fast = prepared(KINDS[kind], SLOW).astype(int), prepared(KINDS[kind], FAST).astype(int)
    assert fast.shape == slow.shape == (64, 64, 3)
    assert np.abs(slow - fast).mean() < 4
    grey = prepared(KINDS[kind], GREY)
    assert np.abs(np.asarray(Image.fromarray(slow.astype(np.uint8)).convert("L")) - grey[..., 0].astype(int)).mean() < 4


def test_a_picture_that_is_taken_whole_is_resized_like_any_other() -> None:
    """Nothing of it is cut, so nothing was copied: its memory is Pillow's own, which torch warns of."""
    whole = FAST.model_copy(update={"resize": 64})
    data = encode(photo(50, 50), "PNG")
    assert np.abs(prepared(data, whole).astype(int) - prepared(data, SLOW.model_copy(update={"resize": 64}))).mean() < 4


@pytest.mark.parametrize("orientation", range(1, 10))
def test_photographs_are_the_right_way_up(orientation: int) -> None:
    image = photo(500, 300)
    exif = image.getexif()
    exif[0x0112] = orientation
    data = encode(image, exif=exif)
    slow, fast = np.asarray(decode_image(data)), decode_reduced(data, FAST, max_pixels=10**6)
    assert [4 * side for side in fast.shape[:2]] == list(slow.shape[:2])
    assert np.abs(prepared(data, SLOW).astype(int) - prepared(data, FAST)).mean() < 4


def test_the_same_damage_makes_an_image_unreadable_for_both() -> None:
    """Cut after every so many bytes, and with bytes turned over, which decoders may or may not forgive."""
    whole = encode(photo(300, 200))
    rng = np.random.default_rng(3)
    damaged = [whole[:end] for end in range(0, len(whole), 97)]
    for place in rng.integers(0, len(whole), 60):
        damaged.append(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
    damaged += [whole + b"more", b"\xff\xd8\xff" + b"x" * 500]
    verdicts = [(_reason(data, SLOW), _reason(data, FAST)) for data in damaged]
    assert all(slow == fast for slow, fast in verdicts)
    assert {"", "damaged or truncated (OSError)"} <= {slow for slow, _ in verdicts}


def _reason(data: bytes, transform: Transform) -> str:
    try:
        decode_for(data, transform)
    except UnreadableImage as error:
        return str(error)
    return ""


def test_a_jpeg_beyond_the_limit_is_refused_though_it_would_be_reduced() -> None:
    with pytest.raises(UnreadableImage, match="too large: 1300 x 900"):
        decode_for(KINDS["large"], FAST, max_pixels=10**6)


@pytest.mark.parametrize("size", [(500, 375), (3000, 2000), (255, 255), (10_000, 64), (1, 5000), (65, 64)])
def test_what_the_network_sees_of_an_image_is_bounded_whatever_its_size(size: tuple[int, int]) -> None:
    """So the process that decodes a stranger's image hands over a bounded number of bytes."""
    square = region(photo(*size), FAST)
    assert max(square.shape[:2]) <= 2 * least_side(FAST) + 1
    assert min(square.shape[:2]) >= min(*size, 56)


def test_the_pixels_of_this_decoder_are_what_they_were() -> None:
    """The fingerprint names the decoder and not the library behind it: other pixels need another name."""
    fixed = Path(__file__).parent / "turbo.jpg"
    found = [hashlib.sha256(prepared(fixed.read_bytes(), one)).hexdigest()[:16] for one in (FAST, GREY)]
    assert found == ["ed20170d70f1870e", "f3826cac816a59d2"]


TINY: dict[str, Any] = {"kind": "timm", "architecture": "test_efficientnet", "transform": SLOW.model_dump()}


def test_each_decoder_has_its_fingerprint_and_pillow_the_one_of_before(weights: Path) -> None:
    spec = TINY | {"weights": weights}
    slow = load_backbone(parse_spec(spec | {"decoder": "pillow"}), device="cpu")
    fast = load_backbone(parse_spec(spec), device="cpu")
    assert fast.fingerprint != slow.fingerprint
    assert fast.spec["transform"] == slow.spec["transform"] | {"decoder": "turbo"}
    assert "decoder" not in slow.spec["transform"]


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "pixels", "decoder": "turbo"},
        {"kind": "simclr", "weights": "x.safetensors", "decoder": "turbo"},
        {"kind": "timm", "architecture": "x", "transform": SLOW.model_dump() | {"decoder": "turbo"}},
        {"kind": "timm", "architecture": "x", "decoder": "quick"},
    ],
)
def test_a_decoder_is_named_where_it_belongs(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting, match="decoder"):
        parse_spec(fields)
