"""timm backbones: the right function is loaded, and another one never passes for it."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from feature_store.backbones import Backbone, load_backbone, network, parse_spec
from feature_store.backbones.spec import DEFAULT_BACKBONE, DEFAULT_FINGERPRINT, PACKAGED
from feature_store.rows import quantize
from labeler.errors import BadData, InvalidSetting, TryAgain

TINY = "test_efficientnet"
SMALL: dict[str, Any] = {"resize": 36, "crop": 32, "mean": [0.5] * 3, "std": [0.5] * 3}


def load(weights: Path, **changes: Any) -> Backbone:
    fields: dict[str, Any] = {"kind": "timm", "architecture": TINY, "weights": weights, "transform": SMALL}
    return load_backbone(parse_spec(fields | changes), device="cpu")


def pictures(count: int, seed: int = 3) -> list[Image.Image]:
    rng = np.random.default_rng(seed)
    return [Image.fromarray(rng.integers(0, 256, (40, 50, 3), dtype=np.uint8)) for _ in range(count)]


def test_equal_weights_under_other_options_have_another_fingerprint(weights: Path) -> None:
    plain = load(weights)
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


def test_the_description_names_no_folder(weights: Path) -> None:
    described = str(load(weights).spec)
    assert "tiny.safetensors" in described
    assert str(weights.parent) not in described


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
    stored = torch.load(network._path(package), map_location="cpu", weights_only=True)
    assert [tuple(one.shape) for one in stored.values()] == [tuple(one.shape) for one in whole.state_dict().values()]
    whole.load_state_dict(dict(zip(whole.state_dict(), stored.values(), strict=True)))
    whole.eval()
    backbone = load_backbone(name, device="cpu")
    images = pictures(2)
    with torch.inference_mode():
        expected = whole.forward_head(whole.forward_features(backbone.tensors(images)[:]), pre_logits=True)  # type: ignore[attr-defined]
    assert np.allclose(backbone.embed(images), expected.numpy(), atol=1e-4)
    assert backbone.dimension == 1280
    assert (backbone.fingerprint == DEFAULT_FINGERPRINT) == (name == DEFAULT_BACKBONE), "new settings name it"


def test_packaged_weights_that_are_not_the_known_file_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = PACKAGED[DEFAULT_BACKBONE]
    changed = tmp_path / package.file
    changed.write_bytes(network._path(package).read_bytes()[:-1] + b"x")
    monkeypatch.setattr(network, "_path", lambda _: changed)
    with pytest.raises(BadData, match="not the one whose digest we know"):
        load_backbone(DEFAULT_BACKBONE)
    changed.unlink()
    with pytest.raises(BadData, match="install it again"):
        load_backbone(DEFAULT_BACKBONE)
    monkeypatch.undo()
    monkeypatch.setattr(network, "find_spec", lambda _: None)
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


def mobilenet(data_root: Path, options: dict[str, Any]) -> Backbone:
    path = data_root / "backbones" / "mobilenetv2_100.safetensors"
    if not path.exists():
        pytest.skip("no mobilenetv2_100 weights in the data folder")
    transform = {"resize": 256, "crop": 224, "mean": [0.5] * 3, "std": [0.5] * 3}
    fields = {"kind": "timm", "architecture": "mobilenetv2_100", "weights": path, "transform": transform}
    return load_backbone(parse_spec(fields | {"options": options}), device="cpu", batch_size=20)


def test_mobilenet_tells_real_photos_apart_and_wrong_options_are_noticed(data_root: Path) -> None:
    """20 webcam photos of 4 classes against 20 of dslr; wrong options load the same file without complaint."""
    right = mobilenet(data_root, {"pad_type": "same", "bn_eps": 1e-3})
    wrong = mobilenet(data_root, {})
    assert wrong.spec["weights_sha256"] == right.spec["weights_sha256"]
    assert wrong.fingerprint != right.fingerprint
    folder = data_root / "office-caltech10"
    classes = sorted(path.name for path in (folder / "dslr").iterdir())[:4]
    labels = np.repeat(np.arange(4), 5)
    features = {}
    for domain in ("dslr", "webcam"):
        files = [file for name in classes for file in sorted((folder / domain / name).iterdir())[:5]]
        photos = [Image.open(file).convert("RGB") for file in files]
        features[domain] = right.embed(photos)
    normalised = {name: rows / np.linalg.norm(rows, axis=1, keepdims=True) for name, rows in features.items()}
    nearest = (normalised["webcam"] @ normalised["dslr"].T).argmax(axis=1)
    assert (labels[nearest] == labels).mean() >= 0.9
    other = wrong.embed(photos[:4])
    cosine = (other * features["webcam"][:4]).sum(axis=1) / np.linalg.norm(other, axis=1)
    cosine /= np.linalg.norm(features["webcam"][:4], axis=1)
    assert cosine.max() < 0.9
