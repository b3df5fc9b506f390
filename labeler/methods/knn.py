"""kNN-DPFL (Zhu et al. 2021): every query asks the agent's k records nearest to it for their labels.

`knn_ballots` and `workers.voting.neighbors` cast the votes, as a function of exact similarities. The proofs below are
about those ballots and about no others.

Classes may be attributes, so that a record has any number of them. Then it votes for at most t of these
(`attribute_ballots`). One class per record is the case t = 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from labeler.errors import InvalidSetting
from labeler.methods.sensitivity import CountedVotes, Method, records_of_a_person, share_of_a_row
from labeler.records import check_labels
from labeler.setting import StatedLevel

if TYPE_CHECKING:
    from labeler.records import Records, RunnerContext
    from labeler.tally import QueryBatch
    from labeler.task import Task


def squared(task: Task, level: StatedLevel, queries: int) -> int:
    """Return the squared L2 sensitivity of the sums of Q queries, in votes squared.

    It is 2 Q for a record, 2 Q min(m, k)^2 for a person, and Q k^2 for an agent. For attributes it is w Q,
    w Q min(m, k)^2 and t Q k^2. Here a record casts at most t = min(tau, C) votes, tau is `attributes_per_record`, and
    the votes of two records differ in at most w = min(2 t, C) places. The first proofs are for one class per record,
    t = 1 and w = 2; the last paragraph is for any t.

    **Instance.** Records are ordered by (similarity, record id), a total order in which two
    records' places do not depend on a third. Adding or removing a record swaps at most one of the
    first k for another: one coordinate loses a vote, another gains one. So the squared norm is at most 2 per query.
    Different queries have different coordinates, so Q queries make 2 Q. Replacing a record also swaps at most one.
    Under a cap on the records of a person, a record that leaves may let another in. That is such a replacement, so
    the cap changes nothing.

    **Person.** Of the first k records, j <= min(m, k) are the person's. The other k - j come first among the records
    that stay, so they are among the first k of these. So at most j votes leave and at most j enter. Count the leaving
    votes by class as a, and the entering ones as b. Both have non-negative entries, |a|, |b| <= j and a.b >= 0. So
    |a - b|^2 <= |a|^2 + |b|^2 <= 2 j^2 per query, attained when all leaving votes share one class and all entering
    votes share another. Q queries make 2 Q min(m, k)^2, and mu is min(m, k) times that of one record.

    **Agent.** The row of one query has non-negative entries b_c with sum at most k, so
    sum b_c^2 <= (sum b_c)^2 <= k^2, attained when all neighbors share a class. Q queries make Q k^2.

    **Attributes.** A record's vote is a vector of C zeros and ones with at most t ones, a function of that record
    alone. Two such vectors u and v differ, by one, exactly where one has a one and the other a zero. That is at no
    more than t + t places, and at no more than C, so |u - v|^2 <= w, and |u - 0|^2 <= t <= w.
    *Instance:* which records are the first k does not depend on what they vote for. So a record that comes or goes
    swaps one vector for another, or adds or removes one: w per query. Two records without a common attribute attain
    it if 2 t <= C.
    *Person:* j vectors leave and at most j enter. Pair them; a leaving vector without a partner is paired with 0. The
    change is the sum of j such differences, so its norm is at most j sqrt(w).
    *Agent:* add k vectors of at most t ones. Each entry of the sum is at most k, and all entries add up to at most
    k t. So sum b_c^2 <= k sum b_c <= t k^2, attained when all neighbors vote for the same t attributes.
    """
    votes = task.votes_of_a_record
    if level == "agent":
        return queries * votes * task.k**2
    group = 1 if level == "instance" else _of_a_person(task)
    return min(2 * votes, task.num_classes) * queries * group**2


def largest(task: Task, level: StatedLevel) -> int:
    """Return the most votes by which one coordinate of the sums can change.

    *Proof.* For a record it is one: a record votes at most once per query, and a swap moves one vote between two
    coordinates. For a person it is the votes of all their records there; the records that replace them move the
    coordinate the other way. For an agent it is all k neighbors of one query.
    """
    if level == "agent":
        return task.k
    return 1 if level == "instance" else _of_a_person(task)


def _of_a_person(task: Task) -> int:
    """Return the most records of a person that vote at one query: the smaller of m and k."""
    return min(records_of_a_person(task), task.k)


def per_cell(task: Task) -> int:
    """Return k, because all neighbors of a query may have one class."""
    return task.k


def knn_ballots(neighbor_labels: NDArray[np.integer], *, num_classes: int) -> NDArray[np.int64]:
    """Count the labels of each query's nearest records (kNN-DPFL; Zhu et al. 2021, Algorithm 3).

    One record of an agent moves at most one vote per query. Order the records of an agent by
    (similarity to the query, record id): a total order in which two records' places do not depend on
    any third. Take the record r away. If r was not among the first k, they stay the same. If it was,
    the record after the k-th takes its place. So at most one neighbor is swapped for another: two
    coordinates change by one vote each, or none if their labels agree (L1 at most 2, squared L2 at
    most 2). Replacing r by r' also changes at most one member of the first k. An agent with fewer
    than k records votes with what it has: then one coordinate changes by one.

    Args:
        neighbor_labels: shape (num_queries, k), the class of each neighbor; -1 if there are
            fewer than k records.
        num_classes: C, the number of classes of the task.

    Returns:
        Votes, int64, shape (num_queries, num_classes); each row sums to at most k.

    Raises:
        InvalidSetting: a label is not a class of the task.
    """
    check_labels(neighbor_labels, num_classes, least=-1)
    num_queries = neighbor_labels.shape[0]
    # One bin more than there are classes collects the missing neighbors, without a mask over the matrix.
    slots = num_classes + 1
    cells = neighbor_labels.astype(np.int64)
    cells[cells < 0] = num_classes
    cells += np.arange(num_queries, dtype=np.int64)[:, None] * slots
    votes = np.bincount(cells.ravel(), minlength=num_queries * slots).reshape(num_queries, slots)
    return np.ascontiguousarray(votes[:, :num_classes])


def attribute_ballots(neighbors: NDArray[np.integer], *, most: int) -> NDArray[np.int64]:
    """Count the attributes of each query's nearest records; each record votes for the first `most` that it has.

    "First" is by the public order of attributes, so a record's vote depends on that record alone. This is tau-clipping
    (Zhu et al. 2020, "Private-kNN"). It clips records, not models, so the bound holds for each record. Which records
    are the first k does not depend on their votes. `squared` proves the sensitivity.

    Args:
        neighbors: shape (num_queries, k, num_attributes), 1 if a neighbor has an attribute and 0 if not.
        most: tau, at least 1. It is public, and the same for every agent.

    Returns:
        Votes, int64, shape (num_queries, num_attributes): at most k each, at most k tau in a row.

    Raises:
        InvalidSetting: values other than 0 and 1, or tau below 1.
    """
    if most < 1:
        raise InvalidSetting(f"a record votes for at least one attribute, found {most}")
    if neighbors.size and (neighbors.min() < 0 or neighbors.max() > 1):
        raise InvalidSetting("a record has each attribute or has it not: 1 or 0")
    has = neighbors.astype(np.int32)
    kept = np.where(np.cumsum(has, axis=2) <= most, has, 0)
    return np.asarray(kept.sum(axis=1), dtype=np.int64)


NEIGHBORS_AT_ONCE = 2**21
"""The most neighbors found in one step: they take about 40 MiB, however large a task's k is."""


