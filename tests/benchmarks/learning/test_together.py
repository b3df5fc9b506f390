"""Training together is training one after another: same batches, same models, nobody depends on anybody.

What is said of a record depends on that record alone: networks, moved images, edge features.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from benchmarks.learning.networks import DIMENSION, edge_features, image_tensor, linear_head, small_convnet
from benchmarks.learning.together import (
    NUMBERS,
    Jitter,
    Parameters,
    Training,
    batches,
    initial_parameters,
    moved,
    train_together,
)

AGENTS, RECORDS = 3, 24


def _data(dimension: int | None = None) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    shape = (1, 28, 28) if dimension is None else (dimension,)
    return (
        torch.randn((AGENTS, RECORDS, *shape), generator=generator),
        torch.randint(0, 4, (AGENTS, RECORDS), generator=generator),
    )


def _of(parameters: Parameters, agents: Sequence[int]) -> Parameters:
    return {name: value[list(agents)] for name, value in parameters.items()}


def _by_hand(
    module: nn.Module, weights: dict[str, Tensor], inputs: Tensor, labels: Tensor, seed: int, size: int, plan: Training
) -> dict[str, Tensor]:
    """One agent's training as anybody would write it, with torch's own AdamW."""
    weights = {name: value.clone().requires_grad_() for name, value in weights.items()}
    optimizer = torch.optim.AdamW(weights.values(), lr=plan.learning_rate, weight_decay=plan.weight_decay)
    steps = list(batches(plan, [seed], [size], len(inputs)))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=len(steps))
    for rows, _ in steps:
        optimizer.zero_grad()
        functional.cross_entropy(functional_call(module, weights, (inputs[rows[0]],)), labels[rows[0]]).backward()  # type: ignore[no-untyped-call]  # torch does not type it
        optimizer.step()
        schedule.step()
    return {name: value.detach() for name, value in weights.items()}


@pytest.mark.parametrize("dimension", [None, 6])
def test_training_together_equals_training_one_after_another_by_hand(dimension: int | None) -> None:
    inputs, labels = _data(dimension)
    factory = (lambda: small_convnet(4)) if dimension is None else (lambda: linear_head(6, 4))
    module, start = initial_parameters(factory, AGENTS, seed=1)
    plan, seeds, sizes = Training(epochs=2, batch_size=8, learning_rate=1e-3), [11, 12, 13], [24, 10, 3]
    together = train_together(module, start, inputs, labels, training=plan, seeds=seeds, sizes=sizes)
    for agent in range(AGENTS):
        own = {name: value[agent] for name, value in start.items()}
        alone = _by_hand(module, own, inputs[agent], labels[agent], seeds[agent], sizes[agent], plan)
        for name, value in alone.items():
            torch.testing.assert_close(together[name][agent], value, atol=2e-5, rtol=1e-3)


def test_an_agents_model_depends_on_its_own_records_and_seed_alone() -> None:
    inputs, labels = _data()
    module, start = initial_parameters(lambda: small_convnet(4), AGENTS, seed=1)
    plan = Training(epochs=1, batch_size=8, jitter=Jitter())
    together = train_together(module, start, inputs, labels, training=plan, seeds=[1, 2, 3])
    others = inputs.clone()
    others[0], others[2] = 0.0, -others[2]
    changed = train_together(module, start, others, labels, training=plan, seeds=[7, 2, 8], sizes=[2, 24, 9])
    alone = train_together(module, _of(start, [1]), inputs[1:2], labels[1:2], training=plan, seeds=[2])
    for name, value in together.items():
        torch.testing.assert_close(changed[name][1], value[1], atol=2e-5, rtol=1e-3)
        torch.testing.assert_close(alone[name][0], value[1], atol=2e-5, rtol=1e-3)
        assert not torch.allclose(changed[name][0], value[0])


def test_records_beyond_an_agents_size_are_never_read() -> None:
    inputs, labels = _data(6)
    module, start = initial_parameters(lambda: linear_head(6, 4), AGENTS, seed=1)
    plan, sizes = Training(epochs=3, batch_size=5), [24, 10, 1]
    poisoned = inputs.clone()
    poisoned[1, 10:], poisoned[2, 1:] = float("nan"), float("nan")
    clean = train_together(module, start, inputs, labels, training=plan, seeds=[1, 2, 3], sizes=sizes)
    trained = train_together(module, start, poisoned, labels, training=plan, seeds=[1, 2, 3], sizes=sizes)
    for name, value in clean.items():
        torch.testing.assert_close(trained[name], value, rtol=0, atol=0)


def _digits(count: int) -> torch.Tensor:
    return image_tensor(np.random.default_rng(0).integers(0, 256, (count, 28, 28), dtype=np.uint8))


def test_a_record_is_answered_the_same_whoever_is_in_its_batch() -> None:
    network, images = small_convnet(), _digits(4)
    torch.testing.assert_close(network(images)[:1], network(images[:1]))


def _images() -> torch.Tensor:
    return torch.rand((3, 1, 28, 28), generator=torch.Generator().manual_seed(1))


def test_an_image_moves_by_its_own_numbers_alone() -> None:
    images, numbers = _images(), torch.rand(3, NUMBERS) * 2 - 1
    torch.testing.assert_close(moved(images, numbers, Jitter())[1:2], moved(images[1:2], numbers[1:2], Jitter()))


def test_a_feature_depends_on_its_own_image_alone(rng: np.random.Generator) -> None:
    images = rng.integers(0, 256, size=(5, 28, 28)).astype(np.uint8)
    together = edge_features(images)
    assert together.shape == (5, DIMENSION)
    assert together.dtype == np.float32
    for image, feature in zip(images, together, strict=True):
        assert edge_features(image[None])[0] == pytest.approx(feature, abs=1e-6)


def test_rows_have_norm_one_and_an_empty_image_none(rng: np.random.Generator) -> None:
    images = rng.integers(0, 256, size=(3, 28, 28)).astype(np.uint8)
    images[1] = 0
    norms = np.linalg.norm(edge_features(images).astype(np.float64), axis=1)
    assert norms[[0, 2]] == pytest.approx(1, abs=1e-5)
    assert (norms <= 1).all()
    assert norms[1] == 0
