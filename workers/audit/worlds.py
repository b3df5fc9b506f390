"""Worlds that differ in one canary: the same shards, once with its records and once with them deleted.

Both are made of the same files, and deleted is what a site deletes (`Shard.delete`): every other record keeps its id
and its place, so neighbours are neighbours in the sense of the price. The canaries are at the first agent. Where a
canary is an agent, that agent's ballots are zero in one of them while its noise stays: what a price at agent level is
about (`labeler.methods.sensitivity`).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from feature_store.shard import Shard
from feature_store.shard_writer import ShardWriter
from labeler.errors import InvalidSetting
from labeler.methods.sensitivity import kept_bound
from labeler.setting import StatedLevel
from labeler.tally import QueryBatch
from labeler.task import Task

CANARY_PERSON = 1
"""The person whose records the first canary is, where a task counts persons; canary j is person 1 + j."""


@dataclass(frozen=True, eq=False)
class Records:
    """Quantised features and labels; int16, shapes (n, dimension) and (n,)."""

    features: NDArray[np.int16] = field(repr=False)
    labels: NDArray[np.int16] = field(repr=False)

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, eq=False)
class World:
    """Who takes part with what.

    Attributes:
        silenced: places of agents whose ballots are zero, whatever their shards hold.
    """

    shards: tuple[Shard, ...] = field(repr=False)
    silenced: frozenset[int] = frozenset()


@dataclass(frozen=True, eq=False)
class Scene:
    """What an adversary sets up.

    Attributes:
        level: whose presence is attacked.
        agents: the records that stay, one entry per agent; each at least one record, but for the first agent's where it
            is the canary.
        canaries: at the first agent, each all that comes or goes together: one record, those of a person, or all that
            the agent has.
        queries: int16, shape (max_queries, dimension); of a model that is trained in steps, the rows of each.
        apart: whether no two canaries move the same numbers of the sum, so that their noise is independent.
        is_level: whether colluding agents keep the first two classes level (`workers.audit.pipeline.Levelling`).
        seed: of record ids and the order of rows.
    """

    task: Task
    level: StatedLevel
    agents: tuple[Records, ...] = field(repr=False)
    canaries: tuple[Records, ...] = field(repr=False)
    queries: NDArray[np.int16] = field(repr=False)
    apart: bool = False
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
        # Ids and the order of rows are public to an adversary who made the records; the same at every audit.
        self._random = np.random.default_rng(scene.seed)
        self._others = [self._written(number, one) for number, one in enumerate(scene.agents) if number]
        everything = [scene.agents[0], *scene.canaries]
        first = Records(
            np.concatenate([one.features for one in everything]), np.concatenate([one.labels for one in everything])
        )
        sizes = [len(one) for one in everything]
        self._owner = np.repeat(np.arange(len(sizes)), sizes)
        self._first = self._written(0, first, self._owner)
        # Private rows are written in a random order; their sources say which is which.
        places = np.array([int(name) for name in self._first.sources])
        self._ids = [np.sort(self._first.record_ids[self._owner[places] == 1 + j]) for j in range(len(scene.canaries))]
        self._made: dict[tuple[int, ...], Shard] = {}

    def with_canaries(self, present: Iterable[int]) -> World:
        """All agents, with these canaries and no other."""
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

    def _written(self, number: int, records: Records, owner: NDArray[np.int64] | None = None) -> Shard:
        task, path = self._scene.task, self._folder / f"agent-{number}.shard"
        persons = None
        if task.records_per_person is not None:
            # Whoever is no canary is a person of one record.
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
    """Attributes in the place of classes: of the first as many as may vote, of the second all others, of the rest one.

    So a record of the first class and one of the second have no attribute in common, and their votes are as far apart
    as any two records' are; and the second has more than may vote, wherever there are so many.
    """
    found = np.eye(task.num_classes, dtype=np.int16)[labels]
    found[labels == 0] = np.arange(task.num_classes) < task.votes_of_a_record
    found[labels == 1] = np.arange(task.num_classes) >= task.votes_of_a_record
    return found
