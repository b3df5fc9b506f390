"""The arithmetic of `labeler.descent`: projected gradient descent, a fixed number of steps, records in blocks.

Only its run time depends on the number of records. There is no randomness: no seed, no order of records, no early stop,
no refusal.

If there is much to do and a GPU is present, the steps run there in double precision (`descend_on`), within the same
margin for rounding. `labeler.descent` bounds rounding for sums in *any* order of at most DEPTH numbers in double
precision. cuBLAS adds the products of a block of at most BLOCK_ROWS rows in some order, and exponentials are right to a
unit in the last place. So weights of a device and of a processor are both within the proof's margin, and neighboring
sets may be trained one here and one there. Products that only look like double precision, made of smaller ones, are
refused.

Rows are copied once and stay as far as they fit; the rest are copied at every step. If a device fails, the processor
starts over: nobody sees which one computed.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
from scipy.special import expit

from feature_store.index.build import training_device
from feature_store.index.exact_index import DeviceFault
from labeler.descent import Descent
from labeler.records import Array, Blocks, Slopes

log = logging.getLogger(__name__)


def descend(
    terms: Descent,
    blocks: Blocks,
    slopes: Slopes,
    *,
    counts: float | Array,
    shape: tuple[int, ...],
    ball_axes: int | tuple[int, ...],
    numbers: int = 0,
    engine: str = "numpy",
) -> Array:
    """Return the weights after all steps.

    Args:
        terms: the mechanism.
        blocks: all rows.
        slopes: of the loss.
        counts: what the sum of losses is divided by, `terms.denominator` of all rows; per model of several.
        shape: of the weights, (..., d, columns).
        ball_axes: of the weights over which a norm is cut to `terms.reach`.
        numbers: the size of the rows by public numbers, which decides whether a device is worth it.
        engine: which devices may be used, as for an index (feature_store.index.build.training_device).
    """
    device = training_device(engine, products=2 * numbers * shape[-1] * terms.iterations)
    if device is not None:
        try:
            return descend_on(device, terms, blocks, slopes, counts=counts, shape=shape, ball_axes=ball_axes)
        except DeviceFault as fault:
            log.error("a device failed; the processor trains instead", extra={"cause": str(fault)})
    weights = np.zeros(shape)
    step, keep, reach = terms.learning_rate, 1 - terms.learning_rate * terms.regularisation, terms.reach
    for _ in range(terms.iterations):
        gradient = np.zeros(shape)
        for rows, truth in blocks():
            gradient += rows.swapaxes(-1, -2) @ slopes(rows @ weights, truth)
        weights = keep * weights - (step / counts) * gradient
        norms = np.sqrt(np.square(weights).sum(axis=ball_axes, keepdims=True))
        weights *= reach / np.maximum(norms, reach)
    return weights


def softmax_slopes(scores: Any, is_class: Any, xp: Any = np, /) -> Any:
    """Return the slopes of -log softmax(scores)_y, columns along the last axis; see Slopes."""
    powers = xp.exp(scores - xp.amax(scores, axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True) - is_class


def logistic_slopes(scores: Any, is_positive: Any, xp: Any = np, /) -> Any:
    """Return the slopes of log(1 + exp(-+ score)), one column; see Slopes."""
    return (expit(scores) if xp is np else xp.sigmoid(scores)) - is_positive


_EMULATION = ("CUBLAS_EMULATE_DOUBLE_PRECISION", "CUBLAS_EMULATION_STRATEGY")
"""Variables with which cuBLAS may compose double precision of smaller numbers; off unless somebody sets them."""


def descend_on(
    device: str,
    terms: Descent,
    blocks: Blocks,
    slopes: Slopes,
    *,
    counts: float | Array,
    shape: tuple[int, ...],
    ball_axes: int | tuple[int, ...],
) -> Array:
    """Run `descend` on a device of torch's.

    Raises:
        DeviceFault: it failed, is full, or may not compute in double precision.
    """
    import torch

    if any(os.environ.get(name) for name in _EMULATION):
        raise DeviceFault("double precision may be emulated on it")
    target = torch.device(device)
    step, keep, reach = terms.learning_rate, 1 - terms.learning_rate * terms.regularisation, terms.reach
    try:
        with torch.inference_mode():
            there = _there(blocks, target)
            weights = torch.zeros(shape, dtype=torch.float64, device=target)
            share = _moved(step / np.asarray(counts, dtype=np.float64), target)
            for _ in range(terms.iterations):
                gradient = torch.zeros_like(weights)
                for rows, truth in there():
                    gradient += rows.transpose(-1, -2) @ slopes(rows @ weights, truth, torch)
                weights = keep * weights - share * gradient
                norms = weights.square().sum(dim=ball_axes, keepdim=True).sqrt()
                weights *= reach / norms.clamp(min=reach)
            found: Array = weights.cpu().numpy()
    except RuntimeError as error:
        raise DeviceFault(type(error).__name__) from None
    return found


def _there(blocks: Blocks, device: Any) -> Any:
    """Return a function that yields the blocks as tensors of a device; the first stay there, in half its free room."""
    import torch

    room = torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else 1 << 30

    kept: list[tuple[Any, Any]] = []
    for rows, truth in blocks():
        kept.append((_moved(rows, device), _moved(truth, device)))
        room -= kept[-1][0].element_size() * kept[-1][0].nelement()
        if room < 0:
            break
    else:
        return lambda: kept

    def there() -> Iterator[tuple[Any, Any]]:
        yield from kept
        for rows, truth in itertools.islice(blocks(), len(kept), None):
            yield _moved(rows, device), _moved(truth, device)

    return there


def _moved(given: Any, device: Any) -> Any:
    """Return arrays as float64 tensors: also the truth, because torch does not subtract booleans."""
    import torch

    return torch.from_numpy(np.array(given, dtype=np.float64)).to(device)
