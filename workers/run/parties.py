"""The agents and talliers of a run, in the process of its coordinator, which passes them objects instead of messages.

To the coordinator's driver, `RunParties` is both its `Writer` and its `PartyBook` of enrolled parties. The driver hands
over each send once the turn that made it is durable. The send then waits for `answer`, which returns the parties'
replies as events for the coordinator's machine. Nothing is serialized, sealed or signed, because nothing leaves the
process. Every party answers at once or raises, so errors reach the caller unchanged.

    agents      labeler.rounds.agent: each agent checks and computes. The job's journal has reserved its price before
                it is asked (labeler.driver.settlement). The answers of all agents to a round are stored together
                (workers.run.folder), and then handed to the talliers.
    talliers    labeler.rounds.tallier: objects in memory only. A continued run hands them the agents' stored answers
                again, so the sum is the same. If talliers add the noise, it is the same too: its key is stored with
                the agents' keys.

Agents and talliers meet only through input shares: nothing here reads a ballot.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

from labeler.driver.mail import Letter
from labeler.errors import BadData, ProtocolViolation
from labeler.ledger.chain import Head
from labeler.ledger.database import Connection
from labeler.ledger.parties import PartyRecord
from labeler.messages.bodies import Ask, OpenRound, SumRequest, TallierKey, aggregate_to_bytes, winner_to_bytes
from labeler.release import WinnerEngine, open_winner
from labeler.rounds import agent as machine
from labeler.rounds import tallier
from labeler.rounds.agent import AgentRound, RoundEvent
from labeler.rounds.effects import (
    AskForSums,
    Event,
    HoldingsCame,
    JobRun,
    OpenAt,
    RoundRun,
    Send,
    SendAsks,
    SumCame,
    TellSettled,
)
from labeler.rounds.tallier import TallierEffect
from labeler.system.clock import now_utc
from labeler.tally import AggregateShare, QueryBatch
from labeler.task import Task
from workers.agent.agent import Agent, as_it_is, shares_of
from workers.progress import ProgressCallback
from workers.run.folder import Bodies, RoundStore
from workers.tallier.rounds import Changes, TallierRounds

_NOW: Final = 0.0
"""The time of every event. It never advances: nothing expires in a process that waits for nobody."""


class RunParties:
    """The parties of a run; see the module.

    Args:
        batches: the questions of each round, by its number.
        kept: the store of the keys and answers of every round.
        is_seeded: True if those keys came from a known seed.
        winner_engine: finds the winner of each query with the talliers; None adds their sums in this process.
        progress: called with the number of agents that have answered.
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
        self._engine = winner_engine
        self._talliers = {
            name: TallierRounds(noise_key=partial(kept.tallier_key, name), is_seeded=is_seeded) for name in names
        }
        self._first = self._talliers[names[0]]
        self._sums: dict[str, list[AggregateShare]] = {}
        self._sent: list[tuple[JobRun, Send, Head]] = []
        now = now_utc()
        self._enrolled = tuple(
            PartyRecord(name, "agent", None, key, _instead_of_key("seal", name), "active", now, now)
            for name, key in self.agent_keys.items()
        ) + tuple(
            PartyRecord(key.tallier_id, "tallier", number, key.verify_key, key.seal_key, "active", now, now)
            for number, key in enumerate(self._keys)
        )

    # Enrolled parties.

    @property
    def agent_keys(self) -> dict[str, str]:
        """Return the substitute that a round records for each agent's signature key."""
        return {agent: _instead_of_key("sign", agent) for agent in self._agents}

    def all(self) -> Sequence[PartyRecord]:
        """See PartyBook."""
        return self._enrolled

    def answered(self, heads: Mapping[str, Head], *, connection: Connection) -> None:
        """See PartyBook: an agent of this process has no journal."""

    # The coordinator's messages.

    def make(self, job: JobRun, number: int) -> None:
        """See Writer: there is nothing to make."""

    def letters(self, job: JobRun, send: Send, head: Head) -> list[Letter]:
        """See Writer: keep the send itself for `answer`, and write no letter."""
        self._sent.append((job, send, head))
        return []

    def answer(self) -> list[Event]:
        """Carry out every send since the last call.

        Returns:
            Events for the coordinator.

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
                    pass  # asked and settled together: nobody needs an answer
                case OpenAt(number):
                    self._open(job, number)
                case SendAsks() if is_opening:
                    self._sent.append((job, send, head))  # rounds that are paid for open first
                case SendAsks(number):
                    self._open(job, number)
                    if not self._agents.keys() <= self._first.state(job.rounds[number].round_digest).sharing_ids.keys():
                        self._hand_over(job, job.rounds[number])
                    asked[number] = job
                case AskForSums(number, names):
                    self._open(job, number)
                    events += self._summed(job.rounds[number], names, head)
                case TellSettled(numbers):
                    digests = [job.rounds[number].round_digest for number in numbers]
                    self._kept.erase(digests)
                    for digest in digests:  # opened: nobody needs anything of it any more
                        self._sums.pop(digest, None)
                        for rounds in self._talliers.values():
                            rounds.drop(digest)
                case _:
                    pass  # a message to a party that a run does not have
        for number, job in asked.items():
            digest = job.rounds[number].round_digest
            for name, rounds in self._talliers.items():
                held = {agent: sharing.hex() for agent, sharing in rounds.state(digest).sharing_ids.items()}
                events.append(HoldingsCame(digest, self._task.digest, name, held))
        return events

    # Rounds.

    def _open(self, job: JobRun, number: int) -> None:
        """Open a round at the talliers. If an earlier process began it, hand over the answers that agents stored."""
        one = job.rounds[number]
        if self._first.state(one.round_digest).stage != "unknown":
            return
        for index, rounds in enumerate(self._talliers.values()):
            opening = OpenRound(
                round=job.round_value(one), tallier=index, participants=one.participants, expires_at=job.expires_at_s
            )
            _raise_refusals(rounds.step(one.round_digest, tallier.OpeningCame(opening, rounds.site()), _NOW))
        if one.state in ("agreed", "posted") or self._kept.answers(one.round_digest) is not None:
            self._hand_over(job, one)

    def _hand_over(self, job: JobRun, one: RoundRun) -> None:
        for agent_id, bodies in self._answers(job, one).items():
            shares = shares_of(agent_id, job.round_value(one), bodies)
            for rounds, sent in zip(self._talliers.values(), shares, strict=True):
                _raise_refusals(rounds.take(one.round_digest, [(sent.agent_id, sent.share)], _NOW))

    def _answers(self, job: JobRun, one: RoundRun) -> Mapping[str, Bodies]:
        """Return every agent's answer. All answers are durable before the first one reaches a tallier."""
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
            after = _step(self._agents[name], state, machine.AnswerStored(), keys, found)
            if after.stage != "stored":
                raise ProtocolViolation(f"{name} has not answered; this is a defect of this program")
        return found

    def _drawn(self, job: JobRun, one: RoundRun) -> Mapping[str, bytes]:
        """Return the keys of a round whose answers are not stored. Keys of the next rounds are drawn along with them.

        Raises:
            BadData: keys are gone, and the round may have been opened. New noise around the same votes would be a
                second answer.
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

    def _summed(self, one: RoundRun, names: Sequence[str], head: Head) -> list[SumCame]:
        """Return the answer of each tallier that is asked: its sum, or the winners that the talliers found together."""
        digest = one.round_digest
        request = SumRequest(contributors=frozenset(one.contributors), ledger_seq=head.seq, ledger_hash=head.hash)
        for rounds in self._talliers.values():
            _raise_refusals(rounds.step(digest, tallier.SumAsked(request, rounds.site()), _NOW))
            if digest in rounds.changes.summed:
                self._sums.setdefault(digest, []).append(rounds.changes.summed[digest][2])
            rounds.changes = Changes()
        sums = self._sums[digest]
        if self._task.release == "histogram":
            answers = [aggregate_to_bytes(sum_) for sum_ in sums]
        else:
            labels = open_winner(sums, self._task, engine=self._engine).labels
            answers = [winner_to_bytes(sum_.winner(labels)) for sum_ in sums]
        return [
            SumCame(
                round_digest=digest,
                task_digest=self._task.digest,
                tallier_id=name,
                kind=self._task.release,
                stated=(digest, number),
                data=answer,
            )
            for number, (name, answer) in enumerate(zip(self._talliers, answers, strict=True))
            if name in names
        ]


def tallier_names(task: Task) -> list[str]:
    """Return names of the talliers of a run."""
    return [f"tallier-{number}" for number in range(task.talliers)]


def _step(
    agent: Agent, state: AgentRound, event: RoundEvent, keys: Mapping[str, bytes], found: dict[str, Bodies]
) -> AgentRound:
    """Apply one event at one agent, and carry out its effects. The answer is added to `found`; the caller stores it."""
    waiting = [event]
    while waiting:
        state, effects = machine.step(state, waiting.pop(0), _NOW)
        for effect in effects:
            match effect:
                case machine.Admit(ask):
                    agent.check(ask.task, ask.batch)
                    waiting.append(machine.AskAdmitted(ask))
                case machine.ChargeRound(ask):
                    waiting.append(machine.RoundCharged(ask))  # the job's journal has reserved it; see the module
                case machine.Compute(ask):
                    bodies = agent.computed(ask.task, ask.batch, key=keys[agent.agent_id], seal=as_it_is).bodies
                    waiting.append(machine.Computed(bodies))
                case machine.Store(bodies):
                    found[agent.agent_id] = bodies
                case machine.RefuseAsk(refusal):
                    raise ProtocolViolation(f"{agent.agent_id} says: {refusal.sentence}")
                case _:
                    pass  # the caller hands over the stored answer
    return state


def _instead_of_key(what: str, name: str) -> str:
    """Return a substitute for a party's key, different for each party: nobody signs or seals here."""
    return hashlib.sha256(f"labeler run, {what}: {name}".encode()).hexdigest()


def _raise_refusals(told: Sequence[TallierEffect]) -> None:
    """Raise a tallier's refusal as an error, which ends the run."""
    for effect in told:
        if isinstance(effect, tallier.RefuseEvent | tallier.DeclineRequest):
            raise effect.error
