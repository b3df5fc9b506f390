"""Federated training in simulation: what one agent or one record can change, what noise is added, and that it learns.

Of FedAvg and DP-FedAvg (private for agents), DP-FedSGD (for records), and the sampled sums that both are priced as.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn

from benchmarks.learning import federated
from benchmarks.learning.federated import (
    LocalTraining,
    ServerStep,
    clipped,
    dp_fed_sgd,
    fed_avg,
    local_updates,
    plan_fed_sgd,
)
from benchmarks.learning.gradients import LONGEST, flatten, linear_gradient_sums, sum_sensitivity
from benchmarks.sums import SampledSum, poisson_sample, with_budget
from labeler.accounting import integer
from labeler.errors import InvalidSetting, PrivacyRefusal
from labeler.noise import VectorSum
from labeler.randomness import ByteSource, seeded_source

SPEC = VectorSum(dimension=400, largest_norm=1.0, sensitivity=2.0, sigma=3.0, agents=20)


def sources(prefix: str) -> Callable[[str], ByteSource]:
    asked: set[str] = set()

    def source_of(purpose: str) -> ByteSource:
        assert purpose not in asked, "a secret source must never be used twice"
        asked.add(purpose)
        return seeded_source(f"{prefix} {purpose}".encode())

    return source_of


def check_noise(noise: np.ndarray, told: float) -> None:
    """Chi-square, both tails 2e-7. What is told is up to 0.3 % below what is added, because rounding is paid for."""
    low, high = stats.chi2.ppf([2e-7, 1 - 2e-7], noise.size)
    assert low < float(np.square(noise / told).sum()) < high * 1.006


# Sampled sums


@pytest.mark.parametrize("level", ["agent", "instance"])
def test_a_budget_is_kept_and_used(level) -> None:
    plan = with_budget(SampledSum(SPEC, level, 0.3, 25), 2.7, 1e-3)
    assert 2.7 * (1 - 5e-3) < plan.epsilon(1e-3) <= 2.7
    assert plan.epsilon(1e-3) < plan.as_in_paper_epsilon(1e-3)
    assert (plan.rounds, plan.level, plan.spec.dimension) == (25, level, 400)


def test_sampling_everybody_once_costs_what_one_sum_costs() -> None:
    plan = SampledSum(SPEC, "agent", 1.0, 1)
    assert plan.epsilon(1e-4) == pytest.approx(integer.epsilon_bound(SPEC.event("agent"), 1e-4), rel=1e-3)


@pytest.mark.parametrize("probability", [0.05, 0.5, 0.93])
def test_coins_fall_with_their_probability_and_independently(probability: float) -> None:
    """Two binomial tests of false-alarm rate 5e-7 each; the source is seeded, so the outcome is fixed."""
    coins = poisson_sample(seeded_source(b"coins"), 200_000, probability)
    assert stats.binomtest(int(coins.sum()), 200_000, probability).pvalue > 5e-7
    both = coins[0::2] & coins[1::2]
    assert stats.binomtest(int(both.sum()), 100_000, probability**2).pvalue > 5e-7


# Averages, private for agents

AGENTS, RECORDS, CLASSES, WIDTH = 40, 30, 4, 8
TRAINING = LocalTraining(iterations=5, batch_size=10, learning_rate=0.2)


def federation(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Agents that each know two of four well separated classes."""
    generator = torch.Generator().manual_seed(seed)
    pairs = torch.stack([torch.randperm(CLASSES, generator=generator)[:2] for _ in range(AGENTS)])
    labels = pairs[:, torch.arange(RECORDS) % 2]
    centres = 3 * torch.eye(CLASSES, WIDTH)
    return centres[labels] + torch.randn(AGENTS, RECORDS, WIDTH, generator=generator), labels


MODULE = nn.Linear(WIDTH, CLASSES)
START = {name: torch.zeros_like(value) for name, value in MODULE.named_parameters()}


def agent_plan(clip_norm: float = 1.0, *, rounds: int = 12, probability: float = 0.5) -> SampledSum:
    dimension = (WIDTH + 1) * CLASSES
    spec = VectorSum(dimension=dimension, largest_norm=clip_norm, sensitivity=2 * clip_norm, sigma=1.0, agents=AGENTS)
    return SampledSum(spec, "agent", probability, rounds)


def averaged(plan: SampledSum, name: str, **more: Any) -> dict[str, Tensor]:
    told: dict[str, Any] = {"training": TRAINING, "source_of": sources(name)} | more
    return dict(fed_avg(MODULE, START, *federation(), sizes=[RECORDS] * AGENTS, plan=plan, **told))


def test_dp_fedavg_learns_under_a_budget() -> None:
    model = averaged(with_budget(agent_plan(), 6.0, 1e-3), "dp", server=ServerStep(averaged=0.5))
    inputs, labels = federation(1)
    logits = torch.func.functional_call(MODULE, model, (inputs.flatten(0, 1),))
    assert float((logits.argmax(1) == labels.flatten()).float().mean()) > 0.75


@settings(max_examples=40, deadline=None)
@given(
    agent=st.integers(0, 4), scale=st.sampled_from([0.0, 1.0, 1e4, math.nan]), clip_norm=st.sampled_from([0.01, 1.0])
)
def test_one_agent_moves_a_round_by_at_most_the_clipping_norm(agent: int, scale: float, clip_norm: float) -> None:
    """Trains on neighboring federations: the others' vectors stay bit for bit, the agent's own is within S."""
    inputs, labels = (part[:5] for part in federation(2))
    changed = inputs.clone()
    changed[agent] *= scale
    options: dict[str, Any] = {"sizes": [RECORDS] * 5, "training": TRAINING, "learning_rate": 0.2, "seeds": range(5)}
    before, after = (
        clipped(local_updates(MODULE, START, rows, labels, **options), clip_norm) for rows in (inputs, changed)
    )
    others = [other for other in range(5) if other != agent]
    assert torch.equal(before[others], after[others])
    for vector in (before[agent], after[agent]):
        assert bool(vector.isfinite().all())
        assert float(vector.norm()) <= clip_norm


