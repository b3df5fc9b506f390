"""Plans of sampled rounds: what they cost, what their coins are, and the noise that really is added.

A round of the benches is that of answering agents.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from scipy import stats

from benchmarks import sums as benches
from benchmarks.sums import SampledSum, poisson_sample, private_sum, with_budget
from labeler.accounting import integer
from labeler.budget import Account
from labeler.noise import VectorSum
from labeler.randomness import seeded_source
from labeler.tally import QueryBatch
from labeler.task import Task, parse_task
from tests.answering import AnsweringAgent
from tests.one_round import run_round
from workers.agent.agent import Agent, InMemoryLedger

SPEC = VectorSum(dimension=400, largest_norm=1.0, sensitivity=2.0, sigma=3.0, agents=20)


@pytest.mark.parametrize("level", ["agent", "instance"])
def test_a_budget_is_kept_and_used(level) -> None:
    plan = with_budget(SampledSum(SPEC, level, 0.3, 25), 2.7, 1e-3)
    assert 2.7 * (1 - 5e-3) < plan.epsilon(1e-3) <= 2.7
    assert plan.epsilon(1e-3) < plan.as_in_paper_epsilon(1e-3)
    assert (plan.rounds, plan.level, plan.spec.dimension) == (25, level, 400)


def test_sampling_everybody_once_costs_what_one_sum_costs() -> None:
    plan = SampledSum(SPEC, "agent", 1.0, 1)
    assert plan.epsilon(1e-4) == pytest.approx(integer.epsilon_bound(SPEC.event("agent"), 1e-4), rel=1e-3)


def test_a_planned_sum_adds_the_noise_that_the_accountant_was_told() -> None:
    """Chi-square on 400 x 40 coordinates of real private sums of zeros; false alarms below 1e-6 (both tails 2e-7)."""
    plan = with_budget(SampledSum(SPEC, "agent", 0.3, 25), 2.7, 1e-3)
    sums = [
        private_sum(
            plan.spec,
            [np.zeros(400)] * 20,
            sources=[seeded_source(f"planned noise {repetition} {agent}".encode()) for agent in range(20)],
        )
        for repetition in range(40)
    ]
    told = plan.accounted.noise_multiplier * plan.spec.largest_norm
    statistic = float(np.square(np.concatenate(sums) / told).sum())
    low, high = stats.chi2.ppf([2e-7, 1 - 2e-7], 400 * 40)
    # What is told is up to 0.3 % below what is added, because rounding is paid for.
    assert low < statistic < high * 1.006


@pytest.mark.parametrize("probability", [0.05, 0.5, 0.93])
def test_coins_fall_with_their_probability_and_independently(probability: float) -> None:
    """Two binomial tests of false-alarm rate 5e-7 each; the source is seeded, so the outcome is fixed."""
    coins = poisson_sample(seeded_source(b"coins"), 200_000, probability)
    assert stats.binomtest(int(coins.sum()), 200_000, probability).pvalue > 5e-7
    both = coins[0::2] & coins[1::2]
    assert stats.binomtest(int(both.sum()), 100_000, probability**2).pvalue > 5e-7


QUERIES = 9


def task_for(classes: Sequence[str], fingerprint: str, **changes: object) -> Task:
    fields: dict[str, object] = {
        "name": "t", "classes": tuple(classes), "k": 5, "sigma_votes": 1.0, "delta": 1e-4, "max_queries": QUERIES,
        "agents": 3, "max_dropouts": 1, "backbone_fingerprint": fingerprint, "release": "winner",
    }  # fmt: skip
    return parse_task(fields | changes)


@pytest.fixture
def batch(make_shard) -> QueryBatch:
    return QueryBatch(make_shard("public", records=QUERIES, seed=99, public=True).features[:])


@pytest.fixture
def task(make_shard) -> Task:
    shard = make_shard("for its classes")
    return task_for(shard.classes, shard.fingerprint)


def test_a_round_of_the_benches_is_the_round_of_answering_agents(make_shard) -> None:
    shards = [make_shard(f"s{number}", seed=number) for number in range(3)]
    batch = QueryBatch(make_shard("public", records=QUERIES, seed=99, public=True).features[:])
    secrets = [bytes([number]) * 32 for number in range(3)]
    task = task_for(shards[0].classes, shards[0].fingerprint, release="histogram", max_dropouts=0)
    ours = [(Agent(f"a{n}", shard), secret) for n, (shard, secret) in enumerate(zip(shards, secrets, strict=True))]
    theirs = [
        AnsweringAgent(
            f"a{n}", shard, ledger=InMemoryLedger({"instance": Account("own", "instance", 10**18)}), noise_secret=secret
        )
        for n, (shard, secret) in enumerate(zip(shards, secrets, strict=True))
    ]
    found, expected = benches.run_round(task, batch, ours), run_round(task, batch, theirs)
    assert np.array_equal(np.asarray(found.noisy_votes), np.asarray(expected.noisy_votes))
