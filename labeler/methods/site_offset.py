"""A site's own offset: each site subtracts its noisy mean before its records vote (`Task.offset_share`).

Two scanners, or photos and drawings, put every image of a site off to one side. Then most records of the site are
nearest to the same few questions, whatever they show. So each agent finds how far its records lie from the questions
on average, along public axes, adds noise, and takes that off each record before the record looks for its questions.
The noisy mean never leaves the agent. It is paid for as if it were released.

**The sums.** The axes are the leading A = min(MOST_AXES, Q - 1) principal axes of the Q questions, which are public.
Let a be a record's place along them, from the center of the questions. L and F, below, are whole numbers of the task.

    row(a)   = the whole numbers nearest to B a / max(|a|, CUT).      B = max(0, L - sqrt(A) / 2 - 1).
    count    = L // COUNT.                                            One more coordinate of each record.

An agent adds up row and count of its records and adds to each of the A + 1 coordinates F^2 h discrete Gaussian draws of
the task's parameter s (h = `Task.noise_contributors`): the noise of h parties, all of it its own.

**Sensitivity.** a is whole numbers, computed exactly, so a row depends on its own record and public data alone.
Rounding moves a vector of A numbers by at most sqrt(A) / 2, and double precision, for L below 2^31, by less than 1. So
|row| <= L. With the count, a record's squared length is at most L^2 (1 + 1 / COUNT^2). L is chosen so that

    L^2 (1 + 1 / COUNT^2) <= F^2 S^2 t min(k, Q).      t = offset_share / (1 - offset_share).

So one record that comes or goes changes the sums, in votes (F S units each), by at most t min(k, Q) squared. A record
that replaces another changes them by at most 4 times that, because the count stays and two rows are at most 2 L apart.
For g records of a person the norms add up: g^2 times as much, as each of them leaves or is replaced.

**Proof of the price.** Suppose that the noisy sums were released. Given them, the records are shifted by a public
vector. So where a record votes is a function of that record and of public data alone, and the bounds of
`labeler.methods.reverse_knn` hold for the votes, whatever the noisy sums are. Both parts carry sigma votes of noise:
F^2 h draws of parameter s on a grid of F S units, and h such draws on a grid of S units. Hence the pair is an adaptive
composition, whose mu^2 add up: squared changes of votes and sums are added. The release is a function of the votes, so
post-processing of the pair.

**Agent level.** When an agent's ballot becomes zero, its noisy mean matters to nobody. The bound on votes holds for any
ballot, so it is the price, and the offset adds nothing.

**The integer noise** (`labeler.accounting.integer`). The event counts each coordinate of the sums F^2 times, with h
draws of parameter s each: as many unknown draws as there are. A sum of F^2 h draws has the variance F^2 v. The step to
real noise costs (F D)^2 S^2 / (F^2 v - 3), at most D^2 S^2 / (v - 3). It is counted F^2 times and taken once. What is
left over is far more than the distance of a longer sum of draws from one Gaussian (exp(-pi^2 s^2), and s is at least
100). A draw's law given the sums shifts by F D / (F^2 h) at most, less than the D / h that is charged.

**The offset** is post-processing of the noisy sums. Their quotient by the noisy count is the mean. Noise adds A (noise
of one coordinate)^2 to its squared length on average. The mean is multiplied by the share of the length that is left,
at least 0 (James and Stein 1961). If the noisy count does not stand out of its noise there is no offset.

Not with votes for life: an image that has spent its budget would still move the votes of others, unpaid.
"""

from __future__ import annotations

from fractions import Fraction
from math import ceil, isqrt, sqrt
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from labeler.noise import DiscreteGaussian
from labeler.records import FEATURE_ONE, PublicAxes

if TYPE_CHECKING:
    from collections.abc import Callable

    from labeler.randomness import ByteSource
    from labeler.records import Records
    from labeler.task import Task

MOST_AXES: Final = 64

CUT: Final = FEATURE_ONE**2 / 2
"""The length, along integer axes, above which a record's place is shortened: half of a feature's."""

LONGEST: Final = FEATURE_ONE / 2
"""Of an offset. A record is 2048 + sqrt(d) / 2 long at most (`feature_store.index`), so what is left stays below 4096
for up to four million numbers of a feature: no record is refused, whatever it holds."""

COUNT: Final = 4
"""A record counts for a quarter of its longest row."""

