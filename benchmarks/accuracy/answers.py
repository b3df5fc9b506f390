"""Better reading of answers: the same releases at the same price, read by students that model noise and classes.

Office-Caltech10, each domain in turn the server, reverse-knn with k = 1, histograms. The ways to ask and read:

* **as before**: as many clusters as `labeler bench office-caltech` chose, student `auto`.
* **leave one server out**: for each epsilon and each server, the number of clusters and the student that did best on
  the mean of the **other three** servers (`TUNING_SPLITS` splits, no colluding agent).
* **planned**: the product's own choice: `labeler.expectation` from public facts (1,000 records of an agent assumed),
  student `planned`.
* **class means**: not votes but class means on public axes (`training.learner = "means"`, see
  `benchmarks.accuracy.rivals`). The student `followed` reads their labels of the public images; axes are chosen for
  each server on the other three.
* **without noise**: sigma 1 vote, which moves nothing.

`SPLITS` splits x `DRAWS` draws of noise each, all by the real round (benchmarks.accuracy.office_caltech). The mean over
servers is taken run by run, its deviation over runs. The last rows bound every reader of these counts. There the public
images are divided into their classes without a mistake, and the counts only have to say which class is which. It is the
assignment of largest likelihood, with the stated noise.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from benchmarks import BenchRow, in_turn, mean_row
from benchmarks.accuracy.office_caltech import DELTA, DOMAINS, PUBLIC_SHARE, Arena, Setting, data_folder, embed_domains
from benchmarks.accuracy.rivals.bench import office_domains, office_world
from benchmarks.accuracy.rivals.methods import LeastSquares
from benchmarks.accuracy.rivals.world import World
from benchmarks.data import Split
from feature_store.rows import quantize
from feature_store.shard import Shard
from feature_store.students import Learners, NoisyAnswers, fit_student
from labeler.expectation import questions_for
from labeler.planning import price
from labeler.task import Task
from workers.progress import ProgressCallback, silent

EPSILONS: Final = (0.05, 0.1, 0.3, 1.0)
BEFORE: Final = {0.05: 15, 0.1: 20, 0.3: 20, 1.0: 15}
"""Clusters per epsilon that `labeler bench office-caltech` chose."""

AXES: Final = (8, 10, 16)
COUNTS: Final = (10, 20)
KINDS: Final = ("followed", "matched", "prototypes")
SPLITS: Final = 10
DRAWS: Final = 2
TUNING_SPLITS: Final = 10
TUNING_DRAWS: Final = {0.05: 4}
"""Draws per split where single runs scatter most; elsewhere DRAWS."""

NO_NOISE: Final = 1.0
MEAN: Final = "mean of four servers"
_METRIC: Final = "student accuracy on unseen images, %"
_BOUND_DRAWS: Final = 2000


def bench_answers(
    *, data: Path | None = None, full: bool = False, out: Path | None = None, progress: ProgressCallback = silent
) -> list[BenchRow]:
    """Measure the gain of better reading; see the module."""
    shards = embed_domains(data_folder(data), progress)
    study = _Study(Arena(shards), shards, SPLITS if full else 2, TUNING_SPLITS if full else 1)
    domains = office_domains(data, progress)
    epsilons = EPSILONS if full else (EPSILONS[0], EPSILONS[-1])
    rows: list[BenchRow] = []
    for epsilon in in_turn(progress, "Answers", epsilons):
        chosen = study.chosen(epsilon)
        planned = {server: study.planned(server, epsilon, 1) for server in DOMAINS}
        before = {server: Setting("reverse-knn", 1, BEFORE[epsilon]) for server in DOMAINS}
        rows += study.measure("as before", before, epsilon=epsilon)
        for colluding in (0, 1):
            asked = {server: replace(one, colluding_agents=colluding) for server, one in chosen.items()}
            rows += study.measure("leave one server out", asked, epsilon=epsilon)
        rows += study.measure("planned", planned, epsilon=epsilon)
        rows += [
            row
            for colluding in (0, 1)
            for row in class_means(domains, epsilon, colluding, splits=SPLITS if full else 2)
        ]
        rows += [study.bound(server, epsilon, colluding) for colluding in (0, 1) for server in DOMAINS]
    rows += study.measure("as before, without noise", before)
    rows += study.measure("leave one server out, without noise", chosen)
    if out is not None:
        from benchmarks.papers.chart import draw_chart  # imports matplotlib: a bench without --out draws nothing

        draw_chart(rows, out / "answers.png")
    return rows


class _Study:
    def __init__(self, arena: Arena, shards: dict[str, Shard], splits: int, tuning_splits: int) -> None:
        self._arena, self._shards = arena, shards
        self._splits, self._tuning_splits = splits, tuning_splits

    def chosen(self, epsilon: float) -> dict[str, Setting]:
        """Return for each server the setting that was best on the mean of the others."""
        candidates = [Setting("reverse-knn", 1, count, student=kind) for count in COUNTS for kind in KINDS]
        draws = TUNING_DRAWS.get(epsilon, DRAWS)
        found = np.array(
            [
                [
                    np.mean(self._arena.runs(server, one, splits=self._tuning_splits, draws=draws, epsilon=epsilon)[0])
                    for server in DOMAINS
                ]
                for one in candidates
            ]
        )
        others = found.sum(axis=1, keepdims=True) - found
        return {server: candidates[int(others[:, place].argmax())] for place, server in enumerate(DOMAINS)}

    def planned(self, server: str, epsilon: float, colluding: int) -> Setting:
        """Return the setting that the product chooses by itself."""
        images = int(PUBLIC_SHARE * len(self._shards[server].sources))
        asked = Setting("reverse-knn", 1, None, colluding_agents=colluding, student="planned")
        task = self._arena.task(server, asked, "planned", 20, epsilon=epsilon)
        return replace(asked, count=questions_for(task, public_images=images))

    def measure(self, name: str, settings: dict[str, Setting], *, epsilon: float | None = None) -> list[BenchRow]:
        """Return a row for each server, and one for their mean."""
        rows, all_runs = [], []
        for server, setting in settings.items():
            started = time.perf_counter()
            sigma = NO_NOISE if epsilon is None else None
            runs, tasks = self._arena.runs(
                server, setting, splits=self._splits, draws=DRAWS, epsilon=epsilon, sigma=sigma
            )
            all_runs.append(100 * np.array(runs))
            told: dict[str, object] = {"clusters": setting.count, "student": setting.student}
            rows.append(_row(server, name, all_runs[-1], tasks[0], time.perf_counter() - started, told))
        together = np.mean(all_runs, axis=0)
        return [*rows, _row(MEAN, name, together, tasks[0], None, {})]

    def bound(self, server: str, epsilon: float, colluding: int) -> BenchRow:
        """Return the share of classes matched right if the public images are divided into classes without a mistake."""
        setting = Setting("reverse-knn", 1, None, colluding_agents=colluding)
        task = self._arena.task(server, setting, "bound", 20, epsilon=epsilon)
        classes = task.num_classes
        private = [np.asarray(shard.labels) for domain, shard in self._shards.items() if domain != server]
        votes = np.bincount(np.concatenate(private), minlength=classes).astype(np.int64)
        rng = np.random.default_rng(0)
        right = [
            100 * float((linear_sum_assignment(-_noisy(votes, task, rng))[1] == np.arange(classes)).mean())
            for _ in range(_BOUND_DRAWS)
        ]
        told: dict[str, object] = {"clusters": classes, "student": "largest likelihood"}
        return _row(server, "bound: classes known, to be matched", np.array(right), task, None, told)


def class_means(domains: dict[str, Split], epsilon: float, colluding: int, *, splits: int) -> list[BenchRow]:
    """Return a row for each server, and one for their mean, of class means whose labels the public images refine."""
    found: dict[tuple[str, int], list[float]] = {}
    for server in DOMAINS:
        for split in range(splits):
            world = office_world(domains, server, split, colluding_agents=colluding)
            learners = Learners(quantize(world.public), num_classes=world.num_classes)
            for axes in AXES:
                found.setdefault((server, axes), []).extend(_means_of(world, learners, axes, epsilon))
    taken = {
        server: max(AXES, key=lambda axes: sum(float(np.mean(found[one, axes])) for one in DOMAINS if one != server))
        for server in DOMAINS
    }
    runs = {server: np.array(found[server, axes]) for server, axes in taken.items()}
    runs[MEAN] = np.mean(list(runs.values()), axis=0)
    return [
        mean_row(
            case,
            f"class means, colluding {colluding}",
            _METRIC,
            one,
            epsilon=epsilon,
            delta=DELTA,
            level="instance",
            settings={"axes": taken.get(case), "student": "followed", "colluding_agents": colluding, "runs": len(one)},
        )
        for case, one in runs.items()
    ]


def _means_of(world: World, learners: Learners, axes: int, epsilon: float) -> list[float]:
    scored, public = len(world.test), learners.features
    predict = LeastSquares(axes, math.inf, 0.0).fit(world)
    right = []
    for draw in range(DRAWS):
        said = predict(epsilon, draw)[scored:].argmax(axis=1)
        answers = NoisyAnswers(
            features=public,
            labels=said,
            total_sigma_votes=0.0,
            num_classes=world.num_classes,
            agents=len(world.holdings),
            assignment=np.arange(len(public)),
        )
        student = fit_student("followed", answers, public, num_classes=world.num_classes, learners=learners)
        right.append(100 * float((student.predict(world.test.inputs) == world.test.labels).mean()))
    return right


def _noisy(votes: NDArray[np.int64], task: Task, rng: np.random.Generator) -> NDArray[np.float64]:
    """Return log likelihoods of matching each true class's cluster to each class, up to common terms."""
    classes = task.num_classes
    counts = np.diag(votes.astype(np.float64)) + rng.normal(0.0, task.total_sigma_votes, (classes, classes))
    return counts * votes[:, None]


def _row(
    case: str, method: str, runs: NDArray[np.float64], task: Task, seconds: float | None, told: dict[str, object]
) -> BenchRow:
    return mean_row(
        case,
        f"{method}, colluding {task.colluding_agents}",
        _METRIC,
        runs,
        epsilon=price(task).instance.epsilon,
        delta=DELTA,
        level="instance",
        seconds=seconds,
        settings=told
        | {
            "colluding_agents": task.colluding_agents,
            "sigma_votes": task.sigma_votes,
            "total_sigma_votes": task.total_sigma_votes,
            "runs": len(runs),
        },
    )
