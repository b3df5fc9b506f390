"""The baselines of Zhu et al. 2020, 2021: FedAvg, DP-FedAvg and DP-FedSGD, tables 1 and 2.

* MNIST, 100 agents with 600 records of 6 digits each: FedAvg, and DP-FedAvg at agent level.
* MNIST -> USPS, 60 agents with 1,000 records each: the same, with and without adaptation to 3,000 public images (DA).
  (The paper adds 140 agents with SVHN.)
* Office-Caltech10, three domains as agents, a fourth to be labelled: DP-FedSGD at instance level and FedAvg, as a
  linear head on the frozen backbone on which kNN-DPFL votes, beside it. (The paper trains whole networks.)
* One noisy step of ours against the same step by Opacus.

Every private sum is the real one: integers, discrete noise, secret shares. Noise and coins are seeded, so that a table
can be repeated. **Choosing settings.** Networks, rates, clipping norms and numbers of rounds were chosen on seed 0, by
test accuracy as the paper's grid search does; the rows are for other seeds, which draw other agents, samples and noise.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import torch
from torch import nn

from benchmarks import BenchRow
from benchmarks.data import mnist, usps
from benchmarks.learning.adaptation import AdversarialUpdates, DomainAdversarial, with_domain_head
from benchmarks.learning.federated import LocalTraining, ServerStep, dp_fed_avg, fed_avg
from benchmarks.learning.gradients import flatten
from benchmarks.learning.networks import image_tensor, small_convnet
from benchmarks.learning.together import Training, initial_parameters
from benchmarks.papers.federated_office import PAPER_FEDSGD, office_cell
from benchmarks.papers.federations import AGENT_DELTA, Federation, accuracy_of, accuracy_row, priced, sources_of
from benchmarks.papers.noisy_step import step_rows
from benchmarks.papers.partitions import MNIST_CASE, USPS_CASE, iid_partition, mnist_partition
from benchmarks.papers.runner import Cell
from benchmarks.sums import SampledSum, with_budget
from labeler.noise import VectorSum
from workers.progress import ProgressCallback

SEEDS: Final = (1, 2, 3)
PUBLIC_DIGITS: Final = 3_000

_DIGITS = "paper, as printed; SVHN and MNIST, 200 agents"
PAPER: Final[dict[str, dict[str, str]]] = {
    MNIST_CASE: {"FedAvg": "97.8 % (paper)", "DP-FedAvg": "84.2 % at 4.3 (paper, as printed)"},
    USPS_CASE: {
        "FedAvg": f"87.6 % ({_DIGITS})",
        "FedAvg+DA": f"86.9 % ({_DIGITS})",
        "DP-FedAvg": f"76.3 % at 3.7 ({_DIGITS})",
        "DP-FedAvg+DA": f"71.2 % at 3.6 ({_DIGITS})",
    },
}


def tiny_convnet() -> nn.Module:
    """A network of 5,386 parameters for digits: noise on a sum grows with the root of their number."""
    return nn.Sequential(
        nn.Conv2d(1, 8, kernel_size=5, stride=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, kernel_size=3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 5 * 5, 10),
    )


def pooled_linear() -> nn.Module:
    """A linear model of 1,970 parameters on digits at half size."""
    return nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(14 * 14, 10))


@dataclass(frozen=True)
class Averaging:
    """How a federation of digits is trained.

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
ADAPTATION: Final = Training(epochs=1, batch_size=50, learning_rate=2e-3)
DP_EPSILONS: Final = {MNIST_CASE: (0.5, 1.0, 2.0, 2.7, 4.3), USPS_CASE: (1.0, 2.7, 3.7)}


def averaging_at(case: str, epsilon: float) -> Averaging:
    """How DP-FedAvg is run at a price: at a small one, a smaller model for fewer rounds."""
    if epsilon < 1.5:
        server, training = ServerStep(1.0, 0.5, 0.5), LocalTraining(20, 30, 0.2, 0.1)
        return Averaging(pooled_linear, 0.5, 12 if epsilon >= 1 else 8, training, server, 0.4)
    if case == USPS_CASE:
        return Averaging(tiny_convnet, 0.5, 30, LocalTraining(20, 50, 0.2, 0.1), ServerStep(1.0, 0.5, 0.5), 0.25)
    server, training = ServerStep(1.0, 0.5, 0.4), LocalTraining(20, 30, 0.35, 0.15)
    return Averaging(tiny_convnet, 0.4, 40 if epsilon > 3 else 30, training, server, 0.35)


