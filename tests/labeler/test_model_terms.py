"""Tasks about models: their price is that of the mechanism that runs, and contributions beyond it are refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from labeler.accounting.gaussian import epsilon_of_delta
from labeler.batching import check_round_fits, round_sizes
from labeler.errors import InvalidSetting, InvalidTask, PrivacyRefusal
from labeler.linear_model import released_model
from labeler.methods.aux_distill import head_terms
from labeler.methods.blind_average import linear_terms, weight_sum
from labeler.methods.sensitivity import bounded_numbers, largest_distance, squared_sensitivity, training_of
from labeler.planning import price
from labeler.randomness import seeded_source
from labeler.release import Release, check_ballots, contribution, largest_sum
from labeler.setting import Sampled
from labeler.solving import solve_k, solve_sigma
from labeler.task import Task
from tests.labeler.tasks import make_task

TRAINING = {"min_records": 200, "regularisation": 0.05, "dimension": 10}


def task(method: str = "blind-average", **fields: Any) -> Task:
    given = {"sigma_votes": 4.0, "delta": 1e-5, "max_queries": 65, "agents": 5, "training": TRAINING}
    return make_task(method=method, **given | fields)


@pytest.mark.parametrize("method", ["blind-average", "aux-distill"])
@pytest.mark.parametrize("sigma", [0.5, 4.0, 30.0])
def test_sigma_is_the_noise_multiplier_of_what_one_record_changes(method: str, sigma: float) -> None:
    """Closed form: 1/sigma-GDP, whatever learner, regularisation and number of records; rounding adds a hundredth."""
    statement = price(task(method, sigma_votes=sigma)).instance
    exact = epsilon_of_delta(1e-5, 1 / sigma)
    assert exact < statement.epsilon < 1.02 * exact
    other = price(task(method, sigma_votes=sigma, training=TRAINING | {"regularisation": 0.5, "min_records": 7}))
    assert other.instance.epsilon == pytest.approx(statement.epsilon, rel=1e-2)


def test_a_whole_agent_is_worth_its_longest_model() -> None:
    asked = task(sigma_votes=20.0, training=TRAINING | {"radius": 2.0})
    terms = linear_terms(asked)
    exact = epsilon_of_delta(1e-5, terms.largest_norm / terms.sensitivity / 20.0)
    assert exact < price(asked).agent.epsilon < 1.02 * exact


def test_collusion_is_paid_in_noise_where_it_is_added_to_the_sum_and_not_at_all_where_it_is_local() -> None:
    for method, factor in (("blind-average", math.sqrt(5 / 3)), ("aux-distill", 1.0)):
        alone, wary = price(task(method)), price(task(method, colluding_agents=2))
        assert wary.instance.epsilon == pytest.approx(alone.instance.epsilon, rel=1e-2)
        assert wary.total_sigma_votes == pytest.approx(4.0 * factor)
        assert wary.noise_factors.total == pytest.approx(factor)


@pytest.mark.parametrize("method", ["blind-average", "aux-distill"])
def test_the_noise_for_a_price_is_solved(method: str) -> None:
    for level, target in (("instance", 0.7), ("agent", 300.0), ("instance", 9.0)):
        sigma = solve_sigma(task(method, sigma_votes=50.0), target, level=level)
        assert price(task(method, sigma_votes=sigma)).statement(level).epsilon <= target
        assert price(task(method, sigma_votes=sigma * (1 - 1e-4))).statement(level).epsilon > target


def test_the_noise_on_weights_is_what_the_price_was_told() -> None:
    """600 rows of 30 classes: a standard deviation off by more than 4 % has probability below 1e-7."""
    asked = task(classes=[str(number) for number in range(30)], max_queries=600)
    numbers = contribution(np.zeros((600, 30), dtype=np.int64), asked, source=seeded_source(1))
    assert numbers.std() / asked.scale == pytest.approx(4.0 / math.sqrt(5), rel=0.04)
    assert np.abs(numbers).max() < largest_sum(asked, 1)


def test_soft_votes_lie_between_zero_and_one_and_carry_no_noise_of_the_sum() -> None:
    asked = task("aux-distill")
    votes = np.zeros((65, 3), dtype=np.int64)
    votes[:, 0] = asked.scale
    assert np.array_equal(contribution(votes, asked, source=seeded_source(1)), votes)
    for row, column, value in ((3, 1, 1), (3, 1, -1), (0, 0, asked.scale + 1)):
        wrong = votes.copy()
        wrong[row, column] = value
        with pytest.raises(PrivacyRefusal, match="add up to at most 1"):
            check_ballots(wrong, asked)


def test_the_released_model_is_the_mean_and_labels_by_its_scores() -> None:
    asked = task(sigma_votes=1e-6 * 100, training=TRAINING)
    terms, spec = linear_terms(asked), weight_sum(asked)
    weights = np.random.default_rng(0).normal(size=(65, 3))
    weights *= 0.5 * terms.largest_norm / np.linalg.norm(weights)
    opened = spec.open(5 * spec.quantize(weights / terms.sensitivity)).reshape(65, 3)
    release = Release("histogram", opened.argmax(axis=1).astype(np.int16), opened, frozenset("abcde"), True)
    model = released_model(asked, [release])
    assert np.allclose(model.weights, weights, atol=1e-4)
    features = np.random.default_rng(1).integers(-300, 300, size=(9000, 64)).astype(np.int16)
    rows = features / 2048
    rows *= terms.feature_norm / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), terms.feature_norm)
    scores = np.hstack([rows, np.full((9000, 1), terms.bias_feature)]) @ model.weights
    assert np.array_equal(model.predict(features), scores.argmax(axis=1))
    assert released_model(task("aux-distill"), [release]) is None


def test_a_model_is_asked_in_one_round_that_must_fit_a_message() -> None:
    assert round_sizes(task(max_queries=9000), 9000) == (9000,)
    with pytest.raises(InvalidTask, match="blind-average job is asked in one round"):
        check_round_fits(task(max_queries=60_000_000), 60_000_000)


def test_every_field_of_the_training_is_in_the_digest() -> None:
    asked = task()
    changes = {
        "min_records": 201, "regularisation": 0.06, "clip_norm": 2.0, "learner": "svm", "radius": 7.0, "iterations": 9,
        "max_records": 300, "axes": 64, "dimension": 11, "score_share": 0.5,
    }  # fmt: skip
    # What says how a model is trained in steps belongs to federated alone, which is asked below.
    assert set(changes) | {"sampled", "personal"} == set(training_of(asked).__class__.model_fields)
    digests = {task(training=TRAINING | {name: value}).digest for name, value in changes.items()}
    assert len(digests | {asked.digest}) == len(changes) + 1
    steps = {"rate": 0.5, "unit": "agent", "learning_rate": 1.0, "momentum": 0.0, "local_steps": 1}
    other = {"rate": 0.25, "unit": "record", "learning_rate": 2.0, "momentum": 0.5, "local_steps": 3}
    assert set(other) == set(Sampled.model_fields)

    def sampled(how: dict[str, object], **more: object) -> str:
        training = TRAINING | {"iterations": 10, "sampled": how} | more
        return task("federated", max_queries=1000, training=training).digest

    assert len({sampled(steps), *(sampled(steps | {name: value}) for name, value in other.items())}) == len(other) + 1
    personal = ({}, {"alpha": 0.5}, {"helper": "proximal"}, {"helper": "identity"})
    digests = {sampled(steps), *(sampled(steps, personal=one) for one in personal)}
    assert len(digests) == len(personal) + 1


def test_methods_that_count_nothing_have_no_votes_to_bound_and_no_neighbours() -> None:
    with pytest.raises(InvalidSetting, match="does not count votes"):
        squared_sensitivity(task(), "instance", 65)
    with pytest.raises(InvalidSetting, match="has no k"):
        solve_k(task(), 1.0)
    with pytest.raises(InvalidSetting, match="does not say how agents train"):
        training_of(task("ensemble", training=None))


def test_the_mechanisms_are_those_of_the_task_field_by_field() -> None:
    training = {
        "min_records": 300, "regularisation": 0.04, "dimension": 10, "clip_norm": 0.7, "score_share": 0.2,
    }  # fmt: skip
    heads = head_terms(task("aux-distill", training=training, colluding_agents=1, max_dropouts=1))
    assert (heads.head_dimension, heads.score_dimension) == (11, 11)
    assert (heads.head_regularisation, heads.score_regularisation, heads.clip_norm) == (0.04, 0.04, 0.7)
    assert (heads.min_records, heads.num_classes) == (300, 3)
    assert heads.num_negatives == 13
    assert heads.sigma_scores is not None
    assert heads.sigma_head**-2 + heads.sigma_scores**-2 == pytest.approx(4.0**-2)
    assert heads.sigma_scores**-2 == pytest.approx(0.2 * 4.0**-2)
    alone = head_terms(task("aux-distill", training=training | {"score_share": 0.0}))
    assert (alone.sigma_head, alone.sigma_scores) == (4.0, None)
    assert alone.event().coordinates == 11 * 3
    summed = weight_sum(task(colluding_agents=2, max_dropouts=1))
    assert (summed.agents, summed.colluding_agents, summed.max_dropouts, summed.sigma) == (5, 2, 1, 4.0)
    assert (summed.dimension, summed.sensitivity) == (65 * 3, 1.0)


@pytest.mark.parametrize("method", ["blind-average", "aux-distill"])
def test_distances_are_in_units_of_sigma_and_grow_with_the_records_of_a_person(method: str) -> None:
    """One record moves the answer by one unit, since sigma is the noise multiplier; m records by m; an agent by all."""
    asked = task(method, sigma_votes=6.0, records_per_person=3)
    spec = bounded_numbers(asked).answer_sum(asked)
    assert largest_distance(asked, "instance", asked.max_queries) == pytest.approx(1.0)
    assert largest_distance(asked, "person", asked.max_queries) == pytest.approx(3.0)
    assert largest_distance(asked, "agent", asked.max_queries) == pytest.approx(spec.largest_norm * 6.0 / spec.sigma)
    assert (largest_distance(asked, "agent", asked.max_queries) or 0) > 3.5


def test_the_longest_weights_are_the_longest_vector_and_what_rounding_may_add() -> None:
    """100 units of norm, and 196 coordinates that move by half a unit each: a vector of length 7."""
    asked = task(classes=["a", "b"]).model_copy(update={"max_queries": 98})
    spec = weight_sum(asked)
    assert (spec.largest_norm, spec.dimension) == (pytest.approx(100.0), 196)
    # The sum is a whole number and a hair; a billionth of it for rounding makes it one more.
    assert spec.longest_grid == spec.scale * 100 + 7 + 1


def test_weights_of_exactly_the_longest_length_pass_and_one_unit_more_does_not() -> None:
    asked = task()
    bound = weight_sum(asked).longest_grid
    weights = np.zeros((65, 3), dtype=np.int64)
    for value in (bound, -bound):
        weights[7, 1] = value
        check_ballots(weights, asked)
    for value in (bound + 1, -bound - 1):
        weights[7, 1] = value
        with pytest.raises(PrivacyRefusal):
            check_ballots(weights, asked)
    weights[7, 1], weights[0, 0] = bound, 2000
    with pytest.raises(PrivacyRefusal, match="longer than its learner can make them"):
        check_ballots(weights, asked)
    weights[0, 0] = np.iinfo(np.int64).min
    with pytest.raises(PrivacyRefusal):
        check_ballots(weights, asked)
