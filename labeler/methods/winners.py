"""Which winners have a price of their own, and when it is taken (`labeler.accounting.winner`)."""

from __future__ import annotations

import math

from labeler.accounting.events import IntegerSum
from labeler.accounting.integer import epsilon_bound
from labeler.accounting.winner import ONE_BIT, SWAP, IntegerWinner
from labeler.budget import LEAST_DELTA_OF_WINNERS
from labeler.methods.terms import Asked


def as_winners(task: Asked, queries: int, sums: IntegerSum, *, one: IntegerSum | None) -> IntegerSum:
    """The winners of noisy sums as an event of their own, where less is proved of them than of the sums.

    Where rows have a total (top-k votes, one vote of a model), each query is bounded by itself. Squared by votes, a
    change of 1 is one vote that arrives or leaves. One of 2 in which no count moves by more than one vote is one vote
    here and one there: a vote that moves, since no record adds two votes to a row. More votes at once, or reverse-knn,
    whose bound is of all queries together, have no such proof, and pay for the sums. So does a task whose noise the
    talliers add: a dishonest one may add any number, and an answer is no threshold on the changed count any more where
    the sum wraps around in the field (`labeler.noise`). So does a task whose guarantee is too large, or its
    delta too small, for the bounds that winners have (`labeler.accounting.integer`).

    Args:
        queries: how many winners.
        sums: the event of the histograms of so many.
        one: the event of a single histogram, at the same level; None where it has no bound.
    """
    if (
        not task.traits.rows_have_a_total
        or task.dishonest_talliers is not None
        or task.delta < LEAST_DELTA_OF_WINNERS
        or one is None
        or one.largest_change != 1
    ):
        return sums
    if one.squared_sensitivity not in (1, 2):
        return sums
    winners = IntegerWinner(
        squared_sensitivity=sums.squared_sensitivity,
        largest_change=sums.largest_change,
        grid_scale=sums.grid_scale,
        share_sigma_grid=sums.share_sigma_grid,
        noise_contributors=sums.noise_contributors,
        coordinates=sums.coordinates,
        level=sums.level,
        change=ONE_BIT if one.squared_sensitivity == 1 else SWAP,
        queries=queries,
        is_duel=task.num_classes == 2 and task.abstain_below is None,
    )
    return winners if math.isfinite(epsilon_bound(winners, task.delta)) else sums
