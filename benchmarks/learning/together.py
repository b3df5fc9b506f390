"""Many models of one architecture, each trained on its own agent's records, all in the same steps.

Parameters carry a leading axis over agents, and one step of all agents is one forward and one backward pass of the
whole batch (`torch.func.functional_call` under `vmap`, which turns N convolutions into one grouped one). The loss is a
sum of one term per agent and the optimizer works element by element, so no agent's model depends on another's.

The price of the votes relies on that independence (`labeler.methods`: leaving one agent out changes no other ballot).
So each agent has its own seed for order and augmentation: training agent i together with others gives the model that
training it alone gives, up to rounding. Outside simulations each agent trains at its own site, alone.

`moved` shifts, turns or scales small images a little: the digit is still that digit. The random numbers are an
argument, not drawn there. A caller that trains many agents at once draws each agent's numbers from that agent's own
stream. So one agent's model does not depend on which others are there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn import functional

from labeler.errors import InvalidSetting
from workers.progress import ProgressCallback, silent

Parameters = dict[str, Tensor]
"""Named weights of N models: each of shape (N, ...)."""

Model = TypeVar("Model", bound=nn.Module)

Loss = Callable[[Parameters, Tensor, Tensor, float], Tensor]

_BLOCK_ANSWERS = 2000
"""Models times inputs answered at once: more would exceed the processor's caches."""


@dataclass(frozen=True)
class Training:
    """The training settings of every agent.

    Attributes:
        epochs: passes over the largest agent's records.
        batch_size: records per step and agent.
        learning_rate: of Adam at the start; it falls to zero along a cosine.
        weight_decay: of AdamW.
        jitter: how far images are moved in each pass; None shows them as they are.
    """

    epochs: int = 20
    batch_size: int = 32
    learning_rate: float = 2e-3
    weight_decay: float = 1e-3
    jitter: Jitter | None = None


def initial_parameters(factory: Callable[[], Model], num_models: int, *, seed: int) -> tuple[Model, Parameters]:
    """Return N models with separate starting weights, and a module that says how to apply them.

    Args:
        factory: makes one model from torch's global generator, which is left as it was.
        num_models: N.
        seed: of the starting weights.

    Returns:
        One of the modules (its own weights are not used) and the stacked parameters.
    """
    models = []
    with torch.random.fork_rng(devices=[]):
        for number in range(num_models):
            torch.manual_seed(stream(seed, number))
            models.append(factory())
    parameters, buffers = stack_module_state(models)
    if buffers:
        raise InvalidSetting(f"a module trained together has no buffers such as running means, found {sorted(buffers)}")
    return models[0], {name: value.detach() for name, value in parameters.items()}


def train_together(
    module: nn.Module,
    parameters: Parameters,
    inputs: Tensor,
    labels: Tensor,
    *,
    training: Training,
    seeds: Sequence[int],
    sizes: Sequence[int] | None = None,
    progress: ProgressCallback = silent,
) -> Parameters:
    """Train N models, each on its own records, by AdamW.

    All agents take equally many steps: one with fewer records than the largest passes over them more often, each time
    in a new order.

    Args:
        module: as of `initial_parameters`.
        parameters: starting weights; left as they are.
        inputs: float, shape (N, n, ...): every agent's records, the first `sizes[i]` of which count.
        labels: int64, shape (N, n).
        training: how.
        seeds: one per agent, of its order and of its jitter.
        sizes: records of each agent, from 1 to n; n for all if absent.

    Returns:
        Trained parameters.
    """

    def loss(weights: Parameters, shown: Tensor, wanted: Tensor, _done: float) -> Tensor:
        logits = apply_together(module, weights, shown)
        # The mean over an agent's batch, the sum over agents: every agent's gradient is its own.
        return functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(0, 1), reduction="sum") / shown.shape[1]

    return optimize(
        parameters, inputs, labels, loss=loss, training=training, seeds=seeds, sizes=sizes, progress=progress
    )


def optimize(
    parameters: Parameters,
    inputs: Tensor,
    labels: Tensor,
    *,
    loss: Loss,
    training: Training,
    seeds: Sequence[int],
    sizes: Sequence[int] | None = None,
    progress: ProgressCallback = silent,
) -> Parameters:
    """Run the loop of `train_together` with any loss that is a sum of one term per agent; arguments as there.

    The loss is of (parameters, inputs and labels of one batch of every agent, share of the training that is done).
    """
    sizes = [inputs.shape[1]] * len(seeds) if sizes is None else sizes
    trained = {name: value.clone().requires_grad_() for name, value in parameters.items()}
    weights = list(trained.values())
    optimizer = torch.optim.AdamW(weights, lr=training.learning_rate, weight_decay=training.weight_decay, foreach=True)
    per_epoch = math.ceil(inputs.shape[1] / training.batch_size)
    total = training.epochs * per_epoch
    for step, (rows, numbers) in enumerate(batches(training, seeds, sizes, inputs.shape[1])):
        for group in optimizer.param_groups:
            group["lr"] = training.learning_rate * 0.5 * (1 + math.cos(math.pi * step / total))
        shown, wanted = of_each(inputs, rows), of_each(labels, rows)
        if training.jitter is not None:
            shown = moved(shown.flatten(0, 1), numbers.flatten(0, 1), training.jitter).reshape(shown.shape)
        gradients = torch.autograd.grad(loss(trained, shown, wanted, step / total), weights)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient
        optimizer.step()
        if step % per_epoch == per_epoch - 1:
            progress("Agents train", step + 1, total)
    return {name: value.detach() for name, value in trained.items()}


