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

**Metadata** never decides whether pixels are read (feature_store.repair). An orientation that cannot be read turns
nothing. Profiles and gammas are not applied: a value is what the file states. Truncated or damaged pixels stay damage.

**Kinds of pixels** that the decoders would read wrongly are corrected where that is exact, and refused otherwise.

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
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TextIO

import numpy as np
import PIL
from numpy.typing import NDArray
from PIL import GifImagePlugin, Image, ImageFile, ImageOps, TiffImagePlugin, UnidentifiedImageError

from feature_store.image_files import FORMATS, HEAD_BYTES, is_dicom, is_heic, what_it_is
from feature_store.image_files import Skipped as Skipped
from feature_store.repair import at_start, without_broken_tags, without_metadata
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
            return to_rgb(_corrected(_upright(image), image))
    except (ValueError, SyntaxError, struct.error):  # of metadata behind the pixels
        if (sound := without_metadata(file)) is None:
            raise
        return _decoded(sound, head, max_pixels)


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
        UnreadableImage: pixels of a kind that would be read wrongly, or whose numbers have no known meaning.
        UnidentifiedImageError: it is no such image.
    """
    Image.init()
    formats: list[str] = [name for name in _PILLOW if name in Image.OPEN]
    file = without_broken_tags(file)
    try:
        image = Image.open(file, formats=formats)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise
    except Exception as error:  # the parsers of metadata raise almost anything
        if str(error).startswith("Unsupported BMP"):
            raise UnreadableImage("a BMP of a kind that is not read; save it with 24 bits, or as PNG") from None
        if (sound := without_metadata(file)) is None:
            raise
        image = Image.open(sound, formats=formats)
    _refuse_misread(image, file)
    if image.mode == "L" and (factor := _OF_FEWER_BITS.get(_raw_mode(image))) and _has_value(image):
        image.info["transparency"] *= factor
    return image


_OF_FEWER_BITS: Final = {"L;2": 85, "L;4": 17}
"""Pillow spreads gray of 2 and 4 bits over 8, and leaves a PNG's transparent value as it was."""


def _raw_mode(image: Image.Image) -> str:
    """Return the arrangement of samples in the file, where Pillow's reader of a format tells it in one word."""
    tiles = image.tile if isinstance(image, ImageFile.ImageFile) else []
    return str(tiles[0].args) if tiles else ""


def _has_value(image: Image.Image) -> bool:
    return isinstance(image.info.get("transparency"), int)


def _refuse_misread(image: Image.Image, file: Path | io.BytesIO) -> None:
    """Refuse kinds of pixels that Pillow reads as something else.

    Raises:
        UnreadableImage: it is one of them.
    """
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        _check_tiff(image)
    elif image.format == "PNG" and _raw_mode(image) == "RGB;16B" and "transparency" in image.info:
        raise UnreadableImage("a PNG of 16-bit color with one transparent color; save it with opacity, or with 8 bits")
    elif image.format in ("JPEG", "MPO") and image.mode == "CMYK" and "adobe" not in image.info:
        raise UnreadableImage("a JPEG of CMYK that does not say whether its ink is inverted; save it as RGB")
    elif image.format == "JPEG2000":
        least, most = (9, 16) if image.mode.startswith("I") else (8, 8)
        if bits := {one for one in _bits_of_jpeg2000(file) if not least <= one <= most}:
            raise UnreadableImage(f"a JPEG 2000 of {min(bits)} bits; gray of 8 to 16 and color of 8 is read")
    elif image.format == "BMP" and _is_shown_with_other_bits(image, file):
        raise UnreadableImage(
            "a BMP whose gray palette has fewer colors than its bits; save it with 24 bits, or as PNG"
        )
    elif image.format == "PPM" and image.mode not in ("1", "L", "I", "RGB", "F"):
        raise UnreadableImage("a PPM of a kind that no standard knows; save it as PNG")


def _is_shown_with_other_bits(image: Image.Image, file: Path | io.BytesIO) -> bool:
    """Tell whether Pillow takes a BMP's places in a gray palette for its pixels, of 1 or 8 bits."""
    with at_start(file) as opened:
        head = opened.read(30)
    bits = int.from_bytes(head[24:26] if head[14] == 12 else head[28:30], "little")
    is_raw = isinstance(image, ImageFile.ImageFile) and image.tile[0].codec_name == "raw"
    return is_raw and bits != {"1": 1, "L": 8}.get(image.mode, bits)


