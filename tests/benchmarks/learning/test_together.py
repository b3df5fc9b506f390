"""Training together is training one after another: same batches, same models, nobody depends on anybody.

So it is with domain-adversarial training, too. What is said of a record depends on that record alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from benchmarks.learning.networks import (
    DIMENSION,
    DomainAdversarial,
    adapt_together,
    edge_features,
    image_tensor,
    small_convnet,
    strength_at,
)
from benchmarks.learning.together import (
    NUMBERS,
    Jitter,
    Parameters,
    Training,
    batches,
    initial_parameters,
    moved,
    stream,
    train_together,
)

AGENTS, RECORDS, PUBLIC = 3, 24, 20


def data(dimension: int | None = None) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    shape = (1, 28, 28) if dimension is None else (dimension,)
    return (
        torch.randn((AGENTS, RECORDS, *shape), generator=generator),
        torch.randint(0, 3, (AGENTS, RECORDS), generator=generator),
    )


def by_hand(
    start: Parameters, agent: int, seed: int, size: int, plan: Training, loss: Callable[..., Tensor]
) -> Parameters:
    """One agent's training as anybody would write it, with torch's own AdamW."""
    weights = {name: value[agent].clone().requires_grad_() for name, value in start.items()}
    optimizer = torch.optim.AdamW(weights.values(), lr=plan.learning_rate, weight_decay=plan.weight_decay)
    steps = list(batches(plan, [seed], [size], RECORDS))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=len(steps))
    for step, (rows, _) in enumerate(steps):
        optimizer.zero_grad()
        loss(weights, rows[0], step, len(steps)).backward()  # type: ignore[no-untyped-call]  # torch does not type it
        optimizer.step()
        schedule.step()
    return {name: value.detach() for name, value in weights.items()}


@pytest.mark.parametrize("dimension", [None, 6])
def test_training_together_equals_training_one_after_another_by_hand(dimension: int | None) -> None:
    inputs, labels = data(dimension)
    factory = (lambda: small_convnet(3)) if dimension is None else (lambda: nn.Linear(6, 3))
    module, start = initial_parameters(factory, AGENTS, seed=1)
    plan, seeds, sizes = Training(epochs=2, batch_size=8, learning_rate=1e-3), [11, 12, 13], [24, 10, 3]
    together = train_together(module, start, inputs, labels, training=plan, seeds=seeds, sizes=sizes)
    for agent in range(AGENTS):

        def loss(weights: Parameters, rows: Tensor, *_: int, agent: int = agent) -> Tensor:
            return functional.cross_entropy(
                functional_call(module, weights, (inputs[agent, rows],)), labels[agent, rows]
            )

        for name, value in by_hand(start, agent, seeds[agent], sizes[agent], plan, loss).items():
            torch.testing.assert_close(together[name][agent], value, atol=2e-5, rtol=1e-3)


class _Turned(torch.autograd.Function):
    """Gradient reversal as Ganin et al. define it, the usual way."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return -ctx.strength * gradients[0], None


def small_adversarial() -> DomainAdversarial:
    return DomainAdversarial(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), hidden=4)


def shown() -> Tensor:
    return torch.randn((PUBLIC, 6), generator=torch.Generator().manual_seed(6)) + 1


def test_adapting_together_equals_a_plain_loop_for_each_agent() -> None:
    (inputs, labels), public = data(6), shown()
    module, start = initial_parameters(small_adversarial, AGENTS, seed=1)
    plan, seeds, sizes = Training(epochs=3, batch_size=8, learning_rate=0.01), [7, 8, 9], [24, 5, 11]
    together = adapt_together(module, start, inputs, labels, public, training=plan, seeds=seeds, sizes=sizes)
    for agent in range(AGENTS):
        others = [rows[0] for rows, _ in batches(plan, [stream(seeds[agent], 1)], [PUBLIC], RECORDS)]

        def loss(
            weights: Parameters, rows: Tensor, step: int, steps: int, agent: int = agent, others: list[Tensor] = others
        ) -> Tensor:
            def part(prefix: str, values: Tensor) -> Tensor:
                own = {one.removeprefix(prefix): weight for one, weight in weights.items() if one.startswith(prefix)}
                return functional_call(getattr(module, prefix.rstrip(".")), own, (values,))

            features = part("features.", torch.cat([inputs[agent, rows], public[others[step]]]))
            origin = part("domain.", _Turned.apply(features, strength_at(step / steps))).squeeze(-1)
            truth = torch.cat([torch.zeros(len(rows)), torch.ones(len(others[step]))])
            classes = functional.cross_entropy(part("classifier.", features)[: len(rows)], labels[agent, rows])
            return classes + functional.binary_cross_entropy_with_logits(origin, truth)

        for name, value in by_hand(start, agent, seeds[agent], sizes[agent], plan, loss).items():
            torch.testing.assert_close(together[name][agent], value, atol=1e-5, rtol=1e-3)


