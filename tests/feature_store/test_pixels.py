"""Pixels of every format, depth and interpretation against values that are known from the format's own definition."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from PIL import Image
from PIL import __version__ as PILLOW

from feature_store.decode import decode_image, header_pixels
from labeler.errors import UnreadableImage

SHORT, LONG = 3, 4


def tiff(
    data: bytes, width: int, *, bits: int, white: int | None, samples: int = 1, kind: int = 1, order: str = "<",
    more: Mapping[int, tuple[int, Sequence[int]]] | None = None, planes: int = 1, broken: int | None = None,
) -> bytes:  # fmt: skip
    """A TIFF of one row, as TIFF 6.0 says; `white` is its photometric interpretation."""
    tags: dict[int, tuple[int, Sequence[int]]] = {
        256: (LONG, [width]), 257: (LONG, [1]), 258: (SHORT, [bits] * samples), 259: (SHORT, [1]),
        273: (LONG, [0] * planes), 277: (SHORT, [samples]), 278: (LONG, [1]),
        279: (LONG, [len(data) // planes] * planes), 284: (SHORT, [1 if planes == 1 else 2]),
        339: (SHORT, [kind] * samples), **(more or {}),
    }  # fmt: skip
    if white is not None:
        tags[262] = (SHORT, [white])
    letters = {SHORT: "H", LONG: "I"}
    begin = 8 + 2 + 12 * (len(tags) + (broken is not None)) + 4
    sizes = {tag: struct.calcsize(f"{order}{len(values)}{letters[of]}") for tag, (of, values) in tags.items()}
    pixels = begin + sum(size for size in sizes.values() if size > 4)
    tags[273] = (LONG, [pixels + plane * (len(data) // planes) for plane in range(planes)])
    entries, far = {}, b""
    for tag, (of, values) in tags.items():
        packed = struct.pack(f"{order}{len(values)}{letters[of]}", *values)
        place = packed.ljust(4, b"\0") if len(packed) <= 4 else struct.pack(f"{order}I", begin + len(far))
        far += packed if len(packed) > 4 else b""
        entries[tag] = struct.pack(f"{order}HHI", tag, of, len(values)) + place
    if broken is not None:
        entries[broken] = struct.pack(f"{order}HHII", broken, 2, 99, 10_000_000)
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}IH", 8, len(entries))
    return head + b"".join(entries[tag] for tag in sorted(entries)) + bytes(4) + far + data


def chunk(kind: bytes, data: bytes, crc: int | None = None) -> bytes:
    return (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data) if crc is None else crc)
    )


def png(row: bytes, width: int, *, bits: int, color: int, more: bytes = b"", late: bytes = b"") -> bytes:
    """A PNG of one row without a filter."""
    head = struct.pack(">IIBBBBB", width, 1, bits, color, 0, 0, 0)
    body = chunk(b"IDAT", zlib.compress(b"\0" + row))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + more + body + late + chunk(b"IEND", b"")


def encoded(image: Image.Image, name: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, name, **options)
    return file.getvalue()


def gray(data: bytes) -> list[int]:
    found = np.asarray(decode_image(data))[0]
    assert (found == found[:, :1]).all()
    return [int(value) for value in found[:, 0]]


def u16(*values: int, order: str = "<") -> bytes:
    return np.array(values, dtype=f"{order}u2").tobytes()


PALETTE = {320: (SHORT, [0, 65_535] + [0] * 254 + [0, 0, 65_535] + [0] * 253 + [0] * 256)}
GRAYS = {
    "tiff 1 bit, 0 is black": (tiff(b"\x50", 4, bits=1, white=1), [0, 255, 0, 255]),
    "tiff 1 bit, 0 is white": (tiff(b"\x50", 4, bits=1, white=0), [255, 0, 255, 0]),
    "tiff 2 bits, 0 is black": (tiff(b"\x1b", 4, bits=2, white=1), [0, 85, 170, 255]),
    "tiff 4 bits, 0 is white": (tiff(b"\x04\x8f", 4, bits=4, white=0), [255, 187, 119, 0]),
    "tiff 8 bits, 0 is black": (tiff(b"\0\x40\xff", 3, bits=8, white=1), [0, 64, 255]),
    "tiff 8 bits, 0 is white": (tiff(b"\0\x40\xff", 3, bits=8, white=0), [255, 191, 0]),
    "tiff 12 bits, 0 is black": (tiff(b"\0\x08\x08\xff\xf0\0", 4, bits=12, white=1), [0, 128, 255, 0]),
    "tiff 16 bits, 0 is black": (tiff(u16(0, 0x4040, 65_535), 3, bits=16, white=1), [0, 64, 255]),
    "tiff 16 bits, 0 is white": (tiff(u16(0, 0x4040, 65_535), 3, bits=16, white=0), [255, 191, 0]),
    "tiff 16 bits, other end first": (
        tiff(u16(0, 0x4040, 65_535, order=">"), 3, bits=16, white=1, order=">"), [0, 64, 255]
    ),
    "tiff 8 bits and opacity": (tiff(b"\0\xff\0\0", 2, bits=8, white=1, samples=2, more={338: (SHORT, [2])}), [0, 255]),
    "png 1 bit": (png(b"\x50", 4, bits=1, color=0), [0, 255, 0, 255]),
    "png 2 bits, one transparent": (png(b"\x1b", 4, bits=2, color=0, more=chunk(b"tRNS", b"\0\1")), [0, 255, 170, 255]),
    "png 4 bits, one transparent": (png(b"\x58", 2, bits=4, color=0, more=chunk(b"tRNS", b"\0\5")), [255, 136]),
    "png 8 bits, one transparent": (png(b"\5\6", 2, bits=8, color=0, more=chunk(b"tRNS", b"\0\5")), [255, 6]),
    "png 16 bits": (png(u16(0, 0x4040, 65_535, order=">"), 3, bits=16, color=0), [0, 64, 255]),
    "png 16 bits, one transparent": (
        png(u16(0, 1, 0x4040, order=">"), 3, bits=16, color=0, more=chunk(b"tRNS", b"\0\0")), [255, 0, 64]
    ),
    "png 16 bits and opacity": (png(u16(0x4040, 65_535, 0, 0, order=">"), 2, bits=16, color=4), [64, 255]),
    "pbm": (b"P4\n4 1\n\x50", [255, 0, 255, 0]),
    "pgm of 0 to 15": (b"P5\n3 1\n15\n\0\7\x0f", [0, 119, 255]),
    "pgm of 0 to 4095": (b"P5\n3 1\n4095\n" + u16(0, 2048, 4095, order=">"), [0, 128, 255]),
    "pgm of 0 to 65535": (b"P5\n3 1\n65535\n" + u16(0, 0x4040, 65_535, order=">"), [0, 64, 255]),
    "jpeg 2000 of 16 bits": (encoded(Image.fromarray(np.full((4, 4), 0x4040, np.uint16)), "JPEG2000"), [64] * 4),
}  # fmt: skip
COLORS = {
    "tiff rgb 8": (tiff(b"\xff\x40\0", 1, bits=8, white=2, samples=3), (255, 64, 0)),
    "tiff rgb 8 in planes": (tiff(b"\xff\x40\0", 1, bits=8, white=2, samples=3, planes=3), (255, 64, 0)),
    "tiff rgb 16": (tiff(u16(65_535, 0x4040, 0), 1, bits=16, white=2, samples=3), (255, 64, 0)),
    "tiff rgb 16, other end first": (
        tiff(u16(65_535, 0x4040, 0, order=">"), 1, bits=16, white=2, samples=3, order=">"), (255, 64, 0)
    ),
    "tiff rgb and opacity": (tiff(bytes(4), 1, bits=8, white=2, samples=4, more={338: (SHORT, [2])}), (255, 255, 255)),
    "tiff palette": (tiff(b"\1", 1, bits=8, white=3, more=PALETTE), (255, 0, 0)),
    "tiff cmyk": (tiff(b"\0\xff\xff\0", 1, bits=8, white=5, samples=4), (255, 0, 0)),
    "tiff ycbcr": (tiff(b"\xff\x80\x80", 1, bits=8, white=6, samples=3, more={530: (SHORT, [1, 1])}), (255, 255, 255)),
    "tiff with a broken maker": (tiff(b"\xff\x40\0", 1, bits=8, white=2, samples=3, broken=271), (255, 64, 0)),
    "png rgb 16": (png(u16(65_535, 0x4040, 0, order=">"), 1, bits=16, color=2), (255, 64, 0)),
    "png rgb 16 and opacity": (png(u16(65_535, 0x4040, 0, 0, order=">"), 1, bits=16, color=6), (255, 255, 255)),
    "png palette of 4 bits": (png(b"\x10", 1, bits=4, color=3, more=chunk(b"PLTE", b"\0\0\0\xff\0\0")), (255, 0, 0)),
    "ppm of 0 to 1023": (b"P6\n1 1\n1023\n" + u16(1023, 257, 0, order=">"), (255, 64, 0)),
    "jpeg cmyk": (encoded(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG", quality=100), (255, 0, 0)),
}  # fmt: skip


@pytest.mark.parametrize("name", GRAYS)
def test_gray_of_any_depth_runs_from_black_to_white(name: str) -> None:
    data, expected = GRAYS[name]
    assert gray(data) == expected


@pytest.mark.parametrize("name", COLORS)
def test_colors_of_any_kind_become_rgb(name: str) -> None:
    if name == "tiff ycbcr" and int(PILLOW.partition(".")[0]) < 13:
        pytest.skip("Pillow before 13 reads no YCbCr without compression; such an image is named and left out")
    data, expected = COLORS[name]
    assert np.abs(np.asarray(decode_image(data))[0, 0].astype(int) - expected).max() <= 1


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (tiff(u16(0, 5), 2, bits=16, white=1, kind=2), "signed or 32-bit"),
        (tiff(b"\0\5", 2, bits=8, white=1, kind=2), "signed or 32-bit"),
        (tiff(bytes(8), 2, bits=32, white=1), "signed or 32-bit"),
        (tiff(bytes(8), 2, bits=32, white=1, kind=3), "floating-point"),
        (tiff(b"\0\5", 2, bits=8, white=None), "0 is black or white"),
        (tiff(b"\0\5", 2, bits=8, white=1, more={254: (LONG, [1])}), "a preview"),
        (tiff(bytes(4), 1, bits=32, white=32_803), "a TIFF of a kind"),
        (tiff(b"\0\5", 2, bits=8, white=1, broken=320), "tag 320 points beyond"),
        (b"Pf\n1 1\n-1.0\n" + bytes(4), "floating-point"),
    ],
)
def test_numbers_without_a_known_white_are_refused(data: bytes, reason: str) -> None:
    with pytest.raises(UnreadableImage, match=reason):
        decode_image(data)


RED = Image.new("RGB", (8, 8), (255, 0, 0))
JUNK = b"\xff" * 40
TURNED_BY_JUNK = b"Exif\0\0MM\0*\0\0\0\x08\xff\xff" + b"\x01\x12\0\3\xff\xff\xff\xff" * 4


@pytest.mark.parametrize(
    "broken",
    [
        chunk(b"tEXt", b"k\0v", crc=1), chunk(b"zTXt", b"k\0\0" + JUNK), chunk(b"iTXt", JUNK, crc=1),
        chunk(b"iCCP", b"k"), chunk(b"eXIf", JUNK), chunk(b"eXIf", JUNK, crc=1), chunk(b"pHYs", b"\0"),
        chunk(b"gAMA", b""), chunk(b"cHRM", b"\0"), chunk(b"sRGB", b""), chunk(b"acTL", b"\0"),
        chunk(b"tIME", b"", crc=1),
        chunk(b"iCCP", b"k\0\0" + zlib.compress(bytes(80_000_000))),
    ],
    ids=lambda chunk: f"{chunk[4:8].decode()} {len(chunk)}",
)  # fmt: skip
def test_broken_metadata_of_a_png_is_no_damage(broken: bytes) -> None:
    assert gray(png(b"\0\x40", 2, bits=8, color=0, more=broken)) == [0, 64]
    assert gray(png(b"\0\x40", 2, bits=8, color=0, late=broken)) == [0, 64]
    assert header_pixels(png(b"\0\x40", 2, bits=8, color=0, more=broken)) == 2, "a service bounds an upload by it"


@pytest.mark.filterwarnings("ignore")  # outside tests they go to the log
@pytest.mark.parametrize("name", ["JPEG", "WEBP", "PNG", "TIFF", "AVIF", "JPEG2000"])
def test_broken_metadata_of_other_formats_is_no_damage(name: str) -> None:
    exif, profile = encoded(RED, name, exif=TURNED_BY_JUNK), encoded(RED, name, icc_profile=JUNK)
    for data in (exif, profile):
        assert np.abs(np.asarray(decode_image(data)).astype(int) - (255, 0, 0)).max() <= 2


def test_an_orientation_behind_a_broken_text_is_followed() -> None:
    exif = Image.Exif()
    exif[0x0112] = 3
    turned = chunk(b"eXIf", exif.tobytes().removeprefix(b"Exif\0\0"))
    assert gray(png(b"\0\x40", 2, bits=8, color=0, more=chunk(b"tEXt", b"k\0v", crc=1) + turned)) == [64, 0]


@pytest.mark.parametrize("name", ["PNG", "TIFF", "WEBP", "AVIF", "JPEG2000", "JPEG", "BMP"])
def test_truncated_pixels_are_damage_in_every_format(name: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64), np.uint8)
    data = encoded(Image.fromarray(noise), name)
    with pytest.raises(UnreadableImage, match=r"damaged|truncated"):
        decode_image(data[: len(data) * 2 // 3])


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs pull"),
        (b"../../.git/annex/objects/a/b", "git annex get"),
        (b"/annex/objects/SHA256E-s1--0.png", "git annex get"),
        (b"", "an empty file"),
        (bytes(500), "nothing but zeros"),
        (b"<!DOCTYPE html><html>", "a web page"),
        (b"<?xml version='1.0'?><svg/>", "XML or SVG"),
        (b'{"error": "not found"}', "JSON"),
        (b"%PDF-1.7", "a PDF"),
        (b"PK\3\4" + bytes(20), "an archive"),
        (b"\0\0\0\x18ftypmp42" + bytes(20), "a video"),
        (png(b"\0", 1, bits=8, color=0)[:20], "damaged"),
        (b"some other words", "not an image of a known format"),
    ],
)
def test_a_file_that_is_no_image_is_named_for_what_it_is(data: bytes, reason: str) -> None:
    with pytest.raises(UnreadableImage, match=reason):
        decode_image(data)
