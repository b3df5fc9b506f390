"""Labelling with a model's file, which may come from somebody else."""

from __future__ import annotations

from pathlib import Path

import pytest

from feature_store import backbones
from feature_store.backbones.spec import is_plain_name
from feature_store.results.models import StoredModel
from labeler.errors import InvalidSetting
from workers.run.student import predict_images


@pytest.mark.parametrize(
    "name", ["timm:hf-hub:somebody/network", "hf-hub:somebody/network", "/srv/network.toml", "../x.pt", "network.toml"]
)
def test_a_models_file_cannot_have_a_path_or_somebodys_repository_loaded(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("nothing is loaded that no person has named")

    monkeypatch.setattr(backbones, "load_backbone", load)
    model = StoredModel("prototypes", ("cat", "dog"), {"backbone_fingerprint": "f" * 64}, name, "", {})
    with pytest.raises(InvalidSetting, match="--backbone"):
        predict_images(model, tmp_path)
    assert not is_plain_name(name)


@pytest.mark.parametrize("name", ["efficientnet-lite0", "pixels:16", "pixels", "timm:mobilenetv3_large_100"])
def test_names_of_published_backbones_are_loaded_by_themselves(name: str) -> None:
    assert is_plain_name(name)
