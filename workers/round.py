"""One labelling round among agents and talliers that live in this process.

The steps are those of ARCHITECTURE.md, in the winner's prime field and with its row check where the winner is
released. Agents and talliers meet only through input shares: nothing
here reads a ballot. The charge is posted before anything is opened, so that a crash can waste budget
but never release what was not paid for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from labeler.batch import QueryBatch
from labeler.release import Release, WinnerEngine, open_histogram, open_winner
from labeler.tally import Tallier, agree_on_contributors, round_of
from labeler.task import Task
from workers.agent import Agent
from workers.progress import ProgressCallback, silent


def run_round(
    task: Task,
    batch: QueryBatch,
    agents: Sequence[Agent],
    *,
    post_charge: Callable[[frozenset[str]], object],
    winner_engine: WinnerEngine | None = None,
    progress: ProgressCallback = silent,
) -> Release:
    """Ask every agent, add up at the talliers, open what the task releases.

    Args:
        task: the task.
        batch: the public queries.
        agents: those that take part.
        post_charge: makes the charge for this round and these contributors durable, and refuses a round it knows
            with other contributors; called after the talliers agreed and before they open.
        winner_engine: how the talliers find the winner of each query; None adds the sums up in this process.
        progress: told how many agents have answered.

    Raises:
        QuorumNotReached: too few agents; nothing was opened.
        BudgetExceeded: an agent refused.
        ProtocolViolation: ballots do not sum to what the task allows; nothing was opened, and the charge stands.
    """
    talliers = [Tallier(index, round_of(task, batch)) for index in range(task.talliers)]
    for count, agent in enumerate(agents, start=1):
        for tallier, share in zip(talliers, agent.answer(task, batch), strict=True):
            tallier.receive(share)
        progress("Agents answer", count, len(agents))
    contributors = agree_on_contributors(talliers)
    post_charge(contributors)
    sums = [tallier.aggregate_share(contributors) for tallier in talliers]
    if task.release == "histogram":
        return open_histogram(sums, task)
    return open_winner(sums, task, engine=winner_engine)
