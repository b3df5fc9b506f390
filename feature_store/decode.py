"""From the bytes of an image file to an RGB image, or a sentence that says why not.

**DICOM** (this is the one door to pydicom) becomes gray or color as a reader of the image sees it. What is done to the
pixels, in this order, as the standard says (PS3.3 C.7.6.3, C.11.1, C.11.2):

    stored values       8 or 16 bits, signed or not; compressed ones are decompressed where pydicom can by itself.
    modality            rescale slope and intercept, or the modality lookup table.
    values of interest  the first window (or lookup table) of the file; without one, the image's smallest to largest.
    MONOCHROME1         is inverted, so that more is brighter, as for MONOCHROME2.
    color              RGB and YBR become RGB, palettes are looked up; no window applies.

The result has 8 bits. A file with more than one frame is refused: its owner decides which frame is the image.
Only what the pixels need is read of the header: no name, no date and no identifier of a patient.

**Metadata** never decides whether pixels are read. A PNG is read without a text or profile that is broken, and a TIFF
without a tag that points beyond it. An orientation that cannot be read turns nothing. Truncated or damaged pixels stay
damage.

**TIFF** says by itself what its numbers mean. Gray of 1 to 16 bits without a sign is read, black or white at zero. What
has another range (signs, 32 bits, floats) or does not say which end is black is refused: nobody knows its white.

**Warnings** of the libraries that decode quote the content of an image, as often as there are images. Each line of
their code that warns is reported once, in our log, without what it said.
"""

from __future__ import annotations

import io
import logging
import re
import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, BinaryIO, Final, TextIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, TiffImagePlugin, UnidentifiedImageError

from feature_store.image_files import FORMATS, HEAD_BYTES, is_dicom, is_heic, what_it_is
from feature_store.image_files import Skipped as Skipped
from labeler.errors import UnreadableFile, UnreadableImage

MAX_PIXELS = 64_000_000
"""Larger images are refused before they are decoded: a small file can unpack to gigabytes."""

_PILLOW: Final = tuple(one.pillow for one in FORMATS if one.pillow)
"""Formats that Pillow reads here, by its names. It knows more, of which one starts another program (EPS)."""


_BACKGROUND = (255, 255, 255)

_WARN: Final = re.compile(r"[/\\](PIL|pillow_heif|pydicom)[/\\].*\.py$")

log = logging.getLogger(__name__)


def _tell_warnings_once() -> None:
    """Route what Pillow and the other decoders warn of to the log; see the module."""
    told: set[tuple[str, int]] = set()
    others = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        found = _WARN.search(filename)
        if found is None:
            others(message, category, filename, lineno, file, line)
        elif (filename, lineno) not in told:
            told.add((filename, lineno))
            where = f"{found[1]}/{Path(filename).name}:{lineno}"
            log.warning("a decoder warned of an image", extra={"kind": category.__name__, "where": where})

    warnings.showwarning = show
    for category in (UserWarning, RuntimeWarning):
        # Not once for each text: Python would keep them all.
        warnings.filterwarnings("always", category=category, module=r"(PIL|pillow_heif|pydicom)\b")


_tell_warnings_once()