_STANDS_OUT: Final = 2
"""Standard deviations of its noise that a count has at least, for there to be an offset."""

_LONGEST_ROW: Final = 2**30
"""Where noise is so fine that rows could be longer, they are not, so that no sum of them leaves 63 bits."""

_MOST_QUESTIONS, _MOST_NUMBERS = 2048, 2**25
"""Axes are those of no more questions than this, and of fewer where features are long: 256 MiB."""

_FINEST: Final = 8
_NO_AXIS: Final = 1e-4
_DRAWS_AT_ONCE: Final = 2**20
_BLOCK_NUMBERS: Final = 2**21


def axes_of_offset(queries: int) -> int:
    """Return A, for a batch of Q questions; features of fewer numbers have fewer axes."""
    return min(MOST_AXES, queries - 1)


def squared_offset(share: float, places: int, records: int, are_replaced: bool) -> Fraction:
    """Return the squared change of the sums, votes^2: t min(k, Q) for a record that comes or goes.

    Args:
        share: part of the job's mu^2 that pays for the offset, at instance level without a cap.
        places: min(k, Q).
        records: most records that leave together.
        are_replaced: whether as many others may enter.
    """
    exact = Fraction(str(share))
    return places * exact / (1 - exact) * records**2 * (4 if are_replaced else 1)


def largest_offset(share: float, places: int, records: int, are_replaced: bool) -> int:
    """Return the most whole votes by which one coordinate of the sums changes; arguments as above."""
    return isqrt(ceil(squared_offset(share, places, records, are_replaced)) - 1) + 1


def noise_of_mean(sigma_votes: float, places: int, queries: int) -> float:
    """Return u n of `labeler.expectation`: the length of a site's noise for one record and the whole price, features.

    Args:
        sigma_votes: noise of votes that get the whole price.
        places: min(k, Q).
    """
    row = sqrt(places * COUNT**2 / (COUNT**2 + 1))
    return CUT / FEATURE_ONE**2 * sigma_votes * sqrt(axes_of_offset(queries)) / row


def coordinates_of_offset(task: Task, queries: int) -> int:
    """Return how many coordinates of a price the sums take: F^2 for each of A + 1; none without an offset."""
    return 0 if task.offset_share is None else finer(task) ** 2 * (axes_of_offset(queries) + 1)


def finer(task: Task) -> int:
    """Return F: rows are on a grid F times as fine as votes, so that rounding leaves most of a row."""
    return max(1, ceil(_FINEST / sqrt(task.noise_contributors)))


def longest_row(task: Task, queries: int) -> int:
    """Return L, in units of a grid of F S units per vote."""
    assert task.offset_share is not None  # noqa: S101  # the caller looks
    squared = (
        squared_offset(task.offset_share, min(task.k, queries), 1, are_replaced=False) * (finer(task) * task.scale) ** 2
    )
    return min(isqrt(int(squared * COUNT**2 / (COUNT**2 + 1))), _LONGEST_ROW)


