"""`labeler audit`: close to what is promised where its attack is optimal, and it finds a mechanism that is broken.

Noise is seeded, so nothing here fails by chance; unseeded, a sound pipeline would be called broken with probability at
most what the confidence leaves.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import labeler.records
import labeler.release
import workers.agent.agent
from labeler.auditing import AuditFacts, AuditFindings, findings_of, promised_mu
from labeler.errors import BadData
from labeler.methods import METHODS
from labeler.noise import noise_share
from labeler.task import Task
from tests.workers.audit.conftest import audited_task, natural_records
from workers.audit.adversaries import ADVERSARIES, STRONGEST, SceneAttack, Surroundings
from workers.audit.observers import KnownVotes, log_winner_probability
from workers.audit.run import ONE_RUN, Audit, default_adversaries, run_audit

TRAINING = {"min_records": 50, "regularisation": 0.1}
TASKS = {
    "knn": audited_task(),
    "knn winner": audited_task(release="winner"),
    "reverse-knn": audited_task(method="reverse-knn", k=2, sigma_votes=0.7),
    "reverse-knn winner": audited_task(method="reverse-knn", k=2, sigma_votes=0.7, release="winner"),
    "ensemble": audited_task(method="ensemble", k=1),
    "blind-average": audited_task(method="blind-average", k=1, max_queries=9, sigma_votes=0.5, training=TRAINING),
    "class means": audited_task(
        method="blind-average", k=1, max_queries=9, sigma_votes=0.5, training={"learner": "means", "axes": 8}
    ),
    "aux-distill": audited_task(
        method="aux-distill", k=1, max_queries=100, sigma_votes=0.5, training=TRAINING | {"dimension": 8}
    ),
}


def audit_of(task: Task, *, runs: int = 100, adversaries: tuple[str, ...] = (STRONGEST,), **changes: object) -> Audit:
    features, labels = natural_records()
    return Audit(task, adversaries, runs, noise_seed=1, features=features, labels=labels, **changes)


def findings(task: Task, folder: Path, **changes: object) -> AuditFindings:
    document = run_audit(audit_of(task, **changes), folder)
    return findings_of(AuditFacts.model_validate_json(json.dumps(document["facts"])))


def distance(attack: SceneAttack) -> float:
    """What the canary moves, in units of the noise that is left: the mu that no test of it exceeds."""
    observer = attack._observer
    assert isinstance(observer, KnownVotes)
    return float(np.linalg.norm(observer.with_it - observer.without) / observer.task.sigma_votes)


@pytest.mark.parametrize("name", ["knn", "reverse-knn", "ensemble", "class means"])
def test_a_poisoned_canary_with_chosen_questions_moves_all_that_is_paid_for(
    name: str, around: Callable[..., Surroundings]
) -> None:
    task = TASKS[name]
    attack = ADVERSARIES[STRONGEST].prepare(around(task))
    promised = promised_mu(task, "instance")
    assert isinstance(attack, SceneAttack)
    # The promise is that of the integer mechanism, a hair above the ideal one.
    assert 0.999 * promised < distance(attack) <= promised


def test_a_person_moves_all_that_is_paid_for_however_many_records_it_has(around: Callable[..., Surroundings]) -> None:
    task = audited_task(records_per_person=2)
    attack = ADVERSARIES[STRONGEST].prepare(around(task, level="person"))
    promised = promised_mu(task, "person")
    assert isinstance(attack, SceneAttack)
    assert len(attack.scene.canaries[0]) == 8
    assert 0.999 * promised < distance(attack) <= promised


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("adversary", [name for name in ADVERSARIES if name != "many-jobs"])
def test_every_adversary_has_an_attack_on_every_method(
    name: str, adversary: str, around: Callable[..., Surroundings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.audit.adversaries.LEARNING_RUNS", 2)
    attack = ADVERSARIES[adversary].prepare(around(TASKS[name]))
    assert all(np.isfinite(attack.trial(0, present=present)) for present in (False, True))


WINNER = audited_task(release="winner", k=15, agents=3, sigma_votes=6.0, max_queries=72)
"""As many questions as make a winner worth something, votes that one vote decides, and a third class far behind."""


def test_colluders_vote_so_that_noise_they_know_moves_no_winner(
    around: Callable[..., Surroundings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they put in beyond their expected votes, noise with it, leaves the first two classes level to a vote."""
    task = audited_task(release="winner", k=40, agents=3, sigma_votes=4.0)
    leads = []
    for levels in (True, False):
        if not levels:
            monkeypatch.setattr("workers.audit.poison._colluders_level", lambda _: False)
        attack = ADVERSARIES[STRONGEST].prepare(around(task))
        assert isinstance(attack, SceneAttack)
        [known] = attack.life("one", present=True).known_noise
        leads.append(np.abs(known[:, 0] - known[:, 1]).max())
    assert leads[0] <= 1.5 < leads[1]


def test_noise_that_is_halved_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labeler.release, "noise_share", lambda *args: noise_share(*args) // 2)
    assert findings(TASKS["knn"], tmp_path / "audit", runs=70, confidence=0.9).is_above


@pytest.mark.long
def test_noise_that_is_halved_is_found_in_winners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A winner tells less of each vote, so its promise is refuted later and with less confidence."""
    monkeypatch.setattr(labeler.release, "noise_share", lambda *args: noise_share(*args) // 2)
    assert findings(WINNER, tmp_path / "audit", runs=320, confidence=0.9).is_above


@pytest.mark.long
def test_a_count_that_is_forgotten_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agents' ledgers charge nothing and count no question: so a second life of the task is answered as well."""
    monkeypatch.setattr(workers.agent.agent.InMemoryLedger, "charge", lambda *_, **__: None)
    # Five lives are worth sqrt(5) mu.
    assert findings(TASKS["knn"], tmp_path / "audit", runs=120).is_above


