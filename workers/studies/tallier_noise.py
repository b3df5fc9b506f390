"""Noise by agents and by talliers against each other: one epsilon, three agents of whom two may collude.

Handwritten digits of scikit-learn as pixels, three agents, reverse-knn: each private digit votes for the nearest of the
clusters of the public ones. Whole rounds through sharing, tally and release, noise of the operating system each time.
A public digit is labelled right where the class of its cluster is its own.
"""

from __future__ import annotations

import statistics
import time
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from sklearn.cluster import KMeans

from feature_store.quantize import quantize
from labeler.batch import QueryBatch
from labeler.contribution import input_shares
from labeler.planning import price
from labeler.randomness import os_source
from labeler.release import open_histogram
from labeler.solving import solve_sigma
from labeler.tally import round_of
from labeler.task import Task, parse_task
from workers.digits import load_digits
from workers.progress import ProgressCallback, silent
from workers.studies.plain_tallier import Tallier, agree_on_contributors
from workers.studies.rows import BenchRow

AGENTS: Final = 3
CLUSTERS: Final = 20
EPSILONS: Final = (0.3, 0.5, 1.0)
SPLITS, ROUNDS = 5, 40
_PRIVATE: Final = 0.4


def bench_tallier_noise(*, full: bool = False, progress: ProgressCallback = silent) -> list[BenchRow]:
    """Labels right, and noise in the sum, by who adds the noise; quick: one split, few rounds, one epsilon."""
    epsilons, splits, rounds = (EPSILONS, SPLITS, ROUNDS) if full else (EPSILONS[1:2], 1, 5)
    drawn = [_split(seed) for seed in range(splits)]
    cases: list[tuple[str, dict[str, Any], float]] = [
        ("agents, two of three may collude", {"colluding_agents": 2}, 1.0),
        ("talliers, one of three dishonest", {"dishonest_talliers": 1}, 1.0),
        ("talliers, two of three dishonest", {"dishonest_talliers": 2}, 1.0),
        # As much noise in the sum as the agents' has, so that more of it is noise that nobody can subtract.
        ("talliers, one dishonest, as much noise in the sum", {"dishonest_talliers": 1}, 2**0.5),
    ]
    rows = []
    for place, epsilon in enumerate(epsilons):
        for number, (method, who, times) in enumerate(cases):
            progress("Noise by agents and talliers", place * len(cases) + number, len(epsilons) * len(cases))
            rows += _measured(method, _task(epsilon, who, times), drawn, rounds, asked=epsilon)
    progress("Noise by agents and talliers", len(epsilons) * len(cases), len(epsilons) * len(cases))
    return rows


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
