"""How far one record, one person or one agent moves what an adversary sees: as far as is charged, and no further.

Noise is seeded, so nothing here fails by chance.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from checks.audit.adversaries import ADVERSARIES, QUERIES, STRONGEST, SceneAttack, Surroundings, read_task
from checks.audit.observers import log_winner_probability
from checks.audit.run import ONE_RUN, default_adversaries
from labeler.auditing import promised_mu
from labeler.errors import InvalidSetting, InvalidTask
from labeler.linear_model import model_before
from labeler.methods import METHODS
from labeler.setting import StatedLevel
from labeler.task import Task
from tests.checks.audit.conftest import audit_of, audited_task, cap_forgotten

TRAINING = {"min_records": 50, "regularisation": 0.1}
BOUNDED = TRAINING | {"max_records": 200}
MEANS = {"learner": "means", "axes": 8}


def model_task(**training: object) -> Task:
    return audited_task(method="blind-average", k=1, max_queries=65, sigma_votes=0.6, training=training)


def heads_task(**training: object) -> Task:
    return audited_task(method="aux-distill", k=1, max_queries=200, sigma_votes=0.6, training=training)


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


TASKS = {
    "knn": audited_task(),
    "knn winner": audited_task(release="winner"),
    "reverse-knn": audited_task(method="reverse-knn", k=2, sigma_votes=0.7),
    "reverse-knn winner": audited_task(method="reverse-knn", k=2, sigma_votes=0.7, release="winner"),
    "ensemble": audited_task(method="ensemble", k=1),
    "blind-average": audited_task(method="blind-average", k=1, max_queries=9, sigma_votes=0.5, training=TRAINING),
    "class means": audited_task(method="blind-average", k=1, max_queries=9, sigma_votes=0.5, training=MEANS),
    "aux-distill": audited_task(
        method="aux-distill", k=1, max_queries=100, sigma_votes=0.5, training=TRAINING | {"dimension": 8}
    ),
}
BALL = audited_task(method="reverse-knn", k=2, ballot_radius=10, sigma_votes=8.0)
HEADS = heads_task(**BOUNDED, dimension=32)
FEW_OF_MANY = audited_task(classes=tuple("abcdef"), attributes_per_record=2, sigma_votes=4.0)
MODELS_OF_MANY = audited_task(method="ensemble", k=1, classes=tuple("abcdef"), attributes_per_record=2, sigma_votes=4.0)
MORE_THAN_HALF = audited_task(classes=tuple("abcde"), attributes_per_record=3, sigma_votes=4.0)

ALL = 0.999
"""The promise is that of the integer mechanism, a hair above the ideal one."""

MOVED: dict[str, tuple[Task, StatedLevel, float, float]] = {
    **{name: (TASKS[name], "instance", ALL, 1) for name in ("knn", "reverse-knn", "ensemble")},
    # Under caps two records of one class share the quarter that counts them; the charge is for twice the length.
    "class means": (TASKS["class means"], "instance", 0.998, 1),
    "a person, however many records it has": (audited_task(records_per_person=2), "person", ALL, 1),
    "softmax, records bounded": (model_task(**BOUNDED), "instance", 0.75, 1),
    "svm, records bounded": (model_task(**BOUNDED, learner="svm"), "instance", 0.85, 1),
    "logistic, records bounded": (model_task(**BOUNDED, learner="logistic"), "instance", 0.45, 1),
    "svm whose margins never close": (
        model_task(**TRAINING | {"regularisation": 1.2}, learner="svm"), "instance", 0.95, 1,
    ),
    "aux-distill, records bounded": (HEADS, "instance", 0.65, 1),
    "aux-distill without scores": (heads_task(**BOUNDED, dimension=32, score_share=0.0), "instance", 0.65, 1),
    # A price that covers that one record replaces another, and a canary that only comes or goes.
    "softmax": (model_task(**TRAINING), "instance", 0.3, 0.55),
    "aux-distill": (heads_task(**TRAINING, dimension=8), "instance", 0.3, 0.5),
    "an agent of knn": (audited_task(sigma_votes=8.0), "agent", ALL, 1),
    "an agent of ensemble": (audited_task(method="ensemble", k=1, sigma_votes=2.0), "agent", ALL, 1),
    "an agent of few records": (
        audited_task(method="reverse-knn", k=2, max_agent_records=5, sigma_votes=8.0), "agent", ALL, 1,
    ),
    "an agent on a ball": (BALL, "agent", ALL, 1),
    "an agent of class means of few records": (
        audited_task(
            method="blind-average", k=1, max_queries=9, sigma_votes=9.0,
            training=MEANS | {"max_records": 8, "radius": 8.0},
        ),
        "agent", 0.99, 1,
    ),
    # A record with other attributes than it puts out.
    "attributes, few of many": (FEW_OF_MANY, "instance", ALL, 1),
    "attributes, of a model": (MODELS_OF_MANY, "instance", ALL, 1),
    "attributes, more than half": (MORE_THAN_HALF, "instance", ALL, 1),
    "an agent of attributes, few of many": (FEW_OF_MANY, "agent", ALL, 1),
    # An agent's records have the second class's attributes, of which there may be fewer than may vote.
    "an agent of attributes, more than half": (
        MORE_THAN_HALF, "agent", ALL * (2 / MORE_THAN_HALF.votes_of_a_record) ** 0.5, 1,
    ),
}  # fmt: skip
"""The shares of the charged mu between which the poisoned canary with chosen questions moves what is seen."""


@pytest.mark.parametrize("name", MOVED)
def test_a_canary_moves_its_share_of_what_is_charged_and_no_more(
    name: str, around: Callable[..., Surroundings]
) -> None:
    task, level, least, most = MOVED[name]
    attack = ADVERSARIES[STRONGEST].prepare(around(task, level=level))
    promised = promised_mu(task, level)
    assert attack.moved_mu is not None
    assert least * promised < attack.moved_mu <= most * promised
    assert isinstance(attack, SceneAttack)
    if level == "person":
        assert len(attack.scene.canaries[0]) == 8
    if level == "agent":
        gone = attack.pipeline.agents(attack.worlds.with_canaries(()), is_seeded=True)[0]
        assert not gone.ballots(task, attack.scene.batch, bytes(32)).any()


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("adversary", [name for name in ADVERSARIES if name != "many-jobs"])
def test_every_adversary_has_an_attack_on_every_method(
    name: str, adversary: str, around: Callable[..., Surroundings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("checks.audit.adversaries.LEARNING_RUNS", 2)
    attack = ADVERSARIES[adversary].prepare(around(TASKS[name]))
    assert all(np.isfinite(attack.trial(0, present=present)) for present in (False, True))


@pytest.mark.parametrize("adversary", ["natural", "natural-chosen", "poisoned", "poisoned-chosen"])
def test_every_adversary_attacks_a_whole_agent(adversary: str, around: Callable[..., Surroundings]) -> None:
    attack = ADVERSARIES[adversary].prepare(around(TASKS["ensemble"], level="agent"))
    assert attack.moved_mu is not None
    assert attack.trial(0, present=True) != attack.trial(0, present=False)


def test_colluders_vote_so_that_noise_they_know_moves_no_winner(
    around: Callable[..., Surroundings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they put in beyond their expected votes, noise with it, leaves the first two classes level to a vote."""
    task = audited_task(release="winner", k=40, agents=3, sigma_votes=4.0)
    leads = []
    for levels in (True, False):
        if not levels:
            monkeypatch.setattr("checks.audit.poison._colluders_level", lambda _: False)
        attack = ADVERSARIES[STRONGEST].prepare(around(task))
        assert isinstance(attack, SceneAttack)
        [known] = attack.life("one", present=True).known_noise
        leads.append(np.abs(known[:, 0] - known[:, 1]).max())
    assert leads[0] <= 1.5 < leads[1]


