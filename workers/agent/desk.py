"""An agent's driver: does what the agent's machine wants (labeler.rounds.agent), for all the mail of a poll at once.

    one turn   open everything -> admit -> one transaction: prices set aside, charges, erasures, numbers of messages
               -> compute every answer -> one transaction: every answer stored -> everything to be sent, in letters

So a turn costs at most two commits, however many rounds it is about. It has no network and no thread: `handle` takes
messages and returns letters, and `sent` is told when they were taken. What is in memory may be lost at any moment; only
the journal counts, and whoever begins anew has the same rounds (`AgentDesk._state`).

Training takes long, so of the answers that need it one is computed per turn, and those of votes are sent before.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any, Final, Protocol

from feature_store.clock import Clock
from feature_store.faults import fault_point
from feature_store.journal.agent_rounds import JournalRounds
from feature_store.journal.database import Connection, Database
from feature_store.journal.promises import PromiseStore
from feature_store.keys import seal_body
from labeler.answered import NOT_KEPT
from labeler.batching import round_charges
from labeler.errors import (
    BudgetExceeded,
    Forged,
    JournalBehind,
    JournalBroken,
    LabelerError,
    PrivacyRefusal,
    ProtocolViolation,
    Replayed,
    WrongDigest,
)
from labeler.messages import COORDINATOR, Header, Message, proposals
from labeler.messages.proposals import Declined, Proposal, Willing
from labeler.messages.rounds import Ask, Refusal
from labeler.messages.rounds import Settled as SettledBody
from labeler.rounds import agent as machine
from labeler.rounds.agent import AgentProposal, AgentRound, ProposalEffect, ProposalEvent, RoundEffect, RoundEvent
from workers.agent.admission import Admission
from workers.agent.agent import Agent
from workers.agent.durable_ledger import DurableLedger
from workers.agent.policy import Policy
from workers.agent.words import PUBLIC_ERRORS, cause, said, silent, told
from workers.party.mail import Draft, PartyMail

log = logging.getLogger("labeler.agent")

_TAKEN: Final = ("ask", "answered", "proposal", "withdrawn")
_QUICK: Final = ("knn", "reverse-knn")
"""Methods whose answer is a search; the others train."""

_ROUNDS_KEPT: Final = 10_000
"""Rounds whose stage is in memory; those of others are read from the journal."""


class Records(Protocol):
    """The agent over its shard as it is now."""

    def agent(self) -> Agent: ...

    def forget_models(self) -> None:
        """Forget what was trained so far."""
        ...


@dataclass(frozen=True)
class _Letter:
    """Drafts that are taken together, and what the log says once they are."""

    drafts: tuple[Draft, ...]
    taken: str
    about: Mapping[str, str]


@dataclass
class _Turn:
    """What is still to be done in one turn, in the order in which it came."""

    now: float
    rounds: list[tuple[str, RoundEffect]] = field(default_factory=list)
    proposals: list[tuple[Proposal, ProposalEffect]] = field(default_factory=list)
    withdrawn: list[str] = field(default_factory=list)
    heard: dict[str, AgentProposal] = field(default_factory=dict)
    letters: list[_Letter] = field(default_factory=list)
    over: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    headers: dict[str, Header] = field(default_factory=dict)
    asks: dict[str, Ask] = field(default_factory=dict)
    stored: dict[str, tuple[bytes, ...]] = field(default_factory=dict)

    def pop(self, *kinds: type) -> list[tuple[str, Any]]:
        """The round effects of these kinds, taken off the list."""
        found = [one for one in self.rounds if isinstance(one[1], kinds)]
        self.rounds = [one for one in self.rounds if not isinstance(one[1], kinds)]
        return found

    def pop_proposals(self, *kinds: type) -> list[tuple[Proposal, Any]]:
        """The proposal effects of these kinds, taken off the list."""
        found = [one for one in self.proposals if isinstance(one[1], kinds)]
        self.proposals = [one for one in self.proposals if not isinstance(one[1], kinds)]
        return found


class AgentDesk:
    """See the module. Used by one thread.

    Args:
        mail: opens this agent's messages.
        coordinator_key: with which the coordinator's signatures are checked.
        records: the agent over its shard.
        database: of the agent's journal.
        rounds, promises, ledger: of the same journal.
        admission: policy and approvals.
        clock: the time now, with a time zone.
        ticks: seconds that only go up, for pauses; the system's where absent.
    """

    def __init__(
        self,
        mail: PartyMail,
        *,
        coordinator_key: str,
        records: Records,
        database: Database,
        rounds: JournalRounds,
        promises: PromiseStore,
        ledger: DurableLedger,
        admission: Admission,
        clock: Clock,
        ticks: Callable[[], float] = time.monotonic,
    ) -> None:
        self._mail = mail
        self._coordinator_key = coordinator_key
        self._records = records
        self._database = database
        self._rounds = rounds
        self._promises = promises
        self._ledger = ledger
        self._admission = admission
        self._clock = clock
        self._ticks = ticks
        self._states: OrderedDict[str, AgentRound] = OrderedDict()
        self._wakes: dict[str, float] = {}
        self._waiting: list[tuple[str, RoundEffect]] = []
        self._sending: list[_Letter] = []
        # One moment of the journal for all that is looked up while the mail is read.
        self._reader: Connection | None = None

    @property
    def due_in_s(self) -> float | None:
        """After how many seconds `handle` wants to be called also without mail; None where it need not be.

        The coordinator reads it off the next poll, so it follows from public things: from asks whose answers are
        trained, one a turn. An answer that could not be made is tried again at the first turn after its pause, and
        no poll is shorter for it: that an attempt failed, and when, may depend on the records.
        """
        return 0.0 if self._waiting else None

    def tidy(self) -> None:
        """Give back promises that have ended, and erase what nobody may ask for any more; nothing is sent."""
        with self._in_step_with_the_journal():
            self._tidy()

    def handle(self, mail: Sequence[Message]) -> list[tuple[Draft, ...]]:
        """Have the effect of every message, durably; what is to be sent, message by message in letters.

        Of asks for one round the last is answered, since all have one answer.

        Raises:
            LabelerError: the journal cannot be used now, or not any more; the same mail may come again.
        """
        with self._in_step_with_the_journal():
            self._tidy()
            return self._handle(mail)

    def sent(self, errors: Sequence[LabelerError | None]) -> None:
        """The letters of the last turn were taken by the coordinator, or refused, each with its error."""
        is_answered = False
        for letter, error in zip(self._sending, errors, strict=True):
            if error is not None:
                # The round or the job is over; there is nobody to say it to.
                log.warning("answer not taken", extra=dict(letter.about) | said(error))
            elif letter.taken:
                log.info(letter.taken, extra=dict(letter.about))
                is_answered |= letter.drafts[0].kind == "input-share"
        if is_answered:
            fault_point("agent.sent")
        self._sending = []
        self._mail.note()

    # One turn.

    @contextmanager
    def _in_step_with_the_journal(self) -> Iterator[None]:
        """Where something could not be kept, forget what is in memory: it may be ahead of the journal."""
        try:
            yield
        except BaseException:
            self._states.clear()
            self._wakes.clear()
            self._waiting.clear()
            self._reader = None
            self._mail.drop()
            raise

    def _tidy(self) -> None:
        now = self._clock()
        self._promises.release(now)
        over = self._rounds.over(now)
        if not over:
            return
        turn = _Turn(now.timestamp())
        for round_digest in over:
            self._round_event(turn, round_digest, machine.Expired())
        self._keep(turn)
        for round_digest in over:
            log.info("round is over, nothing is kept of it", extra={"round_digest": round_digest})

    def _handle(self, mail: Sequence[Message]) -> list[tuple[Draft, ...]]:
        now = self._clock()
        turn = _Turn(now.timestamp())
        turn.rounds, self._waiting = self._waiting, []
        for round_digest, moment in list(self._wakes.items()):
            if moment <= self._ticks():
                del self._wakes[round_digest]
                self._wake(turn, round_digest)
        if mail:
            with self._database.read() as self._reader:
                self._read(turn, mail)
            self._reader = None
        while turn.rounds or turn.proposals or turn.withdrawn:
            if self._admit(turn) or self._keep(turn) or self._compute(turn) or self._store(turn):
                continue
            break
        for what, about in turn.over:
            log.info(what, extra=about)
        self._send(turn)
        self._sending = turn.letters
        return [letter.drafts for letter in turn.letters]

    def _read(self, turn: _Turn, mail: Sequence[Message]) -> None:
        taken: list[tuple[Header, bytes]] = []
        for message in mail:
            try:
                body = self._mail.open(message, self._coordinator_key)
                if message.header.sender != COORDINATOR or message.header.kind not in _TAKEN:
                    raise ProtocolViolation(f"an agent takes no message of kind {message.header.kind!r}")
                taken.append((message.header, body))
            except Replayed:
                continue
            except (Forged, ProtocolViolation) as error:
                log.warning("message skipped", extra={"message_id": message.message_id} | said(error))
        # Asked and settled in one mail: nobody misses anything, so it is as if it had not been asked.
        last = {header.round_digest: header for header, _ in taken if header.kind in ("ask", "answered")}
        for header, body in taken:
            try:
                if header.kind == "ask" and last[header.round_digest] is header:
                    self._asked(turn, header, body)
                elif header.kind == "answered":
                    SettledBody.decode(body)
                    about = {"task_digest": header.task_digest, "round_digest": header.round_digest}
                    self._round_event(turn, header.round_digest, machine.Settled())
                    turn.over.append(("round is settled, nothing is kept of it", about))
                elif header.kind == "proposal":
                    proposal = Proposal.decode(body)
                    if header.task_digest != proposal.task.digest:
                        raise WrongDigest("a proposal names another task than it holds")
                    self._proposal_event(turn, proposal, machine.Proposed(proposal))
                elif header.kind == "withdrawn":
                    turn.withdrawn.append(proposals.Withdrawn.decode(body).job_id)
            except LabelerError as error:
                # It was none, so there is nobody to say anything to.
                about = {"task_digest": header.task_digest, "kind": header.kind}
                log.warning("message skipped", extra=about | said(error))

    def _asked(self, turn: _Turn, header: Header, body: bytes) -> None:
        turn.headers[header.round_digest] = header
        try:
            ask = Ask.decode(body)
            if (header.task_digest, header.round_digest) != (ask.task.digest, ask.round.digest):
                raise WrongDigest("an ask names another task or round than it holds")
        except LabelerError as error:
            refusal = _no(header.task_digest, header.round_digest, error)
            self._round_event(turn, header.round_digest, machine.Refused(refusal))
        else:
            self._round_event(turn, header.round_digest, machine.Asked(ask))

    def _admit(self, turn: _Turn) -> bool:
        """Ask shard, policy and people; whether anything was asked."""
        asked = turn.pop(machine.Admit)
        for digest, effect in asked:
            ask: Ask = effect.ask
            try:
                if not effect.is_charged:
                    # Before a person is asked, and the task kept for it: what does not fit these records never waits.
                    self._records.agent().check(ask.task, ask.batch)
                self._admission.check(ask, is_charged=effect.is_charged)
                self._ledger.check_price(ask.task, ask.sizes)
                fault_point("agent.asked")
            except (JournalBroken, JournalBehind):
                raise
            except Exception as error:
                # Ours or not, as for a proposal: nothing is charged, and nothing of a record took part.
                self._round_event(turn, digest, machine.Refused(self._no_to(ask, error)))
            else:
                turn.asks[digest] = ask
                self._round_event(turn, digest, machine.Admitted(ask))
        proposed = turn.pop_proposals(machine.AdmitProposal)
        for proposal, _ in proposed:
            try:
                self._records.agent().check_task(proposal.task, proposal.sizes)
                self._admission.check(proposal)
                self._ledger.check_price(proposal.task, proposal.sizes)
            except (JournalBroken, JournalBehind):
                raise
            except Exception as error:
                # Ours or not: a proposal that cannot be judged must not end the process, and again at every start.
                self._proposal_event(turn, proposal, machine.Refused(_not_willing(proposal, error)))
            else:
                self._proposal_event(turn, proposal, machine.ProposalAdmitted(proposal))
        return bool(asked or proposed)

    def _keep(self, turn: _Turn) -> bool:
        """Everything that is durable before anything is computed, in one transaction; whether there was anything."""
        erased = [digest for digest, _ in turn.pop(machine.Erase)]
        charges = turn.pop(machine.Charge)
        promises = turn.pop_proposals(machine.Promise)
        withdrawn, turn.withdrawn = turn.withdrawn, []
        if not (erased or charges or promises or withdrawn):
            return False
        events: list[tuple[str, Any, Any]] = []
        policy = None
        if charges or promises:
            try:
                policy = self._ledger.open_accounts()
            except (JournalBroken, JournalBehind):
                raise
            except LabelerError as error:
                events = self._not_paid(charges, promises, error)
        try:
            with self._database.write() as connection:
                if policy is not None:
                    events = self._paid(connection, policy, charges, promises)
                self._given_back(connection, erased, withdrawn)
                self._mail.write_noted(connection)
        except (JournalBroken, JournalBehind):
            raise
        except LabelerError as error:
            # Nothing of it was kept: a full disk. What was to be erased or given back comes again with the same mail.
            if erased or withdrawn:
                raise
            events = self._not_paid(charges, promises, error)
        if erased:
            self._records.forget_models()
        has_charged = has_promised = False
        for kind, about, event in events:
            has_charged |= isinstance(event, machine.Charged)
            has_promised |= isinstance(event, machine.Promised)
            if kind == "round":
                self._round_event(turn, about, event)
            else:
                self._proposal_event(turn, about, event)
        if has_promised:
            fault_point("agent.willing")
        if has_charged:
            fault_point("agent.charged")
        return True

    def _not_paid(
        self,
        charges: Sequence[tuple[str, machine.Charge]],
        promises: Sequence[tuple[Proposal, machine.Promise]],
        error: LabelerError,
    ) -> list[tuple[str, Any, Any]]:
        """Whoever asked is told so."""
        events: list[tuple[str, Any, Any]] = []
        for digest, charge in charges:
            events.append(("round", digest, machine.ChargeRefused(self._no_to(charge.ask, error))))
        for proposal, _ in promises:
            events.append(("proposal", proposal, machine.Refused(_not_willing(proposal, error))))
        return events

    def _paid(
        self,
        connection: Connection,
        policy: Policy,
        charges: Sequence[tuple[str, machine.Charge]],
        promises: Sequence[tuple[Proposal, machine.Promise]],
    ) -> list[tuple[str, Any, Any]]:
        events: list[tuple[str, Any, Any]] = []
        begun: dict[str, datetime] = {}
        for digest, charge in charges:
            try:
                with self._database.attempt(connection):
                    if self._charge(connection, policy, digest, charge.ask):
                        begun[digest] = self._ledger.kept_until(charge.ask.expires_at)
            except (JournalBroken, JournalBehind):
                raise
            except LabelerError as error:
                events.append(("round", digest, machine.ChargeRefused(self._no_to(charge.ask, error))))
            else:
                events.append(("round", digest, machine.Charged(charge.ask)))
        for proposal, _ in promises:
            try:
                with self._database.attempt(connection):
                    until = self._ledger.promise_in(connection, policy, proposal)
            except (JournalBroken, JournalBehind):
                raise
            except BudgetExceeded as error:
                self._ledger.decline(proposal, connection=connection)
                events.append(("proposal", proposal, machine.NotCovered(_not_willing(proposal, error))))
            except LabelerError as error:
                events.append(("proposal", proposal, machine.Refused(_not_willing(proposal, error))))
            else:
                events.append(("proposal", proposal, machine.Promised(until.timestamp())))
        self._rounds.open(begun, connection=connection)
        return events

    def _given_back(self, connection: Connection, erased: Sequence[str], withdrawn: Sequence[str]) -> None:
        self._rounds.erase_in(erased, connection=connection)
        for job_id in withdrawn:
            given_back = self._promises.withdraw(job_id, self._clock(), connection=connection)
            log.info("proposal withdrawn", extra={"job_id": job_id, "rounds_given_back": given_back})

    def _charge(self, connection: Connection, policy: Policy, digest: str, ask: Ask) -> bool:
        return self._ledger.charge_in(
            connection,
            policy,
            round_digest=digest,
            shard_version=self._records.agent().shard_version,
            reservation_id=digest,
            charges=round_charges(ask.task, len(ask.batch)),
            task=ask.task,
            num_queries=len(ask.batch),
            recipients=machine.recipients_of(ask),
        )

    def _compute(self, turn: _Turn) -> bool:
        """Answers that are charged: all that are votes, then one that is trained; whether there was any."""
        # Settled meanwhile, one that had waited for its turn is not wanted any more.
        wanted = [one for one in turn.pop(machine.Compute) if self._state(one[0]).doing == "compute"]
        quick = [one for one in wanted if one[1].ask.task.method in _QUICK]
        slow = [one for one in wanted if one[1].ask.task.method not in _QUICK]
        now = quick or slow[:1]
        later = slow if quick else slow[1:]
        self._waiting += later
        for digest, effect in now:
            ask = turn.asks[digest] = effect.ask
            try:
                key = self._rounds.key_of_charged(digest)
                bodies = self._records.agent().computed(ask.task, ask.batch, key=key, seal=partial(self._seal, ask))
            except (JournalBroken, JournalBehind):
                raise
            except Exception as error:
                # From here on it answers or is silent: a refusal now, or its words, could depend on the records.
                log.error("an answer that was charged could not be made; trying again", extra=cause(error))
                self._round_event(turn, digest, machine.Failed())
            else:
                self._round_event(turn, digest, machine.Computed(bodies))
        if now:
            fault_point("agent.computed")
        return bool(now)

    def _store(self, turn: _Turn) -> bool:
        """Keep every answer that was computed, in one transaction; whether there was any."""
        wanted = turn.pop(machine.Store)
        if not wanted:
            return False
        failed: set[str] = set()
        try:
            with self._database.write() as connection:
                self._mail.write_noted(connection)
                for digest, effect in wanted:
                    try:
                        with self._database.attempt(connection):
                            if not self._rounds.store_new(digest, effect.bodies, connection=connection):
                                raise PrivacyRefusal(NOT_KEPT)
                    except PrivacyRefusal as error:
                        failed.add(digest)
                        log.error("an answer that was charged could not be kept", extra=cause(error))
        except (JournalBroken, JournalBehind):
            raise
        except Exception as error:
            # A full disk, for example: it is computed again under the same key, and nothing has left.
            failed = {digest for digest, _ in wanted}
            log.error("an answer that was charged could not be made; trying again", extra=cause(error))
        for digest, effect in wanted:
            if digest in failed:
                self._round_event(turn, digest, machine.Failed())
            else:
                turn.stored[digest] = effect.bodies
                self._round_event(turn, digest, machine.Stored())
        if len(failed) < len(wanted):
            fault_point("agent.stored")
        return True

    # What is said.

    def _send(self, turn: _Turn) -> None:
        for digest, effect in turn.rounds:
            match effect:
                case machine.SendStored():
                    self._answer(turn, digest)
                case machine.Refuse(refusal):
                    self._refuse(turn, digest, refusal)
        for proposal, said_to in turn.proposals:
            about = {"task_digest": proposal.task.digest, "job_id": proposal.job_id}
            match said_to:
                case machine.SayWilling(until):
                    body = Willing(proposal.job_id, until).encode()
                    draft = Draft("willing", COORDINATOR, body, task_digest=proposal.task.digest)
                    turn.letters.append(_Letter((draft,), "willing", about))
                case machine.Decline(refusal):
                    body = Declined(proposal.job_id, refusal).encode()
                    draft = Draft("declined", COORDINATOR, body, task_digest=proposal.task.digest)
                    turn.letters.append(_Letter((draft,), "", about))

    def _refuse(self, turn: _Turn, digest: str, refusal: Refusal) -> None:
        header = turn.headers.get(digest)
        if header is not None and header.round_digest:
            about = {"task_digest": header.task_digest, "round_digest": digest}
            draft = Draft("refused", COORDINATOR, refusal.encode(), header.task_digest, digest)
            turn.letters.append(_Letter((draft,), "", about))

    def _answer(self, turn: _Turn, digest: str) -> None:
        ask = turn.asks[digest]
        bodies = turn.stored.get(digest)
        if bodies is None:
            kept = self._rounds.kept(digest)
            bodies = None if kept is None else kept.bodies
        if bodies is None:
            # Its key was removed by hand: as if it were settled.
            self._refuse(turn, digest, Refusal.of(PrivacyRefusal(NOT_KEPT)))
            return
        task_digest = ask.task.digest
        shares = [
            Draft("input-share", one.tallier_id, body, task_digest=task_digest, round_digest=digest, is_sealed=True)
            for one, body in zip(ask.talliers, bodies, strict=True)
        ]
        receipt = Draft("answered", COORDINATOR, b"{}", task_digest=task_digest, round_digest=digest)
        about = {"task_digest": task_digest, "round_digest": digest}
        turn.letters.append(_Letter((*shares, receipt), "answered", about))

    def _seal(self, ask: Ask, number: int, body: bytes) -> bytes:
        tallier = ask.talliers[number]
        return seal_body(
            "input-share",
            sender=self._mail.party_id,
            recipient=tallier.tallier_id,
            task_digest=ask.task.digest,
            round_digest=ask.round.digest,
            body=body,
            seal_to=tallier.seal_key,
        )

    def _no_to(self, ask: Ask, error: Exception) -> Refusal:
        return _no(ask.task.digest, ask.round.digest, error)

    # The machines.

    def _state(self, round_digest: str) -> AgentRound:
        """A round as it is in memory, or else as the journal has it."""
        state = self._states.get(round_digest)
        if state is None:
            kept = self._rounds.kept(round_digest, connection=self._reader)
            state = AgentRound(round_digest) if kept is None else AgentRound(round_digest, kept.stage, kept.recipients)
        return state

    def _round_event(self, turn: _Turn, round_digest: str, event: RoundEvent) -> None:
        before = self._state(round_digest)
        after, effects = machine.step(before, event, turn.now)
        self._states[round_digest] = after
        self._states.move_to_end(round_digest)
        for effect in effects:
            if isinstance(effect, machine.Wait):
                self._wakes[round_digest] = self._ticks() + effect.pause_s
            else:
                turn.rounds.append((round_digest, effect))
        self._trim()

    def _wake(self, turn: _Turn, round_digest: str) -> None:
        waited = self._state(round_digest).ask is not None
        self._round_event(turn, round_digest, machine.Woken())
        if waited and self._state(round_digest).ask is None:
            log.error("the round is over, and was not answered", extra={"round_digest": round_digest})

    def _trim(self) -> None:
        """Forget the oldest rounds of which the journal knows everything."""
        while len(self._states) > _ROUNDS_KEPT:
            digest, state = self._states.popitem(last=False)
            if state.ask is not None or state.doing != "nothing":
                self._states[digest] = state
                return

    def _proposal_event(self, turn: _Turn, proposal: Proposal, event: ProposalEvent) -> None:
        state = turn.heard.get(proposal.digest)
        if state is None:
            answer = self._promises.said(proposal.digest, connection=self._reader)
            state = AgentProposal() if answer is None else AgentProposal(answer.answer, answer.until.timestamp())
        after, effects = machine.step_proposal(state, event, turn.now)
        turn.heard[proposal.digest] = after
        turn.proposals += [(proposal, effect) for effect in effects]


def _no(task_digest: str, round_digest: str, error: Exception) -> Refusal:
    """A refusal in the words that leave the site; what happened goes to its own log."""
    about = {"task_digest": task_digest, "round_digest": round_digest}
    log.warning("refused", extra=about | cause(error))
    return Refusal.of(told(error if isinstance(error, PUBLIC_ERRORS) else silent(error)))


def _not_willing(proposal: Proposal, error: Exception) -> Refusal:
    """Likewise, of a proposal."""
    refusal = Refusal.of(told(error if isinstance(error, PUBLIC_ERRORS) else silent(error)))
    about = {"task_digest": proposal.task.digest, "job_id": proposal.job_id}
    log.warning("declined" if refusal.is_final else "not yet", extra=about | cause(error))
    return refusal