def decode_image(data: bytes | Path, *, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Decode one image to RGB.

    16-bit gray is scaled to 8 bits; a palette is looked up; transparent pixels are laid on white; an animation gives
    its first frame; the EXIF orientation is applied. DICOM and HEIC need the extras of those names.

    Raises:
        UnreadableImage: no image, truncated, too large, or of floating-point pixels whose range nobody knows.
    """
    file = data if isinstance(data, Path) else io.BytesIO(data)
    try:
        with data.open("rb") if isinstance(data, Path) else io.BytesIO(data) as opened:
            head = opened.read(HEAD_BYTES)
        if is_dicom(head):
            return read_dicom(data, max_pixels=max_pixels).convert("RGB")
        return _decoded(file, head, max_pixels)
    except UnreadableImage:
        raise
    except UnidentifiedImageError:
        raise UnreadableImage(what_it_is(head)) from None
    # Pillow has its own limit; where warnings are errors, so is its warning.
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise UnreadableImage(f"too large: more than {max_pixels} pixels") from None
    except FileNotFoundError:
        raise UnreadableFile("the file is gone") from None
    except PermissionError:
        raise UnreadableFile("no permission to read the file") from None
    # Pillow's decoders raise almost anything on damaged files; all of it means the same here.
    except Exception as error:
        raise UnreadableImage(f"damaged or truncated ({type(error).__name__})") from None


def _decoded(file: Path | io.BytesIO, head: bytes, max_pixels: int) -> Image.Image:
    try:
        with _opened(file, head) as image:
            width, height = image.size
            if width * height > max_pixels:
                raise UnreadableImage(f"too large: {width} x {height} pixels, the limit is {max_pixels} in all")
            image.load()
            return to_rgb(_full_range(_upright(image), image))
    except (ValueError, SyntaxError, struct.error):  # of metadata behind the pixels
        if (needed := _needed_chunks(file)) is None:
            raise
        return _decoded(needed, head, max_pixels)


def header_pixels(data: bytes) -> int:
    """Width times height as the header says, before anything is decoded; 0 where it is no image."""
    with suppress(Exception):
        if is_dicom(data):
            rows, columns = _size(_dataset(data, with_pixels=False))
            return rows * columns
        with _opened(io.BytesIO(data), data) as image:
            return int(image.size[0] * image.size[1])
    return 0


def _opened(file: Path | io.BytesIO, head: bytes) -> Image.Image:
    """An image of which the header was read, and nothing more."""
    if not is_heic(head):
        return open_image(file)
    try:
        from pillow_heif import HeifImageFile
    except ImportError:
        raise UnreadableImage("a HEIC image, which needs the extra 'heic': install private-labeler[heic]") from None
    return HeifImageFile(file)  # type: ignore[no-untyped-call]  # a subclass of Pillow's, untyped


def open_image(file: Path | io.BytesIO) -> Image.Image:
    """Read the header of an image in one of the formats that Pillow reads.

    Raises:
        UnreadableImage: a TIFF whose numbers have no known meaning.
        UnidentifiedImageError: it is no such image.
    """
    Image.init()
    formats: list[str] = [name for name in _PILLOW if name in Image.OPEN]
    file = _without_broken_tags(file)
    try:
        image = Image.open(file, formats=formats)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise
    except Exception:  # the parser of PNG raises almost anything for metadata
        if (needed := _needed_chunks(file)) is None:
            raise
        image = Image.open(needed, formats=formats)
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        _check_tiff(image)
    if image.mode == "L" and (factor := _OF_FEWER_BITS.get(str(image.tile[0].args))) and _has_value(image):
        image.info["transparency"] *= factor
    return image


_OF_FEWER_BITS: Final = {"L;2": 85, "L;4": 17}
"""Pillow spreads gray of 2 and 4 bits over 8, and leaves a PNG's transparent value as it was."""

_PNG: Final = b"\x89PNG\r\n\x1a\n"
_CHUNK: Final = struct.Struct(">I4s")
_CRC_BYTES: Final = 4
_SUBFILE_TYPE: Final = 254
_BYTE_ORDERS: Final = {b"II*\0": "<", b"MM\0*": ">"}
_BYTES_OF_KIND: Final = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4}
_TAGS_OF_PIXELS: Final = frozenset(
    {256, 257, 258, 259, 262, 266, 273, 274, 277, 278, 279, 284, 292, 293, 317, 320, 322, 323, 324, 325, 332, 338, 339}
    | {347, 529, 530, 531, 532}
)


def _has_value(image: Image.Image) -> bool:
    return isinstance(image.info.get("transparency"), int)


def _needed_chunks(file: Path | io.BytesIO) -> io.BytesIO | None:
    """Return a PNG without the chunks that its pixels do not need; None if it has none, and for any other file.

    Needed are the critical chunks, transparency, and an orientation whose checksum is right. A decoder may pass over
    the others (PNG, third edition, 13.1).
    """
    with _at_start(file) as opened:
        if opened.read(len(_PNG)) != _PNG:
            return None
        data = opened.read()
    kept, end, chunks = [_PNG], 0, 1
    while end + _CHUNK.size <= len(data):
        start = end
        chunks += 1
        length, kind = _CHUNK.unpack_from(data, start)
        end = start + _CHUNK.size + length + _CRC_BYTES
        checked = data[start + 4 : end]
        is_sound = zlib.crc32(checked[:-_CRC_BYTES]).to_bytes(_CRC_BYTES, "big") == checked[-_CRC_BYTES:]
        if not kind[0] & 0x20 or kind == b"tRNS" or (kind == b"eXIf" and is_sound):
            kept.append(data[start:end])
    return io.BytesIO(b"".join(kept)) if len(kept) < chunks else None


