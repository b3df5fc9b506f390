"""The parties of a run, in the process of its coordinator: what its machine sends is handed over as it is.

To the coordinator's driver this is who writes its messages (`Writer`) and who is enrolled (`PartyBook`). A send comes
once its turn is durable, and waits for `answer`; what parties say to it are events of the coordinator's machine.
Nothing is written, sealed or signed, because nothing leaves the process. Everybody answers at once or raises, so what
is raised reaches the caller as it is.

    agents      labeler.rounds.agent: charged, then computed, then stored, all agents of a round together
                (workers.run.folder), then handed to the talliers (workers.run.talliers)

Agents and talliers meet only through input shares: nothing here reads a ballot.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Final

from labeler.driver.mail import Letter
from labeler.errors import BadData, ProtocolViolation
from labeler.ledger.chain import Head
from labeler.ledger.database import Connection
from labeler.ledger.parties import PartyRecord
from labeler.messages.bodies import Ask, TallierKey
from labeler.release import WinnerEngine
from labeler.rounds import agent as machine
from labeler.rounds.agent import AgentRound, RoundEvent
from labeler.rounds.effects import AskForSums, Event, JobRun, OpenAt, RoundRun, Send, SendAsks, TellSettled
from labeler.system.clock import now_utc
from labeler.tally import QueryBatch
from labeler.task import Task
from workers.agent.agent import Agent, as_it_is, shares_of
from workers.progress import ProgressCallback
from workers.run.folder import Bodies, RoundStore
from workers.run.talliers import RunTalliers

_NOW: Final = 0.0
"""No time passes: nothing expires in a process that waits for nobody."""


class RunParties:
    """See the module.

    Args:
        batches: the questions of each round, by its number.
        kept: the keys and answers of their rounds.
        is_seeded: those keys came from a known seed.
        winner_engine: how the talliers find the winner of each query; None puts their sums together in this process.
        progress: told how many agents have answered.
    """

    version: Final = 1

    def __init__(
        self,
        task: Task,
        batches: Sequence[QueryBatch],
        agents: Sequence[Agent],
        kept: RoundStore,
        *,
        is_seeded: bool,
        winner_engine: WinnerEngine | None,
        progress: ProgressCallback,
    ) -> None:
        self._task = task
        self._batches = batches
        self._agents = {agent.agent_id: agent for agent in agents}
        self._kept = kept
        self._progress = progress
        names = tallier_names(task)
        self._keys = tuple(TallierKey(one, _instead_of_key("seal", one), _instead_of_key("sign", one)) for one in names)
        self._talliers = RunTalliers(task, names, winner_engine, noise_key=kept.tallier_key, is_seeded=is_seeded)
        self._sent: list[tuple[JobRun, Send, Head]] = []
        now = now_utc()
        self._enrolled = tuple(
            PartyRecord(name, "agent", None, key, _instead_of_key("seal", name), "active", now, now)
            for name, key in self.agent_keys.items()
        ) + tuple(
            PartyRecord(key.tallier_id, "tallier", number, key.verify_key, key.seal_key, "active", now, now)
            for number, key in enumerate(self._keys)
        )

    # Who is enrolled.

    @property
    def agent_keys(self) -> dict[str, str]:
        """What a round notes of each agent in place of the key of its signatures."""
        return {agent: _instead_of_key("sign", agent) for agent in self._agents}

    def all(self) -> Sequence[PartyRecord]:
        """See PartyBook."""
        return self._enrolled

    def answered(self, heads: Mapping[str, Head], *, connection: Connection) -> None:
        """See PartyBook: an agent of this process has no journal."""

    # Who writes the coordinator's messages.

    def make(self, job: JobRun, number: int) -> None:
        """See Writer: there is nothing to make."""

    def letters(self, job: JobRun, send: Send, head: Head) -> list[Letter]:
        """See Writer: no letter, but the thing itself."""
        self._sent.append((job, send, head))
        return []

    def forget(self, round_digests: list[str]) -> None:
        """See Writer: there is nothing to forget."""

    def answer(self) -> list[Event]:
        """Do what was sent since the last call.

        Returns:
            What the coordinator is told.

        Raises:
            LabelerError: a party refuses.
        """
        events: list[Event] = []
        asked: dict[int, JobRun] = {}
        sent, self._sent = self._sent, []
        over = {number for _, send, _ in sent if isinstance(send, TellSettled) for number in send.numbers}
        is_opening = any(isinstance(send, AskForSums) for _, send, _ in sent)
        for job, send, head in sent:
            match send:
                case OpenAt(number) | SendAsks(number) if number in over:
                    pass  # asked and settled at once: nobody misses anything
                case OpenAt(number):
                    self._open(job, number)
                case SendAsks() if is_opening:
                    self._sent.append((job, send, head))  # what is paid for is opened first
                case SendAsks(number):
                    self._open(job, number)
                    if not self._agents.keys() <= self._talliers.holds(number):
                        self._hand_over(job, number)
                    asked[number] = job
                case AskForSums(number, names):
                    self._open(job, number)
                    events += self._talliers.sums(job, number, names, head)
                case TellSettled(numbers):
                    self._kept.erase([job.rounds[number].round_digest for number in numbers])
                    for number in numbers:
                        self._talliers.forget(number)
                case _:
                    pass  # a word to somebody who is not here
        for number, job in asked.items():
            events += self._talliers.holdings(job, number)
        return events

    # Rounds.

    def _open(self, job: JobRun, number: int) -> None:
        """Open a round at the talliers; one that an earlier process began, with what the agents have stored of it."""
        if self._talliers.knows(number):
            return
        self._talliers.open(job, number)
        one = job.rounds[number]
        if one.state in ("agreed", "posted") or self._kept.answers(one.round_digest) is not None:
            self._hand_over(job, number)

    def _hand_over(self, job: JobRun, number: int) -> None:
        one = job.rounds[number]
        for agent_id, bodies in self._answers(job, one).items():
            self._talliers.take(number, shares_of(agent_id, job.round_value(one), bodies))

    def _answers(self, job: JobRun, one: RoundRun) -> Mapping[str, Bodies]:
        """What every agent answers, durable together before the first of it reaches a tallier."""
        batch = self._batches[one.number]
        asked = QueryBatch(batch.features, batch.first_query, job.model_asked(one))
        ask = Ask(self._task, asked, self._keys, job.expires_at_s)
        stored = self._kept.answers(one.round_digest)
        found: dict[str, Bodies] = dict(stored or {})
        keys = {} if stored is not None else self._drawn(job, one)
        known = AgentRound(one.round_digest)
        if stored is not None:
            known = AgentRound(one.round_digest, "stored", machine.recipients_of(ask))
        states = {}
        for count, (name, agent) in enumerate(self._agents.items(), start=1):
            states[name] = _step(agent, known, machine.Asked(ask), keys, found)
            self._progress("Agents answer", count, len(self._agents))
        self._kept.store(one.round_digest, found)
        for name, state in states.items():
            after = _step(self._agents[name], state, machine.Stored(), keys, found)
            if after.stage != "stored":
                raise ProtocolViolation(f"{name} has not answered; this is a defect of this program")
        return found

    def _drawn(self, job: JobRun, one: RoundRun) -> Mapping[str, bytes]:
        """The keys of a round whose answers are not stored; those of following rounds are drawn with them.

        Raises:
            BadData: it may have been opened, and keys are gone: other noise around the same votes would be a second
                answer.
        """
        if one.state in ("waiting", "asked"):
            following = [other for other in job.rounds[one.number :] if other.state != "opened"]
            self._kept.begin([other.round_digest for other in following if other.round_digest])
        found = self._kept.keys(one.round_digest)
        missing = sorted(self._agents.keys() - found.keys())
        if missing:
            raise BadData(
                f"the key of {missing[0]} for a batch that was charged is gone, so its noise cannot be replayed; start "
                "again in an empty folder, which is charged anew"
            )
        return found


def tallier_names(task: Task) -> list[str]:
    """Names of the talliers of a run."""
    return [f"tallier-{number}" for number in range(task.talliers)]


def _step(
    agent: Agent, state: AgentRound, event: RoundEvent, keys: Mapping[str, bytes], found: dict[str, Bodies]
) -> AgentRound:
    """One event at one agent, and what its machine wants for it; its answer goes to `found`, where it is stored."""
    waiting = [event]
    while waiting:
        state, effects = machine.step(state, waiting.pop(0), _NOW)
        for effect in effects:
            match effect:
                case machine.Admit(ask):
                    agent.check(ask.task, ask.batch)
                    waiting.append(machine.Admitted(ask))
                case machine.Charge(ask):
                    agent.charge(ask.task, ask.batch)
                    waiting.append(machine.Charged(ask))
                case machine.Compute(ask):
                    bodies = agent.computed(ask.task, ask.batch, key=keys[agent.agent_id], seal=as_it_is).bodies
                    waiting.append(machine.Computed(bodies))
                case machine.Store(bodies):
                    found[agent.agent_id] = bodies
                case machine.Refuse(refusal):
                    raise ProtocolViolation(f"{agent.agent_id} says: {refusal.sentence}")
                case _:
                    pass  # what is stored is handed over
    return state


def _instead_of_key(what: str, name: str) -> str:
    """What stands for a party's key where nobody signs or seals: another one for each party."""
    return hashlib.sha256(f"labeler run, {what}: {name}".encode()).hexdigest()
