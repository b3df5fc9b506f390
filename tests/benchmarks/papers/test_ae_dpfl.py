"""The bench of AE-DPFL: its rounds add the noise they are priced for, and its quick version runs on real digits.

A trained model casts at most one vote per question, whatever record or agent is left out.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from benchmarks.learning.together import Training, initial_parameters, predict_together, train_together
from benchmarks.papers.ae_dpfl import DELTA, group_ballots, task_for
from labeler.accounting.gaussian import epsilon_of_delta
from labeler.methods.sensitivity import squared_sensitivity
from labeler.planning import price
from labeler.task import Task


@pytest.mark.parametrize(("epsilon", "queries"), [(0.5, 10), (2.7, 60), (4.3, 500)])
def test_a_task_costs_what_was_asked_for_at_agent_level_and_more_for_one_record(epsilon: float, queries: int) -> None:
    task = task_for(epsilon, agents=100, queries=queries)
    paid = price(task)
    closed_form = epsilon_of_delta(DELTA, math.sqrt(queries) / task.sigma_votes)
    assert closed_form <= paid.agent.epsilon <= epsilon
    assert closed_form > 0.99 * epsilon
    assert paid.instance.epsilon >= epsilon_of_delta(DELTA, math.sqrt(2 * queries) / task.sigma_votes)


CLASSES, DIMENSION = 3, 4


def _probabilities(inputs: torch.Tensor, labels: torch.Tensor, public: torch.Tensor) -> NDArray[np.float32]:
    module, start = initial_parameters(lambda: torch.nn.Linear(DIMENSION, CLASSES), 1, seed=0)
    plan = Training(epochs=4, batch_size=4, learning_rate=0.3)
    trained = train_together(module, start, inputs[None], labels[None], training=plan, seeds=[3])
    return predict_together(module, trained, public)[0].softmax(dim=1).numpy()


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31 - 1),
    records=st.integers(2, 9),
    groups=st.integers(1, 5),
    certainty=st.sampled_from([0.0, 0.5, 0.8]),
)
def test_training_without_one_record_moves_no_more_than_the_price_says(
    seed: int, records: int, groups: int, certainty: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn((records, DIMENSION), generator=generator) * 2
    labels = torch.randint(0, CLASSES, (records,), generator=generator)
    public = torch.randn((12, DIMENSION), generator=generator)
    assignment = torch.randint(0, groups, (12,), generator=generator).numpy()
    left = torch.arange(records) != int(torch.randint(0, records, (1,), generator=generator))
    ballots = [
        group_ballots(
            _probabilities(inputs[rows], labels[rows], public), assignment, num_groups=groups, least_certainty=certainty
        )
        for rows in (torch.ones(records, dtype=torch.bool), left)
    ]
    task = Task(
        name="t", classes=("a", "b", "c"), method="ensemble", sigma_votes=5.0, delta=1e-4, max_queries=9, agents=3
    )
    for ballot in ballots:
        assert np.square(ballot).sum() <= (squared_sensitivity(task, "agent", groups) or 0)
        assert ballot.sum(axis=1).max() <= 1
    moved = ballots[0] - ballots[1]
    assert np.square(moved).sum() <= (squared_sensitivity(task, "instance", groups) or 0)
    assert np.square(moved).sum(axis=1).max() <= 2


def test_an_agent_that_is_not_certain_abstains() -> None:
    probabilities = np.array([[0.6, 0.4], [0.1, 0.9], [0.75, 0.25]])
    ballots = group_ballots(probabilities, np.array([0, 0, 1]), num_groups=2, least_certainty=0.75)
    assert ballots.tolist() == [[0, 0], [1, 0]]