def _without_broken_tags(file: Path | io.BytesIO) -> Path | io.BytesIO:
    """Return a TIFF without the metadata of its first page that point beyond the file; any other file as it is.

    Pillow stops at the first such tag, and then misses those of the pixels that follow it.

    Raises:
        UnreadableImage: a tag that the pixels need points beyond the file.
    """
    with _at_start(file) as opened, suppress(struct.error):
        order = _BYTE_ORDERS.get(opened.read(4))
        if order is None:
            return file
        (start,) = struct.unpack(f"{order}I", opened.read(4))
        opened.seek(start)
        (count,) = struct.unpack(f"{order}H", opened.read(2))
        entries = bytearray(opened.read(12 * count))
        size = opened.seek(0, io.SEEK_END)
        whole = bytes(entries)
        for at in range(0, len(entries) - 11, 12):
            tag, kind, number, value = struct.unpack_from(f"{order}HHII", entries, at)
            length = _BYTES_OF_KIND.get(kind, size) * number
            if length <= 4 or value + length <= size:
                continue
            if tag in _TAGS_OF_PIXELS:
                raise UnreadableImage(f"damaged or truncated (TIFF tag {tag} points beyond the file)")
            struct.pack_into(f"{order}HHII", entries, at, tag, 1, 1, 0)
        if entries != whole:
            opened.seek(0)
            data = opened.read()
            return io.BytesIO(data[: start + 2] + entries + data[start + 2 + len(entries) :])
    return file


@contextmanager
def _at_start(file: Path | io.BytesIO) -> Iterator[BinaryIO]:
    """A file to read from its first byte; its place is the first byte afterwards."""
    with file.open("rb") if isinstance(file, Path) else nullcontext(file) as opened:
        opened.seek(0)
        try:
            yield opened
        finally:
            opened.seek(0)


def _check_tiff(image: TiffImagePlugin.TiffImageFile) -> None:
    """Refuse a TIFF whose numbers have no known range or meaning.

    Raises:
        UnreadableImage: signed or 32-bit numbers; no photometric interpretation; a preview in place of the image.
    """
    tags = image.tag_v2
    if TiffImagePlugin.PHOTOMETRIC_INTERPRETATION not in tags:
        raise UnreadableImage("a TIFF that does not say whether 0 is black or white; save it again, or as PNG")
    if image.mode != "F" and (2 in _samples(tags, TiffImagePlugin.SAMPLEFORMAT) or _bits(image) > 16):
        raise UnreadableImage(
            "a TIFF of signed or 32-bit numbers, whose range is unknown; save it with 8 or 16 bits without a sign"
        )
    if 1 in (one & 1 for one in _samples(tags, _SUBFILE_TYPE, default=0)):
        raise UnreadableImage("a TIFF whose first page is a preview, as raw files of cameras have; export the image")


def _samples(tags: Any, tag: int, *, default: int = 1) -> tuple[int, ...]:
    value = tags.get(tag, default)
    return tuple(value) if isinstance(value, tuple) else (value,)


def _bits(image: TiffImagePlugin.TiffImageFile) -> int:
    return max(_samples(image.tag_v2, TiffImagePlugin.BITSPERSAMPLE))


def _upright(image: Image.Image) -> Image.Image:
    """Return a decoded image turned as its metadata says; as it is where they cannot be read."""
    with suppress(Exception):  # parsers of metadata raise almost anything
        return ImageOps.exif_transpose(image)
    return image


