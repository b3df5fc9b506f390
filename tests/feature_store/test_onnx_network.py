"""Networks in ONNX Runtime: the features of torch, the same bits in every batch, and a cache that nobody need trust."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from feature_store.backbones import Backbone, load_backbone, load_network, onnx_network, parse_spec
from feature_store.backbones.backbone import ImageLike
from feature_store.backbones.network import NetworkBackbone
from feature_store.backbones.onnx_network import OnnxBackbone, cache_path
from feature_store.backbones.simclr import DIGITS, SimCLRConfig, pretrain
from feature_store.backbones.spec import BackboneSpec, Transform
from feature_store.rows import quantize
from labeler.errors import InvalidSetting


@pytest.fixture
def spec(weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BackboneSpec:
    """A tiny network of timm, and a cache that is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    transform = {"resize": 36, "crop": 32, "mean": [0.5] * 3, "std": [0.25] * 3}
    return parse_spec({"kind": "timm", "architecture": "test_efficientnet", "weights": weights, "transform": transform})


def load(spec: BackboneSpec) -> Backbone:
    return load_backbone(spec, device="cpu")


def cached(spec: BackboneSpec) -> Path:
    path = cache_path(spec)
    assert path is not None
    return path


def images_of_all_kinds() -> list[ImageLike]:
    """Gray, color, one pixel, one line, odd sizes, and much larger than the network's input."""
    rng = np.random.default_rng(11)
    shapes = [(40, 50), (41, 33, 3), (1, 1), (1, 200, 3), (7, 5, 3), (900, 1201, 3), (32, 32, 3), (36, 36, 3)]
    return [rng.integers(0, 256, shape, dtype=np.uint8) for shape in shapes]


def test_features_are_those_of_torch_under_its_fingerprint(spec: BackboneSpec) -> None:
    backbone, network, images = load(spec), load_network(spec, device="cpu"), images_of_all_kinds()
    assert isinstance(backbone, OnnxBackbone)
    assert (backbone.fingerprint, backbone.dimension) == (network.fingerprint, network.dimension)
    assert (backbone.spec["runtime"], backbone.spec["precision"]) == ("onnxruntime", "float32")
    assert "runtime" not in network.spec
    ours, torchs = backbone.embed(images), network.embed(images)
    assert np.abs(ours - torchs).max() < 1e-5 * np.abs(torchs).max()
    assert np.abs(quantize(ours).astype(int) - quantize(torchs)).max() <= 1


