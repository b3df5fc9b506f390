"""Pixels of every format, depth and interpretation have the values that the format defines, or are refused by kind."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from PIL import __version__ as PILLOW

from feature_store.backbones import Transform
from feature_store.backbones.backbone import decode_for
from feature_store.decode import decode_image, header_pixels
from labeler.errors import UnreadableImage
from tests.feature_store.test_dicom import heic

Tag = tuple[int, int, Any]
Case = tuple[bytes, Sequence[Any]]
_CODES = {1: "B", 3: "H", 4: "I", 5: "I", 7: "B"}
FAR = 2, None  # kind and value of a tag that points beyond the file


def tiff(
    values: NDArray[Any], photometric: int | None, *more: Tag, order: str = "<", bits: int = 0, kind: int = 1,
    planar: int = 1, packed: bytes = b"", packing: int = 1,
) -> bytes:  # fmt: skip
    """A TIFF of shape (height, width) or (height, width, samples), as TIFF 6.0 says; `packed` are its bytes."""
    height, width, *samples = values.shape
    count = samples[0] if samples else 1
    stored = np.moveaxis(values, 2, 0) if planar == 2 else values
    data = packed or stored.astype(values.dtype.newbyteorder(order)).tobytes()
    planes = count if planar == 2 else 1
    tags: list[Tag] = [
        (256, 4, [width]), (257, 4, [height]), (258, 3, [bits or values.dtype.itemsize * 8] * count),
        (259, 3, [packing]), (277, 3, [count]), (278, 4, [height]), (284, 3, [planar]), (339, 3, [kind] * count),
        (273, 4, [8 + number * (len(data) // planes) for number in range(planes)]),
        (279, 4, [len(data) // planes] * planes), *([] if photometric is None else [(262, 3, [photometric])]), *more,
    ]  # fmt: skip
    out = bytearray((b"II*\0" if order == "<" else b"MM\0*") + bytes(4) + data)
    entries = b""
    for tag, code, value in sorted(tags):
        if value is None:
            entries += struct.pack(order + "HHII", tag, code, 99, 10_000_000)
            continue
        raw = value if isinstance(value, bytes) else struct.pack(f"{order}{len(value)}{_CODES[code]}", *value)
        out += b"\0" * (len(out) % 2)
        place = raw.ljust(4, b"\0") if len(raw) <= 4 else struct.pack(order + "I", len(out))
        entries += struct.pack(order + "HHI", tag, code, len(value) // (2 if code == 5 else 1)) + place
        out += raw if len(raw) > 4 else b""
    out += b"\0" * (len(out) % 2)
    out[4:8] = struct.pack(order + "I", len(out))
    return bytes(out + struct.pack(order + "H", len(tags)) + entries + bytes(4))


def chunk(name: bytes, data: bytes, *, is_sound: bool = True) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data) ^ (not is_sound))


def png(bits: int, color: int, row: bytes, *chunks: bytes, width: int = 4, late: bytes = b"") -> bytes:
    """A PNG of one row without a filter; `late` stands behind its pixels."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, 1, bits, color, 0, 0, 0))
    data = chunk(b"IDAT", zlib.compress(b"\0" + row))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(chunks) + data + late + chunk(b"IEND", b"")