def test_an_agents_adapted_model_depends_on_its_own_records_alone() -> None:
    inputs, labels = data(6)
    module, start = initial_parameters(small_adversarial, AGENTS, seed=1)
    others = inputs.clone()
    others[0] = 3.0
    plan = Training(epochs=2, batch_size=8)
    together, changed = (
        adapt_together(module, start, rows, labels, shown(), training=plan, seeds=[7, 8, 9])
        for rows in (inputs, others)
    )
    for name, value in together.items():
        torch.testing.assert_close(changed[name][1], value[1])
        assert not torch.equal(changed[name][0], value[0])


def test_an_agents_model_depends_on_its_own_records_and_seed_alone() -> None:
    inputs, labels = data()
    module, start = initial_parameters(lambda: small_convnet(3), AGENTS, seed=1)
    plan = Training(epochs=1, batch_size=8, jitter=Jitter())
    together = train_together(module, start, inputs, labels, training=plan, seeds=[1, 2, 3])
    others = inputs.clone()
    others[0], others[2] = 0.0, -others[2]
    changed = train_together(module, start, others, labels, training=plan, seeds=[7, 2, 8], sizes=[2, 24, 9])
    own = {name: value[1:2] for name, value in start.items()}
    alone = train_together(module, own, inputs[1:2], labels[1:2], training=plan, seeds=[2])
    for name, value in together.items():
        torch.testing.assert_close(changed[name][1], value[1], atol=2e-5, rtol=1e-3)
        torch.testing.assert_close(alone[name][0], value[1], atol=2e-5, rtol=1e-3)
        assert not torch.allclose(changed[name][0], value[0])


def test_records_beyond_an_agents_size_are_never_read() -> None:
    inputs, labels = data(6)
    module, start = initial_parameters(lambda: nn.Linear(6, 3), AGENTS, seed=1)
    poisoned = inputs.clone()
    poisoned[1, 10:], poisoned[2, 1:] = float("nan"), float("nan")
    plan = Training(epochs=3, batch_size=5)
    clean, trained = (
        train_together(module, start, rows, labels, training=plan, seeds=[1, 2, 3], sizes=[24, 10, 1])
        for rows in (inputs, poisoned)
    )
    for name, value in clean.items():
        torch.testing.assert_close(trained[name], value, rtol=0, atol=0)


def test_a_record_is_answered_moved_and_described_the_same_whoever_is_in_its_batch(rng: np.random.Generator) -> None:
    images = rng.integers(0, 256, (5, 28, 28), dtype=np.uint8)
    network, tensors = small_convnet(), image_tensor(images)
    torch.testing.assert_close(network(tensors)[:1], network(tensors[:1]))
    numbers = torch.rand((5, NUMBERS), generator=torch.Generator().manual_seed(1)) * 2 - 1
    torch.testing.assert_close(moved(tensors, numbers, Jitter())[1:2], moved(tensors[1:2], numbers[1:2], Jitter()))
    features = edge_features(images)
    assert features.shape == (5, DIMENSION)
    assert features.dtype == np.float32
    for image, feature in zip(images, features, strict=True):
        assert edge_features(image[None])[0] == pytest.approx(feature, abs=1e-6)


def test_rows_have_norm_one_and_an_empty_image_none(rng: np.random.Generator) -> None:
    images = rng.integers(0, 256, size=(3, 28, 28)).astype(np.uint8)
    images[1] = 0
    norms = np.linalg.norm(edge_features(images).astype(np.float64), axis=1)
    assert norms[[0, 2]] == pytest.approx(1, abs=1e-5)
    assert (norms <= 1).all()
    assert norms[1] == 0