def _bits_of_jpeg2000(file: Path | io.BytesIO) -> list[int]:
    """Return the bits of each component, as the codestream states them (ISO/IEC 15444-1, A.5.1 and I.4)."""
    with at_start(file) as opened:
        start = 0
        if opened.read(4) != _CODESTREAM:
            kind = b""
            while kind != b"jp2c":
                opened.seek(start)
                size, kind = struct.unpack(">I4s", opened.read(8))
                header, size = (16, *struct.unpack(">Q", opened.read(8))) if size == 1 else (8, size)
                start += header if kind == b"jp2c" else max(size, header)
        opened.seek(start + 40)
        (count,) = struct.unpack(">H", opened.read(2))
        return [(one & 0x7F) + 1 for one in opened.read(3 * count)[::3]]


# White at zero, and 12 bits, in the byte orders that Pillow leaves out; `_corrected` turns them round and scales them.
TiffImagePlugin.OPEN_INFO.update(
    {
        (b"MM", 0, (1,), 1, (16,), ()): ("I;16B", "I;16B"),
        (b"MM", 1, (1,), 1, (12,), ()): ("I;16", "I;12"),
        (b"MM", 0, (1,), 1, (12,), ()): ("I;16", "I;12"),
        (b"II", 0, (1,), 1, (12,), ()): ("I;16", "I;12"),
    }
)

_CODESTREAM: Final = b"\xff\x4f\xff\x51"
_SUBFILE_TYPE, _INK_SET, _DOT_RANGE = 254, 332, 336
_COEFFICIENTS, _SUBSAMPLING, _BLACK_AND_WHITE = 529, 530, 532
_REC601: Final = (0.299, 0.587, 0.114)
_ALL_VALUES: Final = (0.0, 255.0, 128.0, 255.0, 128.0, 255.0)
_OF_RGB, _OF_CMYK, _OF_YCBCR = 2, 5, 6
_PILLOW_VERSION: Final = int(PIL.__version__.partition(".")[0])


