"""Events and sensitivities at the edges of what is proved: bounds on both sides, refusals word for word, tables."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from labeler.accounting.events import IntegerSum
from labeler.budget import LEAST_DELTA, MOST_DELTA, MOST_EPSILON, budget_for
from labeler.errors import InvalidSetting, PrivacyRefusal
from labeler.methods.blind_average import weight_sum
from labeler.methods.sensitivity import (
    integer_event,
    largest_change,
    most_votes_per_cell,
)
from labeler.release import check_ballots
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


def test_the_longest_weights_are_the_longest_vector_and_what_rounding_may_add() -> None:
    """100 units of norm, and 196 coordinates that move by half a unit each: a vector of length 7."""
    asked = of_a_model(classes=["a", "b"]).model_copy(update={"max_queries": 98})
    spec = weight_sum(asked)
    assert (spec.largest_norm, spec.dimension) == (pytest.approx(100.0), 196)
    # The sum is a whole number and a hair; a billionth of it for rounding makes it one more.
    assert spec.longest_grid == spec.scale * 100 + 7 + 1


def test_weights_of_exactly_the_longest_length_pass_and_one_unit_more_does_not() -> None:
    asked = of_a_model()
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
    with pytest.raises(PrivacyRefusal):
        check_ballots(weights, asked)
