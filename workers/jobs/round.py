"""A job's rounds among agents and talliers that live in this process: the coordinator's machine, driven without mail.

The rules of a round are those of `labeler.rounds.coordinator`, the same as in the service: contributors are fixed
before the charge, the charge is durable before a sum is asked for, a release is kept once. What the service stores in
its journal, a `run` keeps in its folder; what the service sends is a call here, and its answer an event. So nothing
waits: everybody answers at once or raises, and what is raised reaches the caller as it is.

Agents and talliers meet only through input shares: nothing here reads a ballot.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from labeler.batch import QueryBatch
from labeler.errors import ProtocolViolation
from labeler.release import Release, WinnerEngine, open_histogram, open_winner
from labeler.rounds.coordinator import step
from labeler.rounds.effects import (
    AskForSums,
    AskForTurn,
    BodiesMade,
    Effect,
    End,
    Event,
    FixContributors,
    HoldingsCame,
    MakeBodies,
    Now,
    OpenAt,
    Opened,
    Party,
    Patience,
    Post,
    PutTogether,
    SendAsks,
    ShareCame,
    Stored,
    StoreRelease,
    SumCame,
    Tick,
    TurnGranted,
)
from labeler.rounds.job_state import JobRun, RoundRun
from labeler.tally import AggregateShare, InputShare, Tallier, round_of
from labeler.task import Task
from workers.agent.agent import Agent
from workers.progress import ProgressCallback, silent

Asking = Callable[[int], Iterable[tuple[str, tuple[InputShare, ...]]]]
"""Asks all agents in a round, by its number: each one's id and its share for each tallier."""

_NOW: Final = Now(0.0, 0.0)
"""No time passes: nobody is waited for, and a job in one process has no deadline."""


def run_rounds(
    task: Task,
    batches: Sequence[QueryBatch],
    agents: Sequence[Agent],
    *,
    post_charge: Callable[[int, frozenset[str]], object],
    keep_release: Callable[[int, Release], object],
    opened: Collection[int] = (),
    ask: Asking | None = None,
    winner_engine: WinnerEngine | None = None,
    progress: ProgressCallback = silent,
) -> None:
    """Ask every agent, add up at the talliers, open what the task releases, batch after batch.

    Args:
        task: the task.
        batches: the public queries; each is a round.
        agents: those that take part.
        post_charge: makes the charge of a round, by its number, and these contributors durable, and refuses a round it
            knows with other contributors; called after the talliers agreed and before they open.
        keep_release: makes the release of a round durable.
        opened: numbers of rounds whose release is kept already; they are not asked again.
        ask: asks all agents in one round, by its number, and keeps what they answer; each keeps its own where absent.
        winner_engine: how the talliers find the winner of each query; None adds the sums up in this process.
        progress: told how many agents have answered.

    Raises:
        QuorumNotReached: too few agents; nothing was opened.
        BudgetExceeded: an agent refused.
        ProtocolViolation: ballots do not sum to what the task allows; nothing was opened, and the charge stands.
    """
    driver = _Driver(task, batches, agents, post_charge, keep_release, winner_engine, progress, ask)
    driver.run(frozenset(opened))


def run_round(
    task: Task,
    batch: QueryBatch,
    agents: Sequence[Agent],
    *,
    post_charge: Callable[[frozenset[str]], object],
    winner_engine: WinnerEngine | None = None,
    progress: ProgressCallback = silent,
) -> Release:
    """One round alone, whose release is kept by the caller; see `run_rounds`."""
    kept: list[Release] = []
    run_rounds(
        task,
        [batch],
        agents,
        post_charge=lambda _, contributors: post_charge(contributors),
        keep_release=lambda _, release: kept.append(release),
        winner_engine=winner_engine,
        progress=progress,
    )
    return kept[0]


