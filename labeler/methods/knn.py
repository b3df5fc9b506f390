"""kNN-DPFL (Zhu et al. 2021): every query asks the agent's k records nearest to it for their labels.

How the votes are cast, and that they are a function of exact similarities: `labeler.ballots.knn_ballots`,
`workers.voting.neighbors`. What follows is about those ballots and about no others.

Where classes are attributes, of which a record may have any number, a record votes for t of them at most
(`labeler.ballots.attribute_ballots`). One class per record is t = 1.
"""

from __future__ import annotations

from typing import Final

from labeler.methods.sensitivity import records_of_a_person
from labeler.methods.terms import CountedVotes, MethodTraits
from labeler.setting import Setting, StatedLevel


def squared(setting: Setting, level: StatedLevel, queries: int) -> int:
    """Squared L2 sensitivity of the sums of Q queries: 2 Q, 2 Q min(m, k)^2 for a person, Q k^2 for an agent.

    Of attributes, with t = min(tau, C) votes of a record and w = min(2 t, C) between two: w Q, w Q min(m, k)^2 and
    t Q k^2. The first proofs are of one class per record, t = 1 and w = 2; the last paragraph is of any t.

    **Instance.** Records are ordered by (similarity, record id), a total order in which two
    records' places do not depend on a third. Adding or removing a record swaps at most one of the
    first k for another: one coordinate loses a vote, another gains one. Squared norm at most 2 per
    query; the queries are different coordinates, so 2 Q. Replacing a record also swaps at most one, and so a cap on
    the records of a person, under which a record that leaves may let another in, changes nothing.

    **Person.** Of the first k, j <= min(m, k) are the person's; the others are the first k - j of what
    stays, which are among the first k of what stays. So at most j votes leave and at most j enter. Counted by
    class, the leaving a and the entering b have non-negative entries, |a|, |b| <= j and a.b >= 0: |a - b|^2 <=
    |a|^2 + |b|^2 <= 2 j^2 per query, attained when the leaving share a class and the entering another. 2 Q
    min(m, k)^2: mu is min(m, k) times that of one record.

    **Agent.** The row of one query has non-negative entries b_c with sum at most k, so
    sum b_c^2 <= (sum b_c)^2 <= k^2, attained when all neighbours share a class. Q k^2.

    **Attributes.** A record's vote is a vector of C zeros and ones with t ones at most, a function of that record
    alone. Two such vectors differ, by one, exactly where one has a one and the other none: at no more than t + t
    places, and at no more than C, so |u - v|^2 <= w, and |u - 0|^2 <= t <= w. *Instance:* which records are the first
    k does not depend on what they vote for, so a record that comes or goes swaps one vector for another, or adds or
    takes one: w per query, attained by two records without a common attribute where 2 t <= C. *Person:* j leaving and
    at most j entering vectors, paired, are j such differences, whose sum has a norm of at most j sqrt(w). *Agent:* k
    vectors of t ones sum to entries of at most k that add up to at most k t: sum b_c^2 <= k sum b_c <= t k^2,
    attained when all neighbours vote for the same t.
    """
    votes = setting.votes_of_a_record
    if level == "agent":
        return queries * votes * setting.k**2
    group = 1 if level == "instance" else _of_a_person(setting)
    return min(2 * votes, setting.num_classes) * queries * group**2


def largest(setting: Setting, level: StatedLevel) -> int:
    """One vote for a record, which votes at most once per query: a swap moves one vote between two coordinates.

    For a person as many votes as its records have there; those that enter in their place move the coordinate the other
    way. For an agent all its k neighbours of one query.
    """
    if level == "agent":
        return setting.k
    return 1 if level == "instance" else _of_a_person(setting)


def _of_a_person(setting: Setting) -> int:
    """At one query no more of a person's records vote than the k that are asked."""
    return min(records_of_a_person(setting), setting.k)


def per_cell(setting: Setting) -> int:
    """All k neighbours of a query may have one class."""
    return setting.k


TRAITS: Final = MethodTraits(
    "kNN-DPFL",
    "the labels of its k records nearest to each question",
    rows_have_a_total=True,
    has_k=True,
    may_have_attributes=True,
    stated=CountedVotes(squared, largest, per_cell),
)
