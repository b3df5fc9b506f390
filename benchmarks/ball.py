"""Ballots on a ball in AE-DPFL's federation: MNIST, 100 agents of 6 digits, agent level, and nobody trains a model.

Records are edge features (fixed) along the leading axes of 3,000 public digits nobody labelled. Those digits' graph of
nearest neighbours is cut into ten groups (strategy `spectral`); the questions are the groups' mean directions. Every
record votes for its label at its nearest question, every agent draws its ballot onto a ball whose radius a plan
proposes (`feature_store.students.forecast`), and the noisy histogram is released: a round of `workers.simulated`,
each agent's own noise and shares.

**Reading it.** Ten groups, ten classes, each class one group: a public assumption about these digits. Under it the
noiseless histogram, centred as ballots are, is A M[q, g] where class c is group g's, less the mean of the question; M
is the share of public images at question q in group g. The likelihood of an assignment is then the product over g of
exp(A (M^T votes)[g, c] / sigma^2), times a constant (noise along the mean speaks of no assignment). The posterior that
a group is a class is summed over all assignments (dynamic programming over sets of classes) and spread over the public
digits, and a new digit asks its nearest ones. A is read off the release's length between public bounds: a centred
ballot of length R with one class per question is of R sqrt(Q / (1 - 1/C)) votes at most. All of this reads public
images and the release alone. Beside it, what the product's own student makes of the same release.

**Choosing settings.** Clustering, questions and reading were chosen on USPS (other digits, agents of 60 records) and on
10,000 of MNIST's training images held out, with seeds of 1000 and up. No test label was looked at.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import sqrt
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

from benchmarks.data_sets import Split, data_root, mnist, usps
from benchmarks.learning.edge_features import edge_features
from benchmarks.papers.dp_helmet import public_map
from benchmarks.papers.partitions import mnist_partition
from benchmarks.rows import BenchRow
from feature_store.quantize import quantize
from feature_store.query_selection import select_queries
from feature_store.students import NoisyAnswers, fit_student
from feature_store.students.forecast import propose_radius
from feature_store.students.members import SpreadingLearner
from labeler.batch import QueryBatch
from labeler.planning import price
from labeler.solving import solve_sigma
from labeler.task import Task, parse_task
from workers.progress import ProgressCallback, silent
from workers.simulated.federation import NOBODY, Federation
from workers.simulated.run import release_of

CLASSES: Final = 10
AGENTS: Final = 100
DELTA: Final = 1e-3
PRICES: Final = ((0.1, 1), (0.2, 0), (0.2, 1), (0.3, 1), (0.5, 0), (0.5, 1), (1.0, 1))
"""Epsilon, and colluding agents that it counts on: 0 as AE-DPFL's table does, 1 as new tasks do."""

SEEDS: Final = tuple(range(1, 7))
TUNING_SEEDS: Final = (1001, 1002)
DRAWS: Final = 8
"""Of noise per seed; agents, public images and scored images are the seed's."""

