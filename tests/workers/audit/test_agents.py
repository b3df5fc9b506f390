"""An agent as the canary: its ballots are there or zero, its noise always; seeded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import labeler.methods.knn
import labeler.methods.reverse_knn
import labeler.release
from labeler.auditing import promised_mu
from labeler.errors import InvalidSetting
from labeler.methods import METHODS
from tests.workers.audit.conftest import audited_task
from tests.workers.audit.test_audit import audit_of, findings
from workers.audit.adversaries import ADVERSARIES, STRONGEST, SceneAttack, Surroundings
from workers.audit.run import ONE_RUN, default_adversaries

AGENTS = {
    "knn": audited_task(sigma_votes=8.0),
    "ensemble": audited_task(method="ensemble", k=1, sigma_votes=2.0),
    "reverse-knn of few records": audited_task(method="reverse-knn", k=2, max_agent_records=5, sigma_votes=8.0),
    "reverse-knn on a ball": audited_task(method="reverse-knn", k=2, ballot_radius=10, sigma_votes=8.0),
    "class means of few records": audited_task(
        method="blind-average",
        k=1,
        max_queries=9,
        sigma_votes=9.0,
        training={"learner": "means", "axes": 8, "max_records": 8, "radius": 8.0},
    ),
}
CLOSE = {"class means of few records": 0.99}


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_moves_all_that_is_charged_for_one(name: str, around: Callable[..., Surroundings]) -> None:
    task = AGENTS[name]
    attack = ADVERSARIES[STRONGEST].prepare(around(task, level="agent"))
    promised = promised_mu(task, "agent")
    assert attack.moved_mu is not None
    assert CLOSE.get(name, 0.999) * promised < attack.moved_mu <= promised
    assert isinstance(attack, SceneAttack)
    without = attack.worlds.with_canaries(())
    assert not attack.pipeline.agents(without, is_seeded=True)[0].ballots(task, attack.scene.batch, bytes(32)).any()


@pytest.mark.long
def test_an_agent_that_left_still_adds_its_noise(around: Callable[..., Surroundings]) -> None:
    """Else its absence would show by itself: what is left of the release is noise of the stated size."""
    attack = ADVERSARIES[STRONGEST].prepare(around(AGENTS["ensemble"], level="agent"))
    scores = [attack.trial(number, present=bool(number % 2)) for number in range(40)]
    mu = attack.moved_mu
    assert mu is not None
    middle = [sum(scores[part::2]) / 20 for part in (0, 1)]
    # Four standard errors; seeded.
    assert middle == pytest.approx([-(mu**2) / 2, mu**2 / 2], abs=4 * mu / 20**0.5)


@pytest.mark.parametrize("adversary", ["natural", "natural-chosen", "poisoned", "poisoned-chosen"])
def test_every_adversary_attacks_a_whole_agent(adversary: str, around: Callable[..., Surroundings]) -> None:
    attack = ADVERSARIES[adversary].prepare(around(AGENTS["ensemble"], level="agent"))
    assert attack.moved_mu is not None
    assert attack.trial(0, present=True) != attack.trial(0, present=False)


def test_a_ball_that_is_forgotten_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labeler.release, "project", lambda ballots, radius, scale: ballots * scale)  # noqa: ARG005
    task = AGENTS["reverse-knn on a ball"]
    assert findings(task, tmp_path / "audit", runs=25, confidence=0.9, level="agent").is_above


def test_what_no_adversary_was_made_for_is_refused() -> None:
    task = audited_task(
        method="aux-distill", k=1, max_queries=100, sigma_votes=0.5,
        training={"min_records": 50, "regularisation": 0.1, "dimension": 8},
    )  # fmt: skip
    with pytest.raises(InvalidSetting, match="cannot be silenced"):
        audit_of(task, level="agent")
    with pytest.raises(InvalidSetting, match="one-run has no attack on this task at level agent"):
        audit_of(AGENTS["knn"], level="agent", adversaries=(ONE_RUN,))
    assert ONE_RUN not in default_adversaries(AGENTS["knn"], "agent")


def test_a_method_that_nobody_thought_of_is_refused_and_not_attacked_as_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    audit_of(AGENTS["ensemble"])
    monkeypatch.setitem(METHODS, "ensemble", replace(METHODS["ensemble"], is_attacked=False))
    with pytest.raises(InvalidSetting, match="no adversary of an audit was made for method ensemble"):
        audit_of(AGENTS["ensemble"])


ATTRIBUTES = {
    "few of many": audited_task(classes=tuple("abcdef"), attributes_per_record=2, sigma_votes=4.0),
    "more than half": audited_task(classes=tuple("abcde"), attributes_per_record=3, sigma_votes=4.0),
}


@pytest.mark.parametrize("name", ATTRIBUTES)
@pytest.mark.parametrize("level", ["instance", "agent"])
def test_a_record_with_other_attributes_than_it_puts_out_moves_all_that_is_charged(
    name: str, level: str, around: Callable[..., Surroundings]
) -> None:
    task = ATTRIBUTES[name]
    attack = ADVERSARIES[STRONGEST].prepare(around(task, level=level))
    promised = promised_mu(task, level)
    votes = min(2, 5 - 3) if name == "more than half" else 2
    # An agent's records have the second class's attributes, of which there may be fewer than may vote.
    least = (votes / task.votes_of_a_record) ** 0.5 if level == "agent" else 1
    assert attack.moved_mu is not None
    assert 0.999 * least * promised < attack.moved_mu <= promised


@pytest.mark.long
def test_attributes_beyond_those_that_may_vote_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the check of what leaves an agent forgotten as well: it refuses them."""
    monkeypatch.setattr(labeler.release, "check_ballots", lambda *_: None)
    cast = labeler.methods.knn.attribute_ballots
    monkeypatch.setattr(labeler.methods.knn, "attribute_ballots", lambda labels, most: cast(labels, most=9 * most))
    task = audited_task(classes=tuple("abcdefghij"), attributes_per_record=1, sigma_votes=4.0)
    assert findings(task, tmp_path / "audit", runs=80, confidence=0.9).is_above
