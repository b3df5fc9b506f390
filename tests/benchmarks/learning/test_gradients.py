"""Clipped sums of linear models, and DP-FedSGD on them: what one record can change, and what noise is added."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from benchmarks.learning.federated import ServerStep, dp_fed_sgd, plan_fed_sgd
from benchmarks.learning.gradients import LONGEST, linear_gradient_sums, sum_sensitivity
from benchmarks.sums import SampledSum
from labeler.errors import InvalidSetting, PrivacyRefusal
from labeler.randomness import ByteSource, seeded_source

MODELS, ROWS, WIDTH, CLASSES = 3, 7, 5, 4


def records(seed: int, rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn((MODELS, rows, WIDTH), generator=generator)
    labels = torch.randint(0, CLASSES, (MODELS, rows), generator=generator)
    return inputs / inputs.norm(dim=2, keepdim=True), labels, torch.rand((MODELS, rows), generator=generator) < 0.6


@pytest.mark.parametrize("clip_norm", [0.2, 5.0])
def test_the_sum_is_that_of_records_clipped_one_by_one(clip_norm: float) -> None:
    """Oracle: autograd of each record's own loss, clipped by hand."""
    inputs, labels, sampled = records(1)
    weights = torch.randn((MODELS, WIDTH, CLASSES), generator=torch.Generator().manual_seed(2)).double()
    sums = linear_gradient_sums(weights, inputs, labels, sampled, clip_norm=clip_norm)
    for model in range(MODELS):
        expected = torch.zeros(WIDTH, CLASSES, dtype=torch.float64)
        for row in torch.nonzero(sampled[model]).flatten().tolist():
            own = weights[model].clone().requires_grad_()
            loss = torch.nn.functional.cross_entropy(inputs[model, row].double() @ own, labels[model, row])
            (gradient,) = torch.autograd.grad(loss, own)
            expected += gradient * min(1.0, clip_norm / float(gradient.norm()))
        assert sums[model].numpy() == pytest.approx(expected.numpy(), abs=1e-5 * clip_norm)


@given(
    seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 40), clip=st.sampled_from([0.05, 0.3, 2.0]),
    size=st.sampled_from([0.0, 1.0, 30.0]),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_a_record_that_leaves_moves_its_own_sum_by_at_most_the_sensitivity_and_no_other(
    seed: int, rows: int, clip: float, size: float
) -> None:
    """The packed places of the other records change with it."""
    inputs, labels, sampled = records(seed, rows)
    weights = size * torch.randn((MODELS, WIDTH, CLASSES), generator=torch.Generator().manual_seed(seed)).double()
    without = sampled.clone()
    without[1, seed % rows] = False
    one, other = (linear_gradient_sums(weights, inputs, labels, some, clip_norm=clip) for some in (sampled, without))
    assert float((one - other)[1].norm()) <= sum_sensitivity(clip)
    assert torch.equal(one[[0, 2]], other[[0, 2]])
    assert float(one.flatten(1).norm(dim=1).max()) <= int(sampled.sum(1).max()) * clip + 1e-9


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 10 * LONGEST])
def test_a_record_beyond_the_proof_contributes_zero_and_spoils_nobody(poison: float) -> None:
    inputs, labels, sampled = records(3)
    weights = torch.ones((MODELS, WIDTH, CLASSES), dtype=torch.float64)
    sampled[1, 2], without = True, sampled.clone()
    without[1, 2] = False
    expected = linear_gradient_sums(weights, inputs, labels, without, clip_norm=1.0)
    inputs[1, 2] = poison
    assert torch.equal(linear_gradient_sums(weights, inputs, labels, sampled, clip_norm=1.0), expected)


def test_what_the_proof_does_not_cover_is_refused() -> None:
    inputs, labels, sampled = records(4)
    for length in (1e12, float("nan")):
        weights = torch.full((MODELS, WIDTH, CLASSES), length).double()
        with pytest.raises(PrivacyRefusal, match="proved harmless"):
            linear_gradient_sums(weights, inputs, labels, sampled, clip_norm=1.0)
    for clip_norm in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(InvalidSetting, match="clip_norm"):
            sum_sensitivity(clip_norm)


