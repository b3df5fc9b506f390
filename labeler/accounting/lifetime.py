"""Votes for life: a budget that a record spends vote by vote, and a promise that no number of jobs can break.

In reverse-knn a record votes for its own label at the public queries nearest to it, if its similarity reaches a public
threshold and its label is among the classes asked about. So whether and where it votes depends only on itself, on
public things and on its own past votes. Let it carry a durable spend. A vote costs p = mu^2 of the integer sum that it
is cast in (`vote_nano`, rounded up). In each job a record casts all its votes if they fit into what is left of its B,
else none (`may_vote`).

**Theorem.** With ideal Gaussian noise everything that is ever released, over any number of jobs, is sqrt(B)-GDP for one
record that is added or removed. Queries, thresholds, k, sigma, when to ask and other records' ballots may depend on
all earlier releases.

*Proof.* Fix the records of everybody but r; world D has r, world D' has not. Ballots are sums over records, and every
record decides by itself. So given the transcript so far the two worlds' sums differ only by the votes of r. Let c_i be
that difference at coordinate i, counted through all rounds, in units of the noise's standard deviation there. c_i is a
function of the transcript before round(i) and of r: predictable. By the rule sum c_i^2 <= B along every transcript. Add
a last round, never sent, that spends what is left, so that the sum is exactly B: the transcript without it is a
post-processing. Under D' coordinate i is noise xi_i, standard normal given the past. The log-likelihood ratio of the
two worlds is L = sum (c_i xi_i - c_i^2 / 2) = sum c_i xi_i - B/2. For each real t, let
Z_t = exp(t sum c_i xi_i - t^2 sum c_i^2 / 2). It is a martingale of mean 1: its factors have mean 1 given the past, and
the bounded sum of squares makes it uniformly integrable. Its second sum is the constant B. So
E exp(t sum c_i xi_i) = exp(t^2 B / 2), which only N(0, B) has. Hence L ~ N(-B/2, B) under D' and, tilting by exp(L),
N(B/2, B) under D. The trade-off function of the two worlds is a function of the law of L alone. So it is that of
N(0, 1) against N(sqrt(B), 1). Infinite histories are limits of prefixes. Both directions are the same by symmetry. QED
(Smith, Thakurta 2022 and Koskela, Tobaben, Honkela 2023 have fully adaptive Gaussian filters; Feldman, Zrnic 2021
individual ones for Renyi.)

**Records differ, noise does not.** The filter is about one record and no party learns its state: which records have run
out is private. Only B must be fixed beforehand, the largest of any task that is answered.

**Integers.** The steps are those of `labeler.accounting.integer`, at the coordinates at which r votes and at no other:
elsewhere both worlds draw from one law given the past. Say r casts at most V votes in its life. Exact shares and
the passage to real numbers cost a factor e^(+-(tau + 2 kappa)) of each of them, pointwise. Ratios multiply along a
transcript, so the cost is 2 V (tau + 2 kappa) on epsilon and a factor e^(V (tau + 2 kappa)) on delta. Replace the
sampler by an exact one at these coordinates. No transcript has more than V of them, with h unknown shares each. That
costs at most h V 2^-100 in total variation, (1 + e^epsilon) h V 2^-100 on delta. A real vote casts S grid units under
variance v - 3: p = S^2 / (v - 3).
**V is bounded** by public numbers: every vote is charged at least one nano-unit, so V <= `budget_nano`.

**Winner.** Winners are a post-processing of the histogram. A count clipped at M moves by at most as much as before, at
coordinates that are predictable given the other records' ballots. It costs r no more than it is charged.

**What voids it.** An additional cap on the records of an agent or a person: a record that leaves lets another in, which
has its own B to spend. Top-k votes: a record that falls silent lets the next neighbor in, so others' votes depend on
its spend (claimed 4.38, true 163). A spend that is forgotten: a record with a second account has a second B.

**Copies.** The account is an image's: rows of one image (equal keyed digests) have one account, and only the row with
the smallest record id votes. So "one record" is one image with any number of rows. Removing the one row that votes
puts another of the same image in its place. Its votes are non-negative as were the first's, so the two worlds differ
by sum (a - b)^2 <= sum a^2 + sum b^2 <= 2 B: still sqrt(2 B)-GDP. A person with m images: m sqrt(B).

**What it is not.** min(B, what a record has spent) is an indicator of usefulness and no epsilon: prices that adapt make
it an odometer, and it is private.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from labeler.accounting.events import NANO, IntegerSum
from labeler.errors import InvalidSetting, PrivacyRefusal
from labeler.setting import MOST_LIFE_NANO, Life

if TYPE_CHECKING:
    from labeler.task import Task

ROUND_NANO: Final = 1
"""Ledger charge of a round of votes for life, besides the B that was set aside once: the least possible amount.
So a round has its entry like any other, and an account that is written off after a loss pays for none."""

MOST_UNKNOWN_SHARES: Final = 10**6
"""h of any task: no task has more agents."""


@dataclass(frozen=True)
class LifetimeSum(IntegerSum):
    """All the votes that one record casts in its life, as if all were under the noise of one task.

    Its `squared_sensitivity` is the number of votes under this noise that B pays for. Its `coordinates` are V, each
    with the most shares that any task may have. Its `mu_squared` is B, whatever is asked.
    """

    only_plain: ClassVar[bool] = True
    """The transcript decides how many coordinates change; the bulk's bound is not proved for that."""

    @property
    def round_nano(self) -> int:
        """Return ROUND_NANO: B was set aside once."""
        return ROUND_NANO


