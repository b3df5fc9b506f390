"""Calibration of confidences: is the stated confidence of a job's labels the share that is right?

No evaluation is asked for: confidences come from the release and the public images alone. The data sets are:

* Office-Caltech10: the other three domains label each domain, so private and public images are of other kinds.
* CIFAR-10: its 10,000 test images halved, public and three agents. Also with classes of unequal size (the largest 10 or
  30 times the smallest, public and private), and with one agent that lacks a class.
* USPS: test public, train at three agents, as pixels.
* Chest X-rays: five hospitals of unequal size, one image of each patient.

Each is labeled several times, with other splits and noise. Every public image counts, and truth is used only to score.
Votes are counted without the rounds (the same votes; the rounds are measured elsewhere), and the noise is the task's.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks import BenchRow, in_turn
from benchmarks.accuracy.medical import Images, divide, xrays
from benchmarks.accuracy.office_caltech import DOMAINS, data_folder, embed_domains
from benchmarks.data import DataSet, Split, cifar10_test_features, data_root, ordered, usps
from benchmarks.sums import task_at
from feature_store.query_selection import select_queries
from feature_store.rows import quantize
from feature_store.students import NoisyAnswers
from feature_store.students.labeling import label_images
from labeler.planning import price
from labeler.task import Task
from workers.progress import ProgressCallback, silent

LOW, HIGH = 0.85, 0.95
LEAST_LABELS = 500
DELTA = 1e-5
EPSILONS = (0.1, 0.5, 2.0)
LEAST_EPSILON = 0.5
"""From here on a confidence should not be far below what is right, either."""
FIRST_SEED = 300
"""The constants of calibration were chosen with smaller seeds."""


@dataclass(frozen=True, eq=False)
class Case:
    """Public images with their truth, and the records of each agent, all quantized."""

    public: Split
    private: tuple[Split, ...]


def bench_calibration(
    *, data: Path | None = None, full: bool = False, progress: ProgressCallback = silent
) -> list[BenchRow]:
    """Return two rows for each data set and price: all labels, and those stated between 85 and 95 %."""
    office = {domain: Split(*ordered(shard)) for domain, shard in embed_domains(data_folder(data), progress).items()}
    cifar = Split(*cifar10_test_features(data_root(data), progress=progress))
    digits = usps(data_root(data))
    chests = xrays(data, progress)
    few, some = (4, 10) if full else (2, 4)
    sets: dict[str, tuple[Callable[[int], Iterator[Case]], int, int]] = {
        "Office-Caltech10": (lambda seed: _office_cases(office, seed), 20, some),
        "CIFAR-10": (lambda seed: _halves(cifar, seed), 50, few),
        "CIFAR-10, classes 1:10": (lambda seed: _halves(_unequal(cifar, 10, seed), seed), 50, few),
        "CIFAR-10, classes 1:30": (lambda seed: _halves(_unequal(cifar, 30, seed), seed), 50, few),
        "CIFAR-10, an agent lacks a class": (lambda seed: _halves(cifar, seed, lacks=0), 50, few),
        "USPS": (lambda seed: _usps_cases(digits, seed), 50, few),
        "chest X-rays": (lambda seed: _hospitals(chests, seed), 20, some),
    }
    return [
        row
        for name, epsilon in in_turn(progress, "Calibration", [*itertools.product(sets, EPSILONS)])
        for row in _measure(name, *sets[name], epsilon)
    ]


def _measure(
    name: str, cases: Callable[[int], Iterator[Case]], clusters: int, repetitions: int, epsilon: float
) -> list[BenchRow]:
    started, seeds = time.perf_counter(), range(FIRST_SEED, FIRST_SEED + repetitions)
    said, right, states = [], [], []
    for seed in seeds:
        for case in cases(seed):
            if len(case.public) <= clusters:
                continue
            task, confidence, is_right = label_case(case, clusters=clusters, epsilon=epsilon, seed=seed)
            said.append(confidence)
            right.append(is_right)
            states.append(price(task).instance.epsilon)
    confidence, is_right = np.concatenate(said), np.concatenate(right)
    within = (confidence >= LOW) & (confidence < HIGH)
    stated, share = 100 * float(confidence.mean()), 100 * float(is_right.mean())
    wanted = "at most 5" if epsilon < LEAST_EPSILON else "from -15 to 5"
    metric = "mean confidence less share right, of all labels, points"
    found = [(metric, stated - share, wanted, {"stated": stated, "right": share, "labels": len(confidence)})]
    if within.any():
        gap = 100 * float(is_right[within].mean() - confidence[within].mean())
        metric = "share right less mean confidence, of labels stated between 85 and 95 %, points"
        wanted = f"within 5 points, at least {LEAST_LABELS} labels"
        found.append((metric, gap, wanted, {"labels": int(within.sum())}))
    settings = {"clusters": clusters, "seeds": [seeds.start, seeds.stop], "price": max(states)}
    return [
        BenchRow(
            case=name,
            method="reverse kNN, cluster centres, histogram, colluding 1",
            metric=metric,
            value=points,
            epsilon=epsilon,
            delta=DELTA,
            level="instance",
            reference=reference,
            seconds=time.perf_counter() - started,
            settings=settings | told,
        )
        for metric, points, reference, told in found
    ]


def label_case(
    case: Case, *, clusters: int, epsilon: float, seed: int
) -> tuple[Task, NDArray[np.float64], NDArray[np.bool_]]:
    """Label all public images of a case: the task, each label's confidence, and whether it is right."""
    features, truth = case.public.inputs, case.public.labels
    classes = int(truth.max()) + 1
    questions = select_queries(features, strategy="clustered", count=clusters, seed=seed)
    fields = {
        "name": "calibration",
        "classes": [f"class {number}" for number in range(classes)],
        "method": "reverse-knn",
        "k": 1,
        "delta": DELTA,
        "max_queries": len(questions),
        "agents": len(case.private),
        "colluding_agents": 1,
    }
    task = task_at(epsilon, fields)
    votes = np.zeros((len(questions), classes))
    for own in case.private:
        nearest = (own.inputs.astype(np.float32) @ questions.features.astype(np.float32).T).argmax(axis=1)
        np.add.at(votes, (nearest, own.labels), 1.0)
    noise = np.random.default_rng([seed, len(features)]).normal(0.0, task.total_sigma_votes, votes.shape)
    noisy = votes + noise
    answers = NoisyAnswers.of(
        task,
        features=questions.features,
        labels=noisy.argmax(axis=1).astype(np.int16),
        noisy_votes=noisy,
        assignment=questions.assignment,
    )
    labeled = label_images(answers, features, rows=questions.rows, kind="planned")
    predicted = labeled.probabilities.argmax(axis=1)
    return task, labeled.probabilities.max(axis=1), predicted == truth


