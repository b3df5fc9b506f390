"""Adversaries of an audit: those of Chadha et al. (ICML 2024, Auditing private prediction), and others added here.

| | questions as they come | questions of its choice |
|---|---|---|
| natural records | `natural` | `natural-chosen` |
| records of its choice | `poisoned` | `poisoned-chosen` |

Votes for life promise something about all jobs of an image: `many-jobs` asks a hundred of them.

Each adversary knows every record but the canary, and what the task's colluding agents know. Each asks again beyond what
was paid for. **To add one**, write an `Adversary` whose `prepare` gives an `Attack`, and add it to `ADVERSARIES`. An
attack may run as many jobs as it likes in one trial. It is then a row of every audit of a task that it takes.

**Many jobs.** Votes for life are attacked where they promise: a hundred jobs about the same record, each chosen by the
answers before. Every second job is dear (few votes pay for a budget) and asks about canaries that seem to be present.
The others are cheap and ask about those that do not. The adversary knows every other record and agent, and the noise of
all agents but the attacked one. There are many canaries, each with a separate place where the adversary asks about it.
A record's votes depend on the record and its own spend alone, so each canary is an independent trial of the whole game.
The agent's part is the real one: votes within the budget, spends in a journal, integer noise.

A shadow tells the adversary what a record would have cast if it were present: the same code over all canaries. So a
filter that forgets to count is found: its shadow forgets as well.

`Surroundings` is what an attack is prepared from. The attacked task comes from a task file, from the folder of a run,
or as JSON of a job's task (`read_task`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from checks.audit.observers import KnownVotes, Observer, StepVotes, StudentNumbers, heard_heads, learn
from checks.audit.pipeline import LabeledRecords, Observation, Pipeline, Scene, Worlds
from checks.audit.poison import DIMENSION, dimension_of, model_queries, poisoned
from feature_store.rows import quantize
from feature_store.shard import Shard
from feature_store.shard_writer import ShardWriter
from labeler.accounting.events import NANO
from labeler.errors import InvalidSetting, InvalidTask
from labeler.ledger.database import open_database
from labeler.ledger.lifetimes import LifetimeSpends
from labeler.methods import METHODS, attacked_methods
from labeler.methods.sensitivity import answers_with_a_model
from labeler.randomness import os_source, seeded_source
from labeler.release import contribution
from labeler.setting import StatedLevel
from labeler.system.files import read_named
from labeler.system.site_key import SiteKey
from labeler.tally import QueryBatch
from labeler.task import Task, parse_task
from workers.run.task_file import read_task_file
from workers.voting import lifetime_ballots, select_records

LEARNING_RUNS: Final = 60
"""Runs of each world from which an observer learns, where it has to; they are not counted."""

_NATURAL_RECORDS: Final = 100
_STUDENT_IMAGES: Final = 200


class Attack(Protocol):
    """One adversary, ready.

    Attributes:
        moved_mu: how far its canary moves what it sees, in deviations of the noise, and what no test of it exceeds;
            None where that is not known.
    """

    @property
    def moved_mu(self) -> float | None: ...

    def trial(self, number: int, *, present: bool) -> float:
        """Run one independent life of the task, with or without the canary; above zero, the score says it was there."""
        ...


@dataclass(frozen=True)
class Adversary:
    """An entry of the registry.

    Attributes:
        name: on the command line.
        takes: whether it has an attack on a task. Votes for life are a promise about all jobs of an image, which one
            life of one task does not reach, so an adversary for them brings its own jobs.
    """

    name: str
    sentence: str
    prepare: Callable[[Surroundings], Attack]
    takes: Callable[[Task], bool] = lambda task: task.lifetime_budget is None


class SceneAttack:
    """Lives of one scene, scored by an observer that was made before the first counted run."""

    def __init__(self, scene: Scene, around: Surroundings) -> None:
        self.scene, self._around = scene, around
        self.worlds = Worlds(scene, around.folder)
        self.pipeline = Pipeline(scene.task, scene.batch, is_level=scene.is_level)
        self._observer = self._made_observer()

    @property
    def moved_mu(self) -> float | None:
        """See Attack."""
        return self._observer.moved_mu

    def trial(self, number: int, *, present: bool) -> float:
        """See Attack."""
        return self._observer.score(self.life(f"run {number}", present=present))

    def life(self, name: str, *, present: bool) -> Observation:
        """Run one life of the task."""
        around, canaries = self._around, range(len(self.scene.canaries)) if present else ()
        seed = None if around.noise_seed is None else f"{around.noise_seed} {around.folder.name} {name} {present}"
        return self.pipeline.run(self.worlds.with_canaries(canaries), seed=seed)

    def _made_observer(self) -> Observer:
        task, canary = self.scene.task, self.scene.canaries[0]
        worlds = [self.worlds.with_canaries(present) for present in ((), (0,))]
        if self._around.view == "release":
            if task.sampled is not None:
                return StepVotes(task, canary, self.scene.batch)
            if not task.noise_parties:
                most = task.records_per_person
                return heard_heads(
                    task, self.scene.batch, *(select_records(one.shards[0], records_per_person=most) for one in worlds)
                )
            return KnownVotes(task, *map(self.pipeline.expected, worlds))
        numbers = StudentNumbers(task, self.scene.queries, fitted(self._around)[0][:_STUDENT_IMAGES], canary.features)
        seen = [
            [self.life(f"learning {number}", present=present) for number in range(LEARNING_RUNS)]
            for present in (False, True)
        ]
        return learn(numbers, *seen)


def natural(around: Surroundings, *, chosen: bool) -> Scene:
    """Set up natural records at every agent, one of them the canary; natural questions, or all that help about the
    canary.
    """
    task, rng = around.task, around.rng(1)
    features, labels = fitted(around)
    each = max(1, min(_NATURAL_RECORDS, len(labels) // (2 * task.agents)))
    order = rng.permutation(len(labels))
    canary, private, public = order[:1], order[1 : 1 + each * task.agents], order[1 + each * task.agents :]
    copies = 1 if around.level == "instance" else 4 * (task.records_per_person or 1)
    agents = [LabeledRecords(features[rows], labels[rows]) for rows in np.array_split(private, task.agents)]
    queries = model_queries(task)
    if queries is None:
        queries = features[rng.choice(public, size=task.max_queries, replace=len(public) < task.max_queries)]
        if chosen:
            queries[np.setdiff1d(np.arange(task.traits.reach(task)), task.traits.negatives(task))] = features[canary[0]]
    unit = LabeledRecords(np.repeat(features[canary], copies, axis=0), np.repeat(labels[canary], copies))
    if around.level == "agent":
        unit, agents[0] = agents[0], LabeledRecords(features[:0], labels[:0])
    return Scene(task, around.level, agents=tuple(agents), canaries=(unit,), queries=queries)


def fitted(around: Surroundings) -> tuple[NDArray[np.int16], NDArray[np.int16]]:
    """Return the natural records in the task's classes, by a random public map where it asks for another dimension."""
    features, labels = around.features, around.labels % around.task.num_classes
    wanted = dimension_of(around.task)
    if wanted != features.shape[1] and answers_with_a_model(around.task):
        along = around.rng(2).normal(size=(features.shape[1], wanted))
        features = quantize(features.astype(np.float64) @ along)
    return features, labels.astype(np.int16)


