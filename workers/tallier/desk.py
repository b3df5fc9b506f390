"""A tallier's driver: does what its machine wants (labeler.rounds.tallier), for all the mail of a poll at once.

    one turn   open everything -> take shares, add up what is asked for
               -> one transaction: rounds, shares, sums, numbers of messages
               -> sums, then what is held of each round they touched, in letters

So a turn costs one commit, however many shares it brings. It has no network: `handle` takes messages and returns
letters, and `sent` is told when they were taken. What is in memory may be lost at any moment; only the journal counts.
Winners are found beside it (workers.tallier.winners); rounds in memory are `DeskMemory`'s.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from labeler.errors import (
    Forged,
    InvalidSetting,
    LabelerError,
    NotEnrolled,
    PrivacyRefusal,
    ProtocolViolation,
    QuorumNotReached,
    Replayed,
    Unavailable,
    WrongDigest,
)
from labeler.ledger.tallier_memory import KeptShare
from labeler.messages import COORDINATOR, SEALED_KINDS, Kind, Message
from labeler.messages.bodies import (
    OpenRound,
    Refusal,
    SumRequest,
    aggregate_from_bytes,
    aggregate_to_bytes,
    holdings_to_bytes,
    share_from_bytes,
    share_to_bytes,
    winner_to_bytes,
)
from labeler.noise import noise_source
from labeler.rounds import tallier as machine
from labeler.rounds.tallier import Came, TallierEvent, TallierRound
from labeler.sharing import Winner
from labeler.system.clock import Clock
from labeler.system.faults import fault_point
from labeler.tally import add_shares, misfit_of
from workers.agent.words import said
from workers.party.mail import Draft, PartyMail
from workers.tallier.desk_memory import DeskMemory, Share
from workers.tallier.journal import TallierJournal
from workers.tallier.winners import WinnerDesk, refusal_of

log = logging.getLogger("labeler.tallier")

COMPUTING_POLL_S: Final = 0.5
"""How often a tallier looks for mail while it computes winners: it waits for those, not at the coordinator's door."""


@dataclass(frozen=True)
class _Letter:
    """One message, and what the log says once it is taken."""

    draft: Draft
    taken: str


@dataclass
class _Turn:
    """What one turn has come to: what is to be durable, then what is to be sent."""

    now: float
    pending: dict[str, list[tuple[Came, Share, Message]]] = field(default_factory=dict)
    opened: dict[str, OpenRound] = field(default_factory=dict)
    held: dict[tuple[str, str], KeptShare] = field(default_factory=dict)
    excluded: list[tuple[str, str]] = field(default_factory=list)
    summed: dict[str, tuple[frozenset[str], frozenset[str], bytes]] = field(default_factory=dict)
    sums: dict[str, None] = field(default_factory=dict)
    winners: list[str] = field(default_factory=list)
    touched: dict[str, None] = field(default_factory=dict)
    letters: list[_Letter] = field(default_factory=list)


