"""One question asked twenty thousand times: each answer is an independent run, so what is proved is close to exact.

The attack is `labeler audit`'s strongest adversary (checks.audit) on a task whose questions are all the same; here
each answer is scored by itself, and stands against the price of one question. The agents that may drop out have, and
the colluding ones tell their noise, so what is left is exactly the noise that is charged for.

False alarms: the threshold is fixed beforehand, so a sound pipeline fails this test with probability at most 1e-6.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import labeler.release
from checks.audit.adversaries import ADVERSARIES, STRONGEST, SceneAttack, Surroundings
from checks.audit.observers import KnownVotes
from labeler.accounting.gaussian import epsilon_of_delta
from labeler.auditing import Errors, many_runs_mu
from labeler.noise import noise_share
from labeler.planning import price
from labeler.task import Task
from tests.checks.audit.conftest import audited_task as small_task
from tests.checks.audit.conftest import natural_records

TRIALS = 20_000
FALSE_ALARM = 1e-6


def audited_task(**changes: object) -> Task:
    return small_task(classes=("absent", "present"), max_queries=TRIALS, **changes)


def attack(task: Task, folder: Path) -> tuple[float, float]:
    """(epsilon proved by the attack, epsilon stated for one answer)."""
    features, labels = natural_records()
    around = Surroundings(task, "instance", features, labels, "release", folder, 0, 1)
    made = ADVERSARIES[STRONGEST].prepare(around)
    assert isinstance(made, SceneAttack)
    observer = made._observer
    assert isinstance(observer, KnownVotes)
    scores = []
    for present in (False, True):
        seen = made.life("audit", present=present)
        scores.append(observer.of_each_question(seen.releases[0], seen.known_noise[0]))
    absent, present_ = scores
    assert len(absent) == len(present_) == TRIALS
    errors = Errors(int((absent > 0).sum()), TRIALS, int((present_ <= 0).sum()), TRIALS)
    return epsilon_of_delta(task.delta, many_runs_mu(errors, 1 - FALSE_ALARM)), price(task, queries=1).instance.epsilon


def test_the_attack_stays_below_the_stated_epsilon(tmp_path: Path) -> None:
    proved, stated = attack(audited_task(colluding_agents=0), tmp_path)
    assert 0.8 * stated < proved <= stated  # Close from below: the attack is strong enough to mean something.


def test_a_colluder_and_a_dropout_leave_the_noise_that_is_charged(tmp_path: Path) -> None:
    """Histogram: the colluder subtracts its noise, and still proves no more than is stated; nothing to spare."""
    proved, stated = attack(audited_task(agents=4, colluding_agents=1, max_dropouts=1), tmp_path)
    assert 0.8 * stated < proved <= stated


def test_a_dishonest_tallier_leaves_the_noise_that_is_charged(tmp_path: Path) -> None:
    """Where the talliers add the noise, one of three knows its own, and every agent but one may collude."""
    task = audited_task(agents=3, colluding_agents=2, dishonest_talliers=1)
    proved, stated = attack(task, tmp_path)
    assert 0.8 * stated < proved <= stated


@pytest.mark.long
def test_a_colluder_learns_no_more_from_winners_than_is_charged(tmp_path: Path) -> None:
    """Winner: the colluder knows by how much its own noise has moved the balance of every answer."""
    task = audited_task(agents=4, colluding_agents=1, max_dropouts=1, release="winner")
    proved, stated = attack(task, tmp_path)
    assert 0.4 * stated < proved <= stated


def test_the_attack_catches_the_pipeline_when_its_noise_is_halved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(labeler.release, "noise_share", lambda *args: noise_share(*args) // 2)
    proved, stated = attack(audited_task(colluding_agents=0), tmp_path)
    assert proved > 1.5 * stated


def test_a_price_for_a_colluder_who_is_not_there_is_far_from_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An outsider proves less than is stated against the colluder: the other agent's share is still there."""
    monkeypatch.setattr(
        "checks.audit.pipeline.Pipeline._known_noise",
        lambda *_: np.zeros((TRIALS, 2)),
    )
    proved, stated = attack(audited_task(colluding_agents=1), tmp_path)
    assert proved < 0.8 * stated
