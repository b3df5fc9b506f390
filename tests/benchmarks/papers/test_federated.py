"""The tables of federated training keep their shape, their settings are what they say, and agents share no record."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from benchmarks.accuracy.office_caltech import DOMAINS
from benchmarks.papers import federated
from benchmarks.papers.federated import (
    cells,
    digits_federation,
    gradient_rows,
    office_federation,
)
from benchmarks.papers.partitions import (
    MNIST_CASE,
    USPS_CASE,
    Rows,
    dirichlet_partition,
    mnist_partition,
)
from workers.progress import silent


def test_the_quick_table_has_every_method_on_digits_with_its_price_and_the_papers_number(data_root: Path) -> None:
    *digits, office = cells(data_root, full=False)
    assert office.key.startswith("Office-Caltech10, webcam")
    rows = [row for cell in digits for row in cell.run(silent)]
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


MNIST_COUNTS = (5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949)
"""Training digits of MNIST, 0 to 9."""


def _labels(counts: tuple[int, ...]) -> NDArray[np.int64]:
    return np.random.default_rng(0).permutation(np.repeat(np.arange(len(counts)), counts))


def _check_disjoint(partition: list[Rows], total: int) -> None:
    rows = np.concatenate(partition)
    assert len(np.unique(rows)) == len(rows)
    assert rows.min() >= 0
    assert rows.max() < total


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_papers_mnist_agents_know_six_digits_and_have_six_hundred_records_or_hardly_fewer(seed: int) -> None:
    labels = _labels(MNIST_COUNTS)
    partition = mnist_partition(labels, seed=seed)
    _check_disjoint(partition, len(labels))
    assert len(partition) == 100
    digits = {tuple(np.unique(labels[rows])) for rows in partition}
    assert {len(known) for known in digits} == {6}
    assert len(digits) > 50
    assert all(594 <= len(rows) <= 600 for rows in partition)
    assert all(99 <= count <= 100 for rows in partition for count in np.bincount(labels[rows]) if count)
    again = mnist_partition(labels, seed=seed)
    assert all(np.array_equal(one, other) for one, other in zip(partition, again, strict=True))
    assert not np.array_equal(partition[0], mnist_partition(labels, seed=seed + 10)[0])


@settings(max_examples=60, deadline=None)
@given(agents=st.integers(1, 12), digits=st.integers(1, 5), each=st.integers(1, 4), seed=st.integers(0, 1000))
def test_every_agent_has_exactly_its_number_of_digits(agents: int, digits: int, each: int, seed: int) -> None:
    labels = _labels((60, 70, 80, 60, 65))
    partition = mnist_partition(labels, agents=agents, digits_per_agent=digits, records=digits * each, seed=seed)
    _check_disjoint(partition, len(labels))
    assert [len(np.unique(labels[rows])) for rows in partition] == [digits] * agents
    assert [len(rows) for rows in partition] == [digits * each] * agents


@pytest.mark.parametrize(("alpha", "most_classes"), [(0.01, 3.0), (1000.0, 10.0)])
def test_dirichlet_clients_have_equal_sizes_and_as_many_classes_as_alpha_says(
    alpha: float, most_classes: float
) -> None:
    labels = _labels((500,) * 10)
    partition = dirichlet_partition(labels, clients=20, alpha=alpha, seed=3)
    _check_disjoint(partition, 5000)
    assert [len(rows) for rows in partition] == [250] * 20
    classes = [len(np.unique(labels[rows])) for rows in partition]
    assert np.mean(classes) <= most_classes
    assert np.mean(classes) >= 9.9 or alpha < 1
