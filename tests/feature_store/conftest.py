"""Fixtures and pictures that several suites of features share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image


def write_pictures(folder: Path, names: Iterable[str], *, size: tuple[int, int] = (12, 9)) -> Path:
    """Write a picture of random colors under each name; return the folder."""
    rng = np.random.default_rng(8)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)).save(folder / name)
    return folder


@pytest.fixture(scope="session", autouse=True)
def _cache_of_these_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Networks that are converted here stay here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights of a tiny network of timm, in a file."""
    import timm
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "tiny.safetensors"
    save_file(timm.create_model("test_efficientnet", num_classes=0).state_dict(), path)
    return path