def _poisoned(around: Surroundings) -> Scene:
    task = around.task
    queries = model_queries(task)
    if queries is None:
        features, _ = fitted(around)
        queries = features[
            around.rng(3).choice(len(features), size=task.max_queries, replace=len(features) < task.max_queries)
        ]
        if queries.shape[1] != dimension_of(task):
            raise InvalidSetting(
                f"natural questions have {queries.shape[1]} numbers, records made up {dimension_of(task)}"
            )
    return poisoned(task, around.level, canaries=1, rng=around.rng(4), queries=queries)


CANARIES: Final = 2_000
JOBS: Final = 100
DEAR: Final = 5
CHEAP: Final = 20
"""Votes that a budget pays for in a dear job, and in a cheap one."""

_DIMENSION: Final = 64
_LABEL: Final = 1
_NEAR: Final = 0.9
_KEY: Final = SiteKey(b"a" * 32)


class LifeAttack:
    """Games of many canaries each, played when the first of them is asked about (an `adversaries.Attack`)."""

    def __init__(self, around: Surroundings) -> None:
        if around.task.lifetime_budget is None:
            raise InvalidSetting("the attack of many jobs is on votes for life, and the task casts none")
        self._around, self._budget_nano = around, around.task.lifetime_budget.budget_nano
        self._scores: dict[int, NDArray[np.float64]] = {}

    moved_mu: None = None

    def trial(self, number: int, *, present: bool) -> float:
        """See Attack: canaries with an odd number are present."""
        game, canary = divmod(number, CANARIES)
        if present != bool(number % 2):
            raise InvalidSetting("of the canaries of a game every second one is there")
        if game not in self._scores:
            self._scores[game] = self._played(game)
        return float(self._scores[game][canary])

    def _played(self, game: int) -> NDArray[np.float64]:
        """Play a game; return the log-likelihood ratio of the whole history for each canary."""
        folder = self._around.folder / f"game-{game}"
        folder.mkdir()
        where = quantize(self._around.rng(100 + game).normal(size=(CANARIES, _DIMENSION)))
        there = np.arange(CANARIES) % 2 == 1
        shards = [self._shard(folder / name, where, some) for name, some in (("real", there), ("shadow", there | True))]
        ratio = np.zeros(CANARIES)
        with (
            open_database(folder / "real.db", allow_unsynced=True) as real,
            open_database(folder / "shadow.db", allow_unsynced=True) as shadow,
        ):
            spends = [LifetimeSpends(real), LifetimeSpends(shadow)]
            for number in range(JOBS):
                is_dear = number % 2 == 0
                asked = np.flatnonzero(ratio > 0) if is_dear else np.flatnonzero(ratio <= 0)
                if not len(asked):
                    continue
                task = self._job(number, DEAR if is_dear else CHEAP, len(asked))
                votes = []
                for shard, kept, database in zip(shards, spends, (real, shadow), strict=True):
                    cast, spent = lifetime_ballots(task, QueryBatch(where[asked]), shard, kept.spent)
                    with database.write() as connection:
                        kept.add(f"{number:064}", spent, connection=connection)
                    votes.append(cast)
                seed = self._around.noise_seed
                source = os_source() if seed is None else seeded_source(f"{seed} game {game} {number}".encode())
                seen = contribution(votes[0], task, source=source)[:, _LABEL] / task.scale
                if_there = votes[1][:, _LABEL]
                ratio[asked] += (seen - if_there / 2) * if_there / task.sigma_votes**2
        return ratio

    def _job(self, number: int, votes: int, asked: int) -> Task:
        """Return a job in which the budget pays for `votes` votes; the other agent's noise is known."""
        return parse_task(
            {
                "name": f"attack {number}",
                "classes": ("absent", "present"),
                "method": "reverse-knn",
                "sigma_votes": (votes * NANO / self._budget_nano) ** 0.5 * (1 + 1e-5),
                "delta": self._around.task.delta,
                "max_queries": asked,
                "agents": 2,
                "colluding_agents": 1,
                "backbone_fingerprint": "audit",
                "lifetime_budget": {"budget_nano": self._budget_nano, "least_similarity": _NEAR},
            }
        )

    def _shard(self, path: Path, where: NDArray[np.int16], there: NDArray[np.bool_]) -> Shard:
        numbers = np.flatnonzero(there)
        with ShardWriter(
            path,
            classes=("absent", "present"),
            fingerprint="audit",
            dimension=_DIMENSION,
            public=False,
            backbone={"kind": "pixels"},
            site_key=_KEY.name,
            random_bytes=self._around.rng(50).bytes,
        ) as writer:
            digests = _KEY.digests("image", [b"%d" % number for number in numbers])
            labels = np.full(len(numbers), _LABEL, np.int16)
            writer.append(where[numbers], labels, [str(number) for number in numbers], image_digests=digests)
            writer.finish()
        return Shard.open(path)


