"""A thousand agents with a few dozen records each: accuracy against epsilon at agent level, of votes and of models.

MNIST (60 records per agent, fixed edge features) and CIFAR-10 (50 records, a frozen MobileNetV2), both seen along the
128 leading axes of 2,000 public images that nobody labelled; the other test images score what comes out. No record is
at two agents. Each row is a round of `workers.simulated`: every agent's own model, ballots or weights, noise and
shares; one participant may know its own noise.

* AE-DPFL: an agent trains a softmax regression and casts one vote per cluster of the public images; the histogram is
  released and spread over the public images, and the student that learns from them is scored.
* Blind averaging: an agent sends the weights of its regularised softmax, and the noisy mean is scored itself.

**Choosing settings.** Clusters per epsilon, radius and regularisation were chosen with seed 1000 on 10,000 training
images held out for it (2,000 public, 8,000 to score) and the agents that the rest makes. No test label was looked at.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.data_sets import DataSet, Split, cifar10_features, data_root, mnist
from benchmarks.learning.edge_features import edge_features
from benchmarks.papers.dp_helmet import AXES, public_map
from benchmarks.rows import BenchRow
from feature_store.quantize import quantize
from feature_store.query_selection import model_rows, select_queries
from feature_store.students import NoisyAnswers, fit_student
from labeler.linear_model import released_model
from labeler.planning import price
from labeler.solving import solve_sigma
from labeler.tally import QueryBatch
from labeler.task import Task, parse_task
from workers.progress import ProgressCallback, silent
from workers.simulated.federation import Federation, Pool
from workers.simulated.run import release_of

AGENTS: Final = 1_000
DELTA: Final = 1e-5
SEEDS: Final = (1, 2, 3, 4, 5)
PUBLIC: Final = 2_000
CLUSTERS: Final = {0.1: 20, 0.3: 50, 1.0: 100, 3.0: 100}
"""Epsilon -> how many clusters are asked about: as many as its noise allows."""

TRAINING: Final = {"regularisation": 1.0, "radius": 0.05, "iterations": 30}
"""Of blind averaging: a short radius, which is what an agent pays for."""

VOTES = "AE-DPFL: one vote per cluster, histogram, student"
WEIGHTS = "blind averaging of softmax weights"


def bench_thousand_agents(
    *, data: Path | None = None, full: bool = False, progress: ProgressCallback = silent
) -> list[BenchRow]:
    """Accuracy of both systems over seeds; not `full`: a tenth of the agents, MNIST, one seed, one epsilon.

    Raises:
        InvalidSetting: the data sets are not there.
    """
    root = data_root(data)
    agents, seeds, epsilons = (AGENTS, SEEDS, tuple(CLUSTERS)) if full else (100, SEEDS[:1], (3.0,))
    sets = {"MNIST": 60, "CIFAR-10 features": 50} if full else {"MNIST": 60}
    rows: list[BenchRow] = []
    for name, records in sets.items():
        whole = _mnist(root) if name == "MNIST" else cifar10_features(root, progress=progress)
        case = f"{name}, {agents:,} agents x {records}"
        rows += _of_one_set(case, whole, agents=agents, records=records, seeds=seeds, epsilons=epsilons, told=progress)
    return rows


def _of_one_set(
    case: str,
    whole: DataSet,
    *,
    agents: int,
    records: int,
    seeds: Sequence[int],
    epsilons: Sequence[float],
    told: ProgressCallback,
) -> list[BenchRow]:
    found: dict[tuple[str, float], list[float]] = defaultdict(list)
    tasks: dict[tuple[str, float], Task] = {}
    seconds: dict[tuple[str, float], float] = defaultdict(float)
    done = 0
    for seed in seeds:
        world = _World.of(whole, seed)
        federation = world.pool.deal(agents, records=records, seed=seed)
        for epsilon in epsilons:
            for method, ask in ((VOTES, _votes), (WEIGHTS, _weights)):
                began = time.perf_counter()
                task = tasks.setdefault((method, epsilon), _task(method, epsilon, agents=agents, records=records))
                right = ask(task, world, federation, seed)
                found[method, epsilon].append(100 * right)
                seconds[method, epsilon] += time.perf_counter() - began
                done += 1
                told(case, done, 2 * len(seeds) * len(epsilons))
    return [
        BenchRow(
            case,
            method,
            "accuracy on unseen images, %",
            statistics.fmean(values),
            sd=statistics.stdev(values) if len(values) > 1 else None,
            epsilon=price(tasks[method, epsilon]).agent.epsilon,
            delta=DELTA,
            level="agent",
            seconds=seconds[method, epsilon] / len(values),
            settings=_settings(tasks[method, epsilon], seeds),
        )
        for (method, epsilon), values in found.items()
    ]


def _settings(task: Task, seeds: Sequence[int]) -> dict[str, Any]:
    return {
        "seeds": list(seeds),
        "queries": task.max_queries,
        "sigma_votes": task.sigma_votes,
        "epsilon_of_a_record": price(task).instance.epsilon,
        "colluding_agents": task.colluding_agents,
        "axes": AXES,
        "seeded_noise": True,
    }


@dataclass(frozen=True, eq=False)
class _World:
    """What agents hold and what is public in one repetition, and what scores it, all along the public axes."""

    pool: Pool
    test: NDArray[np.int16]
    truth: NDArray[np.int64]

    @classmethod
    def of(cls, whole: DataSet, seed: int) -> _World:
        shown = np.random.default_rng([seed, 3]).permutation(len(whole.test))
        known, rest = shown[:PUBLIC], shown[PUBLIC:]
        along = public_map(whole.test.inputs[known])

        def grid(rows: NDArray[Any]) -> NDArray[np.int16]:
            return quantize(np.asarray(along(rows), dtype=np.float64))

        pool = Pool(
            "the training images",
            tuple(str(number) for number in range(whole.num_classes)),
            grid(whole.train.inputs),
            whole.train.labels.astype(np.int16),
            grid(whole.test.inputs[known]),
            whole.test.labels[known].astype(np.int16),
        )
        return cls(pool, grid(whole.test.inputs[rest]), whole.test.labels[rest])

    def score(self, labels: NDArray[np.integer]) -> float:
        return float((labels == self.truth).mean())


def _task(method: str, epsilon: float, *, agents: int, records: int) -> Task:
    fields: dict[str, Any] = {
        "name": "thousand agents",
        "classes": [str(number) for number in range(10)],
        "sigma_votes": 1.0,
        "delta": DELTA,
        "agents": agents,
        "colluding_agents": 1,
        "talliers": 2,
    }
    if method == VOTES:
        fields |= {"method": "ensemble", "max_queries": CLUSTERS[epsilon]}
    else:
        fields |= {"method": "blind-average", "max_queries": AXES + 1, "training": {"min_records": records} | TRAINING}
    task = parse_task(fields)
    return task.model_copy(update={"sigma_votes": solve_sigma(task, epsilon, level="agent")})


def _votes(task: Task, world: _World, federation: Federation, seed: int) -> float:
    pool = world.pool
    asked = select_queries(pool.public, strategy="clustered", count=task.max_queries, seed=seed)
    release = release_of(task, QueryBatch(asked.features), federation, seed=seed)
    answers = NoisyAnswers.of(
        task,
        features=asked.features,
        labels=release.labels,
        noisy_votes=release.noisy_votes,
        assignment=asked.assignment,
    )
    student = fit_student("spreading", answers, pool.public, num_classes=task.num_classes, seed=seed)
    return world.score(student.predict(world.test))


def _weights(task: Task, world: _World, federation: Federation, seed: int) -> float:
    release = release_of(task, QueryBatch(model_rows(AXES)), federation, seed=seed)
    return world.score(released_model(task, [release]).predict(world.test))


def _mnist(root: Path) -> DataSet:
    whole = mnist(root)
    train, test = (Split(edge_features(half.inputs), half.labels) for half in (whole.train, whole.test))
    return DataSet(train, test)
