"""What one record, one person or one agent can change in the sum of all ballots, squared and in votes.

The price of a task is a function of two numbers: the squared L2 norm of the largest change of the
**whole composition** of queries (`squared_sensitivity`), and the largest change of a single
coordinate (`largest_change`), which matters only for how far into the tail of the noise a proof has
to look. Both are integers: votes are counted, never divided by k.

Neighbours (PRIVACY section 1):

* instance level: one agent gains or loses one record, everybody else's records stay;
* person level: one agent gains or loses **all** records of one person, everybody else's records stay; only where the
  task has `records_per_person`;
* agent level, zero-out: the ballots of one agent become zero while its noise share stays.

The squared norm of the change of all sums, and (in brackets) of the change of one coordinate:

| method      | instance                        | person                             | agent             |
|-------------|---------------------------------|------------------------------------|-------------------|
| knn         | 2 Q (1)                         | 2 Q min(m, k)^2 (min(m, k))        | Q k^2 (k)         |
| ensemble    | 2 Q (1)                         | 2 Q (1)                            | Q (1)             |
| reverse-knn | min(k, Q), doubled by a cap (1) | g^2 min(k, Q), doubled by n (g)    | n^2 min(k, Q) (n) |

with Q the queries, k the neighbours that vote, n = `max_agent_records`, m = `records_per_person` and g = min(m, n). A
cap is either of n and m. What methods that answer with real numbers
change is in `labeler.model_terms`. The release (histogram or
winner) makes no difference: a winner is computed from the histogram.

A method that is not in the table has no price: whatever it is, it is refused, never charged as another.

A guarantee at instance level is about one record. A person with several records is protected as a group of that size,
and where the task has no `records_per_person` nobody bounds that size. A person with records at two agents changes the
ballots of both: the norms of the two changes add up, and so do their mus. It is the same where one person has two ids.
"""

from __future__ import annotations

from labeler.errors import InvalidSetting, PrivacyRefusal
from labeler.task import StatedLevel, Task


def squared_sensitivity(task: Task, level: StatedLevel, queries: int) -> int | None:
    """Squared L2 sensitivity of the sums of a whole batch of `queries` queries, in votes squared.

    Proof, method by method.

    **knn, instance.** Records are ordered by (similarity, record id), a total order in which two
    records' places do not depend on a third. Adding or removing a record swaps at most one of the
    first k for another: one coordinate loses a vote, another gains one. Squared norm at most 2 per
    query; the queries are different coordinates, so 2 Q. Replacing a record also swaps at most one.

    **knn, agent.** The row of one query has non-negative entries b_c with sum at most k, so
    sum b_c^2 <= (sum b_c)^2 <= k^2, attained when all neighbours share a class. Q k^2.

    **ensemble, instance.** The record may change the model and so every prediction; each costs one
    vote here and one there: 2 Q. **Agent:** the one vote of each row disappears: Q.

    **reverse-knn, instance.** The queries nearest to a record are a function of that record and of
    public queries. Adding or removing it therefore changes its own class column at its own
    min(k, Q) queries by one vote and nothing else: min(k, Q) for the batch, once. But with a cap
    `max_agent_records` on how many of an agent's records vote, a record that leaves lets the first
    record beyond the cap in: two records change their votes, 2 min(k, Q). The cap cannot be known not
    to bind, so with a cap this is charged. (Not Q-fold either way: it holds for **one batch**. Asking in several
    batches is several such compositions.)

    **reverse-knn, agent.** At most n records vote, each at most once in a row, so an entry is at most
    n and all entries together at most n min(k, Q): sum b^2 <= max b * sum b <= n^2 min(k, Q),
    attained when all records share a class and their nearest queries. Without a public n there is
    no bound at all.

    **Caps per person.** Of each person an agent answers with the m records of the smallest ids and with no
    other. Whether a record is among them depends on its person's records alone.
    *Instance level.* A record that is not among the m changes nothing when it leaves. One that is lets the
    person's next record in: what the agent answers with changes by at most one **replacement**. For knn and
    ensemble that costs what a removal does (above); for reverse-knn two records change their votes, 2 min(k,
    Q). With n as well: the n records of the smallest ids among E + r and among E + r' differ by one swap at
    most, as the first k of knn do, so the two caps together cost 2 min(k, Q), no more than either.
    *Person level.* When all records of a person leave, at most m of those answered with leave, and no other
    person's record enters: what the agent answers with changes by a removal of at most m records, and by no
    replacement.

    **knn, person.** Of the first k, j <= min(m, k) are the person's; the others are the first k - j of what
    stays, which are among the first k of what stays. So at most j votes leave and at most j enter. Counted by
    class, the leaving a and the entering b have non-negative entries, |a|, |b| <= j and a.b >= 0: |a - b|^2 <=
    |a|^2 + |b|^2 <= 2 j^2 per query, attained when the leaving share a class and the entering another. 2 Q
    min(m, k)^2: mu is min(m, k) times that of one record.

    **ensemble, person.** Whatever the model learns without them, it casts one vote per query: 2 Q, as for one
    record.

    **reverse-knn, person.** At most m records leave, each with one vote in each of its own min(k, Q) rows:
    entries of at most m, m min(k, Q) votes in all, so the squared norm is at most m^2 min(k, Q), attained when
    their votes fall together. mu is m times that of one record without a cap. With n: at most g = min(m, n) of
    the n records that vote leave, and as many of other people enter. Both sums have non-negative entries, so
    their difference has a squared norm of at most g^2 min(k, Q) + g^2 min(k, Q): mu is g times that of one
    record under a cap. (By adding norms, instead of squares, it would be 2 g times that of one record without.)

    **Clipping (reverse-knn, winner).** An agent cuts every count at a public M (`Task.vote_clip`). Let b and b' be
    ballots of neighbouring data sets and clip(x) = min(x, M). clip is increasing and 1-Lipschitz: for
    x <= y, clip(y) - clip(x) lies between 0 and y - x. So cell by cell |clip(b) - clip(b')| <= |b - b'|, and
    the sum of squares over all cells is at most what it was without clipping: the bounds above hold, at all
    levels (b' = 0 at agent level, and clip(0) = 0), and so does `largest_change`.

    **Ballots and noise shared apart (knn and ensemble, winner).** Talliers add up S * ballots + noise from two
    sharings. Any two of them hold uniform numbers, and the sum they compute on is the same random variable
    as with one sharing, so the same bounds hold. The column of votes not cast is in no sum.

    Args:
        task: what is asked.
        level: whose presence is protected.
        queries: Q, how many queries the composition has; at least 1.

    Returns:
        The bound, or None where there is none (reverse-knn at agent level without `max_agent_records`).

    Raises:
        InvalidSetting: queries is not a positive integer, the task's method does not count votes, or the level is a
            person's and the task has no `records_per_person`.
        PrivacyRefusal: nobody has stated the sensitivity of the task's method.
    """
    if not task.traits.counts:
        raise InvalidSetting(f"method {task.method} does not count votes; its sensitivity is in labeler.model_terms")
    if type(queries) is not int or queries < 1:
        raise InvalidSetting(f"queries must be a whole number of at least 1, found {queries!r}")
    group = votes_of_a_person(task) if level == "person" else 1
    match task.method:
        case "knn":
            return queries * task.k**2 if level == "agent" else 2 * queries * group**2
        case "ensemble":
            return queries if level == "agent" else 2 * queries * group**2
        case "reverse-knn":
            places = min(task.k, queries)
            if level == "agent":
                return None if task.max_agent_records is None else task.max_agent_records**2 * places
            replaced = task.a_record_may_be_replaced if level == "instance" else task.max_agent_records is not None
            return group**2 * places * (2 if replaced else 1)
        case other:
            raise without_sensitivity(other)


