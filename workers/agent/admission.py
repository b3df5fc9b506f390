"""Who may ask an agent for what: the site's policy and its people, for what is asked and for what is only proposed.

Nothing of a record takes part, so a refusal says nothing of any.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from labeler.errors import AwaitingApproval, PolicyRefusal, ProtocolViolation
from labeler.ledger.agent_memory import AgentMemory, AskedBy
from labeler.messages.bodies import Ask, Proposal
from labeler.system.clock import Clock
from workers.agent.decisions import is_approved, objection
from workers.agent.policy import Policy

_MOST_FOLLOWED = 10_000
"""Tasks of which it is remembered that the journal says what the folder says; this process alone writes it."""


class Admission:
    """What the site's policy and its people say to a task, asked or only proposed.

    Args:
        read_policy: reads the policy as it is now.
        coordinator_key: with which signatures are checked.
    """

    def __init__(
        self,
        home: Path,
        memory: AgentMemory,
        *,
        asked_by: AskedBy,
        read_policy: Callable[[], Policy],
        coordinator_key: str,
        clock: Clock,
    ) -> None:
        self._home = home
        self._memory = memory
        self._asked_by = asked_by
        self._read_policy = read_policy
        self._coordinator_key = coordinator_key
        self._clock = clock
        self._followed: dict[str, bool] = {}

    def check(self, asked: Ask | Proposal, *, is_charged: bool = False) -> None:
        """Refuse what the policy does not allow, what people have refused, and what nobody has approved who has to.

        Args:
            is_charged: its price was taken before. Then people were asked before, and what they decide since is about
                what comes: after a charge the agent answers.

        Raises:
            ProtocolViolation: it has expired.
            PolicyRefusal: see Policy.check; or a person has refused the task.
            SiteStopped: the site answers nothing new for now.
            AwaitingApproval: a person has to approve the task; it waits for one from now on.
        """
        task = asked.task
        if asked.expires_at < self._clock().timestamp():
            raise ProtocolViolation(f"the {'ask' if isinstance(asked, Ask) else 'proposal'} has expired")
        approved = is_approved(self._home, task.digest)
        if self._followed.get(task.digest) != approved:
            if approved != self._memory.is_approved(task.digest):
                # The journal follows the folder, so that whoever lists what waits sees what was decided.
                self._memory.follow(task, self._clock(), is_approved=approved)
            if len(self._followed) >= _MOST_FOLLOWED:
                self._followed.clear()
            self._followed[task.digest] = approved
        no = None if is_charged else objection(self._home, task.digest)
        if isinstance(no, PolicyRefusal):
            self._memory.decide_against(task, self._clock())
        if no is not None:
            raise no
        try:
            policy = self._read_policy()
            policy.check(asked, coordinator_key=self._coordinator_key, is_approved=approved or is_charged)
        except AwaitingApproval:
            self._memory.request(task, self._clock())
            if isinstance(asked, Proposal):
                self._asked_by.note(task.digest, asked.requester, self._clock())
            raise
