"""Private sums and rounds in one process, without messages: the simulations of the papers' training loops repeat them.

In a `SampledSum` every contributor takes part in each round at random, as in training by noisy gradients:

    coins, secret --> those sampled contribute their vector, the others zeros; everybody adds its noise share
                  --> the private sum of `labeler.noise`, opened --> the next round.

The coins are privacy: they come from the same kind of secret source as noise, one per record (instance level) or agent
(agent level) and round, and nobody sees them. `benchmarks.accounting.sampled` prices the rounds together.

`run_round` is one round of votes by hand: no coordinator, no machine, no journal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.accounting.sampled import epsilon_bound, noise_multiplier, noise_multiplier_of, renyi_epsilon
from labeler.errors import InvalidSetting, QuorumNotReached, UnsafeGrid
from labeler.noise import VectorSum
from labeler.randomness import ByteSource
from labeler.release import Release, open_histogram, open_winner
from labeler.sharing import split, unshard
from labeler.solving import solve_sigma
from labeler.tally import InputShare, QueryBatch, Round, add_shares, round_of
from labeler.task import Level, Task, parse_task
from workers.agent.agent import Agent, as_it_is, shares_of


def private_sum(
    spec: VectorSum, vectors: Iterable[NDArray[np.floating]], *, sources: Iterable[ByteSource], talliers: int = 2
) -> NDArray[np.float64]:
    """Secret-share every agent's contribution to the talliers, let each sum them, and open the result.

    The same steps as a round of the service, in one process and without messages: for training in simulation.

    Args:
        spec: the sum.
        vectors: one per contributing agent; an agent without data contributes zeros, never nothing.
        sources: one secret source per contributing agent.
        talliers: 2 or 3.

    Returns:
        The noisy sum, float64, shape (dimension,).

    Raises:
        QuorumNotReached: fewer contributors than the quorum.
        PrivacyRefusal: a vector beyond the bound.
    """
    totals = [np.zeros(spec.dimension, dtype=np.uint64) for _ in range(talliers)]
    count = 0
    for vector, source in zip(vectors, sources, strict=True):
        shares = split(spec.contribution(vector, source=source), num_talliers=talliers, source=source)
        for total, share in zip(totals, shares, strict=True):
            total += share.expand()
        count += 1
    if count < spec.quorum:
        raise QuorumNotReached(f"{count} agents contributed, the quorum is {spec.quorum}; nothing is opened")
    if count > spec.agents:
        raise InvalidSetting(f"{count} agents contributed to a sum of {spec.agents}")
    return spec.open(unshard(totals))


_TRIES = 60


def least_noise(price: Callable[[float], float], epsilon: float, *, start: float) -> float:
    """Return the least sigma, within a thousandth, whose price is at most epsilon.

    Args:
        price: of a sigma; it falls at least as fast as 1 / sigma.
        epsilon: the budget, positive.
        start: what the continuous mechanism needs; the grid costs a little, so sigma grows from here.
    """
    sigma = start
    for _ in range(_TRIES):
        found = price(sigma)
        if found <= epsilon:
            return sigma
        if math.isinf(found):
            break
        # Nine tenths of the way, so as not to overshoot.
        sigma *= max(1 + 1e-5, 1 + 0.9 * min(1.0, found / epsilon - 1))
    raise UnsafeGrid(f"no such sum is certified at epsilon {epsilon:g}; the price found last is {found:g}")


@dataclass(frozen=True)
class SampledSum:
    """T rounds of one `VectorSum`, each over a fresh Poisson sample that nobody sees.

    Attributes:
        spec: the sum of one round.
        level: what is sampled and protected: "instance", records; "agent", whole agents.
        sampling_probability: q, in (0, 1].
        rounds: T.
    """

    spec: VectorSum
    level: Level
    sampling_probability: float
    rounds: int

    @property
    def noise_multiplier(self) -> float:
        """The standard deviation of the noise over the distance that a sampled contributor makes."""
        return noise_multiplier(self.spec.event(self.level))

    def epsilon(self, delta: float) -> float:
        """Return the certified price of all rounds, an upper bound for the integer mechanism."""
        return epsilon_bound(self.spec.event(self.level), self.sampling_probability, self.rounds, delta)

    def as_in_paper_epsilon(self, delta: float) -> float:
        """Return the price by Renyi divergences and the papers' conversion, for comparison; it is never charged."""
        return renyi_epsilon(
            self.noise_multiplier,
            delta,
            sampling_probability=self.sampling_probability,
            rounds=self.rounds,
        )


def with_budget(plan: SampledSum, epsilon: float, delta: float) -> SampledSum:
    """Return the same rounds with the least noise that a budget for all of them allows, to about two thousandths."""
    moved = plan.spec.sensitivity if plan.level == "instance" else plan.spec.largest_norm
    multiplier = noise_multiplier_of(epsilon, delta, sampling_probability=plan.sampling_probability, rounds=plan.rounds)

    def at(sigma: float) -> SampledSum:
        return replace(plan, spec=replace(plan.spec, sigma=sigma))

    return at(least_noise(lambda sigma: at(sigma).epsilon(delta), epsilon, start=multiplier * moved))


def poisson_sample(source: ByteSource, count: int, probability: float) -> NDArray[np.bool_]:
    """Draw independent coins of probability q, rounded down to a multiple of 2^-64 (a smaller q costs less).

    Args:
        source: secret; one 64-bit word per coin is consumed where the probability is below 1.
        count: how many.
        probability: q, in (0, 1].

    Returns:
        bool, shape (count,). Secret: the price relies on nobody seeing it.
    """
    if not 0 < probability <= 1:
        raise InvalidSetting(f"coins need a probability in (0, 1], found {probability}")
    threshold = math.floor(probability * 2.0**64)
    return np.ones(count, dtype=np.bool_) if threshold >= 2**64 else source.uint64(count) < np.uint64(threshold)


def task_at(epsilon: float, fields: Mapping[str, Any], *, level: Level = "instance") -> Task:
    """Return the task of these fields with the least noise that costs at most epsilon."""
    task = parse_task({**fields, "sigma_votes": 1.0})
    return task.model_copy(update={"sigma_votes": solve_sigma(task, epsilon, level=level)})


def run_round(task: Task, batch: QueryBatch, agents: Sequence[tuple[Agent, bytes]]) -> Release:
    """Ask every agent, add up at the talliers, open what the task releases.

    Args:
        agents: each with the 32 bytes that its noise and masks of the round are drawn from. Nothing is charged.
    """
    round = round_of(task, batch)
    answers = [
        shares_of(agent.agent_id, round, agent.computed(task, batch, key=key, seal=as_it_is).bodies)
        for agent, key in agents
    ]
    return open_sum(task, round, answers)


def open_sum(task: Task, round: Round, answers: Sequence[Sequence[InputShare]]) -> Release:
    """Open what the talliers add up of every agent's shares."""
    sums = [
        add_shares(index, round, {shares[index].agent_id: shares[index].share for shares in answers})
        for index in range(task.talliers)
    ]
    return open_histogram(sums, task) if task.release == "histogram" else open_winner(sums, task)
