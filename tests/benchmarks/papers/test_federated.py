"""The tables of federated training keep their shape, and their settings are what they say."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.accuracy.office_caltech import DOMAINS
from benchmarks.papers import federated
from benchmarks.papers.federated import (
    cells,
    digits_federation,
    gradient_rows,
    office_federation,
)
from benchmarks.papers.partitions import MNIST_CASE, USPS_CASE
from workers.progress import silent


def test_the_quick_table_has_every_method_on_digits_with_its_price_and_the_papers_number(data_root: Path) -> None:
    rows = [row for cell in cells(data_root, full=False) for row in cell.run(silent)]
    assert [(row.case, row.method) for row in rows] == [
        (MNIST_CASE, "FedAvg"), (USPS_CASE, "FedAvg"), (MNIST_CASE, "DP-FedAvg"),
    ]  # fmt: skip
    private = rows[-1]
    assert private.epsilon is not None
    assert 4.2 < private.epsilon <= 4.3
    assert private.epsilon < private.settings["as_in_paper_epsilon"]
    assert (private.delta, private.level) == (1e-3, "agent")
    assert all(row.epsilon is None and row.level is None for row in rows[:-1])
    assert all("paper" in str(row.reference) and 0 <= row.value <= 100 for row in rows)


def test_agents_of_the_digits_hold_what_the_paper_says_and_test_images_are_not_public(data_root: Path) -> None:
    data = digits_federation(data_root, MNIST_CASE, 1)
    assert data.inputs.shape[:2] == (100, 600)
    assert min(data.sizes) >= 590
    assert max(len(set(own.tolist())) for own in data.labels) == 6
    assert len(data.test) == len(data.test_labels) == 7_000
    small = digits_federation(data_root, USPS_CASE, 1, full=False)
    assert small.inputs.shape[:2] == (20, 120)
    assert len(small.test) == 1_000


def _shards() -> dict[str, SimpleNamespace]:
    """Four small domains of separated classes, stored as features are."""
    rng = np.random.default_rng(5)
    shards = {}
    for domain in DOMAINS:
        labels = rng.integers(0, 10, 60)
        features = np.eye(10, 40)[labels] + 0.1 * rng.normal(size=(60, 40))
        features /= np.linalg.norm(features, axis=1, keepdims=True)
        shards[domain] = SimpleNamespace(
            features=np.rint(2048 * features).astype(np.int16),
            labels=labels,
            sources=[f"{domain} {number:03d}" for number in range(60)],
        )
    return shards


def test_office_rows_are_priced_per_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(federated, "AXES", 12)
    rows = gradient_rows(_shards(), "webcam", range(2), (4.0,), progress=silent)  # type: ignore[arg-type]
    assert [row.method for row in rows] == [
        "FedAvg", "DP-FedSGD, linear head", "DP-FedSGD, linear head on 12 public principal axes",
    ]  # fmt: skip
    assert rows[0].epsilon is None
    assert rows[0].value > 90
    for row in rows[1:]:
        assert row.epsilon is not None
        assert 3.95 < row.epsilon <= 4.0
        assert (row.delta, row.level) == (1e-4, "instance")


def test_what_is_fitted_for_office_depends_on_public_images_alone() -> None:
    """A private record that leaves moves no other record's features, not in the last bit, nor a test image's."""
    shards = _shards()
    full = office_federation(shards, "webcam", 0, 12)  # type: ignore[arg-type]
    amazon = shards["amazon"]
    shards["amazon"] = SimpleNamespace(
        features=amazon.features[1:], labels=amazon.labels[1:], sources=amazon.sources[1:]
    )
    less = office_federation(shards, "webcam", 0, 12)  # type: ignore[arg-type]
    assert less.sizes == [59, 60, 60]
    assert torch.equal(full.inputs[0, 1:60], less.inputs[0, :59])
    assert torch.equal(full.inputs[1:], less.inputs[1:])
    assert torch.equal(full.test, less.test)
