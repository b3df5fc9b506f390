"""Reverse kNN (ours): every record votes for its label at the k queries nearest to it.

In kNN-DPFL every query may use the same record, so a job of Q queries has a squared sensitivity of 2 Q. Here every
record looks for its nearest queries instead. Queries are public, so where a record votes depends on that record alone,
and it votes k times in the whole job. `reverse_knn_ballots` casts the votes.

**Ballots on a ball**: an agent shortens its contribution to a public length, in whole numbers.

A cap on how many records vote (`max_agent_records`) bounds an agent by the worst that n records could do: all vote in
one place, n^2 k. Real ballots are spread over many questions and are far shorter. So an agent takes its whole batch b,
the counts of Q questions and C classes as one vector. It subtracts the mean of each question, which says nothing about
classes. It projects the rest onto a ball around zero. The ball's radius R, in votes, is public.

    v = C b - (sum of the question's counts)        C times the centered ballot, in whole numbers.

    p(b) = trunc(S v / C)                           if sum v^2 <= C^2 R^2,
    p(b) = trunc(S R v / |v|)                       else, entry by entry, on the grid of S units per vote.

trunc drops the fraction, towards zero. Comparison and truncation are of whole numbers. For x >= 0 floor(sqrt(x))
is isqrt(floor(x)), so that trunc(S R v_i / |v|) is isqrt((S R v_i)^2 // sum v^2) with the sign of v_i, exactly. No
record is left out and none replaces another. At each question the class with most votes stays the same. Centering makes
ballots shorter, so more votes fit the ball: without it, C - 1 of C numbers at a pure question would carry the mean.

**Agent level.** |p(b)| <= S R whatever the records are: truncation makes no entry larger. An agent that votes for
nothing contributes 0. So the square of the change is at most S^2 R^2.

**One record, one person.** Let b and b' be ballots of neighboring data sets, |b - b'|^2 <= D2^2, which `squared`
proves. Centering is an orthogonal projection, and the nearest point of a closed convex set moves no further
than the point itself. So before truncation the two are at most S |b - b'| apart, whichever of them is in the ball.
|trunc(x) - trunc(y)| is below |x - y| + 1 (at most |x - y| if signs differ). So by the triangle inequality over all
Q C entries

    |p(b) - p(b')| <= S D2 + sqrt(Q C)        grid units, and always at most 2 S R.

Without the ball, only the entries at which the record votes may change; with it, every entry may. Each entry changes by
a whole number below S D2 + 1, so by at most ceil(S D2) <= S ceil(D2).

**Winner.** Entries of p(b) lie between -S R and S R, so every sum fits its field if R does. If R does not fit, entries
are cut afterwards at public numbers, which moves no two vectors further apart (`labeler.release.on_grid`).

References:
    Bauschke, Combettes 2017, Convex Analysis and Monotone Operator Theory in Hilbert Spaces, Proposition 4.16.
"""

from __future__ import annotations

from fractions import Fraction
from math import isqrt, sqrt
from typing import TYPE_CHECKING, Final, Literal

import numpy as np
from numpy.typing import NDArray

from labeler.methods.knn import NEIGHBORS_AT_ONCE
from labeler.methods.sensitivity import CountedVotes, Method, records_of_a_person
from labeler.methods.site_offset import coordinates_of_offset, largest_offset, own_offset, squared_offset, without
from labeler.records import check_labels
from labeler.setting import StatedLevel

if TYPE_CHECKING:
    from labeler.records import Records, RunnerContext
    from labeler.tally import QueryBatch
    from labeler.task import Task

UNBOUNDED_RECORDS: Final = 2**40
"""Replaces the number of an agent's records if a task names no bound."""


