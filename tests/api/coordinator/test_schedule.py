"""Every unfinished job has a time of its own: whoever is woken often cannot keep another waiting."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.coordinator.conductor import Conductor, Timing
from api.coordinator.schedule import LONGEST_PAUSE_S, Schedule
from tests.api.conftest import House

EVERY_S = 1.0


class Seconds:
    """A clock that a test turns."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def looked_at(schedule: Schedule) -> list[str]:
    """One tick in which every look goes well."""
    due = schedule.due()
    for job_id in due:
        schedule.looking(job_id)
        schedule.went_on(job_id)
    return due


def test_a_job_that_is_woken_all_the_time_does_not_keep_others_from_being_looked_at() -> None:
    clock = Seconds()
    schedule = Schedule(every_s=EVERY_S, clock=clock)
    schedule.refresh(["loud", "quiet"])
    looks: Counter[str] = Counter()
    for _ in range(150):  # a minute, in which one job is woken every 0.4 s
        schedule.wake("loud")
        looks.update(looked_at(schedule))
        clock.now += 0.4
    assert looks["loud"] == 150
    assert looks["quiet"] >= 60 / (EVERY_S + 0.4)


def test_every_due_job_is_looked_at_before_any_is_looked_at_twice() -> None:
    clock = Seconds()
    schedule = Schedule(every_s=EVERY_S, clock=clock)
    schedule.refresh(["a", "b", "c"])
    schedule.wake("b")
    schedule.wake("b")
    assert sorted(looked_at(schedule)) == ["a", "b", "c"]
    assert looked_at(schedule) == []
    clock.now += 0.1
    schedule.wake("b")
    clock.now += EVERY_S
    assert looked_at(schedule) == ["b", "a", "c"]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.01, 0.9), st.booleans()), min_size=1, max_size=60),
)
def test_a_wake_makes_a_look_earlier_and_never_later(steps: list[tuple[str, float, bool]]) -> None:
    """The same history with and without wakes: whoever was due without them is due, or was looked at, with them."""
    clock = Seconds()
    woken, plain = (Schedule(every_s=EVERY_S, clock=clock) for _ in range(2))
    last = {id(woken): dict.fromkeys("abc", 0.0), id(plain): dict.fromkeys("abc", 0.0)}
    for schedule in (woken, plain):
        schedule.refresh("abc")
    for job_id, pause_s, is_woken in steps:
        if is_woken:
            woken.wake(job_id)
        for schedule in (woken, plain):
            last[id(schedule)].update(dict.fromkeys(looked_at(schedule), clock.now))
        assert all(clock.now - last[id(woken)][one] <= EVERY_S + 0.9 for one in "abc")
        clock.now += pause_s


def test_what_wakes_a_job_while_it_is_looked_at_is_not_lost() -> None:
    schedule = Schedule(every_s=EVERY_S, clock=Seconds())
    schedule.wake("a")
    schedule.looking("a")
    schedule.wake("a")
    schedule.went_on("a")
    assert schedule.due() == ["a"]


def test_a_job_that_fails_waits_ever_longer_and_a_wake_does_not_shorten_that() -> None:
    clock = Seconds()
    schedule = Schedule(every_s=EVERY_S, clock=clock)
    schedule.wake("a")
    pauses = []
    for _ in range(12):
        schedule.looking("a")
        schedule.failed("a")
        began = clock.now
        while not schedule.due():
            clock.now += 0.25
            schedule.wake("a")
        pauses.append(clock.now - began)
    assert pauses[:4] == [0.25, 0.5, 1.0, 2.0]
    assert max(pauses) == LONGEST_PAUSE_S == pauses[-1]
    schedule.looking("a")
    schedule.went_on("a")
    schedule.wake("a")
    assert schedule.due() == ["a"]


def test_a_job_that_ended_elsewhere_is_looked_at_once_more_and_then_forgotten() -> None:
    clock = Seconds()
    schedule = Schedule(every_s=EVERY_S, clock=clock)
    schedule.refresh(["a", "b"])
    looked_at(schedule)
    schedule.refresh(["b"])
    assert schedule.due() == ["a"]
    schedule.looking("a")
    schedule.forget("a")
    schedule.went_on("a")
    assert "a" not in schedule


def test_waiting_jobs_are_looked_at_whatever_job_is_woken_and_a_finished_one_is_forgotten(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The conductor itself, over a real journal: another job is woken at every tick for a minute."""
    clock = [time.monotonic()]
    conductor = Conductor(
        home=house.config.home,
        database=house.database,
        ledger=house.ledger,
        tasks=house.tasks,
        jobs=house.jobs,
        aggregates=None,  # type: ignore[arg-type]  # nothing is summed here
        post_office=None,  # type: ignore[arg-type]  # nothing is sent here
        mailbox=None,  # type: ignore[arg-type]  # nothing is sent here
        timing=Timing(patience_s=0.0, ask_again_s=1.0),
        clock=house.clock,
        now=lambda: clock[0],
    )
    task = house.task()
    ended, waiting = house.submit(task, 2), house.submit(task, 2)
    house.jobs.change(ended.job_id, "failed", expected=["queued"])
    looks: Counter[str] = Counter()
    advance = Conductor.advance

    def counted(self: Conductor, job_id: str) -> None:
        looks[job_id] += 1
        if job_id == ended.job_id:
            advance(self, job_id)

    monkeypatch.setattr(Conductor, "advance", counted)
    for _ in range(150):
        conductor.wake(ended.job_id)
        conductor.tick()
        clock[0] += 0.4
    assert looks[waiting.job_id] >= 40
    conductor.wake("job-nobody-has")
    monkeypatch.setattr(Conductor, "advance", advance)
    conductor._turn("job-nobody-has")
    assert "job-nobody-has" not in conductor._schedule
    assert ended.job_id not in conductor._schedule
