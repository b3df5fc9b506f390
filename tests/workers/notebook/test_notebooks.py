"""The notebooks of the documentation run as they stand, cell by cell, and say what their words say."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

marimo = pytest.importorskip("marimo", reason="the extra `notebooks` is not installed")

pytestmark = pytest.mark.long

NOTEBOOKS = Path(__file__).parents[3] / "docs" / "notebooks"


def executed(name: str) -> dict[str, Any]:
    """What the cells of a notebook define, once each has run."""
    spec = importlib.util.spec_from_file_location(name, NOTEBOOKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    _, defined = module.app.run()
    return dict(defined)


def test_a_first_job_labels_most_images_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    defined = executed("first_job")
    assert len(defined["right"]) == 200
    # 16 clusters of four digits at epsilon 0.5; 0.9 to 0.99 over twenty runs.
    assert defined["share"] > 0.75
    assert defined["price"].epsilon <= 0.5
    assert "epsilon" in defined["job"].privacy_card
    datasets = pytest.importorskip("datasets", reason="the extra `formats` is not installed")
    found = datasets.load_dataset(str(defined["labelled"]), split="train", cache_dir=str(tmp_path / "cache"))
    names = found.features["label"]
    assert [names.int2str(label) for label in found["label"]] == defined["labels"]["label_name"].to_pylist()
    assert found[0]["image"].size == (8, 8)
    assert len(defined["again"]) == 200


def test_choosing_shows_what_its_words_say() -> None:
    defined = executed("choosing")
    by_k, by_queries, by_epsilon = defined["by_k"], defined["by_queries"], defined["by_epsilon"]
    assert len({found.epsilon for found in by_k.values()}) == 1, "one image's price does not depend on k"
    agents = [found.agent_epsilon for found in by_k.values()]
    assert agents == sorted(agents)
    assert len(set(agents)) == 3
    knn, reverse = zip(*by_queries.values(), strict=True)
    assert knn == tuple(sorted(knn))
    assert len(set(reverse)) == 1, "a record is asked k times, however many questions there are"
    noise = [found.sigma_votes for found in by_epsilon.values()]
    assert noise == sorted(noise, reverse=True)


@pytest.mark.parametrize("name", ["first_job", "choosing"])
def test_marimo_finds_nothing_wrong_with_a_notebook(name: str) -> None:
    command = [sys.executable, "-m", "marimo", "check", str(NOTEBOOKS / f"{name}.py")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