def predict_together(module: nn.Module, parameters: Parameters, inputs: Tensor) -> Tensor:
    """Return the logits of N models for the same inputs.

    Args:
        module: as of `initial_parameters`.
        parameters: of N models.
        inputs: float, shape (n, ...).

    Returns:
        Logits, float, shape (N, n, num_classes).
    """
    apply = vmap(lambda weights, shown: functional_call(module, weights, (shown,)), in_dims=(0, None))
    block = max(1, _BLOCK_ANSWERS // len(next(iter(parameters.values()))))
    with torch.no_grad():
        return torch.cat([apply(parameters, shown) for shown in torch.split(inputs, block)], dim=1)


def apply_together(module: nn.Module, parameters: Parameters, inputs: Tensor) -> Tensor:
    """Apply each of N models to its own inputs of shape (N, batch, ...): logits of shape (N, batch, num_classes)."""
    logits: Tensor = vmap(lambda weights, shown: functional_call(module, weights, (shown,)))(parameters, inputs)
    return logits


def of_each(values: Tensor, rows: Tensor) -> Tensor:
    """Return each agent's chosen rows: values (N, n, ...) and rows (N, batch) give (N, batch, ...)."""
    return values[torch.arange(len(rows))[:, None], rows]


def batches(
    training: Training, seeds: Sequence[int], sizes: Sequence[int], longest: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield every step's rows, int64 of shape (N, batch), and numbers for the jitter, (N, batch, NUMBERS) in [-1, 1].

    An agent's rows and numbers come from its own seed and its own size, whichever others train.
    """
    generators = [torch.Generator().manual_seed(stream(seed, 0)) for seed in seeds]
    for _ in range(training.epochs):
        orders = [_passes(size, longest, generator) for size, generator in zip(sizes, generators, strict=True)]
        numbers = [torch.rand((longest, NUMBERS), generator=generator) * 2 - 1 for generator in generators]
        yield from zip(
            torch.split(torch.stack(orders), training.batch_size, dim=1),
            torch.split(torch.stack(numbers), training.batch_size, dim=1),
            strict=True,
        )


def _passes(size: int, longest: int, generator: torch.Generator) -> Tensor:
    orders = [torch.randperm(size, generator=generator) for _ in range(math.ceil(longest / size))]
    return torch.cat(orders)[:longest]


def stream(*words: int) -> int:
    """Return a seed for torch's generators that differs for every sequence of words."""
    return int(np.random.SeedSequence(list(words)).generate_state(1, np.uint64)[0] >> 1)


NUMBERS: Final = 5
"""Random numbers that moving one image takes."""


@dataclass(frozen=True)
class Jitter:
    """The amounts by which an image may be moved; each amount 0 turns its change off.

    Attributes:
        shift: in plus or minus this share of the side, down and right.
        rotation_degrees: in plus or minus this.
        zoom: scale factor in [1 - zoom, 1 + zoom].
        shear: shear coefficient in plus or minus this.
    """

    shift: float = 0.08
    rotation_degrees: float = 12.0
    zoom: float = 0.1
    shear: float = 0.15


def moved(images: Tensor, numbers: Tensor, jitter: Jitter) -> Tensor:
    """Move every image as its numbers say; the border repeats into what comes in from outside.

    Args:
        images: float, shape (n, channels, height, width).
        numbers: float in [-1, 1], shape (n, NUMBERS): shift right, shift down, rotation, zoom, shear.
        jitter: the amounts that 1 means.

    Returns:
        Images of the same shape.
    """
    right, down, turn, scale, slant = numbers.T
    angle = math.pi / 180 * jitter.rotation_degrees * turn
    zoom, shear = 1 + jitter.zoom * scale, jitter.shear * slant
    cosine, sine = angle.cos() / zoom, angle.sin() / zoom
    # The grid spans [-1, 1], so a share of the side is twice as much in its units.
    matrix = torch.stack(
        [cosine, shear * cosine - sine, 2 * jitter.shift * right, sine, shear * sine + cosine, 2 * jitter.shift * down],
        dim=1,
    ).reshape(-1, 2, 3)
    grid = functional.affine_grid(matrix, list(images.shape), align_corners=False)
    return functional.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)
