"""One round by hand: agents answer, talliers add up, the release is opened; no coordinator, no machine, no journal.

Benchmarks of single rounds use it, and tests compare the machines with it: it shares no rule with them but those of
the tally itself (labeler.tally).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from labeler.batch import QueryBatch
from labeler.release import Release, WinnerEngine, open_histogram, open_winner
from labeler.tally import round_of
from labeler.task import Task
from tests.answering import AnsweringAgent
from tests.plain_tallier import Tallier, agree_on_contributors


def run_round(
    task: Task,
    batch: QueryBatch,
    agents: Sequence[AnsweringAgent],
    *,
    post_charge: Callable[[frozenset[str]], object] = lambda _: None,
    winner_engine: WinnerEngine | None = None,
    tallier_keys: Sequence[bytes] | None = None,
) -> Release:
    """Ask every agent, add up at the talliers, open what the task releases.

    Args:
        task: the task.
        batch: the public queries.
        agents: those that take part; each keeps what it answers.
        post_charge: told the contributors, after the talliers agreed and before they open.
        winner_engine: how the talliers find the winner of each query; None adds the sums up in this process.
        tallier_keys: what each tallier draws its noise from, where talliers add it; drawn where absent.

    Raises:
        QuorumNotReached: too few agents; nothing was opened.
        BudgetExceeded: an agent refused.
        ProtocolViolation: ballots do not sum to what the task allows; nothing was opened, and the charge stands.
    """
    round = round_of(task, batch)
    keys: Sequence[bytes | None] = tallier_keys or [None] * task.talliers
    talliers = [Tallier(index, round, noise_key=keys[index]) for index in range(task.talliers)]
    for agent in agents:
        for tallier, share in zip(talliers, agent.answer(task, batch), strict=True):
            tallier.receive(share)
    contributors = agree_on_contributors(talliers)
    post_charge(contributors)
    sums = [tallier.aggregate_share(contributors) for tallier in talliers]
    if task.release == "histogram":
        return open_histogram(sums, task)
    return open_winner(sums, task, engine=winner_engine)
