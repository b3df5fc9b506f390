"""Federated training: the papers' FedAvg, DP-FedAvg (private for whole agents) and DP-FedSGD (for every record).

A round of averaging, where "DP" marks what only the private one does.

    the global model --> every sampled agent runs SGD on its own records --> its update, theta_i - theta
                     --> (DP: clipped to S, summed privately) --> the mean moves the model.

**DP-FedAvg, agent level (zero-out).** Agent i's vector in a round is Delta_i min(1, S/|Delta_i|), all parameters in one
vector, or zero if its coin says so; its norm is at most S. Replacing everything an agent ever sends by zero changes one
summand of each round, by at most S when sampled. So the `SampledSum` at level "agent" with largest_norm S is the price
of all rounds together, whatever the agents do locally and however the server uses what was opened. The server divides
by the public expected number of agents, q N: dividing by the number really sampled would reveal it. In double precision
the clipped norm stays below S because the factor is lowered by 2^-40. An update that is not finite becomes zero, which
is again a matter of that agent alone.

What the server does with the sums is post-processing: momentum, and averaging the models of the last rounds, which
removes noise at no cost.

References: McMahan et al. 2017 (FedAvg); McMahan et al. 2018, algorithm 1, flat clipping and the estimator with the
expected denominator (DP-FedAvg); Geyer et al. 2017.

**DP-FedSGD** trains a linear model, and is private for every record. A step.

    coins per record --> clipped per-record gradients, summed at the agent --> summed privately over agents
               --> divided by the public expected batch --> one step of the server's model.

Every record of every agent is in a step's sum with probability q, independently, and nobody sees which are. It moves
its agent's sum by at most `sum_sensitivity(C)`, floats included (`benchmarks.learning.gradients`). So the `SampledSum`
of level "instance" with that sensitivity is the price of all steps. The number of records is private at instance level:
the server divides by a public number, and an agent with more records than `most_records` is refused.

References: Truex et al. 2019 and Peterson et al. 2019 (DP-FedSGD); Abadi et al. 2016, algorithm 1 (noisy SGD).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.learning.gradients import flatten, linear_gradient_sums, sum_sensitivity, unflatten
from benchmarks.learning.together import Parameters, Training, apply_together, batches, of_each
from benchmarks.sums import SampledSum, poisson_sample, private_sum, with_budget
from labeler.errors import InvalidSetting, PrivacyRefusal
from labeler.noise import VectorSum
from labeler.randomness import ByteSource
from workers.progress import ProgressCallback, silent

SourceOf = Callable[[str], ByteSource]
"""Returns a secret source for each purpose ("round 3, noise of agent 7"); no purpose is asked for twice."""

_SHRINK = 1 - 2.0**-40
_GROUP = 25


@dataclass(frozen=True)
class LocalTraining:
    """A sampled agent's work between receiving the global model and sending its update: plain SGD.

    Attributes:
        iterations: E, steps of SGD, over its own records in random order, again and again if need be.
        batch_size: records per step.
        learning_rate: in the first round.
        last_learning_rate: in the last round; in between it falls geometrically.
    """

    iterations: int = 20
    batch_size: int = 30
    learning_rate: float = 0.1
    last_learning_rate: float | None = None

    def rate(self, number: int, rounds: int) -> float:
        """Return the learning rate of round `number` of `rounds`, counted from 0."""
        last = self.learning_rate if self.last_learning_rate is None else self.last_learning_rate
        share: float = (last / self.learning_rate) ** (number / max(1, rounds - 1))
        return self.learning_rate * share


@dataclass(frozen=True)
class ServerStep:
    """The move of the global model by the mean update of a round.

    Attributes:
        learning_rate: 1 adds the mean update as it is.
        momentum: of the heavy-ball method, in [0, 1).
        averaged: share of the rounds, the last ones, whose models are averaged into the result, in [0, 1]; 0 returns
            the last model.
    """

    learning_rate: float = 1.0
    momentum: float = 0.0
    averaged: float = 0.0


@dataclass
class Descent:
    """The server's model along the rounds; everything here has been opened already."""

    step: ServerStep
    rounds: int
    position: NDArray[np.float64]
    _velocity: NDArray[np.float64] = field(init=False)
    _sum: NDArray[np.float64] = field(init=False)
    _moves: int = 0
    _summed: int = 0

    def __post_init__(self) -> None:
        self._velocity, self._sum = np.zeros_like(self.position), np.zeros_like(self.position)

    def move(self, update: NDArray[np.float64]) -> None:
        """Take the mean update of one round."""
        self._velocity = self.step.momentum * self._velocity + update
        self.position = self.position + self.step.learning_rate * self._velocity
        self._moves += 1
        if self._moves > self.rounds * (1 - self.step.averaged):
            self._sum += self.position
            self._summed += 1

    @property
    def result(self) -> NDArray[np.float64]:
        """Return the final model."""
        return self._sum / self._summed if self._summed else self.position


