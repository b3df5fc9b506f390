"""One round by hand: agents answer, talliers add up, the release is opened; no coordinator, no machine, no journal.

Tests compare the machines and the benches with it: it shares no rule with them but those of the tally itself
(labeler.tally). The rules of a tallier are those of its machine (labeler.rounds.tallier).
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from labeler.noise import noise_source
from labeler.randomness import KEY_BYTES
from labeler.release import Release, open_histogram, open_winner
from labeler.tally import AggregateShare, InputShare, QueryBatch, Round, add_shares, misfit_of, round_of
from labeler.task import Task
from tests.answering import AnsweringAgent


def run_round(task: Task, batch: QueryBatch, agents: Sequence[AnsweringAgent]) -> Release:
    """Ask every agent, add up at the talliers, open what the task releases.

    Raises:
        BudgetExceeded: an agent refused.
        ProtocolViolation: ballots do not sum to what the task allows; nothing was opened.
    """
    sums = tallied(round_of(task, batch), [agent.answer(task, batch) for agent in agents])
    return open_histogram(sums, task) if task.release == "histogram" else open_winner(sums, task)


def tallied(
    round: Round, sent: Sequence[Sequence[InputShare]], *, keys: Sequence[bytes | None] = (None, None, None)
) -> list[AggregateShare]:
    """Add up, at every tallier, the shares that each agent sent.

    Args:
        round: what is summed.
        sent: of each agent one share per tallier.
        keys: what talliers draw their noise from, where they add it; drawn where absent.
    """
    sums = []
    for tallier in range(len(sent[0])):
        held = {shares[tallier].agent_id: shares[tallier].share for shares in sent}
        assert not any(misfit_of(share, round) for share in held.values())
        noise = None
        if round.tallier_sigma_grid is not None:
            key = keys[tallier] or secrets.token_bytes(KEY_BYTES)
            noise = noise_source(key, round.digest, frozenset(held), is_seeded=False)
        sums.append(add_shares(tallier, round, held, noise=noise))
    return sums
