"""The baselines of Zhu et al. 2020, 2021: FedAvg, DP-FedAvg and DP-FedSGD, tables 1 and 2.

* MNIST, 100 agents with 600 records of 6 digits each: FedAvg, and DP-FedAvg at agent level.
* MNIST -> USPS, 60 agents with 1,000 records each: the same. (The paper adds 140 agents with SVHN, and the variants
  FedAvg+DA and DP-FedAvg+DA, adapted to the public images, which this table leaves out.)
* Office-Caltech10, three domains as agents, a fourth to be labeled: DP-FedSGD at instance level and FedAvg. Both train
  a linear head on the frozen backbone on which kNN-DPFL votes, and are compared with it. (The paper trains whole
  networks.)

Every private sum is the real one: integers, discrete noise, secret shares. Noise and coins are seeded, so that a table
can be repeated. **Choosing settings.** Networks, rates, clipping norms and numbers of rounds were chosen on seed 0, by
test accuracy as the paper's grid search does. The rows are for other seeds, which draw other agents, samples and noise.

**Office-Caltech10 by gradients** (table 2 of 2021). Of the domain that is to be labeled 70 %
of the images are public, and 30 % are kept for the test. Splits and frozen backbone are those of `labeler bench
office-caltech`. A
head on frozen features is what the noise of DP-FedSGD can bear. Steps, rates and clipping norm were chosen with amazon
and caltech10 as servers; the rows are for webcam and dslr.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import BenchRow, mean_row
from benchmarks.accuracy.office_caltech import DOMAINS, Arena, Setting, data_folder, embed_domains, office_split
from benchmarks.data import mnist, usps
from benchmarks.learning.federated import (
    LocalTraining,
    OpenRounds,
    ServerStep,
    SourceOf,
    dp_fed_sgd,
    fed_avg,
    plan_fed_sgd,
)
from benchmarks.learning.gradients import flatten
from benchmarks.learning.networks import (
    image_tensor,
    small_convnet,
)
from benchmarks.learning.together import Parameters, initial_parameters
from benchmarks.papers import Cell
from benchmarks.papers.partitions import MNIST_CASE, USPS_CASE, Rows, iid_partition, mnist_partition
from benchmarks.sums import SampledSum, with_budget
from feature_store.shard import Shard
from labeler.noise import VectorSum
from labeler.randomness import seeded_source
from workers.progress import ProgressCallback

SEEDS: Final = (1, 2, 3)
PUBLIC_DIGITS: Final = 3_000

_DIGITS = "paper, as printed; SVHN and MNIST, 200 agents"
PAPER: Final[dict[str, dict[str, str]]] = {
    MNIST_CASE: {"FedAvg": "97.8 % (paper)", "DP-FedAvg": "84.2 % at 4.3 (paper, as printed)"},
    USPS_CASE: {
        "FedAvg": f"87.6 % ({_DIGITS})",
        "DP-FedAvg": f"76.3 % at 3.7 ({_DIGITS})",
    },
}


def tiny_convnet() -> nn.Module:
    """Return a network of 5,386 parameters for digits: noise on a sum grows with the root of their number."""
    return nn.Sequential(
        nn.Conv2d(1, 8, kernel_size=5, stride=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, kernel_size=3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 5 * 5, 10),
    )


def pooled_linear() -> nn.Module:
    """Return a linear model of 1,970 parameters on digits at half size."""
    return nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(14 * 14, 10))


@dataclass(frozen=True)
class Averaging:
    """The training of a federation of digits.

    Attributes:
        network: of every agent.
        probability: q, of an agent to be sampled in a round.
        rounds: T.
        training: local.
        server: how the global model moves.
        clip_norm: S; not used without privacy.
    """

    network: Callable[[], nn.Module]
    probability: float
    rounds: int
    training: LocalTraining
    server: ServerStep
    clip_norm: float = 1.0


FEDAVG: Final = Averaging(small_convnet, 0.1, 40, LocalTraining(20, 30, 0.2, 0.05), ServerStep())
DP_EPSILONS: Final = {MNIST_CASE: (0.5, 1.0, 2.0, 2.7, 4.3), USPS_CASE: (1.0, 2.7, 3.7)}


def averaging_at(case: str, epsilon: float) -> Averaging:
    """Return the settings of DP-FedAvg at a price: at a small one, a smaller model for fewer rounds."""
    if epsilon < 1.5:
        server, training = ServerStep(1.0, 0.5, 0.5), LocalTraining(20, 30, 0.2, 0.1)
        return Averaging(pooled_linear, 0.5, 12 if epsilon >= 1 else 8, training, server, 0.4)
    if case == USPS_CASE:
        return Averaging(tiny_convnet, 0.5, 30, LocalTraining(20, 50, 0.2, 0.1), ServerStep(1.0, 0.5, 0.5), 0.25)
    server, training = ServerStep(1.0, 0.5, 0.4), LocalTraining(20, 30, 0.35, 0.15)
    return Averaging(tiny_convnet, 0.4, 40 if epsilon > 3 else 30, training, server, 0.35)


def cells(root: Path, *, full: bool) -> list[Cell]:
    """Return all tables; not `full`: a few small agents on digits, for few rounds, with one seed, and one server."""
    if not full:
        small: tuple[tuple[str, float | None], ...] = ((MNIST_CASE, None), (USPS_CASE, None), (MNIST_CASE, 4.3))
        return [*(_digits_cell(root, *which, full=False) for which in small), office_cell(root, "webcam", splits=1)]
    digits = [_digits_cell(root, case, e, full=True) for case, at in DP_EPSILONS.items() for e in (None, *at)]
    return [*digits, *(office_cell(root, server) for server in PAPER_FEDSGD)]


def digits_federation(root: Path, case: str, seed: int, *, full: bool = True) -> Federation:
    """Return MNIST's agents, tested on MNIST or on USPS; 3,000 images are public and neither seen nor tested on.

    Not `full`, they are 20 agents with 120 records, and 1,000 test images.
    """
    source = mnist(root)
    labels, images = source.train.labels, image_tensor(source.train.inputs)
    if case == MNIST_CASE:
        parts = (
            mnist_partition(labels, seed=seed) if full else mnist_partition(labels, agents=20, records=120, seed=seed)
        )
        tested, tested_labels = source.test.inputs, source.test.labels
    else:
        parts = iid_partition(labels, clients=60, records=1_000, seed=seed)
        parts = parts if full else [part[:120] for part in parts[:20]]
        target = usps(root).whole
        tested, tested_labels = target.inputs, target.labels
    kept = np.random.default_rng(seed).permutation(len(tested_labels))[PUBLIC_DIGITS:]
    kept = kept if full else kept[:1_000]
    return Federation.of(
        images, torch.from_numpy(labels), parts, image_tensor(tested[kept]), torch.from_numpy(tested_labels[kept])
    )


def _digits_cell(root: Path, case: str, epsilon: float | None, *, full: bool) -> Cell:
    averaging = FEDAVG if epsilon is None else averaging_at(case, epsilon)
    if not full:
        averaging = replace(averaging, rounds=3, training=replace(averaging.training, iterations=4))
    seeds = SEEDS if full else SEEDS[:1]

    def run(progress: ProgressCallback) -> list[BenchRow]:
        started = time.perf_counter()
        accuracies, plan = {}, None
        for seed in seeds:
            data = digits_federation(root, case, seed, full=full)
            accuracies[seed], plan = train_digits(case, data, averaging, epsilon, seed, progress)
        method = "FedAvg" if plan is None else "DP-FedAvg"
        row = accuracy_row(case, method, accuracies, started, PAPER[case].get(method), _words(averaging))
        return [row if plan is None else priced(row, plan, AGENT_DELTA)]

    return Cell(f"{case}, epsilon {epsilon}, {_words(averaging)}, seeds {seeds}, full {full}", run)


def train_digits(
    case: str,
    data: Federation,
    averaging: Averaging,
    epsilon: float | None,
    seed: int,
    progress: ProgressCallback,
) -> tuple[float, SampledSum | None]:
    """Return the test accuracy of one training, and its plan where it is private."""
    module, stacked = initial_parameters(averaging.network, 1, seed=seed)
    start = {name: value[0] for name, value in stacked.items()}
    federation = (module, start, data.inputs, data.labels)
    sources = sources_of(f"{case}, epsilon {epsilon}, seed {seed}")
    common: dict[str, Any] = {
        "sizes": data.sizes, "training": averaging.training, "server": averaging.server,
        "source_of": sources, "progress": progress,
    }  # fmt: skip
    plan = None
    if epsilon is not None:
        plan = with_budget(_agent_plan(averaging, len(flatten(start)), len(data.sizes)), epsilon, AGENT_DELTA)
    model = fed_avg(*federation, plan=plan or OpenRounds(averaging.rounds, averaging.probability), **common)
    return accuracy_of(module, model, data), plan


def _agent_plan(averaging: Averaging, dimension: int, agents: int) -> SampledSum:
    bound = averaging.clip_norm
    spec = VectorSum(dimension=dimension, largest_norm=bound, sensitivity=2 * bound, sigma=bound, agents=agents)
    return SampledSum(spec, "agent", averaging.probability, averaging.rounds)


def _words(averaging: Averaging) -> dict[str, Any]:
    return asdict(averaging) | {"network": averaging.network.__name__}


ACCURACY: Final = "test accuracy, %"
AGENT_DELTA, INSTANCE_DELTA = 1e-3, 1e-4


@dataclass(frozen=True, eq=False)
class Federation:
    """Agents' records, padded to one length, the images that the model is tested on."""

    inputs: Tensor
    labels: Tensor
    sizes: list[int]
    test: Tensor
    test_labels: Tensor

    @staticmethod
    def of(inputs: Tensor, labels: Tensor, parts: Sequence[Rows], test: Tensor, test_labels: Tensor) -> Federation:
        return Federation(*padded(inputs, labels, parts), test, test_labels)