def local_updates(
    module: nn.Module,
    params: Parameters,
    inputs: Tensor,
    labels: Tensor,
    *,
    sizes: Sequence[int],
    training: LocalTraining,
    learning_rate: float,
    seeds: Sequence[int],
) -> Tensor:
    """Return how far each of some agents moves the global model on its own records; secret.

    Args:
        module, params, inputs, labels, sizes: as in `fed_avg`, of those agents.
        training: iterations and batch size.
        learning_rate: of this round.
        seeds: one per agent, of the order of its records.

    Returns:
        theta_i - theta, float64, shape (agents, D).
    """
    start = flatten(params).double()
    per_epoch = math.ceil(inputs.shape[1] / training.batch_size)
    schedule = Training(epochs=math.ceil(training.iterations / per_epoch), batch_size=training.batch_size)
    updates = []
    for first in range(0, len(inputs), _GROUP):
        part = slice(first, first + _GROUP)
        own, own_labels = inputs[part], labels[part]
        moving = {
            name: value.detach().expand(len(own), *value.shape).clone().requires_grad_()
            for name, value in params.items()
        }
        weights = list(moving.values())
        steps = batches(schedule, seeds[part], sizes[part], own.shape[1])
        for rows, _ in islice(steps, training.iterations):
            logits = apply_together(module, moving, of_each(own, rows))
            wanted = of_each(own_labels, rows).flatten()
            # The mean over an agent's batch, the sum over agents: every agent's gradient is its own.
            loss = functional.cross_entropy(logits.flatten(0, 1), wanted, reduction="sum") / rows.shape[1]
            gradients = torch.autograd.grad(loss, weights)
            with torch.no_grad():
                torch._foreach_add_(weights, gradients, alpha=-learning_rate)
        updates.append(flatten({name: value.detach() for name, value in moving.items()}, leading=1).double() - start)
    return torch.cat(updates)


def clipped(updates: Tensor, clip_norm: float) -> Tensor:
    """Scale each row to a norm of at most S; rows that are not finite become zero. Float64, same shape."""
    updates = updates.double()
    squared = updates.square().sum(-1, keepdim=True)
    factors = (clip_norm / squared.sqrt().clamp_min(1e-300)).clamp_max(1.0) * _SHRINK
    return torch.where(squared.isfinite(), updates * factors, 0.0)


@dataclass(frozen=True)
class OpenRounds:
    """Rounds of FedAvg without privacy, in place of a `SampledSum`.

    Attributes:
        rounds: T.
        sampling_probability: of an agent to be sampled in a round.
    """

    rounds: int
    sampling_probability: float


def fed_avg(
    module: nn.Module,
    params: Parameters,
    inputs: Tensor,
    labels: Tensor,
    *,
    sizes: Sequence[int],
    plan: SampledSum | OpenRounds,
    training: LocalTraining,
    server: ServerStep | None = None,
    source_of: SourceOf,
    progress: ProgressCallback = silent,
) -> Parameters:
    """Run FedAvg, or DP-FedAvg: private for whole agents at the price `plan.epsilon(delta)`; see the module.

    Args:
        module: the network, without buffers.
        params: the start, no leading axis.
        inputs: all agents' records, float32, shape (N, records, ...).
        labels: int64, shape (N, records).
        sizes: records of each agent.
        plan: rounds, probability and noise. A `SampledSum` is of level "agent", and its spec's largest_norm is the
            clipping norm S. Without noise, each round's mean is over the agents sampled, each counting the same.
        training: of the agents, by SGD.
        server: how the model moves.
        source_of: secret sources of coins, noise, shares and orders. In production each agent has its own.

    Returns:
        The global model.
    """
    start, agents = flatten(params).double().numpy(), len(inputs)
    if isinstance(plan, SampledSum) and (plan.level, plan.spec.dimension, plan.spec.agents) != (
        "agent", start.size, agents,
    ):  # fmt: skip
        raise InvalidSetting(
            f"the plan is for {plan.spec.agents} agents and {plan.spec.dimension} parameters at {plan.level} level, "
            f"found {agents} agents and {start.size} parameters; DP-FedAvg is private at agent level"
        )
    descent, nothing = Descent(server or ServerStep(), plan.rounds, start), np.zeros(start.size)
    for number in range(plan.rounds):
        coins = source_of(f"round {number}, coins")
        chosen = np.flatnonzero(poisson_sample(coins, agents, plan.sampling_probability))
        updates = torch.zeros((0, start.size), dtype=torch.float64)
        if len(chosen):
            words = source_of(f"round {number}, orders").uint64(agents)
            updates = local_updates(
                module,
                _model(descent.position, params),
                inputs[torch.from_numpy(chosen)],
                labels[torch.from_numpy(chosen)],
                sizes=[sizes[agent] for agent in chosen.tolist()],
                training=training,
                learning_rate=training.rate(number, plan.rounds),
                seeds=[int(words[agent] >> np.uint64(2)) for agent in chosen.tolist()],
            )
        if isinstance(plan, OpenRounds):
            descent.move(updates.mean(0).numpy() if len(chosen) else nothing)
        else:
            of_agent = dict(zip(chosen.tolist(), clipped(updates, plan.spec.largest_norm).numpy(), strict=True))
            total = private_sum(
                plan.spec,
                (of_agent.get(agent, nothing) for agent in range(agents)),
                sources=(source_of(f"round {number}, noise of agent {agent}") for agent in range(agents)),
            )
            descent.move(total / (plan.sampling_probability * agents))
        progress("FedAvg", number + 1, plan.rounds)
    return _model(descent.result, params)