def test_what_agents_send_is_clipped_or_zero_as_their_coins_say(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[np.ndarray] = []

    def recorded(spec, vectors, **options):
        sent.append(np.array(list(vectors)))
        return np.zeros(spec.dimension)

    monkeypatch.setattr(federated, "private_sum", recorded)
    averaged(agent_plan(0.05, rounds=30, probability=0.3), "sent")
    norms = np.linalg.norm(sent, axis=2)
    assert norms.shape == (30, AGENTS)
    assert norms.max() <= 0.05
    assert (np.abs(norms[norms > 0] - 0.05) < 1e-6).all()
    # Two-sided binomial test of false-alarm rate 1e-6; the coins are seeded.
    assert stats.binomtest(int((norms > 0).sum()), norms.size, 0.3).pvalue > 1e-6


def test_the_noise_of_averages_is_what_the_accountant_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents that learn nothing (rate next to 0) leave noise alone."""
    plan = with_budget(agent_plan(0.7, rounds=60), 3.0, 1e-3)
    positions, original = [flatten(START).double().numpy()], federated.Descent.move

    class Watched(federated.Descent):
        def move(self, update):
            original(self, update)
            positions.append(self.position)

    monkeypatch.setattr(federated, "Descent", Watched)
    averaged(plan, "noise", training=replace(TRAINING, learning_rate=1e-12))
    check_noise(np.diff(np.array(positions), axis=0) * (0.5 * AGENTS), plan.noise_multiplier * 0.7)


@pytest.mark.parametrize("change", [{"level": "instance"}, {"dimension": 7}, {"agents": AGENTS + 1}])
def test_a_plan_for_something_else_is_refused(change: dict[str, Any]) -> None:
    plan = agent_plan()
    other = replace(plan, **change) if "level" in change else replace(plan, spec=replace(plan.spec, **change))
    with pytest.raises(InvalidSetting, match="the plan is for"):
        averaged(other, "wrong")


# Clipped sums of linear models

MODELS, ROWS = 3, 7


def records(seed: int, rows: int = ROWS) -> tuple[Tensor, Tensor, Tensor]:
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


# Gradients, private for records

SITES, EACH = 3, 200


def planned(epsilon: float = 4.0, *, probability: float = 0.1, rounds: int = 40) -> SampledSum:
    return plan_fed_sgd(
        epsilon=epsilon, delta=1e-4, dimension=(WIDTH + 1) * CLASSES, agents=SITES, most_records=EACH, clip_norm=0.5,
        probability=probability, rounds=rounds,
    )  # fmt: skip


def trained(plan: SampledSum, inputs: Tensor, labels: Tensor, prefix: str, **more: object) -> Tensor:
    told: dict[str, Any] = {"sizes": [EACH] * SITES, "clip_norm": 0.5, "server": ServerStep(2.0)} | more
    model = dp_fed_sgd(
        START, inputs, labels, plan=plan, expected_batch=plan.sampling_probability * SITES * EACH,
        source_of=sources(prefix), **told,
    )  # fmt: skip
    return torch.cat([model["weight"], model["bias"][:, None]], dim=1)


def test_fed_sgd_learns_under_a_budget() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, CLASSES, (SITES, EACH), generator=generator)
    inputs = torch.eye(CLASSES, WIDTH)[labels] + 0.2 * torch.randn((SITES, EACH, WIDTH), generator=generator)
    plan = planned()
    assert 3.9 < plan.epsilon(1e-4) <= 4.0
    model = trained(plan, inputs, labels, "learns", server=ServerStep(5.0, 0.5, 0.3))
    ones = torch.cat([inputs, torch.ones(SITES, EACH, 1)], dim=2)
    assert float(((ones @ model.T).argmax(2) == labels).float().mean()) > 0.8


def test_the_noise_of_gradients_is_what_the_accountant_was_told() -> None:
    """Records that are too long contribute zero: 40 models hold nothing but noise."""
    inputs = torch.full((SITES, EACH, WIDTH), 10 * LONGEST)
    labels, plan = torch.zeros((SITES, EACH), dtype=torch.int64), planned(rounds=1)
    models = [trained(plan, inputs, labels, f"noise {turn}", server=ServerStep(1.0)).numpy() for turn in range(40)]
    told = plan.noise_multiplier * sum_sensitivity(0.5) / (plan.sampling_probability * SITES * EACH)
    check_noise(np.concatenate(models), told)


def test_what_the_plan_does_not_cover_is_refused() -> None:
    inputs, labels = torch.zeros((SITES, EACH, WIDTH)), torch.zeros((SITES, EACH), dtype=torch.int64)
    with pytest.raises(InvalidSetting, match="2 agents"):
        trained(planned(), inputs[:2], labels[:2], "agents")
    with pytest.raises(PrivacyRefusal, match="shorter gradients"):
        trained(planned(), inputs, labels, "clip", clip_norm=1.0)
    more = inputs.repeat(1, 2, 1), labels.repeat(1, 2)
    with pytest.raises(PrivacyRefusal, match="fewer records"):
        trained(planned(), *more, "records", sizes=[2 * EACH] * SITES)
