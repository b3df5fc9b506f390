"""One job as the coordinator's machine sees it: what the journal keeps of it, and a little that may be forgotten.

Everything under "kept" is in the journal and read from there after a restart. Everything under "memory" may be lost:
then everybody is asked once more, and whoever is asked twice answers twice the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from labeler.errors import BadData
from labeler.linear_model import model_before
from labeler.release import Release
from labeler.rounds.effects import JobState, Party, Patience, RoundState, Said
from labeler.tally import Round, round_with
from labeler.task import Task


@dataclass(frozen=True)
class RoundRun:
    """One round of a job.

    Attributes:
        number, first_query, num_queries: its place in the job and in the task.
        state: waiting > asked > agreed > posted > opened.
        batch_digest, round_digest: empty until the questions are prepared; of a step of training also until the steps
            before it have opened the model that it is asked with.
        participants: agent id -> the key its shares are signed with; empty until fixed, then for ever the same.
        holdings: tallier id -> agent id -> sharing id, as last reported.
        refusals: party id -> its reason.
        final: those of them that will not answer when asked again.
        contributors: who is summed; empty until fixed, then for ever the same.
        has_shares: a share of it was passed on, or was about to be.
        sums: tallier id -> its sum or winners; secret, and gone once it is opened.
        opened: what it has released, where later rounds are asked about it; None elsewhere.
        done: memory: agents that have said that they sent all shares of it.
        is_made: memory: what it sends has been made and fits.
        decided_at_s: memory: since when its quorum is reached, or lost.
        gone_at_s: memory: agent id -> since when it is known to have other keys.
    """

    number: int
    first_query: int
    num_queries: int
    state: RoundState = "waiting"
    batch_digest: str = ""
    round_digest: str = ""
    participants: Mapping[str, str] = field(default_factory=dict)
    holdings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    refusals: Mapping[str, str] = field(default_factory=dict)
    final: frozenset[str] = frozenset()
    contributors: tuple[str, ...] = ()
    has_shares: bool = False
    sums: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    opened: Release | None = None
    done: frozenset[str] = frozenset()
    is_made: bool = False
    decided_at_s: float | None = None
    gone_at_s: Mapping[str, float] = field(default_factory=dict)

    def held_by_all(self, tallier_ids: tuple[str, ...]) -> frozenset[str]:
        """Agents of which every tallier holds a share of the same split; nobody while a tallier has not reported."""
        reports = [self.holdings.get(tallier_id) for tallier_id in tallier_ids]
        if not reports or any(report is None for report in reports):
            return frozenset()
        common = set((reports[0] or {}).items())
        for report in reports[1:]:
            common &= set((report or {}).items())
        return frozenset(agent for agent, _ in common)


@dataclass(frozen=True)
class JobRun:
    """A job; see the module.

    Attributes:
        job_id, task, num_queries, expires_at_s: as submitted; the deadline in unix time.
        participants: the agents of its task, in the task's order.
        rounds: its rounds in order; each is asked once the one before is charged, and charged once that one is opened.
        answers: agent id -> what it said before it was asked.
        asked: whom it asks, fixed once for ever; None while that is open, and in jobs of versions that asked all.
        parties: who is enrolled now, by id.
        requester: who submitted it, for people at the sites; empty where that is nobody's name.
        is_simulated: noise from a known seed is expected, and every release says so; never in a service.
        is_admitted: memory: it has had its turn among the jobs of its requester.
        looks_ahead: memory: the next round is asked while one is summed.
        is_storing: memory: a step was taken that has to be durable before the next.
        decided_at_s: memory: since when it is settled whom it asks, or that it asks nobody.
        asked_at_s: memory: (whom, of what) -> when it was last asked.
        mail: memory: how much mail waited with whom at the last tick.
    """

    job_id: str
    task: Task
    participants: tuple[str, ...]
    num_queries: int
    expires_at_s: float
    patience: Patience
    state: JobState
    rounds: tuple[RoundRun, ...]
    answers: Mapping[str, Said] = field(default_factory=dict)
    asked: tuple[str, ...] | None = None
    parties: Mapping[str, Party] = field(default_factory=dict)
    requester: str = ""
    is_simulated: bool = False
    is_admitted: bool = False
    looks_ahead: bool = True
    is_storing: bool = False
    decided_at_s: float | None = None
    asked_at_s: Mapping[tuple[str, str], float] = field(default_factory=dict)
    mail: Mapping[str, int] = field(default_factory=dict)

    @property
    def current(self) -> RoundRun | None:
        """The first round that is not opened."""
        return next((one for one in self.rounds if one.state != "opened"), None)

    @property
    def untied(self) -> tuple[int, ...]:
        """Rounds that are to be tied to their questions now.

        All of them at once. Of steps of training the one that comes next: its model is part of what it asks, and known
        once those before it are opened.
        """
        current = () if self.current is None else (self.current,)
        wanted = current if self.task.traits.is_sampled else self.rounds
        return tuple(one.number for one in wanted if not one.round_digest)

    @property
    def agents(self) -> tuple[str, ...]:
        """Whom it asks: those that were willing; in a job of an earlier version every agent of its task."""
        return self.asked or self.participants

    def round_with(self, round_digest: str) -> RoundRun | None:
        """The round of a digest."""
        return next((one for one in self.rounds if one.round_digest == round_digest and round_digest), None)

    def model_asked(self, one: RoundRun) -> NDArray[np.float64] | None:
        """The public model that a step of training begins from, of what the steps before it have opened; else None.

        Raises:
            BadData: one of them is not opened, or not a step.
        """
        if not self.task.traits.is_sampled:
            return None
        before = [other.opened for other in self.rounds[: one.number]]
        opened = [release for release in before if release is not None]
        if len(opened) < len(before):
            raise BadData("a step of training is asked before those that it follows from are opened")
        return model_before(self.task, opened)

    def round_value(self, one: RoundRun) -> Round:
        """A round as messages name it."""
        return round_with(self.task, one.batch_digest, one.num_queries)


@dataclass
class Standing:
    """How the agents of a task stand to a job now, each in exactly one list.

    Attributes:
        willing: they have said yes.
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


def stand(job: JobRun, *, wall_s: float) -> Standing:
    """How the agents of a job's task stand to it; a yes that ended before `wall_s` is none."""
    found = Standing()
    for agent in job.participants:
        said, party = job.answers.get(agent), job.parties.get(agent)
        if party is None or (said is not None and said.answer == "declined"):
            found.declined.append(agent)
        elif said is not None and said.until_s is not None and said.until_s >= wall_s:
            found.willing.append(agent)
        elif said is not None and said.answer == "later":
            found.later.append(agent)
        else:
            found.silent.append(agent)
    return found
