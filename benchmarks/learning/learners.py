"""`labeler bench learners`: does an agent of `ensemble` gain from a network, or from public images, over a linear head?

Agents hold fixed features. They answer as the product does (`Method.ballots`), with each of its learners. The learners
have one price, and are compared in two ways:

* **Without noise**: the share of public images that most agents label right, where every image is asked. "adapted" is
  then fitted to all public images. No noisy release of the same votes says more.
* **At one price**: as many questions as the product advises, noise for the price, and its student labels all public
  images. "adapted" is fitted to these questions alone. `reverse-knn` at the same price stands next to them.

Digits are seen as edge features, photographs as features of EfficientNet-Lite0. The constants of
`workers.learning.network` were chosen with seed 1000, which draws other agents and other public digits, and on the one
division of the photographs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks import BenchRow, in_turn, mean_row
from benchmarks.accuracy.office_caltech import DOMAINS, data_folder, embed_domains
from benchmarks.data import Split, mnist, split_of, usps
from benchmarks.learning.networks import edge_features
from benchmarks.papers.partitions import MNIST_CASE, USPS_CASE, iid_partition, mnist_partition
from feature_store.query_selection import QuerySet, select_queries
from feature_store.rows import quantize
from feature_store.students.answers import NoisyAnswers
from feature_store.students.labeling import label_probabilities, propose_radius
from feature_store.students.student import Learners
from labeler.expectation import questions_for
from labeler.methods.reverse_knn import project
from labeler.randomness import seeded_source
from labeler.records import ModelStore, Records, RunnerContext
from labeler.setting import PLANNED_QUERIES, StatedLevel
from labeler.tally import QueryBatch
from labeler.task import Task
from workers.learning.learner import Trainer
from workers.plan import PlanRequest, solve_request
from workers.progress import ProgressCallback, silent
from workers.voting import NeighborIndexes

SEEDS: Final = (1, 2, 3)
PUBLIC: Final = 3_000
CLASSES: Final = 10
MANY: Final = 20
"""Fewer agents have no useful price for a whole agent."""

RIGHT, ALONE = "public images that most agents label right, %", "public images that an agent labels right, %"
PRICES: Final[Mapping[str, tuple[float, StatedLevel, float]]] = {
    "labeled right at epsilon 1 per image, %": (1.0, "instance", 1e-5),
    "labeled right at epsilon 3 per image, %": (3.0, "instance", 1e-5),
    "labeled right at epsilon 2.8 per agent, %": (2.8, "agent", 1e-3),
}
LEARNERS: Final[Mapping[str, dict[str, Any]]] = {
    "linear head": {"method": "ensemble"},
    "one hidden layer": {"method": "ensemble", "training": {"learner": "network"}},
    "one hidden layer, adapted": {"method": "ensemble", "training": {"learner": "adapted"}},
}
RECORDS_CHOOSE: Final = "reverse-knn"


class Agents:
    """Agents with their records, and the models that they keep between batches."""

    def __init__(self, held: Sequence[Split]) -> None:
        self._records = [
            Records(quantize(own.inputs), np.arange(len(own)), own.labels.astype(np.int16), str(number))
            for number, own in enumerate(held)
        ]
        self._models = [ModelStore() for _ in held]

    def __len__(self) -> int:
        return len(self._records)

    @property
    def records(self) -> int:
        """Return how many records they hold together."""
        return sum(map(len, self._records))

    def ballots(self, task: Task, features: NDArray[np.int16]) -> NDArray[np.float64]:
        """Return what each agent answers, in votes and without noise, shape (agents, queries, classes)."""
        found = []
        for number, (own, models) in enumerate(zip(self._records, self._models, strict=True)):
            source = partial(seeded_source, f"agent {number}".encode())
            indexes = NeighborIndexes(dimension=features.shape[1])
            ballots = task.traits.ballots(
                task, QueryBatch(features), own, RunnerContext(indexes, models, source, Trainer(), source)
            )
            radius = task.ballot_radius
            found.append(ballots if radius is None else project(ballots, radius=radius, scale=task.scale) / task.scale)
        return np.stack(found).astype(np.float64)


def priced(fields: Mapping[str, Any], price: tuple[float, StatedLevel, float], agents: Agents, images: int) -> Task:
    """Return the task of this method at this price, with as many questions as are advised."""
    epsilon, level, delta = price
    asked = {"agents": len(agents), "classes": CLASSES, "epsilon": epsilon, "level": level, "delta": delta, **fields}
    task = solve_request(PlanRequest.of(asked))
    count = questions_for(task, public_images=images, records=agents.records)
    return solve_request(PlanRequest.of(asked | {"queries": count}))


def labeled_right(task: Task, votes: NDArray[np.float64], questions: QuerySet, learners: Learners, truth: Any,
                  seed: int) -> float:  # fmt: skip
    """Return the share of public images, in percent, that the product labels right from a noisy sum of votes."""
    noisy = votes + task.total_sigma_votes * np.random.default_rng([seed, 7]).normal(size=votes.shape)
    answers = NoisyAnswers.of(
        task,
        features=questions.features,
        labels=noisy.argmax(axis=1).astype(np.int16),
        noisy_votes=noisy,
        assignment=questions.assignment,
    )
    found = label_probabilities(answers, learners, rows=questions.rows).argmax(axis=1)
    return 100 * float((found == truth).mean())


def measured(held: Sequence[Split], public: Split, seed: int) -> list[tuple[str, str, float]]:
    """Return (method, metric, value) of one world."""
    agents, shown, found = Agents(held), quantize(public.inputs), []
    learners, chosen = Learners(shown, num_classes=CLASSES), dict[int, QuerySet]()

    def at_prices(method: str, fields: Mapping[str, Any], ballots: Callable[[Task, QuerySet], NDArray[Any]]) -> None:
        for metric, price in PRICES.items():
            is_capped = method == RECORDS_CHOOSE and price[1] == "agent"
            capped = {"ballot_radius": _radius(shown, agents)} if is_capped else {}
            task = priced({**fields, **capped}, price, agents, len(shown))
            questions = chosen.get(task.max_queries) or select_queries(shown, count=task.max_queries)
            chosen[task.max_queries] = questions
            votes = ballots(task, questions).sum(axis=0)
            found.append((method, metric, labeled_right(task, votes, questions, learners, public.labels, seed)))

    for method, fields in LEARNERS.items():
        asked = {"agents": len(agents), "classes": CLASSES, "sigma": 1.0, "queries": len(shown)}
        task = solve_request(PlanRequest.of(asked | fields))
        predicted = agents.ballots(task, shown).argmax(axis=2)
        most = np.eye(CLASSES)[predicted].sum(axis=0).argmax(axis=1)
        found.append((method, RIGHT, 100 * float((most == public.labels).mean())))
        found.append((method, ALONE, 100 * float((predicted == public.labels).mean())))
        if len(agents) >= MANY:
            # The votes are the same at every price; under one task each model is trained once.
            at_prices(method, fields, lambda _, questions, task=task: agents.ballots(task, questions.features))  # type: ignore[misc]
    if len(agents) >= MANY:
        at_prices(
            RECORDS_CHOOSE,
            {"method": RECORDS_CHOOSE},
            lambda task, questions: agents.ballots(task, questions.features),
        )
    return found


def _radius(shown: NDArray[np.int16], agents: Agents) -> int:
    """Return the radius of an agent's ballot that the product proposes."""
    each = max(1, agents.records // len(agents))
    return propose_radius(shown, questions=PLANNED_QUERIES, num_classes=CLASSES, k=1, records=each)


def bench_learners(
    *, data: Path | None = None, full: bool = False, progress: ProgressCallback = silent
) -> list[BenchRow]:
    """Return how many public images are labeled right, by learner; not `full`: one seed, a fifth of the digits' agents.

    Photographs have one division, and too few agents for a price.
    """
    root = data_folder(data)
    seeds, share = (SEEDS, 1) if full else (SEEDS[:1], 5)
    worlds: dict[str, list[Callable[[], tuple[list[Split], Split]]]] = {
        name: [partial(made, root, seed, share) for seed in seeds] for name, made in DIGITS.items()
    }
    shards = embed_domains(root, progress, "efficientnet-lite0")
    photos = {domain: split_of(shard) for domain, shard in shards.items()}

    def of_photos(server: str) -> tuple[list[Split], Split]:
        return [own for domain, own in photos.items() if domain != server], photos[server]

    worlds |= {f"Office-Caltech10, {server}": [partial(of_photos, server)] for server in DOMAINS}
    rows: list[BenchRow] = []
    for case in in_turn(progress, "Learners", list(worlds)):
        values: dict[tuple[str, str], list[float]] = {}
        count = 0
        for seed, made in zip(seeds, worlds[case], strict=False):
            held, public = made()
            count = len(held)
            for method, metric, value in measured(held, public, seed):
                values.setdefault((method, metric), []).append(value)
        for (method, metric), found in values.items():
            epsilon, level, delta = PRICES.get(metric, (None, None, None))
            told = {"agents": count, "seeds": list(seeds[: len(found)])}
            rows.append(mean_row(case, method, metric, found, epsilon=epsilon, delta=delta, level=level, settings=told))
    return rows


def mnist_world(root: Path, seed: int, share: int) -> tuple[list[Split], Split]:
    """Return agents that know six digits each, and public digits of the test set."""
    data = mnist(root)
    parts = mnist_partition(data.train.labels, agents=100 // share, seed=seed)
    return _edges(data.train, parts), _edges(data.test, [_some(len(data.test), seed)])[0]


def usps_world(root: Path, seed: int, share: int) -> tuple[list[Split], Split]:
    """Return agents with MNIST's digits, and public digits of another post office."""
    data, images = mnist(root).train, usps(root).whole
    parts = iid_partition(data.labels, clients=60 // share, records=1_000, seed=seed)
    return _edges(data, parts), _edges(images, [_some(len(images), seed)])[0]


DIGITS: Final[Mapping[str, Callable[[Path, int, int], tuple[list[Split], Split]]]] = {
    MNIST_CASE: mnist_world,
    USPS_CASE: usps_world,
}


def _some(count: int, seed: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, 1]).permutation(count)[:PUBLIC]


def _edges(images: Split, parts: Sequence[NDArray[np.int64]]) -> list[Split]:
    return [Split(edge_features(images.inputs[rows]), images.labels[rows]) for rows in parts]