def padded(inputs: Tensor, labels: Tensor, parts: Sequence[Rows]) -> tuple[Tensor, Tensor, list[int]]:
    """Return agents' records and labels, padded to the largest agent, and how many of them count."""
    longest = max(map(len, parts))
    rows = torch.from_numpy(np.stack([np.resize(part, longest) for part in parts]))
    return inputs[rows], labels[rows], [len(part) for part in parts]


def sources_of(prefix: str) -> SourceOf:
    """Return seeded sources for a simulation; rows made with them can be repeated."""
    return lambda purpose: seeded_source(f"{prefix}: {purpose}".encode())


def accuracy_of(module: nn.Module, model: Parameters, data: Federation) -> float:
    """Return the share of the test images that a model labels right, in percent."""
    with torch.no_grad():
        logits = torch.cat([torch.func.functional_call(module, model, (part,)) for part in torch.split(data.test, 500)])
    return 100 * float((logits.argmax(1) == data.test_labels).double().mean())


def accuracy_row(
    case: str,
    method: str,
    accuracies: Mapping[int, float],
    started: float,
    reference: str | None,
    settings: Mapping[str, Any],
) -> BenchRow:
    """Return the mean and deviation of a method's accuracies, by seed; no guarantee."""
    return mean_row(
        case,
        method,
        ACCURACY,
        accuracies.values(),
        reference=reference,
        seconds=time.perf_counter() - started,
        settings={**settings, "seeds": list(accuracies)},
    )


