"""Backbones: files and short names, pixels, networks of timm, and images that half precision cannot hold."""

from __future__ import annotations

import copy
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import timm
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from feature_store.backbones import (
    Backbone,
    Transform,
    load_backbone,
    load_network,
    network,
    onnx_network,
    parse_spec,
    read_spec,
)
from feature_store.backbones import spec as spec_module
from feature_store.backbones.backbone import prepare_image
from feature_store.backbones.network import NetworkBackbone
from feature_store.backbones.spec import DEFAULT_BACKBONE, DEFAULT_FINGERPRINT, PACKAGED, package_path
from feature_store.rows import quantize
from labeler.errors import BadData, InvalidSetting, TryAgain

GOOD = """
kind = "timm"
architecture = "mobilenetv2_100"
weights = "w.safetensors"
[options]
pad_type = "same"
[transform]
resize = 256
crop = 224
mean = [0.5, 0.5, 0.5]
std = [0.5, 0.5, 0.5]
"""


def test_a_backbone_file_names_weights_beside_itself(tmp_path: Path) -> None:
    path = tmp_path / "backbone.toml"
    path.write_text(GOOD)
    spec = read_spec(path)
    assert spec.weights == tmp_path / "w.safetensors"
    assert spec.transform is not None
    assert spec.transform.channels == 3


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("pad_type", "pad_type", ""),
        ('kind = "timm"', 'kind = "timm"\ncolour = 1', "colour: unknown field"),
        ("crop = 224", "crop = 257", "crop 257 must be at most resize 256"),
        ("std = [0.5, 0.5, 0.5]", "std = [0.5]", "one number per channel"),
        ("std = [0.5, 0.5, 0.5]", "std = [0.5, 0.5, nan]", "std"),
        ("crop = 224", "crop = 224\ninterpolation = 'magic'", "interpolation"),
        ('pad_type = "same"', "pretrained = true", "ours to set"),
        ('architecture = "mobilenetv2_100"', "", "needs an architecture"),
        (GOOD[GOOD.index("[transform]") :], "", "does not say how its images were prepared"),
        ('kind = "timm"', 'kind = "pixels"', "belong to kind timm"),
        (GOOD[GOOD.index("[options]") :], 'transform = "published"', ""),
        (GOOD[GOOD.index("[options]") :], 'transform = "guessed"', "transform"),
        ('kind = "timm"', 'kind = "packaged"', "kind packaged takes architecture = efficientnet-lite0"),
        ("[options]", "[options", "is not valid TOML: line 5, column 9"),
    ],
)
def test_each_wrong_field_has_its_sentence(tmp_path: Path, old: str, new: str, sentence: str) -> None:
    path = tmp_path / "backbone.toml"
    path.write_text(GOOD.replace(old, new, 1))
    if not sentence:
        read_spec(path)
        return
    with pytest.raises((InvalidSetting, BadData), match=sentence) as caught:
        read_spec(path)
    assert str(tmp_path) not in str(caught.value)


def test_short_names_are_understood() -> None:
    assert read_spec("pixels:8").options == {"size": 8}
    assert read_spec("resnet18") == read_spec("timm:resnet18")
    assert read_spec("folder/digits.safetensors").kind == "simclr"
    with pytest.raises(InvalidSetting, match="pixels:16"):
        read_spec("pixels:big")
    with pytest.raises(InvalidSetting, match=r"no backbone file 'none\.toml'"):
        read_spec("none.toml")
    with pytest.raises(BadData, match="no checkpoint file"):
        load_backbone("folder/digits.safetensors")
    with pytest.raises(InvalidSetting, match="did you mean 'efficientnet-lite0'"):
        load_backbone("efficientnet-lite00", device="cpu")


