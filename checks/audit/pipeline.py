"""One whole life of the task: every run of an audit is a job as `labeler run` does it, in a new journal.

Nothing of a round is reimplemented here. The coordinator's driver over its journal, the agents' and talliers' machines,
the index, the votes, the integer noise, the secret shares and the opening are the product's. The adversary adds what
the promise allows for. `max_dropouts` of the task's agents are absent. The `colluding_agents` tell their noise, as do
dishonest talliers that add noise. It asks for more than was paid.

**Worlds** differ in one canary: the same shards, once with its records and once with them deleted.

Both are made of the same files, and records are deleted as a site deletes them (`Shard.delete`). Every other record
keeps its id and its place, so neighbors are neighbors in the sense of the price. The canaries are at the first agent.
Where a canary is an agent, that agent's ballots are zero in one of them while its noise stays. That is what a price at
agent level is about (`labeler.methods.sensitivity`).
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from feature_store.shard import Shard
from feature_store.shard_writer import ShardWriter
from labeler.batching import total_charges
from labeler.budget import NothingLeft
from labeler.errors import BudgetExceeded, InvalidSetting, LabelerError, ProtocolViolation
from labeler.ledger.ledger import Charge
from labeler.linear_model import model_before
from labeler.methods.sensitivity import kept_bound
from labeler.noise import DiscreteGaussian, noise_share, noise_source
from labeler.randomness import KEY_BYTES, os_source, seeded_source
from labeler.release import Release, on_grid
from labeler.setting import StatedLevel
from labeler.sharing import ShareVector, unshard
from labeler.tally import BallotShare, QueryBatch, round_of
from labeler.task import Task
from workers.agent.agent import NOISE, Agent, Answer, Seal, as_it_is, shares_of
from workers.progress import silent
from workers.run.folder import RoundStore
from workers.run.labeling import ACCOUNT, RunJournal, agent_ids, open_run_journal, run_rounds
from workers.run.parties import RunParties, tallier_names
from workers.run.task_file import QueriesTable

CANARY_PERSON = 1
"""The person whose records the first canary is, where a task counts persons; canary j is person 1 + j."""


@dataclass(frozen=True, eq=False)
class LabeledRecords:
    """Quantised features and labels; int16, shapes (n, dimension) and (n,)."""

    features: NDArray[np.int16] = field(repr=False)
    labels: NDArray[np.int16] = field(repr=False)

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, eq=False)
class World:
    """The agents that take part, with their shards.

    Attributes:
        silenced: places of agents whose ballots are zero, whatever their shards hold.
    """

    shards: tuple[Shard, ...] = field(repr=False)
    silenced: frozenset[int] = frozenset()


@dataclass(frozen=True, eq=False)
class Scene:
    """The records, canaries and questions that an adversary sets up.

    Attributes:
        level: whose presence is attacked.
        agents: the records that stay, one entry per agent; each at least one record, but for the first agent's where it
            is the canary.
        canaries: at the first agent, each all that comes or goes together: one record, those of a person, or all that
            the agent has.
        queries: int16, shape (max_queries, dimension); of a model that is trained in steps, the rows of each.
        is_level: whether colluding agents keep the first two classes level (`checks.audit.pipeline.Levelling`).
        seed: of record ids and the order of rows.
    """

    task: Task
    level: StatedLevel
    agents: tuple[LabeledRecords, ...] = field(repr=False)
    canaries: tuple[LabeledRecords, ...] = field(repr=False)
    queries: NDArray[np.int16] = field(repr=False)
    is_level: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if len(self.agents) != self.task.agents or not self.canaries or len(self.queries) != self.task.rows:
            raise InvalidSetting("a scene has the task's agents and questions, and at least one canary")
        if self.level == "agent" and (len(self.canaries) != 1 or len(self.agents[0])):
            raise InvalidSetting("an agent that is the canary has no records that stay, and there is one of it")

    @property
    def batch(self) -> QueryBatch:
        return QueryBatch(self.queries)


class Worlds:
    """The shards of a scene in a folder; `with_canaries` gives one world."""

    def __init__(self, scene: Scene, folder: Path) -> None:
        self._scene, self._folder = scene, folder
        # Ids and the order of rows are public to an adversary that made the records; the same at every audit.
        self._random = np.random.default_rng(scene.seed)
        self._others = [self._written(number, one) for number, one in enumerate(scene.agents) if number]
        everything = [scene.agents[0], *scene.canaries]
        first = LabeledRecords(
            np.concatenate([one.features for one in everything]), np.concatenate([one.labels for one in everything])
        )
        sizes = [len(one) for one in everything]
        self._owner = np.repeat(np.arange(len(sizes)), sizes)
        self._first = self._written(0, first, self._owner)
        # Private rows are written in a random order; their sources identify them.
        places = np.array([int(name) for name in self._first.sources])
        self._ids = [np.sort(self._first.record_ids[self._owner[places] == 1 + j]) for j in range(len(scene.canaries))]
        self._made: dict[tuple[int, ...], Shard] = {}

    def with_canaries(self, present: Iterable[int]) -> World:
        """Return all agents, with these canaries and no others."""
        chosen = tuple(sorted(present))
        if self._scene.level == "agent":
            return World((self._first, *self._others), frozenset() if chosen else frozenset({0}))
        return World((self._first_with(chosen), *self._others))

    def _first_with(self, present: tuple[int, ...]) -> Shard:
        absent = [j for j in range(len(self._ids)) if j not in set(present)]
        if not absent:
            return self._first
        if present not in self._made:
            path = self._folder / f"world-{len(self._made)}.shard"
            shutil.copytree(self._first.path, path)
            shard = Shard.open(path, verify=False)
            shard.delete(np.concatenate([self._ids[j] for j in absent]))
            self._made[present] = shard
        return self._made[present]

    def _written(self, number: int, records: LabeledRecords, owner: NDArray[np.int64] | None = None) -> Shard:
        task, path = self._scene.task, self._folder / f"agent-{number}.shard"
        persons = None
        if task.records_per_person is not None:
            # A record that is no canary is a person with one record.
            alone = 10**6 + np.arange(len(records), dtype=np.int64)
            of_canaries = np.zeros(len(records), np.int64) if owner is None else owner
            persons = np.stack([np.where(of_canaries > 0, CANARY_PERSON + of_canaries, alone)] * 2, axis=1)
        with ShardWriter(
            path,
            classes=task.classes,
            fingerprint=task.backbone_fingerprint,
            dimension=records.features.shape[1],
            public=False,
            site_key=None if persons is None else "audit",
            max_records=None if task.training is None else kept_bound(task),
            attributes=task.attributes_per_record is not None,
            random_bytes=self._random.bytes,
        ) as writer:
            names = [str(place) for place in range(len(records))]
            labels = records.labels if task.attributes_per_record is None else attributes_of(records.labels, task)
            writer.append(records.features, labels, names, persons=persons)
            writer.finish()
        return Shard.open(path, verify=False)


def attributes_of(labels: NDArray[np.int16], task: Task) -> NDArray[np.int16]:
    """Return attributes in place of classes: as many as may vote from the first, all others from the second, one
    otherwise.

    So a record of the first class and one of the second have no attribute in common, and their votes are as far apart
    as any two records' are. The second has more attributes than may vote, if the task has enough of them.
    """
    found = np.eye(task.num_classes, dtype=np.int16)[labels]
    found[labels == 0] = np.arange(task.num_classes) < task.votes_of_a_record
    found[labels == 1] = np.arange(task.num_classes) >= task.votes_of_a_record
    return found


_MORE_LIVES: Final = 5
"""Jobs for more than was paid for: once for questions beyond the task's, then for the task's own again."""


@dataclass(frozen=True, eq=False)
class Observation:
    """An adversary's view of one life of a task.

    Attributes:
        releases: what was opened: of the task, and of whatever was answered beyond it (which must be nothing).
        known_noise: what the adversary subtracts from each, votes, shape (num_queries, num_classes). It is what
            colluding agents put in besides the votes of their records: noise and `Levelling`, zeros without them. Where
            agents answer under noise of their own, it is whatever all others answered.
    """

    releases: tuple[Release, ...]
    known_noise: tuple[NDArray[np.float64], ...] = field(repr=False)


class Silenced(Agent):
    """An agent that contributes nothing but its noise: the neighbor that prices at agent level are about."""

    def ballots(self, task: Task, batch: QueryBatch, key: bytes) -> NDArray[np.int64]:
        """Return zeros."""
        return np.zeros_like(super().ballots(task, batch, key))


class Levelling(Agent):
    """A colluding agent that knows its noise before it votes, and votes so that the first two classes stay level.

    Winners tell most of a vote where those two are level. Noise that a colluder knows still moves them apart. Of the
    records that the adversary chose, those vote that put the classes back. Nothing of this depends on the canary, and a
    price holds whatever others vote. Among its k neighbors both classes are equally frequent, and it moves votes
    between them alone.
    """

    _key: bytes | None = None

    def computed(self, task: Task, batch: QueryBatch, *, key: bytes, seal: Seal) -> Answer:
        """See Agent; its ballots know the key meanwhile."""
        self._key = key
        try:
            return super().computed(task, batch, key=key, seal=seal)
        finally:
            self._key = None

    def ballots(self, task: Task, batch: QueryBatch, key: bytes) -> NDArray[np.int64]:
        """Return what it would cast without noise; in an answer, what keeps the first two classes level with it."""
        votes = super().ballots(task, batch, key)
        if self._key is None:
            return votes
        noise = noise_share(task, self._source(self._key, NOISE, task, batch, self.shard_version), len(batch))
        lead = np.rint((votes[:, 0] - votes[:, 1]) - (noise[:, 0] - noise[:, 1]) / task.scale)
        lead = np.clip(lead, -task.k, task.k).astype(np.int64)
        votes[:, 0], votes[:, 1] = (task.k + lead) // 2, (task.k - lead) // 2
        return votes


class Pipeline:
    """A pipeline that runs a task among shards.

    Args:
        batch: all its questions; of a model that is trained in steps, the rows of each.
        is_level: colluding agents keep the first two classes level, see `Levelling`.
    """

    def __init__(self, task: Task, batch: QueryBatch, *, is_level: bool = False) -> None:
        self._is_level = is_level
        self._task, self._batch = task, batch
        self._charges = total_charges(task, [len(batch)] * task.steps)
        self._enrolled = agent_ids(task)
        self._names = self._enrolled[: task.quorum]
        self._noisy = tallier_names(task) if task.noise_by == "talliers" else []

    def run(self, world: World, *, seed: str | None) -> Observation:
        """Run one life of the task: its job, and an attempt at another one that was not paid for.

        Args:
            world: the task's agents; the last `max_dropouts` are absent.
            seed: of all noise; None draws it as the product does.
        """
        keys = {
            name: (os_source() if seed is None else seeded_source(f"{seed} {name}".encode())).bytes(KEY_BYTES)
            for name in (*self._names, *self._noisy)
        }
        agents = self.agents(world, is_seeded=seed is not None)
        steps = [QueryBatch(self._batch.features, len(self._batch) * step) for step in range(self._task.steps)]
        folder = Path(tempfile.mkdtemp(prefix="audit-"))
        try:
            kept = RoundStore(folder, self._names, talliers=self._noisy, secrets=keys)
            with open_run_journal(folder) as journal:
                seen = self._job(journal, kept, agents, steps, is_seeded=seed is not None)
                asked = steps
                if self._task.sampled is not None:
                    # Colluders give their answers to the same questions that the job asked.
                    models = [model_before(self._task, seen[:step]) for step in range(len(steps))]
                    asked = [replace(one, model=model) for one, model in zip(steps, models, strict=True)]
                for batch in self._beyond(journal):
                    with suppress(LabelerError):
                        seen += self._job(journal, kept, agents, [batch], is_seeded=seed is not None)
                        asked.append(batch)
        finally:
            shutil.rmtree(folder)
        return Observation(tuple(seen), tuple(self._known_noise(agents, keys, batch) for batch in asked))

    def agents(self, world: World, *, is_seeded: bool) -> list[Agent]:
        """Return the task's agents over the shards of a world."""
        return [
            self._kind(place, world)(name, shard, is_seeded=is_seeded, engine="numpy")
            for place, (name, shard) in enumerate(zip(self._names, world.shards, strict=False))
        ]

    def _kind(self, place: int, world: World) -> type[Agent]:
        if place in world.silenced:
            return Silenced
        is_colluding = place >= len(self._names) - self._task.colluding_agents
        return Levelling if self._is_level and is_colluding else Agent

    def expected(self, world: World) -> NDArray[np.float64]:
        """Return what all agents put in together without noise, in the unit of what is opened; shape (queries,
        classes).
        """
        agents = self.agents(world, is_seeded=True)
        task = self._task
        sums = sum(
            on_grid(one, task) for one in (agent.ballots(task, self._batch, bytes(KEY_BYTES)) for agent in agents)
        )
        return np.asarray(sums, dtype=np.float64) / task.scale

    def _beyond(self, journal: RunJournal) -> Iterator[QueryBatch]:
        """Yield questions beyond the task's, then the task's own again, while the account takes their price: a sound
        one refuses.
        """
        features = self._batch.features
        if self._task.sampled is not None:
            return  # a step is asked with a model that only the job before it can make
        for place in range(min(_MORE_LIVES, features.shape[1])):
            if not self._is_covered(journal, f"again-{place}"):
                return
            again = features.copy()
            again[-1, place] += 1 if again[-1, place] < 0 else -1  # another batch: other noise around the same votes
            yield QueryBatch(again, first_query=len(features) if place == 0 else 0)

    def _is_covered(self, journal: RunJournal, name: str) -> bool:
        """Return whether the account takes the price of the whole task once more, which is then given back."""
        charges = [Charge(ACCOUNT, level, nano) for level, nano in self._charges.items()]
        try:
            with journal.database.write() as connection:
                journal.ledger.reserve(name, charges, connection=connection)
                journal.ledger.void(name, NothingLeft(name, "never-asked"), connection=connection)
        except BudgetExceeded:
            return False
        return True

    def _job(
        self,
        journal: RunJournal,
        kept: RoundStore,
        agents: Sequence[Agent],
        batches: Sequence[QueryBatch],
        *,
        is_seeded: bool,
    ) -> list[Release]:
        """Run a job in a journal whose account holds what the task costs, and no more."""
        task = self._task
        parties = RunParties(
            task, list(batches), agents, kept, is_seeded=is_seeded, winner_engine=None, progress=silent
        )
        name = hashlib.sha256(batches[0].digest.encode()).hexdigest()[:16]
        images, chosen = len(batches[0]), QueriesTable()
        job = journal.begin(name, task, self._enrolled, batches, self._charges, images=images, chosen=chosen)
        run_rounds(journal, job, batches[0].features, parties, is_seeded=is_seeded)
        found = [journal.release(job.job_id, number) for number in range(len(batches))]
        releases = [one for one in found if one is not None]
        if len(releases) < len(batches):
            raise ProtocolViolation("a job of an audit ended without a release; this is a defect of this program")
        return releases

    def _known_noise(self, agents: Sequence[Agent], keys: dict[str, bytes], batch: QueryBatch) -> NDArray[np.float64]:
        task = self._task
        known = np.zeros((len(batch), task.num_classes))
        if not task.noise_parties:
            # No agent's noise protects another, so all others may collude: what they answered is known.
            others = (agent.ballots(task, batch, keys[agent.agent_id]) for agent in agents[1:])
            return known + sum(others, np.zeros_like(known)) / task.scale
        for name in self._noisy[: task.dishonest_talliers or 0]:
            source = noise_source(keys[name], round_of(task, batch).digest, self._names, is_seeded=True)
            known += DiscreteGaussian(task.share_sigma_grid).sample(source, known.shape) / task.scale
        if self._noisy:
            return known
        for agent in agents[len(agents) - task.colluding_agents :]:
            # Under the round's key it computes the same answer again, so it knows what it put in.
            bodies = agent.computed(task, batch, key=keys[agent.agent_id], seal=as_it_is).bodies
            shares = [one.share for one in shares_of(agent.agent_id, round_of(task, batch), bodies)]
            field = None if task.winner_terms is None else task.winner_terms.field
            own = agent.ballots(task, batch, keys[agent.agent_id])
            own = on_grid(own, task)
            apart = [one for one in shares if isinstance(one, BallotShare)]
            if apart:
                votes = unshard([one.ballots.expand() for one in apart], field=field)[:, :-1]
                whole = votes * task.scale + unshard([one.noise.expand() for one in apart], field=field)
            else:
                whole = unshard([one.expand() for one in shares if isinstance(one, ShareVector)], field=field)
            known += (whole - own) / task.scale
        return known