@dataclass
class _Driver:
    """See the module.

    Attributes:
        sums: of the round that is being opened, by tallier; the machine sees a name for each in place of its numbers.
    """

    task: Task
    batches: Sequence[QueryBatch]
    agents: Sequence[Agent]
    post_charge: Callable[[int, frozenset[str]], object]
    keep_release: Callable[[int, Release], object]
    winner_engine: WinnerEngine | None
    progress: ProgressCallback
    ask: Asking | None = None
    talliers: dict[int, list[Tallier]] = field(default_factory=dict)
    sums: dict[str, AggregateShare] = field(default_factory=dict)
    events: deque[Event] = field(default_factory=deque)

    def run(self, opened: frozenset[int]) -> None:
        job = self._job(opened)
        self.events.append(Tick())
        while self.events:
            job, effects = step(job, self.events.popleft(), _NOW)
            for effect in effects:
                self._carry_out(job, effect)
        if job.state != "completed":
            raise ProtocolViolation(f"a job in one process stopped at {job.state}; this is a defect of this program")

    def _job(self, opened: frozenset[int]) -> JobRun:
        names = [agent.agent_id for agent in self.agents]
        parties = {name: Party(name, None, name, "") for name in names}
        parties |= {name: Party(name, number, name, "") for number, name in enumerate(self._tallier_names)}
        rounds = tuple(
            RoundRun(
                number,
                batch.first_query,
                len(batch),
                state="opened" if number in opened else "waiting",
                batch_digest=batch.digest,
                round_digest=round_of(self.task, batch).digest,
            )
            for number, batch in enumerate(self.batches)
        )
        return JobRun(
            job_id="in this process",
            task=self.task,
            participants=tuple(names),
            num_queries=sum(map(len, self.batches)),
            expires_at_s=math.inf,
            patience=Patience(0.0, math.inf),
            state="collecting",
            rounds=rounds,
            asked=tuple(names),
            parties=parties,
            is_admitted=True,
            is_simulated=any(agent.is_seeded for agent in self.agents),
        )

    @property
    def _tallier_names(self) -> list[str]:
        return [f"tallier {number}" for number in range(self.task.talliers)]

    def _carry_out(self, job: JobRun, effect: Effect) -> None:
        match effect:
            case MakeBodies(number):
                self.events.append(BodiesMade(number))
            case OpenAt(number, names):
                self.talliers[number] = [
                    Tallier(index, job.round_value(job.rounds[number])) for index in range(len(names))
                ]
            case SendAsks(number):
                self._collect(job, number)
            case FixContributors():
                self.events.append(Stored())
            case Post(number, _, contributors):
                self.post_charge(number, frozenset(contributors))
            case AskForTurn(round_digest):
                self.events.append(TurnGranted(round_digest))
            case AskForSums(number, names):
                self._add_up(job, number, names)
            case PutTogether(number):
                self.events.append(Opened(number, self._open()))
            case StoreRelease(number, release):
                self.keep_release(number, release)
                self.sums.clear()
                del self.talliers[number]
            case End(_, error):
                raise error
            case _:
                pass  # a store that only a durable coordinator needs, or a word to somebody who is not here

    def _collect(self, job: JobRun, number: int) -> None:
        about = self._about(job, number)
        talliers = self.talliers[number]
        answers = self._each_answers(number) if self.ask is None else self.ask(number)
        for agent_id, shares in answers:
            for tallier, share in zip(talliers, shares, strict=True):
                tallier.receive(share)
            self.events.append(ShareCame(**about, agent_id=agent_id, tallier_id=self._tallier_names[0]))
        for name, tallier in zip(self._tallier_names, talliers, strict=True):
            held = {agent: sharing.hex() for agent, sharing in tallier.holdings.items()}
            self.events.append(HoldingsCame(**about, tallier_id=name, holdings=held))

    def _each_answers(self, number: int) -> Iterator[tuple[str, tuple[InputShare, ...]]]:
        for count, agent in enumerate(self.agents, start=1):
            yield agent.agent_id, agent.answer(self.task, self.batches[number])
            self.progress("Agents answer", count, len(self.agents))

    def _add_up(self, job: JobRun, number: int, names: Sequence[str]) -> None:
        contributors = job.rounds[number].contributors
        for index, name in enumerate(self._tallier_names):
            if name in names:
                self.sums[name] = self.talliers[number][index].aggregate_share(contributors)
                self.events.append(
                    SumCame(
                        **self._about(job, number),
                        tallier_id=name,
                        kind=self.task.release,
                        stated=(job.rounds[number].round_digest, index),
                        data=name.encode(),
                    )
                )

    def _open(self) -> Release:
        sums = [self.sums[name] for name in self._tallier_names]
        if self.task.release == "histogram":
            return open_histogram(sums, self.task)
        return open_winner(sums, self.task, engine=self.winner_engine)

    def _about(self, job: JobRun, number: int) -> Mapping[str, Any]:
        return {"round_digest": job.rounds[number].round_digest, "task_digest": self.task.digest}
