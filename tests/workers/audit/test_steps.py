"""Training in steps, attacked by one clipped gradient; seeded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import labeler.release
from labeler.errors import InvalidSetting
from labeler.linear_model import model_before
from labeler.noise import noise_share
from labeler.task import Task
from tests.workers.audit.conftest import audited_task
from tests.workers.audit.test_audit import audit_of, findings
from workers.audit.adversaries import ADVERSARIES, STRONGEST, SceneAttack, Surroundings

STEPS = 4


def steps_task(rate: float, **changes: object) -> Task:
    training = {
        "min_records": 20,
        "regularisation": 1e-3,
        "iterations": STEPS,
        "radius": 25.0,
        "clip_norm": 0.5,
        "sampled": {"rate": rate, "learning_rate": 0.1, **changes},
    }
    return audited_task(method="federated", k=1, max_queries=STEPS * 6, sigma_votes=1.0, training=training)


@pytest.mark.long
def test_a_canary_that_is_always_drawn_moves_a_clip_in_every_step(around: Callable[..., Surroundings]) -> None:
    """Its scores are those of two Gaussians sqrt(T)/sigma apart, whoever else was drawn."""
    attack = ADVERSARIES[STRONGEST].prepare(around(steps_task(1.0)))
    assert isinstance(attack, SceneAttack)
    seen = attack.life("one", present=True)
    assert len(seen.releases) == len(seen.known_noise) == STEPS
    assert np.abs(model_before(attack.scene.task, seen.releases)).max() > 0
    scores = np.array([[attack.trial(number, present=present) for number in range(16)] for present in (False, True)])
    # mu = 2; four standard errors; seeded.
    assert scores.mean(axis=1) == pytest.approx([-2, 2], abs=4 * 2 / 4)
    assert 1 < scores.std(axis=1).mean() < 3


@pytest.mark.long
def test_noise_of_steps_that_is_a_third_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the seed, 99 of 100 audits find it."""
    monkeypatch.setattr(labeler.release, "noise_share", lambda *args: noise_share(*args) // 3)
    assert findings(steps_task(1.0), tmp_path / "audit", runs=60, confidence=0.95).is_above


def test_other_units_and_levels_of_steps_are_refused() -> None:
    with pytest.raises(InvalidSetting, match="training in steps"):
        audit_of(steps_task(0.5, unit="agent"))
    with pytest.raises(InvalidSetting, match="training in steps"):
        audit_of(steps_task(0.5), level="agent")
