"""DICOM images (the one door to pydicom): from the bytes of a file to grey or colour as a reader of the image sees it.

What is done to the pixels, in this order, as the standard says (PS3.3 C.7.6.3, C.11.1, C.11.2):

    stored values       8 or 16 bits, signed or not; compressed ones are decompressed where pydicom can by itself
    modality            rescale slope and intercept, or the modality lookup table
    values of interest  the first window (or lookup table) of the file; without one, the image's own smallest to largest
    MONOCHROME1         is inverted, so that more is brighter, as for MONOCHROME2
    colour              RGB and YBR become RGB, palettes are looked up; no window applies

The result has 8 bits. A file with more than one frame is refused: whoever embeds it says which frame is the image.
Only what the pixels need is read of the header: no name, no date and no identifier of a patient.
"""

from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from labeler.errors import UnreadableImage

EXTRA = "dicom"

_PREAMBLE = 128
_MAGIC = b"DICM"
_TAGS = (
    "Rows", "Columns", "SamplesPerPixel", "PhotometricInterpretation", "PlanarConfiguration", "BitsAllocated",
    "BitsStored", "HighBit", "PixelRepresentation", "NumberOfFrames", "PixelData", "FloatPixelData",
    "DoubleFloatPixelData", "RescaleSlope", "RescaleIntercept", "ModalityLUTSequence", "WindowCenter", "WindowWidth",
    "VOILUTFunction", "VOILUTSequence", "RedPaletteColorLookupTableDescriptor",
    "GreenPaletteColorLookupTableDescriptor", "BluePaletteColorLookupTableDescriptor",
    "RedPaletteColorLookupTableData", "GreenPaletteColorLookupTableData", "BluePaletteColorLookupTableData",
    "SmallestImagePixelValue", "LargestImagePixelValue", "PaletteColorLookupTableUID", "PixelPaddingValue",
)  # fmt: skip


def is_dicom(head: bytes) -> bool:
    """Whether the first 132 bytes are those of a DICOM file."""
    return head[_PREAMBLE : _PREAMBLE + len(_MAGIC)] == _MAGIC


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


def dicom_pixels(data: bytes) -> int:
    """Width times height as the header says."""
    rows, columns = _size(_dataset(data, with_pixels=False))
    return rows * columns


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
    """What stands for black and for white after a window or a table: pydicom gives the range of the values before it.

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
