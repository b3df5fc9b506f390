"""A sixth way to answer, of which nobody has said what a record changes: it has no price, at any door."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest

from api.coordinator.pricing import certified_price, estimate, finite_levels, price_view, round_amounts
from labeler import methods, task
from labeler.batching import round_charges, total_charges
from labeler.contribution import check_ballots
from labeler.errors import PrivacyRefusal
from labeler.methods import METHODS, Method, MethodTraits
from labeler.methods.sensitivity import (
    answer_sum,
    largest_change,
    largest_distance,
    model_event,
    squared_sensitivity,
)
from labeler.planning import has_finite_price, integer_event, price
from labeler.solving import solve_queries, solve_sigma
from labeler.task import Task, Training
from workers.voting.ways import WAYS

SIXTH = {
    "one that counts": MethodTraits("a sixth", "votes in some way"),
    "one that counts, at once": MethodTraits("a sixth", "votes in some way", asked_at_once=True),
    "one of numbers": MethodTraits("a sixth", "numbers", counts=False, asked_at_once=True),
    "one with noise of its own": MethodTraits("a sixth", "numbers", counts=False, has_local_noise=True),
}

DOORS: dict[str, Callable[[Task], object]] = {
    "price": price,
    "price of some queries": lambda asked: price(asked, queries=3),
    "integer_event": lambda asked: integer_event(asked, "instance", 5),
    "integer_event of a person": lambda asked: integer_event(asked, "person", 5),
    "has_finite_price": lambda asked: has_finite_price(asked, "agent"),
    "solve_sigma": lambda asked: solve_sigma(asked, 1.0),
    "solve_sigma for agents": lambda asked: solve_sigma(asked, 1.0, level="agent"),
    "solve_queries": lambda asked: solve_queries(asked, 1.0),
    "round_charges": lambda asked: round_charges(asked, 5),
    "total_charges": lambda asked: total_charges(asked, (5, 5)),
    "certified_price": lambda asked: certified_price(asked, 5),
    "price_view": lambda asked: price_view(asked, 5),
    "finite_levels": lambda asked: finite_levels(asked, 5),
    "round_amounts": lambda asked: round_amounts(asked, 5, finite=("instance", "agent")),
    "estimate": lambda asked: estimate(asked, [], 5, {}, delta=1e-5),
}


def sixth(monkeypatch: pytest.MonkeyPatch, traits: MethodTraits) -> Task:
    """A task of a method that is registered and nothing more; what pydantic would let through as well."""
    monkeypatch.setitem(METHODS, "sixth", traits)
    assert methods.METHODS is task.METHODS
    fields: dict[str, Any] = {"method": "sixth", "sigma_votes": 30.0, "delta": 1e-5, "max_queries": 10, "agents": 3}
    training = Training(min_records=100, regularisation=0.1, dimension=1)
    known = Task(name="t", classes=("a", "b", "c"), **fields | {"method": "knn"}, records_per_person=2)
    values = dict(known) | fields | ({} if traits.counts else {"training": training})
    return Task.model_construct(**values)


@pytest.mark.parametrize("kind", SIXTH)
@pytest.mark.parametrize("door", DOORS)
def test_a_method_without_a_stated_sensitivity_has_no_price(
    monkeypatch: pytest.MonkeyPatch, kind: str, door: str
) -> None:
    asked = sixth(monkeypatch, SIXTH[kind])
    with pytest.raises(PrivacyRefusal, match="method 'sixth' has no stated sensitivity"):
        DOORS[door](asked)


@pytest.mark.parametrize("level", ["instance", "person", "agent"])
def test_no_bound_is_borrowed_from_another_method(monkeypatch: pytest.MonkeyPatch, level: Any) -> None:
    counting, numbers = sixth(monkeypatch, SIXTH["one that counts"]), sixth(monkeypatch, SIXTH["one of numbers"])
    monkeypatch.setitem(METHODS, "sixth", SIXTH["one that counts"])
    for ask in (squared_sensitivity, largest_change):
        with pytest.raises(PrivacyRefusal, match="method 'sixth' has no stated sensitivity"):
            ask(counting, level, *([5] if ask is squared_sensitivity else []))
    with pytest.raises(PrivacyRefusal, match="method 'sixth' has no stated sensitivity"):
        check_ballots(np.zeros((5, 3), dtype=np.int64), counting)
    monkeypatch.setitem(METHODS, "sixth", SIXTH["one of numbers"])
    for model in (model_event, largest_distance):
        with pytest.raises(PrivacyRefusal, match="method 'sixth' has no stated sensitivity"):
            model(numbers, level)
    with pytest.raises(PrivacyRefusal, match="method 'sixth' has no stated sensitivity"):
        answer_sum(numbers)


def test_the_refusal_says_what_is_to_be_stated_and_where(monkeypatch: pytest.MonkeyPatch) -> None:
    counting = sixth(monkeypatch, SIXTH["one that counts"])
    for ask in (lambda: largest_change(counting, "instance"), lambda: squared_sensitivity(counting, "instance", 5)):
        with pytest.raises(PrivacyRefusal) as refusal:
            ask()
        assert str(refusal.value) == (
            "method 'sixth' has no stated sensitivity, so it has no price; state and prove what one record, one person "
            "and one agent change, in its module of labeler.methods"
        )


def test_the_tables_of_methods_name_the_same_methods() -> None:
    assert tuple(METHODS) == get_args(Method) == tuple(WAYS)


def test_every_method_that_there_is_has_one() -> None:
    training = {"training": {"min_records": 100, "regularisation": 0.1, "dimension": 1}}
    steps = {"training": training["training"] | {"iterations": 2, "sampled": {"rate": 0.5}}}
    for name, traits in METHODS.items():
        asked = Task(
            name="t", classes=("a", "b"), method=name, sigma_votes=30.0, delta=1e-5, max_queries=10, agents=3,
            **({} if traits.counts else steps if traits.is_sampled else training),
        )  # fmt: skip
        assert price(asked).instance.charge_nano
