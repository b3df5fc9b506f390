"""Sums of per-record gradients of linear models, each clipped to a norm: what one record can change, floats included.

    record i --> gradient g_i of its loss --> c_i g_i,  c_i = min(1, C/|g_i|)  --> sum over the records sampled.

Adding or removing one record adds or removes one vector of norm at most C, in real numbers. The gradient of a record
with features x and label y is x (p - e_y)^T, of norm |x| |p - e_y|. So it is clipped without being formed, and the sum
is one matrix product. A record that is not finite or longer than `LONGEST` contributes zero, which is a function of
that record alone.

**Rounding.** Sampled rows are packed, so a record moves others to other places, where they may be rounded otherwise. In
double precision a score is off by at most 2 d 2^-53 |x| |w|. So all n gradients together are off by n d 2^-50 |x|^2
|w|, and the sum itself by n^2 2^-52 C. The sums of two neighbors may differ beyond C by at most half of the margin
2^-12 C that `sum_sensitivity` pays for. To keep to it, n is bounded, and models so long that the first term could reach
2^-14 C are refused.

References: Abadi et al. 2016, algorithm 1 (clipping per example). Higham 2002, section 4.2 (error of a sum).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from labeler.errors import InvalidSetting, PrivacyRefusal

Parameters: TypeAlias = Mapping[str, Tensor]

SENSITIVITY_MARGIN = 2.0**-12
"""Relative surcharge on the clipping norm for rounding, derived in the module's docstring."""

LONGEST = 4.0
"""Norm of the longest record that counts."""

_SHRINK = 1 - 2.0**-20
_LEAST = 1e-12
_MOST_ROWS = 100_000


def sum_sensitivity(clip_norm: float) -> float:
    """Return the most by which one record moves a sum of `linear_gradient_sums`, in L2 norm.

    Args:
        clip_norm: C, at least 1e-12 (below, products of floats could vanish).
    """
    if not _LEAST <= clip_norm < float("inf"):
        raise InvalidSetting(f"clip_norm must be finite and at least {_LEAST:g}, found {clip_norm}")
    return clip_norm * (1 + SENSITIVITY_MARGIN)


def linear_gradient_sums(
    weights: Tensor, inputs: Tensor, labels: Tensor, sampled: Tensor, *, clip_norm: float
) -> Tensor:
    """Return for each of M models the sum of its sampled records' gradients; not private before noise is added.

    Args:
        weights: of multinomial logistic regression, float64, shape (M, d, classes).
        inputs: shape (M, n, d).
        labels: int64, shape (M, n).
        sampled: bool, shape (M, n); a row that is not sampled may hold anything.
        clip_norm: C, L2 norm.

    Returns:
        float64, shape (M, d, classes).
    """
    count, dimension = inputs.shape[1:]
    longest = float(weights.square().sum(1).max().sqrt())
    # Models are functions of what was released, so refusing reveals nothing.
    if count > _MOST_ROWS or not count * dimension * 2.0**-50 * LONGEST**2 * longest <= 2.0**-14 * clip_norm:
        raise PrivacyRefusal(
            f"{count} rows and a model of length {longest:.3g} leave the range in which rounding is proved harmless; "
            "lower the learning rate"
        )
    sums = torch.zeros_like(weights)
    for model, (own, truth, chosen) in enumerate(zip(inputs, labels, sampled, strict=True)):
        x = own[chosen].double()
        lengths = x.square().sum(1).sqrt()
        counts = lengths <= LONGEST  # false for NaN as well
        x, lengths, y = x[counts], lengths[counts], truth[chosen][counts]
        error = torch.softmax(x @ weights[model], 1)
        error[torch.arange(len(y)), y] -= 1
        norms = lengths * error.square().sum(1).sqrt()
        factors = _SHRINK * (clip_norm / norms.clamp_min(_LEAST)).clamp_max(1.0)
        sums[model] = x.T @ (error * factors[:, None])
    return sums


def flatten(params: Parameters, *, leading: int = 0) -> Tensor:
    """Return all parameters in one vector, in the order of the mapping.

    Args:
        params: by name.
        leading: how many leading axes to keep (1 for N models at once: shape (N, D)).
    """
    return torch.cat([value.flatten(leading) for value in params.values()], dim=-1)


def unflatten(vector: Tensor, like: Parameters) -> dict[str, Tensor]:
    """Invert `flatten`: return parameters shaped like those of `like`, from a vector of shape (D,)."""
    parts = torch.split(vector, [value.numel() for value in like.values()])
    return {name: part.reshape(value.shape) for (name, value), part in zip(like.items(), parts, strict=True)}