ACCURACY: Final = "accuracy on unseen images, %"
READ: Final = "reverse-knn on a ball, groups read one to one"
PRODUCT: Final = "reverse-knn on a ball, student spreading"
REFERENCE: Final = {0.5: "96.3 at 0.5, AE-DPFL with 100 trained networks", 0.2: "90"}

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class World:
    """One federation: agents' records, public images in groups, and what scores.

    Attributes:
        federation: who holds what.
        public: int16, features of the public images.
        groups: of each public image, which of CLASSES groups.
        questions: int16, shape (CLASSES, dimension).
        nearest: of each public image, its question.
        test, truth: what scores.
        records: of an agent, as the paper says and anybody may know.
        seed: of everything.
    """

    federation: Federation
    public: NDArray[np.int16]
    groups: NDArray[np.int64]
    questions: NDArray[np.int16]
    nearest: NDArray[np.int64]
    test: NDArray[np.int16]
    truth: NDArray[np.int64]
    records: int
    seed: int

    @classmethod
    def of(cls, private: Split, asker: Split, *, agents: int, records: int, public: int, seed: int) -> World:
        """Divide a set: the asker's first images, at random, are public, the others score.

        Args:
            private: features and labels that are dealt to agents, 6 digits each.
            asker: features and labels of whoever asks.
            agents, records: of each.
            public: how many images.
            seed: of everything.
        """
        order = np.random.default_rng([seed, 1]).permutation(len(asker))
        known, rest = order[:public], order[public:]
        along = public_map(asker.inputs[known])

        def grid(rows: NDArray[Any]) -> NDArray[np.int16]:
            return quantize(np.asarray(along(rows), dtype=np.float64))

        shown = grid(asker.inputs[known])
        groups = select_queries(shown, strategy="spectral", count=CLASSES, seed=seed).assignment
        questions = quantize(np.stack([shown[groups == group].mean(axis=0) for group in range(CLASSES)]))
        parts = mnist_partition(private.labels, agents=agents, records=records, seed=seed)
        places = np.full((agents, max(map(len, parts))), NOBODY, dtype=np.int32)
        for row, part in zip(places, parts, strict=True):
            row[: len(part)] = part
        return cls(
            Federation(grid(private.inputs), private.labels.astype(np.int16), places),
            shown,
            groups,
            questions,
            (shown.astype(np.int64) @ questions.T.astype(np.int64)).argmax(axis=1),
            grid(asker.inputs[rest]),
            asker.labels[rest],
            records,
            seed,
        )

    def task(self, epsilon: float, *, colluding_agents: int, draw: int) -> Task:
        """The task whose agent-level price is at most epsilon, with the least noise."""
        fields = {
            "name": "ballots on a ball",
            "classes": [str(digit) for digit in range(CLASSES)],
            "method": "reverse-knn",
            "sigma_votes": 1.0,
            "delta": DELTA,
            "max_queries": len(self.questions),
            "agents": len(self.federation),
            "colluding_agents": colluding_agents,
            "talliers": 2,
            "nonce": f"draw {draw}",
            "ballot_radius": self.radius,
        }
        task = parse_task(fields)
        return task.model_copy(update={"sigma_votes": solve_sigma(task, epsilon, level="agent")})

    def scores(self, task: Task, *, product: bool) -> dict[str, float]:
        """The share of unseen images that is right, in %, as one release is read; `product`: by its student too."""
        release = release_of(task, QueryBatch(self.questions), self.federation, seed=self.seed)
        votes = np.asarray(release.noisy_votes)
        posterior = groups_posterior(votes, self.membership, task)
        model = self.spreading.fit(posterior[self.groups], np.ones(len(self.public)))
        found = {READ: self._right(model.predict_proba(self.test).argmax(axis=1))}
        if not product:
            return found
        answers = NoisyAnswers.of(
            task,
            features=self.questions,
            labels=release.labels,
            noisy_votes=votes,
            assignment=self.nearest,
        )
        student = fit_student("spreading", answers, self.public, num_classes=CLASSES, seed=self.seed)
        return found | {PRODUCT: self._right(student.predict(self.test))}

    def _right(self, labels: NDArray[np.integer]) -> float:
        return 100 * float((labels == self.truth).mean())

    @cached_property
    def spreading(self) -> SpreadingLearner:
        """The graph of the public images."""
        return SpreadingLearner(self.public, num_classes=CLASSES, seed=self.seed)

    @cached_property
    def radius(self) -> int:
        """What a plan proposes for agents of so many records."""
        return propose_radius(
            self.public, questions=len(self.questions), num_classes=CLASSES, k=1, records=self.records
        )

    @property
    def membership(self) -> Floats:
        """M: which share of the public images lies at a question and in a group."""
        shares = np.zeros((len(self.questions), CLASSES))
        np.add.at(shares, (self.nearest, self.groups), 1 / len(self.groups))
        return shares


def groups_posterior(noisy_votes: Floats, membership: Floats, task: Task) -> Floats:
    """The chance that a group is a class, where each class is one group.

    Args:
        noisy_votes: shape (questions, classes), released.
        membership: M, shape (questions, groups), as many groups as classes.
        task: whose noise and radius are public.

    Returns:
        float64, shape (groups, classes); rows and columns sum to one.
    """
    questions, classes = noisy_votes.shape
    most = task.agents * (task.ballot_radius or 0) * sqrt(questions / (1 - 1 / classes))
    along = noisy_votes - noisy_votes.mean(axis=1, keepdims=True)
    squares = float((along**2).sum()) - questions * (classes - 1) * task.total_sigma_votes**2
    pure = float((membership.max(axis=1) ** 2).sum()) * (1 - 1 / classes)
    total = min(max(sqrt(max(squares, 0.0) / pure), most / 2), most)
    return one_to_one(total * (membership.T @ noisy_votes) / task.total_sigma_votes**2)


