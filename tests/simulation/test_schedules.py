"""Schedules of crashes, loss, doubling, reordering and delay: nothing happens that must not, and every job ends."""

from __future__ import annotations

import os
from dataclasses import fields

import pytest

from tests.simulation.campaign import Stage, replay_command
from tests.simulation.case import Rates, case_of
from tests.simulation.seeds import comes_late, is_left_to_a_tallier, of, seeds_where
from tests.simulation.ways import Way

QUICK = 48
MANY = 1_200
CHUNKS = 4


def check(stage: Stage, seeds: range) -> None:
    completed = 0
    for seed in seeds:
        outcome = stage.run(seed)
        assert not outcome.violation, f"seed {seed}: {outcome.violation}\nreplay: {replay_command(seed)}"
        completed += outcome.states.count("completed")
    assert completed >= len(seeds) / 4, "hardly any job came through, so little was shown"


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_no_schedule_breaks_a_rule_and_every_job_ends(stage: Stage, chunk: int) -> None:
    check(stage, range(chunk * QUICK // CHUNKS, (chunk + 1) * QUICK // CHUNKS))


def test_an_agent_that_comes_in_at_a_later_step_has_paid_for_all(stage: Stage) -> None:
    """The late arrival is shown by the defect `pays for a step of training by its number`, found in these alone."""
    for seed in seeds_where(comes_late, 2):
        check(stage, range(seed, seed + 1))


@pytest.mark.parametrize("way", ["models", "weights", "lives", "heads"])
def test_rarer_ways_to_ask_come_through(stage: Stage, way: Way) -> None:
    for seed in seeds_where(of(way), 2):
        outcome = stage.run(seed)
        assert not outcome.violation, f"seed {seed}: {outcome.violation}\nreplay: {replay_command(seed)}"
        assert "completed" in outcome.states


def test_a_job_with_an_agent_that_a_tallier_does_not_know_ends_before_its_deadline(stage: Stage) -> None:
    (seed,) = seeds_where(is_left_to_a_tallier, 1)
    outcome = stage.run(seed)
    assert (outcome.violation, set(outcome.states)) == ("", {"failed"})


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("chunk", range(12 * CHUNKS))
def test_no_schedule_of_many_more_breaks_a_rule(stage: Stage, chunk: int) -> None:
    # Other seeds in other runs, where an environment variable says where to begin.
    first = int(os.environ.get("LABELER_SIMULATION_SEEDS", "1000"))
    size = MANY // (12 * CHUNKS)
    check(stage, range(first + chunk * size, first + (chunk + 1) * size))


def test_a_seed_is_the_same_schedule_every_time(stage: Stage) -> None:
    assert stage.run(3, traced=True) == stage.run(3, traced=True)


def test_the_schedules_hold_every_kind_of_fault_and_both_releases() -> None:
    cases = [case_of(seed) for seed in range(QUICK)]
    for one in fields(Rates):
        assert any(getattr(case.rates, one.name) for case in cases), f"no schedule has a rate of {one.name}"
    assert {case.release for case in cases} == {"histogram", "winner"}
    assert {case.talliers for case in cases} == {2, 3}
    for what in ("absent", "capped", "max_dropouts", "away", "unnamed"):
        assert any(getattr(case, what) for case in cases), what
    jobs = [job for case in cases for job in case.jobs]
    assert any(job.cancel_after is not None for job in jobs)
    assert any(len(job.sizes) > 1 for job in jobs)
    assert any(job.deadline_s < 100 for job in jobs)
