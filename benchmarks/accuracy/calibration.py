"""Calibration of confidences: is the stated confidence of a job's labels the share that is right?

Every row is of whole jobs, run as `labeler run` does it; `report.json` says what was stated and what was right. No
evaluation is asked for: confidences come from the release and the public images alone. The worlds are:

* Office-Caltech10: the other three domains label each domain, so private and public images are of other kinds.
* CIFAR-10: 4,000 of its test images, a third public; five agents hold unequal shares of each class (Dirichlet, 0.5).
* CIFAR-10, classes 1:30: as before at three equal agents, the largest class 30 times the smallest.
* USPS: test public, train at three agents, as pixels.
* Chest X-rays: five hospitals of unequal size, one image of each patient.
* Wrong labels: photographs of caltech10, a third public; three agents whose labels are shuffled.

Each is labeled by each method, several times, with other splits and noise. The truth of public images only scores.
"""

from __future__ import annotations

import itertools
import json
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks import BenchRow, in_turn
from benchmarks.accuracy.medical import Images, divide, xrays
from benchmarks.accuracy.office_caltech import DOMAINS, data_folder, embed_domains
from benchmarks.data import DataSet, Split, cifar10_test_features, data_root, split_of, usps
from labeler.records import FEATURE_ONE
from workers.notebook.local import embed, run
from workers.progress import ProgressCallback, silent

BAND: Final = 0.75, 0.9
LEAST_LABELS = 500
DELTA = 1e-5
EPSILONS = (0.1, 0.5, 2.0)
LEAST_EPSILON = 0.5
"""From here on a confidence should not be far below what is right, either."""
FIRST_SEED = 300
"""The constants of confidences were chosen with smaller seeds."""
METHODS: Final[Mapping[str, Mapping[str, Any]]] = {
    "reverse-knn": {"method": "reverse-knn"},
    "knn": {"method": "knn"},
    "ensemble": {"method": "ensemble"},
    "class means": {"method": "blind-average", "training": {"learner": "means"}},
}
MOST_IMAGES = 4000


@dataclass(frozen=True, eq=False)
class Case:
    """Public images with their truth, and the records of each agent, as features."""

    public: Split
    private: tuple[Split, ...]


def bench_calibration(
    *, data: Path | None = None, full: bool = False, progress: ProgressCallback = silent
) -> list[BenchRow]:
    """Return two rows for each world, method and price: all labels, and those stated between 75 and 90 %."""
    office = {domain: split_of(shard) for domain, shard in embed_domains(data_folder(data), progress).items()}
    features, truth = cifar10_test_features(data_root(data), progress=progress)
    cifar, digits, chests = Split(features / FEATURE_ONE, truth), usps(data_root(data)), xrays(data, progress)
    worlds: dict[str, Callable[[int], Iterator[Case]]] = {
        "Office-Caltech10": lambda _: _office_cases(office),
        "CIFAR-10, unequal agents": lambda seed: _thirds(cifar, seed, agents=5, concentration=0.5),
        "CIFAR-10, classes 1:30": lambda seed: _thirds(_unequal(cifar, 30, seed), seed, agents=3),
        "USPS": lambda seed: _usps_cases(digits, seed),
        "chest X-rays": lambda seed: _hospitals(chests, seed),
        "wrong labels": lambda seed: _thirds(office["caltech10"], seed, agents=3, shuffled=True),
    }
    seeds = range(FIRST_SEED, FIRST_SEED + (2 if full else 1))
    found: dict[tuple[str, str, float], list[Mapping[str, Any]]] = {}
    started = time.perf_counter()
    for name, seed in in_turn(progress, "Calibration", [*itertools.product(worlds, seeds)]):
        for case in worlds[name](seed):
            for method, epsilon, report in job_reports(case, seed):
                found.setdefault((name, method, epsilon), []).append(report)
    seconds = time.perf_counter() - started
    return [row for key, reports in found.items() for row in _rows(*key, reports, seeds=seeds, seconds=seconds)]