def _check_tiff(image: TiffImagePlugin.TiffImageFile) -> None:
    """Refuse a TIFF whose numbers have no known range or meaning, or one that Pillow does not know.

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
    if misread := _misread_tiff(image):
        raise UnreadableImage(f"a TIFF of {misread}, which is not read; save it as gray or RGB of 8 or 16 bits")


def _misread_tiff(image: TiffImagePlugin.TiffImageFile) -> str:
    tags, bits, is_raw = image.tag_v2, _bits(image), image.info.get("compression") == "raw"
    kind = tags[TiffImagePlugin.PHOTOMETRIC_INTERPRETATION]
    if tags.get(TiffImagePlugin.PLANAR_CONFIGURATION) == 2 and tags.get(TiffImagePlugin.SAMPLESPERPIXEL, 1) > 1:
        is_reversed = is_raw and tags.get(TiffImagePlugin.FILLORDER) == 2
        is_multiplied = 1 in _samples(tags, TiffImagePlugin.EXTRASAMPLES, default=0)
        if bits > 8 or kind not in (_OF_RGB, _OF_CMYK) or is_reversed or is_multiplied:
            return f"planes one after the other ({bits} bits, photometric interpretation {kind})"
    if kind == _OF_CMYK:
        inks = _samples(tags, _DOT_RANGE, default=0)
        if tags.get(_INK_SET, 1) != 1:
            return "inks other than CMYK"
        if {*inks[::2]} != {0} or {*inks[1::2]} - {2**bits - 1}:
            return "CMYK with a range of dots that it states itself"
    if kind == _OF_YCBCR and is_raw:  # libtiff converts all others
        if _samples(tags, _SUBSAMPLING, default=2) != (1, 1):
            return "YCbCr with fewer samples of color"
        if not np.allclose(_numbers(tags, _BLACK_AND_WHITE, _ALL_VALUES), _ALL_VALUES):
            return "YCbCr with a black and a white that it states itself"
        if not np.allclose(_numbers(tags, _COEFFICIENTS, _REC601), _REC601, atol=1e-3):
            return "YCbCr with coefficients other than those of JPEG"
        if _PILLOW_VERSION < 13:
            return "YCbCr without compression, which Pillow reads from version 13 on"
    return ""


def _numbers(tags: Any, tag: int, usual: tuple[float, ...]) -> tuple[float, ...]:
    found = tuple(float(one) for one in tags.get(tag, usual))
    return found if len(found) == len(usual) else (np.nan,) * len(usual)


def _samples(tags: Any, tag: int, *, default: int = 1) -> tuple[int, ...]:
    value = tags.get(tag, default)
    return tuple(value) if isinstance(value, tuple | bytes) else (value,)


def _bits(image: TiffImagePlugin.TiffImageFile) -> int:
    return max(_samples(image.tag_v2, TiffImagePlugin.BITSPERSAMPLE))


def _upright(image: Image.Image) -> Image.Image:
    """Return a decoded image turned as its metadata says; as it is where they cannot be read."""
    with suppress(Exception):  # parsers of metadata raise almost anything
        return ImageOps.exif_transpose(image)
    return image


def _corrected(image: Image.Image, file: Image.Image) -> Image.Image:
    """Return an image whose values mean what `to_rgb` takes them for; transparent gray of 16 bits is white.

    Pillow leaves five things to its callers. They are fewer than 16 bits in 16, a TIFF's white at zero, and the
    transparent value of a PNG of 16 bits. Some palettes of TIFFs hold 8 bits where the standard has 16. The first frame
    of a GIF may leave a part empty.

    Args:
        image: the decoded image, turned upright.
        file: what it was decoded from.
    """
    tiff = file if isinstance(file, TiffImagePlugin.TiffImageFile) else None
    if tiff is not None and image.mode in ("P", "PA"):
        colors = tiff.tag_v2[TiffImagePlugin.COLORMAP]
        if 0 < max(colors) < 256:  # libtiff does the same
            image.putpalette(bytes(np.array(colors, dtype=np.uint8).reshape(3, -1).T.ravel()))
    box = file.dispose_extent if isinstance(file, GifImagePlugin.GifImageFile) else None
    if box not in (None, (0, 0, *file.size)) and "transparency" not in file.info:
        page = Image.new("RGB", image.size, _BACKGROUND)
        page.paste(image.convert("RGB").crop(box), box)
        return page
    if not image.mode.startswith("I;16"):
        return image
    values = np.asarray(image).astype(np.uint32)
    if tiff is not None:
        most = 2 ** _bits(tiff) - 1
        if tiff.tag_v2.get(TiffImagePlugin.PHOTOMETRIC_INTERPRETATION) == 0:
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
    if image.mode == "La":
        image = image.convert("LA")  # Pillow converts it to nothing else
    if image.mode in ("RGBA", "LA", "PA", "RGBa") or "transparency" in image.info:
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
    "SegmentedRedPaletteColorLookupTableData", "SegmentedGreenPaletteColorLookupTableData",
    "SegmentedBluePaletteColorLookupTableData",
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
    if int(dataset.get("HighBit", dataset.BitsStored - 1)) != int(dataset.BitsStored) - 1:
        raise UnreadableImage(
            f"DICOM pixels of {dataset.BitsStored} bits below bit {dataset.HighBit}; the lowest bits are read"
        )
    pixels = _pixels(dataset)
    if kind in ("MONOCHROME1", "MONOCHROME2"):
        grey = _grey(pixels, dataset)
        return Image.fromarray(255 - grey if kind == "MONOCHROME1" else grey)
    if kind == "PALETTE COLOR":
        from pydicom.pixels.processing import apply_color_lut

        looked_up = apply_color_lut(pixels, dataset)
        if looked_up.dtype == np.uint8:
            return Image.fromarray(looked_up)
        tables = [dataset[name].value for one in _RGB if (name := f"{one}PaletteColorLookupTableData") in dataset]
        if any(np.frombuffer(table, "<u2").max() > 255 for table in tables) or not tables:
            return Image.fromarray((looked_up >> 8).astype(np.uint8))
        if int(dataset.RedPaletteColorLookupTableDescriptor[2]) > 8:
            raise UnreadableImage("a DICOM palette that states 16 bits and has values of 8; save it as RGB")
        return Image.fromarray(looked_up.astype(np.uint8))  # 8 bits each, in words of 16
    is_color = kind in _COLORS or (kind in _COLORS_OF_JPEG2000 and dataset.file_meta.TransferSyntaxUID.is_compressed)
    if is_color and pixels.ndim == 3 and pixels.shape[2] == 3 and pixels.dtype == np.uint8 and dataset.BitsStored == 8:
        return Image.fromarray(pixels)  # YBR was turned into RGB when it was read
    raise UnreadableImage(
        f"DICOM pixels of kind {kind[:20]!r}, {dataset.BitsStored} bits; grey, RGB, YBR and palettes of 8 bits are read"
    )


_RGB: Final = ("Red", "Green", "Blue")
_COLORS: Final = ("RGB", "YBR_FULL", "YBR_FULL_422")
_COLORS_OF_JPEG2000: Final = ("YBR_ICT", "YBR_RCT")


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
