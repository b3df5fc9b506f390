"""One life of a task, whole: every run of an audit is a job as `labeler run` does it, in a journal of its own.

Nothing of a round is written here again: the coordinator's driver over its journal, the agents' and the talliers'
machines, the index, the votes, the integer noise, the secret shares and the opening are the product's. What an
adversary adds is what the promise allows for: of the task's agents `max_dropouts` are not there, and
`colluding_agents`, or dishonest ones of the talliers that add it, tell their noise; and it asks for more than was paid.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from labeler.batch import QueryBatch
from labeler.batching import total_charges
from labeler.budget import Account
from labeler.contribution import on_grid
from labeler.errors import LabelerError, ProtocolViolation
from labeler.linear_model import model_before
from labeler.noise import DiscreteGaussian, noise_share, noise_source
from labeler.randomness import KEY_BYTES, os_source, seeded_source
from labeler.release import Release
from labeler.rounds.agent import IN_PROCESS
from labeler.sharing import ShareVector, unshard
from labeler.tally import BallotShare, round_of
from labeler.task import Task
from workers.agent.agent import NOISE, Agent, Answer, Seal, as_it_is, shares_of
from workers.agent.ledger import InMemoryLedger
from workers.audit.worlds import World
from workers.jobs.folder import RoundStore
from workers.jobs.parties import RunParties, tallier_names
from workers.jobs.run_journal import Order, open_run_journal, run_rounds
from workers.progress import silent

_MORE_LIVES: Final = 5
"""How often it asks for more than was paid for: once for questions beyond the task's, then for them again."""


@dataclass(frozen=True, eq=False)
class Seen:
    """What an adversary sees of one life of a task.

    Attributes:
        releases: what was opened: of the task, and of whatever was answered beyond it (which must be nothing).
        known_noise: what the adversary subtracts from each, votes, shape (num_queries, num_classes): what colluding
            agents put in beside the votes of their records, noise and `Levelling`, zeros without them; where agents
            answer under noise of their own, whatever all others answered.
    """

    releases: tuple[Release, ...]
    known_noise: tuple[NDArray[np.float64], ...] = field(repr=False)


class Silenced(Agent):
    """An agent of which nothing is there but its noise: the neighbour that prices at agent level are about."""

    def ballots(self, task: Task, batch: QueryBatch, key: bytes) -> NDArray[np.int64]:
        """Zeros."""
        return np.zeros_like(super().ballots(task, batch, key))


class Levelling(Agent):
    """A colluding agent that knows its noise before it votes, and votes so that the first two classes stay level.

    Winners tell most of a vote where those two are level. Noise that a colluder knows moves them apart all the same; of
    records that the adversary chose it lets those vote that put them back. Nothing of this depends on the canary, and a
    price holds whatever others vote. Among its k neighbours both classes stand equally often, and it moves votes
    between them alone.
    """

    _key: bytes | None = None

    def _computed(self, task: Task, batch: QueryBatch, key: bytes, seal: Seal) -> Answer:
        self._key = key
        try:
            return super()._computed(task, batch, key, seal)
        finally:
            self._key = None

    def ballots(self, task: Task, batch: QueryBatch, key: bytes) -> NDArray[np.int64]:
        """What it would cast without noise; in an answer, what keeps the first two classes level with it."""
        votes = super().ballots(task, batch, key)
        if self._key is None:
            return votes
        noise = noise_share(task, self._source(self._key, NOISE, task, batch, self.shard_version), len(batch))
        lead = np.rint((votes[:, 0] - votes[:, 1]) - (noise[:, 0] - noise[:, 1]) / task.scale)
        lead = np.clip(lead, -task.k, task.k).astype(np.int64)
        votes[:, 0], votes[:, 1] = (task.k + lead) // 2, (task.k - lead) // 2
        return votes


