"""`labeler bench learners`: does an agent of `ensemble` gain from a network, or from public images, over a linear head?

Agents train on fixed features, and each casts one vote per public image. Four learners share the same agents:

* a linear head, as the product trains it (`workers.learning.linear.train_head`);
* the same, after the mean of the agent's features was moved to that of the public images;
* one hidden layer (`Training` below: fixed steps, whatever the records are);
* the same hidden layer, fitted to the public images by DANN (`benchmarks.learning.networks`).

Public images cost nothing to read, and each agent still casts one vote per question. So all four have one price, and
the table compares what most agents say without noise: no noisy release of the same votes says more.

Digits are seen as edge features, photographs as features of EfficientNet-Lite0. `HIDDEN` and `TRAINING` were chosen
with seed 1000, which draws other agents and other public images.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from benchmarks import BenchRow, in_turn, mean_row
from benchmarks.accuracy.office_caltech import DOMAINS, data_folder, embed_domains
from benchmarks.data import Split, mnist, split_of, usps
from benchmarks.learning.networks import DomainAdversarial, answers_of, edge_features
from benchmarks.learning.together import Training
from benchmarks.papers.partitions import MNIST_CASE, USPS_CASE, iid_partition, mnist_partition
from feature_store.rows import quantize
from labeler.records import Rows
from workers.learning.linear import predict, train_head
from workers.progress import ProgressCallback, silent

HIDDEN: Final = 64
TRAINING: Final = Training(epochs=30, batch_size=32, learning_rate=2e-3)
SEEDS: Final = (1, 2, 3)
PUBLIC: Final = 3_000
RIGHT, ALONE = "public images that most agents label right, %", "public images that an agent labels right, %"

Answers = NDArray[np.float32]
"""Probabilities that each agent's model gives each public image: shape (agents, images, classes)."""


def linear_answers(agents: Sequence[Split], public: NDArray[np.float32], num_classes: int) -> Answers:
    """Return the answers of the product's linear heads, which are certain of one class."""
    asked = quantize(public)
    heads = (train_head(Rows.of(own.inputs, own.labels), num_classes=num_classes) for own in agents)
    return np.stack([np.eye(num_classes, dtype=np.float32)[predict(head, asked)] for head in heads])


def moved_answers(agents: Sequence[Split], public: NDArray[np.float32], num_classes: int) -> Answers:
    """Return the answers of linear heads of features whose mean was moved to that of the public images."""
    centre = public.mean(axis=0)
    moved = [Split(own.inputs - own.inputs.mean(axis=0) + centre, own.labels) for own in agents]
    return linear_answers(moved, public, num_classes)


def network_answers(
    agents: Sequence[Split], public: NDArray[np.float32], num_classes: int, *, adapted: bool = False, seed: int = 0
) -> Answers:
    """Return the answers of networks with one hidden layer, fitted to the public images too where it is asked for."""
    dimension, longest = public.shape[1], max(map(len, agents))

    def network() -> nn.Module:
        layers = nn.Sequential(nn.Linear(dimension, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, num_classes))
        return DomainAdversarial(layers, hidden=HIDDEN) if adapted else layers

    # Features of norm 1 are small numbers; at this scale the starting weights fit them.
    scale = float(np.sqrt(dimension))
    rows = torch.from_numpy(np.stack([np.resize(own.inputs, (longest, dimension)) for own in agents])) * scale
    labels = torch.from_numpy(np.stack([np.resize(own.labels, longest) for own in agents]))
    shown = torch.from_numpy(public) * scale
    return answers_of(network, rows, labels, shown, training=TRAINING, sizes=[len(own) for own in agents], seed=seed)


LEARNERS: Final[Mapping[str, Callable[[Sequence[Split], NDArray[np.float32], int], Answers]]] = {
    "linear head": linear_answers,
    "linear head, mean moved to the public images": moved_answers,
    "one hidden layer": network_answers,
    "one hidden layer, adapted to the public images": partial(network_answers, adapted=True),
}


def bench_learners(
    *, data: Path | None = None, full: bool = False, progress: ProgressCallback = silent
) -> list[BenchRow]:
    """Return what agents say of public images, by learner; not `full`: one seed, and a fifth of the digits' agents."""
    root = data_folder(data)
    seeds, share = (SEEDS, 1) if full else (SEEDS[:1], 5)
    cases = {name: [made(root, seed, share) for seed in seeds] for name, made in DIGITS.items()}
    shards = embed_domains(root, progress, "efficientnet-lite0")
    photos = {domain: split_of(shard) for domain, shard in shards.items()}
    for server in DOMAINS:
        agents = [own for domain, own in photos.items() if domain != server]
        cases[f"Office-Caltech10, {server}"] = [(agents, photos[server])]
    rows: list[BenchRow] = []
    for case in in_turn(progress, "Learners", list(cases)):
        for method, answers in LEARNERS.items():
            found: dict[str, list[float]] = {RIGHT: [], ALONE: []}
            for agents, public in cases[case]:
                predicted = answers(agents, public.inputs, 10).argmax(axis=2)
                most = np.eye(10)[predicted].sum(axis=0).argmax(axis=1)
                found[RIGHT].append(100 * float((most == public.labels).mean()))
                found[ALONE].append(100 * float((predicted == public.labels).mean()))
            told = {
                "agents": len(cases[case][0][0]),
                "seeds": list(seeds),
                "hidden": HIDDEN,
                "training": repr(TRAINING),
            }
            rows += [mean_row(case, method, metric, values, settings=told) for metric, values in found.items()]
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