def squared(task: Task, level: StatedLevel, queries: int) -> Fraction | int | None:
    """Return the squared L2 sensitivity of the sums of one batch of Q queries, with n = `max_agent_records`.

    The table is for counted ballots, before any projection. For ballots on a ball of `ballot_radius` R (this module's
    docstring), let D2^2 be the table's number. The bound is then the smaller
    of R^2 and D2^2 for an agent, and the smaller of (D2 + sqrt(Q C) / S)^2 and 4 R^2 for a record or a person.

    | instance                      | person, g = min(m, n)             | agent          |
    |-------------------------------|-----------------------------------|----------------|
    | min(k, Q), doubled by any cap | g^2 min(k, Q), doubled by a cap n | n^2 min(k, Q)  |

    **Instance.** The queries nearest to a record are a function of that record and of
    public queries. Adding or removing it therefore changes its own class column at its own
    min(k, Q) queries by one vote and nothing else: min(k, Q) for the batch, once. With a cap
    `max_agent_records` on how many of an agent's records vote, a record that leaves lets in the first
    record beyond the cap. So two records change their votes, 2 min(k, Q). Nobody can know that the cap does not
    bind, so any task with a cap is charged this. (All of this is for **one batch**, whatever its number of queries.
    Several batches are several such compositions.) A cap on the records of a person does the same: two records change
    their votes, 2 min(k, Q). With both caps, the cap per person replaces a record r by r' among other records E. The
    n records of the smallest ids among E + r and among E + r' differ by one swap at most, as the first k of knn do.
    So the two caps together cost 2 min(k, Q), no more than either.

    **Person.** At most m records leave, each with one vote in each of min(k, Q) rows:
    entries of at most m, m min(k, Q) votes in all. So the squared norm is at most m^2 min(k, Q), attained when
    their votes fall together. mu is m times that of one record without a cap. With a cap n, at most g = min(m, n) of
    the n records that vote leave, and as many records of other people enter. Both sums of votes have non-negative
    entries. So their difference has a squared norm of at most g^2 min(k, Q) + g^2 min(k, Q): mu is g times that of
    one record under a cap. (Adding norms instead of squares would give 2 g times that of one record without a cap.)

    **Agent.** At most n records vote, each at most once in a row. So an entry is at most
    n and all entries together at most n min(k, Q). Hence sum b^2 <= max b * sum b <= n^2 min(k, Q),
    attained when all records share a class and their nearest queries. Without a public n there is
    no bound at all.

    **A site's own offset** (`offset_share`) shifts an agent's records by its noisy mean before they vote. Given that
    mean, all of the above holds, and the mean's own squared change is added (`labeler.methods.site_offset`).

    **Clipping (winner).** An agent cuts every count at a public M (`Task.vote_clip`). Let b and b' be
    ballots of neighboring data sets and clip(x) = min(x, M). clip is increasing and 1-Lipschitz: for
    x <= y, clip(y) - clip(x) lies between 0 and y - x. So cell by cell |clip(b) - clip(b')| <= |b - b'|, and
    the sum of squares over all cells is at most what it was without clipping. So the bounds above and `largest` hold
    at all levels (at agent level b' = 0, and clip(0) = 0).
    """
    places, radius = min(task.k, queries), task.ballot_radius
    if level == "agent":
        caps = [] if task.max_agent_records is None else [task.max_agent_records**2 * places]
        return min([*caps, *([] if radius is None else [radius**2])], default=None)
    counted = _squared_as_counted(task, level, places)
    votes: Fraction | int = counted
    if radius is not None:
        votes = squared_distance(counted, radius=radius, scale=task.scale, entries=queries * task.num_classes)
    if task.offset_share is None:
        return votes
    return votes + squared_offset(task.offset_share, places, *_changed(task, level))


def _changed(task: Task, level: Literal["instance", "person"]) -> tuple[int, bool]:
    """Return how many records leave at most, and whether as many others may enter."""
    if level == "instance":
        return 1, task.a_record_may_be_replaced
    return _of_a_person(task), task.max_agent_records is not None


def _squared_as_counted(task: Task, level: Literal["instance", "person"], places: int) -> int:
    """Return the entry of the table in `squared`, for ballots before any projection; `places` is min(k, Q)."""
    group, replaced = _changed(task, level)
    return group**2 * places * (2 if replaced else 1)


def largest(task: Task, level: StatedLevel) -> int | None:
    """Return the most votes by which one coordinate of the sums can change; None if there is no bound.

    *Proof.* For a record it is one: it votes at most once per query. (Under a cap, a record that leaves and the one let
    in may share a coordinate; then their changes cancel.) For a person it is the votes of all their records there; the
    records that replace them move the coordinate the other way. For an agent it is the votes of all its n records;
    without n there is no bound. On a ball of radius R no coordinate is above R, and one record may move every
    coordinate (this module's docstring).
    """
    if level == "agent":
        return task.max_agent_records if task.ballot_radius is None else task.ballot_radius
    most = _changed(task, level)[0]
    if task.ballot_radius is not None:
        most = largest_distance(_squared_as_counted(task, level, task.k), radius=task.ballot_radius)
    if task.offset_share is None:
        return most
    return max(most, largest_offset(task.offset_share, task.k, *_changed(task, level)))


def _of_a_person(task: Task) -> int:
    """Return g, the most records of a person that vote: the smaller of m and n."""
    records = records_of_a_person(task)
    return min(records, task.max_agent_records or records)


def per_cell(task: Task) -> int:
    """Return n, because all records of an agent may share a class and a nearest query; before any projection."""
    return task.max_agent_records or UNBOUNDED_RECORDS


def project(ballots: NDArray[np.int64], *, radius: int, scale: int) -> NDArray[np.int64]:
    """Project the ballots of one agent onto the ball: return p(b) of this module's docstring.

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
    # Inside the ball this is isqrt((S v_i)^2 // C^2) = S v_i // C. So the same work is done inside and outside.
    squares = max(sum(length * length for length in lengths), (classes * radius) ** 2)
    drawn = [isqrt((scale * radius * length) ** 2 // squares) for length in lengths]
    return np.asarray(np.array(drawn, dtype=np.int64).reshape(ballots.shape) * np.sign(centred))


def squared_distance(squared: int, *, radius: int, scale: int, entries: int) -> Fraction:
    """Return the most that p moves neighboring ballots apart: the smaller of the two bounds above, rounded up.

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
    """Return the most whole votes by which p moves one entry: min(ceil(D2), 2 R).

    Args:
        squared: D2^2 of the ballots themselves, votes^2; at least 1.
        radius: R, votes.
    """
    return min(isqrt(squared - 1) + 1, 2 * radius)


