"""The models of many clients and their records, behind one face: clipped gradient sums of sampled records.

Training (`benchmarks.learning.personalised`) sees a model as a vector of D numbers per client and asks for two
things: the sum of the clipped gradients of the records that were sampled, and how many test records a vector gets
right. There are two kinds: a linear layer, whose per-record gradients need never be written down, and any network, by
`benchmarks.learning.gradients`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from benchmarks.learning.gradients import clipped_gradient_sums, flatten, unflatten
from labeler.errors import BadData, InvalidSetting, PrivacyRefusal

NO_RECORD = -1
"""The label of a row that only fills an array up: it is no record, and never sampled."""

_SHRINK = 1 - 2.0**-20
_LEAST = 1e-12
_ROWS_AT_ONCE = 1 << 10
_MOST_ROWS = 100_000


class ClientModels(Protocol):
    """N clients with records of their own and a model of one architecture.

    Attributes:
        labels: (N, n) int64; NO_RECORD where a client has fewer records than rows.
        dimension: D, numbers per model.
    """

    @property
    def labels(self) -> Tensor: ...

    @property
    def dimension(self) -> int: ...

    def start(self, *, seed: int) -> Tensor:
        """The model that every client starts from, float64, shape (D,); public."""
        ...

    def gradient_sums(self, clients: Tensor, models: Tensor, sampled: Tensor, *, clip_norm: float) -> Tensor:
        """Per client the sum of its sampled records' gradients, each clipped to `clip_norm`.

        Adding or removing one record moves the client's sum by at most
        `benchmarks.learning.gradients.sum_sensitivity`.

        Args:
            clients: which of the N, int64, shape (M,).
            models: their models, float64, shape (M, D).
            sampled: their sampled rows, bool, shape (M, n).
            clip_norm: L2 norm.

        Returns:
            float64, shape (M, D). Not private before noise is added.
        """
        ...

    def correct(self, models: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
        """Which test records each model gets right, bool, shape (N, t): (N, D) models on (N, t, ...) inputs."""
        ...


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

    def start(self, *, seed: int) -> Tensor:
        """Zeros: the problem is convex, so a seed would change nothing."""
        del seed
        return torch.zeros(self.dimension, dtype=torch.float64)

    def gradient_sums(self, clients: Tensor, models: Tensor, sampled: Tensor, *, clip_norm: float) -> Tensor:
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
        scores = torch.bmm(inputs.double(), models.reshape(len(models), -1, self.num_classes))
        return scores.argmax(2) == labels


@dataclass(frozen=True, eq=False)
class NetworkClients:
    """Any network that treats its rows one by one; the gradients of `benchmarks.learning.gradients`.

    Every row is computed in every step, whether it was sampled or not, so that none changes its place.

    Attributes:
        module: the architecture; its own weights are the common start.
        inputs: (N, n, ...) float32.
        labels: (N, n) int64, NO_RECORD for rows that are none.
    """

    module: nn.Module
    inputs: Tensor = field(repr=False)
    labels: Tensor = field(repr=False)

    @property
    def dimension(self) -> int:
        return sum(value.numel() for value in self.module.parameters())

    def start(self, *, seed: int) -> Tensor:
        """The module's weights."""
        del seed
        return flatten({name: value.detach() for name, value in self.module.named_parameters()}).double()

    def gradient_sums(self, clients: Tensor, models: Tensor, sampled: Tensor, *, clip_norm: float) -> Tensor:
        sums = clipped_gradient_sums(
            self.module, self._named(models), self.inputs[clients], self.labels[clients].clamp_min(0), sampled.float(),
            clip_norm=clip_norm,
        )  # fmt: skip
        return flatten(sums, leading=1)

    def correct(self, models: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
        scores: Tensor = vmap(lambda own, rows: functional_call(self.module, own, (rows,)))(self._named(models), inputs)
        return scores.detach().argmax(2) == labels

    def _named(self, models: Tensor) -> dict[str, Tensor]:
        like = {
            name: value.detach().expand(len(models), *value.shape) for name, value in self.module.named_parameters()
        }
        return unflatten(models.float(), like, leading=1)
