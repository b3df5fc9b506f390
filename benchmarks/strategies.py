"""Groups of public images by k-means and along nearest neighbours: how pure they are, and what a student makes of them.

Strategies `clustered` and `spectral` make as many questions of the same images; agents answer them by reverse-knn,
k = 1, with histograms opened, at one instance-level price with one colluding agent. Purity is the share of public
images that have their group's most frequent true class, which bounds what answers about groups can say; accuracy is
that of the planned student on images nobody asked about.

* **Office-Caltech10**: each collection labelled by the other three (`benchmarks.office_caltech`), real rounds.
* **MNIST, USPS**: ten agents of six digits and 600 records each, edge features along axes of the public digits
  (`benchmarks.ball`), rounds of `workers.simulated`.

**Choosing settings.** Nothing is chosen here: one question and two for each class, two prices. Neighbours and
eigenvectors of `spectral` were chosen for `labeler bench ball` on USPS, so its rows are of a set that was looked at.
"""

from __future__ import annotations

import itertools
import statistics
import time
from pathlib import Path
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks.ball import CLASSES, World
from benchmarks.data_sets import Split, data_root, mnist, usps
from benchmarks.learning.edge_features import edge_features
from benchmarks.office_caltech import DOMAINS, Arena, Setting, data_folder, embed_domains
from benchmarks.rows import BenchRow
from feature_store.query_selection import QuerySet, select_queries
from feature_store.students import Learners, NoisyAnswers, fit_student
from labeler.planning import price
from labeler.solving import solve_sigma
from labeler.tally import QueryBatch
from labeler.task import Task, parse_task
from workers.progress import ProgressCallback, silent
from workers.simulated.run import release_of

Compared = Literal["clustered", "spectral"]
STRATEGIES: Final[tuple[Compared, ...]] = ("clustered", "spectral")
COUNTS: Final = (10, 20)
"""One question for each class, and two."""

EPSILONS: Final = (0.1, 0.5)
DELTA: Final = 1e-5
AGENTS: Final = 10
RECORDS: Final = 600
SEEDS: Final = tuple(range(1, 7))
SPLITS: Final = 10
QUICK: Final = 2
PURITY: Final = "public images of their group's class, %"
ACCURACY: Final = "student accuracy on unseen images, %"


def purity(assignment: NDArray[np.integer], truth: NDArray[np.integer]) -> float:
    """The share of images that have the most frequent class of their group, in %."""
    table = np.zeros((int(assignment.max()) + 1, int(truth.max()) + 1), dtype=np.int64)
    np.add.at(table, (assignment, truth), 1)
    return 100 * float(table.max(axis=1).sum() / table.sum())


def bench_strategies(
    *, data: Path | None = None, full: bool = False, progress: ProgressCallback = silent
) -> list[BenchRow]:
    """Compare the two; see the module.

    Args:
        data: folder of `office-caltech10`, `mnist`, `usps` and `backbones`.
        full: as many repetitions as in BENCHMARKS.md.

    Raises:
        InvalidSetting: the data are not there.
    """
    arena = Arena(embed_domains(data_folder(data), progress))
    rows: list[BenchRow] = []
    for number, server in enumerate(DOMAINS):
        progress("Office-Caltech10", number, len(DOMAINS))
        rows += _office_rows(arena, server, SPLITS if full else QUICK)
    progress("Office-Caltech10", len(DOMAINS), len(DOMAINS))
    root, seeds = data_root(data), SEEDS if full else SEEDS[:QUICK]
    whole, digits = mnist(root), usps(root)
    for name, private, asker, public in (
        ("MNIST", whole.train, whole.test, 3000),
        ("USPS (settings were chosen on it)", digits.train, digits.test, 1500),
    ):
        rows += _digit_rows(name, _edges(private), _edges(asker), public, seeds, progress)
    return rows