def test_the_agents_answer_nothing_beyond_what_was_paid_for(
    around: Callable[..., Surroundings], monkeypatch: pytest.MonkeyPatch
) -> None:
    attacks = [ADVERSARIES[STRONGEST].prepare(around(TASKS[name])) for name in ("knn", "reverse-knn")]
    for attack in attacks:
        assert isinstance(attack, SceneAttack)
        assert len(attack.life("one", present=True).releases) == 1
        with monkeypatch.context() as forgetting:
            forgetting.setattr(workers.agent.agent.InMemoryLedger, "charge", lambda *_, **__: None)
            # Not six: questions beyond the task's are refused by the agent, whatever its ledger says.
            assert len(attack.life("two", present=True).releases) == 5


def test_a_cap_that_is_forgotten_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All records of a person vote where two may: its canary has eight."""
    monkeypatch.setattr("workers.voting.first_of_each_person", lambda persons, *_: np.ones(len(persons), bool))
    task = audited_task(method="reverse-knn", k=2, sigma_votes=1.4, records_per_person=2)
    assert findings(task, tmp_path / "audit", runs=50, confidence=0.9, level="person").is_above


@pytest.mark.long
def test_votes_that_are_counted_beyond_k_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every record of reverse-knn votes at four times as many questions as are paid for."""
    method = METHODS["reverse-knn"]
    monkeypatch.setitem(
        METHODS,
        "reverse-knn",
        replace(method, ballots=lambda task, *given: method.ballots(task.model_copy(update={"k": 8}), *given)),
    )
    assert findings(TASKS["reverse-knn"], tmp_path / "audit", runs=120).is_above


def test_one_run_with_many_canaries_proves_something_and_nothing_too_much(tmp_path: Path) -> None:
    task = audited_task(method="reverse-knn", k=1, sigma_votes=0.5, max_queries=200)
    document = run_audit(audit_of(task, adversaries=(ONE_RUN,), confidence=0.95), tmp_path / "audit")
    [attempt], [found] = document["facts"]["attempts"], document["findings"]["findings"]
    assert attempt["canaries"] == attempt["absent"] + attempt["present"] == 200
    promised = document["findings"]["promised_epsilon"]
    assert 0.4 * promised < found["epsilon"] <= promised
    assert 0 < found["any_epsilon"] < found["epsilon"]


@pytest.mark.long
def test_an_audit_goes_on_where_it_was_stopped_and_comes_to_the_same(tmp_path: Path) -> None:
    task = TASKS["knn"]
    whole = run_audit(audit_of(task, runs=12), tmp_path / "whole")
    run_audit(audit_of(task, runs=4), tmp_path / "parts")
    runs = tmp_path / "parts" / "runs.jsonl"
    runs.write_text(runs.read_text() + '{"adversary": "poiso')  # cut off by a crash
    asked: list[int] = []
    parts = run_audit(audit_of(task, runs=12), tmp_path / "parts", progress=lambda _, done, __: asked.append(done))
    assert parts["facts"] == whole["facts"]
    assert asked == list(range(4, 13))
    with pytest.raises(BadData, match="another audit"):
        run_audit(audit_of(TASKS["reverse-knn"], runs=4), tmp_path / "parts")


def test_an_adversary_that_was_added_is_a_row_of_the_audit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Perfect:
        moved_mu = None

        def trial(self, number: int, *, present: bool) -> float:  # noqa: ARG002  # as every attack
            return 1.0 if present else -1.0

    own = workers.audit.adversaries.Adversary("perfect", "knows", lambda _: Perfect())
    monkeypatch.setitem(ADVERSARIES, "perfect", own)
    assert "perfect" in default_adversaries(TASKS["knn"])
    found = findings(TASKS["knn"], tmp_path / "audit", runs=200, adversaries=("perfect",))
    assert found.is_above


def test_the_probabilities_of_winners_are_those_of_simulated_sums() -> None:
    sums, sigma = np.array([[0.0, 1.0, -2.0]]), 1.5
    for threshold in (None, 1.0):
        labels = [0, 1, 2] + ([-1] if threshold is not None else [])
        found = [float(np.exp(log_winner_probability(sums, np.array([one]), sigma, threshold))[0]) for one in labels]
        noisy = sums + sigma * np.random.default_rng(2).normal(size=(200_000, 3))
        winners = np.where(noisy.max(axis=1) < (threshold or -np.inf), -1, noisy.argmax(axis=1))
        # Five standard deviations of a count; seeded.
        assert found == pytest.approx([float((winners == one).mean()) for one in labels], abs=0.006)
        assert sum(found) == pytest.approx(1, abs=1e-3)


def test_an_audit_writes_into_no_folder_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(BadData, match="holds no audit of ours"):
        run_audit(audit_of(TASKS["knn"]), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("text", ["no JSON\n", "{identity}\n{}\n", "{identity}\n7\n", "[" * 100_000 + "\n", "\xff"])
def test_runs_that_are_damaged_are_refused_and_left_as_they_are(tmp_path: Path, text: str) -> None:
    audit = audit_of(TASKS["knn"])
    damaged = text.replace("{identity}", json.dumps(audit.identity)).encode("latin-1")
    (tmp_path / "runs.jsonl").write_bytes(damaged)
    with pytest.raises(BadData, match=r"damaged|another audit"):
        run_audit(audit, tmp_path)
    assert (tmp_path / "runs.jsonl").read_bytes() == damaged
