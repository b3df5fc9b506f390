"""PriFedSync: clients that train models of their own with noise of their own, and draw on each other through a mean.

    round r, for every client i of the round's schedule:
      pull       h_i = (1 - alpha) w_i + alpha w_global                             (equation 2.1)
      K times    g   = sum over a Poisson sample of its records of clipped gradients
                 g~  = g on the integer grid + its own discrete Gaussian noise      (`labeler.noise`)
                 w_i = optimiser step along g~ / B                                  (noisy SGD or noisy Adam)
      send       w_i
    server:      w_global = (1 - eta) w_global + eta mean of the w_i that were sent

**Privacy** (instance level: add or remove one record of one client; n, the schedule and all settings are public). A
step's sum moves by at most C (1 + 2^-12) with the record (`benchmarks.learning.gradients.sum_sensitivity`), which
is in it with probability B/n, by a coin that stays at the client. So a client's K R_i steps are
`benchmarks.accounting.sampled.SampledRounds`, and `PriFedSync.price` is their bound; each step may depend on
everything that was seen before. All else (momentum, Adam's moments, w_i, the mean, helper models, everybody's next
round) is a function of g~ and of other clients' records. **So the bound holds against the server, against any other
client, and against all of them together**: weak and strong federated f-DP are the same here
(`benchmarks.accounting.federated`). The noise of one client protects it alone: `agents=1`, nobody else's is relied
on, and averaging needs no second noise.

**Client sampling.** Who takes part when is drawn beforehand, without looking at data, and public. A client pays for
the rounds it takes part in; the price of training is that of the client with the most.

References:
    Zheng, Chen, Long, Su 2021, algorithms 1 and 2, equation 2.1. Abadi et al. 2016. Kingma, Ba 2015 (Adam).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.accounting.federated import LocalTraining
from benchmarks.accounting.sampled import SampledRounds, epsilon_bound
from benchmarks.learning.client_models import NO_RECORD, ClientModels
from benchmarks.learning.gradients import sum_sensitivity
from labeler.accounting.gaussian import mu_of_epsilon
from labeler.errors import InvalidSetting
from labeler.noise import VectorSum
from labeler.randomness import ByteSource
from workers.progress import ProgressCallback, silent

_DECAY, _SQUARE_DECAY, _STABILISER = 0.9, 0.999, 1e-8


@dataclass(frozen=True)
class PriFedSync:
    """Every number of a training; the defaults are the paper's for MNIST.

    Attributes:
        clients: m.
        records: n, the most records a client may have; public.
        batch: B; a record is in a step's sample with probability B / n. B = n takes all.
        iterations: K, steps between two synchronisations.
        rounds: R, synchronisation rounds.
        noise_multiplier: sigma; each step's noise has standard deviation sigma * clip_norm.
        clip_norm: C, L2 norm of one record's gradient.
        interpolation: alpha, the global model's part of a client's helper model: 0 trains alone, 1 is FedAvg.
        server_rate: eta.
        sync_probability: p, with which each client is in each round of the schedule.
        optimizer: "adam", or "sgd" with momentum.
        learning_rate: of the optimiser, for gradients averaged over B.
        momentum: of "sgd".

    Raises:
        InvalidSetting: a number is out of bounds.
    """

    clients: int = 100
    records: int = 600
    batch: int = 16
    iterations: int = 38
    rounds: int = 93
    noise_multiplier: float = 1.0
    clip_norm: float = 1.0
    interpolation: float = 0.1
    server_rate: float = 1.0
    sync_probability: float = 1.0
    optimizer: Literal["adam", "sgd"] = "adam"
    learning_rate: float = 1e-3
    momentum: float = 0.9

    def __post_init__(self) -> None:
        self.local_training(self.rounds)
        sum_sensitivity(self.clip_norm)
        if self.clients < 1 or self.optimizer not in ("adam", "sgd"):
            raise InvalidSetting(f"training needs clients and an optimizer, adam or sgd; found {self}")
        for name, low in (("interpolation", 0.0), ("server_rate", 0.0), ("momentum", 0.0), ("sync_probability", 1e-9)):
            if not low <= getattr(self, name) <= 1:
                raise InvalidSetting(f"{name} must lie between {low:g} and 1, found {getattr(self, name)}")
        if not 0 < self.learning_rate < math.inf:
            raise InvalidSetting(f"learning_rate must be positive and finite, found {self.learning_rate}")

    def local_training(self, rounds: int) -> LocalTraining:
        """One client's part, for accountants of continuous noise."""
        return LocalTraining(self.records, self.batch, self.noise_multiplier, self.iterations, rounds)

    def noisy_sum(self, dimension: int) -> VectorSum:
        """One step of one client: the sum of its clipped gradients, with noise of its own."""
        sensitivity = sum_sensitivity(self.clip_norm)
        return VectorSum(
            dimension=dimension,
            largest_norm=self.records * sensitivity,
            sensitivity=sensitivity,
            sigma=self.noise_multiplier * self.clip_norm,
            agents=1,
        )

    def price(self, dimension: int, rounds: int, delta: float) -> tuple[float, float]:
        """What a client pays that took part in so many rounds.

        Args:
            dimension: D, numbers per model.
            rounds: R_i.
            delta: in (0, 1).

        Returns:
            (epsilon, mu): the certified epsilon at this delta, and the mu of Gaussian noise that costs the same there.
        """
        # As a fraction, B / n is at most its rounded value times 1 + 2^-52; coins come up a little less often still.
        probability = min(1.0, self.batch / self.records * (1 + 1e-12))
        steps = SampledRounds(self.noisy_sum(dimension).event(), probability, self.iterations * rounds)
        epsilon = epsilon_bound(steps, delta)
        return epsilon, mu_of_epsilon(epsilon, delta)

    def schedule(self, *, seed: int) -> NDArray[np.bool_]:
        """Who takes part in which round: bool, shape (rounds, clients). Public, so the generator need not be secret."""
        drawn = np.random.default_rng(seed).random((self.rounds, self.clients))
        return drawn < self.sync_probability


