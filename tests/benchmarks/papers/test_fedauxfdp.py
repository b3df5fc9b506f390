"""The table of FedAUXfdp on small features: its order, its prices, and the round from votes to a server model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression

from benchmarks.data import DataSet, Split
from benchmarks.papers import fedauxfdp, run_cells
from benchmarks.papers.fedauxfdp import Array, fit_multinomial, grid_votes, soft_labels

CLASSES, STORED = 10, 40


def photographs(count: int, seed: int) -> Split:
    """Positive features of norm one in ten groups: what a frozen network would give of photographs."""
    rng = np.random.default_rng(seed)
    centres = 0.5 + np.random.default_rng(0).normal(size=(CLASSES, STORED))
    labels = rng.integers(0, CLASSES, count)
    rows = np.maximum(centres[labels] + 1.5 * rng.normal(size=(count, STORED)), 0)
    return Split((rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32), labels)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> DataSet:
    data = DataSet(photographs(6_000, 1), photographs(500, 2))
    monkeypatch.setattr(fedauxfdp, "cifar10_few", lambda _root, **_: data)
    monkeypatch.setattr(fedauxfdp, "LAMBDAS", (0.1, 1.0))
    # Shares of 50,000 images: 1,000 of these 6,000, and 400 of them negatives.
    monkeypatch.setattr(fedauxfdp, "PUBLIC", 8_334)
    monkeypatch.setattr(fedauxfdp, "NEGATIVES", 3_334)
    monkeypatch.setattr(fedauxfdp, "CLIENTS", 10)
    monkeypatch.setattr(fedauxfdp, "AXES", 20)
    monkeypatch.setattr(fedauxfdp, "CENTRED", fedauxfdp.View("features centred", 20, 0.1, 3.0))
    return data


def test_the_table_has_every_method_alpha_and_epsilon_with_its_price(small: DataSet, tmp_path: Path) -> None:
    rows = run_cells("fedauxfdp", fedauxfdp.cells(tmp_path, full=False))
    swept = [row for row in rows if "lambda" in row.method]
    assert [row.epsilon is None for row in swept] == [True, False, False] * 4
    assert {row.settings["head_lambda"] for row in swept} == {0.1, 1.0}
    assert swept[0].settings["records"] == 5_000 // 10
    shares = [row for row in rows if "share of" in row.metric]
    assert {row.case for row in shares} == {f"Dirichlet {alpha}" for alpha in fedauxfdp.ALPHAS}
    assert all(abs(row.value - float(str(row.reference).split()[0])) < 20 for row in shares)
    rows = [row for row in rows if row not in swept + shares]
    assert len(rows) == 2 * (2 * 3 + 1)
    private = [row for row in rows if row.epsilon is not None]
    assert len(private) == 12
    # The same price, half of the noise: sigma is in units of what a record changes.
    assert sum(row.method.endswith(fedauxfdp.KEPT) for row in private) == 6
    for row in private:
        assert row.epsilon is not None
        assert 0.98 * 0.6 < row.epsilon <= 0.6
        assert (row.delta, row.level) == (2e-5, "instance")
        assert row.settings["as_in_paper_epsilon"] > row.epsilon
        assert row.reference is not None
        assert "paper" in row.reference
    assert {row.settings["dirichlet_alpha"] for row in rows} == {0.01, 10.24}


def test_certainty_saves_one_class_clients_where_the_mean_of_answers_does_not(small: DataSet) -> None:
    """The paper's claim, in small and without noise, with heads that see features as they are."""
    world = fedauxfdp.make_world(small, fedauxfdp.AS_IN_PAPER, 0.01, seed=5)
    found = {method: fedauxfdp.measure(world, method, None) for method in (fedauxfdp.FEDD, fedauxfdp.FEDAUX)}
    assert found[fedauxfdp.FEDAUX].accuracy > found[fedauxfdp.FEDD].accuracy


def test_all_methods_spend_the_same_and_only_one_has_certainty(small: DataSet) -> None:
    world = fedauxfdp.make_world(small, fedauxfdp.CENTRED, 10.24, seed=5)
    terms = {method: fedauxfdp.measure(world, method, 0.6).terms for method in fedauxfdp.METHODS}
    spent = [made.epsilon(fedauxfdp.DELTA) for made in terms.values() if made is not None]
    assert len(spent) == 3
    assert max(spent) - min(spent) < 0.01
    certainty = [made.sigma_scores is not None for made in terms.values() if made is not None]
    assert certainty == [False, False, True]


@given(seed=st.integers(0, 2**31), scale=st.sampled_from([1, 7, 1 << 16, 1 << 30]), classes=st.integers(2, 12))
@settings(max_examples=60, deadline=None)
def test_votes_on_the_grid_never_exceed_one_vote_per_query(seed: int, scale: int, classes: int) -> None:
    rng = np.random.default_rng(seed)
    soft = rng.dirichlet(np.full(classes, 0.3), size=20) * rng.random((20, 1)) ** 0.2
    soft[0] = 1 / classes
    votes = grid_votes(soft, scale=scale)
    assert votes.dtype == np.int64
    assert votes.min() >= 0
    assert votes.sum(axis=1).max() <= scale
    assert np.abs(votes - scale * soft).max() <= 1


def test_soft_labels_are_the_papers_equation_1(rng: np.random.Generator) -> None:
    certainties = rng.random((3, 20))
    answers = rng.dirichlet(np.ones(4), size=(3, 20))
    scale = 1 << 30
    total = sum(grid_votes(f[:, None] * g, scale=scale) for f, g in zip(certainties, answers, strict=True))
    expected = (certainties[:, :, None] * answers).sum(axis=0) / certainties.sum(axis=0)[:, None]
    assert soft_labels(np.asarray(total)) == pytest.approx(expected, abs=1e-6)


def records(rng: np.random.Generator, count: int, dimension: int, classes: int) -> tuple[Array, Array]:
    features = rng.normal(size=(count, dimension))
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    return features, np.eye(classes)[rng.integers(0, classes, count)]


def test_softmax_weights_are_scikit_learns_where_its_c_is_one_over_lambda_n(rng: np.random.Generator) -> None:
    features, targets = records(rng, 60, 5, 3)
    fit = fit_multinomial(features, targets, regularisation=0.05)
    oracle = LogisticRegression(C=1 / (0.05 * 60), fit_intercept=False, tol=1e-10, max_iter=10_000)
    found = oracle.fit(features, targets.argmax(axis=1)).coef_
    assert np.linalg.norm(fit - found) < 1e-4