def test_the_agents_answer_nothing_beyond_what_was_paid_for(
    around: Callable[..., Surroundings], monkeypatch: pytest.MonkeyPatch
) -> None:
    attacks = [ADVERSARIES[STRONGEST].prepare(around(TASKS[name])) for name in ("knn", "reverse-knn")]
    for attack in attacks:
        assert isinstance(attack, SceneAttack)
        assert len(attack.life("one", present=True).releases) == 1
        with monkeypatch.context() as forgetting:
            cap_forgotten(forgetting)
            # Not six: questions beyond the task's are refused by the agent, whatever the account says.
            assert len(attack.life("two", present=True).releases) == 5


@pytest.mark.long
@pytest.mark.parametrize(
    ("task", "level", "trials"),
    [(HEADS, "instance", 24), (TASKS["ensemble"], "agent", 20)],
    ids=["soft labels", "an agent that left"],
)
def test_scores_are_as_far_apart_as_is_said_and_as_their_noise(
    task: Task, level: str, trials: int, around: Callable[..., Surroundings]
) -> None:
    """The likelihood ratio of two Gaussians mu apart has means -+mu^2/2 and deviation mu in both worlds.

    An agent that left still adds its noise: else its absence would show by itself.
    """
    attack = ADVERSARIES[STRONGEST].prepare(around(task, level=level))
    scores = np.array([[attack.trial(number, present=is_in) for number in range(trials)] for is_in in (False, True)])
    mu = attack.moved_mu
    assert mu is not None
    # Four standard errors of a mean, and of a deviation; seeded.
    assert scores.mean(axis=1) == pytest.approx([-(mu**2) / 2, mu**2 / 2], abs=4 * mu / np.sqrt(trials))
    assert scores.std(axis=1, ddof=1) == pytest.approx([mu, mu], rel=4 / np.sqrt(2 * (trials - 1)))


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


