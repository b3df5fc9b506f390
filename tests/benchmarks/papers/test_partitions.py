"""Partitions: what each agent has, that nobody shares a record, and that the same seed gives the same deal."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from benchmarks.papers.partitions import (
    Rows,
    dirichlet_partition,
    mnist_partition,
)

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