STRONGEST: Final = "poisoned-chosen"
"""The adversary that proves more than any other: an audit is judged by it."""

ADVERSARIES: Final[dict[str, Adversary]] = {
    one.name: one
    for one in (
        Adversary(
            "natural",
            "real records, one of them the canary; questions as they come",
            lambda around: SceneAttack(natural(around, chosen=False), around),
        ),
        Adversary(
            "natural-chosen",
            "real records; it asks about the canary again and again",
            lambda around: SceneAttack(natural(around, chosen=True), around),
        ),
        Adversary(
            "poisoned",
            "every record but the canary is its own, made for questions as they come",
            lambda around: SceneAttack(_poisoned(around), around),
        ),
        Adversary(
            STRONGEST,
            "every record but the canary and every question is its own",
            lambda around: SceneAttack(
                poisoned(around.task, around.level, canaries=1, rng=around.rng(5), queries=None), around
            ),
        ),
        Adversary(
            "many-jobs",
            "votes for life: a hundred jobs about the same record, each chosen by the answers before",
            LifeAttack,
            takes=lambda task: task.lifetime_budget is not None,
        ),
    )
}
"""Every adversary, by name, weakest first."""


View = Literal["release", "student"]
"""The attacked view: what was opened, or the labels of a student that learned from it."""