def vote_nano(task: Task) -> int:
    """Return the cost of one vote of a record, nano-units of mu^2, rounded up: S^2 / (v - 3)."""
    return _vote(task).charge_nano


def job_nano(task: Task) -> int:
    """Return the most that one job of a task can take of any record's B: k votes, or one per query if those are fewer.

    Public: it follows from the task alone. A job is one round (`Method.round_sizes`).
    """
    return min(task.k, task.max_queries) * vote_nano(task)


def life_of(task: Task) -> Life:
    """Return the terms of a task of votes for life.

    Raises:
        InvalidSetting: it is not such a task.
    """
    if task.lifetime_budget is None:
        raise InvalidSetting("a task without `lifetime_budget` has a price per job, and its records keep no spend")
    return task.lifetime_budget


def lifetime_event(task: Task) -> LifetimeSum:
    """Return everything that votes for life ever release of one record, as a task of this noise states it.

    Raises:
        InvalidSetting: one vote costs more than B, so that no record could ever cast any.
    """
    vote, budget = _vote(task), life_of(task).budget_nano
    if vote.charge_nano > budget:
        raise InvalidSetting(
            f"one vote costs {vote.charge_nano} nano-units of mu^2 and a record has {budget} for its whole life, so "
            f"none could ever vote; raise sigma_votes {(vote.charge_nano / budget) ** 0.5:.2g}-fold or more"
        )
    # V is at most the budget in nano-units, since each vote is charged one or more.
    coordinates = budget * -(-MOST_UNKNOWN_SHARES // vote.noise_contributors)
    changes = {"squared_sensitivity": Fraction(budget, NANO) / vote.mu_squared, "coordinates": coordinates}
    return LifetimeSum(**vars(vote) | changes)


def may_vote(spent: NDArray[np.int64], votes: NDArray[np.int64], *, price: int, life: Life) -> NDArray[np.bool_]:
    """Return which records cast their votes in a job: those that have any, and can pay for all of them.

    Each decides by itself: entry i of the answer depends only on entry i of the arguments.

    Args:
        spent: the spend of each in its life, nano-units, at least 0, shape (n,).
        votes: the votes that each would cast, at least 0.
        price: of one vote, nano-units (`vote_nano`).
        life: the task's.

    Raises:
        PrivacyRefusal: a price below one nano-unit, or a spend or a count below 0: such numbers decide nothing.
    """
    if price < 1 or (spent.size and (int(spent.min()) < 0 or int(votes.min()) < 0)):
        raise PrivacyRefusal("votes for life are decided on whole numbers of at least 0, and a price of at least 1")
    # A price above B is cut to just above it: then nobody can pay, and no product exceeds 64 bits.
    cost = votes.astype(np.int64) * np.int64(min(price, life.budget_nano + 1))
    return (votes > 0) & (cost <= np.int64(life.budget_nano) - spent)


def _vote(task: Task) -> IntegerSum:
    life_of(task)
    return IntegerSum(
        squared_sensitivity=1,
        largest_change=1,
        grid_scale=task.scale,
        share_sigma_grid=task.share_sigma_grid,
        noise_contributors=task.noise_contributors,
        coordinates=1,
    )


def set_aside_nano(cap_nano: int) -> int:
    """Return the B that fits into a cap and leaves room for the rounds themselves: all but a thousandth of it.

    Args:
        cap_nano: the budget for an epsilon (`labeler.budget.budget_for`).

    Returns:
        Nano-units; at least 1000 rounds can be charged in addition.

    Raises:
        InvalidSetting: the cap is too small to hold any, or larger than any task of votes for life may promise: an
            amount that is set aside is never given back.
    """
    kept = max(1000 * ROUND_NANO, cap_nano // 1000)
    if cap_nano <= kept:
        raise InvalidSetting(
            f"{cap_nano} nano-units of mu^2 are too few for votes for life; at least "
            f"{kept + 1} are needed: choose a larger epsilon for votes for life (life_epsilon of "
            "coordinator.toml and policy.toml, lifetime_budget.epsilon of a task)"
        )
    if cap_nano - kept > MOST_LIFE_NANO:
        raise InvalidSetting(
            f"{cap_nano} nano-units of mu^2 are more than votes for life are proved for, at most "
            f"{MOST_LIFE_NANO}; what is set aside is never given back: choose a smaller epsilon for votes for life "
            "(life_epsilon of coordinator.toml and policy.toml, lifetime_budget.epsilon of a task)"
        )
    return cap_nano - kept