def _office_cases(domains: dict[str, Split], _: int) -> Iterator[Case]:
    for server in DOMAINS:
        yield Case(domains[server], tuple(domains[other] for other in DOMAINS if other != server))


def _halves(images: Split, seed: int, *, lacks: int | None = None) -> Iterator[Case]:
    """Yield public and private halves; the first of three agents holds no image of the class `lacks`."""
    order = np.random.default_rng(seed).permutation(len(images))
    public, private = order[: len(order) // 2], order[len(order) // 2 :]
    held = [private[agent::3] for agent in range(3)]
    if lacks is not None:
        held[0] = held[0][images.labels[held[0]] != lacks]
    yield Case(images[public], tuple(images[rows] for rows in held))


def _unequal(images: Split, ratio: float, seed: int) -> Split:
    """Drop images so that classes, in a random order, shrink evenly to 1 / `ratio` of their size."""
    random = np.random.default_rng([seed, 30])
    classes = int(images.labels.max()) + 1
    share = ratio ** -(random.permutation(classes) / (classes - 1))
    return images[np.flatnonzero(random.random(len(images)) < share[images.labels])]


def _hospitals(images: Images, seed: int) -> Iterator[Case]:
    division = divide(images, seed)
    public = Split(quantize(division.public.inputs), division.public.labels)
    yield Case(public, tuple(Split(quantize(one.inputs), one.labels) for one in division.world.holdings))


def _usps_cases(digits: DataSet, seed: int) -> Iterator[Case]:
    train, test = (
        Split(quantize(split.inputs.reshape(len(split), -1) / 255.0 - 0.5), split.labels)
        for split in (digits.train, digits.test)
    )
    order = np.random.default_rng(seed).permutation(len(train))
    yield Case(test, tuple(train[order[agent::3]] for agent in range(3)))