def priced(row: BenchRow, plan: SampledSum, delta: float) -> BenchRow:
    """Return the row with the certified price of the rounds it was trained in."""
    told = {
        "noise_multiplier": plan.noise_multiplier,
        "as_in_paper_epsilon": plan.as_in_paper_epsilon(delta),
    }
    return replace(row, epsilon=plan.epsilon(delta), delta=delta, level=plan.level, settings={**row.settings, **told})


@dataclass(frozen=True)
class NoisySteps:
    """The settings of DP-FedSGD on Office-Caltech10; chosen on amazon and caltech10 as servers."""

    probability: float = 0.2
    rounds: int = 30
    clip_norm: float = 0.5
    learning_rate: float = 10.0
    momentum: float = 0.5
    averaged: float = 0.3


OFFICE_EPSILONS: Final = (0.5, 1.0, 2.0, 4.0)
OFFICE_RECORDS: Final = {"amazon": 958, "caltech10": 1123, "webcam": 295, "dslr": 157}
"""Images per domain, as the paper publishes them (table 5): public numbers, by which sums are divided."""

MOST_RECORDS: Final = 1_200
AXES: Final = 64
SPLITS: Final = 5
ROUNDS: Final = 30
"""Rounds of FedAvg."""

PAPER_FEDSGD = {"webcam": "25.8 % at 4.0 (paper, as printed)", "dslr": "42.7 % at 3.9 (paper, as printed)"}
PAPER_OFFICE_FEDAVG = {"webcam": "96.5 % (paper, ResNet-50)", "dslr": "97.8 % (paper, ResNet-50)"}


def office_cell(root: Path, server: str, splits: int = SPLITS) -> Cell:
    """Return the cell of FedAvg, DP-FedSGD and kNN-DPFL for one server, at several prices."""
    settings = NoisySteps()

    def run(progress: ProgressCallback) -> list[BenchRow]:
        shards = embed_domains(data_folder(root), progress)
        rows = gradient_rows(shards, server, range(splits), OFFICE_EPSILONS, progress=progress)
        arena, voting = Arena(shards), Setting("knn", 60, 20)
        votes = [arena.measure(server, voting, splits=splits, draws=1, epsilon=epsilon) for epsilon in OFFICE_EPSILONS]
        return rows + [replace(row, case=office_case(server), metric=ACCURACY) for row in votes]

    return Cell(f"{office_case(server)}, {settings}, axes {AXES}, epsilons {OFFICE_EPSILONS}, {splits} splits", run)


def gradient_rows(
    shards: Mapping[str, Shard],
    server: str,
    splits: Sequence[int],
    epsilons: Sequence[float],
    *,
    progress: ProgressCallback,
) -> list[BenchRow]:
    """Measure FedAvg, and DP-FedSGD at every price on features as they are and on public axes."""
    rows = [_fed_avg_row(shards, server, splits, progress)]
    for axes in (None, AXES):
        rows += [_fed_sgd_row(shards, server, splits, axes, epsilon, progress) for epsilon in epsilons]
    return rows


