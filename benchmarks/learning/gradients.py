"""Sums of per-record gradients, each clipped to a norm: what one record can change is bounded, floats included.

    record i --> gradient g_i of its loss --> c_i g_i,  c_i = min(1, C/|g_i|)  --> sum over the records sampled.

Adding or removing one record then adds or removes one vector of norm at most C, in real numbers. In floating point
three things could let it move more, and each has its answer.

- **Norm and factor.** The norm of the float32 gradient that is really added is computed in pieces of at most 1,024
  numbers in single precision, whose squares are added in double precision. In any order of summation it is off by at
  most a relative 2^-14 / 1.9. So c_i is lowered by 2^-14 before it is rounded to float32, and |c_i g_i| < C.
- **Gradients of the other records.** Batched arithmetic rounds a row by a fixed sequence of operations. It depends on
  shapes and on the row's place, never on what other rows hold. Every batch therefore has a fixed shape, and an absent
  record is a row of weight 0 in its place. The other rows keep their places, so their gradients keep every bit. A
  caller that packs the sampled records into fewer rows must place them at random, independently of the data
  (`labeler`'s proof for mixtures then pairs equal places; see `benchmarks.learning.federated`).
- **The sum.** Rows are summed in float32 in blocks of at most 32, blocks in double precision. In any order, 32 terms
  are off by at most 33 * 2^-24 times the sum of their magnitudes, coordinate by coordinate. So a block's error has a
  norm below 33 * 2^-24 * 32 C, twice that for two neighboring blocks. Other blocks keep every bit, and double
  precision adds less than 2^-40 C for up to 1,000 blocks.

Together the sums on neighboring sets differ by at most (1 + 2^-12) C: `SENSITIVITY_MARGIN`, which `sum_sensitivity`
adds and which a caller must pay for. A gradient that is not finite contributes zero, which is a function of that record
alone.

References: Abadi et al. 2016, algorithm 1 (clipping per example). Higham 2002, section 4.2 (error of a sum).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from labeler.errors import InvalidSetting

Parameters: TypeAlias = Mapping[str, Tensor]
Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]

SENSITIVITY_MARGIN = 2.0**-12
"""Relative surcharge on the clipping norm for float32 sums, derived in the module's docstring."""

BLOCK = 32
"""Most rows that are summed in single precision; the margin holds for this many."""

_SHRINK = 1 - 2.0**-14
_PIECE = 1024
_LEAST_CLIP_NORM = 1e-12


def sum_sensitivity(clip_norm: float) -> float:
    """Return the most by which one record moves a sum of `clipped_gradient_sums`, in L2 norm.

    Args:
        clip_norm: C, at least 1e-12 (below, products of floats could vanish).
    """
    if not _LEAST_CLIP_NORM <= clip_norm < float("inf"):
        raise InvalidSetting(f"clip_norm must be finite and at least {_LEAST_CLIP_NORM:g}, found {clip_norm}")
    return clip_norm * (1 + SENSITIVITY_MARGIN)


