"""Personal models (PriFedSync): both ends, equation 2.1, an independent oracle, and the alpha that a site chooses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import log_softmax

from feature_store.query_selection import axis_rows
from labeler.errors import InvalidSetting
from labeler.records import PublicAxes, Records
from labeler.setting import Personal
from workers.learning import personal
from workers.learning.linear import INVERSE_REGULARISATION, rows_on_grid
from workers.learning.personal import personal_model

DIMENSION, CLASSES = 12, 3
CENTERS = np.random.default_rng(5).normal(size=(CLASSES, DIMENSION))


def records(count: int, seed: int, *, noise: float = 0.8) -> Records:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, count).astype(np.int16)
    raw = CENTERS[labels] + noise * rng.normal(size=(count, DIMENSION))
    raw /= np.linalg.norm(raw, axis=1, keepdims=True)
    return Records(np.rint(2048 * raw).astype(np.int16), rng.permutation(count), labels, "v")


SHARED = personal_model(
    records(600, 1), np.zeros((DIMENSION + 1, CLASSES)), axes=None, personal=Personal(alpha=0.0)
).weights
"""What many sites know together."""


def fitted(own: Records, helper: str = "interpolation", alpha: float | None = None) -> np.ndarray:
    made = personal_model(own, SHARED, axes=None, personal=Personal(helper=helper, alpha=alpha))
    return made.weights


@pytest.mark.parametrize("helper", ["interpolation", "proximal"])
def test_alpha_one_is_the_shared_model_and_alpha_zero_the_sites_own(helper: str) -> None:
    own = records(40, 2)
    assert np.array_equal(fitted(own, helper, 1.0), SHARED)
    elsewhere = personal_model(own, SHARED * 5, axes=None, personal=Personal(helper=helper, alpha=0.0)).weights
    assert np.array_equal(fitted(own, helper, 0.0), elsewhere)


def test_interpolation_is_equation_2_1() -> None:
    own = records(40, 2)
    for alpha in (0.25, 0.7):
        expected = (1 - alpha) * fitted(own, alpha=0.0) + alpha * SHARED
        assert np.allclose(fitted(own, alpha=alpha), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("axes", [None, PublicAxes(axis_rows(records(80, 9).features, 4))])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8])
def test_own_and_proximal_models_minimize_what_their_docstring_says(axes: PublicAxes | None, alpha: float) -> None:
    """L-BFGS of scipy on the objective as written down is the oracle."""
    own = records(50, 3)
    shared = SHARED if axes is None else np.random.default_rng(1).normal(size=(5, CLASSES))
    ((rows, labels),) = rows_on_grid(own.trainable(None), axes, num_classes=CLASSES)
    z = rows / 2**20
    strength = alpha / (1 - alpha) * float(np.square(z).sum(axis=1).mean()) / (2 * z.shape[1])

    def objective(flat: np.ndarray) -> float:
        w = flat.reshape(shared.shape)
        losses = -log_softmax(z @ w, axis=1)[np.arange(len(z)), labels]
        pull = len(z) * strength / 2 * np.square(w - shared).sum()
        return float(losses.sum() + np.square(w).sum() / (2 * INVERSE_REGULARISATION) + pull)

    least = minimize(objective, np.zeros(shared.size), method="L-BFGS-B", options={"maxiter": 2000}).fun
    made = personal_model(own, shared, axes=axes, personal=Personal(helper="proximal", alpha=alpha)).weights
    assert objective(made.ravel()) == pytest.approx(least, rel=1e-3)


def test_identity_starts_from_the_shared_model_and_fits_the_sites_records_better() -> None:
    own = records(30, 4)
    ((rows, labels),) = rows_on_grid(own.trainable(None), None, num_classes=CLASSES)
    truth, z, w = np.eye(CLASSES)[labels], rows / 2**20, SHARED.copy()
    for _ in range(personal.LOCAL_STEPS):
        probabilities = np.exp(log_softmax(z @ w, axis=1))
        w = w - (z.T @ (probabilities - truth) + w / INVERSE_REGULARISATION) / len(z)
    assert np.allclose(fitted(own, "identity"), w, atol=1e-9)


@pytest.mark.parametrize("helper", ["interpolation", "proximal"])
def test_a_site_with_few_noisy_records_chooses_the_shared_model_and_one_that_labels_otherwise_its_own(
    helper: str,
) -> None:
    few = personal_model(records(9, 6, noise=2.5), SHARED, axes=None, personal=Personal(helper=helper))
    assert few.alpha is not None
    assert few.alpha >= 0.75
    usual = records(200, 7)
    permuted = replace(usual, all_labels=((usual.all_labels + 1) % CLASSES).astype(np.int16))
    apart = personal_model(permuted, SHARED, axes=None, personal=Personal(helper=helper))
    assert apart.alpha is not None
    assert apart.alpha <= 0.25
    assert len(apart.scores) == len(personal.GRID)
    assert max(apart.scores) > np.log(0.5) > np.log(0.3) > apart.scores[-1]


@pytest.mark.parametrize("count", [0, 1, 2])
@pytest.mark.parametrize("helper", ["interpolation", "proximal", "identity"])
def test_a_site_with_next_to_no_records_has_a_model_and_without_one_it_is_the_shared_one(
    count: int, helper: str
) -> None:
    weights = fitted(records(count, 8), helper)
    assert np.isfinite(weights).all()
    if count == 0:
        assert np.array_equal(weights, SHARED)


def test_a_class_that_a_site_has_never_seen_is_known_by_the_shared_part() -> None:
    seen = records(300, 10)
    own = replace(seen, rows=np.flatnonzero(seen.all_labels != 2))
    new = records(300, 11)
    third = new.features[new.labels == 2].astype(np.float64) / 2048
    rows = np.hstack([third, np.ones((len(third), 1))])
    right = {alpha: float(((rows @ fitted(own, alpha=alpha)).argmax(axis=1) == 2).mean()) for alpha in (0.0, 0.75)}
    assert right[0.0] < 0.1
    assert right[0.75] > 0.5


def test_blocks_do_not_change_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    own = records(120, 12)
    whole = fitted(own, "proximal", 0.5)
    monkeypatch.setattr("workers.learning.linear.BLOCK", 50)
    monkeypatch.setattr("labeler.records.KEPT_NUMBERS", 700)
    assert np.allclose(fitted(own, "proximal", 0.5), whole, atol=1e-9)


def test_a_shared_model_of_another_shape_is_refused_and_a_personal_one_does_not_print() -> None:
    with pytest.raises(InvalidSetting, match="12 rows, and features of the site need 13"):
        personal_model(records(5, 1), SHARED[:-1], axes=None, personal=Personal())
    made = personal_model(records(40, 2), SHARED, axes=None, personal=Personal(alpha=0.5))
    assert repr(made) == "PersonalModel()"