def axes_of_questions(questions: NDArray[np.int16]) -> PublicAxes:
    """Return the leading principal axes of questions, and their center, as whole numbers.

    Args:
        questions: int16, shape (Q, dimension), at least 2.
    """
    most = max(2, min(_MOST_QUESTIONS, _MOST_NUMBERS // questions.shape[1]))
    values = questions[:: -(-len(questions) // most)].astype(np.float64)
    center = np.rint(values.mean(axis=0))
    values -= center
    count = axes_of_offset(len(values))
    few = len(values) <= values.shape[1]
    variances, found = np.linalg.eigh(values @ values.T if few else values.T @ values)
    axes = found[:, -count:].T
    axes = axes @ values if few else axes
    lengths = np.linalg.norm(axes, axis=1, keepdims=True)
    # Along other axes all questions are in one place, but for rounding.
    known = variances[-count:, None] > _NO_AXIS**2 * variances[-1]
    axes = np.divide(axes, lengths, out=np.zeros_like(axes), where=known)
    return PublicAxes(np.vstack([np.rint(axes * FEATURE_ONE), center]).astype(np.int16))


def rows_of_records(features: NDArray[np.int16], axes: PublicAxes, longest: int) -> NDArray[np.int64]:
    """Return the row of each record, of length L at most; int64, shape (n, A). Private.

    Args:
        features: int16, shape (n, dimension).
        longest: L.
    """
    # Sums of whole numbers below 2^24 are exact in any order, as in an exact index (`feature_store.index.definition`).
    basis, center = axes.rows[:-1].astype(np.float32), axes.rows[-1].astype(np.float32)
    along = (features.astype(np.float32) @ basis.T).astype(np.int64) - (center @ basis.T).astype(np.int64)
    lengths = np.sqrt(np.square(along).sum(axis=1, keepdims=True))
    bound = max(0.0, longest - sqrt(axes.count) / 2 - 1)
    return np.asarray(np.rint(along * (bound / np.maximum(lengths, CUT))), dtype=np.int64)


def sums_of_records(task: Task, axes: PublicAxes, records: Records, queries: int) -> NDArray[np.int64]:
    """Return the sums of an agent, before noise: A coordinates of rows, then the count; int64. Private."""
    longest = longest_row(task, queries)
    sums = np.zeros(axes.count + 1, dtype=np.int64)
    for features, _ in records.blocks(max(1, _BLOCK_NUMBERS // axes.dimension)):
        sums[:-1] += rows_of_records(features, axes, longest).sum(axis=0)
        sums[-1] += len(features) * (longest // COUNT)
    return sums


def noise_of_offset(task: Task, count: int, source: ByteSource) -> NDArray[np.int64]:
    """Draw the noise of the sums: for each of `count` coordinates F^2 h draws of the task's share, added up; int64."""
    draws, sampler = finer(task) ** 2 * task.noise_contributors, DiscreteGaussian(task.share_sigma_grid)
    noise = np.zeros(count, dtype=np.int64)
    at_once = max(1, _DRAWS_AT_ONCE // count)
    for start in range(0, draws, at_once):
        noise += sampler.sample(source, (min(at_once, draws - start), count)).sum(axis=0)
    return noise


def offset_of(task: Task, axes: PublicAxes, noisy: NDArray[np.int64], queries: int) -> NDArray[np.int16]:
    """Return the offset that noisy sums tell, in units of stored features; int16, shape (dimension,).

    Args:
        noisy: int64, shape (A + 1,), the noisy sums. Nothing private enters but them.
    """
    longest = longest_row(task, queries)
    bound, each = longest - sqrt(axes.count) / 2 - 1, longest // COUNT
    sigma = task.share_sigma_grid * sqrt(task.noise_contributors) * finer(task)
    nothing = np.zeros(axes.dimension, dtype=np.int16)
    if bound <= 0 or each == 0 or noisy[-1] < _STANDS_OUT * sigma:
        return nothing
    count = noisy[-1] / each
    mean, deviation = noisy[:-1] / (bound * count), sigma / (bound * count)
    squared = float(mean @ mean)
    if squared <= axes.count * deviation**2:
        return nothing
    mean *= (1 - axes.count * deviation**2 / squared) / max(1.0, sqrt(squared))
    # Along axes of length FEATURE_ONE, a mean of length 1 stands for a place of length CUT.
    offset = mean @ axes.rows[:-1] * (CUT / FEATURE_ONE**2)
    # Axes are whole numbers, so a little longer or shorter. A record less the offset has to fit an exact index.
    offset *= min(1.0, LONGEST / max(float(np.linalg.norm(offset)), 1.0))
    return np.asarray(np.trunc(offset), dtype=np.int16)


def own_offset(
    task: Task, questions: NDArray[np.int16], records: Records, source: Callable[[], ByteSource]
) -> NDArray[np.int16] | None:
    """Return the offset of an agent's records, in units of stored features; int16, shape (dimension,). None: no offset.

    Args:
        questions: int16, shape (Q, dimension).
        source: returns the agent's secret source for this batch, at its start; on a retry the same.
    """
    if task.offset_share is None or len(questions) < 2:
        return None
    axes = axes_of_questions(questions)
    sums = sums_of_records(task, axes, records, len(questions))
    return offset_of(task, axes, sums + noise_of_offset(task, len(sums), source()), len(questions))


def without(offset: NDArray[np.int16] | None, features: NDArray[np.int16]) -> NDArray[np.int16]:
    """Return records less the offset, within the range of an exact index; int16, shape (n, dimension)."""
    if offset is None:
        return features
    moved = features - offset  # at most 2048 and 1024, so 16 bits hold it
    return np.clip(moved, -int(FEATURE_ONE), int(FEATURE_ONE), out=moved)