@pytest.mark.process
def test_a_missing_file_of_weights_is_refused_before_torch_is_imported() -> None:
    code = (
        "import sys\nfrom feature_store.backbones import load_backbone\nfrom labeler.errors import BadData\n"
        "for name, architecture in (('none.safetensors', None), ('none.safetensors', 'resnet18')):\n"
        "    try:\n        load_backbone(name, architecture=architecture)\n"
        "    except BadData as error:\n        assert \"'none.safetensors' in the folder named\" in str(error)\n"
        "    assert 'torch' not in sys.modules\n"
        "print('done')"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "done\n"


def test_pixels_are_centred_by_a_constant() -> None:
    backbone = load_backbone("pixels:2")
    features = backbone.embed([np.array([[0, 255], [51, 204]], dtype=np.uint8)])
    assert np.allclose(features, [[-0.5, 0.5, -0.3, 0.3]])
    assert backbone.dimension == 4
    assert backbone.embed([]).shape == (0, 4)


@pytest.mark.parametrize("is_tall", [False, True])
def test_preparing_equals_a_resize_followed_by_a_crop(rng: np.random.Generator, is_tall: bool) -> None:
    image = Image.fromarray(rng.integers(0, 256, (90, 60, 3) if is_tall else (60, 90, 3), dtype=np.uint8))
    transform = Transform(resize=40, crop=32, mean=(0.5,) * 3, std=(0.5,) * 3)
    size, box = ((40, 60), (4, 14, 36, 46)) if is_tall else ((60, 40), (14, 4, 46, 36))
    slow = image.resize(size, Image.Resampling.BILINEAR).crop(box)
    assert np.abs(prepare_image(image, transform).astype(int) - np.asarray(slow).astype(int)).max() <= 1


TINY = "test_efficientnet"
SMALL: dict[str, Any] = {"resize": 36, "crop": 32, "mean": [0.5] * 3, "std": [0.5] * 3}


def load(weights: Path, **changes: Any) -> Backbone:
    fields: dict[str, Any] = {"kind": "timm", "architecture": TINY, "weights": weights, "transform": SMALL}
    return load_backbone(parse_spec(fields | changes), device="cpu")


def pictures(count: int, seed: int = 3) -> list[Image.Image]:
    rng = np.random.default_rng(seed)
    return [Image.fromarray(rng.integers(0, 256, (40, 50, 3), dtype=np.uint8)) for _ in range(count)]


def test_equal_weights_under_other_options_have_another_fingerprint_and_no_folder_is_named(weights: Path) -> None:
    plain = load(weights)
    assert "tiny.safetensors" in str(plain.spec)
    assert str(weights.parent) not in str(plain.spec)
    assert load(weights).fingerprint == plain.fingerprint
    assert load(weights, options={"bn_eps": 1e-3}).fingerprint != plain.fingerprint
    assert load(weights, options={"pad_type": "same"}).fingerprint != plain.fingerprint
    assert load(weights, transform=SMALL | {"interpolation": "bicubic"}).fingerprint != plain.fingerprint


def test_the_fingerprint_follows_the_weights_and_not_their_file_name(weights: Path, tmp_path: Path) -> None:
    renamed = tmp_path / "renamed.safetensors"
    renamed.write_bytes(weights.read_bytes())
    assert load(renamed).fingerprint == load(weights).fingerprint
    torch.manual_seed(1)
    save_file(timm.create_model(TINY, num_classes=0).state_dict(), tmp_path / "other.safetensors")
    assert load(tmp_path / "other.safetensors").fingerprint != load(weights).fingerprint


def test_a_feature_does_not_depend_on_the_images_beside_it(weights: Path) -> None:
    backbone = load(weights)
    images = pictures(40)
    together = backbone.embed(images)
    assert together.dtype == np.float32
    assert together.shape == (40, backbone.dimension)
    assert np.array_equal(together[:5], backbone.embed(images[:5]))
    assert np.array_equal(together[33:34], backbone.embed(images[1:2] + images[33:34])[1:])


def test_weights_that_do_not_fit_are_refused(weights: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="does not fit"):
        load(weights, architecture="test_vit")
    (tmp_path / "text.safetensors").write_text("hello")
    with pytest.raises(BadData, match="no safetensors file"):
        load(tmp_path / "text.safetensors")
    with pytest.raises(BadData, match="no weights file"):
        load(tmp_path / "none.safetensors")


def test_a_hub_that_cannot_be_reached_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **settings: Any) -> None:
        assert settings["pretrained"] is True
        raise OSError("unreachable")

    monkeypatch.setattr(timm, "create_model", refuse)
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")  # nothing is tried before the library behind a proxy
    with pytest.raises(TryAgain, match="could not be fetched"):
        load_backbone("timm:resnet18", device="cpu")


