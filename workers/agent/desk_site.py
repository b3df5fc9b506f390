"""What the desk's page shows and decides, for one home: the functions of the shell, for tasks that were asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from labeler.errors import NotFound
from workers.agent import decisions
from workers.agent.history_csv import as_csv
from workers.agent.policy import read_policy
from workers.agent.site import (
    answered_jobs,
    answered_rounds,
    decided_tasks,
    ledger_head,
    overview,
    waiting_tasks,
)
from workers.party.home import POLICY_FILE, read_agent_config


class DeskSite:
    """See the module. What is shown is read anew each time, since the agent and the shell write meanwhile; what was
    answered, only where the ledger has moved.

    Raises:
        InvalidSetting: it is no agent's home.
    """

    def __init__(self, home: Path) -> None:
        read_agent_config(home)
        self._home = home
        self._seen: tuple[tuple[int, str, str], list[dict[str, Any]]] | None = None

    def overview(self) -> dict[str, Any]:
        """See workers.agent.site."""
        return overview(self._home, jobs=self._jobs)

    def rounds(self) -> list[dict[str, Any]]:
        """Every round that was ever answered."""
        return answered_rounds(self._home)

    def rounds_csv(self) -> str:
        """The same as CSV."""
        return as_csv(self.rounds())

    def approve(self, digest: str) -> None:
        """Let the agent answer a task.

        Raises:
            NotFound: nobody asked for it; a person approves what was shown.
        """
        self._check_asked(digest)
        decisions.approve(self._home, digest)

    def refuse(self, digest: str, reason: str) -> None:
        """Refuse a task, also one that was approved; what was charged is still answered.

        Raises:
            NotFound: nobody asked for it.
            InvalidSetting: no reason, or one that is too long.
        """
        self._check_asked(digest)
        decisions.refuse(self._home, digest, reason)

    def stop(self, reason: str) -> None:
        """Answer nothing new."""
        decisions.stop(self._home, reason)

    def resume(self) -> None:
        """Answer again."""
        decisions.resume(self._home)

    def _jobs(self) -> list[dict[str, Any]]:
        """What was answered; read again where the ledger has moved, or the policy, which says at which delta."""
        delta = read_policy(self._home / POLICY_FILE).budget.delta
        head = (*ledger_head(self._home), str(delta))
        if self._seen is None or self._seen[0] != head:
            self._seen = (head, answered_jobs(answered_rounds(self._home)))
        return self._seen[1]

    def _check_asked(self, digest: str) -> None:
        asked = (*waiting_tasks(self._home), *decided_tasks(self._home))
        if digest not in {one["task_id"] for one in asked}:
            raise NotFound("nobody asked for this task, or it was withdrawn; look at the page again")
