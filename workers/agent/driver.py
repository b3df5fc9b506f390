"""An agent's driver: does what the agent's machine wants (labeler.rounds.agent), for all the mail of a poll at once.

    one turn   open everything -> admit -> one transaction: prices set aside, charges, erasures, numbers of messages.
               -> compute every answer -> one transaction: every answer stored -> everything to be sent, in letters.

So a turn costs at most two commits, however many rounds it is about. It has no network and no thread: `handle` takes
messages and returns letters, and `sent` hears their fate. Memory may be lost at any moment; only the
journal counts, and a new process reads the same rounds from it.

Training takes long, so a turn computes one of the answers that need it, and sends those of votes before.

A turn that computes from records is on the site's public clock (workers.agent.public_clock). Its results leave when
`held_s` says, and the next poll with them, also where an answer could not be made.

The words that leave the site follow from public things alone. A refusal says of a budget only that it does not cover
the round. It says nothing of trouble whose own words may depend on records.

More than 600 lines: one turn of an agent, from its mail to its letters, reads from top to bottom.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any, Final, Protocol

from labeler.batching import round_charges
from labeler.errors import (
    AwaitingApproval,
    BadData,
    BudgetExceeded,
    Forged,
    InvalidSetting,
    JournalBehind,
    JournalBroken,
    LabelerError,
    MixedShards,
    PrivacyRefusal,
    ProtocolViolation,
    Replayed,
    SiteStopped,
    TryAgain,
    Unavailable,
    WrongDigest,
)
from labeler.ledger.agent_memory import JournalRounds
from labeler.ledger.database import Connection, Database
from labeler.ledger.lifetimes import CastVotes, LifetimeSpends
from labeler.ledger.promises import PromiseStore
from labeler.messages import COORDINATOR, Header, Message
from labeler.messages.bodies import AnswerSent, Ask, Declined, Proposal, RefusalBody, Willing, Withdrawn
from labeler.messages.bodies import Settled as SettledBody
from labeler.rounds import agent as machine
from labeler.rounds import agent_proposal as proposing
from labeler.rounds.agent import NOT_KEPT, AgentRound, RoundEffect, RoundEvent
from labeler.rounds.agent_proposal import AgentProposal, ProposalEffect, ProposalEvent
from labeler.system.clock import Clock
from labeler.system.faults import fault_point
from labeler.system.keys import seal_body
from labeler.tally import QueryBatch
from labeler.task import Task
from workers.agent.agent import Agent
from workers.agent.decisions import Admission
from workers.agent.ledger import DurableLedger, ShareUsedUp
from workers.agent.policy import Policy
from workers.agent.public_clock import PublicClock, TurnTimes
from workers.party.link import Draft, Outgoing, PartyMail, cause, log_fates, said

log = logging.getLogger("labeler.agent")

PUBLIC_ERRORS: Final = (
    PrivacyRefusal,
    InvalidSetting,
    MixedShards,
    ProtocolViolation,
    AwaitingApproval,
    SiteStopped,
)
"""Errors raised before a record is touched whose sentences follow from the ask, the policy and the ledger."""

_TAKEN: Final = ("ask", "answered", "proposal", "withdrawn")


class CurrentAgent(Protocol):
    """The agent over its shard as it is now."""

    def agent(self) -> Agent:
        """Return the agent over the shard as it was opened last: no request opens it again."""
        ...

    def forget_models(self) -> None:
        """Forget what was trained so far."""
        ...


@dataclass
class Turn:
    """The work left in one turn, in the order in which it came."""

    times: TurnTimes
    rounds: list[tuple[str, RoundEffect]] = field(default_factory=list)
    proposals: list[tuple[Proposal, ProposalEffect]] = field(default_factory=list)
    withdrawn: list[str] = field(default_factory=list)
    heard: dict[str, AgentProposal] = field(default_factory=dict)
    letters: list[Outgoing] = field(default_factory=list)
    over: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    headers: dict[str, Header] = field(default_factory=dict)
    asks: dict[str, Ask] = field(default_factory=dict)
    stored: dict[str, tuple[bytes, ...]] = field(default_factory=dict)
    cast: dict[str, CastVotes] = field(default_factory=dict)


class AgentDriver:
    """The driver of an agent; see the module. Used by one thread.

    Args:
        coordinator_key: checks the coordinator's signatures.
        public_clock: when turns may leave.
        keep: keeps what is public of a question, once its answer has left; never raises.
    """

    def __init__(
        self,
        mail: PartyMail,
        *,
        coordinator_key: str,
        records: CurrentAgent,
        database: Database,
        rounds: JournalRounds,
        promises: PromiseStore,
        ledger: DurableLedger,
        admission: Admission,
        clock: Clock,
        public_clock: PublicClock,
        keep: Callable[[Task, QueryBatch], None] = lambda _task, _batch: None,
    ) -> None:
        self._mail = mail
        self._coordinator_key = coordinator_key
        self._records = records
        self._database = database
        self._rounds = rounds
        self._spends = LifetimeSpends(database)
        self._promises = promises
        self._ledger = ledger
        self._admission = admission
        self._clock = clock
        self._public_clock = public_clock
        self._leaves_at = 0.0
        self._states: dict[str, AgentRound] = {}
        self._wakes: dict[str, float] = {}
        self._waiting: list[tuple[str, RoundEffect]] = []
        self._keep_public = keep
        self._answered: list[Ask] = []

    @property
    def due_in_s(self) -> float | None:
        """Return after how many seconds `handle` wants to be called without mail; None where it need not be.

        The coordinator can tell it from the next poll, so it follows from public things: from asks whose answers are
        trained, one a turn. A failed answer is tried again at the first turn after its pause, and no
        poll is shorter for it: the failure and its time may depend on the records.
        """
        return 0.0 if self._waiting else None

    def held_s(self) -> float:
        """Return after how many seconds the results of `handle` may leave, and the next poll with them; 0: at once."""
        return max(0.0, self._leaves_at - self._public_clock.ticks())

    def tidy(self) -> None:
        """Give back promises that have ended, and erase answers that can no longer be asked for; nothing is sent."""
        with self._in_step_with_the_journal():
            self._tidy()

    def handle(self, mail: Sequence[Message]) -> list[Outgoing]:
        """Apply every message durably; return what is to be sent, message by message in letters.

        Of asks for one round the last is answered, since all have one answer.

        Raises:
            LabelerError: the journal cannot be used now, or no longer; the same mail may come again.
        """
        turn = Turn(self._public_clock.begin(self._clock().timestamp()))
        try:
            with self._in_step_with_the_journal():
                self._tidy()
                return self._handle(turn, mail)
        finally:
            self._leaves_at = self._public_clock.leaves_at(turn.times, self._clock().timestamp())

    def sent(self, letters: Sequence[Outgoing], errors: Sequence[LabelerError | None]) -> None:
        """See Handler."""
        if "input-share" in log_fates(log, letters, errors, refused="answer not taken"):
            fault_point("agent.sent")
        self._mail.note()
        answered, self._answered = self._answered, []
        for ask in answered:
            self._keep_public(ask.task, ask.batch)

    # One turn.

    @contextmanager
    def _in_step_with_the_journal(self) -> Iterator[None]:
        """Clear memory where something could not be stored: memory may be ahead of the journal."""
        try:
            yield
        except BaseException:
            self._states.clear()
            self._wakes.clear()
            self._waiting.clear()
            self._mail.drop()
            raise

    def _tidy(self) -> None:
        now = self._clock()
        self._promises.release(now)
        self._rounds.tidy()
        over = self._rounds.over(now)
        if not over:
            return
        turn = Turn(TurnTimes(now.timestamp()))
        for round_digest in over:
            self._round_event(turn, round_digest, machine.AskExpired())
        self._keep(turn)
        for round_digest in over:
            log.info("round is over, nothing is kept of it", extra={"round_digest": round_digest})

    def _handle(self, turn: Turn, mail: Sequence[Message]) -> list[Outgoing]:
        self._ledger.check_witnesses()
        turn.rounds, self._waiting = self._waiting, []
        self._wake(turn)
        self._read(turn, mail)
        while turn.rounds or turn.proposals or turn.withdrawn:
            if self._admit(turn) or self._keep(turn) or self._compute(turn) or self._store(turn):
                continue
            break
        for what, about in turn.over:
            log.info(what, extra=about)
        self._write_letters(turn)
        # The journal knows everything of the others.
        for digest in [*self._states]:
            if self._states[digest].ask is None and self._states[digest].doing == "nothing":
                del self._states[digest]
        return turn.letters

    # The rounds and proposals, from memory or else from the journal; each steps by its machine.

    def _state(self, round_digest: str) -> AgentRound:
        state = self._states.get(round_digest)
        if state is None:
            kept = self._rounds.kept(round_digest)
            state = AgentRound(round_digest) if kept is None else AgentRound(round_digest, kept.stage, kept.recipients)
        return state

    def _round_event(self, turn: Turn, round_digest: str, event: RoundEvent) -> None:
        """Step a round, and add its effects to the turn."""
        self._states[round_digest], effects = machine.step(self._state(round_digest), event, turn.times.now)
        for effect in effects:
            if isinstance(effect, machine.Wait):
                self._wakes[round_digest] = self._public_clock.ticks() + effect.pause_s
            else:
                turn.rounds.append((round_digest, effect))

    def _proposal_event(self, turn: Turn, proposal: Proposal, event: ProposalEvent) -> None:
        """Step a proposal, likewise."""
        state = turn.heard.get(proposal.digest)
        if state is None:
            answer = self._promises.said(proposal.digest)
            state = AgentProposal() if answer is None else AgentProposal(answer.answer, answer.until.timestamp())
        turn.heard[proposal.digest], effects = proposing.step(state, event, turn.times.now)
        turn.proposals += [(proposal, effect) for effect in effects]

    def _wake(self, turn: Turn) -> None:
        """Retry rounds whose pause is over."""
        for digest in [digest for digest, moment in self._wakes.items() if moment <= self._public_clock.ticks()]:
            del self._wakes[digest]
            waited = self._state(digest).ask is not None
            self._round_event(turn, digest, machine.Woken())
            if waited and self._state(digest).ask is None:
                log.error("the round is over, and was not answered", extra={"round_digest": digest})

    # The mail: what the coordinator says becomes events, all else is skipped.

    def _read(self, turn: Turn, mail: Sequence[Message]) -> None:
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
        # Asked and settled in one mail: nobody misses an answer, so it counts as not asked.
        last = {header.round_digest: header for header, _ in taken if header.kind in ("ask", "answered")}
        for header, body in taken:
            try:
                if header.kind == "ask" and last[header.round_digest] is header:
                    self._asked(turn, header, body)
                elif header.kind == "answered":
                    SettledBody.decode(body)
                    about = {"task_digest": header.task_digest, "round_digest": header.round_digest}
                    self._round_event(turn, header.round_digest, machine.RoundSettled())
                    turn.over.append(("round is settled, nothing is kept of it", about))
                elif header.kind == "proposal":
                    proposal = Proposal.decode(body)
                    if header.task_digest != proposal.task.digest:
                        raise WrongDigest("a proposal names another task than it holds")
                    self._proposal_event(turn, proposal, proposing.JobProposed(proposal))
                elif header.kind == "withdrawn":
                    turn.withdrawn.append(Withdrawn.decode(body).job_id)
            except LabelerError as error:
                # It was no proposal or ask, so there is nobody to answer.
                about = {"task_digest": header.task_digest, "kind": header.kind}
                log.warning("message skipped", extra=about | said(error))

    def _asked(self, turn: Turn, header: Header, body: bytes) -> None:
        turn.headers[header.round_digest] = header
        try:
            ask = Ask.decode(body)
            if (header.task_digest, header.round_digest) != (ask.task.digest, ask.round.digest):
                raise WrongDigest("an ask names another task or round than it holds")
        except LabelerError as error:
            refusal = _refusal(error, header.task_digest, header.round_digest)
            self._round_event(turn, header.round_digest, machine.Refused(refusal))
        else:
            self._round_event(turn, header.round_digest, machine.Asked(ask))

    # Before the charge: nothing of a record takes part, so a refusal may be told.

    def _admit(self, turn: Turn) -> bool:
        """Ask shard, policy and people; return True if anything was asked."""
        asked = _pop(turn.rounds, machine.Admit)
        for digest, effect in asked:
            ask: Ask = effect.ask
            try:
                self._judge(ask, is_charged=effect.is_charged)
                if not effect.is_charged:
                    computing = [one.ask for _, one in turn.rounds if isinstance(one, machine.Compute)]
                    self._public_clock.check_in_time(turn.times, ask, computing)
                fault_point("agent.asked")
            except (JournalBroken, JournalBehind):
                raise
            except Exception as error:
                # Ours or not, as for a proposal: nothing is charged, and nothing of a record took part.
                self._round_event(turn, digest, machine.Refused(_no_to(ask, error)))
            else:
                turn.asks[digest] = ask
                self._round_event(turn, digest, machine.AskAdmitted(ask))
        proposed = _pop(turn.proposals, proposing.AdmitProposal)
        for proposal, _ in proposed:
            try:
                self._judge(proposal)
            except (JournalBroken, JournalBehind):
                raise
            except Exception as error:
                # Ours or not: a proposal that cannot be judged must not end the process, at every start again.
                self._proposal_event(turn, proposal, machine.Refused(_not_willing(proposal, error)))
            else:
                self._proposal_event(turn, proposal, proposing.ProposalAdmitted(proposal))
        return bool(asked or proposed)

    def _judge(self, asked: Ask | Proposal, *, is_charged: bool = False) -> None:
        """Refuse what does not fit the shard, what the site does not allow, and what cannot be priced.

        The shard comes first, before a person is asked and the task is stored for approval: what does not fit never
        waits.
        """
        if isinstance(asked, Proposal):
            self._records.agent().check_task(asked.task, asked.sizes)
        elif not is_charged:
            self._records.agent().check(asked.task, asked.batch)
        self._admission.check(asked, is_charged=is_charged)
        for size in set(asked.sizes):
            round_charges(asked.task, size)

    def _keep(self, turn: Turn) -> bool:
        """Make durable, in one transaction, what must be before computing; return True if there was anything."""
        erased = [digest for digest, _ in _pop(turn.rounds, machine.Erase)]
        charges = self._one_for_life(_pop(turn.rounds, machine.ChargeRound))
        promises = _pop(turn.proposals, proposing.Promise)
        withdrawn, turn.withdrawn = turn.withdrawn, []
        if not (erased or charges or promises or withdrawn):
            return False
        events: list[tuple[Any, Any]] = []
        policy = None
        if charges or promises:
            try:
                policy = self._ledger.open_accounts()
            except (JournalBroken, JournalBehind):
                raise
            except LabelerError as error:
                events = _not_paid(charges, promises, error)
        try:
            with self._database.write() as connection:
                if policy is not None:
                    events = self._paid(connection, policy, charges, promises)
                asks = {digest: charge.ask for digest, charge in charges}
                for about, event in events:
                    if isinstance(event, machine.ChargeRefused | machine.Refused | proposing.NotCovered):
                        asked = about if isinstance(about, Proposal) else asks[about]
                        self._admission.note(asked, event.refusal, connection=connection)
                self._rounds.erase_in(erased, connection=connection)
                for job_id in withdrawn:
                    given_back = self._promises.withdraw(job_id, self._clock(), connection=connection)
                    log.info("proposal withdrawn", extra={"job_id": job_id, "rounds_given_back": given_back})
                self._mail.write_noted(connection)
        except (JournalBroken, JournalBehind):
            raise
        except LabelerError as error:
            # Nothing of it was stored: a full disk. Erasures and returns come again with the same mail.
            if erased or withdrawn:
                raise
            events = _not_paid(charges, promises, error)
        if erased:
            self._records.forget_models()
        for about, event in events:
            if isinstance(about, Proposal):
                self._proposal_event(turn, about, event)
            else:
                self._round_event(turn, about, event)
        if any(isinstance(event, proposing.Promised) for _, event in events):
            fault_point("agent.willing")
        if any(isinstance(event, machine.RoundCharged) for _, event in events):
            fault_point("agent.charged")
        return True

    def _paid(
        self,
        connection: Connection,
        policy: Policy,
        charges: Sequence[tuple[str, machine.ChargeRound]],
        promises: Sequence[tuple[Proposal, proposing.Promise]],
    ) -> list[tuple[Any, Any]]:
        """Charge rounds and set prices aside, each by itself: one that is refused takes none of the others with it.

        Returns:
            The results: the digest of a round, or a proposal, and the event.

        Raises:
            JournalBroken, JournalBehind: nothing may be charged any more.
        """
        events: list[tuple[Any, Any]] = []
        begun: dict[str, datetime] = {}
        for digest, charge in charges:
            try:
                with self._database.attempt(connection):
                    if self._charge(connection, policy, digest, charge.ask):
                        begun[digest] = self._ledger.kept_until(charge.ask.expires_at)
            except (JournalBroken, JournalBehind):
                raise
            except LabelerError as error:
                if isinstance(error, BudgetExceeded | ShareUsedUp):
                    task, size = charge.ask.task, len(charge.ask.batch)
                    self._ledger.decline_ask(connection, policy, digest, task, size, round_charges(task, size))
                events.append((digest, machine.ChargeRefused(_no_to(charge.ask, error))))
            else:
                events.append((digest, machine.RoundCharged(charge.ask)))
        for proposal, _ in promises:
            try:
                with self._database.attempt(connection):
                    until = self._ledger.promise_in(connection, policy, proposal)
            except (JournalBroken, JournalBehind):
                raise
            except LabelerError as error:
                if isinstance(error, BudgetExceeded | ShareUsedUp):
                    self._ledger.decline(connection, policy, proposal, error)
                no = proposing.NotCovered if isinstance(error, BudgetExceeded) else machine.Refused
                events.append((proposal, no(_not_willing(proposal, error))))
            else:
                events.append((proposal, proposing.Promised(until.timestamp())))
        self._rounds.open(begun, connection=connection)
        return events

    def _charge(self, connection: Connection, policy: Policy, digest: str, ask: Ask) -> bool:
        return self._ledger.charge_in(
            connection,
            policy,
            round_digest=digest,
            shard_version=self._records.agent().shard_version,
            charges=round_charges(ask.task, len(ask.batch)),
            task=ask.task,
            num_queries=len(ask.batch),
            recipients=machine.recipients_of(ask),
        )

    def _one_for_life(
        self, charges: Sequence[tuple[str, machine.ChargeRound]]
    ) -> list[tuple[str, machine.ChargeRound]]:
        """Return the charges to take now: of votes for life one, once no other round of them lacks its answer.

        A round's votes depend on what the rounds before it spent. So a copy of the home holds the key of at most one
        round whose spends it does not hold, and recomputes that one from the very same spends. However many rounds are
        asked at once, none is answered from other spends under the same noise.
        """
        for_life = [one for one in charges if one[1].ask.task.lifetime_budget is not None]
        if not for_life:
            return list(charges)
        states = [self._state(digest) for digest in self._rounds.unanswered_for_life()]
        before = [state for state in states if state.stage == "charged"]  # this very transaction erases the others
        now, later = ([], for_life) if before else (for_life[:1], for_life[1:])
        if all(state.doing in ("compute", "store") for state in before):
            self._waiting += later
        else:
            # Nobody knows when the other is answered: these are charged once they are asked for again.
            for digest, _ in later:
                self._states.pop(digest, None)
        return [one for one in charges if one[1].ask.task.lifetime_budget is None] + now

    # After the charge it answers or is silent: a refusal now, or its words, could depend on the records.

    def _compute(self, turn: Turn) -> bool:
        """Compute charged answers: all that are votes, then one that is trained; return True if there was any.

        A turn also computes one answer of votes for life: the next one's votes depend on what this one spends.
        """
        # A round that waited for its turn may have been settled meanwhile; it is not wanted any more.
        wanted = [one for one in _pop(turn.rounds, machine.Compute) if self._state(one[0]).doing == "compute"]
        quick: list[tuple[str, machine.Compute]] = []
        slow: list[tuple[str, machine.Compute]] = []
        for one in wanted:
            task = one[1].ask.task
            (quick if task.traits.is_quick(task) else slow).append(one)
        now = quick or slow[:1]
        self._waiting += slow if quick else slow[1:]
        if now:
            self._public_clock.plan(turn.times, [effect.ask for _, effect in now])
        for digest, effect in now:
            ask = turn.asks[digest] = effect.ask
            try:
                key, seal = self._rounds.key_of_charged(digest), partial(self._seal, ask)
                answer = self._records.agent().computed(ask.task, ask.batch, key=key, seal=seal)
                if answer.cast is not None:
                    turn.cast[digest] = answer.cast
            except (JournalBroken, JournalBehind):
                raise
            except Exception as error:
                log.error("an answer that was charged could not be made; trying again", extra=cause(error))
                self._round_event(turn, digest, machine.AnswerFailed())
            else:
                self._round_event(turn, digest, machine.Computed(answer.bodies))
        if now:
            fault_point("agent.computed")
        return bool(now)

    def _seal(self, ask: Ask, number: int, body: bytes) -> bytes:
        """Seal one share, for the tallier with this number in the ask alone."""
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

    def _store(self, turn: Turn) -> bool:
        """Store every computed answer, in one transaction; return True if there was any."""
        wanted = _pop(turn.rounds, machine.Store)
        if not wanted:
            return False
        failed: set[str] = set()
        held_s = self._public_clock.left_s(turn.times)
        leaves_at = self._clock().timestamp() + held_s
        try:
            with self._database.write() as connection:
                self._mail.write_noted(connection)
                for digest, effect in wanted:
                    try:
                        with self._database.attempt(connection):
                            if not self._rounds.store_new(
                                digest, effect.bodies, connection=connection, leaves_at=leaves_at, held_s=held_s
                            ):
                                raise PrivacyRefusal(NOT_KEPT)
                            self._spend(connection, turn, digest)
                    except PrivacyRefusal as error:
                        failed.add(digest)
                        log.error("an answer that was charged could not be kept", extra=cause(error))
        except (JournalBroken, JournalBehind):
            raise
        except Exception as error:
            # An answer stored before its witness could be told leaves once it was, and is never computed again.
            self._ledger.check_witnesses()
            # A full disk, for example: the answer is computed again under the same key, and nothing has left.
            failed = {digest for digest, _ in wanted if not self._rounds.is_stored(digest)}
            log.error("an answer that was charged could not be made; trying again", extra=cause(error))
        for digest, effect in wanted:
            if digest in failed:
                self._round_event(turn, digest, machine.AnswerFailed())
            else:
                turn.stored[digest] = effect.bodies
                self._round_event(turn, digest, machine.AnswerStored())
        if len(failed) < len(wanted):
            fault_point("agent.stored")
        return True

    def _spend(self, connection: Connection, turn: Turn, digest: str) -> None:
        """Write what an answer's votes for life spend in the transaction of the answer: both are durable, or neither.

        Raises:
            PrivacyRefusal: another round has spent meanwhile; the answer is computed again.
        """
        if turn.asks[digest].task.lifetime_budget is None:
            return
        cast = turn.cast.pop(digest, None)
        if cast is None:
            raise PrivacyRefusal("an answer with votes for life does not say what they spend")
        self._spends.add(digest, cast, connection=connection)
        self._ledger.answered_in(connection, digest, self._spends.commitment(connection=connection))

    # The letters: what belongs together is taken together.

    def _write_letters(self, turn: Turn) -> None:
        for digest, effect in turn.rounds:
            match effect:
                case machine.SendStored():
                    self._answer(turn, digest)
                case machine.RefuseAsk(refusal):
                    self._refuse(turn, digest, refusal)
        for proposal, said_to in turn.proposals:
            about = {"task_digest": proposal.task.digest, "job_id": proposal.job_id}
            match said_to:
                case proposing.SayWilling(until):
                    body = Willing(proposal.job_id, until).encode()
                    draft = Draft("willing", COORDINATOR, body, task_digest=proposal.task.digest)
                    turn.letters.append(Outgoing((draft,), "willing", about))
                case proposing.DeclineProposal(refusal):
                    body = Declined(proposal.job_id, refusal).encode()
                    draft = Draft("declined", COORDINATOR, body, task_digest=proposal.task.digest)
                    turn.letters.append(Outgoing((draft,), "", about))

    def _refuse(self, turn: Turn, digest: str, refusal: RefusalBody) -> None:
        header = turn.headers.get(digest)
        if header is not None and header.round_digest:
            about = {"task_digest": header.task_digest, "round_digest": digest}
            draft = Draft("refused", COORDINATOR, refusal.encode(), header.task_digest, digest)
            turn.letters.append(Outgoing((draft,), "", about))

    def _answer(self, turn: Turn, digest: str) -> None:
        ask = turn.asks[digest]
        bodies = turn.stored.get(digest)
        if bodies is None:
            kept = self._rounds.kept(digest)
            bodies = None if kept is None else kept.bodies
            if kept is not None:
                turn.times.not_before = max(turn.times.not_before, kept.leaves_at)
                turn.times.most_left_s = max(turn.times.most_left_s, kept.held_s)
        if bodies is None:
            # Its key was removed by hand: as if it were settled.
            self._refuse(turn, digest, RefusalBody.of(PrivacyRefusal(NOT_KEPT)))
            return
        task_digest = ask.task.digest
        shares = [
            Draft("input-share", one.tallier_id, body, task_digest=task_digest, round_digest=digest, is_sealed=True)
            for one, body in zip(ask.talliers, bodies, strict=True)
        ]
        head = self._ledger.head
        receipt = AnswerSent(head.seq, head.hash).encode()
        answered = Draft("answered", COORDINATOR, receipt, task_digest=task_digest, round_digest=digest)
        about = {"task_digest": task_digest, "round_digest": digest}
        turn.letters.append(Outgoing((*shares, answered), "answered", about))
        self._answered.append(ask)


def _pop(effects: list[tuple[Any, Any]], kind: type) -> list[tuple[Any, Any]]:
    """Remove the effects of a kind from the list and return them."""
    found = [one for one in effects if isinstance(one[1], kind)]
    effects[:] = [one for one in effects if not isinstance(one[1], kind)]
    return found


def _not_paid(
    charges: Sequence[tuple[str, machine.ChargeRound]],
    promises: Sequence[tuple[Proposal, proposing.Promise]],
    error: LabelerError,
) -> list[tuple[Any, Any]]:
    """Return refusals for all of them: nothing could be stored."""
    return [
        *((digest, machine.ChargeRefused(_no_to(charge.ask, error))) for digest, charge in charges),
        *((proposal, machine.Refused(_not_willing(proposal, error))) for proposal, _ in promises),
    ]


def _refusal(error: Exception, task_digest: str, round_digest: str) -> RefusalBody:
    """Return a refusal in the words that leave the site; the details go to its own log."""
    log.warning("refused", extra={"task_digest": task_digest, "round_digest": round_digest} | cause(error))
    return RefusalBody.of(_told(error))


def _no_to(ask: Ask, error: Exception) -> RefusalBody:
    return _refusal(error, ask.task.digest, ask.round.digest)


def _not_willing(proposal: Proposal, error: Exception) -> RefusalBody:
    """Return the refusal of a proposal, likewise."""
    refusal = RefusalBody.of(_told(error))
    about = {"task_digest": proposal.task.digest, "job_id": proposal.job_id}
    log.warning("declined" if refusal.is_final else "not yet", extra=about | cause(error))
    return refusal


def _told(error: Exception) -> LabelerError:
    """Return an error as the coordinator may see it: nothing that may depend on records, nor the budget left."""
    if isinstance(error, BudgetExceeded):
        account = f"account {error.account!r}, {error.level} level: " if error.account else ""
        return BudgetExceeded(
            f"{account}the site's budget does not cover this round; how much is left the site alone sees "
            "(labeler agent budget)"
        )
    if isinstance(error, PUBLIC_ERRORS):
        return error
    if isinstance(error, TryAgain):
        return Unavailable("this agent cannot answer now; its operator finds the reason in its log")
    return BadData("this agent cannot answer this round; its operator finds the reason in its log")
