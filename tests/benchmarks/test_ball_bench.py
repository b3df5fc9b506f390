"""What the bench of ballots on a ball computes by itself: its reading, held against every assignment there is."""

from __future__ import annotations

import itertools
from math import exp
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from benchmarks import run_bench
from benchmarks.ball import ACCURACY, PRICES, READ, groups_posterior, one_to_one
from labeler.task import parse_task


@settings(max_examples=50, deadline=None)
@given(logits=hnp.arrays(np.float64, (4, 4), elements=st.floats(-8, 8)))
def test_the_posterior_is_the_sum_over_all_assignments(logits: np.ndarray) -> None:
    expected = np.zeros((4, 4))
    for assignment in itertools.permutations(range(4)):
        expected[range(4), assignment] += exp(sum(logits[range(4), assignment]))
    np.testing.assert_allclose(
        one_to_one(logits), expected / expected.sum(axis=1, keepdims=True), rtol=1e-9, atol=1e-12
    )


def test_groups_are_told_from_a_release_with_little_noise_and_not_from_noise_alone() -> None:
    task = parse_task(
        {
            "name": "t",
            "classes": list("abcd"),
            "method": "reverse-knn",
            "sigma_votes": 10.0,
            "delta": 1e-5,
            "max_queries": 4,
            "agents": 20,
            "ballot_radius": 10,
        }
    )
    order, membership = [2, 0, 3, 1], np.eye(4) / 4
    votes = 400 * membership @ np.eye(4)[order]
    votes -= votes.mean(axis=1, keepdims=True)
    assert groups_posterior(votes, membership, task).argmax(axis=1).tolist() == order
    assert groups_posterior(votes, membership, task).max(axis=1).min() > 0.99
    blind = groups_posterior(np.zeros((4, 4)), membership, task)
    np.testing.assert_allclose(blind, 0.25)


@pytest.mark.long
def test_the_bench_reaches_what_it_is_compared_with(data_root: Path) -> None:
    rows = run_bench("ball", data=data_root)["rows"]
    mnist = {(row["method"], row["epsilon"]): row for row in rows if row["case"].startswith("MNIST")}
    assert len(mnist) == 2 * len(PRICES)
    half = [row for (method, epsilon), row in mnist.items() if method.startswith(READ) and 0.4 < epsilon <= 0.5]
    assert len(half) == 2
    for row in half:
        assert (row["metric"], row["level"]) == (ACCURACY, "agent")
        assert row["value"] >= 96.3
