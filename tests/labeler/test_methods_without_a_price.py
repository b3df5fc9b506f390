"""A sixth way to answer, of which nobody has said what a record changes: it has no price, at any door."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from api.coordinator.pricing import certified_price, estimate, finite_levels, price_view, round_amounts
from checks.audit.adversaries import check_attackable
from labeler import methods, task
from labeler.batching import round_charges, total_charges
from labeler.errors import InvalidSetting, PrivacyRefusal
from labeler.methods import METHODS, Method
from labeler.methods.sensitivity import (
    CountedVotes,
    bounded_numbers,
    largest_change,
    largest_distance,
    squared_sensitivity,
)
from labeler.planning import has_finite_price, integer_event, price
from labeler.records import Records, RunnerContext
from labeler.release import check_ballots
from labeler.solving import solve_queries, solve_sigma
from labeler.tally import QueryBatch
from labeler.task import Task, Training
from tests.workers.answer import answer

SIXTH = {
    "one of many rounds": Method("a sixth", "votes in some way"),
    "one of a single round": Method("a sixth", "votes in some way", single_round=True),
    "one with noise of its own": Method("a sixth", "votes in some way", has_local_noise=True),
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


def sixth(monkeypatch: pytest.MonkeyPatch, traits: Method) -> Task:
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


def test_no_bound_is_borrowed_from_another_method(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = sixth(monkeypatch, SIXTH["one of many rounds"])
    for ask in (
        lambda: squared_sensitivity(asked, "instance", 5),
        lambda: largest_change(asked, "person"),
        lambda: check_ballots(np.zeros((5, 3), dtype=np.int64), asked),
        lambda: largest_distance(asked, "instance", asked.max_queries),
        lambda: bounded_numbers(asked).answer_sum(asked),
    ):
        with pytest.raises(PrivacyRefusal, match="method 'sixth' has no stated sensitivity"):
            ask()


def votes_for_the_first(task: Task, batch: QueryBatch, records: Records, context: RunnerContext) -> Any:
    """One vote per question for the first class of an agent that has records: a record moves one vote at most."""
    votes = np.zeros((len(batch), task.num_classes), dtype=np.int64)
    votes[:, 0] = min(1, len(records))
    return votes


TOY = Method(
    "a toy",
    "one vote per question",
    ballots=votes_for_the_first,
    stated=CountedVotes(lambda *given: given[2], lambda *_: 1, lambda _: 1),
)


def test_a_toy_method_is_priced_and_answered_by_its_own_module_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "toy", TOY)
    fields = {"name": "t", "classes": ("a", "b"), "sigma_votes": 30.0, "delta": 1e-5, "max_queries": 8, "agents": 3}
    asked, known = Task(**fields, method="toy"), Task(**fields, method="ensemble")
    # One vote of each question comes or goes, where a vote of ensemble moves: half of the price.
    assert 2 * total_charges(asked, (8,))["instance"] == pytest.approx(total_charges(known, (8,))["instance"], rel=1e-3)
    batch = QueryBatch(np.eye(8, dtype=np.int16))
    none = Records(np.zeros((0, 8), np.int16), np.zeros(0, np.int64), np.zeros(0, np.int16), "none")
    one = Records(np.ones((1, 8), np.int16), np.zeros(1, np.int64), np.zeros(1, np.int16), "one")
    apart = answer(asked, batch, one) - answer(asked, batch, none)
    assert np.square(apart).sum() == squared_sensitivity(asked, "instance", 8)
    check_ballots(answer(asked, batch, one), asked)
    with pytest.raises(PrivacyRefusal, match="count outside 0 to 1"):
        check_ballots(answer(asked, batch, one) * 2, asked)
    with pytest.raises(InvalidSetting, match="toy"):
        check_attackable(asked, "instance", "releases")
    with pytest.raises(ValueError, match="did you mean 'ensemble'"):
        Task(**fields, method="ensembl")


def test_only_the_table_of_methods_names_them_all() -> None:
    """No other module of the product lists methods: whoever adds one touches its module, the table and its page."""
    root = Path(methods.__file__).parent.parent.parent
    names = [f'"{name}"' for name in METHODS]
    lists = [
        path.relative_to(root).as_posix()
        for package in ("labeler", "feature_store", "api", "workers", "checks")
        for path in (root / package).rglob("*.py")
        if not path.relative_to(root).as_posix().startswith(("workers/simulated", "workers/commands/simulate"))
        and sum(name in path.read_text() for name in names) > 2
    ]
    assert lists == ["labeler/methods/__init__.py"]
    for name in METHODS:
        assert (root / "docs" / "math" / f"{name}.md").exists(), name


def test_every_method_that_there_is_has_one() -> None:
    training = {"training": {"min_records": 100, "regularisation": 0.1, "dimension": 1}}
    steps = {"training": training["training"] | {"iterations": 2, "sampled": {"rate": 0.5}}}
    for name, traits in METHODS.items():
        asked = Task(
            name="t", classes=("a", "b"), method=name, sigma_votes=30.0, delta=1e-5, max_queries=10, agents=3,
            **({} if traits.counts else steps if "training.sampled" in traits.takes else training),
        )  # fmt: skip
        assert price(asked).instance.charge_nano
