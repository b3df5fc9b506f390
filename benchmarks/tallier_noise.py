"""Noise by agents and by talliers against each other: one epsilon, three agents of whom two may collude.

Handwritten digits of scikit-learn as pixels, three agents, reverse-knn: each private digit votes for the nearest of the
clusters of the public ones. Whole rounds through sharing, tally and release, noise of the operating system each time.
A public digit is labelled right where the class of its cluster is its own.

With a folder of data sets also models: DP-Helmet's softmax on CIFAR-10 as in `benchmarks.papers.dp_helmet`, its
terms and public map, three agents of 5,000 records that keep that bound; the released mean on 8,000 images.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from sklearn.cluster import KMeans

from benchmarks.plain_tallier import Tallier, agree_on_contributors
from benchmarks.rows import BenchRow
from feature_store.quantize import quantize
from labeler.contribution import input_shares
from labeler.planning import price
from labeler.randomness import os_source
from labeler.release import open_histogram
from labeler.solving import solve_sigma
from labeler.tally import QueryBatch, round_of
from labeler.task import Task, parse_task
from workers.digits import load_digits
from workers.progress import ProgressCallback, silent

AGENTS: Final = 3
CLUSTERS: Final = 20
EPSILONS: Final = (0.3, 0.5, 1.0)
SPLITS, ROUNDS = 5, 40
_PRIVATE: Final = 0.4
WHO: Final[dict[str, dict[str, Any]]] = {
    "agents, two of three may collude": {"colluding_agents": 2},
    "talliers, one of three dishonest": {"dishonest_talliers": 1},
    "talliers, two of three dishonest": {"dishonest_talliers": 2},
}
RECORDS: Final = 5_000
MODEL_EPSILONS: Final = (0.1, 0.5)
MODEL_SEEDS, MODEL_ROUNDS = (1, 2, 3), 10


def bench_tallier_noise(
    *, data: Path | None = None, full: bool = False, progress: ProgressCallback = silent
) -> list[BenchRow]:
    """What is right, and noise in the sum, by who adds the noise; quick: one split, few rounds, one epsilon.

    Args:
        data: folder of the data sets, for models; None: votes alone.
        full: all of it.
        progress: told what is done.
    """
    epsilons, splits, rounds = (EPSILONS, SPLITS, ROUNDS) if full else (EPSILONS[1:2], 1, 5)
    drawn = [_split(seed) for seed in range(splits)]
    cases: list[tuple[str, dict[str, Any], float]] = [
        *((method, who, 1.0) for method, who in WHO.items()),
        # As much noise in the sum as the agents' has, so that more of it is noise that nobody can subtract.
        ("talliers, one dishonest, as much noise in the sum", {"dishonest_talliers": 1}, 2**0.5),
    ]
    rows = []
    for place, epsilon in enumerate(epsilons):
        for number, (method, who, times) in enumerate(cases):
            progress("Noise by agents and talliers", place * len(cases) + number, len(epsilons) * len(cases))
            rows += _measured(method, _task(epsilon, who, times), drawn, rounds, asked=epsilon)
    progress("Noise by agents and talliers", len(epsilons) * len(cases), len(epsilons) * len(cases))
    return rows if data is None else rows + _models(data, full=full)


def _task(epsilon: float, who: dict[str, Any], times: float) -> Task:
    fields = {
        "name": "noise by talliers",
        "classes": [str(digit) for digit in range(10)],
        "method": "reverse-knn",
        "delta": 1e-5,
        "max_queries": CLUSTERS,
        "agents": AGENTS,
        "sigma_votes": 1.0,
    }
    draft = parse_task(fields | who)
    return draft.model_copy(update={"sigma_votes": times * solve_sigma(draft, epsilon)})


_Split = tuple[QueryBatch, list[NDArray[np.int64]], NDArray[np.int64], NDArray[np.int64]]


def _split(seed: int) -> _Split:
    """Questions, ballots of each agent, and of the public digits their cluster and class."""
    images, targets = load_digits()
    features = quantize(images.reshape(len(images), -1).astype(np.float64)).astype(np.int64)
    order = np.random.default_rng(seed).permutation(len(targets))
    private, public = np.split(order, [int(_PRIVATE * len(order))])
    found = KMeans(CLUSTERS, n_init=4, random_state=seed).fit(features[public])
    asked = quantize(found.cluster_centers_)
    nearest = np.argmax(features[private] @ asked.astype(np.int64).T, axis=1)
    ballots = []
    for number in range(AGENTS):
        mine = np.arange(len(private)) % AGENTS == number
        votes = np.zeros((CLUSTERS, 10), dtype=np.int64)
        np.add.at(votes, (nearest[mine], targets[private][mine]), 1)
        ballots.append(votes)
    return QueryBatch(asked, first_query=0), ballots, found.labels_.astype(np.int64), targets[public].astype(np.int64)


def _measured(method: str, task: Task, splits: list[_Split], rounds: int, *, asked: float) -> list[BenchRow]:
    began, right, squares = time.perf_counter(), [], []
    for batch, ballots, cluster, truth in splits:
        exact = np.sum(ballots, axis=0)
        for _ in range(rounds):
            votes = _opened(task, batch, ballots)
            squares.append(float(np.mean(np.square(votes - exact))))
            right.append(100 * float(np.mean(np.argmax(votes, axis=1)[cluster] == truth)))
    cost = price(task).instance
    common: dict[str, Any] = {
        "case": f"handwritten digits, {AGENTS} agents, sigma for epsilon {asked:g}",
        "method": method,
        "epsilon": cost.epsilon,
        "delta": task.delta,
        "level": "instance",
        "settings": {
            "sigma_votes": task.sigma_votes,
            "colluding_agents": task.colluding_agents,
            "dishonest_talliers": task.dishonest_talliers,
            "clusters": CLUSTERS,
            "splits": len(splits),
            "rounds": rounds,
        },
    }
    return [
        BenchRow(
            metric="public digits labelled right, %",
            value=statistics.mean(right),
            sd=statistics.stdev(right),
            seconds=time.perf_counter() - began,
            **common,
        ),
        BenchRow(
            metric="variance of the noise in the sum, votes^2",
            value=statistics.mean(squares),
            reference=f"{task.total_sigma_votes**2:.4g} stated",
            **common,
        ),
    ]


def _opened(task: Task, batch: QueryBatch, ballots: list[NDArray[np.int64]]) -> NDArray[np.float64]:
    round = round_of(task, batch)
    talliers = [Tallier(index, round) for index in range(task.talliers)]
    for number, own in enumerate(ballots):
        shares = input_shares(own, task, round, agent_id=f"agent-{number}", source=os_source())
        for tallier, share in zip(talliers, shares, strict=True):
            tallier.receive(share)
    contributors = agree_on_contributors(talliers)
    votes = open_histogram([tallier.aggregate_share(contributors) for tallier in talliers], task).noisy_votes
    if votes is None:
        raise TypeError("a histogram has votes")
    return votes


def _models(root: Path, *, full: bool) -> list[BenchRow]:
    """Of the mean of three agents' models: how many unseen images it knows."""
    # Loaded where it is wanted: votes need no CIFAR-10.
    from benchmarks.papers.dp_helmet import AXES, TERMS, Setting, cifar10_world
    from labeler.methods.blind_average import weight_sum
    from workers.learning.linear import train_users

    terms = replace(TERMS["softmax"], min_records=RECORDS, max_records=RECORDS)
    tasks = {}
    for epsilon in MODEL_EPSILONS if full else MODEL_EPSILONS[:1]:
        for method, who in WHO.items():
            training = {"min_records": RECORDS, "max_records": RECORDS, "regularisation": terms.regularisation}
            training |= {"radius": terms.radius, "iterations": terms.iterations, "clip_norm": terms.clip_norm}
            fields = {"method": "blind-average", "max_queries": AXES + 1, "training": training}
            tasks[epsilon, method] = _task(epsilon, who | fields, 1.0)
    right: dict[tuple[float, str], list[float]] = {case: [] for case in tasks}
    squares: dict[tuple[float, str], list[float]] = {case: [] for case in tasks}
    exact: list[float] = []
    for seed in MODEL_SEEDS if full else MODEL_SEEDS[:1]:
        world = cifar10_world(root, seed, AGENTS * RECORDS)
        models = train_users(*world.deal(Setting("", terms, users=AGENTS, records=RECORDS)), terms=terms)
        exact.append(world.accuracy(models.mean(axis=0), terms))
        for case, task in tasks.items():
            spec = weight_sum(task)
            bare = [spec.quantize(own / terms.sensitivity).reshape(-1, task.num_classes) for own in models]
            batch = QueryBatch(np.ones((task.max_queries, 1), np.int16), first_query=0)
            for _ in range(MODEL_ROUNDS if full else 2):
                opened = _opened(task, batch, bare)
                squares[case].append(float(np.mean(np.square(opened - np.sum(bare, axis=0) / task.scale))))
                mean = opened * terms.sensitivity / AGENTS
                right[case].append(world.accuracy(mean.reshape(models[0].shape), terms))
    name = f"DP-Helmet softmax, CIFAR-10 features, {AGENTS} agents of {RECORDS:,} records"
    metrics = ("unseen images right, %", "variance of the noise in the sum, in squared changes by one record")
    rows = [BenchRow(case=name, method="no noise", metric=metrics[0], value=statistics.mean(exact))]
    for (epsilon, method), task in tasks.items():
        case = (epsilon, method)
        rows += [
            BenchRow(
                case=f"{name}, sigma for epsilon {epsilon:g}",
                method=method,
                metric=metric,
                value=statistics.mean(found[case]),
                sd=statistics.stdev(found[case]),
                reference=reference,
                epsilon=price(task).instance.epsilon,
                delta=task.delta,
                level="instance",
                settings={"sigma_votes": task.sigma_votes, **WHO[method], "seeds": len(exact), "terms": repr(terms)},
            )
            for metric, found, reference in (
                (metrics[0], right, None),
                (metrics[1], squares, f"{task.total_sigma_votes**2:.4g} stated"),
            )
        ]
    return rows
