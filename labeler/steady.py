"""Arithmetic whose time does not depend on values: no number that a processor handles slowly is ever computed.

A public model meets private records in an evaluation, in a step of training and in `labeler predict`. Somebody else has
chosen its numbers. A processor takes up to a hundred times as long for a *subnormal* number, below 2.2e-308. So the
author of the model could make one chosen record slow, and read from the answer's time whether a site holds it.

**Steady numbers** are 0, or lie between LEAST and MOST in absolute value. A model of other numbers is refused before
anybody pays. A product of two steady numbers lies above 1e-120. A sum of such products, rounded anywhere on its way, is
0 or above 1e-120 2^-106 > 1e-152, so its square is no subnormal number. After each stage of a model `steady` makes what
was computed steady again: what is too small becomes 0, and what is too large becomes MOST.

**Powers.** exp(-745) is subnormal, and so is a product of exp(-700) with a chance. So exponents are cut at LOWEST, and
powers below LEAST are 0. Exponents nearer to 0 than 2^-64 are 0, whose power is the same. So no power of an exponent
that a library computes on its way is subnormal either.

Nothing here branches on a number. Masks are multiplied.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from labeler.setting import LEAST

Array = NDArray[np.float64]

MOST: Final = 1e60
"""With LEAST, bounds on the absolute value of every number of a public model that is not 0."""

LOWEST: Final = -300.0
"""The lowest exponent whose power is computed."""

IMPOSSIBLE: Final = -1e200
"""A score, below all others, of what has probability 0."""

_NEAR_ZERO: Final = 2.0**-64
_GROUP: Final = 32


def is_steady(numbers: NDArray[Any]) -> bool:
    """Return whether every number is 0 or lies between LEAST and MOST in absolute value; NaN does not."""
    if numbers.dtype.kind != "f":
        return True
    sizes, (least, most) = np.abs(numbers), _bounds(numbers)
    return bool(((sizes == 0) | ((sizes >= least) & (sizes <= most))).all())


def steady(numbers: NDArray[Any]) -> NDArray[Any]:
    """Return numbers without those that are too small, which become 0, and too large, which become MOST."""
    least, most = _bounds(numbers)
    cut = np.clip(numbers, -most, most)
    return np.asarray(cut * (np.abs(cut) >= least))


def steady_arrays(arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return the arrays of a model, made steady."""
    return {name: steady(one) if one.dtype.kind == "f" else one for name, one in arrays.items()}


def _bounds(numbers: NDArray[Any]) -> tuple[float, float]:
    """Return LEAST and MOST; single precision is subnormal, or infinite, long before."""
    limits = np.finfo(numbers.dtype)
    return max(LEAST, float(limits.tiny)), min(MOST, float(limits.max))


def powers(scores: Array) -> Array:
    """Return exp(score - largest score) along the last axis: 1 for the largest, and 0 or at least LEAST for others.

    Args:
        scores: any but NaN and infinity; -inf is impossible, and where all are, all are alike.
    """
    possible = np.maximum(scores, IMPOSSIBLE)
    exponents = np.maximum(possible - possible.max(axis=-1, keepdims=True), LOWEST)
    found = np.exp(exponents * (exponents <= -_NEAR_ZERO))
    return np.asarray(found * (found >= LEAST))


def shares(amounts: Array) -> Array:
    """Return rows that sum to one, in proportion to amounts; shape (n, classes).

    Only a model that somebody made up has rows without a positive sum. They stay finite.
    """
    kept = steady(amounts)
    return steady(kept / np.maximum(kept.sum(axis=-1, keepdims=True), LEAST))


def largest(values: NDArray[Any], count: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the places of the largest values of each row, descending, and these values.

    A partial sort takes longer for some orders than for others, and somebody else may have chosen what private records
    are compared with. This is the same work for all. The largest values lie in the `count` groups with the largest
    maxima. Values that agree in some eleven digits are ordered by their place, which is public.

    Args:
        values: shape (n, places), above IMPOSSIBLE.
    """
    rows, width = np.arange(len(values))[:, None], -(-values.shape[1] // _GROUP)
    table = np.full((len(values), _GROUP, width), IMPOSSIBLE)
    table.reshape(len(values), -1)[:, : values.shape[1]] = values
    groups = _first_places(table.max(axis=1), min(count, width))
    members = np.ascontiguousarray(table[rows, :, groups].reshape(len(values), -1))
    chosen = _first_places(members, count)
    return chosen % _GROUP * width + groups[rows, chosen // _GROUP], members[rows, chosen]


def _first_places(values: Array, count: int) -> NDArray[np.int64]:
    """Return the places of the largest values of each row, by keys that all differ: whole numbers, a place in each."""
    size, bits = values.shape[1], values.view(np.int64)
    mask = (1 << size.bit_length()) - 1
    # Bits of a float, those of a negative one inverted, are in the order of the numbers; then made positive.
    ordered = bits ^ ((bits >> 63) & np.int64(2**63 - 1))
    keys = ((ordered >> 1) + 2**62) & ~mask | (mask - np.arange(size))
    found = np.zeros((len(values), count), dtype=np.int64)
    for number in range(count):
        found[:, number] = best = keys.max(axis=1)
        keys *= keys != best[:, None]
    return np.asarray(mask - (found & mask))