@dataclass(frozen=True, eq=False)
class Trained:
    """What training leaves behind; all of it is covered by the price.

    Attributes:
        models: w_i, float64, shape (m, D).
        global_model: w_global, float64, shape (D,).
        rounds_taken: R_i, int64, shape (m,).
    """

    models: Tensor = field(repr=False)
    global_model: Tensor = field(repr=False)
    rounds_taken: NDArray[np.int64] = field(repr=False)


def train(
    settings: PriFedSync,
    data: ClientModels,
    *,
    sources: Sequence[ByteSource],
    schedule: NDArray[np.bool_],
    seed: int = 0,
    after_round: Callable[[int, Trained], bool] | None = None,
    progress: ProgressCallback = silent,
) -> Trained:
    """Train all clients, those of a round together in one batch.

    Args:
        settings: the training.
        data: the clients' records and architecture.
        sources: one secret source per client, for its coins and its noise. Seeded ones make a simulation repeatable.
        schedule: of `PriFedSync.schedule`, or any other that was chosen without looking at data.
        seed: of the common start, where the architecture has one.
        after_round: called with the rounds done and the models; True ends training. Whoever stops early pays for all
            rounds of the schedule, unless the decision looked at nothing but what was released.
        progress: told how many rounds are done.

    Returns:
        The models.

    Raises:
        InvalidSetting: data, sources or schedule are of another number of clients or rows.
    """
    clients = settings.clients
    if data.labels.shape != (clients, settings.records) or len(sources) != clients:
        raise InvalidSetting(
            f"the settings say {clients} clients of {settings.records} rows; found labels of shape "
            f"{tuple(data.labels.shape)} and {len(sources)} sources"
        )
    if schedule.dtype != np.bool_ or schedule.ndim != 2 or schedule.shape[1] != clients:
        raise InvalidSetting(f"a schedule says for every round which of {clients} clients take part, as true or false")
    noisy_sum = settings.noisy_sum(data.dimension)
    exists = data.labels != NO_RECORD
    global_model = data.start(seed=seed)
    models = global_model.repeat(clients, 1)
    optimiser = _Optimiser(settings, models)
    taken = np.zeros(clients, dtype=np.int64)
    for number, members in enumerate(schedule):
        progress("PriFedSync rounds", number, len(schedule))
        inside = torch.from_numpy(np.flatnonzero(members))
        if len(inside):
            own = (1 - settings.interpolation) * models[inside] + settings.interpolation * global_model
            for _ in range(settings.iterations):
                coins = [sample(settings, sources[client]) for client in inside.tolist()]
                sampled = torch.from_numpy(np.stack(coins)) & exists[inside]
                sums = data.gradient_sums(inside, own, sampled, clip_norm=settings.clip_norm).numpy()
                noisy = [
                    noisy_sum.open(noisy_sum.contribution(part, source=sources[client]))
                    for client, part in zip(inside.tolist(), sums, strict=True)
                ]
                own = optimiser.step(inside, own, torch.from_numpy(np.stack(noisy)) / settings.batch)
            models[inside] = own
            taken[members] += 1
            global_model = (1 - settings.server_rate) * global_model + settings.server_rate * own.mean(0)
        done = Trained(models, global_model, taken)
        if after_round is not None and after_round(number + 1, done):
            break
    return Trained(models.clone(), global_model, taken)


def sample(settings: PriFedSync, source: ByteSource) -> NDArray[np.bool_]:
    """A Poisson sample: each row by a coin of its own that shows B/n, or less by at most 2^-64.

    Returns:
        bool, shape (records,).
    """
    if settings.batch == settings.records:
        return np.ones(settings.records, dtype=np.bool_)
    below = (settings.batch << 64) // settings.records
    return source.uint64(settings.records) < np.uint64(below)


class _Optimiser:
    """Noisy SGD with momentum, or noisy Adam, with a state per client; see the module for why it costs nothing."""

    def __init__(self, settings: PriFedSync, models: Tensor) -> None:
        self._settings = settings
        self._velocity = torch.zeros_like(models)
        self._squares = torch.zeros_like(models) if settings.optimizer == "adam" else torch.empty(0)
        self._steps = torch.zeros(len(models), 1, dtype=torch.float64)

    def step(self, clients: Tensor, models: Tensor, gradients: Tensor) -> Tensor:
        rate = self._settings.learning_rate
        if self._settings.optimizer == "sgd":
            velocity = self._settings.momentum * self._velocity[clients] + gradients
            self._velocity[clients] = velocity
            return models - rate * velocity
        self._steps[clients] += 1
        steps = self._steps[clients]
        mean = _DECAY * self._velocity[clients] + (1 - _DECAY) * gradients
        squares = _SQUARE_DECAY * self._squares[clients] + (1 - _SQUARE_DECAY) * gradients.square()
        self._velocity[clients], self._squares[clients] = mean, squares
        scaled = (squares / (1 - _SQUARE_DECAY**steps)).sqrt() + _STABILISER
        return models - rate * (mean / (1 - _DECAY**steps)) / scaled
