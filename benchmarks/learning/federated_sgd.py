"""Federated SGD that is private for every record: the papers' DP-FedSGD, on the private sum.

    each step: coins per record --> clipped per-record gradients, summed at the agent --> summed privately over agents
               --> divided by the public expected batch --> one step of the server's model

**Instance level.** Every record of every agent is in a step's batch with probability q, independently, and nobody sees
which are. A record in the batch moves its agent's sum by at most `sum_sensitivity(C)`, floats included; the
`SampledSum` of level "instance" with that sensitivity is the price of all steps. Two things are needed for the proof
to be about what runs:

* *Places.* The batch has a fixed, public number of places, and sampled records take places in uniformly random order
  (`benchmarks.sums.random_places`). Without a record, the others' places have the same law; pairing equal
  places, only the record's own place differs, and `benchmarks.learning.gradients` bounds what that does.
* *Room.* If more records are sampled than there are places, the agent sends zeros. `plan_fed_sgd` makes that as rare as
  `_FAILURES` over the whole training for agents of up to `most_records` records, and the accountant pays for it.

The number of records is private at instance level: the server divides by a public number, and an agent with more
records than `most_records` is refused.

References: Truex et al. 2019 and Peterson et al. 2019 (DP-FedSGD); Abadi et al. 2016, algorithm 1 (noisy SGD).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import binom
from torch import Tensor, nn

from benchmarks.learning.federated import Descent, ServerStep, SourceOf
from benchmarks.learning.gradients import clipped_gradient_sums, flatten, sum_sensitivity, unflatten
from benchmarks.learning.together import Parameters, of_each
from benchmarks.sums import SampledSum, poisson_sample, private_sum, random_places, with_budget
from labeler.errors import InvalidSetting, PrivacyRefusal
from labeler.noise import VectorSum
from labeler.randomness import ByteSource
from workers.progress import ProgressCallback, silent

_FAILURES = 1e-16


@dataclass(frozen=True)
class FedSgdPlan:
    """What all parties agree on before DP-FedSGD starts; `sampled.epsilon(delta)` is its price.

    Attributes:
        sampled: rounds, probability, noise; level "instance".
        clip_norm: C, bound on one record's gradient.
        capacity: places in one agent's batch.
        most_records: an agent's records, at most; public.
    """

    sampled: SampledSum
    clip_norm: float
    capacity: int
    most_records: int

    def __post_init__(self) -> None:
        spec, needed = self.sampled.spec, sum_sensitivity(self.clip_norm)
        if self.sampled.level != "instance" or spec.sensitivity < needed or self.capacity < 1:
            raise InvalidSetting(
                f"DP-FedSGD protects records, whose gradients of norm {self.clip_norm:g} move a sum by {needed:g}; the "
                f"plan is for {self.sampled.level} level and a sensitivity of {spec.sensitivity:g}"
            )
        failures = _failure(self.most_records, self.sampled.sampling_probability, self.capacity) * spec.agents
        if failures > self.sampled.failure_probability:
            raise InvalidSetting(
                f"a batch of {self.capacity} places overflows with probability {failures:.1e} a round, more than the "
                f"{self.sampled.failure_probability:.1e} that are paid for"
            )


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
) -> FedSgdPlan:
    """The plan with the least noise that a budget allows.

    Args:
        epsilon, delta: of the whole training, per record.
        dimension: parameters of the model.
        agents: N.
        most_records: public bound on one agent's records.
        clip_norm: C.
        probability: q, of a record to be in a step's batch.
        rounds: steps.
    """
    capacity = _capacity(most_records, probability, _FAILURES / (agents * rounds))
    sensitivity = sum_sensitivity(clip_norm)
    spec = VectorSum(
        dimension=dimension,
        largest_norm=capacity * sensitivity,
        sensitivity=sensitivity,
        sigma=sensitivity,
        agents=agents,
    )
    failure = _failure(most_records, probability, capacity) * agents
    sampled = with_budget(SampledSum(spec, "instance", probability, rounds, failure), epsilon, delta)
    return FedSgdPlan(sampled, clip_norm, capacity, most_records)


def dp_fed_sgd(
    module: nn.Module,
    params: Parameters,
    inputs: Tensor,
    labels: Tensor,
    *,
    sizes: Sequence[int],
    plan: FedSgdPlan,
    expected_batch: float,
    server: ServerStep,
    source_of: SourceOf,
    progress: ProgressCallback = silent,
) -> Parameters:
    """Train one model on the records of all agents, private for every record.

    Args:
        module: the network; it treats rows one by one.
        params: where to start, no leading axis.
        inputs: float32, shape (N, records, ...), the first `sizes[i]` of which are agent i's.
        labels: int64, shape (N, records).
        sizes: records of each agent.
        plan: of `plan_fed_sgd`.
        expected_batch: public number the sum is divided by: about q times all records.
        server: its learning rate is that of SGD.
        source_of: secret sources of coins, places, noise and shares; in production each agent has its own.
        progress: told how many steps are done.

    Returns:
        The model.

    Raises:
        InvalidSetting: the plan is for other numbers of agents or parameters.
        PrivacyRefusal: an agent has more records than the plan's room was made for.
    """
    spec, rounds = plan.sampled.spec, plan.sampled.rounds
    start = flatten(params).double().numpy()
    if spec.dimension != start.size or spec.agents != len(inputs) or not expected_batch > 0:
        raise InvalidSetting(
            f"the plan is for {spec.agents} agents and {spec.dimension} parameters, found {len(inputs)} and "
            f"{start.size}; the expected batch must be positive, found {expected_batch}"
        )
    if max(sizes) > plan.most_records:
        raise PrivacyRefusal(f"an agent has more than the {plan.most_records} records that the plan has room for")
    descent = Descent(server, rounds, start)
    for number in range(rounds):
        batch = [
            draw_batch(source_of(f"round {number}, agent {agent}"), plan, size) for agent, size in enumerate(sizes)
        ]
        model = unflatten(torch.from_numpy(descent.position).float(), params)
        sums = batch_sums(module, model, inputs, labels, batch, clip_norm=plan.clip_norm)
        total = private_sum(
            spec,
            sums,
            sources=(source_of(f"round {number}, noise of agent {agent}") for agent in range(spec.agents)),
        )
        descent.move(-total / expected_batch)
        progress("DP-FedSGD", number + 1, rounds)
    return unflatten(torch.from_numpy(descent.result).float(), params)


@dataclass(frozen=True, eq=False, repr=False)
class Batch:
    """Which record is in each place of one agent's batch. Secret; does not print.

    Attributes:
        rows: int64, shape (capacity,); anything where a place is empty.
        is_taken: bool, shape (capacity,).
    """

    rows: NDArray[np.int64]
    is_taken: NDArray[np.bool_]


def draw_batch(source: ByteSource, plan: FedSgdPlan, size: int) -> Batch:
    """One step's coins for an agent's records, and random places for those sampled; all empty if they do not fit."""
    sampled = np.flatnonzero(poisson_sample(source, size, plan.sampled.sampling_probability))
    rows, is_taken = np.zeros(plan.capacity, dtype=np.int64), np.zeros(plan.capacity, dtype=np.bool_)
    if len(sampled) <= plan.capacity:
        places = random_places(source, len(sampled), plan.capacity)
        rows[places], is_taken[places] = sampled, True
    return Batch(rows, is_taken)


def batch_sums(
    module: nn.Module, model: Parameters, inputs: Tensor, labels: Tensor, batches: Sequence[Batch], *, clip_norm: float
) -> NDArray[np.float64]:
    """Every agent's sum of clipped gradients over its batch, float64, shape (N, D); secret before noise.

    An empty place holds a blank record of weight 0, so that nothing else in the batch moves when a record leaves.
    """
    rows = torch.from_numpy(np.stack([batch.rows for batch in batches]))
    is_taken = torch.from_numpy(np.stack([batch.is_taken for batch in batches]))
    shown, wanted = of_each(inputs, rows), of_each(labels, rows)
    shown[~is_taken], wanted[~is_taken] = 0.0, 0
    models = {name: value.expand(len(rows), *value.shape) for name, value in model.items()}
    sums = clipped_gradient_sums(module, models, shown, wanted, is_taken.long(), clip_norm=clip_norm)
    total: NDArray[np.float64] = flatten(sums, leading=1).numpy()
    return total


def _capacity(most_records: int, probability: float, failure: float) -> int:
    if most_records < 1:
        raise InvalidSetting(f"most_records must be at least 1, found {most_records}")
    capacity = max(1, int(np.ceil(most_records * probability)))
    while _failure(most_records, probability, capacity) > failure:
        capacity += 1
    return capacity


def _failure(most_records: int, probability: float, capacity: int) -> float:
    """Probability that more records are sampled than there are places; enlarged for rounding."""
    return 0.0 if capacity >= most_records else float(binom.sf(capacity, most_records, probability)) * (1 + 1e-6)
