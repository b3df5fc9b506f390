"""From the bytes of an image file to an RGB image, or a sentence that says why not."""

from __future__ import annotations

import io
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from feature_store.dicom import dicom_pixels, is_dicom, read_dicom
from labeler.errors import UnreadableImage

MAX_PIXELS = 64_000_000
"""Larger images are refused before they are decoded: a small file can unpack to gigabytes."""

_HEAD_BYTES = 132
_HEIC_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")

_BACKGROUND = (255, 255, 255)


@dataclass(frozen=True)
class Skipped:
    """An image that was left out, and why.

    Attributes:
        source: its name within the source.
        reason: a short sentence.
    """

    source: str
    reason: str


def decode_image(data: bytes | Path, *, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Decode one image to RGB.

    16-bit grey is scaled to 8 bits; a palette is looked up; transparent pixels are laid on white; an animation gives
    its first frame; the EXIF orientation is applied. What DICOM pixels become says `feature_store.dicom`; DICOM and
    HEIC need the extras of those names.

    Args:
        data: the bytes of a file, or its path.
        max_pixels: most width times height.

    Raises:
        UnreadableImage: no image, truncated, too large, or of floating-point pixels whose range nobody knows.
    """
    file = data if isinstance(data, Path) else io.BytesIO(data)
    try:
        head = _head(file)
        if is_dicom(head):
            return read_dicom(data, max_pixels=max_pixels).convert("RGB")
        with _opened(file, head) as image:
            width, height = image.size
            if width * height > max_pixels:
                raise UnreadableImage(f"too large: {width} x {height} pixels, the limit is {max_pixels} in all")
            image.load()
            return to_rgb(ImageOps.exif_transpose(image))
    except UnreadableImage:
        raise
    except UnidentifiedImageError:
        raise UnreadableImage("not an image of a known format") from None
    # Pillow has a limit of its own; where warnings are errors, so is its warning.
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise UnreadableImage(f"too large: more than {max_pixels} pixels") from None
    except FileNotFoundError:
        raise UnreadableImage("the file is gone") from None
    except PermissionError:
        raise UnreadableImage("no permission to read the file") from None
    # Pillow's decoders raise almost anything on damaged files; all of it means the same here.
    except Exception as error:
        raise UnreadableImage(f"damaged or truncated ({type(error).__name__})") from None


def header_pixels(data: bytes) -> int:
    """Width times height as the header says, before anything is decoded; 0 where it is no image."""
    with suppress(Exception):
        if is_dicom(data):
            return dicom_pixels(data)
        with _opened(io.BytesIO(data), data) as image:
            return int(image.size[0] * image.size[1])
    return 0


def _head(file: Path | io.BytesIO) -> bytes:
    if isinstance(file, io.BytesIO):
        return file.getbuffer()[:_HEAD_BYTES].tobytes()
    with file.open("rb") as opened:
        return opened.read(_HEAD_BYTES)


def _opened(file: Path | io.BytesIO, head: bytes) -> Image.Image:
    """An image of which the header was read, and nothing more."""
    if head[4:8] != b"ftyp" or head[8:12] not in _HEIC_BRANDS:
        return Image.open(file)
    try:
        from pillow_heif import HeifImageFile
    except ImportError:
        raise UnreadableImage("a HEIC image, which needs the extra 'heic': install private-labeler[heic]") from None
    return HeifImageFile(file)  # type: ignore[no-untyped-call]  # a subclass of Pillow's, without types of its own


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
