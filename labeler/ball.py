"""Ballots on a ball: what one agent contributes is made no longer than a public radius, in whole numbers.

A cap on how many records vote (`max_agent_records`) bounds an agent by the worst that n records could do: all in one
place, n^2 k. Real ballots are spread over many questions and far shorter. So an agent takes its whole batch b, the
counts of Q questions and C classes as one vector, leaves out what says nothing about classes, the mean of each
question, and draws the rest onto the ball of radius R around zero, R votes and public:

    v = C b - (sum of the question's counts)        C times the centred ballot, in whole numbers,

    p(b) = trunc(S v / C)                           where sum v^2 <= C^2 R^2,
    p(b) = trunc(S R v / |v|)                       elsewhere, entry by entry, on the grid of S units per vote,

trunc leaving the fraction out, towards zero. Comparison and truncation are of whole numbers: for x >= 0 floor(sqrt(x))
is isqrt(floor(x)), so that trunc(S R v_i / |v|) is isqrt((S R v_i)^2 // sum v^2) with the sign of v_i, exactly. No
record is left out and none takes another's place. The class with most votes of a question stays it, and C - 1 of C
numbers at a pure question would else carry the mean: centred ballots are shorter, and more votes fit into the ball.

**Agent level.** |p(b)| <= S R whatever the records are: truncation makes no entry larger. An agent that votes for
nothing contributes 0. So the square of the change is at most S^2 R^2.

**One record, one person.** Let b and b' be ballots of neighbouring data sets, |b - b'|^2 <= D2^2 (`labeler.methods.
reverse_knn`). Centring is an orthogonal projection, and the point of a closed convex set next to a point moves no
further than the point does: before truncation the two are at most S |b - b'| apart, whichever of them is in the ball.
|trunc(x) - trunc(y)| is below |x - y| + 1 (at most |x - y| where signs differ), so by the triangle inequality over all
Q C entries

    |p(b) - p(b')| <= S D2 + sqrt(Q C)        grid units, and always at most 2 S R.

Every entry may change, where without the ball only the record's own did: one by a whole number below S D2 + 1, so by at
most ceil(S D2) <= S ceil(D2).

**Winner.** Entries of p(b) lie between -S R and S R, so that every sum fits its field where R does; where it does not,
they are cut at public numbers afterwards, which moves no two vectors further apart (`labeler.contribution.on_grid`).

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
        ballots: int64 counts, at least 0, shape (num_queries, num_classes): the whole batch of one agent. C times the
            sum of a row fits 63 bits.
        radius: R, votes.
        scale: S, grid units per vote; R S fits 63 bits.

    Returns:
        Grid units, int64, of the same shape, with a sum of squares of at most (R S)^2. Private.
    """
    classes = ballots.shape[1]
    centred = classes * ballots - ballots.sum(axis=1, keepdims=True)
    lengths = np.abs(centred).ravel().tolist()
    # Inside of the ball this is isqrt((S v_i)^2 // C^2) = S v_i // C: the same work on both sides, entry by entry.
    squares = max(sum(length * length for length in lengths), (classes * radius) ** 2)
    drawn = [isqrt((scale * radius * length) ** 2 // squares) for length in lengths]
    return np.asarray(np.array(drawn, dtype=np.int64).reshape(ballots.shape) * np.sign(centred))


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
    return min(moved, Fraction(4 * radius**2))


def largest_distance(squared: int, *, radius: int) -> int:
    """The most whole votes by which p moves one entry: min(ceil(D2), 2 R).

    Args:
        squared: D2^2 of the ballots themselves, votes^2; at least 1.
        radius: R, votes.
    """
    return min(isqrt(squared - 1) + 1, 2 * radius)