def job_reports(
    case: Case, seed: int, methods: Mapping[str, Mapping[str, Any]] = METHODS
) -> Iterator[tuple[str, float, Mapping[str, Any]]]:
    """Yield what the report of each method's job at each price says of the labels of all public images.

    Args:
        seed: of the noise.
        methods: what each job asks for, by the method's name in the rows.
    """
    classes = [f"class {number}" for number in range(int(case.public.labels.max()) + 1)]
    probe = np.random.default_rng(0).normal(size=(8, case.public.inputs.shape[1])).astype(np.float32)
    with tempfile.TemporaryDirectory() as folder:

        def shard(images: Split, name: str, *, public: bool) -> Path:
            out = Path(folder, name)
            embed(
                features=images.inputs.astype(np.float32),
                labels=[classes[label] for label in images.labels],
                classes=classes,
                out=out,
                backbone_name="calibration",
                fitted_on="public",
                probe=probe,
                public=public,
                quiet=True,
            )
            return out

        public = shard(case.public, "public.shard", public=True)
        private = [shard(own, f"{number}.shard", public=False) for number, own in enumerate(case.private)]
        for method, epsilon in itertools.product(methods, EPSILONS):
            out = Path(folder, f"{method} {epsilon}")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that noise drowns the votes is part of what is measured
                run(private, public, out, epsilon=epsilon, delta=DELTA, seed=seed, quiet=True, **methods[method])
            yield method, epsilon, json.loads((out / "report.json").read_text())["images"]


def _rows(
    case: str, method: str, epsilon: float, reports: list[Mapping[str, Any]], *, seeds: range, seconds: float
) -> Iterator[BenchRow]:
    labels = np.array([report["labelled"] for report in reports])
    stated = 100 * float(np.average([report["mean_confidence"] for report in reports], weights=labels))
    right = 100 * float(np.average([report["accuracy"] for report in reports], weights=labels))
    told = {"stated": stated, "right": right, "labels": int(labels.sum()), "printed": f"{stated:.1f} / {right:.1f}"}
    metric = "mean confidence less share right, of all labels, points"
    found = [(metric, stated - right, "at most 5" if epsilon < LEAST_EPSILON else "from -10 to 5", told)]
    bands = [band for report in reports for band in report["calibration"] if (band["from"], band["to"]) == BAND]
    if count := sum(band["labels"] for band in bands):
        gap = 100 * sum(band["right"] - band["labels"] * band["stated"] for band in bands) / count
        metric = "share right less mean confidence, of labels stated between 75 and 90 %, points"
        found.append((metric, gap, f"within 5 points, at least {LEAST_LABELS} labels", {"labels": count}))
    for metric, value, reference, settings in found:
        yield BenchRow(
            case=case,
            method=method,
            metric=metric,
            value=value,
            epsilon=epsilon,
            delta=DELTA,
            level="instance",
            reference=reference,
            seconds=seconds,
            settings={"seeds": list(seeds), **settings},
        )


def _office_cases(domains: Mapping[str, Split]) -> Iterator[Case]:
    for server in DOMAINS:
        yield Case(domains[server], tuple(domains[other] for other in DOMAINS if other != server))


def _thirds(
    images: Split, seed: int, *, agents: int, concentration: float | None = None, shuffled: bool = False
) -> Iterator[Case]:
    """Yield a third of some images as public and the rest at agents, at most MOST_IMAGES in all.

    Args:
        images: all of them.
        seed: of the division.
        agents: how many.
        concentration: of the shares of each class that agents hold; None divides evenly.
        shuffled: whether agents' labels are, so that they say nothing.
    """
    random = np.random.default_rng(seed)
    order = random.permutation(len(images))[:MOST_IMAGES]
    public, private = images[order[: len(order) // 3]], images[order[len(order) // 3 :]]
    if shuffled:
        private = Split(private.inputs, random.permutation(private.labels))
    holder = np.arange(len(private)) % agents
    if concentration is not None:
        shares = random.dirichlet([concentration] * agents, size=int(private.labels.max()) + 1)
        holder = (random.random(len(private))[:, None] > shares.cumsum(axis=1)[private.labels][:, :-1]).sum(axis=1)
    yield Case(public, tuple(private[np.flatnonzero(holder == agent)] for agent in range(agents)))


def _unequal(images: Split, ratio: float, seed: int) -> Split:
    """Drop images so that classes, in a random order, shrink evenly to 1 / `ratio` of their size."""
    random = np.random.default_rng([seed, 30])
    classes = int(images.labels.max()) + 1
    share: NDArray[np.float64] = ratio ** -(random.permutation(classes) / (classes - 1))
    return images[np.flatnonzero(random.random(len(images)) < share[images.labels])]


def _hospitals(images: Images, seed: int) -> Iterator[Case]:
    division = divide(images, seed)
    yield Case(Split(division.public.inputs, division.public.labels), tuple(division.world.holdings))


def _usps_cases(digits: DataSet, seed: int) -> Iterator[Case]:
    train, test = (
        Split(split.inputs.reshape(len(split), -1) / 255.0 - 0.5, split.labels) for split in (digits.train, digits.test)
    )
    order = np.random.default_rng(seed).permutation(len(train))
    yield Case(test, tuple(train[order[agent::3]] for agent in range(3)))
