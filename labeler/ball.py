"""Ballots on a ball: what one agent contributes is made no longer than a public radius, in whole numbers.

A cap on how many records vote (`max_agent_records`) bounds an agent by the worst that n records could do: all in one
place, n^2 k. Real ballots are spread over many questions and far shorter. So an agent draws its whole batch b, the
counts of Q questions and C classes as one vector, onto the ball of radius R around zero, R votes and public:

    p(b) = S b                          where sum b^2 <= R^2,
    p(b) = floor(S b R / |b|)           elsewhere, entry by entry, on the grid of S units per vote.

Both the comparison and the floor are taken of whole numbers: for x >= 0 floor(sqrt(x)) is isqrt(floor(x)), so that
floor(S b_i R / |b|) = isqrt((S R b_i)^2 // sum b^2), exactly. No record is left out and none takes another's place.

**Agent level.** |p(b)| <= S R whatever the records are: entries are at least 0 and floor makes none larger. Against an
agent that votes for nothing, squared: S^2 R^2.

**One record, one person.** Let b and b' be ballots of neighbouring data sets, |b - b'|^2 <= D2^2 (`labeler.methods.
reverse_knn`). The point of a closed convex set next to a point moves no further than the point does, so before rounding
|S b R/|b| - S b' R/|b'|| <= S |b - b'|, also where only one of them is outside the ball. |floor(x) - floor(y)| is below
|x - y| + 1 (the floor changes nothing where a ballot is inside); by the triangle inequality over all Q C entries

    |p(b) - p(b')| <= S D2 + sqrt(Q C)        grid units.

Every entry may change, where without the ball only the record's own did. Besides, p(b) and p(b') have no negative
entries, so their squared distance is at most |p(b)|^2 + |p(b')|^2 <= 2 S^2 R^2. The smaller bound holds. One entry
changes by a whole number below S D2 + 1, so by at most ceil(S D2) <= S ceil(D2), and it lies between 0 and S R.

**Winner.** Cells of p(b) are at most S R, so that every sum fits its field where R does; where it does not, cells are
cut at a public number afterwards, which moves no two vectors further apart (`labeler.contribution.clip_ballots`).

References:
    Bauschke, Combettes 2017, Convex Analysis and Monotone Operator Theory in Hilbert Spaces, Proposition 4.16.
"""

from __future__ import annotations

from fractions import Fraction
from math import isqrt

import numpy as np
from numpy.typing import NDArray


def project(ballots: NDArray[np.int64], *, radius: int, scale: int) -> NDArray[np.int64]:
    """p(b) of this module's docstring.

    Args:
        ballots: int64 counts, at least 0, any shape: the whole batch of one agent.
        radius: R, votes.
        scale: S, grid units per vote; R S fits 63 bits.

    Returns:
        Grid units, int64, of the same shape, with a sum of squares of at most (R S)^2. Private.
    """
    counts, places, repeats = np.unique(ballots, return_inverse=True, return_counts=True)
    squares = sum(count * count * many for count, many in zip(counts.tolist(), repeats.tolist(), strict=True))
    if squares <= radius * radius:
        return ballots * np.int64(scale)
    shorter = [isqrt((scale * radius * count) ** 2 // squares) for count in counts.tolist()]
    return np.array(shorter, dtype=np.int64)[places].reshape(ballots.shape)


def squared_distance(squared: int, *, radius: int, scale: int, entries: int) -> Fraction:
    """The most that p moves neighbouring ballots apart: the smaller of the two bounds above, rounded up.

    Args:
        squared: D2^2 of the ballots themselves, votes^2.
        radius: R, votes.
        scale: S, grid units per vote.
        entries: Q C.

    Returns:
        A bound on |p(b) - p(b')|^2 / S^2, votes^2, exact.
    """
    # (S D2 + sqrt(QC))^2 = S^2 D2^2 + QC + 2 sqrt(S^2 D2^2 QC), and isqrt(x - 1) + 1 is the root rounded up.
    twice_the_product = isqrt(4 * scale**2 * squared * entries - 1) + 1
    moved = Fraction(scale**2 * squared + entries + twice_the_product, scale**2)
    return min(moved, Fraction(2 * radius**2))


def largest_distance(squared: int, *, radius: int) -> int:
    """The most whole votes by which p moves one entry: min(ceil(D2), R).

    Args:
        squared: D2^2 of the ballots themselves, votes^2; at least 1.
        radius: R, votes.
    """
    return min(isqrt(squared - 1) + 1, radius)
