"""What one record, or one agent, can change in the sum of all ballots, squared and in votes.

The price of a task is a function of two numbers: the squared L2 norm of the largest change of the
**whole composition** of queries (`squared_sensitivity`), and the largest change of a single
coordinate (`largest_change`), which matters only for how far into the tail of the noise a proof has
to look. Both are integers: votes are counted, never divided by k.

Neighbours (PRIVACY section 1):

* instance level: one agent gains or loses one record, everybody else's records stay;
* agent level, zero-out: the ballots of one agent become zero while its noise share stays.

| method      | instance, squared           | one coordinate | agent, squared      | one coordinate |
|-------------|-----------------------------|----------------|---------------------|----------------|
| knn         | 2 Q                         | 1              | Q k^2               | k              |
| ensemble    | 2 Q                         | 1              | Q                   | 1              |
| reverse-knn | min(k, Q); doubled by a cap | 1              | n^2 min(k, Q)       | n              |

with Q the queries, k the neighbours that vote and n = `max_agent_records`. What methods that answer with real numbers
change is in `labeler.model_terms`. The release (histogram or
winner) makes no difference: a winner is computed from the histogram.

A guarantee at instance level is about one record. A person with several records, at one agent or at
two, is protected as a group of that size; de-duplicate per person.
"""

from __future__ import annotations

from labeler.errors import InvalidSetting
from labeler.task import Level, Task


def squared_sensitivity(task: Task, level: Level, queries: int) -> int | None:
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

    **Clipping (reverse-knn, winner).** An agent cuts every count at a public M (`Task.vote_clip`). Let b and b' be
    ballots of neighbouring data sets and clip(x) = min(x, M). clip is increasing and 1-Lipschitz: for
    x <= y, clip(y) - clip(x) lies between 0 and y - x. So cell by cell |clip(b) - clip(b')| <= |b - b'|, and
    the sum of squares over all cells is at most what it was without clipping: the bounds above hold, at both
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
        InvalidSetting: queries is not a positive integer, or the task's method does not count votes.
    """
    if not task.traits.counts:
        raise InvalidSetting(f"method {task.method} does not count votes; its sensitivity is in labeler.model_terms")
    if type(queries) is not int or queries < 1:
        raise InvalidSetting(f"queries must be a whole number of at least 1, found {queries!r}")
    if task.method == "reverse-knn":
        places = min(task.k, queries)
        if level == "instance":
            return places if task.max_agent_records is None else 2 * places
        return None if task.max_agent_records is None else task.max_agent_records**2 * places
    if level == "instance":
        return 2 * queries
    return queries * task.k**2 if task.method == "knn" else queries


def largest_change(task: Task, level: Level) -> int | None:
    """The most votes by which any one coordinate of the sum can change; None where unbounded.

    At instance level one vote: a record votes at most once per query, and a swap moves one vote
    between two coordinates. (Under a cap a record that leaves and the one let in may share a
    coordinate; then their changes cancel.) At agent level everything the agent can put on one coordinate.
    """
    if level == "instance" or task.method == "ensemble":
        return 1
    return task.k if task.method == "knn" else task.max_agent_records
