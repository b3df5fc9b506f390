from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld

from labeler.accounting.gaussian import epsilon_of_delta
from labeler.errors import InvalidSetting, PrivacyRefusal, UnsafeGrid
from labeler.methods.aux_distill import MOST_STEPS, LocalHeadTerms
from labeler.randomness import seeded_source

DELTA = 2e-5


def terms(**changes: Any) -> LocalHeadTerms:
    plain = {
        "num_classes": 10,
        "head_dimension": 129,
        "score_dimension": 65,
        "min_records": 2000,
        "num_negatives": 2000,
        "sigma_head": 6.0,
        "sigma_scores": 25.0,
    }
    return LocalHeadTerms(**(plain | changes))


def test_sensitivities_are_those_of_the_docstring() -> None:
    given_terms = terms(head_regularisation=0.02, score_regularisation=0.05, clip_norm=1.5)
    assert given_terms.head_sensitivity == pytest.approx(2 * math.sqrt(2) * 1.5 / (0.02 * 2000), rel=1e-3)
    assert given_terms.score_sensitivity == pytest.approx(2 * 1.5 / (0.05 * 4000), rel=1e-3)


def test_sensitivities_are_never_below_what_is_proved() -> None:
    for regularisation, clip_norm in ((0.01, 1.0), (1e-6, 1e-3), (10.0, 1e2), (1.0, 1e-6)):
        ours = terms(head_regularisation=regularisation, score_regularisation=regularisation, clip_norm=clip_norm)
        assert ours.head_sensitivity > 2 * math.sqrt(2) * clip_norm / (regularisation * 2000)
        assert ours.score_sensitivity > 2 * clip_norm / (regularisation * 4000)
        assert ours.head_descent.largest_norm > math.sqrt(2) * clip_norm / regularisation


def test_how_many_steps_are_made_follows_from_public_numbers_alone() -> None:
    """min_records and the classes change the bound, never the steps; weak regularisation stops at a public number."""
    for change in ({"min_records": 1}, {"num_classes": 3}, {"num_negatives": 7}):
        assert terms(**change).head_descent.iterations == terms().head_descent.iterations
    assert 300 < terms().head_descent.iterations < 400
    assert terms(min_records=1, head_regularisation=1e-5).head_descent.iterations == MOST_STEPS


def test_noise_does_not_grow_with_the_number_of_classes_and_the_papers_does() -> None:
    for classes in (2, 3, 10, 100):
        ours = terms(num_classes=classes)
        assert ours.head_sensitivity == pytest.approx(terms().head_sensitivity, rel=1e-3)
        papers = 2 * math.sqrt(classes) / (ours.head_regularisation * ours.min_records)
        # Equal for two classes, up to rounding; looser from three on.
        assert papers == pytest.approx(ours.head_sensitivity, rel=1e-3) or papers > 1.2 * ours.head_sensitivity


def test_the_certificate_is_above_two_independent_oracles_by_at_most_two_percent() -> None:
    both = terms()
    assert both.sigma_scores is not None
    composed = pld.from_gaussian_mechanism(both.sigma_head).compose(pld.from_gaussian_mechanism(both.sigma_scores))
    closed = epsilon_of_delta(DELTA, math.hypot(1 / both.sigma_head, 1 / both.sigma_scores))
    for oracle in (composed.get_epsilon_for_delta(DELTA), closed):
        assert oracle * 0.999 <= both.epsilon(DELTA) <= 1.02 * oracle


def test_dropping_the_certainty_head_costs_less_and_releases_less() -> None:
    only_head = terms(sigma_scores=None)
    assert only_head.epsilon(DELTA) < terms().epsilon(DELTA)
    assert only_head.event().coordinates == 10 * 129
    assert terms().event().coordinates == 10 * 129 + 65


def test_a_head_alone_is_priced_by_two_independent_oracles() -> None:
    """FedD: all of the price is the head's, so one record moves what is released by 1 / sigma_head deviations."""
    alone = terms(sigma_scores=None)
    oracle = pld.from_gaussian_mechanism(alone.sigma_head).get_epsilon_for_delta(DELTA)
    for one in (oracle, epsilon_of_delta(DELTA, 1 / alone.sigma_head)):
        assert one * 0.999 <= alone.epsilon(DELTA) <= 1.02 * one
    radius = math.sqrt(2) / 0.01 / alone.head_noise
    assert float(alone.event("agent").mu_squared) == pytest.approx(radius**2, rel=1e-3)


def test_agent_level_charges_the_longest_heads_there_are() -> None:
    both = terms()
    radius = math.hypot(math.sqrt(2) / 0.01 / both.head_noise, 1 / 0.01 / both.score_noise)
    assert float(both.event("agent").mu_squared) == pytest.approx(radius**2, rel=1e-3)
    assert both.event("agent").level == "agent"


def test_the_event_is_of_the_noise_that_is_added() -> None:
    """Sensitivity over noise, squared and added, up to rounding to the grid; what is added is measured in
    tests/workers/learning/test_private_heads.py."""
    both = terms()
    mu_squared = (both.head_sensitivity / both.head_noise) ** 2 + (both.score_sensitivity / both.score_noise) ** 2
    assert mu_squared < float(both.event().mu_squared) < 1.03 * mu_squared


def test_a_head_moved_by_its_sensitivity_moves_the_grid_by_no_more_than_the_event_says() -> None:
    both = terms()
    rng = np.random.default_rng(2)
    for _ in range(20):
        head, scores = 3 * rng.normal(size=(10, 129)), rng.normal(size=65)
        step, turn = rng.normal(size=head.shape), rng.normal(size=scores.shape)
        moved = head + step / np.linalg.norm(step) * both.head_sensitivity
        turned = scores + turn / np.linalg.norm(turn) * both.score_sensitivity
        grids = [
            both.mechanism.quantize(np.concatenate([one.ravel() / both.head_noise, two / both.score_noise]))
            for one, two in ((head, scores), (moved, turned))
        ]
        change = grids[0] - grids[1]
        assert int(change @ change) <= both.event().squared_sensitivity
        assert np.abs(change).max() <= both.event().largest_change


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e6])
def test_a_head_that_no_minimiser_can_be_is_refused(value: float) -> None:
    head = np.zeros((10, 129))
    head[3, 7] = value
    with pytest.raises(PrivacyRefusal):
        terms().release(head, np.zeros(65), source=seeded_source(b"x"))


def test_heads_of_another_shape_are_refused() -> None:
    for head, scores in (
        (np.zeros((9, 129)), np.zeros(65)),
        (np.zeros((10, 129)), np.zeros(64)),
        (np.zeros((10, 129)), None),
    ):
        with pytest.raises(InvalidSetting):
            terms().release(head, scores, source=seeded_source(b"x"))


@pytest.mark.parametrize(
    "change",
    [
        {"num_classes": 1},
        {"min_records": 0},
        {"min_records": 2.0},
        {"sigma_head": 0.0},
        {"sigma_scores": math.nan},
        {"head_regularisation": -1.0},
        {"clip_norm": math.inf},
        {"head_regularisation": 1e-6},
        {"score_regularisation": 1e-7},
        {"num_classes": 1100},
        {"num_negatives": 2**20 + 1},
        {"clip_norm": 1e-300},
    ],
)
def test_terms_out_of_bounds_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting):
        terms(**change)


def test_noise_below_any_grid_is_refused() -> None:
    with pytest.raises(UnsafeGrid):
        terms(sigma_head=1e-13)