def largest_change(task: Task, level: StatedLevel) -> int | None:
    """The most votes by which any one coordinate of the sum can change; None where unbounded.

    At instance level one vote: a record votes at most once per query, and a swap moves one vote
    between two coordinates. (Under a cap a record that leaves and the one let in may share a
    coordinate; then their changes cancel.) At person level as many votes as one person's records have there; those
    that enter in their place move the coordinate the other way. At agent level everything the agent can put on one
    coordinate.
    """
    match task.method:
        case "knn" | "reverse-knn" | "ensemble" if level == "instance":
            return 1
        case "knn" | "reverse-knn" | "ensemble" if level == "person":
            return votes_of_a_person(task)
        case "knn":
            return task.k
        case "reverse-knn":
            return task.max_agent_records
        case "ensemble":
            return 1
        case other:
            raise without_sensitivity(other)


def records_of_a_person(task: Task) -> int:
    """m: with how many records of one person an agent answers at most.

    Raises:
        InvalidSetting: the task does not bound them, so that there is no statement about a person.
    """
    if task.records_per_person is None:
        raise InvalidSetting(
            "a price is stated for a person only where the task says with how many records of one person an agent "
            "answers at most; give the task records_per_person"
        )
    return task.records_per_person


def votes_of_a_person(task: Task) -> int:
    """By how many votes one person's records can change one coordinate, for methods that count votes.

    m records; of them no more than the k that are asked at one query (knn), or than the n that vote at all
    (reverse-knn); for ensemble one vote, whatever its model was trained on.
    """
    records = records_of_a_person(task)
    match task.method:
        case "knn":
            return min(records, task.k)
        case "reverse-knn":
            return min(records, task.max_agent_records or records)
        case "ensemble":
            return 1
        case other:
            raise without_sensitivity(other)


def without_sensitivity(method: str) -> PrivacyRefusal:
    """The refusal of a method of which nobody has stated what a record, a person or an agent changes.

    Charging it as another method would promise what was never proved, so nothing that asks for a price goes on.
    """
    return PrivacyRefusal(
        f"method {method!r} has no stated sensitivity, so it has no price; state and prove what one record, one person "
        "and one agent change, in labeler.sensitivity for votes or labeler.model_terms for numbers"
    )