@pytest.mark.process
def test_a_feature_has_the_same_bits_in_every_batch_on_every_number_of_threads_and_after_every_load(
    spec: BackboneSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    converted, kept = load(spec), load(spec)
    pixels = np.random.default_rng(2).integers(0, 256, (33, 32, 32, 3), dtype=np.uint8)
    alone = np.concatenate([converted.embed_prepared(pixels[place : place + 1]) for place in range(33)])
    for backbone in (converted, kept, load_backbone(spec, device="cpu", batch_size=8)):
        for threads in ("1", "3", "64", ""):
            monkeypatch.setenv("OMP_NUM_THREADS", threads)
            monkeypatch.setattr(onnx_network, "all_cores", lambda: 5)
            for size in (8, 32, 33):
                together = backbone.embed_prepared(pixels[33 - size :][::-1])
                assert np.array_equal(together[::-1], alone[33 - size :])
    assert converted.embed_prepared(pixels[:0]).shape == (0, converted.dimension)


@pytest.mark.process
def test_a_kept_network_needs_no_torch_and_tells_nobody_of_itself(spec: BackboneSpec, tmp_path: Path) -> None:
    """ONNX Runtime would write an identifier of the machine into the cache folder, and begin a sender with a socket."""
    expected = load(spec).embed_prepared(np.full((3, 32, 32, 3), 7, np.uint8))
    code = (
        "import os, sys\nimport numpy as np\nfrom feature_store.backbones import load_backbone, parse_spec\n"
        "spec = parse_spec({**__import__('json').loads(sys.argv[1])})\n"
        "backbone = load_backbone(spec, device='cpu')\n"
        "np.save(sys.argv[2], backbone.embed_prepared(np.full((3, 32, 32, 3), 7, np.uint8)))\n"
        "assert not {'torch', 'timm', 'onnx'} & sys.modules.keys()\n"
        "if sys.platform == 'linux':\n"
        "    opened = [os.readlink(f'/proc/self/fd/{one}') for one in os.listdir('/proc/self/fd')[:-1]]\n"
        "    assert not [one for one in opened if one.startswith('socket')], opened\n"
        "print(backbone.fingerprint)\n"
    )
    command = [sys.executable, "-c", code, spec.model_dump_json(exclude_none=True), str(tmp_path / "features.npy")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == load(spec).fingerprint
    assert np.array_equal(np.load(tmp_path / "features.npy"), expected)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["private-labeler"]


def flip(data: bytes) -> bytes:
    return data[:-100] + bytes([data[-100] ^ 1]) + data[-99:]


DAMAGES: tuple[Callable[[bytes], bytes], ...] = (
    flip,
    lambda data: data[:40],
    lambda data: data.replace(b'"key": "', b'"key": "0', 1),
    lambda data: b"[]\n" + data,
)


def test_a_file_of_the_cache_that_is_damaged_or_of_another_network_is_made_again(spec: BackboneSpec) -> None:
    pixels = np.random.default_rng(2).integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)
    expected, path = load(spec).embed_prepared(pixels), cached(spec)
    whole = path.read_bytes()
    assert path.stat().st_mode & 0o777 == 0o600
    (path.parent / f".{path.name}.half").write_bytes(whole[:50])  # of a conversion that was interrupted
    for damage in DAMAGES:
        path.write_bytes(damage(whole))
        again = load(spec)
        assert isinstance(again, OnnxBackbone)
        assert np.array_equal(again.embed_prepared(pixels), expected)
        assert len(path.read_bytes()) == len(whole)


def test_a_file_that_others_can_write_is_not_read(spec: BackboneSpec, caplog: pytest.LogCaptureFixture) -> None:
    load(spec)
    cached(spec).chmod(0o620)
    with caplog.at_level(logging.WARNING):
        assert isinstance(load(spec), OnnxBackbone)
    assert "another user" in caplog.text
    assert cached(spec).stat().st_mode & 0o777 == 0o600, "made again, and closed"


def test_where_nothing_can_be_kept_it_is_said_and_the_network_is_converted(
    spec: BackboneSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        assert isinstance(load(spec), OnnxBackbone)
    assert "set XDG_CACHE_HOME to a folder" in caplog.text
    assert str(tmp_path) not in caplog.text


def test_a_conversion_that_computes_something_else_is_not_used_and_not_tried_again(
    spec: BackboneSpec, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    export, exported = onnx_network._export, []

    def export_another(whole: nn.Module, pixels: NDArray[np.uint8]) -> bytes:
        exported.append(whole)
        next(whole.modules()).mean = torch.full((1, 3, 1, 1), 0.501)  # type: ignore[assignment]  # a module's buffer
        model = export(whole, pixels)
        next(whole.modules()).mean = torch.full((1, 3, 1, 1), 0.5)  # type: ignore[assignment]  # as above
        return model

    monkeypatch.setattr(onnx_network, "_export", export_another)
    with caplog.at_level(logging.WARNING):
        assert isinstance(load(spec), NetworkBackbone)
    assert "differs from torch" in caplog.text
    assert isinstance(load(spec), NetworkBackbone)
    assert len(exported) == 1


def test_a_network_that_the_exporter_refuses_stays_in_torch(tmp_path: Path) -> None:
    """Four places are averaged to three, of which the exporter knows nothing."""
    config = SimCLRConfig(
        options={"widths": [4, 8], "grid": 3},
        transform=Transform(resize=8, crop=8, mean=(0.5,), std=(0.5,)),
        augmentation=DIGITS,
        hidden=8,
        projection=4,
        epochs=1,
        batch_size=4,
    )
    images = list(np.random.default_rng(5).integers(0, 256, (8, 8, 8), dtype=np.uint8))
    whole = pretrain(images, config=config, seed=7, checkpoint=tmp_path / "digits.safetensors", device="cpu")
    for _ in range(2):
        loaded = load_backbone(tmp_path / "digits.safetensors", device="cpu")
        assert isinstance(loaded, NetworkBackbone)
        assert np.array_equal(loaded.embed(images), whole.embed(images))


def test_pixels_are_no_network_and_half_precision_still_needs_a_gpu(spec: BackboneSpec) -> None:
    load(spec)
    with pytest.raises(InvalidSetting, match="not a network"):
        load_network("pixels:8")
    with pytest.raises(InvalidSetting, match="half precision needs a GPU"):
        load_backbone(spec, device="cpu", half=True)
    with pytest.raises(InvalidSetting, match="batch_size must be at least 1"):
        load_backbone(spec, device="cpu", batch_size=0)
