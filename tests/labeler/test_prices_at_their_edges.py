"""Events and sensitivities at the edges of what is proved: bounds on both sides, refusals word for word, tables."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from labeler.accounting.events import GaussianSum, IntegerSum, nano_units
from labeler.budget import LEAST_DELTA, MOST_DELTA, MOST_EPSILON, Account, budget_for
from labeler.descent import MOST_WEIGHTS
from labeler.errors import InvalidSetting, LabelerError, PrivacyRefusal
from labeler.methods.blind_average import check_weights, linear_terms, longest_weights_grid, weight_sum
from labeler.methods.sensitivity import (
    integer_event,
    largest_change,
    most_votes_per_cell,
    squared_sensitivity,
    training_of,
)
from labeler.release import check_ballots
from labeler.solving import _first_priced
from labeler.task import Task, parse_task


def counting(method: str, **fields: Any) -> Task:
    given = {
        "name": "t", "classes": ["a", "b", "c"], "method": method, "sigma_votes": 30.0, "delta": 1e-5,
        "max_queries": 20, "agents": 5,
    }  # fmt: skip
    return parse_task(given | fields)


def of_a_model(**fields: Any) -> Task:
    given = {
        "name": "m", "classes": ["a", "b", "c"], "method": "blind-average", "sigma_votes": 4.0, "delta": 1e-5,
        "max_queries": 65, "agents": 5, "training": {"min_records": 200, "regularisation": 0.05, "dimension": 10},
    }  # fmt: skip
    return parse_task(given | fields)


def event(**changes: Any) -> IntegerSum:
    fields: dict[str, Any] = {
        "squared_sensitivity": 2, "largest_change": 1, "grid_scale": 16, "share_sigma_grid": 400.0,
        "noise_contributors": 2, "coordinates": 10,
    }  # fmt: skip
    return IntegerSum(**fields | changes)


SMALL = (
    "noise shares of {} grid units are too small for any proof: each needs at least 0.5 grid units and all together a "
    "variance of 6"
)


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (lambda: event(squared_sensitivity=0.5),
         "squared_sensitivity must be an exact positive number (int or Fraction), found 0.5"),
        (lambda: GaussianSum(0, 1.0),
         "squared_sensitivity must be an exact positive number (int or Fraction), found 0"),
        (lambda: nano_units(Fraction(-1, 2)),
         "mu_squared must be an exact positive number (int or Fraction), found Fraction(-1, 2)"),
        (lambda: event(largest_change=0), "largest_change must be a whole number of at least 1, found 0"),
        (lambda: event(grid_scale=1.0), "grid_scale must be a whole number of at least 1, found 1.0"),
        (lambda: event(noise_contributors=True), "noise_contributors must be a whole number of at least 1, found True"),
        (lambda: event(coordinates=0), "coordinates must be a whole number of at least 1, found 0"),
        (lambda: event(share_sigma_grid=math.inf), "share_sigma_grid must be a positive finite number, found inf"),
        (lambda: GaussianSum(1, "x"), "sigma_votes must be a positive finite number, found 'x'"),
        (lambda: event(share_sigma_grid=0.499, noise_contributors=1000), "1000 " + SMALL.format("0.499")),
        (lambda: event(share_sigma_grid=2.4, noise_contributors=1), "1 " + SMALL.format("2.4")),
        (lambda: event(share_sigma_grid=1.0, noise_contributors=5), "5 " + SMALL.format("1")),
        (lambda: squared_sensitivity(of_a_model(), "instance", 5),
         "method blind-average does not count votes; its price is that of its `answer_sum`"),
        (lambda: squared_sensitivity(counting("knn"), "instance", 0),
         "queries must be a whole number of at least 1, found 0"),
        (lambda: training_of(counting("knn")), "a task of method knn does not say how agents train"),
        (lambda: check_weights(np.full((65, 3), 10**9), of_a_model()),
         "the weights of an agent are longer than its learner can make them, which this task's price does not cover"),
        (lambda: check_ballots(np.full((65, 3), 10**9), of_a_model(method="aux-distill")),
         "soft votes of one agent lie between 0 and 1, and add up to at most 1 per query"),
        (lambda: budget_for(1000.1, 1e-5),
         "epsilon of a budget must be from 0 to 1000, found 1000.1; no larger one is proved, nor would it promise "
         'anything: write "unlimited" where there is to be no limit'),
        (lambda: budget_for(1.0, 1.0),
         "delta must be strictly between 0 and 1, for a budget at least 1e-100 and at most 0.999999; found 1.0"),
        (lambda: Account("a", "person", 1), "a level is 'instance' or 'agent', found 'person'"),
    ],
)  # fmt: skip
def test_what_has_no_price_is_refused_word_for_word(step: Callable[[], object], said: str) -> None:
    with pytest.raises(LabelerError) as refusal:
        step()
    assert isinstance(refusal.value, InvalidSetting | PrivacyRefusal)
    assert str(refusal.value) == said


def test_noise_of_exactly_the_least_size_that_the_proof_takes_is_taken() -> None:
    assert event(share_sigma_grid=0.5, noise_contributors=24).variance_grid == 6
    assert event(share_sigma_grid=1.0, noise_contributors=6).mu_squared == Fraction(2 * 16**2, 3)
    assert event(share_sigma_grid=3.0, noise_contributors=1).mu_squared == Fraction(2 * 16**2, 6)


def test_budgets_at_the_ends_of_their_range_are_made() -> None:
    assert budget_for(MOST_EPSILON, 1e-5) > budget_for(999.0, 1e-5) > 10**12
    assert budget_for(0.0, MOST_DELTA) > budget_for(0.0, 0.5) > budget_for(0, LEAST_DELTA) == 0


@pytest.mark.parametrize(
    ("method", "fields", "person", "cell"),
    [
        ("knn", {"k": 5}, None, 5),
        ("knn", {"k": 5, "records_per_person": 3}, 3, 5),
        ("knn", {"k": 2, "records_per_person": 3}, 2, 2),
        ("ensemble", {"records_per_person": 3}, 1, 1),
        ("reverse-knn", {"k": 5}, None, 2**40),
        ("reverse-knn", {"k": 5, "records_per_person": 3}, 3, 2**40),
        ("reverse-knn", {"k": 5, "records_per_person": 3, "max_agent_records": 2}, 2, 2),
        ("reverse-knn", {"k": 5, "records_per_person": 3, "max_agent_records": 7}, 3, 7),
    ],
)
def test_the_votes_of_a_person_and_of_a_cell_are_those_of_the_table(
    method: str, fields: dict[str, Any], person: int | None, cell: int
) -> None:
    asked = counting(method, **fields)
    assert most_votes_per_cell(asked) == cell
    if person is not None:
        assert largest_change(asked, "person") == person
        return
    with pytest.raises(InvalidSetting, match="a price is stated for a person only where"):
        largest_change(asked, "person")


@pytest.mark.parametrize("level", ["instance", "person", "agent"])
def test_the_event_of_a_task_has_its_fields_and_its_level(level: Any) -> None:
    asked = counting("knn", k=3, records_per_person=2, colluding_agents=1)
    found = integer_event(asked, level, 7)
    assert found is not None
    squared, largest = {"instance": (14, 1), "person": (56, 2), "agent": (63, 3)}[level]
    assert (found.squared_sensitivity, found.largest_change, found.level) == (squared, largest, level)
    assert (found.coordinates, found.noise_contributors) == (21, asked.noise_contributors)
    assert (found.grid_scale, found.share_sigma_grid) == (asked.scale, asked.share_sigma_grid)
    model = integer_event(of_a_model(records_per_person=2), level, 1)
    assert model is not None
    assert model.level == level
    assert integer_event(counting("reverse-knn", k=3), "agent", 7) is None


def test_a_model_of_exactly_as_many_weights_as_rounding_is_bounded_for_is_taken() -> None:
    asked = of_a_model(classes=["a", "b"]).model_copy(update={"max_queries": MOST_WEIGHTS // 2})
    assert linear_terms(asked).num_classes == 2


def test_the_longest_weights_are_the_longest_vector_and_what_rounding_may_add() -> None:
    """100 units of norm, and 196 coordinates that move by half a unit each: a vector of length 7."""
    asked = of_a_model(classes=["a", "b"]).model_copy(update={"max_queries": 98})
    spec = weight_sum(asked)
    assert (spec.largest_norm, spec.dimension) == (pytest.approx(100.0), 196)
    # The sum is a whole number and a hair; a billionth of it for rounding makes it one more.
    assert longest_weights_grid(asked) == spec.scale * 100 + 7 + 1


def test_weights_of_exactly_the_longest_length_pass_and_one_unit_more_does_not() -> None:
    asked = of_a_model()
    bound = longest_weights_grid(asked)
    weights = np.zeros((65, 3), dtype=np.int64)
    for value in (bound, -bound):
        weights[7, 1] = value
        check_weights(weights, asked)
    for value in (bound + 1, -bound - 1):
        weights[7, 1] = value
        with pytest.raises(PrivacyRefusal):
            check_weights(weights, asked)
    weights[7, 1], weights[0, 0] = bound, 2000
    with pytest.raises(PrivacyRefusal):
        check_weights(weights, asked)


@pytest.mark.parametrize("root", [1, 2, 7, 999_999, 64_662, 3_738_849])
@pytest.mark.parametrize("power", [-0.3, -1.0, -2.5])
@pytest.mark.parametrize("start", [1, 1000, 100_000])
def test_the_least_noise_that_will_do_is_found_in_a_handful_of_prices(root: int, power: float, start: int) -> None:
    """Against the definition: it meets the price, and one less does not, or there is no less."""
    asked = []

    def priced(value: int) -> float:
        asked.append(value)
        return (
            math.inf if value < root / 50 else (value / (root - 0.5)) ** power * (1 + 0.1 * math.sin(math.log(value)))
        )

    found = _first_priced(priced, 1.0, start)
    assert priced(found) <= 1
    assert found == 1 or priced(found - 1) > 1
    assert len(set(asked)) <= (12 if root / 10 < start < 10 * root else 50)
