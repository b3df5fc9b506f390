"""What an agent says before it is asked: whether it will, from its policy, its approvals and its own ledger.

Nothing of a record takes part: of the shard only what the coordinator knows of it anyway (its classes, its backbone,
the length of its features). A yes is in the agent's journal, with the price set aside, before it is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from feature_store.faults import fault_point
from feature_store.journal.agent_memory import AgentMemory
from feature_store.journal.promises import PromiseStore
from labeler.bodies import Ask
from labeler.errors import AwaitingApproval, JournalBehind, JournalBroken, ProtocolViolation, WrongDigest
from labeler.messages import Header
from labeler.proposals import Declined, Proposal, Willing, Withdrawn
from workers.agent import Agent
from workers.agent_words import PUBLIC_ERRORS, silent, told
from workers.durable_ledger import DurableLedger
from workers.party_home import is_approved
from workers.policy import Policy


class Admission:
    """What the site's policy and its people say to a task, asked or only proposed.

    Args:
        home: of the agent.
        memory: where tasks wait for a person.
        read_policy: reads the policy anew.
        coordinator_key: with which signatures are checked.
        clock: the time now, with a time zone.
    """

    def __init__(
        self,
        home: Path,
        memory: AgentMemory,
        *,
        read_policy: Callable[[], Policy],
        coordinator_key: str,
        clock: Callable[[], datetime],
    ) -> None:
        self._home = home
        self._memory = memory
        self._read_policy = read_policy
        self._coordinator_key = coordinator_key
        self._clock = clock

    def check(self, asked: Ask | Proposal) -> None:
        """Refuse what the policy does not allow, and what nobody has approved where somebody has to.

        Raises:
            ProtocolViolation: it has expired.
            PolicyRefusal: see Policy.check.
            AwaitingApproval: a person has to approve the task; it waits for one from now on.
        """
        task = asked.task
        if asked.expires_at < self._clock().timestamp():
            raise ProtocolViolation(f"the {'ask' if isinstance(asked, Ask) else 'proposal'} has expired")
        approved = is_approved(self._home, task.digest)
        if approved != self._memory.is_approved(task.digest):
            # The journal follows the folder, so that whoever lists what waits sees what was decided.
            self._memory.follow(task, self._clock(), is_approved=approved)
        try:
            self._read_policy().check(asked, coordinator_key=self._coordinator_key, is_approved=approved)
        except AwaitingApproval:
            self._memory.request(task, self._clock())
            raise


class Proposals:
    """See the module.

    Args:
        agent: the agent over its shard as it is now.
        admission: policy and approvals.
        ledger: sets the price aside.
        promises: of the same journal.
        clock: the time now, with a time zone.
    """

    def __init__(
        self,
        agent: Callable[[], Agent],
        admission: Admission,
        ledger: DurableLedger,
        promises: PromiseStore,
        *,
        clock: Callable[[], datetime],
    ) -> None:
        self._agent = agent
        self._admission = admission
        self._ledger = ledger
        self._promises = promises
        self._clock = clock

    def answer(self, header: Header, body: bytes) -> tuple[Willing | Declined, Exception | None]:
        """Yes, no, or not yet; and what was wrong, for the site's own log.

        Raises:
            ProtocolViolation, WrongDigest, InvalidTask: it is no proposal, so there is nobody to answer.
            JournalBroken, JournalBehind: the agent's journal cannot be used.
        """
        proposal = Proposal.decode(body)
        if header.task_digest != proposal.task.digest:
            raise WrongDigest("a proposal names another task than it holds")
        try:
            return Willing(proposal.job_id, self._promise(proposal).timestamp()), None
        except (JournalBroken, JournalBehind):
            raise
        except PUBLIC_ERRORS as error:
            return Declined.of(proposal.job_id, told(error)), error
        except Exception as error:
            # Ours or not: a proposal that cannot be judged must not end the process, and again at every start.
            return Declined.of(proposal.job_id, silent(error)), error

    def withdrawn(self, body: bytes) -> int:
        """Give back what was promised for a job of which nothing more is asked; how many rounds that were."""
        return self._promises.withdraw(Withdrawn.decode(body).job_id, self._clock())

    def release(self) -> int:
        """Give back promises that have ended; how many rounds that were."""
        return self._promises.release(self._clock())

    def _promise(self, proposal: Proposal) -> datetime:
        known = self._promises.said(proposal.digest)
        if known is None:
            self._agent().check_task(proposal.task, proposal.sizes)
            self._admission.check(proposal)
        until = self._ledger.promise(proposal)
        fault_point("agent.willing")
        return until
