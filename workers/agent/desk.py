"""An agent's driver: does what the agent's machine wants (labeler.rounds.agent), for all the mail of a poll at once.

    one turn   open everything -> admit -> one transaction: prices set aside, charges, erasures, numbers of messages
               -> compute every answer -> one transaction: every answer stored -> everything to be sent, in letters

So a turn costs at most two commits, however many rounds it is about. It has no network and no thread: `handle` takes
messages and returns letters, and `sent` is told when they were taken. What is in memory may be lost at any moment; only
the journal counts, and whoever begins anew has the same rounds (`DeskMemory.state`).

Training takes long, so of the answers that need it one is computed per turn, and those of votes are sent before.

A turn that computes from records is on the site's public clock (workers.agent.public_clock): what it has come to leaves
when `held_s` says, and the next poll with it, also where an answer could not be made.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from labeler.errors import (
    JournalBehind,
    JournalBroken,
    LabelerError,
    PrivacyRefusal,
)
from labeler.ledger.agent_rounds import JournalRounds
from labeler.ledger.database import Connection, Database
from labeler.ledger.lifetimes import LifetimeSpends
from labeler.ledger.promises import PromiseStore
from labeler.messages import Message
from labeler.messages.bodies import Ask
from labeler.rounds import agent as machine
from labeler.rounds import agent_proposal as proposing
from labeler.rounds.agent import NOT_KEPT, RoundEffect
from labeler.system.clock import Clock
from labeler.system.faults import fault_point
from labeler.task import Task
from workers.agent.admission import Admission
from workers.agent.desk_charges import DeskCharges
from workers.agent.desk_letters import DeskLetters, no_to_ask, not_willing
from workers.agent.desk_mail import DeskMail
from workers.agent.desk_memory import DeskMemory
from workers.agent.desk_turn import DeskTurn, OutgoingLetter, Records
from workers.agent.durable_ledger import DurableLedger
from workers.agent.public_clock import PublicClock
from workers.agent.words import cause, said
from workers.party.mail import Draft, PartyMail

log = logging.getLogger("labeler.agent")


def _is_quick(task: Task) -> bool:
    """Return whether an answer is a search; other methods train.

    Of votes for life one answer is computed per turn all the same: the next one's votes hang on what this one spends.
    """
    return task.traits.has_k and task.life is None


class AgentDesk:
    """See the module. Used by one thread.

    Args:
        coordinator_key: with which the coordinator's signatures are checked.
        ticks: seconds that only go up, for pauses; the system's where absent.
        public_clock: when turns may leave; at once where absent, in simulations alone.
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
        public_clock: PublicClock | None = None,
    ) -> None:
        self._public_clock = public_clock
        self._leaves_at = 0.0
        self._mail = mail
        self._records = records
        self._database = database
        self._rounds = rounds
        self._spends = LifetimeSpends(database)
        self._letters = DeskLetters(mail.party_id, rounds, lambda: ledger.head)
        self._promises = promises
        self._ledger = ledger
        self._admission = admission
        self._clock = clock
        self._charges = DeskCharges(database, records, rounds, promises, ledger, clock)
        self._memory = DeskMemory(rounds, promises, ticks)
        self._incoming = DeskMail(mail, coordinator_key, self._memory)
        self._waiting: list[tuple[str, RoundEffect]] = []
        self._sending: list[OutgoingLetter] = []

    @property
    def due_in_s(self) -> float | None:
        """After how many seconds `handle` wants to be called also without mail; None where it need not be.

        The coordinator reads it off the next poll, so it follows from public things: from asks whose answers are
        trained, one a turn. An answer that could not be made is tried again at the first turn after its pause, and
        no poll is shorter for it: that an attempt failed, and when, may depend on the records.
        """
        return 0.0 if self._waiting else None

    def held_s(self) -> float:
        """After how many seconds what `handle` has come to may leave, and the next poll with it; 0 for at once."""
        return 0.0 if self._public_clock is None else max(0.0, self._leaves_at - self._public_clock.ticks())

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
        now, clock = self._clock().timestamp(), self._public_clock
        turn = DeskTurn(now) if clock is None else clock.begin(now)
        try:
            with self._in_step_with_the_journal():
                self._tidy()
                return self._handle(turn, mail)
        finally:
            self._leaves_at = 0.0 if clock is None else clock.leaves_at(turn, self._clock().timestamp())

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
            self._memory.clear()
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
        turn = DeskTurn(now.timestamp())
        for round_digest in over:
            self._memory.round_event(turn, round_digest, machine.Expired())
        self._keep(turn)
        for round_digest in over:
            log.info("round is over, nothing is kept of it", extra={"round_digest": round_digest})

    def _handle(self, turn: DeskTurn, mail: Sequence[Message]) -> list[tuple[Draft, ...]]:
        self._ledger.check_witnesses()
        turn.rounds, self._waiting = self._waiting, []
        self._memory.wake(turn)
        if mail:
            with self._database.read() as self._memory.reader:
                self._incoming.read(turn, mail)
            self._memory.reader = None
        while turn.rounds or turn.proposals or turn.withdrawn:
            if self._admit(turn) or self._keep(turn) or self._compute(turn) or self._store(turn):
                continue
            break
        for what, about in turn.over:
            log.info(what, extra=about)
        self._letters.send(turn)
        self._sending = turn.letters
        return [letter.drafts for letter in turn.letters]

    def _admit(self, turn: DeskTurn) -> bool:
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
                if self._public_clock is not None and not effect.is_charged:
                    computing = [one.ask for _, one in turn.rounds if isinstance(one, machine.Compute)]
                    self._public_clock.check_in_time(turn, ask, computing)
                fault_point("agent.asked")
            except (JournalBroken, JournalBehind):
                raise
            except Exception as error:
                # Ours or not, as for a proposal: nothing is charged, and nothing of a record took part.
                self._memory.round_event(turn, digest, machine.Refused(no_to_ask(ask, error)))
            else:
                turn.asks[digest] = ask
                self._memory.round_event(turn, digest, machine.Admitted(ask))
        proposed = turn.pop_proposals(proposing.AdmitProposal)
        for proposal, _ in proposed:
            try:
                self._records.agent().check_task(proposal.task, proposal.sizes)
                self._admission.check(proposal)
                self._ledger.check_price(proposal.task, proposal.sizes)
            except (JournalBroken, JournalBehind):
                raise
            except Exception as error:
                # Ours or not: a proposal that cannot be judged must not end the process, and again at every start.
                self._memory.proposal_event(turn, proposal, machine.Refused(not_willing(proposal, error)))
            else:
                self._memory.proposal_event(turn, proposal, proposing.ProposalAdmitted(proposal))
        return bool(asked or proposed)

    def _keep(self, turn: DeskTurn) -> bool:
        """Everything that is durable before anything is computed, in one transaction; whether there was anything."""
        erased = [digest for digest, _ in turn.pop(machine.Erase)]
        charges = self._one_for_life(turn.pop(machine.Charge))
        promises = turn.pop_proposals(proposing.Promise)
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
                events = self._charges.not_paid(charges, promises, error)
        try:
            with self._database.write() as connection:
                if policy is not None:
                    events = self._charges.paid(connection, policy, charges, promises)
                self._charges.given_back(connection, erased, withdrawn)
                self._mail.write_noted(connection)
        except (JournalBroken, JournalBehind):
            raise
        except LabelerError as error:
            # Nothing of it was kept: a full disk. What was to be erased or given back comes again with the same mail.
            if erased or withdrawn:
                raise
            events = self._charges.not_paid(charges, promises, error)
        if erased:
            self._records.forget_models()
        has_charged = has_promised = False
        for kind, about, event in events:
            has_charged |= isinstance(event, machine.Charged)
            has_promised |= isinstance(event, proposing.Promised)
            if kind == "round":
                self._memory.round_event(turn, about, event)
            else:
                self._memory.proposal_event(turn, about, event)
        if has_promised:
            fault_point("agent.willing")
        if has_charged:
            fault_point("agent.charged")
        return True

    def _one_for_life(self, charges: Sequence[tuple[str, machine.Charge]]) -> list[tuple[str, machine.Charge]]:
        """Those that are charged now: of votes for life one, once no other round of them lacks its answer.

        What a round votes hangs on what those before it spent. So a copy of the home holds the key of at most one
        round whose spends it does not hold, and computes that one anew from the very same spends: however many rounds
        are asked at once, none is answered from other spends under the same noise.
        """
        for_life = [one for one in charges if one[1].ask.task.life is not None]
        if not for_life:
            return list(charges)
        states = [self._memory.state(digest) for digest in self._ledger.unanswered_for_life()]
        before = [state for state in states if state.stage == "charged"]  # others are erased in this very transaction
        now, later = ([], for_life) if before else (for_life[:1], for_life[1:])
        if all(state.doing in ("compute", "store") for state in before):
            self._waiting += later
        else:
            # Nobody knows when the other is answered: these are charged once they are asked for again.
            for digest, _ in later:
                self._memory.forget(digest)
        return [one for one in charges if one[1].ask.task.life is None] + now

    def _compute(self, turn: DeskTurn) -> bool:
        """Answers that are charged: all that are votes, then one that is trained; whether there was any."""
        # Settled meanwhile, one that had waited for its turn is not wanted any more.
        wanted = [one for one in turn.pop(machine.Compute) if self._memory.state(one[0]).doing == "compute"]
        quick = [one for one in wanted if _is_quick(one[1].ask.task)]
        slow = [one for one in wanted if not _is_quick(one[1].ask.task)]
        now = quick or slow[:1]
        later = slow if quick else slow[1:]
        self._waiting += later
        if now and self._public_clock is not None:
            self._public_clock.plan(turn, [effect.ask for _, effect in now])
        for digest, effect in now:
            ask = turn.asks[digest] = effect.ask
            try:
                key, seal = self._rounds.key_of_charged(digest), partial(self._letters.seal, ask)
                answer = self._records.agent().computed(ask.task, ask.batch, key=key, seal=seal)
                if answer.cast is not None:
                    turn.cast[digest] = answer.cast
            except (JournalBroken, JournalBehind):
                raise
            except Exception as error:
                # From here on it answers or is silent: a refusal now, or its words, could depend on the records.
                log.error("an answer that was charged could not be made; trying again", extra=cause(error))
                self._memory.round_event(turn, digest, machine.Failed())
            else:
                self._memory.round_event(turn, digest, machine.Computed(answer.bodies))
        if now:
            fault_point("agent.computed")
        return bool(now)

    def _spend(self, connection: Connection, turn: DeskTurn, digest: str) -> None:
        """What an answer's votes for life spend is durable with the answer, or neither is.

        Raises:
            PrivacyRefusal: another round has spent meanwhile; the answer is computed again.
        """
        if turn.asks[digest].task.life is None:
            return
        cast = turn.cast.pop(digest, None)
        if cast is None:
            raise PrivacyRefusal("an answer with votes for life does not say what they spend")
        self._spends.add(digest, cast, connection=connection)
        self._ledger.answered_in(connection, digest, self._spends.commitment(connection=connection))

    def _store(self, turn: DeskTurn) -> bool:
        """Keep every answer that was computed, in one transaction; whether there was any."""
        wanted = turn.pop(machine.Store)
        if not wanted:
            return False
        failed: set[str] = set()
        clock, leaves_at, held_s = self._public_clock, 0.0, 0.0
        if clock is not None:
            held_s = clock.left_s(turn)
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
            # What was stored before its witness could be told leaves once it was, and is never computed again.
            self._ledger.check_witnesses()
            # A full disk, for example: it is computed again under the same key, and nothing has left.
            failed = {digest for digest, _ in wanted if not self._rounds.is_stored(digest)}
            log.error("an answer that was charged could not be made; trying again", extra=cause(error))
        for digest, effect in wanted:
            if digest in failed:
                self._memory.round_event(turn, digest, machine.Failed())
            else:
                turn.stored[digest] = effect.bodies
                self._memory.round_event(turn, digest, machine.Stored())
        if len(failed) < len(wanted):
            fault_point("agent.stored")
        return True