class TallierDesk:
    """See the module. Used by one thread.

    Args:
        coordinator_key: with which the coordinator's signatures are checked.
        coordinator_seal_key: to which sums are sealed.
        agents: id and verify key of the agents that the site knows; None where it names none.
        winners: finds winners with the two other talliers.
    """

    def __init__(
        self,
        mail: PartyMail,
        *,
        coordinator_key: str,
        coordinator_seal_key: str,
        agents: Mapping[str, str] | None,
        journal: TallierJournal,
        winners: WinnerDesk,
        clock: Clock,
    ) -> None:
        self._mail = mail
        self._coordinator_key = coordinator_key
        self._coordinator_seal_key = coordinator_seal_key
        self._journal = journal
        self._memory = journal.memory
        self._winners = winners
        self._clock = clock
        self._known = DeskMemory(journal.memory, agents)
        self._sending: list[_Letter] = []

    @property
    def due_in_s(self) -> float | None:
        """At once while winners are computed, else never."""
        return 0.0 if self._winners.is_busy else None

    def handle(self, mail: Sequence[Message]) -> list[tuple[Draft, ...]]:
        """Have the effect of every message, durably; what is to be sent, each message by itself.

        Raises:
            LabelerError: the journal cannot be used now, or not any more; the same mail may come again.
        """
        if self._winners.is_busy and not mail:
            self._winners.wait(COMPUTING_POLL_S)
        self.tidy()
        try:
            return self._handle(mail)
        except BaseException:
            # What is in memory may be ahead of the journal.
            self._known.clear()
            self._mail.drop()
            raise

    def sent(self, errors: Sequence[LabelerError | None]) -> None:
        """The letters of the last turn were taken by the coordinator, or refused, each with its error."""
        has_reported = False
        for letter, error in zip(self._sending, errors, strict=True):
            about = {"task_digest": letter.draft.task_digest, "round_digest": letter.draft.round_digest}
            if error is None:
                log.info(letter.taken, extra=about)
                has_reported |= letter.draft.kind == "holdings"
            else:
                # The round is over for the coordinator; there is nobody to tell.
                log.info("report not taken", extra=about | said(error))
        self._sending = []
        if has_reported:
            fault_point("tallier.reported")
        self._mail.note()

    def tidy(self) -> None:
        """Delete what is not needed any more: single shares at once, sums after a week, keys that open nothing."""
        self._memory.tidy()
        over = self._known.expire(self._clock().timestamp())
        if not over:
            return
        try:
            with self._journal.database.write() as connection:
                for digest, _ in over:
                    self._memory.forget(digest, connection=connection)
        except BaseException:
            self._known.clear()
            raise
        for digest, is_summed in over:
            self._known.drop(digest)
            log.info("round expired", extra={"round_digest": digest, "summed": is_summed})

    # One turn.

    def _handle(self, mail: Sequence[Message]) -> list[tuple[Draft, ...]]:
        turn = _Turn(self._clock().timestamp())
        for message in mail:
            digest = message.header.round_digest
            try:
                self._take(turn, message)
            except Replayed:
                continue
            except (ProtocolViolation, PrivacyRefusal, QuorumNotReached, InvalidSetting) as error:
                _refused(message.message_id, digest, error)
                if not isinstance(error, Forged):
                    turn.touched[digest] = None
        for digest in list(turn.pending):
            self._flush(turn, digest)
        self._keep(turn)
        self._send(turn)
        self._sending = turn.letters
        return [(letter.draft,) for letter in turn.letters]

    def _take(self, turn: _Turn, message: Message) -> None:
        header = message.header
        state = self._known.state(header.round_digest)
        body = self._mail.open(message, self._key_of(message, state))
        if header.kind == "open-round":
            try:
                opening = OpenRound.decode(body)
                if (header.task_digest, header.round_digest) != (opening.round.task_digest, opening.round.digest):
                    raise WrongDigest("an open-round names another task or round than it holds")
            except LabelerError as error:
                if state.stage == "unknown":
                    self._decline(turn, message, error, is_final=True)
                raise
            self._event(turn, message, state, machine.Opened(opening, self._known.site()))
            return
        if state.opening is not None and header.task_digest != state.opening.round.task_digest:
            raise WrongDigest("a message names another task than its round is of")
        if header.kind == "input-share":
            if state.opening is None or state.stage not in ("open", "fixed"):
                raise WrongDigest("this tallier knows no such round, or it has expired")
            self._share(turn, message, body, state.opening)
            return
        self._flush(turn, header.round_digest)
        state = self._known.state(header.round_digest)
        self._event(turn, message, state, machine.SumAsked(SumRequest.decode(body), self._known.site()))

    def _decline(self, turn: _Turn, message: Message, error: LabelerError, *, is_final: bool) -> None:
        body = replace(Refusal.of(error), is_final=is_final).encode()
        # The task and round that were asked about: nothing else may be known of them here.
        draft = Draft("refused", COORDINATOR, body, message.header.task_digest, message.header.round_digest)
        turn.letters.append(_Letter(draft, "final refusal sent" if is_final else "refusal sent"))

    def _key_of(self, message: Message, state: TallierRound) -> str:
        """The key a message must be signed with, by what it claims to be."""
        header = message.header
        if header.kind in ("open-round", "sum") and header.sender == COORDINATOR:
            return self._coordinator_key
        if header.kind != "input-share":
            raise ProtocolViolation(f"a tallier takes no message of kind {header.kind!r} from {header.sender!r}")
        if state.opening is None or state.stage not in ("open", "fixed"):
            raise WrongDigest("a share came for a round that is not open here; the agent is asked again")
        key = state.opening.participants.get(header.sender)
        if key is None:
            raise NotEnrolled(f"agent {header.sender!r} takes no part in this round")
        return key

    def _share(self, turn: _Turn, message: Message, body: bytes, opening: OpenRound) -> None:
        round, agent = opening.round, message.header.sender
        share = share_from_bytes(body, max_entries=round.num_queries * round.num_classes, terms=round.terms)
        # With noise from a known seed the round would be void once it is paid for; this agent alone is refused instead.
        misfit = "says that its noise came from a known seed" if share.is_seeded else misfit_of(share, round)
        came = Came(agent, share.sharing_id, share.fingerprint(), misfit)
        fault_point("tallier.received")
        turn.pending.setdefault(round.digest, []).append((came, share, message))

    def _flush(self, turn: _Turn, digest: str) -> None:
        """Take the shares of a round that came since the last look at it."""
        waiting = turn.pending.pop(digest, None)
        if waiting is None:
            return
        state = self._known.state(digest)
        after, effects = machine.step(state, machine.SharesCame(tuple(came for came, _, _ in waiting)), turn.now)
        self._known.remember(after)
        for effect in effects:
            match effect:
                case machine.Hold(agent, place):
                    came, share, _ = waiting[place]
                    self._known.hold(digest, agent, share)
                    turn.held[digest, agent] = KeptShare(share_to_bytes(share), came.sharing_id, came.fingerprint)
                case machine.Exclude(agent):
                    self._known.let_go(digest, agent)
                    turn.held.pop((digest, agent), None)
                    turn.excluded.append((digest, agent))
                case machine.Refuse(error):
                    _refused(waiting[-1][2].message_id, digest, error)
                case _:
                    turn.touched[digest] = None

    def _event(self, turn: _Turn, message: Message, state: TallierRound, event: TallierEvent) -> None:
        digest = state.round_digest
        after, effects = machine.step(state, event, turn.now)
        self._known.remember(after)
        for effect in effects:
            match effect:
                case machine.Keep(opening):
                    turn.opened[digest] = opening
                case machine.Add(contributors):
                    self._event(turn, message, after, self._add(turn, after, contributors))
                case machine.SendSum():
                    turn.sums[digest] = None
                case machine.FindWinners():
                    turn.winners.append(digest)
                case machine.Report():
                    turn.touched[digest] = None
                case machine.Refuse(error):
                    _refused(message.message_id, digest, error)
                case machine.Decline(error, is_final):
                    _refused(message.message_id, digest, error)
                    self._decline(turn, message, error, is_final=is_final)
                case _:
                    pass  # a sum that is to be fixed is in the turn already

    def _add(self, turn: _Turn, state: TallierRound, contributors: frozenset[str]) -> machine.Added:
        opening, digest = state.opening, state.round_digest
        if opening is None:
            raise ProtocolViolation("a round that is unknown is not summed")
        held = self._known.take_shares(digest)
        try:
            noise = None
            if opening.round.tallier_sigma_grid is not None:
                # A function of what is durable: killed before the sum is, this tallier draws the same again.
                key = self._memory.noise_key(digest)
                noise = noise_source(key, digest, contributors, is_seeded=False)
            shares = {agent: held[agent] for agent in contributors}
            aggregate = add_shares(opening.tallier, opening.round, shares, noise=noise)
        except LabelerError:
            self._known.clear()  # which says already that it was summed
            raise
        others = frozenset(held) - contributors
        turn.summed[digest] = (contributors, others, aggregate_to_bytes(aggregate))
        return machine.Added()

    def _keep(self, turn: _Turn) -> None:
        """Everything that is to be durable before anything is said, in one transaction."""
        if not (turn.opened or turn.held or turn.excluded or turn.summed):
            return
        with self._journal.database.write() as connection:
            self._mail.write_noted(connection)
            self._memory.keep_open(turn.opened, turn.held, connection=connection)
            for digest, agent in turn.excluded:
                self._memory.exclude(digest, agent, connection=connection)
            self._journal.fix(turn.summed, connection=connection)
        if turn.held:
            fault_point("tallier.stored")
        if turn.summed:
            fault_point("tallier.fixed")

    # What is said.

    def _send(self, turn: _Turn) -> None:
        for digest in turn.sums:
            fault_point("tallier.summed")
            self._letter(turn, digest, "aggregate-share", self._sum(turn, digest), "sum sent")
        if turn.winners:
            fault_point("tallier.summed")
            for digest in turn.winners:
                self._ask_for_winners(turn, digest)
            self._winners.begin()
        for digest in turn.touched:
            state = self._known.state(digest)
            if state.stage in ("open", "fixed"):
                self._letter(turn, digest, "holdings", holdings_to_bytes(state.sharing_ids), "holdings sent")
        self._tend_winners(turn)

    def _sum(self, turn: _Turn, digest: str) -> bytes:
        if digest in turn.summed:
            return turn.summed[digest][2]
        aggregate = self._memory.load(digest).aggregate
        if aggregate is None:
            raise Unavailable("the sum of a round that was fixed is gone; start the tallier again")
        return aggregate

    def _ask_for_winners(self, turn: _Turn, digest: str) -> None:
        opening = self._known.state(digest).opening
        if opening is None:
            return
        try:
            if self._winners.ask(opening, aggregate_from_bytes(self._sum(turn, digest))):
                log.info("winners being computed", extra={"round_digest": digest})
        except (Unavailable, ProtocolViolation, InvalidSetting) as error:
            log.warning("winners cannot be computed", extra={"round_digest": digest} | said(error))
            self._letter(turn, digest, "refused", refusal_of(error).encode(), "refusal sent")

    def _tend_winners(self, turn: _Turn) -> None:
        """Send what was computed."""
        for outcome in self._winners.take():
            opening = outcome.opening
            if isinstance(outcome.answer, Winner):
                fault_point("tallier.computed")
                draft = self._draft(opening, "winner", winner_to_bytes(outcome.answer))
                turn.letters.append(_Letter(draft, "winners sent"))
                continue
            told = {"problem": outcome.answer.reason, "sentence": outcome.answer.sentence}
            log.warning("winners could not be computed", extra={"round_digest": opening.round.digest} | told)
            turn.letters.append(_Letter(self._draft(opening, "refused", outcome.answer.encode()), "refusal sent"))

    def _letter(self, turn: _Turn, digest: str, kind: Kind, body: bytes, taken: str) -> None:
        opening = self._known.state(digest).opening
        if opening is not None:
            turn.letters.append(_Letter(self._draft(opening, kind, body), taken))

    def _draft(self, opening: OpenRound, kind: Kind, body: bytes) -> Draft:
        return Draft(
            kind,
            COORDINATOR,
            body,
            task_digest=opening.round.task_digest,
            round_digest=opening.round.digest,
            seal_to=self._coordinator_seal_key if kind in SEALED_KINDS else None,
        )


def _refused(message_id: str, round_digest: str, error: LabelerError) -> None:
    log.warning("message refused", extra={"message_id": message_id, "round_digest": round_digest} | said(error))