def _office_rows(arena: Arena, server: str, splits: int) -> list[BenchRow]:
    rows = []
    for count, strategy in itertools.product(COUNTS, STRATEGIES):
        asked = Setting("reverse-knn", 1, count, colluding_agents=1, student="planned", strategy=strategy)
        pure = [purity(*arena.groups(server, split, asked)) for split in range(splits)]
        rows.append(_row(server, strategy, count, PURITY, pure))
        for epsilon in EPSILONS:
            began = time.perf_counter()
            right, tasks = arena.runs(server, asked, splits=splits, draws=2, epsilon=epsilon)
            rows.append(_row(server, strategy, count, ACCURACY, [100 * share for share in right], tasks[0], began))
    return rows


def _digit_rows(
    case: str, private: Split, asker: Split, public: int, seeds: tuple[int, ...], progress: ProgressCallback
) -> list[BenchRow]:
    found: dict[tuple[int, Compared, float | None], list[float]] = {}
    tasks: dict[tuple[int, float], Task] = {}
    for done, seed in enumerate(seeds):
        progress(case, done, len(seeds))
        world = World.of(private, asker, agents=AGENTS, records=RECORDS, public=public, seed=seed)
        shown = np.random.default_rng([seed, 1]).permutation(len(asker))[:public]
        learners = Learners(world.public, num_classes=CLASSES, seed=seed)
        for count, strategy in itertools.product(COUNTS, STRATEGIES):
            questions = select_queries(world.public, strategy=strategy, count=count, seed=seed)
            pure = purity(questions.assignment, asker.labels[shown])
            found.setdefault((count, strategy, None), []).append(pure)
            for epsilon in EPSILONS:
                if (count, epsilon) not in tasks:
                    tasks[count, epsilon] = _task(count, epsilon)
                right = _accuracy(world, tasks[count, epsilon], questions, learners)
                found.setdefault((count, strategy, epsilon), []).append(right)
    progress(case, len(seeds), len(seeds))
    return [
        _row(case, strategy, count, PURITY, values)
        if epsilon is None
        else _row(case, strategy, count, ACCURACY, values, tasks[count, epsilon])
        for (count, strategy, epsilon), values in found.items()
    ]


def _accuracy(world: World, task: Task, questions: QuerySet, learners: Learners) -> float:
    release = release_of(task, QueryBatch(questions.features), world.federation, seed=world.seed)
    answers = NoisyAnswers.of(
        task,
        features=questions.features,
        labels=release.labels,
        noisy_votes=release.noisy_votes,
        assignment=questions.assignment,
    )
    student = fit_student("planned", answers, world.public, num_classes=CLASSES, seed=world.seed, learners=learners)
    return 100 * float((student.predict(world.test) == world.truth).mean())


def _task(count: int, epsilon: float) -> Task:
    task = parse_task(
        {
            "name": "strategies",
            "classes": [str(digit) for digit in range(CLASSES)],
            "method": "reverse-knn",
            "sigma_votes": 1.0,
            "delta": DELTA,
            "max_queries": count,
            "agents": AGENTS,
            "colluding_agents": 1,
        }
    )
    return task.model_copy(update={"sigma_votes": solve_sigma(task, epsilon)})


def _edges(split: Split) -> Split:
    return Split(edge_features(split.inputs), split.labels)


def _row(
    case: str,
    strategy: Compared,
    count: int,
    metric: str,
    values: list[float],
    task: Task | None = None,
    began: float | None = None,
) -> BenchRow:
    return BenchRow(
        case,
        f"{strategy}, {count} questions",
        metric,
        statistics.fmean(values),
        sd=statistics.stdev(values) if len(values) > 1 else None,
        epsilon=None if task is None else price(task).instance.epsilon,
        delta=None if task is None else task.delta,
        level=None if task is None else "instance",
        seconds=None if began is None else time.perf_counter() - began,
        settings={"runs": len(values), "median": statistics.median(values)},
    )
