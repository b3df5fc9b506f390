"""The grid of a task: the units in which its noise is drawn and its sums are added up.

A grid is fine enough for the proof (100 units of standard deviation for a noise share) and coarse enough that no sum
leaves its range. It follows from the task's fields alone, so every party finds the same one.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from labeler.errors import PrivacyRefusal, UnsafeGrid
from labeler.methods.sensitivity import BoundedNumbers, counted_votes
from labeler.noise import (
    DEFAULT_SHARE_SIGMA_GRID,
    MAX_COMPARISON_BITS,
    MAX_GRID_SUM,
    MAX_SHARE_SIGMA_GRID,
    MIN_SHARE_SIGMA_GRID,
    NOISE_TAIL_CUT,
    noise_reach,
    vector_scale,
)

if TYPE_CHECKING:
    from labeler.accounting.events import IntegerSum
    from labeler.sharing import WinnerTerms
    from labeler.task import Task

SOFT_VOTE_SCALE = 2**24
"""Grid units of one soft vote (aux-distill): no noise lies on this grid, so it only needs to be fine."""

MAX_WINNER_WIDTH: int = 2**MAX_COMPARISON_BITS - 2
"""Largest difference of two noisy sums of a winner task, in grid units, that fits into a field of 64 bits."""


def scale_of(task: Task) -> int:
    """Return S, grid units per vote (`Task.scale`)."""
    per_share = task.sigma_votes / math.sqrt(task.noise_contributors)
    if task.traits.has_local_noise:
        return SOFT_VOTE_SCALE
    if not task.traits.counts:
        return vector_scale(dimension=task.rows * task.num_classes, sensitivity=1.0, share_sigma=per_share)
    scale = task.grid_scale or _default_scale(task, per_share)
    if per_share * scale < MIN_SHARE_SIGMA_GRID:
        raise UnsafeGrid(
            f"grid_scale {scale} gives a noise share a standard deviation of {per_share * scale:.3g} grid units; "
            f"the guarantee needs at least {MIN_SHARE_SIGMA_GRID:g}. "
            f"Leave grid_scale out, or set it to {math.ceil(MIN_SHARE_SIGMA_GRID / per_share)} or more."
        )
    if per_share * scale > MAX_SHARE_SIGMA_GRID:
        if task.grid_scale is None:
            raise UnsafeGrid(
                f"the noise is too large: sigma {task.sigma_votes:g} gives a noise share a standard deviation of "
                f"{per_share * scale:.3g} grid units on the coarsest grid there is, and the exact sampler reaches "
                f"{MAX_SHARE_SIGMA_GRID:g}. Take less noise, or a larger epsilon."
            )
        raise UnsafeGrid(
            f"with grid_scale {scale} a noise share has a standard deviation of {per_share * scale:.3g} grid "
            f"units; the exact sampler reaches {MAX_SHARE_SIGMA_GRID:g}. Leave grid_scale out, or lower it."
        )
    if task.release == "winner":
        _check_winner_fits(task, scale, per_share)
        return scale
    largest = task.agents * most_votes_in_a_sum(task) * scale + task.noise_parties * noise_reach(per_share * scale)
    if largest >= MAX_GRID_SUM:
        raise UnsafeGrid(
            f"with grid_scale {scale} a sum could reach {largest:.3g} grid units; the limit is {MAX_GRID_SUM:.3g}. "
            "Use a smaller grid_scale, sigma_votes, k, ballot_radius or max_agent_records."
        )
    return scale


def _default_scale(task: Task, per_share: float) -> int:
    """Return the scale that gives a noise share 1600 grid units, or the largest at which a winner's sums fit."""
    scale = max(1, math.ceil(DEFAULT_SHARE_SIGMA_GRID / per_share))
    if task.ballot_radius is not None:
        # Rounding onto the ball may move every number of a ballot. The grid is so fine that this hardly counts.
        entries, moved = task.max_queries * task.num_classes, math.sqrt(min(task.k, task.max_queries))
        scale = vector_scale(dimension=entries, sensitivity=moved, share_sigma=per_share)
    if task.release == "histogram":
        return scale
    shares, room = _shares_in_a_room(task), MAX_WINNER_WIDTH // task.agents
    if task.traits.searched == "questions":
        # Half of the range is for votes. So an agent's cell is clipped at no less than 25 sigma of a noise share.
        votes = _signs(task)
        largest = min(_largest_scale(room // 2, 0, per_share, shares), _largest_scale(room, votes, per_share, shares))
    else:
        largest = _largest_scale(room, task.k, per_share, shares)
    least = math.ceil(MIN_SHARE_SIGMA_GRID / per_share)
    # Division and multiplication round differently: the product must reach the minimum too.
    if per_share * least < MIN_SHARE_SIGMA_GRID:
        least += 1
    return max(min(scale, largest), least)


def _check_winner_fits(task: Task, scale: int, per_share: float) -> None:
    # Counts of reverse-knn are clipped to what fits, but never below one vote.
    is_clipped = task.traits.searched == "questions"
    votes = _signs(task) if is_clipped else task.k
    width = task.agents * votes * scale + task.noise_parties * 2 * noise_reach(per_share * scale)
    if width > MAX_WINNER_WIDTH:
        # The larger the noise, the fewer grid units a vote takes, down to the one that it must have.
        changes = [f"{'smaller' if scale == 1 else 'larger'} sigma_votes", "fewer agents"]
        floor, reach = "", noise_reach(MIN_SHARE_SIGMA_GRID)
        if task.noise_by == "agents" and task.agents > MAX_WINNER_WIDTH // (2 * reach):
            # No sigma suffices: a share is at least this wide, and the sum of all shares must fit the range.
            floor = (
                f" No more than {MAX_WINNER_WIDTH // (2 * reach)} agents can add the noise of winners, since each "
                f"one's share reaches {reach} grid units to either side at the least that the proof needs."
            )
            changes = ["dishonest_talliers = 1 (three talliers add the noise, and not each agent)", "fewer agents"]
        changes += ([] if is_clipped else ["a smaller k"]) + (["no grid_scale"] if task.grid_scale else [])
        raise UnsafeGrid(
            f"with grid_scale {scale}, noisy sums over {task.agents} agents of up to {votes} votes each"
            + (" (no count can be clipped lower)" if is_clipped else "")
            + f" lie up to {width} grid units apart; the winner can be computed securely up to {MAX_WINNER_WIDTH}."
            + f"{floor} Use {', '.join(changes)}, or release the histogram."
        )


def _shares_in_a_room(task: Task) -> int:
    """Return the noise shares in the room of one agent: its own, or its part of the talliers' shares, rounded up."""
    return 1 if task.noise_by == "agents" else -(-task.talliers // task.agents)


def _signs(task: Task) -> int:
    """Return the number of sides of zero on which an agent's votes lie: two if ballots are centered, else one."""
    return 1 if task.ballot_radius is None else 2


def vote_clip(task: Task) -> int | None:
    """Return the limit of each count of an agent, in votes; None if none is needed (`Task.vote_clip`)."""
    if task.release != "winner" or task.traits.searched != "questions":
        return None
    fits = (MAX_WINNER_WIDTH // task.agents - _shares_in_a_room(task) * 2 * task.noise_reach) // (
        _signs(task) * task.scale
    )
    return min([fits, *(cap for cap in (task.max_agent_records, task.ballot_radius) if cap is not None)])


def winner_terms(task: Task) -> WinnerTerms | None:
    """Return the terms with which talliers find the winners; None for a histogram (`Task.winner_terms`)."""
    if task.release != "winner":
        return None
    # Imported only here: a task's price needs no numpy.
    from labeler.sharing import WinnerTerms

    most_votes = task.vote_clip or task.k
    return WinnerTerms(
        scale=task.scale,
        lowest=-task.agents * (_signs(task) - 1) * most_votes * task.scale - task.noise_parties * task.noise_reach,
        highest=task.agents * most_votes * task.scale + task.noise_parties * task.noise_reach,
        row_total=None if task.traits.row_total is None else task.traits.row_total(task),
        threshold=None if task.abstain_below is None else task.abstain_below * task.scale,
    )


def _largest_scale(room: int, votes: int, per_share: float, shares: int) -> int:
    """Return the largest scale, at least 1, at which the votes and the noise's reach to both sides fit into a room.

    Args:
        room: grid units.
        votes: of one agent in a cell.
        per_share: standard deviation of a noise share, votes.
        shares: number of noise shares in the room.
    """
    # Start above the exact quotient, and go down the few steps by which rounding may change it.
    scale = math.floor(room / (votes + shares * 2 * NOISE_TAIL_CUT * per_share)) + 1
    while scale > 1 and votes * scale + shares * 2 * noise_reach(per_share * scale) > room:
        scale -= 1
    return scale


def most_votes_in_a_sum(task: Task) -> int:
    """Return the most that one agent adds to one sum, in votes: its count, or the radius of the ballots' ball.

    For methods that count votes.
    """
    most = counted_votes(task).per_cell(task)
    return most if task.ballot_radius is None else min(most, task.ballot_radius)


def most_on_grid(task: Task) -> int:
    """Return the largest magnitude that one agent adds to one sum, in grid units."""
    if isinstance(task.traits.stated, BoundedNumbers):
        return task.traits.stated.longest(task)
    return most_votes_in_a_sum(task) * task.scale


def check_answer(ballots: NDArray[np.int64], task: Task) -> None:
    """Refuse one agent's answer beyond what the task's price was computed for (`labeler.release.check_ballots`)."""
    if isinstance(task.traits.stated, BoundedNumbers):
        task.traits.stated.check(ballots, task)
        return
    most = counted_votes(task).per_cell(task)
    # Entries first: only bounded entries can be summed without wrapping around.
    if ballots.min() < 0 or ballots.max() > most:
        raise PrivacyRefusal(f"a ballot holds a count outside 0 to {most}, which the price of this task does not cover")
    per_query = ballots.sum(axis=1)
    most *= task.votes_of_a_record
    if per_query.max() > most:
        raise PrivacyRefusal(
            f"a ballot casts more than {most} votes at one query, which this task's price does not cover"
        )
    if task.max_agent_records is not None:
        most_in_batch = task.max_agent_records * task.k
        if sum(per_query.tolist()) > most_in_batch:
            raise PrivacyRefusal(
                f"the ballots cast more than {most_in_batch} votes in one batch "
                f"({task.max_agent_records} records with {task.k} votes each); let fewer records vote"
            )


def squared_in_sigma_units(task: Task, event: IntegerSum) -> Fraction:
    """Return the squared sensitivity of a task's event, in the unit of `sigma_votes`."""
    if event.is_sampled:
        # For a sampled sum state the Gaussian of its pair.
        return event.mu_squared * Fraction(task.sigma_votes) ** 2
    squared = Fraction(event.squared_sensitivity)
    if task.traits.counts:
        return squared
    # In units of one record's change, of which sigma_votes is the noise; the event is in grid units.
    return squared * (Fraction(task.sigma_votes) * event.grid_scale) ** 2 / event.variance_grid