@pytest.mark.process
def test_a_name_that_needs_the_hub_fails_at_once_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library would try for half a minute: it is not called at all."""
    for name in network._PROXIES:
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound and not listening: a connection is refused
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{nobody.getsockname()[1]}")
        monkeypatch.setattr(network, "_is_cached", lambda _: False)
        monkeypatch.setattr(timm, "create_model", None)
        with pytest.raises(TryAgain, match="efficientnet-lite0 needs no download"):
            load_backbone("timm:resnet18", device="cpu")


def test_a_weights_file_with_the_name_of_its_architecture_is_prepared_as_published(weights: Path) -> None:
    named = load_backbone(weights, architecture=TINY, device="cpu")
    published = timm.get_pretrained_cfg(TINY)
    assert named.spec["transform"]["crop"] == published.input_size[-1]
    assert named.spec["transform"]["mean"] == list(published.mean)
    written = load(weights, transform="published")
    assert written.fingerprint == named.fingerprint
    with pytest.raises(InvalidSetting, match="goes with a safetensors file"):
        load_backbone("pixels", architecture=TINY)


@pytest.mark.parametrize("name", [DEFAULT_BACKBONE, pytest.param("efficientnet-lite2", marks=pytest.mark.long)])
def test_packaged_weights_are_those_of_the_file_in_its_order(name: str) -> None:
    """Against the network of timm with its classifier, filled tensor by tensor; the classifier names real things."""
    package = PACKAGED[name]
    whole = timm.create_model(package.architecture, num_classes=1000)
    stored = torch.load(package_path(package), map_location="cpu", weights_only=True)
    assert [tuple(one.shape) for one in stored.values()] == [tuple(one.shape) for one in whole.state_dict().values()]
    whole.load_state_dict(dict(zip(whole.state_dict(), stored.values(), strict=True)))
    whole.eval()
    backbone, images = load_backbone(name, device="cpu"), pictures(2)
    inputs = load_network(name, device="cpu").tensors(images)[:]
    with torch.inference_mode():
        expected = whole.forward_head(whole.forward_features(inputs), pre_logits=True)  # type: ignore[attr-defined]
    assert np.allclose(backbone.embed(images), expected.numpy(), atol=1e-4)
    assert backbone.dimension == 1280
    assert (backbone.fingerprint == DEFAULT_FINGERPRINT) == (name == DEFAULT_BACKBONE), "new settings name it"


def test_packaged_weights_that_are_not_the_known_file_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = PACKAGED[DEFAULT_BACKBONE]
    changed = tmp_path / package.file
    changed.write_bytes(package_path(package).read_bytes()[:-1] + b"x")
    for module in (network, onnx_network):
        monkeypatch.setattr(module, "package_path", lambda _: changed)
    with pytest.raises(BadData, match="not the one whose digest we know"):
        load_backbone(DEFAULT_BACKBONE)
    changed.unlink()
    with pytest.raises(BadData, match="install it again"):
        load_backbone(DEFAULT_BACKBONE)
    monkeypatch.undo()
    monkeypatch.setattr(spec_module, "find_spec", lambda _: None)
    with pytest.raises(InvalidSetting, match=r"private-labeler\[lite2\]"):
        load_backbone("efficientnet-lite2")


@pytest.mark.gpu
def test_half_precision_on_a_gpu_gives_nearly_the_same_features(weights: Path) -> None:
    spec = parse_spec({"kind": "timm", "architecture": TINY, "weights": weights, "transform": SMALL})
    images = pictures(8)
    slow = quantize(load_backbone(spec, device="cpu").embed(images)).astype(np.int64)
    backbone = load_backbone(spec, device="cuda")
    fast = quantize(backbone.embed(images)).astype(np.int64)
    assert backbone.spec["precision"] == "float16"
    assert backbone.fingerprint == load_backbone(spec, device="cpu").fingerprint
    assert ((slow * fast).sum(axis=1) > 0.999 * 2048**2).all()


TRANSFORM = Transform(resize=8, crop=8, mean=(0.0,) * 3, std=(1.0,) * 3)


class Large(nn.Module):
    """Features of up to 180,000 times the mean brightness: beyond 65,504 for bright images. Notes its passes."""

    def __init__(self, *, weight: float = 6e4) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.tensor([[1.0, 0.9, 1.0, 0.8], [0.9, 1.0, 1.0, 1.0], [1.0, 1.0, 0.9, 1.0]]))
        self.weights.data *= weight
        self.passes: list[tuple[torch.dtype, int]] = []

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.passes.append((images.dtype, len(images)))
        return images.mean(dim=(2, 3)) @ self.weights


def halved(module: nn.Module) -> NetworkBackbone:
    made = NetworkBackbone(module, dimension=4, transform=TRANSFORM, spec={"kind": "test"}, device="cpu", batch_size=6)
    made._half, made._module, made._single = True, made._on_device(copy.deepcopy(module).half()), None
    return made


def shades(*brightness: int) -> NDArray[np.uint8]:
    rng = np.random.default_rng(1)
    return np.stack([rng.integers(0, one + 1, (8, 8, 3)).astype(np.uint8) for one in brightness])


def test_bright_images_come_from_float32_and_dark_ones_do_not() -> None:
    """On a processor, whose half precision is refused to users: there too it ends at 65,504."""
    some = shades(255, 20, 250, 10)
    whole = NetworkBackbone(Large(), dimension=4, transform=TRANSFORM, spec={}, device="cpu", batch_size=6)
    exact = whole.embed_prepared(some)
    features = halved(Large()).embed_prepared(some)
    assert np.isfinite(features).all()
    assert (exact[[0, 2]].max(axis=1) > 65504).all()
    assert np.array_equal(features[[0, 2]], exact[[0, 2]])
    assert not np.array_equal(features[[1, 3]], exact[[1, 3]])
    assert np.allclose(features, exact, rtol=5e-3)


def test_a_feature_does_not_depend_on_whether_another_image_overflows() -> None:
    dark, bright = shades(20, 10), shades(255, 255)
    alone = halved(Large()).embed_prepared(dark)
    beside = halved(Large()).embed_prepared(np.concatenate([dark, bright]))
    assert np.array_equal(beside[:2], alone)
    assert np.array_equal(beside[2:], halved(Large()).embed_prepared(bright))


def test_the_pass_in_float32_has_the_one_shape_too_and_only_where_it_is_needed() -> None:
    made = halved(Large())
    made.embed_prepared(shades(20, 10))
    assert made._single is None
    made.embed_prepared(shades(255))
    single = made._single
    assert isinstance(single, Large)
    assert single.passes[-1] == (torch.float32, 6)


@pytest.mark.parametrize("weight", [1.0, 1e6])
def test_a_copy_for_training_has_the_weights_as_they_were(weight: float) -> None:
    original = Large(weight=weight).weights.clone()
    copied = halved(Large(weight=weight)).training_copy()
    assert isinstance(copied, Large)
    assert torch.equal(copied.weights, original)
    assert copied.weights.requires_grad
