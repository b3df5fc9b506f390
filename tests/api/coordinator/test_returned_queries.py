"""Queries that nobody was asked about come back to their task, and no query is ever asked twice."""

from __future__ import annotations

import pytest
from sqlalchemy.exc import IntegrityError

from api.coordinator import submission
from api.schema import JobView
from labeler.errors import InvalidSetting, LabelerError, PrivacyRefusal
from labeler.ledger.tasks import TaskRecord
from tests.api.conftest import House
from tests.job_steps import take_step

KEYS = {"north": "0" * 64}


def place(house: House, view: JobView) -> tuple[int, int]:
    job = house.jobs.get(view.job_id)
    return job.first_query, job.num_queries


def left(house: House, task: TaskRecord) -> int:
    return house.tasks.get(task.digest).queries_left + house.tasks.returned([task.digest])[task.digest]


def plan(house: House, view: JobView, word: str = "same") -> None:
    """Tie the rounds of a job to questions, as the driver does once they are embedded."""
    batches = [
        (one.number, f"{word} {one.first_query} {one.num_queries}", f"round {word} {one.first_query} {one.num_queries}")
        for one in house.jobs.rounds(view.job_id)
    ]
    take_step(house.jobs, "set_batches", view.job_id, batches)
    house.jobs.change(view.job_id, "collecting", expected={"queued"})


def ask(house: House, view: JobView, number: int) -> None:
    take_step(house.jobs, "fix_participants", view.job_id, number, KEYS)
    take_step(house.jobs, "set_asked", view.job_id, number)


def cancel(house: House, view: JobView) -> None:
    submission.cancel(view.job_id, stores=house.stores)


def test_a_cancelled_job_gives_back_what_nobody_was_asked(house: House) -> None:
    task = house.task(max_queries=20)
    view = house.submit(task, 15)
    assert left(house, task) == 5
    cancel(house, view)
    assert left(house, task) == 20
    assert place(house, house.submit(task, 18)) == (0, 18), "in one run with those that were never given out"
    assert left(house, task) == 2


def test_what_was_asked_stays_given_out(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "round_sizes", lambda _, queries, **__: (5,) * (queries // 5) or (queries,))
    task = house.task(max_queries=20)
    view = house.submit(task, 15)
    plan(house, view)
    ask(house, view, 0)
    cancel(house, view)
    assert left(house, task) == 15
    assert place(house, house.submit(task, 5)) == (5, 5)
    assert place(house, house.submit(task, 10)) == (10, 10)
    with pytest.raises(InvalidSetting, match="only 0 of the 20"):
        house.submit(task, 1)


def test_what_everybody_refused_after_it_was_asked_costs_nothing_and_stays_given_out(house: House) -> None:
    """The questions were told, and who refuses may have paid and answered before: no number is asked twice."""
    task = house.task(max_queries=20)
    view = house.submit(task, 15)
    job = house.jobs.get(view.job_id)
    agents = house.tasks.get(task.digest).participants
    rounds, record = house.jobs.rounds(view.job_id), house.tasks.get(task.digest)
    amounts = house.stores.settlement.prices(job, rounds, record)
    with house.database.write() as connection:
        house.stores.settlement.divide(job, rounds, record, agents, amounts=amounts, connection=connection)
    plan(house, view)
    ask(house, view, 0)
    for agent in agents:
        take_step(house.jobs, "report_refusal", view.job_id, 0, agent, "no", True)
    cancel(house, view)
    assert house.ledger.state(f"{view.job_id}/0") == "void"
    assert left(house, task) == 5


@pytest.mark.parametrize("state", ["failed", "expired"])
def test_a_job_that_ends_in_another_way_gives_them_back_too(house: House, state: str) -> None:
    task = house.task(max_queries=20)
    view = house.submit(task, 15)
    house.stores.settlement.end(house.jobs.get(view.job_id), state, LabelerError("x"))  # type: ignore[arg-type]
    assert left(house, task) == 20


def test_two_rounds_that_live_are_never_twins(house: House) -> None:
    task = house.task(max_queries=20)
    one, other = house.submit(task, 5), house.submit(task, 5)
    take_step(house.jobs, "set_batches", one.job_id, [(0, "b", "r")])
    with pytest.raises(PrivacyRefusal, match="its noise would be the same again"):
        take_step(house.jobs, "set_batches", other.job_id, [(0, "b", "r")])


def test_a_second_ending_gives_nothing_back_a_second_time(house: House) -> None:
    task = house.task(max_queries=20)
    view = house.submit(task, 10)
    before = house.jobs.get(view.job_id)
    cancel(house, view)
    taken = house.submit(task, 10)
    house.stores.settlement.end(before, "cancelled", None)
    assert left(house, task) == 10
    assert place(house, taken) == (0, 10)


def test_the_database_itself_refuses_what_was_asked_or_may_still_be(house: House) -> None:
    task = house.task(max_queries=20)
    waiting, asked = house.submit(task, 5), house.submit(task, 5)
    plan(house, asked)
    ask(house, asked, 0)
    cancel(house, asked)
    for first, count in ((0, 5), (5, 5), (9, 1), (4, 2), (10, 5)):
        with (
            pytest.raises((IntegrityError, LabelerError)),
            house.database.write() as connection,
        ):
            house.tasks.give_back(task.digest, first, count, connection=connection)
    cancel(house, waiting)
    assert left(house, task) == 15
    with pytest.raises((IntegrityError, LabelerError)), house.database.write() as connection:
        house.tasks.give_back(task.digest, 2, 1, connection=connection)


def test_a_job_needs_its_queries_in_one_run_and_is_told_so(house: House) -> None:
    task = house.task(max_queries=20)
    jobs = [house.submit(task, 5) for _ in range(4)]
    for number in (0, 2):
        cancel(house, jobs[number])
    with pytest.raises(InvalidSetting, match=r"only 10 of the 20 .* \(5 of them in one run"):
        house.submit(task, 6)