def reverse_knn_ballots(
    nearest_queries: NDArray[np.integer], labels: NDArray[np.integer], *, num_queries: int, num_classes: int
) -> NDArray[np.int64]:
    """Let every record vote for its own class at its k nearest queries.

    The mirror image of `knn_ballots`: there each query looks for k records, here each record looks
    for k queries. Queries are public, so where a record votes depends on that record alone. Adding
    or removing it changes at most k coordinates by one vote each **in the whole batch**, however many
    queries there are. The squared L2 sensitivity is k, once, while kNN pays 2 for every query. With k = 1
    this is the histogram of (cell, class) over the Voronoi cells of the public queries.

    Replacing a record is a removal and an addition. Per query at most one vote leaves and one
    arrives, over the batch at most 2k coordinates by one vote each (squared L2 at most 2k).

    Args:
        nearest_queries: shape (num_records, k), the query numbers each record votes at, all different
            within a row; -1 if there are fewer than k queries.
        labels: shape (num_records,), the class of each record.
        num_queries: Q, the number of queries in the batch.
        num_classes: C, the number of classes of the task.

    Returns:
        Votes, int64, shape (num_queries, num_classes).

    Raises:
        InvalidSetting: a label is not a class of the task.
    """
    check_labels(labels, num_classes, least=0)
    cells = nearest_queries.astype(np.int64) * num_classes + labels.astype(np.int64)[:, None]
    cells = cells[nearest_queries >= 0]
    return np.bincount(cells, minlength=num_queries * num_classes).reshape(num_queries, num_classes)


NUMBERS_AT_ONCE = 2**22
"""The most feature numbers (records times dimension) of one search step: 8 MiB, and twice that in float32. So memory
does not grow with the number of records."""


def ballots(task: Task, batch: QueryBatch, records: Records, context: RunnerContext) -> NDArray[np.int64]:
    """Return the votes of the records at their nearest queries, less their site's own offset if the task has one."""
    if task.max_agent_records is not None:
        records = records.first(task.max_agent_records)
    offset = own_offset(task, batch.features, records, context.local_noise)
    return ballots_given(offset, task, batch, records, context)


def ballots_given(
    offset: NDArray[np.int16] | None, task: Task, batch: QueryBatch, records: Records, context: RunnerContext
) -> NDArray[np.int64]:
    """Return the votes of the records, moved by this offset. The votes of blocks of records are added up.

    The index holds the public queries, on the same device as the agent's index where there is one, and the records are
    its searches. This process searches it, whatever the agent's engine.
    """
    queries = context.indexes.of_questions(batch.features, order=context.order())
    votes = np.zeros((len(batch), task.num_classes), dtype=np.int64)
    k = min(task.k, len(batch))
    for features, labels in records.blocks(records_at_once(batch.features.shape[1], k, votes.size)):
        nearest = queries.search(without(offset, features), k).record_ids
        votes += reverse_knn_ballots(nearest, labels, num_queries=len(batch), num_classes=task.num_classes)
    return votes


def records_at_once(dimension: int, k: int, cells: int) -> int:
    """Return how many records look for their k nearest questions in one step.

    Each step adds a whole table of votes, so it should find at least as many neighbors as the table has cells. It reads
    at most `NUMBERS_AT_ONCE` feature numbers.
    """
    return max(1, min(max(NEIGHBORS_AT_ONCE, cells) // k, NUMBERS_AT_ONCE // dimension))


def votes(task: Task, queries: int, records: int) -> float:
    """Return the number of votes in one question, if the records of all agents are spread over the questions evenly."""
    cast = records * min(task.k, queries) / queries
    if task.ballot_radius is None:
        return cast
    # A centered ballot of length R with one class at each question is of R sqrt(Q / (1 - 1/C)) votes at most.
    return min(cast, task.agents * task.ballot_radius / sqrt(queries * (1 - 1 / task.num_classes)))


def one_record(task: Task) -> str:
    """Return what one record changes, in words."""
    k = min(task.k, task.max_queries)
    votes = "one vote in all, at the question" if k == 1 else f"{k:,} votes in all, one at each of the {k:,} questions"
    offset = "" if task.offset_share is None else ", and the noisy site mean"
    swapped = "; where it leaves, another may enter with as many" if task.a_record_may_be_replaced else ""
    drawn = ", before its agent's ballot is drawn onto the ball" if task.ballot_radius is not None else ""
    return f"one record moves {votes} nearest to it{drawn}{offset}{swapped}"


METHOD: Final = Method(
    "reverse kNN",
    "each record's label, at the k questions nearest to it",
    ballots=ballots,
    stated=CountedVotes(squared, largest, per_cell, coordinates_of_offset),
    takes=frozenset({"offset_share", "k", "max_agent_records", "ballot_radius", "lifetime_budget"}),
    single_round=True,
    searched="questions",
    votes=votes,
    share_kind=lambda task: "shared" if task.lifetime_budget is None else "life",
    is_attacked=True,
    one_record=one_record,
)
