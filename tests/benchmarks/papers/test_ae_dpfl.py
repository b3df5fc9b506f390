"""The bench of AE-DPFL: its rounds add the noise they are priced for, and its quick version runs on real digits."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import norm

from benchmarks.papers import ae_dpfl
from benchmarks.papers.ensemble_rounds import ACCURACY, DELTA, LABELS, svhn, task_for, vote
from benchmarks.papers.partitions import MNIST_CASE
from feature_store.query_selection import select_queries
from labeler.accounting.gaussian import epsilon_of_delta
from labeler.planning import price


@pytest.mark.parametrize(("epsilon", "queries"), [(0.5, 10), (2.7, 60), (4.3, 500)])
def test_a_task_costs_what_was_asked_for_at_agent_level_and_more_for_one_record(epsilon: float, queries: int) -> None:
    task = task_for(epsilon, agents=100, queries=queries)
    paid = price(task)
    closed_form = epsilon_of_delta(DELTA, math.sqrt(queries) / task.sigma_votes)
    assert closed_form <= paid.agent.epsilon <= epsilon
    assert closed_form > 0.99 * epsilon
    assert paid.instance.epsilon >= epsilon_of_delta(DELTA, math.sqrt(2 * queries) / task.sigma_votes)


def test_the_noise_of_a_round_is_what_its_price_was_told() -> None:
    """Mean and variance of 5,000 noisy counts of 12 agents; both two-sided with a false-alarm rate of 5e-7."""
    rng = np.random.default_rng(1)
    task = task_for(2.7, agents=12, queries=500)
    questions = select_queries(rng.integers(-99, 99, (500, 8)).astype(np.int16), strategy="all")
    ballots = [np.eye(10, dtype=np.int64)[rng.integers(0, 10, 500)] for _ in range(12)]
    noise = vote(task, questions, ballots, seed="test").noisy_votes
    assert noise is not None
    noise = noise - np.sum(ballots, axis=0)
    assert task.total_sigma_votes == pytest.approx(task.sigma_votes)
    limit = norm.isf(2.5e-7)
    assert abs(noise.mean()) < limit * task.sigma_votes / math.sqrt(noise.size)
    assert abs(noise.var() / task.sigma_votes**2 - 1) < limit * math.sqrt(2 / noise.size)


def test_house_numbers_are_left_out_where_they_are_not_there(tmp_path: Path) -> None:
    assert svhn(tmp_path) is None


@pytest.mark.long
def test_the_quick_version_measures_every_cell_on_real_digits(data_root: Path) -> None:
    cells = ae_dpfl.cells(data_root, full=False)
    assert len({cell.key for cell in cells}) == len(cells)
    rows = [row for cell in cells for row in cell.run(lambda _stage, _done, _total: None)]
    assert all(math.isfinite(row.value) for row in rows)
    private = [row for row in rows if row.epsilon is not None]
    assert {row.level for row in private} == {"agent"}
    assert all(row.settings["instance_epsilon"] > row.epsilon for row in private if row.epsilon)
    by_method = {(row.case, row.method, row.metric): row for row in rows}
    ours = by_method[MNIST_CASE, "AE-DPFL, cluster centres, histogram", ACCURACY]
    assert ours.epsilon is not None
    assert ours.epsilon <= 4.3
    without = [row for row in rows if row.epsilon is None and row.metric == LABELS]
    # Ten classes: whoever guesses is right in a tenth of all cases, four standard deviations of 200 images below 0.19.
    assert all(row.value > 19 for row in without)
