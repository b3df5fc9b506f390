"""What a person cost and what is left, against the ledger's charges, other accountants and brute force."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from labeler.accounting.events import NANO
from labeler.batching import person_charge, person_spent, round_charges
from labeler.budget import budget_for, epsilon_left, epsilon_spent, say_epsilon_left
from labeler.planning import price
from labeler.task import Task
from tests.labeler.tasks import make_task

DELTAS = st.sampled_from([1e-9, 1e-6, 1e-5, 1e-3])


def voting(method: str, m: int | None, sigma: float, queries: int, **fields: object) -> Task:
    k = {} if method == "ensemble" else {"k": 3}
    return make_task(
        method=method, sigma_votes=sigma, records_per_person=m, max_queries=queries, delta=1e-5, **(k | fields)
    )


TASKS = st.builds(
    voting,
    st.sampled_from(["knn", "reverse-knn", "ensemble"]),
    st.integers(1, 4),
    st.sampled_from([9.0, 30.0, 200.0]),
    st.sampled_from([1, 5, 40]),
)


def of_a_person(task: Task, queries: int) -> Fraction:
    """Return the mu^2 of one round for a person by the table in words: the change of the sums over the noise."""
    m, k = task.records_per_person or 0, task.k
    changed = {
        "knn": 2 * queries * min(m, k) ** 2,
        "ensemble": 2 * queries,
        "reverse-knn": m**2 * min(k, task.max_queries),
    }[task.method]
    return Fraction(changed) / Fraction(task.sigma_votes) ** 2


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(TASKS, st.integers(1, 3)), min_size=1, max_size=5))
def test_what_a_person_cost_is_the_sum_of_what_the_table_says_of_each_round(jobs: list[tuple[Task, int]]) -> None:
    spent = person_spent([(task, task.max_queries, count) for task, count in jobs])
    by_table = sum(count * of_a_person(task, task.max_queries) for task, count in jobs)
    assert spent.nano is not None
    # Never below the real-valued mu^2; above it by the rounding of each round and of the integer noise alone.
    assert by_table * NANO <= spent.nano <= by_table * NANO * Fraction(1001, 1000) + sum(count for _, count in jobs)
    assert spent.records_per_person == max(task.records_per_person or 0 for task, _ in jobs)


@settings(deadline=None, max_examples=20)
@given(st.lists(TASKS, min_size=1, max_size=4))
def test_a_person_never_costs_more_than_a_group_of_m_images_in_the_ledger(tasks: list[Task]) -> None:
    charged = sum(round_charges(task, task.max_queries)["instance"] for task in tasks)
    most = max(task.records_per_person or 0 for task in tasks)
    spent = person_spent([(task, task.max_queries, 1) for task in tasks])
    assert spent.nano is not None
    assert spent.nano <= most**2 * charged + len(tasks) * most**2


def test_the_person_level_of_one_job_is_the_price_that_its_task_states() -> None:
    for method, m in (("knn", 2), ("reverse-knn", 1), ("ensemble", 3)):
        task = voting(method, m, 30.0, 40)
        stated, spent = price(task), person_spent([(task, 40, 1)])
        assert stated.person is not None
        assert spent.nano == stated.person.charge_nano == person_charge(task, 40)
        assert spent.epsilon(task.delta) == pytest.approx(stated.person.epsilon, rel=1e-5)


@settings(deadline=None, max_examples=8)
@given(st.lists(TASKS, min_size=1, max_size=4))
def test_the_epsilon_of_a_person_holds_by_googles_accountant(tasks: list[Task]) -> None:
    dp_event = pytest.importorskip("dp_accounting")
    from dp_accounting.pld import PLDAccountant

    spent = person_spent([(task, task.max_queries, 1) for task in tasks]).epsilon(1e-5)
    accountant = PLDAccountant(value_discretization_interval=1e-3)
    for task in tasks:
        multiplier = 1 / math.sqrt(of_a_person(task, task.max_queries))
        accountant.compose(dp_event.GaussianDpEvent(multiplier))
    assert spent is not None
    # Its interval of 1e-3 per composed event is added to its answer.
    assert accountant.get_epsilon(1e-5) == pytest.approx(spent, abs=2e-3 * len(tasks), rel=2e-3)


def test_one_round_without_a_bound_leaves_no_bound_and_says_why() -> None:
    bounded, free = voting("knn", 1, 30.0, 5), voting("knn", None, 30.0, 5)
    for rounds, words in (
        ([(bounded, 5, 4), (free, 5, 1)], "1 of 5 answered rounds do not limit how many images"),
        ([(bounded, 5, 4), (None, 5, 2)], "2 of 6 answered rounds are of tasks that are not kept here"),
        ([(free, 5, 1), (None, 5, 2)], "not kept"),
    ):
        spent = person_spent(rounds)
        assert (spent.nano, spent.epsilon(1e-5)) == (None, None)
        assert words in spent.reason
        assert words in spent.in_words(1e-5)
    assert person_spent([(bounded, 5, 1)], is_complete=False).nano is None
    assert person_spent([]).in_words(1e-5) == "One patient: nothing was answered, so nothing was learned."


@settings(deadline=None, max_examples=60)
@given(nano=st.integers(0, 10**11), delta=DELTAS)
@example(nano=0, delta=1e-5)
@example(nano=1, delta=1e-3)
def test_what_is_left_is_the_largest_epsilon_that_still_fits(nano: int, delta: float) -> None:
    left = epsilon_left(nano, delta)
    assert budget_for(left, delta) <= max(nano, budget_for(0.0, delta))
    assert nano == 0 or budget_for(min(left * (1 + 1e-6) + 1e-5, 1000.0), delta) > nano
    assert left <= (epsilon_spent(nano + 1, delta) or math.inf)


@settings(deadline=None, max_examples=30)
@given(cap=st.sampled_from([0.3, 1.0, 2.0, 8.0]), part=st.floats(0.01, 0.99), delta=DELTAS)
def test_a_job_of_what_is_left_fits_the_ledger_and_one_of_a_thousandth_more_does_not(
    cap: float, part: float, delta: float
) -> None:
    left = budget_for(cap, delta) - max(1, budget_for(cap * part, delta))
    said = float(say_epsilon_left(epsilon_left(left, delta)))
    assert budget_for(said, delta) <= left
    assert budget_for(epsilon_left(left, delta) * 1.001, delta) >= left


def test_half_an_epsilon_of_one_leaves_834_thousandths_and_an_untouched_cap_all_of_itself() -> None:
    cap = budget_for(1.0, 1e-5)
    assert say_epsilon_left(epsilon_left(cap - budget_for(0.5, 1e-5), 1e-5)) == "0.834"
    assert [say_epsilon_left(epsilon_left(budget_for(one, 1e-5), 1e-5)) for one in (1.0, 0.5, 3.0)] == [
        "1.00",
        "0.500",
        "3.00",
    ]
    assert epsilon_left(-5, 1e-5) == 0
