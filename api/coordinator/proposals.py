"""Who takes part in a job, settled before anybody is charged.

    queued --propose--> every agent of the task --willing | declined | later-->  settled: whom the job asks
                                                                    \\---------> quorum lost: refused, at no charge

A proposal names the task, the sizes of the rounds and the deadline; the questions are not needed, so it goes out while
they are embedded. Agents say what follows from their policy, approvals and own ledger. It is settled once everybody has
answered, or once a quorum is willing and the patience has passed; whom the job asks is then fixed for ever.

An agent whose program does not know proposals (before labeler/0.2) would not be able to read its mail any more, so it
is sent none and counts as willing, as it always did: its refusal comes at the ask, and what was asked stays charged.
One that was never heard of is waited for.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from api.coordinator.facts import facts_of
from api.coordinator.pace import Pace
from api.coordinator.post_office import PostOffice
from api.coordinator.views import printable
from feature_store.faults import fault_point
from feature_store.journal.jobs import FINISHED, JobRecord, JobStore, RoundRecord
from feature_store.journal.parties import PartyRecord
from feature_store.journal.tasks import TaskRecord
from feature_store.journal.willingness import AgentAnswer, Answers
from feature_store.mailbox import Mailbox
from labeler.errors import QuorumNotReached
from labeler.messages import Kind
from labeler.proposals import Declined, Proposal, Willing, Withdrawn

KNOWS_PROPOSALS = (0, 2)
"""The version of an agent's program from which on it takes proposals."""

_VERSION = re.compile(r"labeler/(\d{1,6})\.(\d{1,6})")


@dataclass
class Standing:
    """How the agents of a task stand to a job now, each in exactly one list.

    Attributes:
        willing: they have said yes, or count as having said so.
        declined: they will not, or cannot: their keys were revoked.
        silent: they have not said anything yet, or their yes has ended.
        later: they have said: not yet.
    """

    willing: list[str] = field(default_factory=list)
    declined: list[str] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)
    later: list[str] = field(default_factory=list)

    @property
    def open(self) -> list[str]:
        """Who may still say yes."""
        return [*self.silent, *self.later]