def ballots(task: Task, batch: QueryBatch, records: Records, context: RunnerContext) -> NDArray[np.int64]:
    """Return the votes of each query's nearest records.

    The work is done in blocks, because with a large k all neighbors may not fit into memory.
    """
    votes = np.zeros((len(batch), task.num_classes), dtype=np.int64)
    k = records.neighbors(task.k)
    index = context.indexes.of_records(records)
    most = task.attributes_per_record
    each = 1 if most is None else task.num_classes
    # Row -1, the last one, has no class or no attribute.
    nobody = np.full((1, *records.all_labels.shape[1:]), -1 if most is None else 0, dtype=np.int16)
    all_labels = np.concatenate([records.all_labels, nobody])
    for block in blocks_of(len(batch), NEIGHBORS_AT_ONCE // (k * each)):
        rows = index.search(batch.features[block], k).rows
        # A record's vote depends on that record alone, so parts of the neighbors add up.
        for part in blocks_of(k, NEIGHBORS_AT_ONCE // each):
            labels = all_labels[rows[:, part]]
            votes[block] += (
                knn_ballots(labels, num_classes=task.num_classes)
                if most is None
                else attribute_ballots(labels, most=most)
            )
    return votes


def blocks_of(count: int, most: int) -> Iterator[slice]:
    """Yield slices that cover `count` rows, each at least 1 and otherwise at most `most` rows long."""
    step = max(1, most)
    return (slice(start, start + step) for start in range(0, count, step))


def one_record(task: Task) -> str:
    """Return what one record changes, in words."""
    votes = "one vote" if task.votes_of_a_record == 1 else f"{task.votes_of_a_record:,} votes"
    return f"one record moves at most {votes} at each of the {task.max_queries:,} questions"


METHOD: Final = Method(
    "kNN-DPFL",
    "the labels of its k records nearest to each question",
    attributes="the attributes of its k records nearest to each question",
    ballots=ballots,
    stated=CountedVotes(squared, largest, per_cell),
    takes=frozenset({"k"}),
    searched="records",
    row_total=lambda task: task.k,
    share_kind=share_of_a_row,
    is_attacked=True,
    default_k=5,
    one_record=one_record,
)
