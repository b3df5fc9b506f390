"""Whether more of one step is about to come: then messages that are there may wait for it, and one turn takes them all.

A job asks all its agents at once, and then all its talliers, and goes on when the last of them has answered. Nothing
follows from the answers before it but that they are kept, so taking each in a turn of its own brings nobody forward and
costs a commit, a request's answer and, of shares, a turn of every tallier. Who is expected is read off the job alone,
which holds public things only. It is a hint: whoever drives a job bounds how long it waits, and a job whose party never
answers goes on as before, later by that bound.
"""

from __future__ import annotations

from collections.abc import Sequence

from labeler.rounds.effects import AgentDone, Answered, HoldingsCame, MessageEvent, ShareCame, SumCame
from labeler.rounds.job_state import JobRun, RoundRun, stand


def expects_more(job: JobRun, events: Sequence[MessageEvent], *, wall_s: float) -> bool:
    """Whether somebody else is expected to answer what these events answer, before the job can go on.

    Args:
        job: as the last step left it.
        events: messages about it that are there and not taken yet.
        wall_s: unix time.

    Returns:
        False wherever one of them may bring the job forward, is of another kind, or is late.
    """
    if job.state == "queued":
        said = {event.agent_id for event in events if isinstance(event, Answered)}
        if any(not isinstance(event, Answered) for event in events):
            return False
        return bool(set(stand(job, wall_s=wall_s).silent) - said)
    if job.state not in ("collecting", "tallying"):
        return False
    by_round: dict[str, list[MessageEvent]] = {}
    for event in events:
        if isinstance(event, Answered):
            return False  # of a proposal that is settled
        by_round.setdefault(event.round_digest, []).append(event)
    found = [(job.round_with(digest), those) for digest, those in by_round.items()]
    return all(one is not None and _of_round(job, one, those) for one, those in found)


def _of_round(job: JobRun, one: RoundRun, events: Sequence[MessageEvent]) -> bool:
    talliers = tuple(party.party_id for party in job.parties.values() if party.tallier is not None)
    if one.state == "posted":
        if any(not isinstance(event, SumCame) for event in events):
            return False
        return bool(set(talliers) - one.sums.keys() - {e.tallier_id for e in events if isinstance(e, SumCame)})
    if one.state != "asked" or any(not isinstance(event, ShareCame | AgentDone | HoldingsCame) for event in events):
        return False
    answered = one.done | {event.agent_id for event in events if isinstance(event, AgentDone)}
    if {agent for agent in one.participants if agent in job.parties} - answered - one.final:
        return True
    if any(not isinstance(event, HoldingsCame) for event in events):
        return False  # the last shares: they leave for the talliers now
    holdings = dict(one.holdings) | {e.tallier_id: e.holdings for e in events if isinstance(e, HoldingsCame)}
    return any(not answered <= holdings.get(tallier, {}).keys() for tallier in talliers)
