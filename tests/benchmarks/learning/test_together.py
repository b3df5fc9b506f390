"""Training together is training one after another: same batches, same models, nobody depends on anybody."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from benchmarks.learning.networks import linear_head, small_convnet
from benchmarks.learning.together import (
    Jitter,
    Parameters,
    Training,
    batches,
    initial_parameters,
    predict_together,
    train_together,
)
from labeler.errors import InvalidSetting

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


def test_every_pass_shows_each_of_an_agents_records_equally_often() -> None:
    steps = list(batches(Training(epochs=2, batch_size=5), [1, 2], [12, 4], 12))
    assert [rows.shape[1] for rows, _ in steps] == [5, 5, 2] * 2
    for epoch in (steps[:3], steps[3:]):
        rows = torch.cat([rows for rows, _ in epoch], dim=1)
        assert rows[0].bincount().tolist() == [1] * 12
        assert rows[1].bincount().tolist() == [3] * 4


def test_models_start_apart_and_the_global_generator_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    _, start = initial_parameters(small_convnet, 3, seed=4)
    _, again = initial_parameters(small_convnet, 2, seed=4)
    assert torch.equal(torch.random.get_rng_state(), before)
    for name, value in start.items():
        assert value.shape[0] == 3
        assert not torch.equal(value[0], value[1])
        assert torch.equal(again[name], value[:2])


def test_training_starts_from_the_parameters_given_and_leaves_them_as_they_are() -> None:
    inputs, labels = _data(6)
    module, start = initial_parameters(lambda: linear_head(6, 4), AGENTS, seed=1)
    kept = {name: value.clone() for name, value in start.items()}
    same = train_together(module, start, inputs, labels, training=Training(epochs=0), seeds=[1, 2, 3])
    train_together(module, start, inputs, labels, training=Training(epochs=1), seeds=[1, 2, 3])
    for name, value in kept.items():
        assert torch.equal(start[name], value)
        assert torch.equal(same[name], value)


def test_what_the_models_say_is_what_each_says_alone() -> None:
    module, parameters = initial_parameters(lambda: small_convnet(4), AGENTS, seed=1)
    inputs = torch.randn((7, 1, 28, 28), generator=torch.Generator().manual_seed(2))
    logits = predict_together(module, parameters, inputs)
    for agent in range(AGENTS):
        own = {name: value[agent] for name, value in parameters.items()}
        torch.testing.assert_close(logits[agent], functional_call(module, own, (inputs,)), atol=1e-5, rtol=1e-4)


def test_agents_learn() -> None:
    generator = torch.Generator().manual_seed(3)
    centres = torch.randn((4, 6), generator=generator) * 3
    labels = torch.randint(0, 4, (AGENTS, 80), generator=generator)
    inputs = centres[labels] + torch.randn((AGENTS, 80, 6), generator=generator) * 0.3
    module, start = initial_parameters(lambda: linear_head(6, 4), AGENTS, seed=1)
    plan = Training(epochs=20, batch_size=16, learning_rate=0.05)
    said: list[int] = []
    trained = train_together(
        module, start, inputs, labels, training=plan, seeds=[1, 2, 3], progress=lambda _s, done, _t: said.append(done)
    )
    right = predict_together(module, trained, inputs[0]).argmax(dim=2) == labels[0]
    assert right.float().mean() > 0.95
    assert said == [5 * epoch for epoch in range(1, 21)]


def test_what_does_not_fit_is_refused() -> None:
    inputs, labels = _data(6)
    module, start = initial_parameters(lambda: linear_head(6, 4), AGENTS, seed=1)
    plan = Training()
    with pytest.raises(InvalidSetting, match="seeds"):
        train_together(module, start, inputs, labels, training=plan, seeds=[1])
    with pytest.raises(InvalidSetting, match="sizes"):
        train_together(module, start, inputs, labels, training=plan, seeds=[1, 2, 3], sizes=[24, 0, 1])
    with pytest.raises(InvalidSetting, match="models need"):
        train_together(module, start, inputs[:2], labels[:2], training=plan, seeds=[1, 2, 3])
    with pytest.raises(InvalidSetting, match="no buffers"):
        initial_parameters(lambda: nn.BatchNorm1d(3), 2, seed=0)
    with pytest.raises(InvalidSetting, match="at least one model"):
        initial_parameters(small_convnet, 0, seed=0)
    with pytest.raises(InvalidSetting, match="epochs"):
        Training(epochs=-1)
    with pytest.raises(InvalidSetting, match="learning rate"):
        Training(learning_rate=float("nan"))
