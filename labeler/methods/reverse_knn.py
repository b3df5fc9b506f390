"""Reverse kNN (ours): every record votes for its label at the k queries nearest to it.

In kNN-DPFL every query may draw on the same record, so a job of Q queries costs 2 Q. Queries are public: if every
record looks for its nearest query instead, where it votes depends on that record alone, and it votes k times in the
whole job. How the votes are cast: `labeler.ballots.reverse_knn_ballots`, `workers.voting.neighbors`.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Final

from labeler.methods.sensitivity import records_of_a_person
from labeler.methods.terms import CountedVotes, MethodTraits
from labeler.setting import Setting, StatedLevel

UNBOUNDED_RECORDS: Final = 2**40
"""What stands for the number of an agent's records where a task names no bound."""


def squared(setting: Setting, level: StatedLevel, queries: int) -> Fraction | int | None:
    """Squared L2 sensitivity of the sums of one batch of Q queries, with n = `max_agent_records`.

    The table is of ballots as they are counted. Drawn onto a ball of `ballot_radius` R (`labeler.ball`) they change by
    R^2 for an agent, or by the table's number if that is less; for a record or a person, D2^2 the table's number, by
    the smaller of (D2 + sqrt(Q C) / S)^2 and 4 R^2.

    | instance                      | person, g = min(m, n)             | agent          |
    |-------------------------------|-----------------------------------|----------------|
    | min(k, Q), doubled by any cap | g^2 min(k, Q), doubled by a cap n | n^2 min(k, Q)  |

    **Instance.** The queries nearest to a record are a function of that record and of
    public queries. Adding or removing it therefore changes its own class column at its own
    min(k, Q) queries by one vote and nothing else: min(k, Q) for the batch, once. But with a cap
    `max_agent_records` on how many of an agent's records vote, a record that leaves lets the first
    record beyond the cap in: two records change their votes, 2 min(k, Q). The cap cannot be known not
    to bind, so with a cap this is charged. (Not Q-fold either way: it holds for **one batch**. Asking in several
    batches is several such compositions.) A cap on the records of a person does the same: two records change their
    votes, 2 min(k, Q). With both: the n records of the smallest ids among E + r and among E + r' differ by one swap
    at most, as the first k of knn do, so the two caps together cost 2 min(k, Q), no more than either.

    **Person.** At most m records leave, each with one vote in each of its own min(k, Q) rows:
    entries of at most m, m min(k, Q) votes in all, so the squared norm is at most m^2 min(k, Q), attained when
    their votes fall together. mu is m times that of one record without a cap. With n: at most g = min(m, n) of
    the n records that vote leave, and as many of other people enter. Both sums have non-negative entries, so
    their difference has a squared norm of at most g^2 min(k, Q) + g^2 min(k, Q): mu is g times that of one
    record under a cap. (By adding norms, instead of squares, it would be 2 g times that of one record without.)

    **Agent.** At most n records vote, each at most once in a row, so an entry is at most
    n and all entries together at most n min(k, Q): sum b^2 <= max b * sum b <= n^2 min(k, Q),
    attained when all records share a class and their nearest queries. Without a public n there is
    no bound at all.

    **Clipping (winner).** An agent cuts every count at a public M (`Task.vote_clip`). Let b and b' be
    ballots of neighbouring data sets and clip(x) = min(x, M). clip is increasing and 1-Lipschitz: for
    x <= y, clip(y) - clip(x) lies between 0 and y - x. So cell by cell |clip(b) - clip(b')| <= |b - b'|, and
    the sum of squares over all cells is at most what it was without clipping: the bounds above hold, at all
    levels (b' = 0 at agent level, and clip(0) = 0), and so does `largest`.
    """
    counted, radius = _squared_as_counted(setting, level, min(setting.k, queries)), setting.ballot_radius
    if radius is None:
        return counted
    if level == "agent":
        return radius**2 if counted is None else min(counted, radius**2)
    if counted is None:
        return None  # Only an agent may cast any number of votes.
    # Loaded where it is wanted: the names of methods need no numpy.
    from labeler.ball import squared_distance

    return squared_distance(counted, radius=radius, scale=setting.scale, entries=queries * setting.num_classes)


def _squared_as_counted(setting: Setting, level: StatedLevel, places: int) -> int | None:
    """The table of `squared`, whose proof it is, of ballots as they are counted; places is min(k, Q)."""
    if level == "agent":
        return None if setting.max_agent_records is None else setting.max_agent_records**2 * places
    group = 1 if level == "instance" else _of_a_person(setting)
    replaced = setting.a_record_may_be_replaced if level == "instance" else setting.max_agent_records is not None
    return group**2 * places * (2 if replaced else 1)


def largest(setting: Setting, level: StatedLevel) -> int | None:
    """One vote for a record: it votes at most once per query.

    (Under a cap a record that leaves and the one let in may share a coordinate; then their changes cancel.) For a
    person as many votes as its records have there; those that enter in their place move the coordinate the other way.
    For an agent everything it can put there: the votes of all its n records, and no bound without n. On a ball of
    radius R no coordinate is above R, and every one may move with the others (`labeler.ball`).
    """
    radius = setting.ballot_radius
    if radius is not None:
        counted = _squared_as_counted(setting, level, setting.k)
        if level == "agent":
            return radius
        # Loaded where it is wanted, as above.
        from labeler.ball import largest_distance

        return None if counted is None else largest_distance(counted, radius=radius)
    if level == "agent":
        return setting.max_agent_records
    return 1 if level == "instance" else _of_a_person(setting)


def _of_a_person(setting: Setting) -> int:
    """No more of a person's records vote than the n that vote at all."""
    records = records_of_a_person(setting)
    return min(records, setting.max_agent_records or records)


def per_cell(setting: Setting) -> int:
    """All records of an agent may share a class and a nearest query; as counted, before any ball."""
    return setting.max_agent_records or UNBOUNDED_RECORDS


TRAITS: Final = MethodTraits(
    "reverse kNN",
    "each record's label, at the k questions nearest to it",
    asked_at_once=True,
    has_k=True,
    records_choose=True,
    stated=CountedVotes(squared, largest, per_cell),
)