@pytest.mark.parametrize("release", ["histogram", "winner"])
def test_a_students_labels_are_attacked_as_well(
    release: str, around: Callable[..., Surroundings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("checks.audit.adversaries.LEARNING_RUNS", 2)
    task = audited_task(max_queries=12, release=release)
    attack = ADVERSARIES["natural"].prepare(around(task, view="student"))
    scores = [attack.trial(number, present=bool(number % 2)) for number in range(4)]
    assert np.isfinite(scores).all()
    assert len(set(scores)) > 1


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


# Which tasks are attacked.

FILE = '[task]\nname = "t"\nmethod = "knn"\nk = 3\nsigma_votes = 5.0\ndelta = 1e-5\n'


def test_a_task_file_a_runs_folder_and_a_services_answer_name_the_task(tmp_path: Path) -> None:
    stored = audited_task()
    file, folder, answer = tmp_path / "task.toml", tmp_path / "job", tmp_path / "task.json"
    file.write_text(FILE)
    (folder / ".job").mkdir(parents=True)
    (folder / ".job" / "plan.json").write_text(json.dumps({"plan": {"task": stored.model_dump(mode="json")}}))
    answer.write_text(json.dumps({"task_id": "1", "task": stored.model_dump(mode="json")}))
    made = read_task(file, agents=4, queries=None, classes=("a", "b"))
    assert (made.agents, made.max_queries, made.colluding_agents, made.classes) == (4, QUERIES, 1, ("a", "b"))
    for path in (folder, answer):
        assert read_task(path, agents=None, queries=None, classes=()) == stored
    with pytest.raises(InvalidTask, match="leave --agents and --queries out"):
        read_task(answer, agents=2, queries=None, classes=())
    with pytest.raises(InvalidTask, match="cannot be read"):
        read_task(tmp_path / "nothing.json", agents=None, queries=None, classes=())


def test_a_task_about_attributes_is_read_and_attacked(tmp_path: Path, around: Callable[..., Surroundings]) -> None:
    stored = audited_task(attributes_per_record=2)
    (tmp_path / "task.json").write_text(json.dumps(stored.model_dump(mode="json")))
    task = read_task(tmp_path / "task.json", agents=None, queries=None, classes=())
    attack = ADVERSARIES["poisoned-chosen"].prepare(around(task))
    assert attack.trial(0, present=True) != attack.trial(0, present=False)


def test_what_no_adversary_was_made_for_is_refused_and_not_attacked_as_another(monkeypatch: pytest.MonkeyPatch) -> None:
    for task, level, says in (
        (TASKS["aux-distill"], "agent", "cannot be silenced"),
        (steps_task(0.5, unit="agent"), "instance", "training in steps"),
        (steps_task(0.5), "agent", "training in steps"),
    ):
        with pytest.raises(InvalidSetting, match=says):
            audit_of(task, level=level)
    with pytest.raises(InvalidSetting, match="one-run has no attack on this task at level agent"):
        audit_of(TASKS["knn"], level="agent", adversaries=(ONE_RUN,))
    assert ONE_RUN not in default_adversaries(TASKS["knn"], "agent")
    audit_of(TASKS["ensemble"])
    monkeypatch.setitem(METHODS, "ensemble", replace(METHODS["ensemble"], is_attacked=False))
    with pytest.raises(InvalidSetting, match="no adversary of an audit was made for method ensemble"):
        audit_of(TASKS["ensemble"])
