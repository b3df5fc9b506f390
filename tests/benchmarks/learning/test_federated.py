"""FedAvg and DP-FedAvg: what one agent can change, what noise is added, and that both learn."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import nn

from benchmarks.learning import federated
from benchmarks.learning.federated import LocalTraining, ServerStep, clipped, fed_avg, local_updates
from benchmarks.learning.gradients import flatten
from benchmarks.sums import SampledSum, with_budget
from labeler.errors import InvalidSetting
from labeler.noise import VectorSum
from labeler.randomness import seeded_source

AGENTS, RECORDS, CLASSES, WIDTH = 40, 30, 4, 8


def _federation(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Agents that each know two of four well separated classes."""
    generator = torch.Generator().manual_seed(seed)
    centres = 3 * torch.eye(CLASSES, WIDTH)
    pairs = torch.stack([torch.randperm(CLASSES, generator=generator)[:2] for _ in range(AGENTS)])
    labels = pairs[:, torch.arange(RECORDS) % 2]
    return centres[labels] + torch.randn(AGENTS, RECORDS, WIDTH, generator=generator), labels


def _module() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    module = nn.Linear(WIDTH, CLASSES)
    return module, {name: torch.zeros_like(value) for name, value in module.named_parameters()}


def _accuracy(module: nn.Module, model: dict[str, torch.Tensor], inputs: torch.Tensor, labels: torch.Tensor) -> float:
    logits = torch.func.functional_call(module, model, (inputs.flatten(0, 1),))
    return float((logits.argmax(1) == labels.flatten()).float().mean())


def _sources(prefix: str):
    asked: set[str] = set()

    def source_of(purpose: str):
        assert purpose not in asked, "a secret source must never be used twice"
        asked.add(purpose)
        return seeded_source(f"{prefix} {purpose}".encode())

    return source_of


def _plan(clip_norm: float = 1.0, *, rounds: int = 12, probability: float = 0.5, sigma: float = 1.0) -> SampledSum:
    spec = VectorSum(
        dimension=(WIDTH + 1) * CLASSES, largest_norm=clip_norm, sensitivity=2 * clip_norm, sigma=sigma, agents=AGENTS
    )
    return SampledSum(spec, "agent", probability, rounds)


TRAINING = LocalTraining(iterations=5, batch_size=10, learning_rate=0.2)


def test_dp_fedavg_learns_under_a_budget() -> None:
    (inputs, labels), (module, start) = _federation(), _module()
    plan = with_budget(_plan(), 6.0, 1e-3)
    model = fed_avg(
        module, start, inputs, labels, sizes=[RECORDS] * AGENTS, plan=plan, training=TRAINING,
        server=ServerStep(averaged=0.5), source_of=_sources("dp"),
    )  # fmt: skip
    assert _accuracy(module, model, *_federation(1)) > 0.75


@settings(max_examples=40, deadline=None)
@given(
    agent=st.integers(0, 4), scale=st.sampled_from([0.0, 1.0, 1e4, math.nan]), clip_norm=st.sampled_from([0.01, 1.0])
)
def test_one_agent_moves_a_round_by_at_most_the_clipping_norm(agent: int, scale: float, clip_norm: float) -> None:
    """Trains on neighboring federations: the others' vectors stay bit for bit, the agent's own is within S."""
    (inputs, labels), (module, start) = _federation(2), _module()
    inputs, labels, changed = inputs[:5], labels[:5], inputs[:5].clone()
    changed[agent] *= scale
    options = {"sizes": [RECORDS] * 5, "training": TRAINING, "learning_rate": 0.2, "seeds": [1, 2, 3, 4, 5]}
    before = clipped(local_updates(module, start, inputs, labels, **options), clip_norm)
    after = clipped(local_updates(module, start, changed, labels, **options), clip_norm)
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
    (inputs, labels), (module, start) = _federation(), _module()
    plan = _plan(0.05, rounds=30, probability=0.3)
    fed_avg(
        module, start, inputs, labels, sizes=[RECORDS] * AGENTS, plan=plan, training=TRAINING,
        source_of=_sources("sent"),
    )  # fmt: skip
    norms = np.linalg.norm(sent, axis=2)
    assert norms.shape == (30, AGENTS)
    assert norms.max() <= 0.05
    assert (np.abs(norms[norms > 0] - 0.05) < 1e-6).all()
    # Two-sided binomial test of false-alarm rate 1e-6; the coins are seeded.
    assert stats.binomtest(int((norms > 0).sum()), norms.size, 0.3).pvalue > 1e-6


def test_the_noise_in_the_model_is_what_the_accountant_was_told() -> None:
    """Agents that learn nothing (rate next to 0) leave noise alone; chi-square, both tails 2e-7."""
    (inputs, labels), (module, start) = _federation(), _module()
    plan = with_budget(_plan(0.7, rounds=60, probability=0.5), 3.0, 1e-3)
    positions = [flatten(start).double().numpy()]
    original = federated.Descent.move

    class Watched(federated.Descent):
        def move(self, update):
            original(self, update)
            positions.append(self.position)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(federated, "Descent", Watched)
        fed_avg(
            module, start, inputs, labels, sizes=[RECORDS] * AGENTS, plan=plan,
            training=replace(TRAINING, learning_rate=1e-12), source_of=_sources("noise"),
        )  # fmt: skip
    noise = np.diff(np.array(positions), axis=0) * (0.5 * AGENTS)
    told = plan.accounted.noise_multiplier * 0.7
    low, high = stats.chi2.ppf([2e-7, 1 - 2e-7], noise.size)
    assert low < float(np.square(noise / told).sum()) < high * 1.006


def test_a_plan_for_something_else_is_refused() -> None:
    (inputs, labels), (module, start) = _federation(), _module()
    plan = _plan()
    wrong = (
        replace(plan, level="instance"),
        replace(plan, spec=replace(plan.spec, dimension=7)),
        replace(plan, spec=replace(plan.spec, agents=AGENTS + 1)),
    )
    for other in wrong:
        with pytest.raises(InvalidSetting, match="the plan is for"):
            fed_avg(
                module, start, inputs, labels, sizes=[RECORDS] * AGENTS, plan=other, training=TRAINING,
                source_of=_sources("wrong"),
            )  # fmt: skip
