"""DP-FedSGD: what one record can change, that batches are Poisson samples, what noise is added, and that it learns."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.stats import binom
from torch import nn

from benchmarks.learning.federated import (
    Batch,
    FedSgdPlan,
    ServerStep,
    batch_sums,
    dp_fed_sgd,
    draw_batch,
    plan_fed_sgd,
)
from benchmarks.learning.gradients import flatten, sum_sensitivity
from benchmarks.sums import SampledSum
from labeler.errors import InvalidSetting, PrivacyRefusal
from labeler.noise import VectorSum
from labeler.randomness import seeded_source

AGENTS, RECORDS, CLASSES, WIDTH = 3, 200, 4, 8


def _records(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (AGENTS, RECORDS), generator=generator)
    inputs = 3 * torch.eye(CLASSES, WIDTH)[labels] + torch.randn(AGENTS, RECORDS, WIDTH, generator=generator)
    return inputs, labels


def _module() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, CLASSES))
    return module, {name: value.detach().clone() for name, value in module.named_parameters()}


def _dimension() -> int:
    return int(flatten(_module()[1]).numel())


def _sources(prefix: str):
    asked: set[str] = set()

    def source_of(purpose: str):
        assert purpose not in asked, "a secret source must never be used twice"
        asked.add(purpose)
        return seeded_source(f"{prefix} {purpose}".encode())

    return source_of


def _planned(epsilon: float = 4.0, *, probability: float = 0.1, rounds: int = 60, clip_norm: float = 0.5) -> FedSgdPlan:
    return plan_fed_sgd(
        epsilon=epsilon, delta=1e-4, dimension=_dimension(), agents=AGENTS, most_records=RECORDS,
        clip_norm=clip_norm, probability=probability, rounds=rounds,
    )  # fmt: skip


def _train(plan: FedSgdPlan, inputs, labels, prefix: str, **options) -> dict[str, torch.Tensor]:
    module, start = _module()
    probability = plan.sampled.sampling_probability
    return dp_fed_sgd(
        module, start, inputs, labels, sizes=[RECORDS] * AGENTS, plan=plan,
        expected_batch=probability * AGENTS * RECORDS, source_of=_sources(prefix),
        **({"server": ServerStep(2.0)} | options),
    )  # fmt: skip


def test_without_noise_it_is_full_batch_gradient_descent_on_clipped_gradients() -> None:
    spec = VectorSum(
        dimension=_dimension(),
        largest_norm=RECORDS * 100.0,
        sensitivity=sum_sensitivity(50.0),
        sigma=1e-3,
        agents=AGENTS,
    )
    plan = FedSgdPlan(SampledSum(spec, "instance", 1.0, 3), 50.0, RECORDS, RECORDS)
    inputs, labels = _records()
    model = _train(plan, inputs, labels, "plain", server=ServerStep(0.5))
    module, _ = _module()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(inputs.flatten(0, 1)), labels.flatten()).backward()
        optimizer.step()
    expected = torch.cat([value.detach().flatten() for value in module.parameters()])
    assert float((flatten(model) - expected).abs().max()) < 1e-4


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    place=st.integers(0, 39),
    agent=st.integers(0, AGENTS - 1),
    scale=st.sampled_from([0.1, 1.0, 1e3]),
    clip_norm=st.sampled_from([0.01, 0.5, 5.0]),
)
def test_a_record_that_leaves_moves_only_its_agents_sum_and_that_by_at_most_the_sensitivity(
    seed, place, agent, scale, clip_norm
) -> None:
    """Neighbouring sets, equal coins and places for everybody else: the coupling of the proof."""
    module, start = _module()
    inputs, labels = _records(seed)
    inputs = scale * inputs
    model = {name: value * (1 + seed % 3) for name, value in start.items()}
    rng = np.random.default_rng(seed)
    batches = [Batch(rng.permutation(RECORDS)[:40], rng.random(40) < 0.8) for _ in range(AGENTS)]
    batches[agent].is_taken[place] = True
    without = batches[agent].is_taken.copy()
    without[place] = False
    neighbour = [Batch(batch.rows, without) if number == agent else batch for number, batch in enumerate(batches)]
    before = batch_sums(module, model, inputs, labels, batches, clip_norm=clip_norm)
    after = batch_sums(module, model, inputs, labels, neighbour, clip_norm=clip_norm)
    moved = np.linalg.norm(before - after, axis=1)
    assert moved[agent] <= sum_sensitivity(clip_norm)
    assert (np.delete(moved, agent) == 0).all()


def test_batches_are_poisson_samples_in_random_places() -> None:
    """Binomial and chi-square tests of false-alarm rate 1e-6 each; sources are seeded."""
    plan = _planned(probability=0.1)
    batches = [draw_batch(seeded_source(f"batch {number}".encode()), plan, RECORDS) for number in range(400)]
    seen = np.zeros(RECORDS, dtype=np.int64)
    for batch in batches:
        taken = batch.rows[batch.is_taken]
        assert len(set(taken.tolist())) == len(taken)
        seen[taken] += 1
    assert stats.binomtest(int(seen.sum()), 400 * RECORDS, 0.1).pvalue > 1e-6
    expected = 400 * 0.1
    assert stats.chi2.sf(float((np.square(seen - expected) / (expected * 0.9)).sum()), RECORDS) > 1e-6
    assert stats.chisquare(np.sum([batch.is_taken for batch in batches], axis=0)).pvalue > 1e-6


def test_room_is_made_for_nearly_every_batch_and_the_rest_is_paid_for() -> None:
    plan = _planned(probability=0.1, rounds=60)
    overflow = AGENTS * float(binom.sf(plan.capacity, RECORDS, 0.1))
    assert overflow <= plan.sampled.failure_probability <= 2e-16 / 60
    assert plan.capacity < RECORDS
    with pytest.raises(InvalidSetting, match="overflows"):
        replace(plan, capacity=plan.capacity - 1)


def test_an_agent_whose_sample_does_not_fit_sends_zeros() -> None:
    plan = _planned(probability=0.5)
    # Fewer places than a plan may have: a batch this small would nearly always overflow.
    tight = replace(plan)
    object.__setattr__(tight, "capacity", 5)
    assert not draw_batch(seeded_source(b"tight"), tight, RECORDS).is_taken.any()


def test_the_noise_in_the_model_is_what_the_accountant_was_told() -> None:
    """Agents without records leave noise alone: steps of size 1 sum it up. Chi-square, both tails 2e-7."""
    plan = _planned(probability=0.1, rounds=40)
    module, start = _module()
    inputs, labels = _records()
    moved = []
    for repetition in range(60):
        model = dp_fed_sgd(
            module, start, inputs, labels, sizes=[0] * AGENTS,
            plan=replace(plan, sampled=replace(plan.sampled, rounds=1)), expected_batch=1.0, server=ServerStep(1.0),
            source_of=_sources(f"noise {repetition}"),
        )  # fmt: skip
        moved.append((flatten(model) - flatten(start)).double().numpy())
    noise = np.concatenate(moved)
    told = plan.sampled.accounted.noise_multiplier * sum_sensitivity(0.5)
    low, high = stats.chi2.ppf([2e-7, 1 - 2e-7], noise.size)
    assert low < float(np.square(noise / told).sum()) < high * 1.006


def test_what_the_plan_does_not_cover_is_refused() -> None:
    plan = _planned()
    inputs, labels = _records()
    with pytest.raises(InvalidSetting, match="sensitivity"):
        replace(plan, clip_norm=0.6)
    with pytest.raises(InvalidSetting, match="records"):
        replace(plan, sampled=replace(plan.sampled, level="agent"))
    with pytest.raises(InvalidSetting, match="the plan is for"):
        _train(plan, inputs[:2], labels[:2], "few")
    with pytest.raises(PrivacyRefusal, match="more than"):
        _train(replace(plan, most_records=RECORDS - 1), inputs, labels, "many")


def test_batches_do_not_print() -> None:
    assert "3" not in repr(Batch(np.array([3]), np.array([True]))).split("object at")[0]
