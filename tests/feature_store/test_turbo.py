"""The fast decoder: the same images count as images, nearly the same pixels, another fingerprint."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from feature_store.backbones import Transform, load_backbone, parse_spec
from feature_store.backbones.backbone import decode_for, decode_reduced, least_side, prepare_image, region
from feature_store.decode import decode_image
from labeler.errors import InvalidSetting, UnreadableImage

SLOW = Transform(resize=72, crop=64, mean=(0.5,) * 3, std=(0.5,) * 3, interpolation="bicubic")
FAST = SLOW.model_copy(update={"decoder": "turbo"})
GREY = FAST.model_copy(update={"mean": (0.5,), "std": (0.5,)})


def photo(width: int, height: int, seed: int = 0) -> Image.Image:
    """Soft shapes with some texture, as photographs have."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
    pixels = np.asarray(small.resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    return Image.fromarray((pixels + rng.integers(-8, 9, pixels.shape)).clip(0, 255).astype(np.uint8))


def encode(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return buffer.getvalue()


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