def clipped_gradient_sums(
    module: nn.Module,
    params: Parameters,
    inputs: Tensor,
    labels: Tensor,
    weights: Tensor,
    *,
    clip_norm: float,
    loss: Loss = functional.cross_entropy,
    chunk_floats: int = 1 << 22,
) -> dict[str, Tensor]:
    """Return the sum over sampled rows of per-record gradients, each clipped over all parameters together.

    For one model, or for N models at once, each with its own rows. The sum is not private before noise is added.

    Args:
        module: the network; it must treat rows one by one (no batch normalization) and draw no randomness.
        params: float32 by name. For N models every one has a leading axis N.
        inputs: (B, ...) for one model, (N, B, ...) for N.
        labels: (B,) or (N, B), int64, or whatever `loss` takes as its second argument for each row.
        weights: like labels, 0 or 1: which rows are sampled. A row of weight 0 may hold anything, and contributes zero.
        clip_norm: C, L2 norm.
        loss: of the logits and labels of a batch of one row, a scalar.
        chunk_floats: numbers of per-record gradients that are held at once, about; bounds memory, no result.

    Returns:
        Sums by parameter name, float64, with the leading axis N where there are N models.
    """
    sum_sensitivity(clip_norm)
    together = weights.ndim == 2
    if weights.shape != labels.shape[: weights.ndim] or weights.shape != inputs.shape[: weights.ndim]:
        raise InvalidSetting(
            f"inputs {tuple(inputs.shape)}, labels {tuple(labels.shape)} and weights {tuple(weights.shape)} must have "
            "the same leading axes: rows, or models and rows"
        )
    if weights.ndim not in (1, 2) or not bool(((weights == 0) | (weights == 1)).all()):
        raise InvalidSetting("weights say which rows are sampled: 0 or 1 for every row of one or of N models")
    if not together:
        params = {name: value.unsqueeze(0) for name, value in params.items()}
        inputs, labels, weights = inputs.unsqueeze(0), labels.unsqueeze(0), weights.unsqueeze(0)
    models, rows = weights.shape
    if any(len(value) != models for value in params.values()):
        raise InvalidSetting(f"every parameter must have a leading axis of {models} models")
    if type(module) is nn.Linear and set(params) == {"weight", "bias"} and loss is functional.cross_entropy:
        sums = _linear_sums(params, inputs, labels, weights, clip_norm)
        return sums if together else {name: value.squeeze(0) for name, value in sums.items()}

    def row_loss(own: dict[str, Tensor], row: Tensor, label: Tensor) -> Tensor:
        return loss(functional_call(module, own, (row.unsqueeze(0),)), label.unsqueeze(0))

    per_row = vmap(grad(row_loss), in_dims=(None, 0, 0))
    per_model = vmap(per_row)
    params = {name: value.detach() for name, value in params.items()}
    sums = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in params.items()}
    size = sum(value[0].numel() for value in params.values())
    at_once = BLOCK * max(1, chunk_floats // (size * BLOCK))
    group = max(1, chunk_floats // (size * min(at_once, rows)))
    for first in range(0, models, group):
        part = slice(first, first + group)
        own = {name: value[part] for name, value in params.items()}
        for start in range(0, rows, at_once):
            block = (part, slice(start, start + at_once))
            if not bool(weights[block].any()):
                continue  # Adds exactly zero either way.
            if len(weights[part]) == 1:
                # One model alone needs no batched convolutions, which are slower.
                alone = {name: value[0] for name, value in own.items()}
                gradients = {k: g.unsqueeze(0) for k, g in per_row(alone, inputs[block][0], labels[block][0]).items()}
            else:
                gradients = per_model(own, inputs[block], labels[block])
            factors = _factors(gradients, weights[block], clip_norm)
            for name, gradient in gradients.items():
                sums[name][part] += _weighted_sum(factors, gradient)
    return sums if together else {name: value.squeeze(0) for name, value in sums.items()}


def _linear_sums(
    params: Parameters, inputs: Tensor, labels: Tensor, weights: Tensor, clip_norm: float
) -> dict[str, Tensor]:
    """Return the sum for one linear layer, without a gradient per record: record i's is d_i (x_i, 1)^T, d_i = p_i -
    e_y.

    Its norm is |d_i| sqrt(|x_i|^2 + 1), and a sum of such products is one matrix product. Everything after the logits
    is in double precision. The magnitudes of a product's terms have the norm of the product, so the error of the sum is
    below 2^-40 C as well.
    """
    logits = torch.baddbmm(params["bias"].unsqueeze(1), inputs, params["weight"].transpose(1, 2))
    slopes = logits.double().softmax(-1)
    slopes -= functional.one_hot(labels, slopes.shape[-1])
    rows = inputs.double()
    norms = slopes.square().sum(-1).mul(rows.square().sum(-1) + 1).sqrt()
    counts = norms.isfinite() & (weights == 1)
    factors = torch.where(counts, _SHRINK * (clip_norm / norms.clamp_min(_LEAST_CLIP_NORM)).clamp_max(1.0), 0.0)
    slopes = torch.where(counts.unsqueeze(-1), slopes * factors.unsqueeze(-1), 0.0)
    rows = torch.where(counts.unsqueeze(-1), rows, 0.0)
    return {"weight": slopes.transpose(1, 2) @ rows, "bias": slopes.sum(1)}


def _factors(gradients: dict[str, Tensor], weights: Tensor, clip_norm: float) -> Tensor:
    """Return c_i, float32, 0 for rows that are not sampled or not finite; clear such rows of `gradients`."""
    squared = torch.zeros(weights.shape, dtype=torch.float64, device=weights.device)
    for gradient in gradients.values():
        flat = gradient.flatten(2)
        whole = flat.shape[2] // _PIECE * _PIECE
        pieces = [flat[..., :whole].reshape(*flat.shape[:2], -1, _PIECE)] if whole else []
        for piece in (*pieces, flat[..., whole:].unsqueeze(2)):
            squared += torch.linalg.vector_norm(piece, dim=3).double().square().sum(2)
    factors = _SHRINK * (clip_norm / squared.sqrt().clamp_min(_LEAST_CLIP_NORM)).clamp_max(1.0)
    lost = ~squared.isfinite()
    if bool(lost.any()):
        for gradient in gradients.values():
            gradient[lost] = 0.0
    return torch.where(lost | (weights == 0), 0.0, factors).float()


def _weighted_sum(factors: Tensor, gradient: Tensor) -> Tensor:
    # Not a matrix product: those may be set to run in half precision, which the margin does not cover.
    gradient.mul_(factors.reshape(*factors.shape, *[1] * (gradient.ndim - 2)))
    total = torch.zeros_like(gradient[:, 0], dtype=torch.float64)
    for start in range(0, gradient.shape[1], BLOCK):
        total += gradient[:, start : start + BLOCK].sum(1)
    return total


def flatten(params: Parameters, *, leading: int = 0) -> Tensor:
    """Return all parameters in one vector, in the order of the mapping.

    Args:
        params: by name.
        leading: how many leading axes to keep (1 for N models at once: shape (N, D)).
    """
    return torch.cat([value.flatten(leading) for value in params.values()], dim=-1)


def unflatten(vector: Tensor, like: Parameters, *, leading: int = 0) -> dict[str, Tensor]:
    """Invert `flatten`: return parameters shaped like those of `like`, from a vector or (N, D) vectors.

    Args:
        vector: shape (D,), or (N, D) with leading = 1.
        like: names, order and shapes; for leading = 1 its tensors carry the axis N as well.
        leading: as for `flatten`.
    """
    sizes = [value[(0,) * leading].numel() for value in like.values()]
    if vector.ndim != leading + 1 or vector.shape[-1] != sum(sizes):
        raise InvalidSetting(f"the parameters hold {sum(sizes)} numbers, found a vector of shape {tuple(vector.shape)}")
    parts = torch.split(vector, sizes, dim=-1)
    return {
        name: part.reshape(*vector.shape[:leading], *value.shape[leading:])
        for (name, value), part in zip(like.items(), parts, strict=True)
    }
