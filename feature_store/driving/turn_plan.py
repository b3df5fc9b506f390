"""What one turn of the coordinator's driver, or one piece of it, has come to; kept only once it is durable."""

from __future__ import annotations

from dataclasses import dataclass, field

from feature_store.driving.errands import Errand
from feature_store.driving.intake import Delivery, Incoming
from feature_store.journal.chain import Head
from labeler.errors import LabelerError
from labeler.rounds import winner_line
from labeler.rounds.effects import Failed, Now, Send, Store
from labeler.rounds.job_state import JobRun
from labeler.rounds.lanes import Lanes


@dataclass
class Plan:
    """See the module.

    Attributes:
        now: when the turn began.
        runs: jobs as they are after their steps.
        stores, sends, relays: what is to be durable, and what leaves after that.
        taken, relayed: the highest number of each sender's messages to the coordinator, and to each tallier.
        heads: how far the journals are that agents' answers came from.
        looks: until when nothing is to be done for a job by itself.
        retries: jobs whose step met a defect or has to wait; nothing of that step is here.
        broken: jobs whose messages could not be written: why, and of which round.
        line, lanes: whose turn it is to have winners found, and to be begun.
        follow: rounds whose turn has come in this turn.
        answers: what is told to whom, once it is durable.
        errands, refused: what others have written, and why some of it was not.
    """

    now: Now
    runs: dict[str, JobRun] = field(default_factory=dict)
    stores: dict[str, list[Store]] = field(default_factory=dict)
    sends: list[tuple[str, Send]] = field(default_factory=list)
    relays: list[Incoming] = field(default_factory=list)
    taken: dict[tuple[str, str], int] = field(default_factory=dict)
    relayed: dict[tuple[str, str], int] = field(default_factory=dict)
    heads: dict[str, Head] = field(default_factory=dict)
    looks: dict[str, float] = field(default_factory=dict)
    retries: dict[str, Exception] = field(default_factory=dict)
    broken: dict[str, Failed] = field(default_factory=dict)
    line: winner_line.Line = field(default_factory=winner_line.Line)
    lanes: Lanes = field(default_factory=Lanes)
    follow: list[str] = field(default_factory=list)
    answers: list[tuple[Delivery, int | LabelerError]] = field(default_factory=list)
    errands: list[Errand] = field(default_factory=list)
    refused: dict[Errand, LabelerError] = field(default_factory=dict)

    @property
    def is_stored(self) -> bool:
        """Whether anything is to be made durable."""
        return bool(self.stores or self.taken or self.errands or self.heads)

    def draft(self, job_id: str, run: JobRun) -> Plan:
        """A plan for one step of one job, of which nothing is kept where it is not joined."""
        return Plan(self.now, runs={job_id: run}, line=self.line, lanes=self.lanes)

    def join(self, draft: Plan) -> None:
        """What a step has come to becomes part of its turn."""
        self.runs |= draft.runs
        for job_id, stores in draft.stores.items():
            self.stores.setdefault(job_id, []).extend(stores)
        self.sends += draft.sends
        self.relays += draft.relays
        self.looks |= draft.looks
        self.line, self.lanes = draft.line, draft.lanes
        self.follow += draft.follow