def check_attackable(task: Task, level: StatedLevel, view: View) -> None:
    """Refuse a task that no adversary here was made for.

    Raises:
        InvalidSetting: the method is not known here, or no attack on a whole agent of it, or on a student, is.
    """
    if task.method not in (attacked := attacked_methods()):
        raise InvalidSetting(
            f"no adversary of an audit was made for method {task.method}, so what it proved would say nothing; add one "
            f"to checks.audit, or audit a task of {', '.join(attacked)}"
        )
    if level == "agent" and not task.noise_parties:
        raise InvalidSetting(
            "an agent whose noise is in what it answers cannot be silenced under that noise, so no attack on a whole "
            f"agent is known for method {task.method}; audit it at level instance or person"
        )
    sampled = task.sampled
    if sampled is not None and (level != "instance" or view != "release" or sampled.unit != "record"):
        raise InvalidSetting(
            "of training in steps an audit attacks one record in the release of steps that sample records (unit = "
            '"record"); no adversary was made for other levels, units or views'
        )
    if view == "student" and task.attributes_per_record is not None:
        raise InvalidSetting("no student is looked at that learnt attributes; audit the release (--view release)")


@dataclass(frozen=True, eq=False)
class Surroundings:
    """The material from which an attack is prepared.

    Attributes:
        task: the task; its fingerprint is that of the audit's records.
        features, labels: natural records, quantized.
        folder: empty, for its files.
        seed: of everything public; the same for the same audit.
        noise_seed: of all noise; None draws it as the product does.
    """

    task: Task
    level: StatedLevel
    features: NDArray[np.int16]
    labels: NDArray[np.int16]
    view: View
    folder: Path
    seed: int
    noise_seed: int | None

    def rng(self, purpose: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, purpose])


AGENTS: Final = 3
QUERIES: Final = 100


def read_task(
    path: Path, *, agents: int | None, queries: int | None, classes: tuple[str, ...], fingerprint: str = "audit"
) -> Task:
    """Read a task.

    Args:
        path: a task file (TOML); the output folder of `labeler run`; or a JSON file with a task, or with one under
            "task", as `GET /v1/tasks/{id}` answers.
        agents, queries: for a task file, which leaves them open; AGENTS and what it says, or QUERIES, where None.
        classes: for a task file that names none.
        fingerprint: for a task file.

    Raises:
        InvalidTask: there is no task there, or it is out of bounds.
    """
    if path.is_dir():
        return _stored(path / ".job" / "plan.json", "the folder of a run", agents, queries)
    if path.suffix == ".json":
        return _stored(path, "a task", agents, queries)
    file = read_task_file(path)
    asked = queries or file.queries.count
    if asked is None:
        strategy, _ = METHODS[file.task.method].selection("all", None, axes=None)
        asked = DIMENSION + 1 if strategy == "weights" else QUERIES
    return file.resolve(
        classes=classes,
        agents=agents or AGENTS,
        num_queries=asked * file.steps,
        fingerprint=fingerprint,
        nonce="audit",
        has_attributes=file.task.attributes_per_record is not None,
    )


def _stored(path: Path, what: str, agents: int | None, queries: int | None) -> Task:
    if agents is not None or queries is not None:
        raise InvalidTask("a stored task says how many agents and queries it has; leave --agents and --queries out")
    try:
        found = json.loads(read_named(path))
    except (OSError, ValueError, RecursionError):
        raise InvalidTask(
            f"{path} cannot be read as {what}; name a task file, a run's folder or a task as JSON"
        ) from None
    for key in ("plan", "task"):
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
    return parse_task(found)
