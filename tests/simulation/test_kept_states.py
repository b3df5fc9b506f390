"""After a turn, the coordinator's memory agrees with its journal, and a restart would owe the same.

Real schedules, with crashes, full disks and refused transactions. After every turn each unfinished job is read again by
the loader: every field that is kept is the same, and either without its memory asks for the same stores and sends.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import fields

import pytest

from labeler.driver.coordinator import CoordinatorDriver
from labeler.rounds.effects import UNFINISHED, JobRun, RoundRun
from tests.labeler.rounds.test_coordinator import restarted
from tests.simulation.campaign import Stage

SEEDS = (3, 6, 12)

FORGOTTEN = frozenset({"is_admitted", "looks_ahead", "is_storing", "decided_at_s", "asked_at_s", "mail"})
FORGOTTEN_OF_ROUNDS = frozenset({"done", "is_made", "decided_at_s", "gone_at_s"})
"""What `JobRun` and `RoundRun` call memory."""


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
    for seed in SEEDS:
        assert not stage.run(seed).violation
    wanted = {"queued waiting", "collecting asked", "tallying agreed", "tallying posted", "collecting opened"}
    assert wanted <= compared.keys()