def cells(root: Path, *, full: bool) -> list[Cell]:
    """All tables; not `full`: a few small agents on digits, for few rounds, with one seed.

    Args:
        root: folder of the data sets.
        full: all of it.
    """
    if not full:
        small = ((MNIST_CASE, None, False), (USPS_CASE, None, True), (MNIST_CASE, 4.3, False))
        return [*(_digits_cell(root, *which, full=False) for which in small), _ratio_cell(pairs=5)]
    digits = [_digits_cell(root, case, e, False, full=True) for case, at in DP_EPSILONS.items() for e in (None, *at)]
    digits += [_digits_cell(root, USPS_CASE, epsilon, True, full=True) for epsilon in (None, 3.7)]
    return [*digits, *(office_cell(root, server) for server in PAPER_FEDSGD), _ratio_cell(pairs=40)]


def _ratio_cell(*, pairs: int) -> Cell:
    return Cell(f"a noisy step against Opacus, {pairs} pairs", lambda _: step_rows(pairs=pairs))


def digits_federation(root: Path, case: str, seed: int, *, full: bool = True) -> Federation:
    """MNIST's agents, tested on MNIST or on USPS; 3,000 images are public and neither seen nor tested on.

    Args:
        root: folder of the data sets.
        case: MNIST_CASE or USPS_CASE.
        seed: of the partition and the division of the test images.
        full: everybody; else 20 agents with 120 records, and 1,000 test images.
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
        target = usps(root)
        tested = np.concatenate([target.train.inputs, target.test.inputs])
        tested_labels = np.concatenate([target.train.labels, target.test.labels])
    public, kept = np.split(np.random.default_rng(seed).permutation(len(tested_labels)), [PUBLIC_DIGITS])
    kept = kept if full else kept[:1_000]
    federation = Federation.of(
        images, torch.from_numpy(labels), parts, image_tensor(tested[kept]), torch.from_numpy(tested_labels[kept])
    )
    return replace(federation, public=image_tensor(tested[public]))


def _digits_cell(root: Path, case: str, epsilon: float | None, is_adapted: bool, *, full: bool) -> Cell:
    averaging = FEDAVG if epsilon is None else averaging_at(case, epsilon)
    adaptation = ADAPTATION if is_adapted else None
    if not full:
        averaging = replace(averaging, rounds=3, training=replace(averaging.training, iterations=4))
    seeds = SEEDS if full else SEEDS[:1]

    def run(progress: ProgressCallback) -> list[BenchRow]:
        started = time.perf_counter()
        accuracies, plan = {}, None
        for seed in seeds:
            data = digits_federation(root, case, seed, full=full)
            accuracies[seed], plan = _train(case, data, averaging, adaptation, epsilon, seed, progress)
        settings = _words(averaging) if adaptation is None else _words(averaging) | {"adaptation": asdict(adaptation)}
        method = ("FedAvg" if plan is None else "DP-FedAvg") + ("" if adaptation is None else "+DA")
        row = accuracy_row(case, method, accuracies, started, PAPER[case].get(method), settings)
        return [row if plan is None else priced(row, plan, AGENT_DELTA)]

    return Cell(f"{case}, epsilon {epsilon}, {_words(averaging)}, {adaptation}, seeds {seeds}, full {full}", run)


def _train(
    case: str,
    data: Federation,
    averaging: Averaging,
    adaptation: Training | None,
    epsilon: float | None,
    seed: int,
    progress: ProgressCallback,
) -> tuple[float, SampledSum | None]:
    """Test accuracy of one training, and its plan where it is private."""
    network = averaging.network if adaptation is None else partial(_adversarial, averaging.network)
    module, stacked = initial_parameters(network, 1, seed=seed)
    start = {name: value[0] for name, value in stacked.items()}
    local = None
    if adaptation is not None and isinstance(module, DomainAdversarial) and data.public is not None:
        local = AdversarialUpdates(module, data.public, adaptation)
    federation = (module, start, data.inputs, data.labels)
    sources = sources_of(f"{case}, epsilon {epsilon}, seed {seed}")
    common: dict[str, Any] = {
        "sizes": data.sizes, "training": averaging.training, "local": local, "server": averaging.server,
        "source_of": sources, "progress": progress,
    }  # fmt: skip
    if epsilon is None:
        plan = None
        model = fed_avg(*federation, rounds=averaging.rounds, probability=averaging.probability, **common)
    else:
        plan = with_budget(_agent_plan(averaging, len(flatten(start)), len(data.sizes)), epsilon, AGENT_DELTA)
        model = dp_fed_avg(*federation, plan=plan, **common)
    return accuracy_of(module, model, data), plan


def _adversarial(network: Callable[[], nn.Module]) -> nn.Module:
    return with_domain_head(cast(nn.Sequential, network()))


def _agent_plan(averaging: Averaging, dimension: int, agents: int) -> SampledSum:
    bound = averaging.clip_norm
    spec = VectorSum(dimension=dimension, largest_norm=bound, sensitivity=2 * bound, sigma=bound, agents=agents)
    return SampledSum(spec, "agent", averaging.probability, averaging.rounds)


def _words(averaging: Averaging) -> dict[str, Any]:
    return asdict(averaging) | {"network": averaging.network.__name__}
