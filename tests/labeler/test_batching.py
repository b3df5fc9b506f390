"""Rounds that fit: a batch is cut so that its votes travel in one message, whatever the number of classes."""

from __future__ import annotations

import pytest

from labeler.accounting.events import NANO
from labeler.batching import (
    BATCH_QUERIES,
    MAX_ROUND_ENTRIES,
    check_round_fits,
    mu_squared_of,
    question_charges,
    round_sizes,
)
from labeler.errors import InvalidTask
from labeler.messages.bodies import MAX_ENTRIES
from labeler.planning import price
from labeler.setting import LEVELS
from labeler.sharing import words_per_query
from labeler.task import Task, parse_task

TRAINING = {"min_records": 200, "regularisation": 0.05}


def task(classes: int, method: str = "knn") -> Task:
    names = tuple(f"class {number}" for number in range(classes))
    return Task(name="t", classes=names, method=method, sigma_votes=400.0, delta=1e-5, max_queries=10_000, agents=3)


@pytest.mark.parametrize("classes", [2, 2000, 2050, 3000, 32_000])
def test_every_round_of_knn_fits_into_a_message_and_none_is_smaller_than_it_must_be(classes: int) -> None:
    sizes = round_sizes(task(classes), 10_000)
    assert sum(sizes) == 10_000
    assert max(sizes) * classes <= MAX_ROUND_ENTRIES < MAX_ENTRIES
    assert max(sizes) == min(BATCH_QUERIES, MAX_ROUND_ENTRIES // classes)


def test_a_round_that_cannot_be_cut_is_refused_where_it_does_not_fit() -> None:
    whole = task(3000, "reverse-knn")
    most = MAX_ROUND_ENTRIES // 3000
    check_round_fits(whole, most)
    with pytest.raises(InvalidTask, match=f"at most {most} queries, or use method knn"):
        check_round_fits(whole, most + 1)
    check_round_fits(task(3000), 10_000)


def test_rounds_of_a_winner_leave_room_for_ballots_noise_and_row_sums() -> None:
    """Two words per class and one more; or one per class and one per agent, where there are many agents."""
    histogram = task(1000)
    winner = histogram.model_copy(update={"release": "winner"})
    assert words_per_query(histogram.winner_terms, num_classes=1000, agents=3) == 1000
    assert words_per_query(winner.winner_terms, num_classes=1000, agents=3) == 2001
    assert words_per_query(winner.winner_terms, num_classes=1000, agents=1500) == 2500
    assert round_sizes(winner, 10_000, batch_queries=10_000)[0] == MAX_ROUND_ENTRIES // 2001


def test_a_question_takes_of_mu_squared_what_one_more_question_costs_where_queries_are_priced_one_by_one() -> None:
    """Against the price of one question more, which is worked out for the whole job and knows of no shares."""
    for changes in ({}, {"method": "ensemble"}, {"k": 7}):
        asked = parse_task(task(4).model_dump() | changes)
        with_one_more = {level: price(asked, queries=41).statement(level).charge_nano for level in LEVELS}
        for level, share in question_charges(asked, 40).items():
            assert (
                share - 1 <= with_one_more[level] - price(asked, queries=40).statement(level).charge_nano <= share + 1
            )
            assert share == question_charges(asked, 4000)[level], "whatever the job"


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "reverse-knn", "k": 1},
        {"release": "winner", "sigma_votes": 12.0, "max_queries": 40},
        {"method": "blind-average", "training": TRAINING},
        {"method": "reverse-knn", "k": 1, "lifetime_budget": {"budget_nano": 10**8, "least_similarity": 0.5}},
    ],
)
def test_where_a_job_is_priced_once_no_question_has_a_share(changes: dict[str, object]) -> None:
    asked = parse_task(task(4).model_dump() | changes)
    assert question_charges(asked, 40) == {}
    stated = mu_squared_of(asked, 40)
    assert stated["question"] is None
    charge = 10**8 if "lifetime_budget" in changes else price(asked, queries=40).statement("instance").charge_nano
    assert stated["job"] is not None
    assert stated["job"]["instance"] == charge / NANO
