"""The steps of embedding: full passes whatever cannot be read; ahead, in order; one recipe for a shard."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from feature_store.backbones import load_backbone, parse_spec
from feature_store.backbones.network import NetworkBackbone
from feature_store.embedding import Loaded, embed_source, load_image, loaded_batches
from feature_store.shard import Shard
from feature_store.sources import open_source

TRANSFORM = {"resize": 36, "crop": 32, "mean": [0.5] * 3, "std": [0.5] * 3}


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """20 photographs of 2 classes, three of which cannot be read."""
    rng = np.random.default_rng(8)
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(10):
            image = Image.fromarray(rng.integers(0, 256, (90, 70, 3), dtype=np.uint8))
            image.save(tmp_path / "photos" / name / f"{number}.jpg")
    for name in ("cat/0", "cat/3", "dog/9"):
        (tmp_path / "photos" / f"{name}.jpg").write_bytes(b"no image")
    return tmp_path / "photos"


def network(weights: Path, **settings: Any) -> NetworkBackbone:
    fields = {"kind": "timm", "architecture": "test_efficientnet", "weights": weights, "transform": TRANSFORM}
    backbone = load_backbone(parse_spec(fields), device="cpu", **settings)
    assert isinstance(backbone, NetworkBackbone)
    return backbone


def test_passes_are_full_whatever_batch_is_asked_for_and_whatever_cannot_be_read(
    weights: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass costs the same however many images it has: 17 images are 3 passes of 8, not one for every two images."""
    passed: list[int] = []
    run = NetworkBackbone._pass

    def counted(self: NetworkBackbone, block: NDArray[np.uint8]) -> NDArray[np.float32]:
        passed.append(len(block))
        return run(self, block)

    monkeypatch.setattr(NetworkBackbone, "_pass", counted)
    report = embed_source(photos, network(weights, batch_size=8), tmp_path / "out", batch_size=2)
    assert (report.records, len(report.skipped)) == (17, 3)
    assert passed == [8, 8, 1]


def test_features_are_the_same_whatever_lies_beside_them_and_however_many_threads(
    weights: Path, photos: Path, tmp_path: Path
) -> None:
    backbone, source = network(weights, batch_size=8), open_source(photos)
    embed_source(photos, backbone, tmp_path / "one", threads=1)
    embed_source(photos, backbone, tmp_path / "five", threads=5, batch_size=16)
    one, five = Shard.open(tmp_path / "one"), Shard.open(tmp_path / "five")
    rows = [
        {name: row.tobytes() for name, row in zip(shard.sources, np.asarray(shard.features), strict=True)}
        for shard in (one, five)
    ]
    assert rows[0] == rows[1]
    alone = load_image(source, 5, backbone.transform).pixels
    among = load_image(source, 6, backbone.transform).pixels
    assert alone is not None
    assert among is not None
    together = backbone.embed_prepared(np.stack([among, alone]))
    assert np.array_equal(backbone.embed_prepared(alone[None])[0], together[1])


def test_images_are_loaded_ahead_in_order_and_only_so_far() -> None:
    begun: list[int] = []
    lock = threading.Lock()

    def load(index: int) -> Loaded:
        with lock:
            begun.append(index)
        return Loaded(index, None if index % 5 == 0 else np.zeros(1, np.uint8), None, "")

    batches = loaded_batches(load, range(1000), batch_size=10, threads=3)
    first = next(batches)
    assert [item.index for item in first] == list(range(13))
    assert sum(item.pixels is not None for item in first) == 10
    assert len(begun) <= 13 + 2 * 10 + 4 * 8
    rest = [item.index for batch in batches for item in batch]
    assert rest == list(range(13, 1000))
