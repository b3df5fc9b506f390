"""PriFedSync: clients that train models of their own with noise of their own, and draw on each other through a mean.

    round r, for every client i of the round's schedule:
      pull       h_i = (1 - alpha) w_i + alpha w_global                             (equation 2.1)
      K times    g   = sum over a Poisson sample of its records of clipped gradients
                 g~  = g on the integer grid + its own discrete Gaussian noise      (`labeler.noise`)
                 w_i = a step with momentum along g~ / B                            (noisy SGD)
      send       w_i
    server:      w_global = (1 - eta) w_global + eta mean of the w_i that were sent

**Privacy** (instance level: add or remove one record of one client; n, the schedule and all settings are public). A
step's sum moves by at most C (1 + 2^-12) with the record (`benchmarks.learning.gradients.sum_sensitivity`), which
is in it with probability B/n, by a coin that stays at the client. So a client's K R_i steps are
`benchmarks.accounting.sampled.SampledRounds`, and `PriFedSync.price` is their bound; each step may depend on
everything that was seen before. All else (momentum, w_i, the mean, helper models, everybody's next
round) is a function of g~ and of other clients' records. **So the bound holds against the server, against any other
client, and against all of them together**: weak and strong federated f-DP are the same here
(`benchmarks.accounting.federated`). The noise of one client protects it alone: `agents=1`, nobody else's is relied
on, and averaging needs no second noise.

**Client sampling.** Who takes part when is drawn beforehand, without looking at data, and public. A client pays for
the rounds it takes part in; the price of training is that of the client with the most.

References:
    Zheng, Chen, Long, Su 2021, algorithms 1 and 2, equation 2.1. Abadi et al. 2016.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.accounting.federated import LocalTraining
from benchmarks.accounting.sampled import SampledRounds, epsilon_bound
from benchmarks.learning.gradients import sum_sensitivity
from labeler.accounting.gaussian import mu_of_epsilon
from labeler.errors import BadData, InvalidSetting, PrivacyRefusal
from labeler.noise import VectorSum
from labeler.randomness import ByteSource
from workers.progress import ProgressCallback, silent

NO_RECORD = -1
"""The label of a row that only fills an array up: it is no record, and never sampled."""

_SHRINK = 1 - 2.0**-20
_LEAST = 1e-12
_ROWS_AT_ONCE = 1 << 10
_MOST_ROWS = 100_000


@dataclass(frozen=True, eq=False)
class LinearClients:
    """Multinomial logistic regression without a constant, on features.

    The gradient of a record with features x and label y is x (p - e_y)^T, of norm |x| |p - e_y|: so it is clipped
    without being formed, and the sum is one matrix product. Sampled rows are packed, so a record moves others to
    other places, where they may be rounded otherwise. In double precision a score is off by at most 2 d 2^-53 |x|
    |w|, so all n gradients together by n d 2^-50 |x|^2 |w|, and the sum itself by n^2 2^-52 C. What the sums of two
    neighbours may differ by beyond C is kept within half of the margin 2^-12 C that `sum_sensitivity` pays for: n is
    bounded, and models so long that the first term could reach 2^-14 C are refused.

    Attributes:
        inputs: (N, n, d) float32, rows of norm at most 1.
        labels: (N, n) int64, NO_RECORD for rows that are none.
        num_classes: how many.

    Raises:
        InvalidSetting: shapes or labels do not fit, or there are more than 100,000 rows.
        BadData: a feature is not finite or longer than 1.
    """

    inputs: Tensor = field(repr=False)
    labels: Tensor = field(repr=False)
    num_classes: int

    def __post_init__(self) -> None:
        if self.inputs.ndim != 3 or self.labels.shape != self.inputs.shape[:2] or self.labels.shape[1] > _MOST_ROWS:
            raise InvalidSetting(
                "features must have the shape (clients, rows, dimension) and labels (clients, rows), "
                f"with at most {_MOST_ROWS:,} rows; found {tuple(self.inputs.shape)} and {tuple(self.labels.shape)}"
            )
        if int(self.labels.max()) >= self.num_classes or int(self.labels.min()) < NO_RECORD:
            raise InvalidSetting(f"labels must lie between 0 and {self.num_classes - 1}, or be NO_RECORD")
        if not bool((self.inputs.double().square().sum(2) <= 1 + 1e-5).all()):
            raise BadData("a feature is not finite or longer than 1; divide every row by its own norm")

    @property
    def dimension(self) -> int:
        return self.inputs.shape[2] * self.num_classes

    def gradient_sums(self, clients: Tensor, models: Tensor, sampled: Tensor, *, clip_norm: float) -> Tensor:
        """Per client the sum of its sampled records' gradients, each clipped; not private before noise is added.

        Adding or removing one record moves the client's sum by at most `sum_sensitivity`.

        Args:
            clients: which of the N, int64, shape (M,).
            models: their models, float64, shape (M, D).
            sampled: their sampled rows, bool, shape (M, n).
            clip_norm: L2 norm.

        Returns:
            float64, shape (M, D).
        """
        # The sampled rows of each client first, then as many others as the largest sample needs; those have weight 0.
        most = max(1, int(sampled.sum(1).max()))
        is_all = most == sampled.shape[1]
        rows = torch.arange(most).expand(len(clients), most) if is_all else sampled.int().topk(most, dim=1).indices
        counts = torch.gather(sampled, 1, rows).double()
        weights = models.reshape(len(clients), -1, self.num_classes)
        longest = float(weights.square().sum(1).max().sqrt())
        # Models are functions of what was released, so refusing tells nothing.
        if not self.labels.shape[1] * weights.shape[1] * 2.0**-50 * longest <= 2.0**-14 * clip_norm:
            raise PrivacyRefusal(
                f"a model of length {longest:.3g} has left the range in which rounding is proved harmless; "
                "lower the learning rate"
            )
        sums = torch.empty_like(weights)
        group = max(1, _ROWS_AT_ONCE // most)
        for first in range(0, len(clients), group):
            part = slice(first, first + group)
            own, which = clients[part], rows[part]
            x = (self.inputs[own] if is_all else self.inputs[own[:, None], which]).double()
            y = torch.gather(self.labels[own], 1, which).clamp_min(0)
            error = torch.softmax(torch.bmm(x, weights[part]), 2)
            error.scatter_add_(2, y[..., None], torch.full_like(y, -1.0, dtype=torch.float64)[..., None])
            norms = x.square().sum(2).sqrt() * error.square().sum(2).sqrt()
            factors = _SHRINK * (clip_norm / norms.clamp_min(_LEAST)).clamp_max(1.0) * counts[part]
            sums[part] = torch.bmm(x.transpose(1, 2), error * factors[..., None])
        return sums.flatten(1)

    def correct(self, models: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
        """Which test records each model gets right, bool, shape (N, t): (N, D) models on (N, t, d) inputs."""
        scores = torch.bmm(inputs.double(), models.reshape(len(models), -1, self.num_classes))
        return scores.argmax(2) == labels


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
        learning_rate, momentum: of the steps, for gradients averaged over B.

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
    learning_rate: float = 2.0
    momentum: float = 0.9

    def __post_init__(self) -> None:
        self.local_training(self.rounds)
        sum_sensitivity(self.clip_norm)
        if self.clients < 1:
            raise InvalidSetting(f"training needs clients; found {self}")
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
    data: LinearClients,
    *,
    sources: Sequence[ByteSource],
    schedule: NDArray[np.bool_],
    progress: ProgressCallback = silent,
) -> Trained:
    """Train all clients, those of a round together in one batch.

    Args:
        settings: the training.
        data: the clients' records.
        sources: one secret source per client, for its coins and its noise. Seeded ones make a simulation repeatable.
        schedule: of `PriFedSync.schedule`, or any other that was chosen without looking at data.
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
    # The problem is convex, so zeros are as good a start as any.
    global_model = torch.zeros(data.dimension, dtype=torch.float64)
    models = global_model.repeat(clients, 1)
    velocity = torch.zeros_like(models)
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
                gradients = torch.from_numpy(np.stack(noisy)) / settings.batch
                velocity[inside] = settings.momentum * velocity[inside] + gradients
                own = own - settings.learning_rate * velocity[inside]
            models[inside] = own
            taken[members] += 1
            global_model = (1 - settings.server_rate) * global_model + settings.server_rate * own.mean(0)
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