def bmp(bits: int, row: bytes, *, palette: bytes = b"", packing: int = 0, masks: bytes = b"", height: int = 1) -> bytes:
    """A BMP four pixels wide, of one row, from the top where the height is -1; its masks are those of version 4."""
    size = 108 if len(masks) == 16 else 40
    head = struct.pack("<IiiHHIIiiII", size, 4, height, 1, bits, packing, len(row), 0, 0, len(palette) // 4, 0)
    head = (head + masks).ljust(size, b"\0") + palette
    return b"BM" + struct.pack("<IHHI", 14 + len(head) + len(row), 0, 0, 14 + len(head)) + head + row


def gif(places: Sequence[int], palette: bytes, *, left: int = 0, local: bytes = b"", clear: int | None = None) -> bytes:
    """A GIF four pixels wide and one high, whose only frame begins at `left`; its palettes have four colors."""
    # Codes of 3 bits, with a reset (4) before each pair, since the third one after a reset would have 4.
    codes = [code for at, place in enumerate(places) for code in ((4, place) if at % 2 == 0 else (place,))]
    bits = "".join(f"{code:03b}" for code in (5, *reversed(codes)))
    pixels = int(bits, 2).to_bytes(-(-len(bits) // 8), "little")
    control = b"" if clear is None else b"!\xf9\4\1\0\0" + bytes([clear, 0])
    frame = b"," + struct.pack("<4HB", left, 0, len(places), 1, 0x81 if local else 0) + local
    frame += b"\2" + bytes([len(pixels)]) + pixels + b"\0"
    return b"GIF89a" + struct.pack("<HHBBB", 4, 1, 0x81, 0, 0) + palette + control + frame + b";"


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def without(data: bytes, name: bytes) -> bytes:
    """A JPEG without the segment that begins with a name."""
    start = data.index(name) - 4
    return data[:start] + data[start + 2 + struct.unpack(">H", data[start + 2 : start + 4])[0] :]


def one_color(color: Any, mode: str = "RGB") -> Image.Image:
    return Image.new(mode, (16, 16), color)


G8 = np.array([[0, 64, 128, 255]], np.uint8)
G16 = G8.astype(np.uint16) * 257
GRAY, INVERSE = [0, 64, 128, 255], [255, 191, 127, 0]
RGB = np.array([[[255, 0, 0], [0, 128, 0], [10, 20, 30], [255, 255, 255]]], np.uint8)
COLORS = RGB[0].tolist()
RGBA = np.concatenate([RGB, np.array([[[255], [0], [51], [255]]], np.uint8)], 2)
ON_WHITE = [[255, 0, 0], [255, 255, 255], [206, 208, 210], [255, 255, 255]]
GRAY_AND_ALPHA = np.array([[[0, 255], [64, 255], [0, 51], [9, 0]]], np.uint8)
GRAY_ON_WHITE = [0, 64, 204, 255]
CMYK = np.array([[[0, 0, 0, 0], [255, 0, 0, 0], [0, 0, 0, 255], [0, 255, 255, 128]]], np.uint8)
INKS = [[255, 255, 255], [0, 255, 255], [0, 0, 0], [127, 0, 0]]
YCC = np.array([[[76, 85, 255], [150, 44, 21], [0, 128, 128], [255, 128, 128]]], np.uint8)
YCC_AS_RGB = [[254, 0, 0], [0, 255, 1], [0, 0, 0], [255, 255, 255]]
VIDEO = (532, 5, [16, 1, 235, 1, *[128, 1, 240, 1] * 2])
LAB = np.array([[[255, 0, 0], [0, 0, 0], [128, 0, 0], [131, 30, 37]]], np.uint8)  # of D50, as in ICC profiles
LAB_AS_RGB = [255, 0, 119, [180, 100, 60]]
FOUR = np.arange(4, dtype=np.uint8).reshape(1, 4)
PALETTE = [[0, 0, 0], [255, 0, 0], [0, 255, 0], [128, 0, 64]]
MAP = np.pad(np.array(PALETTE).T, ((0, 0), (0, 252))).ravel()
SMALL_MAP = MAP.reshape(3, -1)[:, :16].ravel()
THREE = [[85 * value] * 3 for value in range(4)]
OPACITY = (338, 3, [2])


def of_tiff(order: str) -> dict[str, Case]:
    def one(*given: Any, **options: Any) -> bytes:
        return tiff(*given, order=order, **options)

    twelve = bytes.fromhex("000404808fff")
    found: dict[str, Case] = {}
    for photometric, gray, three in ((1, GRAY, THREE), (0, INVERSE, THREE[::-1])):
        found |= {
            f"1 bit, {photometric}": (one(G8, photometric, bits=1, packed=b"\x50"), [gray[0], gray[3]] * 2),
            f"2 bits, {photometric}": (one(G8, photometric, bits=2, packed=b"\x1b"), three),
            f"4 bits, {photometric}": (one(G8, photometric, bits=4, packed=b"\x05\xaf"), three),
            f"8 bits, {photometric}": (one(G8, photometric), gray),
            f"12 bits, {photometric}": (one(G8, photometric, bits=12, packed=twelve), gray),
            f"12 bits, deflated, {photometric}": (
                one(G8, photometric, bits=12, packed=zlib.compress(twelve), packing=8), gray
            ),
            f"16 bits, {photometric}": (one(G16, photometric), gray),
            f"16 bits, deflated, {photometric}": (
                one(G16, photometric, packed=zlib.compress(G16.astype(order + "u2").tobytes()), packing=8), gray
            ),
            f"16 bits turned, {photometric}": (one(G16, photometric, (274, 3, [3])), gray[::-1]),
        }  # fmt: skip
    return found | {
        "gray and alpha": (one(GRAY_AND_ALPHA, 1, OPACITY), GRAY_ON_WHITE),
        "gray times alpha": (one(np.array([[[51, 255], [10, 51]]], np.uint8), 1, (338, 3, [1])), [51, 214]),
        "RGB": (one(RGB, 2), COLORS),
        "RGB, planes": (one(RGB, 2, planar=2), COLORS),
        "RGB of 16 bits": (one(RGB.astype(np.uint16) * 257, 2), COLORS),
        "RGBA": (one(RGBA, 2, OPACITY), ON_WHITE),
        "RGBA, planes": (one(RGBA, 2, OPACITY, planar=2), ON_WHITE),
        "RGBA of 16 bits": (one(RGBA.astype(np.uint16) * 257, 2, OPACITY), ON_WHITE),
        "palette": (one(FOUR, 3, (320, 3, MAP * 257)), PALETTE),
        "palette of 4 bits": (one(FOUR, 3, (320, 3, SMALL_MAP * 257), bits=4, packed=b"\1\x23"), PALETTE),
        "palette of 8-bit colors": (one(FOUR, 3, (320, 3, MAP)), PALETTE),
        "CMYK": (one(CMYK, 5), INKS),
        "CMYK, all dots": (one(CMYK, 5, (336, 1, [0, 255] * 4)), INKS),
        "CMYK, planes": (one(CMYK, 5, planar=2), INKS),
        "CMYK of 16 bits": (one(CMYK.astype(np.uint16) * 257, 5), INKS),
        "YCbCr": (one(YCC, 6, (530, 3, [1, 1])), YCC_AS_RGB),
        "YCbCr of fewer colors, deflated": (
            one(YCC[:, :2], 6, (530, 3, [2, 1]), packed=zlib.compress(bytes([10, 200, 128, 128])), packing=8), [10, 200]
        ),
        "YCbCr of video, deflated": (
            one(YCC[:, :2], 6, (530, 3, [1, 1]), VIDEO, packing=8,
                packed=zlib.compress(bytes([16, 128, 128, 235, 128, 128]))), [0, 255]
        ),
        "Lab": (one(LAB, 8), LAB_AS_RGB),
    }  # fmt: skip


def of_png() -> dict[str, Case]:
    def clear(*values: int) -> bytes:
        return chunk(b"tRNS", struct.pack(f">{len(values)}H", *values))

    plte, some = chunk(b"PLTE", bytes(np.array(PALETTE, np.uint8))), chunk(b"tRNS", bytes([0, 51]))
    packed = {1: b"\x50", 2: b"\x1b", 4: b"\x05\xaf", 8: bytes([0, 85, 170, 255])}
    packed[16] = struct.pack(">4H", *(257 * value for value in (0, 85, 170, 255)))
    found: dict[str, Case] = {}
    for bits, row in packed.items():
        gray = [0, 255, 0, 255] if bits == 1 else [0, 85, 170, 255]
        rest = [255, 0, 255] if bits == 1 else [255, 170, 255]
        top = 2**bits - 1
        found[f"gray {bits}"] = (png(bits, 0, row), gray)
        found[f"gray {bits}, one clear"] = (png(bits, 0, row, clear(top if bits == 1 else top // 3)), [gray[0], *rest])
    for bits, row in {1: b"\x50", 2: b"\x1b", 4: b"\x01\x23", 8: bytes(range(4))}.items():
        use = [0, 1, 0, 1] if bits == 1 else [0, 1, 2, 3]
        found[f"palette {bits}"] = (png(bits, 3, row, plte), [PALETTE[value] for value in use])
        blended = [[255, 255, 255], [255, 204, 204], *PALETTE[2:]]
        found[f"palette {bits}, clear"] = (png(bits, 3, row, plte, some), [blended[value] for value in use])
    for bits, times in ((8, 1), (16, 257)):
        kind = ">u2" if bits == 16 else "u1"
        rgb, rgba, both = (np.asarray(one, int) * times for one in (RGB, RGBA, GRAY_AND_ALPHA))
        found |= {
            f"RGB {bits}": (png(bits, 2, rgb.astype(kind).tobytes()), COLORS),
            f"RGBA {bits}": (png(bits, 6, rgba.astype(kind).tobytes()), ON_WHITE),
            f"gray and alpha {bits}": (png(bits, 4, both.astype(kind).tobytes()), GRAY_ON_WHITE),
        }
    return found | {
        "RGB 8, one clear": (png(8, 2, RGB.tobytes(), clear(*COLORS[2])), [*COLORS[:2], [255] * 3, COLORS[3]]),
        "gamma": (png(8, 0, bytes(GRAY), chunk(b"gAMA", struct.pack(">I", 100_000))), GRAY),
    }


def of_bmp() -> dict[str, Case]:
    quads = b"".join(bytes([blue, green, red, 0]) for red, green, blue in PALETTE)
    masks, primary = struct.pack("<3I", 0xF800, 0x7E0, 0x1F), [[255, 0, 0], [0, 255, 0], [0, 0, 255], [255] * 3]
    alpha = struct.pack("<4I", 0xFF0000, 0xFF00, 0xFF, 0xFF000000)
    bgra = RGBA[..., [2, 1, 0, 3]].tobytes()
    return {
        "1": (bmp(1, b"\x50\0\0\0", palette=quads[:8]), [PALETTE[0], PALETTE[1]] * 2),
        "4": (bmp(4, b"\1\x23\0\0", palette=quads), PALETTE),
        "8": (bmp(8, bytes(range(4)), palette=quads), PALETTE),
        "8 of gray": (bmp(8, bytes(GRAY), palette=bytes(np.repeat(np.arange(256), 4).astype(np.uint8))), GRAY),
        "RLE 4": (bmp(4, b"\0\4\1\x23\0\1", palette=quads, packing=2), PALETTE),
        "RLE 8": (bmp(8, b"\1\0\0\3\1\2\3\0\0\1", palette=quads, packing=1), PALETTE),
        "555": (bmp(16, struct.pack("<4H", 31 << 10, 31 << 5, 31, 0x7FFF)), primary),
        "565": (bmp(16, struct.pack("<4H", 0xF800, 0x7E0, 0x1F, 0xFFFF), packing=3, masks=masks), primary),
        "24": (bmp(24, RGB[..., ::-1].tobytes()), COLORS),
        "24, from the top": (bmp(24, RGB[..., ::-1].tobytes(), height=-1), COLORS),
        "32 without alpha": (bmp(32, bgra), COLORS),
        "32 with alpha": (bmp(32, bgra, packing=3, masks=alpha), ON_WHITE),
    }


def of_others() -> dict[str, Case]:
    ppm = [[255, 0, 0], [85, 170, 255]]
    one, two = Image.new("RGB", (2, 1), (200, 10, 30)), Image.new("RGB", (2, 1), (0, 0, 255))
    films = {"save_all": True, "append_images": [two]}
    dark = [[200, 10, 30]]
    full: dict[str, Any] = {"quality": 100, "subsampling": 0}
    colors, local = (bytes(np.array(some, np.uint8)) for some in (PALETTE, THREE))
    white = [255] * 3
    return {
        "PGM of 15": (b"P5\n3 1\n15\n\0\7\x0f", [0, 119, 255]),
        "PGM of 100": (b"P5 4 1 100\n" + bytes([0, 25, 50, 100]), GRAY),
        "PGM of 12 bits": (b"P5 4 1 4095\n" + struct.pack(">4H", 0, 1028, 2056, 4095), GRAY),
        "PGM of 16 bits": (b"P5 4 1 65535\n" + struct.pack(">4H", *G16[0]), GRAY),
        "PGM in words": (b"P2 4 1 4095\n0 1028 2056 4095\n", GRAY),
        "PBM": (b"P4 4 1\n\x50", [255, 0, 255, 0]),
        "PBM in words": (b"P1\n#\n4 1\n0101", [255, 0, 255, 0]),
        "PPM of 15": (b"P6 2 1 15\n" + bytes([15, 0, 0, 5, 10, 15]), ppm),
        "PPM of 10 bits": (b"P6 2 1 1023\n" + struct.pack(">6H", 1023, 0, 0, 341, 682, 1023), ppm),
        "GIF": (gif([0, 1, 2, 3], colors), PALETTE),
        "GIF, its frame's palette": (gif([0, 1, 2, 3], colors, local=local), THREE),
        "GIF, one clear": (gif([0, 1, 2, 3], colors, clear=1), [PALETTE[0], white, *PALETTE[2:]]),
        "GIF of half a frame": (gif([1, 2], colors, left=1), [white, PALETTE[1], PALETTE[2], white]),
        "GIF of half a frame, one clear": (gif([1, 2], colors, left=1, clear=2), [white, PALETTE[1], white, white]),
        "GIF, first frame": (saved(one, "GIF", **films), dark),
        "PNG, first frame": (saved(one, "PNG", **films), dark),
        "WebP, first frame": (saved(one, "WEBP", lossless=True, **films), dark),
        "TIFF, first page": (saved(one, "TIFF", **films), dark),
        "MPO, first picture": (saved(one_color((200, 10, 30)), "MPO", **full, **films), dark),
        "WebP with alpha": (saved(Image.fromarray(RGBA), "WEBP", lossless=True, exact=True), ON_WHITE),
        "AVIF with alpha": (saved(one_color((0, 0, 0, 51), "RGBA"), "AVIF", quality=100), [204]),
        "JPEG": (saved(one_color((200, 100, 50)), "JPEG", **full), [[200, 100, 50]]),
        "JPEG of RGB": (saved(one_color((200, 100, 50)), "JPEG", keep_rgb=True, **full), [[200, 100, 50]]),
        "JPEG of CMYK, by Adobe": (saved(one_color((0, 255, 255, 128), "CMYK"), "JPEG", **full), [[127, 0, 0]]),
        "JPEG 2000 of 16 bits": (saved(Image.fromarray(G16), "JPEG2000"), GRAY),
        "JPEG 2000 with alpha": (saved(one_color((0, 0, 0, 51), "RGBA"), "JPEG2000"), [204]),
        "JPEG 2000 of color": (saved(one_color((200, 100, 50)), "JPEG2000", mct=1), [[200, 100, 50]]),
    }


KNOWN = {f"TIFF {order} {name}": case for order in "<>" for name, case in of_tiff(order).items()}
KNOWN |= {f"PNG {name}": case for name, case in of_png().items()}
KNOWN |= {f"BMP {name}": case for name, case in of_bmp().items()} | of_others()


@pytest.mark.parametrize("name", KNOWN)
def test_pixels_have_their_known_values(name: str) -> None:
    if name.endswith((" YCbCr", " gray times alpha")) and int(PILLOW.partition(".")[0]) < 13:
        pytest.skip("Pillow before 13 does not read these; such an image is named and left out")
    data, wanted = KNOWN[name]
    found = np.asarray(decode_image(data)).reshape(-1, 3)[: len(wanted)].astype(int)
    expected = np.array([value if isinstance(value, list) else [value] * 3 for value in wanted])
    assert np.abs(found - expected).max() <= 1


def jpeg_2000(image: Image.Image, bits: int, **options: Any) -> bytes:
    """A JPEG 2000 whose header states so many bits for each component."""
    data = bytearray(saved(image, "JPEG2000", **options))
    place = data.index(b"\xff\x4f\xff\x51") + 42
    count = len(image.getbands())
    data[place : place + 3 * count : 3] = bytes([bits - 1] * count)
    return bytes(data)


def jpeg_of_12_bits() -> bytes:
    data = bytearray(saved(RED, "JPEG"))
    data[data.index(b"\xff\xc0") + 4] = 12
    return bytes(data)


RED = one_color((255, 0, 0))
TWO_GRAYS = np.repeat([[0, 255]], 4, axis=0).T.astype(np.uint8).tobytes()
REFUSED: dict[str, tuple[bytes, str]] = {
    "signed 8": (tiff(np.array([[-1, 0]], np.int8), 1, kind=2), "signed or 32-bit"),
    "signed 16": (tiff(np.array([[-1, 0]], np.int16), 1, kind=2), "signed or 32-bit"),
    "32 bits": (tiff(np.array([[0, 2**30]], np.int32), 1), "signed or 32-bit"),
    "half floats": (tiff(G8.astype(np.float16), 1, kind=3), "a TIFF of a kind"),
    "floats": (tiff(G8.astype(np.float32), 1, kind=3), "floating-point"),
    "no interpretation": (tiff(G8, None), "0 is black or white"),
    "a preview": (tiff(G8, 1, (254, 4, [1])), "a preview"),
    "a mask": (tiff(G8, 4, bits=1, packed=b"\x50"), "a TIFF of a kind"),
    "a filter of colors": (tiff(G8.astype(np.uint32), 32_803), "a TIFF of a kind"),
    "no palette": (tiff(G8, 1, (320, *FAR)), "tag 320 points beyond"),
    "16-bit planes": (tiff(RGB.astype(np.uint16) * 257, 2, planar=2), r"planes one after the other \(16 bits"),
    "Lab planes": (tiff(LAB, 8, planar=2), "planes one after the other"),
    "planes of gray and alpha": (tiff(GRAY_AND_ALPHA, 1, OPACITY, planar=2, packing=8), "planes one after the other"),
    "planes times alpha": (tiff(RGBA, 2, (338, 3, [1]), planar=2), "planes one after the other"),
    "planes of reversed bits": (tiff(RGB, 2, (266, 3, [2]), planar=2), "planes one after the other"),
    "other inks": (tiff(CMYK, 5, (332, 3, [2])), "inks other than CMYK"),
    "inverse dots": (tiff(CMYK, 5, (336, 1, [255, 0])), "a range of dots"),
    "video YCbCr": (tiff(YCC, 6, (530, 3, [1, 1]), VIDEO), "a white"),
    "other coefficients": (
        tiff(YCC, 6, (530, 3, [1, 1]), (529, 5, [2126, 10_000, 7152, 10_000, 722, 10_000])), "coefficients"
    ),
    "fewer colors": (tiff(YCC, 6, (530, 3, [2, 2])), "fewer samples of color"),
    "fewer colors, unsaid": (tiff(YCC, 6), "fewer samples of color"),
    "one clear 16-bit color": (
        png(16, 2, bytes(24), chunk(b"tRNS", struct.pack(">3H", 0, 0, 0))), "16-bit color with one transparent color"
    ),
    "CMYK without Adobe": (
        without(saved(one_color((0, 0, 0, 9), "CMYK"), "JPEG"), b"Adobe"), "does not say whether its ink is inverted"
    ),
    "JPEG of 12 bits": (jpeg_of_12_bits(), "a JPEG of more than 8 bits"),
    "JPEG 2000 of 16-bit color": (jpeg_2000(RED, 16), "a JPEG 2000 of 16 bits"),
    "JPEG 2000 of 10-bit color": (jpeg_2000(RED, 10, no_jp2=True), "a JPEG 2000 of 10 bits"),
    "JPEG 2000 of 4-bit color": (jpeg_2000(RED, 4), "a JPEG 2000 of 4 bits"),
    "JPEG 2000 of 1-bit gray": (jpeg_2000(one_color(0, "L"), 1), "a JPEG 2000 of 1 bits"),
    "BMP of 8 bits, two grays": (bmp(8, b"\0\1\1\0", palette=TWO_GRAYS), "fewer colors than its bits"),
    "BMP of 4 bits, two grays": (bmp(4, b"\1\x10\0\0", palette=TWO_GRAYS), "fewer colors than its bits"),
    "BMP of 4444": (
        bmp(16, bytes(8), packing=3, masks=struct.pack("<4I", 0xF00, 0xF0, 0xF, 0xF000)), "a BMP of a kind"
    ),
    "gray PFM": (b"Pf\n1 1\n-1.0\n" + bytes(4), "floating-point"),
    "color PFM": (b"PF\n1 1\n-1.0\n" + bytes(12), "floating-point pixels"),
    "a PPM of Pillow's own": (b"P0CMYK 1 1 255\n" + bytes(4), "no standard knows"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_pixels_that_would_be_wrong_are_refused_with_their_kind(name: str) -> None:
    data, words = REFUSED[name]
    with pytest.raises(UnreadableImage, match=words):
        decode_image(data)


PHOTO = Image.fromarray(np.random.default_rng(0).integers(0, 256, (16, 24, 3), dtype=np.uint8))
JUNK = b"Exif\0\0" + b"\xff" * 30
TURNED_BY_JUNK = b"Exif\0\0MM\0*\0\0\0\x08\xff\xff" + b"\x01\x12\0\3\xff\xff\xff\xff" * 4
BROKEN = (
    chunk(b"tEXt", b"k\0v", is_sound=False), chunk(b"zTXt", b"k\0\0" + JUNK), chunk(b"iTXt", JUNK, is_sound=False),
    chunk(b"zTXt", b"x\0\0" + zlib.compress(bytes(9_000_000))), chunk(b"iCCP", b"k"),
    chunk(b"iCCP", b"k\0\0" + zlib.compress(bytes(80_000_000))), chunk(b"eXIf", JUNK),
    chunk(b"eXIf", JUNK, is_sound=False), chunk(b"tIME", b"", is_sound=False),
    *(chunk(name, data) for name in (b"pHYs", b"gAMA", b"cHRM", b"sRGB", b"acTL") for data in (b"", b"\0")),
)  # fmt: skip


@pytest.mark.parametrize("broken", BROKEN, ids=lambda chunk: f"{chunk[4:8].decode()} {len(chunk)}")
def test_broken_metadata_of_a_png_is_no_damage(broken: bytes) -> None:
    assert np.asarray(decode_image(png(8, 0, bytes(GRAY), broken)))[0, :, 0].tolist() == GRAY
    assert np.asarray(decode_image(png(8, 0, bytes(GRAY), late=broken)))[0, :, 0].tolist() == GRAY
    assert header_pixels(png(8, 0, bytes(GRAY), broken)) == 4, "what is decoded counts towards the bound on an upload"


def with_segment(marker: int, data: bytes) -> bytes:
    whole = saved(PHOTO, "JPEG")
    return whole[:2] + bytes([0xFF, marker]) + struct.pack(">H", len(data) + 2) + data + whole[2:]


def webp(change: Callable[[bytes], bytes]) -> bytes:
    return change(saved(PHOTO, "WEBP", lossless=True, exif=JUNK, icc_profile=b"junk", xmp=b"junk"))


SOUND: dict[str, tuple[bytes | Callable[[], bytes], str]] = {
    **{
        f"{kind} EXIF": (partial(saved, PHOTO, kind, exif=TURNED_BY_JUNK), kind)
        for kind in ("JPEG", "TIFF", "AVIF", "PNG")
    },
    **{f"{kind} profile": (saved(PHOTO, kind, icc_profile=JUNK), kind) for kind in ("JPEG", "TIFF", "AVIF", "PNG")},
    "JPEG EXIF of nothing": (saved(PHOTO, "JPEG", exif=JUNK), "JPEG"),
    "JPEG short profile": (with_segment(0xE2, b"ICC_PROFILE\0"), "JPEG"),
    "JPEG Photoshop": (with_segment(0xED, b"Photoshop 3.0\x008BIM\4\4"), "JPEG"),
    "JPEG JFIF": (with_segment(0xE0, b"JFIF\0"), "JPEG"),
    "JPEG Adobe": (with_segment(0xEE, b"Adobe"), "JPEG"),
    "WebP EXIF": (webp(lambda data: data), "WEBP"),
    "WebP cut in EXIF": (webp(lambda data: data[: data.index(b"EXIF") + 12]), "WEBP"),
    "WebP cut in XMP": (webp(lambda data: data[: data.index(b"XMP ") + 9]), "WEBP"),
    "WebP without the EXIF it promises": (webp(lambda data: data[: data.index(b"EXIF")]), "WEBP"),
    "TIFF maker": (tiff(np.asarray(PHOTO), 2, (271, *FAR)), "TIFF"),
    "TIFF EXIF far away": (tiff(np.asarray(PHOTO), 2, (34665, 4, [999_999])), "TIFF"),
    "TIFF orientation": (tiff(np.asarray(PHOTO), 2, (274, 3, [77])), "TIFF"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # outside of tests they go to the log
@pytest.mark.parametrize("name", SOUND)
def test_broken_metadata_beside_sound_pixels_is_no_damage(name: str) -> None:
    made, kind = SOUND[name]
    data = made() if callable(made) else made
    lossless = {"lossless": True} if kind == "WEBP" else {}
    assert decode_image(data).tobytes() == decode_image(saved(PHOTO, kind, **lossless)).tobytes()
    assert header_pixels(data) == 16 * 24
    turbo = Transform(resize=16, crop=16, mean=(0.5,) * 3, std=(0.5,) * 3, decoder="turbo")
    assert np.shape(decode_for(data, turbo))[:2] == (16, 24)


def test_broken_exif_in_heic_is_no_damage() -> None:
    assert decode_image(heic(PHOTO, exif=JUNK)).size == PHOTO.size


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "AVIF", "TIFF", "JPEG2000", "GIF", "BMP", "PPM"])
def test_truncated_pixels_are_damage_in_every_format(kind: str) -> None:
    whole = saved(PHOTO, kind)
    for cut in (whole[: len(whole) // 2], whole[: len(whole) * 4 // 5]):
        with pytest.raises(UnreadableImage, match=r"damaged|truncated"):
            decode_image(cut)


@pytest.mark.parametrize("name", [b"tRNS", b"IDAT"])
def test_broken_chunks_that_pixels_need_are_damage(name: bytes) -> None:
    with pytest.raises(UnreadableImage, match="damaged"):
        decode_image(png(8, 2, RGB.tobytes(), chunk(name, bytes(6), is_sound=False)))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
def test_the_orientation_is_applied_in_every_format_also_beside_a_broken_chunk(kind: str) -> None:
    pixels = np.zeros((32, 64, 3), np.uint8)
    pixels[:16, :32] = 255
    exif = Image.Exif()
    for orientation, bright in {1: (0, 0), 2: (0, -1), 3: (-1, -1), 4: (-1, 0), 5: (0, 0), 6: (0, -1), 7: (-1, -1),
                                8: (-1, 0)}.items():  # fmt: skip
        exif[0x0112] = orientation
        data = saved(Image.fromarray(pixels), kind, exif=exif)
        if kind == "PNG":
            place = data.index(b"IDAT") - 4
            data = data[:place] + chunk(b"tEXt", b"a\0b", is_sound=False) + data[place:]
        if kind == "JPEG":
            data = data[:2] + b"\xff\xe0\0\7JFIF\0" + data[2:]
        found = np.asarray(decode_image(data))
        assert found.shape[:2] == ((32, 64) if orientation < 5 else (64, 32))
        corners = {place: int(found[place].mean()) for place in ((0, 0), (0, -1), (-1, -1), (-1, 0))}
        assert max(corners, key=lambda place: corners[place]) == bright


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs pull"),
        (b"../../.git/annex/objects/a/b", "git annex get"),
        (b"/annex/objects/SHA256E-s1--0.png", "git annex get"),
        (b"", "an empty file"),
        (bytes(500), "nothing but zeros"),
        (b"\n<!DOCTYPE html><html>", "a web page"),
        (b"<?xml version='1.0'?><svg/>", "XML or SVG"),
        (b'{"error": "not found"}', "JSON"),
        (b"404: Not Found", "a text"),
        (b"%PDF-1.7", "a PDF"),
        (b"8BPS\0\1", "a Photoshop file"),
        (b"\xff\x0a\xfa\x7f", "a JPEG XL"),
        (b"P7\nWIDTH 1\n", "a PAM"),
        (b"\0\0\1\0\1\0\x10\x10", "ICO"),
        (b"\x93NUMPY\1\0", "an array of numbers"),
        (b"PK\3\4" + bytes(20), "an archive"),
        (b"\0\0\0\x18ftypmp42" + bytes(20), "a video"),
        (png(8, 0, b"\0", width=1)[:20], "damaged"),
        (b"\x7fELF\2\1\1\0", "not an image of a known format$"),
    ],
)
def test_a_file_that_is_no_image_is_named_for_what_it_is(data: bytes, reason: str) -> None:
    with pytest.raises(UnreadableImage, match=reason):
        decode_image(data)