class Pipeline:
    """Runs a task among shards.

    Args:
        batch: all its questions; of a model that is trained in steps, the rows of each.
        is_level: colluding agents keep the first two classes level, see `Levelling`.
    """

    def __init__(self, task: Task, batch: QueryBatch, *, is_level: bool = False) -> None:
        self._is_level = is_level
        self._task, self._batch = task, batch
        self._charges = total_charges(task, [len(batch)] * task.steps)
        self._enrolled = tuple(f"agent-{number:04d}" for number in range(1, task.agents + 1))
        self._names = self._enrolled[: task.quorum]
        self._noisy = tallier_names(task) if task.noise_by == "talliers" else []

    def run(self, world: World, *, seed: str | None) -> Seen:
        """One life of the task: its job, and an attempt at another one that nobody has paid for.

        Args:
            world: the task's agents; the last `max_dropouts` are not there.
            seed: of all noise; None draws it as the product does.
        """
        keys = {
            name: (os_source() if seed is None else seeded_source(f"{seed} {name}".encode())).bytes(KEY_BYTES)
            for name in (*self._names, *self._noisy)
        }
        agents = self.agents(world, is_seeded=seed is not None)
        steps = [QueryBatch(self._batch.features, len(self._batch) * step) for step in range(self._task.steps)]
        seen = self._job(agents, keys, steps, is_seeded=seed is not None)
        asked = steps
        if self._task.traits.is_sampled:
            # As the job has asked, so is what colluders have said.
            asked = [replace(one, model=model_before(self._task, seen[:step])) for step, one in enumerate(steps)]
        for batch in self._beyond(agents):
            with suppress(LabelerError):
                seen += self._job(agents, keys, [batch], is_seeded=seed is not None)
                asked.append(batch)
        return Seen(tuple(seen), tuple(self._known_noise(agents, keys, batch) for batch in asked))

    def agents(self, world: World, *, is_seeded: bool) -> list[Agent]:
        """Agents whose accounts hold what the task costs, and no more."""
        return [
            self._kind(place, world)(
                name,
                shard,
                ledger=InMemoryLedger({level: Account(name, level, nano) for level, nano in self._charges.items()}),
                is_seeded=is_seeded,
                engine="numpy",
            )
            for place, (name, shard) in enumerate(zip(self._names, world.shards, strict=False))
        ]

    def _kind(self, place: int, world: World) -> type[Agent]:
        if place in world.silenced:
            return Silenced
        is_colluding = place >= len(self._names) - self._task.colluding_agents
        return Levelling if self._is_level and is_colluding else Agent

    def expected(self, world: World) -> NDArray[np.float64]:
        """What all agents put in together without noise, in the unit of what is opened; shape (queries, classes)."""
        agents = self.agents(world, is_seeded=True)
        task = self._task
        sums = sum(
            on_grid(one, task) if task.traits.counts else one
            for one in (agent.ballots(task, self._batch, bytes(KEY_BYTES)) for agent in agents)
        )
        return np.asarray(sums, dtype=np.float64) / task.scale

    def _beyond(self, agents: Sequence[Agent]) -> list[QueryBatch]:
        """The task's questions again, as often as the agents let themselves be charged for them: they must refuse."""
        features = self._batch.features
        found: list[QueryBatch] = []
        if self._task.traits.is_sampled:
            return found  # a step is asked with a model that only the job before it can make
        for place in range(min(_MORE_LIVES, features.shape[1])):
            again = features.copy()
            again[-1, place] += 1 if again[-1, place] < 0 else -1  # another batch: other noise around the same votes
            batch = QueryBatch(again, first_query=len(features) if place == 0 else 0)
            try:
                for agent in agents:
                    agent.charge(self._task, self._batch, recipients=IN_PROCESS)
                    agent.charge(self._task, batch, recipients=IN_PROCESS)
            except LabelerError:
                continue
            found.append(batch)
        return found

    def _job(
        self, agents: Sequence[Agent], keys: dict[str, bytes], batches: Sequence[QueryBatch], *, is_seeded: bool
    ) -> list[Release]:
        task, folder = self._task, Path(tempfile.mkdtemp(prefix="audit-"))
        try:
            with open_run_journal(folder) as journal:
                kept = RoundStore(folder, self._names, talliers=self._noisy, secrets=keys)
                parties = RunParties(
                    task, list(batches), agents, kept, is_seeded=is_seeded, winner_engine=None, progress=silent
                )
                order = Order(
                    job_id=hashlib.sha256(batches[0].digest.encode()).hexdigest()[:16],
                    task=task,
                    agents=self._enrolled,
                    batches=tuple(batches),
                    caps=self._charges,
                    images=len(batches[0]),
                    strategy="all",
                    count=None,
                    seed=0,
                )
                job = journal.begin(order)
                run_rounds(journal, job, batches[0].features, parties, is_seeded=is_seeded)
                found = [journal.release(job.job_id, number) for number in range(len(batches))]
        finally:
            shutil.rmtree(folder)
        releases = [one for one in found if one is not None]
        if len(releases) < len(batches):
            raise ProtocolViolation("a job of an audit ended without a release; this is a defect of this program")
        return releases

    def _known_noise(self, agents: Sequence[Agent], keys: dict[str, bytes], batch: QueryBatch) -> NDArray[np.float64]:
        task = self._task
        known = np.zeros((len(batch), task.num_classes))
        if task.traits.has_local_noise:
            # Nobody's noise protects another, so all others may collude: what they answered is known.
            others = (agent.ballots(task, batch, keys[agent.agent_id]) for agent in agents[1:])
            return known + sum(others, np.zeros_like(known)) / task.scale
        for name in self._noisy[: task.dishonest_talliers or 0]:
            source = noise_source(keys[name], round_of(task, batch).digest, self._names, is_seeded=True)
            known += DiscreteGaussian(task.share_sigma_grid).sample(source, known.shape) / task.scale
        if self._noisy:
            return known
        for agent in agents[len(agents) - task.colluding_agents :]:
            # Under the round's key it comes to the same answer again: so it knows what it put in.
            bodies = agent.computed(task, batch, key=keys[agent.agent_id], seal=as_it_is).bodies
            shares = [one.share for one in shares_of(agent.agent_id, round_of(task, batch), bodies)]
            field = None if task.winner_terms is None else task.winner_terms.field
            own = agent.ballots(task, batch, keys[agent.agent_id])
            own = on_grid(own, task) if task.traits.counts else own
            apart = [one for one in shares if isinstance(one, BallotShare)]
            if apart:
                votes = unshard([one.ballots.expand() for one in apart], field=field)[:, :-1]
                whole = votes * task.scale + unshard([one.noise.expand() for one in apart], field=field)
            else:
                whole = unshard([one.expand() for one in shares if isinstance(one, ShareVector)], field=field)
            known += (whole - own) / task.scale
        return known
