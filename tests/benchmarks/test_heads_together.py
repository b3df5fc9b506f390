"""Heads that are trained together: the minimum of each agent's own problem, whoever else is trained."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression

from benchmarks.scale.ballots import Federation, ballots_of
from benchmarks.scale.heads_together import fit_heads
from labeler.errors import BadData
from labeler.records import Records
from labeler.tally import QueryBatch
from labeler.task import parse_task
from workers.audit.pool import digits_pool
from workers.learning.linear import NO_RECORD, predict, train_head


def alone(features: NDArray[np.float64], labels: NDArray[np.integer], classes: int) -> NDArray[np.float64]:
    """scikit-learn's, until nothing is left to gain; of two classes it fits one difference, which counts half."""
    inverse = 20.0 if len(np.unique(labels)) == 2 else 10.0
    fitted = LogisticRegression(C=inverse, tol=1e-12, max_iter=100_000).fit(features, labels)
    weights = np.zeros((features.shape[1] + 1, classes))
    if len(fitted.classes_) == 2:
        weights[:-1, fitted.classes_] = np.stack([-fitted.coef_[0], fitted.coef_[0]], axis=1) / 2
        weights[-1, fitted.classes_] = np.array([-1, 1]) * fitted.intercept_[0] / 2
    else:
        weights[:-1, fitted.classes_], weights[-1, fitted.classes_] = fitted.coef_.T, fitted.intercept_
    return weights


@pytest.mark.parametrize("classes", [2, 3, 7])
def test_every_agent_gets_the_minimum_that_an_optimiser_of_its_own_finds(classes: int) -> None:
    rng = np.random.default_rng(classes)
    centres = rng.normal(size=(classes, 12))
    labels = rng.integers(0, classes, size=(9, 30))
    labels[:, :2] = 0, 1
    labels[4] = labels[4] % 2
    features = centres[labels] + rng.normal(size=(9, 30, 12))
    features /= np.linalg.norm(features, axis=2, keepdims=True)
    labels[3, 17:], labels[6, 5:] = NO_RECORD, NO_RECORD
    found = fit_heads(features, labels, num_classes=classes, inverse_regularisation=10.0)
    for weights, rows, own in zip(found, features, labels, strict=True):
        here = own != NO_RECORD
        expected = alone(rows[here], own[here], classes)
        assert np.abs(weights[:-1] - expected[:-1]).max() < 1e-5
        # Intercepts of all classes may move together: scores say the same.
        present = np.unique(own[here])
        gap = (weights[-1] - expected[-1])[present]
        assert np.abs(gap - gap.mean()).max() < 1e-5


def test_no_agent_hangs_on_who_else_is_trained() -> None:
    rng = np.random.default_rng(0)
    features, labels = rng.normal(size=(20, 15, 6)), rng.integers(0, 4, size=(20, 15))
    together = fit_heads(features, labels, num_classes=4, inverse_regularisation=10.0)
    for agent in range(20):
        own = slice(agent, agent + 1)
        single = fit_heads(features[own], labels[own], num_classes=4, inverse_regularisation=10.0)[0]
        assert np.abs(single - together[agent]).max() < 1e-9


def test_an_agent_of_one_class_or_of_no_record_has_nothing_to_learn() -> None:
    features, labels = np.ones((3, 4, 5)), np.array([[1] * 4, [NO_RECORD] * 4, [0, 1, 0, 1]])
    found = fit_heads(features, labels, num_classes=3, inverse_regularisation=10.0)
    assert np.array_equal(found[:2], np.zeros((2, 6, 3)))
    assert np.isfinite(found).all()


@pytest.mark.parametrize(
    ("features", "labels"),
    [
        (np.ones((2, 3)), np.zeros((2, 3), int)),
        (np.ones((2, 3, 4)), np.zeros((2, 4), int)),
        (np.full((2, 3, 4), np.nan), np.zeros((2, 3), int)),
        (np.ones((2, 3, 4)), np.full((2, 3), 5)),
    ],
)
def test_records_that_are_none_are_refused(features: NDArray[np.float64], labels: NDArray[np.integer]) -> None:
    with pytest.raises(BadData):
        fit_heads(features, labels, num_classes=5, inverse_regularisation=1.0)


def test_of_real_digits_hardly_a_vote_is_another_than_that_of_an_agent_of_the_product() -> None:
    """The product takes a fixed number of steps, so near-ties may differ: at most 2 votes in 1,000 do."""
    pool = digits_pool(seed=1)
    agents = Federation.dealt(pool, 40, records=30, seed=1)
    batch = QueryBatch(pool.public[:200])
    task = parse_task(
        {"name": "t", "classes": pool.classes, "method": "ensemble", "sigma_votes": 9.0, "delta": 1e-5,
         "agents": 40, "max_queries": 200}
    )  # fmt: skip
    found = ballots_of(task, batch, agents).argmax(axis=2)
    heads = [
        train_head(Records(pool.features[own], np.arange(30), pool.labels[own], "v").trainable(None), num_classes=10)
        for own in agents.places
    ]
    expected = np.stack([predict(head, batch.features) for head in heads])
    assert (found != expected).mean() <= 0.002
