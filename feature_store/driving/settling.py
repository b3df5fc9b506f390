"""Word that rounds are settled waits a moment: it comes with the next question, or by itself a little later.

At the end of a job every agent would be woken to forget what it no longer needs, at the moment at which the requester
fetches the labels; and again a moment later, for the next job. Nobody waits for this word: an agent that never has it
forgets an hour after the deadline. What is stored and charged is the same, and so is its order.
"""

from __future__ import annotations

from feature_store.driving.turn_plan import Plan
from labeler.rounds.effects import Send, SendAsks, SendProposals, SendWithdrawn, TellSettled
from labeler.rounds.job_state import JobRun

_TO_AGENTS = (SendAsks, SendProposals, SendWithdrawn)


class Settling:
    """What is to be said of settled rounds; used by one thread.

    Args:
        after_s: how long it waits at most; 0 for not at all.
    """

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._held: list[tuple[JobRun, TellSettled]] = []
        self.due_s: float | None = None
        """When it leaves by itself; None where there is nothing."""

    def leaving(self, plan: Plan, *, is_last: bool = False) -> list[tuple[JobRun, TellSettled]]:
        """What leaves with a turn; what the turn itself says of this kind is taken out of it, and waits.

        Args:
            is_last: nothing more leaves after this.
        """
        rest: list[tuple[str, Send]] = []
        for job_id, send in plan.sends:
            if isinstance(send, TellSettled):
                self._held.append((plan.runs[job_id], send))
            else:
                rest.append((job_id, send))
        plan.sends = rest
        if self._held and self.due_s is None:
            self.due_s = plan.now.steady_s + self._after_s
        if self.due_s is None:
            return []
        if not is_last and plan.now.steady_s < self.due_s and not any(isinstance(one, _TO_AGENTS) for _, one in rest):
            return []
        found, self._held, self.due_s = self._held, [], None
        return found
