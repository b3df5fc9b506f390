"""Votes on attributes, in the place of CelebA (Zhu et al. 2021, table 1), which is not here.

Records are MNIST's digits with the attributes of `ATTRIBUTES`, of which no digit has more than four. Features are fixed
edges along public axes. 600 digits are public, and 60 centers of their clusters are asked about. Heads read the release
(`feature_store.students.attributes`). Nothing was tuned on these digits: 60 was fixed before anything ran.

* **Agent level**, as in AE-DPFL: 300 agents of 200 digits, tau = 4. `ensemble` casts what an agent's own heads say;
  `knn` with k = 1 the attributes of the one record nearest to a question, at the same price.
* **Instance level**: 10 agents of 2,000 digits, k = 20, with tau = 4 and without a cap.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks import BenchRow, in_turn, mean_row
from benchmarks.data import mnist
from benchmarks.learning.networks import edge_features
from benchmarks.papers import Cell
from benchmarks.papers.dp_helmet import public_map
from benchmarks.papers.partitions import iid_partition
from benchmarks.sums import open_sum, task_at
from feature_store.query_selection import select_queries
from feature_store.results.image_labels import ON
from feature_store.rows import quantize
from feature_store.students.attributes import label_attributes
from labeler.methods import METHODS
from labeler.planning import price
from labeler.randomness import ByteSource, seeded_source
from labeler.records import ModelStore, Records, RunnerContext
from labeler.release import input_shares
from labeler.setting import Level
from labeler.tally import QueryBatch, round_of
from labeler.task import Task
from workers.learning.learner import Trainer
from workers.progress import ProgressCallback
from workers.voting import NeighborIndexes

ATTRIBUTES: Final[dict[str, tuple[int, ...]]] = {
    **{f"is {digit}": (digit,) for digit in range(10)},
    "even": (0, 2, 4, 6, 8),
    "prime": (2, 3, 5, 7),
    "at least five": (5, 6, 7, 8, 9),
    "closed loop": (0, 6, 8, 9),
}
TABLE: Final[NDArray[np.int16]] = np.array(
    [[digit in digits for digits in ATTRIBUTES.values()] for digit in range(10)], dtype=np.int16
)
"""Which digit has which attributes, shape (10, attributes)."""

MOST: Final = int(TABLE.sum(axis=1).max())
COMMONER: Final = 100 * float(np.maximum(TABLE.mean(axis=0), 1 - TABLE.mean(axis=0)).mean())
PAPER: Final = "85.0 % at 4.0 (paper, as printed; CelebA, 40 attributes)"
DELTA, PUBLIC, CLUSTERS = 1e-3, 600, 60
SEEDS, EPSILONS = (1, 2, 3), (1.0, 2.0, 4.0)


@dataclass(frozen=True)
class Setting:
    """One federation, a method, the level of its price, and the most attributes that a record or model votes for."""

    method: str
    level: Level
    agents: int
    records: int
    k: int
    most: int

    @property
    def name(self) -> str:
        """The method in words."""
        neighbors = f", k = {self.k}" if self.method == "knn" else ""
        return f"{METHODS[self.method].system}{neighbors}, tau = {self.most}"


SETTINGS: Final = (
    Setting("ensemble", "agent", 300, 200, 1, MOST),
    Setting("knn", "agent", 300, 200, 1, MOST),
    Setting("knn", "instance", 10, 2_000, 20, MOST),
    Setting("knn", "instance", 10, 2_000, 20, len(ATTRIBUTES)),
)


def cells(root: Path, *, full: bool) -> list[Cell]:
    """Return a cell per setting; not `full`: a tenth of the agents, one seed, one epsilon."""
    settings = SETTINGS if full else tuple(replace(one, agents=max(3, one.agents // 10)) for one in SETTINGS[:2])
    seeds, epsilons = (SEEDS, EPSILONS) if full else (SEEDS[:1], EPSILONS[-1:])
    return [
        Cell(f"attributes {setting} {epsilons} {seeds}", partial(_measure, root, setting, epsilons, seeds))
        for setting in settings
    ]


def _measure(
    root: Path, setting: Setting, epsilons: tuple[float, ...], seeds: tuple[int, ...], progress: ProgressCallback
) -> list[BenchRow]:
    tasks = list(_tasks(setting, epsilons))
    found: list[list[float]] = [[] for _ in tasks]
    for seed in in_turn(progress, setting.name, seeds):
        world = World.of(root, setting, seed)
        for task, right in zip(tasks, found, strict=True):
            right.append(world.right(task))
    return [
        mean_row(
            f"{setting.agents} agents x {setting.records:,} digits, {len(ATTRIBUTES)} attributes",
            setting.name,
            "attributes of public images right, %",
            right,
            epsilon=price(task).statement(setting.level).epsilon,
            delta=DELTA,
            level=setting.level,
            reference=PAPER if setting.level == "agent" else f"{COMMONER:.1f} %: always the commoner answer",
            settings={"seeds": list(seeds), "sigma_votes": task.sigma_votes, "colluding_agents": 0},
        )
        for task, right in zip(tasks, found, strict=True)
    ]


def _tasks(setting: Setting, epsilons: tuple[float, ...]) -> Iterator[Task]:
    fields: dict[str, Any] = {
        "name": "attributes",
        "classes": list(ATTRIBUTES),
        "method": setting.method,
        "k": setting.k,
        "attributes_per_record": setting.most,
        "delta": DELTA,
        "max_queries": CLUSTERS,
        "agents": setting.agents,
        "colluding_agents": 0,
        "talliers": 2,
    }
    return (task_at(epsilon, fields, level=setting.level) for epsilon in epsilons)


@dataclass(frozen=True, eq=False)
class World:
    """Digits of one seed: who holds which, and what is asked about."""

    features: NDArray[np.int16]
    has: NDArray[np.int16]
    parts: list[NDArray[np.int64]]
    public: NDArray[np.int16]
    truth: NDArray[np.bool_]
    questions: NDArray[np.int16]
    seed: int

    @classmethod
    def of(cls, root: Path, setting: Setting, seed: int) -> World:
        """Divide MNIST's training digits among agents; some of its test digits are public."""
        digits = mnist(root)
        shown = np.random.default_rng([seed, 1]).permutation(len(digits.test))[:PUBLIC]
        known = edge_features(digits.test.inputs[shown])
        along = public_map(known)
        parts = iid_partition(digits.train.labels, clients=setting.agents, records=setting.records, seed=seed)
        private, public = (quantize(along(rows)) for rows in (edge_features(digits.train.inputs), known))
        questions = select_queries(public, strategy="clustered", count=CLUSTERS, seed=seed).features
        truth = TABLE[digits.test.labels[shown]] == 1
        return cls(private, TABLE[digits.train.labels], list(parts), public, truth, questions, seed)

    def right(self, task: Task) -> float:
        """Return the share of attributes that one release, read by the product's heads, gets right; in percent."""
        batch = QueryBatch(self.questions)
        round = round_of(task, batch)
        answers = []
        for number, part in enumerate(self.parts):
            source = seeded_source(f"attributes {self.seed} {number} {task.kind}".encode())
            records = Records(self.features[part], part, self.has[part], version=f"{self.seed} {number}")
            index = NeighborIndexes(dimension=self.features.shape[1])
            context = RunnerContext(index, ModelStore(), partial(_same, source), Trainer())
            ballots = METHODS[task.method].ballots(task, batch, records, context)
            answers.append(input_shares(ballots, task, round, agent_id=f"agent-{number}", source=source))
        read = label_attributes(
            np.asarray(open_sum(task, round, answers).noisy_votes),
            self.questions,
            self.public,
            most_votes=task.k * task.agents,
            sigma=task.total_sigma_votes,
            rows=np.full(CLUSTERS, -1, dtype=np.int64),
            seed=self.seed,
        )
        return 100 * float(((read.probabilities >= ON) == self.truth).mean())


def _same(source: ByteSource) -> ByteSource:
    return source
