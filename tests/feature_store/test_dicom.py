"""DICOM and HEIC as people see them: windows, inversion, bit depths; and a sentence for whatever is not read."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pydicom
import pytest
from PIL import Image
from pillow_heif import from_pillow
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.uid import UID, ExplicitVRLittleEndian, SecondaryCaptureImageStorage, generate_uid

from feature_store.backbones import load_backbone
from feature_store.backbones.spec import Transform
from feature_store.decode import decode_image, header_pixels
from feature_store.decode_process import PixelLimits, UnusableImage, decoded_images
from feature_store.embedding import embed_source
from labeler.errors import UnreadableImage

KEPT = Path(pydicom.__file__).parent / "data" / "test_files"
"""Files that come with pydicom."""
RAMP = np.arange(0, 4096, 16, dtype=np.uint16).reshape(16, 16)


def dicom(values: np.ndarray, *, kind: str = "MONOCHROME2", **changes: Any) -> bytes:
    """A DICOM file of some stored values; keywords set elements, None removes one."""
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID = SecondaryCaptureImageStorage
    meta.MediaStorageSOPInstanceUID = generate_uid()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    dataset = FileDataset("", {}, file_meta=meta, preamble=b"\0" * 128)
    dataset.PatientName, dataset.PatientID = "Meier^Anna", "4711"
    dataset.Rows, dataset.Columns = values.shape[:2]
    dataset.SamplesPerPixel = 3 if values.ndim == 3 else 1
    dataset.PhotometricInterpretation = kind
    if values.ndim == 3:
        dataset.PlanarConfiguration = 0
    bits = values.dtype.itemsize * 8
    dataset.BitsAllocated = dataset.BitsStored = bits
    dataset.HighBit = bits - 1
    dataset.PixelRepresentation = int(np.issubdtype(values.dtype, np.signedinteger))
    dataset.PixelData = values.tobytes()
    for name, value in changes.items():
        if value is None:
            delattr(dataset, name)
        else:
            setattr(dataset, name, value)
    buffer = io.BytesIO()
    pydicom.dcmwrite(buffer, dataset)
    return buffer.getvalue()


def grey(data: bytes) -> np.ndarray:
    image = decode_image(data)
    assert image.mode == "RGB"
    found = np.asarray(image)
    assert (found[..., 0] == found[..., 1]).all()
    return found[..., 0].astype(np.int64)


def test_without_a_window_an_image_goes_from_its_smallest_to_its_largest_value() -> None:
    found = grey(dicom(RAMP))
    assert (found.min(), found.max()) == (0, 255)
    assert found.ravel().tolist() == sorted(found.ravel().tolist())
    assert len(np.unique(found)) == 256, "sixteen bits are scaled, not cut"


def test_a_window_cuts_at_its_ends() -> None:
    found = grey(dicom(RAMP, **WINDOW))
    assert (found[RAMP <= 1535] == 0).all()
    assert (found[RAMP > 2560] == 255).all()
    inside = (RAMP > 1600) & (RAMP < 2500)
    # PS3.3 C.11.2.1.2.1: ((x - (c - 0.5)) / (w - 1) + 0.5) of the range.
    wanted = np.rint(255 * ((RAMP[inside] - 2047.5) / 1023 + 0.5))
    assert np.abs(found[inside] - wanted).max() <= 1


@pytest.mark.parametrize("slope", [2.0, -1.0])
def test_a_window_is_about_rescaled_values_and_a_negative_slope_turns_them_round(slope: float) -> None:
    values = RAMP * slope - 1024
    found = grey(dicom(RAMP, RescaleSlope=slope, RescaleIntercept=-1024, WindowCenter=values.mean(), WindowWidth=900))
    order = np.argsort(values.ravel(), kind="stable")
    shown = found.ravel()[order]
    assert (np.diff(shown) >= 0).all(), "brighter where the rescaled value is larger"
    assert (shown.min(), shown.max()) == (0, 255)


SMALL = np.arange(256, dtype=np.uint8).reshape(16, 16)
WINDOW = {"WindowCenter": 2048, "WindowWidth": 1024}


@pytest.mark.parametrize(
    ("made", "same"),
    [
        (dicom(RAMP, kind="MONOCHROME1"), 255 - grey(dicom(RAMP))),
        (dicom(RAMP, WindowCenter=[2048, 100], WindowWidth=[1024, 50]), grey(dicom(RAMP, **WINDOW))),
        (dicom(RAMP.astype(np.int16) - 2000), grey(dicom(RAMP))),
        (dicom(SMALL), SMALL),
        (dicom(np.full((4, 4), 700, dtype=np.uint16)), np.zeros((4, 4))),
        (dicom(RAMP, WindowCenter="", WindowWidth=""), grey(dicom(RAMP))),
    ],
    ids=["inverse", "the first window", "signed", "eight bits", "an even image is black", "an empty window is none"],
)
def test_pictures_that_must_be_equal(made: bytes, same: np.ndarray) -> None:
    assert (grey(made) == same).all()


def test_colours_stay_as_they_are() -> None:
    colours = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    assert (np.asarray(decode_image(dicom(colours, kind="RGB"))) == colours).all()


COLORS = np.array([[[255, 0, 0], [0, 128, 0], [10, 20, 30], [255, 255, 255]]], np.uint8)
PLACES = np.arange(4, dtype=np.uint8).reshape(1, 4)


def palette(bits: int, *values: int, data_bits: int = 0, name: str = "{}Palette") -> dict[str, Any]:
    """A gray palette that states so many bits; its values lie in as many, or in `data_bits`."""
    data = np.array(values, dtype=f"<u{(data_bits or bits) // 8}").tobytes()
    descriptors = {f"{one}PaletteColorLookupTableDescriptor": [4, 0, bits] for one in ("Red", "Green", "Blue")}
    return descriptors | {f"{name.format(one)}ColorLookupTableData": data for one in ("Red", "Green", "Blue")}


@pytest.mark.parametrize(
    "given",
    [
        palette(8, 0, 255, 128, 64),
        palette(8, 0, 255, 128, 64, data_bits=16),
        palette(16, 0, 65_535, 32_896, 16_448),
        palette(16, 0, 4, 0, 65_535, 32_896, 16_448, name="Segmented{}Palette"),
    ],
    ids=["8 bits", "8 bits in words", "16 bits", "segmented"],
)
def test_palettes_are_looked_up(given: dict[str, Any]) -> None:
    assert grey(dicom(PLACES, kind="PALETTE COLOR", **given)).tolist() == [[0, 255, 128, 64]]


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (dicom(PLACES, kind="PALETTE COLOR", **palette(16, 0, 255, 128, 64)), "states 16 bits and has values of 8"),
        (dicom(COLORS, kind="HSV"), "of kind 'HSV'"),
        (dicom(COLORS, kind="ARGB"), "of kind 'ARGB'"),
        (dicom(COLORS, kind="CMYK"), "of kind 'CMYK'"),
        (dicom(COLORS, kind="YBR_RCT"), "of kind 'YBR_RCT'"),
        (dicom(COLORS // 2, kind="RGB", BitsStored=7, HighBit=6), "of kind 'RGB', 7 bits"),
        (dicom(RAMP, BitsStored=12, HighBit=15), "12 bits below bit 15"),
    ],
)
def test_pixels_that_would_be_wrong_are_refused(made: bytes, words: str) -> None:
    with pytest.raises(UnreadableImage, match=words):
        decode_image(made)


def test_bits_beside_those_that_are_stored_do_not_count() -> None:
    stored = {"BitsStored": 12, "HighBit": 11}
    assert (grey(dicom(RAMP | 0xF000, **stored)) == grey(dicom(RAMP, **stored))).all()
    signed = RAMP.astype(np.int16) - 2048
    assert (grey(dicom(signed & 0xFFF, **stored)) == grey(dicom(signed, **stored))).all()


def test_one_image_is_the_same_in_every_encoding_that_is_read() -> None:
    names = (
        "MR_small",
        "MR_small_jp2klossless",
        "MR_small_RLE",
        "MR_small_bigendian",
        "MR_small_expb",
        "MR_small_implicit",
    )
    found = [np.asarray(decode_image(KEPT / f"{name}.dcm")) for name in names]
    assert all((one == found[0]).all() for one in found)
    assert len(np.unique(found[0])) > 50


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("SC_rgb_rle_2frame.dcm", "2 frames; save the frame"),
        ("rtdose_1frame.dcm", "32 bits; 8 and 16 are read"),
        ("SC_rgb_rle_16bit.dcm", "'RGB', 16 bits; grey, RGB"),
        ("MR_small_jpeg_ls_lossless.dcm", "JPEG-LS Lossless.*save the file uncompressed"),
        ("waveform_ecg.dcm", "without an image"),
        ("MR_truncated.dcm", "cannot be read"),
    ],
)
def test_what_is_not_read_says_why(name: str, words: str) -> None:
    with pytest.raises(UnreadableImage, match=words):
        decode_image(KEPT / name)


def test_pixels_that_lie_at_an_address_are_not_fetched() -> None:
    dataset = pydicom.dcmread(io.BytesIO(dicom(RAMP)))
    del dataset.PixelData
    dataset.PixelDataProviderURL = "http://127.0.0.1:9/jpip?target=other"
    dataset.file_meta.TransferSyntaxUID = UID("1.2.840.10008.1.2.4.94")  # JPIP referenced
    file = io.BytesIO()
    dataset.save_as(file)
    with pytest.raises(UnreadableImage, match="without whole-number pixels"):
        decode_image(file.getvalue())


def test_a_large_image_is_refused_by_its_header() -> None:
    lying = dicom(RAMP, Rows=60_000, Columns=60_000)
    assert header_pixels(lying) == 3_600_000_000
    with pytest.raises(UnreadableImage, match="too large: 60000 x 60000"):
        decode_image(lying)


def test_no_refusal_repeats_what_a_file_says_of_a_patient() -> None:
    for change in ({"NumberOfFrames": 7}, {"BitsAllocated": 32}, {"PixelData": b"12"}, {"Rows": 0}):
        with pytest.raises(UnreadableImage) as refused:
            decode_image(dicom(RAMP, **change))
        assert "Meier" not in str(refused.value)
        assert refused.value.__cause__ is None


def heic(image: Image.Image, **saved: Any) -> bytes:
    buffer = io.BytesIO()
    from_pillow(image).save(buffer, quality=95, **saved)
    return buffer.getvalue()


def test_heic_is_read_and_turned_as_the_telephone_held_it() -> None:
    pixels = np.zeros((48, 64, 3), dtype=np.uint8)
    pixels[:, :32] = (200, 30, 30)
    image = Image.fromarray(pixels)
    found = np.asarray(decode_image(heic(image))).astype(int)
    assert found.shape == (48, 64, 3)
    assert np.abs(found - pixels).mean() < 4
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    turned = decode_image(heic(image, exif=exif.tobytes()))
    assert turned.size == (48, 64)
    assert header_pixels(heic(image)) == 48 * 64
    with pytest.raises(UnreadableImage, match="too large: 64 x 48"):
        decode_image(heic(image), max_pixels=1000)
    with pytest.raises(UnreadableImage):
        decode_image(heic(image)[:200])


@pytest.mark.parametrize(("module", "extra"), [("pydicom", "dicom"), ("pillow_heif", "heic")])
def test_without_the_extra_one_sentence_names_it(monkeypatch: pytest.MonkeyPatch, module: str, extra: str) -> None:
    data = dicom(RAMP) if extra == "dicom" else heic(Image.new("RGB", (8, 8)))
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UnreadableImage, match=rf"needs the extra '{extra}': install private-labeler\[{extra}\]"):
        decode_image(data)
    assert header_pixels(data) == 0


def test_the_decoders_own_process_reads_both(tmp_path: Path) -> None:
    images = [dicom(RAMP, kind="MONOCHROME1"), heic(Image.new("RGB", (32, 32), (250, 250, 250)))]
    pq.write_table(pa.table({"image": images}), tmp_path / "upload.parquet")
    transform = Transform(resize=8, crop=8, mean=(0.5,), std=(0.5,))
    limits = PixelLimits(max_pixels=10_000, max_job_pixels=20_000)
    found = list(decoded_images(tmp_path / "upload.parquet", transform, limits, look=lambda: None))
    found = [one for one in found if not isinstance(one, UnusableImage)]
    assert [one.shape for one in found] == [(8, 8, 1), (8, 8, 1)]
    assert found[0][0].mean() > found[0][-1].mean() + 100, "the ramp is inverted"
    assert found[1].min() > 240


def test_a_folder_of_both_is_embedded(tmp_path: Path) -> None:
    folder = tmp_path / "scans"
    folder.mkdir()
    rng = np.random.default_rng(1)
    for number in range(3):
        (folder / f"{number}.dcm").write_bytes(dicom(rng.integers(0, 4096, (16, 16)).astype(np.uint16)))
        (folder / f"{number}.heic").write_bytes(heic(Image.new("RGB", (32, 32), (60 * number, 90, 120))))
    (folder / "frames.dcm").write_bytes(dicom(np.zeros((16, 16), np.uint16), NumberOfFrames=2))
    report = embed_source(folder, load_backbone("pixels:8"), tmp_path / "scans.shard", public=True)
    assert report.records == 6
    assert "a DICOM file of 2 frames" in report.skipped[0].reason