def _full_range(image: Image.Image, file: Image.Image) -> Image.Image:
    """Return gray of more than 8 bits with black at 0, white at 65,535, and transparent pixels white.

    Pillow leaves three things to its callers: fewer than 16 bits in 16, a TIFF's white at zero, and the transparent
    value of a PNG of 16 bits.

    Args:
        image: the decoded image, turned upright.
        file: what it was decoded from.
    """
    if not image.mode.startswith("I;16"):
        return image
    values = np.asarray(image).astype(np.uint32)
    if isinstance(file, TiffImagePlugin.TiffImageFile):
        most = 2 ** _bits(file) - 1
        if file.tag_v2.get(TiffImagePlugin.PHOTOMETRIC_INTERPRETATION) == 0:
            values = most - values
        values = values * 65_535 // most
    elif _has_value(file):
        values[values == file.info["transparency"]] = 65_535
    return Image.fromarray(values.astype(np.uint16))


def to_rgb(image: Image.Image) -> Image.Image:
    """An RGB image with the same look, whatever the mode.

    Raises:
        UnreadableImage: floating-point pixels, or integers beyond 16 bits.
    """
    if image.mode.startswith("I"):
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 65_535:
            raise UnreadableImage(f"pixels of mode {image.mode} beyond 16 bits")
        # 65535 / 257 is exactly 255; Pillow's own conversion would clip everything above 255 to white.
        return Image.fromarray(np.rint(values / 257).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise UnreadableImage("floating-point pixels, whose range is unknown; save it with 8 or 16 bits")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        layered = image.convert("RGBA")
        page = Image.new("RGBA", layered.size, (*_BACKGROUND, 255))
        return Image.alpha_composite(page, layered).convert("RGB")
    return image.convert("RGB")


def png_thumbnail(image: Image.Image, *, side: int = 64) -> bytes:
    """A PNG of at most `side` pixels each way, of a public image, for reports."""
    small = image.copy()
    small.thumbnail((side, side), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    small.save(buffer, format="PNG")
    return buffer.getvalue()


EXTRA = "dicom"

_TAGS = (
    "Rows", "Columns", "SamplesPerPixel", "PhotometricInterpretation", "PlanarConfiguration", "BitsAllocated",
    "BitsStored", "HighBit", "PixelRepresentation", "NumberOfFrames", "PixelData", "FloatPixelData",
    "DoubleFloatPixelData", "RescaleSlope", "RescaleIntercept", "ModalityLUTSequence", "WindowCenter", "WindowWidth",
    "VOILUTFunction", "VOILUTSequence", "RedPaletteColorLookupTableDescriptor",
    "GreenPaletteColorLookupTableDescriptor", "BluePaletteColorLookupTableDescriptor",
    "RedPaletteColorLookupTableData", "GreenPaletteColorLookupTableData", "BluePaletteColorLookupTableData",
    "SmallestImagePixelValue", "LargestImagePixelValue", "PaletteColorLookupTableUID", "PixelPaddingValue",
)  # fmt: skip


def read_dicom(data: bytes | Path, *, max_pixels: int) -> Image.Image:
    """Decode one DICOM file to mode L or RGB; see the module.

    Raises:
        UnreadableImage: pydicom is not installed, several frames, too large, pixels of another kind, or damaged.
    """
    dataset = _dataset(data, with_pixels=True)
    rows, columns = _size(dataset)
    if rows * columns > max_pixels:
        raise UnreadableImage(f"too large: {columns} x {rows} pixels, the limit is {max_pixels} in all")
    frames = int(getattr(dataset, "NumberOfFrames", 1) or 1)
    if frames != 1:
        raise UnreadableImage(f"a DICOM file of {frames} frames; save the frame that is the image as a file of its own")
    if "PixelData" not in dataset:
        raise UnreadableImage("a DICOM file without whole-number pixels")
    if int(dataset.BitsAllocated) not in (8, 16):
        raise UnreadableImage(f"DICOM pixels of {dataset.BitsAllocated} bits; 8 and 16 are read")
    kind = str(dataset.PhotometricInterpretation)
    pixels = _pixels(dataset)
    if kind in ("MONOCHROME1", "MONOCHROME2"):
        grey = _grey(pixels, dataset)
        return Image.fromarray(255 - grey if kind == "MONOCHROME1" else grey)
    if kind == "PALETTE COLOR":
        from pydicom.pixels.processing import apply_color_lut

        looked_up = apply_color_lut(pixels, dataset)
        return Image.fromarray(looked_up if looked_up.dtype == np.uint8 else (looked_up >> 8).astype(np.uint8))
    if pixels.ndim == 3 and pixels.shape[2] == 3 and pixels.dtype == np.uint8:
        return Image.fromarray(pixels)  # YBR was turned into RGB when it was read
    raise UnreadableImage(f"DICOM pixels of kind {kind[:20]!r}; grey, RGB, YBR and palettes of 8 bits are read")


def _dataset(data: bytes | Path, *, with_pixels: bool) -> Any:
    try:
        import pydicom
    except ImportError:
        raise UnreadableImage(
            f"a DICOM image, which needs the extra {EXTRA!r}: install private-labeler[{EXTRA}]"
        ) from None
    # What it complains of are values of somebody's file; whether that can be read is said by us, without them.
    logging.getLogger("pydicom").propagate = False
    file = io.BytesIO(data) if isinstance(data, bytes) else data
    try:
        return pydicom.dcmread(file, specific_tags=list(_TAGS), stop_before_pixels=not with_pixels)
    except OSError:
        raise
    except Exception as error:
        raise UnreadableImage(f"a damaged DICOM file ({type(error).__name__})") from None


def _size(dataset: Any) -> tuple[int, int]:
    try:
        rows, columns = int(dataset.Rows), int(dataset.Columns)
    except (AttributeError, TypeError, ValueError):
        raise UnreadableImage("a DICOM file without an image") from None
    if rows < 1 or columns < 1:
        raise UnreadableImage("a DICOM file with an empty image")
    return rows, columns


def _pixels(dataset: Any) -> NDArray[Any]:
    try:
        from pydicom.pixels.utils import pixel_array

        found: NDArray[Any] = pixel_array(dataset)
    except Exception as error:
        compression = getattr(getattr(dataset, "file_meta", None), "TransferSyntaxUID", None)
        named = getattr(compression, "name", "unknown")
        raise UnreadableImage(
            f"DICOM pixels that cannot be read ({named}, {type(error).__name__}); save the file uncompressed, or "
            "install what decompresses it (pylibjpeg, for example)"
        ) from None
    return found


def _grey(stored: NDArray[Any], dataset: Any) -> NDArray[np.uint8]:
    from pydicom.pixels.processing import apply_modality_lut, apply_voi_lut

    if stored.ndim != 2:
        raise UnreadableImage("grey DICOM pixels of more than one sample each")
    try:
        values = np.asarray(apply_modality_lut(stored, dataset))
        has_window = "VOILUTSequence" in dataset or not (_empty(dataset, "Center") or _empty(dataset, "Width"))
        shown = np.asarray(apply_voi_lut(values, dataset, index=0) if has_window else values, dtype=np.float64)
    except Exception as error:
        raise UnreadableImage(f"a DICOM window or table that cannot be applied ({type(error).__name__})") from None
    if not np.isfinite(shown).all():
        raise UnreadableImage("a DICOM window or rescaling that gives no finite pixels")
    low, high = _range(dataset) if has_window else (float(shown.min()), float(shown.max()))
    if high == low:
        return np.zeros(shown.shape, dtype=np.uint8)
    found: NDArray[np.uint8] = np.rint(255 * np.clip((shown - low) / (high - low), 0.0, 1.0)).astype(np.uint8)
    return found


def _empty(dataset: Any, what: str) -> bool:
    return dataset.get(f"Window{what}") in (None, "")


def _range(dataset: Any) -> tuple[float, float]:
    """Return the values of black and of white after a window or a table: pydicom gives the range of the values before.

    With a negative slope the first is the larger.
    """
    if "VOILUTSequence" in dataset:
        bits = int(dataset.VOILUTSequence[0].LUTDescriptor[2])
        return 0.0, float(2**bits - 1)
    if "ModalityLUTSequence" in dataset:
        return 0.0, float(2 ** int(dataset.ModalityLUTSequence[0].LUTDescriptor[2]) - 1)
    bits, is_signed = int(dataset.BitsStored), int(dataset.PixelRepresentation) == 1
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if is_signed else (0, 2**bits - 1)
    slope, intercept = float(getattr(dataset, "RescaleSlope", 1)), float(getattr(dataset, "RescaleIntercept", 0))
    return low * slope + intercept, high * slope + intercept
