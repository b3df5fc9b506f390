"""Votes on attributes in the setting of Zhu et al. 2021 on CelebA: 300 agents, at most tau = 4 attributes per query.

CelebA is not there (torchvision has a loader for it), so agents learn attributes of MNIST's digits, of which no digit
has more than four: which digit it is, and whether it is even, prime, at least five, or written with a closed loop.
The sum is the private sum of vectors of 0 and 1; its price at agent level is that of tau votes per query, at instance
level of 2 tau.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from feature_store.query_selection import select_queries
from labeler.accounting.gaussian import mu_of_epsilon
from labeler.accounting.integer import epsilon_bound
from labeler.randomness import seeded_source
from labeler.vector_sum import VectorSum
from workers.progress import ProgressCallback
from workers.studies.attributes import (
    attribute_ballots,
    attributes_on,
    attributes_squared_sensitivity,
    check_attribute_ballots,
)
from workers.studies.data_sets import mnist
from workers.studies.learning.jitter import Jitter
from workers.studies.learning.networks import image_tensor, small_convnet
from workers.studies.learning.together import Training, initial_parameters, predict_together, train_together
from workers.studies.papers.ensemble_rounds import DELTA, requester, stacked
from workers.studies.papers.partitions import iid_partition
from workers.studies.private_sum import private_sum
from workers.studies.rows import BenchRow

MOST_POSITIVE = 4
BATCH = 8
PAPER = "85.0 % at 4.0 (paper, as printed; CelebA, 40 attributes, sigma 50)"

ATTRIBUTES: dict[str, tuple[int, ...]] = {
    **{f"is {digit}": (digit,) for digit in range(10)},
    "even": (0, 2, 4, 6, 8),
    "prime": (2, 3, 5, 7),
    "at least five": (5, 6, 7, 8, 9),
    "closed loop": (0, 6, 8, 9),
}
TABLE: NDArray[np.bool_] = np.array([[digit in digits for digits in ATTRIBUTES.values()] for digit in range(10)])
"""Which digit has which attributes, shape (10, attributes)."""


@dataclass(frozen=True)
class Size:
    """How large a run is; the first is what is reported."""

    seeds: tuple[int, ...] = (1, 2, 3)
    agents: int = 300
    records: int = 200
    public: int = 600
    epochs: int = 10
    pretraining: int = 60
    clusters: int = 60


FULL = Size()
QUICK = Size((1,), 10, 60, 100, 6, 2, 10)


def attribute_rows(root: Path, *, full: bool, progress: ProgressCallback) -> list[BenchRow]:
    """Share of attributes that the released sums tell rightly: every public image asked about, and clusters of them."""
    size = FULL if full else QUICK
    data = mnist(root)
    right: dict[str, list[float]] = {}
    specs: dict[str, tuple[VectorSum, int]] = {}
    started = time.perf_counter()
    for seed in size.seeds:
        asker = requester(data.test, public=size.public, test=0, epochs=size.pretraining, seed=seed, progress=progress)
        partition = iid_partition(data.train.labels, clients=size.agents, records=size.records, seed=seed)
        inputs, labels, sizes = stacked(data.train, partition)
        module, start = initial_parameters(lambda: small_convnet(len(ATTRIBUTES)), size.agents, seed=seed)
        trained = train_together(
            module,
            start,
            inputs,
            torch.from_numpy(TABLE.astype(np.float32))[labels],
            training=Training(epochs=size.epochs, batch_size=BATCH, jitter=Jitter()),
            seeds=[1000 * seed + agent for agent in range(size.agents)],
            sizes=sizes,
            criterion=_logistic_loss,
            progress=progress,
        )
        certain = predict_together(module, trained, image_tensor(asker.public.inputs)).sigmoid().numpy()
        truth = TABLE[asker.public.labels]
        groups = select_queries(asker.public_features, strategy="clustered", count=size.clusters, seed=seed).assignment
        shares = np.eye(size.clusters)[groups] / np.maximum(np.bincount(groups, minlength=size.clusters), 1)
        by_cluster = np.einsum("nq,and->aqd", shares, certain)
        asked = {
            "every image, sigma 50 as in the paper": (certain, 50.0, np.arange(size.public)),
            "cluster centres, epsilon 2": (by_cluster, _sigma_for(2.0, size.clusters), groups),
            "cluster centres, epsilon 4": (by_cluster, _sigma_for(4.0, size.clusters), groups),
        }
        for name, (certainties, sigma, assignment) in asked.items():
            spec = _spec(certainties.shape[1], size.agents, sigma)
            on = _release(spec, certainties, seed=f"attributes {seed} {name}")[assignment]
            right.setdefault(name, []).append(100 * float((on == truth).mean()))
            specs[name] = (spec, certainties.shape[1])
        everybody = attributes_on((certain > 0.5).sum(axis=0), contributors=size.agents)
        right.setdefault("every image, without noise and clipping", []).append(100 * float((everybody == truth).mean()))
    seconds = (time.perf_counter() - started) / len(right)
    return [_row(name, values, specs.get(name), size, seconds) for name, values in right.items()]


def _row(
    name: str, values: Sequence[float], asked: tuple[VectorSum, int] | None, size: Size, seconds: float
) -> BenchRow:
    spec, queries = asked or (None, size.public)
    return BenchRow(
        case=f"{size.agents} agents, {len(ATTRIBUTES)} attributes of MNIST's digits",
        method=f"AE-DPFL on attributes, {name}",
        metric="attributes of public images right, %",
        value=statistics.fmean(values),
        sd=statistics.stdev(values) if len(values) > 1 else None,
        epsilon=None if spec is None else epsilon_bound(spec.event("agent"), DELTA),
        delta=None if spec is None else DELTA,
        level=None if spec is None else "agent",
        reference=PAPER,
        seconds=seconds,
        settings={
            "most_positive": MOST_POSITIVE,
            "queries": queries,
            "seeds": list(size.seeds),
            "records": size.records,
            "data": "CelebA is not there; torchvision.datasets.CelebA reads it",
        }
        | (
            {}
            if spec is None
            else {
                "sigma_votes": spec.sigma,
                "instance_epsilon": epsilon_bound(spec.event("instance"), DELTA),
            }
        ),
    )


def _release(spec: VectorSum, certainties: NDArray[np.float32], *, seed: str) -> NDArray[np.bool_]:
    """Ballots of all agents, their private sum, and the attributes that it says are on, shape (queries, attributes)."""
    shape = certainties.shape[1:]
    ballots = [attribute_ballots(own, most_positive=MOST_POSITIVE) for own in certainties]
    for ballot in ballots:
        check_attribute_ballots(ballot, num_attributes=shape[1], most_positive=MOST_POSITIVE)
    sums = private_sum(
        spec,
        (ballot.astype(np.float64).ravel() for ballot in ballots),
        sources=(seeded_source(f"{seed}, agent {number}".encode()) for number in range(len(ballots))),
    )
    return attributes_on(sums.reshape(shape), contributors=len(ballots))


def _spec(queries: int, agents: int, sigma: float) -> VectorSum:
    bounds = {"queries": queries, "num_attributes": len(ATTRIBUTES), "most_positive": MOST_POSITIVE}
    return VectorSum(
        dimension=queries * len(ATTRIBUTES),
        largest_norm=math.sqrt(attributes_squared_sensitivity("agent", **bounds)),
        sensitivity=math.sqrt(attributes_squared_sensitivity("instance", **bounds)),
        sigma=sigma,
        agents=agents,
    )


def _sigma_for(epsilon: float, queries: int) -> float:
    """Noise at which the queries cost at most epsilon at agent level; a thousandth more than for real numbers."""
    bounds = {"queries": queries, "num_attributes": len(ATTRIBUTES), "most_positive": MOST_POSITIVE}
    distance = math.sqrt(attributes_squared_sensitivity("agent", **bounds))
    return 1.005 * distance / mu_of_epsilon(epsilon, DELTA)


def _logistic_loss(logits: Tensor, attributes: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(logits, attributes, reduction="sum")