class Proposals:
    """See the module. One per conductor; answers are taken by other threads.

    Args:
        jobs: of the coordinator.
        post_office: signs, and knows the parties.
        mailbox: says how busy they are.
        patience_s: how long a job that has its quorum, or cannot reach it, waits for the agents still missing.
        ask_again_s: after how long somebody who has not answered is asked again.
        clock: the time now, with its zone.
        now: seconds that never run backwards.
    """

    def __init__(
        self,
        *,
        jobs: JobStore,
        post_office: PostOffice,
        mailbox: Mailbox,
        patience_s: float,
        ask_again_s: float,
        clock: Callable[[], datetime],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._jobs = jobs
        self._post_office = post_office
        self._patience_s = patience_s
        self._pace = Pace(mailbox, ask_again_s=ask_again_s, now=now)
        self._clock = clock
        self._now = now
        self._decided_since: dict[str, float] = {}

    def pursue(self, job: JobRecord, rounds: Sequence[RoundRecord], task: TaskRecord) -> tuple[str, ...] | None:
        """Ask who has not answered whether they will, and settle whom the job asks.

        Returns:
            The agents, in the task's order; None while it is open.

        Raises:
            QuorumNotReached: too many have declined; nobody was asked, and nothing is to be charged.
            Unavailable: a tallier is not enrolled, or the mailbox cannot be reached.
        """
        fixed = self._jobs.willingness.asked(job.job_id)
        if fixed is not None:
            return fixed
        parties = self._post_office.agents(task.participants)
        answers = self._jobs.willingness.answers(job.job_id)
        standing = stand(task, answers, parties, now=self._clock())
        self._propose(job, rounds, task, [one for one in standing.open if takes_proposals(parties[one])])
        quorum = task.task.quorum
        is_lost = len(standing.willing) + len(standing.open) < quorum
        if not is_lost and len(standing.willing) < quorum:
            self._decided_since.pop(job.job_id, None)
            return None
        since = self._decided_since.setdefault(job.job_id, self._now())
        if standing.open and self._now() - since < self._patience_s:
            # Lost or won already; those who are about to answer are still heard, so that all reasons are there.
            return None
        if is_lost:
            raise QuorumNotReached(
                f"{len(standing.declined)} of {len(task.participants)} agents will not take part, so the quorum of "
                f"{quorum} cannot be reached; nobody was asked, and nothing is charged. {_why(standing, answers)}"
            )
        return tuple(standing.willing)

    def take(self, job: JobRecord, task: TaskRecord, agent_id: str, said: Willing | Declined) -> AgentAnswer:
        """What an agent's message amounts to; one that comes too late is told that nothing will be asked of it."""
        is_late = job.state in FINISHED
        asked = self._jobs.willingness.asked(job.job_id)
        if isinstance(said, Willing) and (is_late or (asked is not None and agent_id not in asked)):
            self._withdraw_from(agent_id, job, task)
        return answer_of(said)

    def withdraw(self, job: JobRecord, rounds: Sequence[RoundRecord], task: TaskRecord) -> None:
        """Tell agents that have said yes to a job that ended that its other rounds will not be asked.

        It only frees their budgets earlier: what nobody asks for lapses at the deadline by itself.

        Raises:
            Unavailable: the mailbox cannot be reached now.
        """
        if all(one.state != "waiting" for one in rounds):
            return
        for agent_id, said in self._jobs.willingness.answers(job.job_id).items():
            if said.answer == "willing":
                self._withdraw_from(agent_id, job, task)

    def forget(self, job: JobRecord) -> None:
        """The job is over."""
        self._pace.forget([job.job_id])
        self._decided_since.pop(job.job_id, None)

    def _propose(self, job: JobRecord, rounds: Sequence[RoundRecord], task: TaskRecord, agents: Sequence[str]) -> None:
        due = [one for one in agents if self._pace.is_due(("propose", job.job_id, one), through=[one])]
        if not due:
            return
        body = Proposal(
            job_id=job.job_id,
            task=task.task,
            sizes=tuple(one.num_queries for one in rounds),
            talliers=self._post_office.tallier_keys(task.task.talliers),
            expires_at=job.expires_at.timestamp(),
        ).encode()
        for agent in due:
            self._post_office.send("proposal", agent, None, task, body)
        fault_point("coordinator.proposed")

    def _withdraw_from(self, agent_id: str, job: JobRecord, task: TaskRecord) -> None:
        if agent_id in self._post_office.agents([agent_id]):
            self._post_office.send("withdrawn", agent_id, None, task, Withdrawn(job.job_id).encode())


def stand(task: TaskRecord, answers: Answers, parties: Mapping[str, PartyRecord], *, now: datetime) -> Standing:
    """How the agents of a task stand to a job.

    Args:
        task: whose agents.
        answers: what they said last.
        parties: those of them that are enrolled and not revoked.
        now: a yes that ended before is none.
    """
    found = Standing()
    for agent in task.participants:
        said = answers.get(agent)
        if agent not in parties or (said is not None and said.answer == "declined"):
            found.declined.append(agent)
        elif is_presumed(parties[agent]) or (said is not None and said.until is not None and said.until >= now):
            found.willing.append(agent)
        elif said is not None and said.answer == "later":
            found.later.append(agent)
        else:
            found.silent.append(agent)
    return found


def _why(standing: Standing, answers: Answers) -> str:
    """The first reason in its own words, and where the others stand."""
    reasons = {one: answers[one].sentence for one in standing.declined if one in answers and answers[one].sentence}
    if not reasons:
        return "Their keys were revoked"
    first, more = next(iter(reasons)), len(reasons) - 1
    also = f" (and {more} more, beside the job)" if more else ""
    return f"{first} says: {printable(reasons[first])}{also}"


def takes_proposals(party: PartyRecord) -> bool:
    """Whether an agent's program is known to read proposals."""
    version = _VERSION.match(facts_of(party.facts).version)
    return version is not None and (int(version[1]), int(version[2])) >= KNOWS_PROPOSALS


def is_presumed(party: PartyRecord) -> bool:
    """Whether an agent counts as willing unasked: it was heard of, and its program does not read proposals."""
    return party.last_contact is not None and not takes_proposals(party)


def answer_of(said: Willing | Declined) -> AgentAnswer:
    """What is kept of a message."""
    if isinstance(said, Willing):
        return AgentAnswer("willing", until=datetime.fromtimestamp(said.until, UTC))
    refusal = said.refusal
    return AgentAnswer("declined" if refusal.is_final else "later", refusal.reason, refusal.sentence)


def read_answer(kind: Kind, body: bytes) -> Willing | Declined:
    """The body of a "willing" or "declined".

    Raises:
        ProtocolViolation: it is none.
    """
    return Willing.decode(body) if kind == "willing" else Declined.decode(body)


__all__ = ["Proposals", "Standing", "answer_of", "read_answer", "stand", "takes_proposals"]