AGENTS, EACH = 3, 200


def planned(epsilon: float = 4.0, *, probability: float = 0.1, rounds: int = 40) -> SampledSum:
    return plan_fed_sgd(
        epsilon=epsilon, delta=1e-4, dimension=(WIDTH + 1) * CLASSES, agents=AGENTS, most_records=EACH, clip_norm=0.5,
        probability=probability, rounds=rounds,
    )  # fmt: skip


def sources(prefix: str) -> Callable[[str], ByteSource]:
    asked: set[str] = set()

    def source_of(purpose: str) -> ByteSource:
        assert purpose not in asked, "a secret source must never be used twice"
        asked.add(purpose)
        return seeded_source(f"{prefix} {purpose}".encode())

    return source_of


def trained(plan: SampledSum, inputs: torch.Tensor, labels: torch.Tensor, prefix: str, **more: object) -> torch.Tensor:
    start = {"weight": torch.zeros(CLASSES, WIDTH), "bias": torch.zeros(CLASSES)}
    told: dict = {"sizes": [EACH] * AGENTS, "clip_norm": 0.5, "server": ServerStep(2.0)} | more
    model = dp_fed_sgd(
        start, inputs, labels, plan=plan, expected_batch=plan.sampling_probability * AGENTS * EACH,
        source_of=sources(prefix), **told,
    )  # fmt: skip
    return torch.cat([model["weight"], model["bias"][:, None]], dim=1)


def test_fed_sgd_learns_under_a_budget() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, CLASSES, (AGENTS, EACH), generator=generator)
    inputs = torch.eye(CLASSES, WIDTH)[labels] + 0.2 * torch.randn((AGENTS, EACH, WIDTH), generator=generator)
    plan = planned()
    assert 3.9 < plan.epsilon(1e-4) <= 4.0
    model = trained(plan, inputs, labels, "learns", server=ServerStep(5.0, 0.5, 0.3))
    ones = torch.cat([inputs, torch.ones(AGENTS, EACH, 1)], dim=2)
    assert float(((ones @ model.T).argmax(2) == labels).float().mean()) > 0.8


def test_the_noise_in_the_model_is_what_the_accountant_was_told() -> None:
    """Records that are too long contribute zero: 40 models hold nothing but noise. False-alarm rate below 1e-6."""
    inputs = torch.full((AGENTS, EACH, WIDTH), 10 * LONGEST)
    labels = torch.zeros((AGENTS, EACH), dtype=torch.int64)
    plan = planned(rounds=1)
    told = plan.accounted.noise_multiplier * sum_sensitivity(0.5) / (plan.sampling_probability * AGENTS * EACH)
    models = [trained(plan, inputs, labels, f"noise {turn}", server=ServerStep(1.0)).numpy() for turn in range(40)]
    statistic = float(np.square(np.concatenate(models) / told).sum())
    low, high = stats.chi2.ppf([2e-7, 1 - 2e-7], 40 * (WIDTH + 1) * CLASSES)
    # What is told is up to 0.3 % below what is added, because rounding is paid for.
    assert low < statistic < high * 1.006


def test_what_the_plan_does_not_cover_is_refused() -> None:
    inputs, labels = torch.zeros((AGENTS, EACH, WIDTH)), torch.zeros((AGENTS, EACH), dtype=torch.int64)
    with pytest.raises(InvalidSetting, match="2 agents"):
        trained(planned(), inputs[:2], labels[:2], "agents")
    with pytest.raises(PrivacyRefusal, match="shorter gradients"):
        trained(planned(), inputs, labels, "clip", clip_norm=1.0)
    more = inputs.repeat(1, 2, 1), labels.repeat(1, 2)
    with pytest.raises(PrivacyRefusal, match="fewer records"):
        trained(planned(), *more, "records", sizes=[2 * EACH] * AGENTS)
