"""One step of noisy SGD, ours against Opacus: the same network, records and clipping norm, in turns in one process."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks import BenchRow
from benchmarks.learning.gradients import clipped_gradient_sums, flatten, unflatten
from benchmarks.learning.networks import small_convnet
from benchmarks.learning.together import initial_parameters
from labeler.noise import VectorSum
from labeler.randomness import seeded_source


def step_rows(*, pairs: int, batch: int = 64) -> list[BenchRow]:
    """One noisy step of ours, and the median ratio to Opacus of pairs in turns, where Opacus is installed.

    Ours: clipped sums, one discrete Gaussian share on the grid, the step. Opacus: clipped sums, torch's normal noise,
    the step.

    Args:
        pairs: how often both are timed.
        batch: records.
    """
    parameters = sum(value.numel() for value in small_convnet().parameters())
    case = f"a noisy step of {parameters:,} parameters, {batch} records"
    ours = _our_step(batch)
    try:
        theirs = _opacus_step(batch)
    except ImportError:
        theirs = None
    seconds = np.array([[_timed(ours), _timed(theirs) if theirs else math.nan] for _ in range(pairs + 1)])[1:]
    own = BenchRow(case, "ours", "milliseconds", _median_ms(seconds[:, 0]), settings={"pairs": pairs})
    if theirs is None:
        return [replace(own, reference="no ratio: Opacus, a dependency of development, is not installed")]
    ratio = float(np.median(seconds[:, 0] / seconds[:, 1]))
    reference = f"Opacus in the same process: {_median_ms(seconds[:, 1])} ms"
    return [own, BenchRow(case, "ours over Opacus", "time ratio", ratio, reference=reference, settings=own.settings)]


def _our_step(batch: int) -> Callable[[], None]:
    module, stacked = initial_parameters(small_convnet, 1, seed=1)
    model = {name: value[0] for name, value in stacked.items()}
    inputs, labels = _random_batch(batch)
    size, weights = len(flatten(model)), torch.ones(batch)
    spec = VectorSum(dimension=size, largest_norm=batch + 1.0, sensitivity=1.001, sigma=1.0, agents=1)
    source = seeded_source(b"a noisy step")

    def step() -> None:
        nonlocal model
        sums = flatten(clipped_gradient_sums(module, model, inputs, labels, weights, clip_norm=1.0))
        noisy = spec.open(spec.contribution(sums.numpy(), source=source))
        model = unflatten(flatten(model) - torch.from_numpy(0.1 / batch * noisy).float(), model)

    return step


def _opacus_step(batch: int) -> Callable[[], None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = import_module("opacus.grad_sample").GradSampleModule(small_convnet())
        optimizer_class = import_module("opacus.optimizers").DPOptimizer
    optimizer = optimizer_class(
        torch.optim.SGD(module.parameters(), lr=0.1), noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=batch
    )
    inputs, labels = _random_batch(batch)

    def step() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.zero_grad()
            loss: Any = nn.functional.cross_entropy(module(inputs), labels)
            loss.backward()
            optimizer.step()

    return step


def _random_batch(batch: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, 1, 28, 28, generator=generator), torch.randint(0, 10, (batch,), generator=generator)


def _timed(step: Callable[[], None]) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def _median_ms(seconds: NDArray[np.float64]) -> float:
    return round(1e3 * float(np.median(seconds)), 3)
