"""One round by hand: agents answer, talliers add up, the release is opened; no coordinator, no machine, no journal."""

from __future__ import annotations

from collections.abc import Sequence

from labeler.batch import QueryBatch
from labeler.release import Release, open_histogram, open_winner
from labeler.tally import InputShare, Round, add_shares, round_of
from labeler.task import Task
from workers.agent.agent import Agent, as_it_is, shares_of


def run_round(task: Task, batch: QueryBatch, agents: Sequence[tuple[Agent, bytes]]) -> Release:
    """Ask every agent, add up at the talliers, open what the task releases.

    Args:
        agents: each with the 32 bytes that its noise and masks of the round are drawn from. Nothing is charged.
    """
    round = round_of(task, batch)
    answers = [
        shares_of(agent.agent_id, round, agent.computed(task, batch, key=key, seal=as_it_is).bodies)
        for agent, key in agents
    ]
    return open_sum(task, round, answers)


def open_sum(task: Task, round: Round, answers: Sequence[Sequence[InputShare]]) -> Release:
    """What the talliers add up of every agent's shares, opened."""
    sums = [
        add_shares(index, round, {shares[index].agent_id: shares[index].share for shares in answers})
        for index in range(task.talliers)
    ]
    return open_histogram(sums, task) if task.release == "histogram" else open_winner(sums, task)
