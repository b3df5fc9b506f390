"""Schedules of crashes, loss, doubling, reordering and delay: nothing happens that must not, and every job ends.

After every turn the coordinator's memory agrees with its journal, and a restart would owe the same.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import fields

import pytest

from labeler.driver.coordinator import CoordinatorDriver
from labeler.rounds.effects import UNFINISHED, JobRun, RoundRun
from tests.labeler.rounds.test_coordinator import restarted
from tests.simulation.campaign import Stage, replay_command
from tests.simulation.case import Rates, case_of
from tests.simulation.seeds import comes_late, is_left_to_a_tallier, of, seeds_where
from tests.simulation.ways import Way

QUICK = 24
MANY = 1_200
CHUNKS = 4

FORGOTTEN = frozenset({"is_admitted", "looks_ahead", "is_storing", "decided_at_s", "asked_at_s", "mail"})
FORGOTTEN_OF_ROUNDS = frozenset({"done", "is_made", "decided_at_s", "gone_at_s"})
"""What `JobRun` and `RoundRun` call memory."""


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


def kept(run: JobRun) -> tuple[dict[str, object], list[dict[str, object]]]:
    """Everything that has to survive a restart; of what a step has opened whether it is there, since arrays differ."""
    of_job = {one.name: getattr(run, one.name) for one in fields(JobRun) if one.name not in FORGOTTEN | {"rounds"}}
    names = [one.name for one in fields(RoundRun) if one.name not in FORGOTTEN_OF_ROUNDS | {"opened"}]
    rounds = [{name: getattr(one, name) for name in names} | {"opened": one.opened is None} for one in run.rounds]
    return of_job, rounds


@pytest.mark.long
def test_after_every_turn_memory_and_journal_say_the_same_and_owe_the_same(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real schedules, with crashes, full disks and refused transactions; each unfinished job is read by the loader.

    Every field that is kept is the same, and either without its memory asks for the same stores and sends.
    """
    compared: Counter[str] = Counter()
    turn = CoordinatorDriver.turn

    def turn_and_compare(driver: CoordinatorDriver) -> bool:
        is_more = turn(driver)
        remembered = dict(driver._live)
        known = [job_id for job_id, live in remembered.items() if live.trouble is None]
        driver._live.clear()  # so that the journal alone is read
        read = driver._loader.load(known, driver._parties)
        driver._live.update(remembered)
        for job_id, loaded in read.items():
            if loaded.run.state not in UNFINISHED:
                continue  # ended by somebody else since
            memory, now = remembered[job_id].run, driver._now()
            assert kept(loaded.run) == kept(memory)
            owed = [[type(effect) for effect in restarted(one, now)[1]] for one in (loaded.run, memory)]
            assert owed[0] == owed[1]
            compared.update(f"{loaded.run.state} {one.state}" for one in loaded.run.rounds)
        return is_more

    monkeypatch.setattr(CoordinatorDriver, "turn", turn_and_compare)
    for seed in (3, 6, 12):
        assert not stage.run(seed).violation
    wanted = {"queued waiting", "collecting asked", "tallying agreed", "tallying posted", "collecting opened"}
    assert wanted <= compared.keys()