def one_to_one(logits: Floats) -> Floats:
    """Of all permutations, each with weight exp(sum of logits[g, p(g)]): how often p(g) = c.

    Forward and backward over the set of classes that the first groups took: 2^C sets, so for a dozen classes.

    Args:
        logits: shape (C, C).
    """
    count = len(logits)
    sets = np.arange(2**count)
    sizes = np.array([number.bit_count() for number in sets.tolist()])
    bits = 1 << np.arange(count)
    forward, backward = np.full(len(sets), -np.inf), np.full(len(sets), -np.inf)
    forward[0] = backward[-1] = 0.0
    found = np.zeros_like(logits)
    for taken in range(1, count + 1):
        now = sets[sizes == taken]
        holds = (now[:, None] & bits) > 0
        forward[now] = logsumexp(np.where(holds, forward[now[:, None] & ~bits] + logits[taken - 1], -np.inf), axis=1)
    for taken in range(count - 1, -1, -1):
        now = sets[sizes == taken]
        lacks = (now[:, None] & bits) == 0
        onward = np.where(lacks, backward[now[:, None] | bits] + logits[taken], -np.inf)
        backward[now] = logsumexp(onward, axis=1)
        found[taken] = np.exp(logsumexp(forward[now][:, None] + onward, axis=0) - forward[-1])
    return found


def bench_ball(*, data: Path | None = None, full: bool = False, progress: ProgressCallback = silent) -> list[BenchRow]:
    """Accuracy against epsilon; not `full`: one seed, one draw of noise.

    The product's student reads the first draw of each seed alone: it takes most of the time.

    Raises:
        InvalidSetting: the data sets are not there.
    """
    root = data_root(data)
    seeds, tuning, draws = (SEEDS, TUNING_SEEDS, DRAWS) if full else (SEEDS[:1], TUNING_SEEDS[:1], 1)
    whole = mnist(root)
    private, asker = (Split(edge_features(half.inputs), half.labels) for half in (whole.train, whole.test))
    digits = usps(root)
    both = Split(
        edge_features(np.concatenate([digits.train.inputs, digits.test.inputs])),
        np.concatenate([digits.train.labels, digits.test.labels]),
    )
    rows = _rows("MNIST, 100 agents x 600 of 6 digits", private, asker, 600, 3000, seeds, draws, progress)
    order = np.random.default_rng(0).permutation(len(both))
    asks, holds = (Split(both.inputs[part], both.labels[part]) for part in (order[:3000], order[3000:]))
    return rows + _rows("USPS, 100 agents x 60 of 6 digits (tuning)", holds, asks, 60, 1500, tuning, draws, progress)


def _rows(
    case: str,
    private: Split,
    asker: Split,
    records: int,
    public: int,
    seeds: Sequence[int],
    draws: int,
    told: ProgressCallback,
) -> list[BenchRow]:
    found: dict[tuple[str, float, int], list[float]] = {}
    tasks: dict[tuple[float, int], Task] = {}
    began = time.perf_counter()
    for done, seed in enumerate(seeds):
        told(case, done, len(seeds))
        world = World.of(private, asker, agents=AGENTS, records=records, public=public, seed=seed)
        for epsilon, colluding in PRICES:
            for draw in range(draws):
                task = world.task(epsilon, colluding_agents=colluding, draw=draw)
                tasks[epsilon, colluding] = task
                for name, right in world.scores(task, product=draw == 0).items():
                    found.setdefault((name, epsilon, colluding), []).append(right)
    told(case, len(seeds), len(seeds))
    seconds = (time.perf_counter() - began) / len(found)
    return [
        BenchRow(
            case,
            f"{name}, {colluding} colluding",
            ACCURACY,
            statistics.fmean(values),
            sd=statistics.stdev(values) if len(values) > 1 else None,
            epsilon=price(tasks[epsilon, colluding]).agent.epsilon,
            delta=DELTA,
            level="agent",
            reference=REFERENCE.get(epsilon),
            seconds=seconds,
            settings={
                "seeds": list(seeds),
                "runs": len(values),
                "median": statistics.median(values),
                "least": min(values),
                "questions": tasks[epsilon, colluding].max_queries,
                "ballot_radius": tasks[epsilon, colluding].ballot_radius,
                "sigma_votes": tasks[epsilon, colluding].sigma_votes,
                "instance_epsilon": price(tasks[epsilon, colluding]).instance.epsilon,
                "colluding_agents": colluding,
                "seeded_noise": True,
            },
        )
        for (name, epsilon, colluding), values in found.items()
    ]