def _model(position: NDArray[np.float64], like: Parameters) -> Parameters:
    return unflatten(torch.from_numpy(position).float(), like)


def plan_fed_sgd(
    *,
    epsilon: float,
    delta: float,
    dimension: int,
    agents: int,
    most_records: int,
    clip_norm: float,
    probability: float,
    rounds: int,
) -> SampledSum:
    """Return the sum with the least noise that a budget for the whole training allows, per record.

    Args:
        most_records: public bound on one agent's records.
        clip_norm: C.
        probability: q, of a record to be in a step's sum.
        rounds: steps.
    """
    sensitivity = sum_sensitivity(clip_norm)
    spec = VectorSum(
        dimension=dimension,
        largest_norm=most_records * sensitivity,
        sensitivity=sensitivity,
        sigma=sensitivity,
        agents=agents,
    )
    return with_budget(SampledSum(spec, "instance", probability, rounds), epsilon, delta)


def dp_fed_sgd(
    params: Parameters,
    inputs: Tensor,
    labels: Tensor,
    *,
    sizes: Sequence[int],
    plan: SampledSum,
    clip_norm: float,
    expected_batch: float,
    server: ServerStep,
    source_of: SourceOf,
    progress: ProgressCallback = silent,
) -> Parameters:
    """Train one linear model on the records of all agents, private for every record.

    Args:
        params: of `torch.nn.Linear`, where to start, no leading axis.
        inputs, labels, sizes: as in `fed_avg`.
        plan: of `plan_fed_sgd`.
        clip_norm: C, which the plan was made for.
        expected_batch: public number the sum is divided by: about q times all records.
        server: its learning rate is that of SGD.
        source_of: secret sources of coins, noise and shares; in production each agent has its own.

    Returns:
        The model.
    """
    spec, start = plan.spec, _matrix(params)
    if plan.level != "instance" or spec.dimension != start.numel() or spec.agents != len(inputs):
        raise InvalidSetting(
            f"the plan is for {spec.agents} agents and {spec.dimension} parameters at {plan.level} level, found "
            f"{len(inputs)} agents and {start.numel()} parameters; DP-FedSGD is private at instance level"
        )
    if spec.sensitivity < sum_sensitivity(clip_norm) or max(sizes) * spec.sensitivity > spec.largest_norm:
        raise PrivacyRefusal("the plan has room for fewer records, or for shorter gradients; plan with these numbers")
    ones = torch.cat([inputs, torch.ones_like(inputs[..., :1])], dim=2)
    exists = torch.arange(inputs.shape[1]) < torch.tensor(sizes)[:, None]
    descent = Descent(server, plan.rounds, start.flatten().numpy())
    for number in range(plan.rounds):
        coins = [
            poisson_sample(source_of(f"round {number}, coins of agent {agent}"), len(own), plan.sampling_probability)
            for agent, own in enumerate(exists)
        ]
        model = torch.from_numpy(descent.position).reshape(start.shape)
        sums = linear_gradient_sums(
            model.expand(len(ones), *model.shape), ones, labels, exists & torch.from_numpy(np.stack(coins)),
            clip_norm=clip_norm,
        )  # fmt: skip
        total = private_sum(
            spec,
            sums.flatten(1).numpy(),
            sources=(source_of(f"round {number}, noise of agent {agent}") for agent in range(spec.agents)),
        )
        descent.move(-total / expected_batch)
        progress("DP-FedSGD", number + 1, plan.rounds)
    found = torch.from_numpy(descent.result).reshape(start.shape).float()
    return {"weight": found[:-1].T, "bias": found[-1]}


def _matrix(params: Parameters) -> Tensor:
    """Return a linear model as float64, shape (d + 1, classes); the last row is the intercept."""
    return torch.cat([params["weight"].T, params["bias"][None]]).double()