def office_federation(shards: Mapping[str, Shard], server: str, split: int, axes: int | None) -> Federation:
    """Return three domains' features as agents, and 30 % of the fourth's as test.

    Args:
        split: seed of the division into public and test; the same images as kNN-DPFL is tested on.
        axes: features are centered on the server's public images and projected to that many of their principal axes,
            scaled to a mean squared norm of 1; None leaves them as they are. Either way the map depends on public
            images alone.
    """
    images = {name: shard.features.astype(np.float32) / 2048 for name, shard in shards.items()}
    labels = {name: torch.from_numpy(np.asarray(shard.labels).astype(np.int64)) for name, shard in shards.items()}
    by_name = np.argsort(np.array(shards[server].sources), kind="stable")
    public, tested = (by_name[rows] for rows in office_split(len(by_name), server, split))
    if axes is not None:
        mean = images[server][public].mean(0)
        basis = np.linalg.svd(images[server][public] - mean, full_matrices=False)[2][:axes].T
        basis = basis / np.sqrt(np.square((images[server][public] - mean) @ basis).sum(1).mean())
        # One record at a time: a product of many rows may round a row differently when another one leaves.
        images = {name: np.stack([(row - mean) @ basis for row in rows]) for name, rows in images.items()}
    others = [name for name in DOMAINS if name != server]
    starts = np.cumsum([0, *(len(images[name]) for name in others)])
    return Federation.of(
        torch.from_numpy(np.concatenate([images[name] for name in others])),
        torch.cat([labels[name] for name in others]),
        [np.arange(first, last) for first, last in itertools.pairwise(starts)],
        torch.from_numpy(images[server][tested]),
        labels[server][torch.from_numpy(tested)],
    )


def _fed_avg_row(
    shards: Mapping[str, Shard], server: str, splits: Sequence[int], progress: ProgressCallback
) -> BenchRow:
    started, accuracies = time.perf_counter(), {}
    for split in splits:
        data = office_federation(shards, server, split, None)
        module, start = blank_head(data)
        model = fed_avg(
            module, start, data.inputs, data.labels, sizes=data.sizes, plan=OpenRounds(ROUNDS, 1.0),
            training=LocalTraining(20, 32, 5.0), source_of=sources_of(f"FedAvg {server} {split}"), progress=progress,
        )  # fmt: skip
        accuracies[split] = accuracy_of(module, model, data)
    settings = {"network": "linear head", "rounds": ROUNDS}
    return accuracy_row(office_case(server), "FedAvg", accuracies, started, PAPER_OFFICE_FEDAVG.get(server), settings)


def _fed_sgd_row(
    shards: Mapping[str, Shard],
    server: str,
    splits: Sequence[int],
    axes: int | None,
    epsilon: float,
    progress: ProgressCallback,
) -> BenchRow:
    started, accuracies, steps = time.perf_counter(), {}, NoisySteps()
    public_records = sum(count for name, count in OFFICE_RECORDS.items() if name != server)
    worlds = {split: office_federation(shards, server, split, axes) for split in splits}
    numbers = len(flatten(blank_head(worlds[splits[0]])[1]))
    plan = plan_fed_sgd(
        epsilon=epsilon, delta=INSTANCE_DELTA, dimension=numbers, agents=len(DOMAINS) - 1,
        most_records=MOST_RECORDS, clip_norm=steps.clip_norm, probability=steps.probability, rounds=steps.rounds,
    )  # fmt: skip
    for split, data in worlds.items():
        module, start = blank_head(data)
        model = dp_fed_sgd(
            start, data.inputs, data.labels, sizes=data.sizes, plan=plan, clip_norm=steps.clip_norm,
            expected_batch=steps.probability * public_records,
            server=ServerStep(steps.learning_rate, steps.momentum, steps.averaged),
            source_of=sources_of(f"DP-FedSGD {server} {split} {epsilon} {axes}"), progress=progress,
        )  # fmt: skip
        accuracies[split] = accuracy_of(module, model, data)
    method = "DP-FedSGD, linear head" + ("" if axes is None else f" on {axes} public principal axes")
    settings = {"network": "linear head", "axes": axes} | asdict(steps)
    row = accuracy_row(office_case(server), method, accuracies, started, PAPER_FEDSGD.get(server), settings)
    return priced(row, plan, INSTANCE_DELTA)


def office_case(server: str) -> str:
    """Return the table's name for a server."""
    return f"Office-Caltech10, {server}"


def blank_head(data: Federation) -> tuple[nn.Module, Parameters]:
    """Return a linear model of ten classes, all zeros."""
    module = nn.Linear(data.inputs.shape[2], 10)
    return module, {name: torch.zeros_like(value) for name, value in module.named_parameters()}
