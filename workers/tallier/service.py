"""The tallier process: keeps its share of every ballot of a round, and adds them up once, when the round is paid for.

Its machine (labeler.rounds.tallier) decides what it does about a round and in which order; `workers.tallier.rounds`
steps it. The driver here does so for all the mail of a poll at once:

    one turn   open everything -> take shares, add up what is asked for
               -> one transaction: rounds, shares, sums, numbers of messages
               -> letters: the sums, then what is held of each round they touched.

So a turn costs one commit, however many shares it brings. The driver has no network: `handle` takes messages and
returns letters, and `sent` hears their fate. Memory may be lost at any moment; only the journal counts. A
second thread finds winners (workers.tallier.winners).

Everything is durable before it is said, and encrypted under a key that no backup holds. After the sum, single shares
are deleted from every file of the journal and their key is erased. A round that expired without a sum is erased too. A
tallier answers for only one set of agents per round, permanently, after any request and any crash: two sums over
different agents would differ by single ballots.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
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
from labeler.ledger.backup import mark_home
from labeler.ledger.database import Connection, Database
from labeler.ledger.ledger import Charge, Ledger
from labeler.ledger.tallier_memory import KeptShare, TallierMemory
from labeler.messages import COORDINATOR, SEALED_KINDS, Kind, Message
from labeler.messages.bodies import (
    OpenRound,
    RefusalBody,
    SumRequest,
    aggregate_from_bytes,
    aggregate_to_bytes,
    holdings_to_bytes,
    share_from_bytes,
    share_to_bytes,
    winner_to_bytes,
)
from labeler.rounds import tallier as machine
from labeler.rounds.tallier import TallierEffect, TallierEvent, TallierRound
from labeler.sharing import Winner
from labeler.system.clock import Clock, now_utc
from labeler.system.erasable import ErasableKeys
from labeler.system.faults import fault_point
from labeler.system.keys import PartyKeys
from workers.party.coordinator import CoordinatorDoor
from workers.party.home import KEYS_FILE, path_in_home, read_tallier_config
from workers.party.link import Draft, Outgoing, PartyLink, PartyMail, converse, log_fates, open_journal, said
from workers.tallier.peers import WinnerGroup, read_group
from workers.tallier.rounds import Changes, Share, TallierRounds
from workers.tallier.winners import WinnerRounds, refusal_of
from workers.winner.session import SecureEngine

log = logging.getLogger("labeler.tallier")

COMPUTING_POLL_S: Final = 0.5
"""Seconds between polls while a tallier computes winners: it waits for those, not for the coordinator's answer."""


@dataclass
class _Turn:
    """The results of one turn: shares to take, then letters to send."""

    now: float
    pending: dict[str, list[tuple[str, Share, Message]]] = field(default_factory=dict)
    summed: dict[str, bytes] = field(default_factory=dict, repr=False)
    sums: dict[str, None] = field(default_factory=dict)
    winners: list[str] = field(default_factory=list)
    touched: dict[str, None] = field(default_factory=dict)
    letters: list[Outgoing] = field(default_factory=list)

    def send(self, draft: Draft, taken: str) -> None:
        """Send a message by itself."""
        about = {"task_digest": draft.task_digest, "round_digest": draft.round_digest}
        self.letters.append(Outgoing((draft,), taken, about))


SUMS = "rounds-summed"
"""The account in a tallier's ledger that counts sums."""


class TallierJournal:
    """A tallier's memory, with an entry in the ledger's chain for every sum.

    A journal that was replaced by an older copy would have forgotten which rounds were summed, and would sum them over
    other agents. A file remembers the end of the chain, and every poll reports it to the coordinator, so such a copy is
    found out. The entries are a count of rounds, not a price.
    """

    def __init__(self, database: Database, keys: ErasableKeys, ledger: Ledger) -> None:
        self.memory = TallierMemory(database, keys)
        self.database = database
        self._ledger = ledger
        ledger.open_account(SUMS, "agent", None)

    def sweep(self) -> list[str]:
        """See TallierMemory.sweep; to be called at the start of a process."""
        lost = self.memory.sweep()
        self.database.forget_log()
        return lost

    def fix(
        self, summed: Mapping[str, tuple[Collection[str], Collection[str], bytes]], *, connection: Connection
    ) -> None:
        """Fix the agents and the sums of rounds (TallierMemory.fix_open), with entries in the chain."""
        self.memory.fix_open(summed, connection=connection)
        for round_digest in summed:
            self._ledger.reserve(round_digest, [Charge(SUMS, "agent", 1)], connection=connection)
            self._ledger.post(round_digest, connection=connection)


class TallierDriver:
    """The driver of a tallier; see the module. Used by one thread.

    Args:
        coordinator_key: checks the coordinator's signatures.
        coordinator_seal_key: sums are sealed to it.
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
        winners: WinnerRounds,
        clock: Clock,
    ) -> None:
        self._mail = mail
        self._coordinator_key = coordinator_key
        self._coordinator_seal_key = coordinator_seal_key
        self._journal = journal
        self._memory = journal.memory
        self._winners = winners
        self._clock = clock
        self._rounds = TallierRounds(noise_key=journal.memory.noise_key, agents=agents, journal=journal.memory)

    @property
    def due_in_s(self) -> float | None:
        """At once while winners are computed, else never."""
        return 0.0 if self._winners.is_busy else None

    def handle(self, mail: Sequence[Message]) -> list[Outgoing]:
        """Apply every message durably; return what is to be sent, each message by itself.

        Raises:
            LabelerError: the journal cannot be used now, or no longer; the same mail may come again.
        """
        if self._winners.is_busy and not mail:
            self._winners.wait(COMPUTING_POLL_S)
        self.tidy()
        try:
            return self._handle(mail)
        except BaseException:
            # Memory may be ahead of the journal.
            self._rounds.clear()
            self._mail.drop()
            raise

    def sent(self, letters: Sequence[Outgoing], errors: Sequence[LabelerError | None]) -> None:
        """See Handler."""
        if "holdings" in log_fates(log, letters, errors, refused="report not taken"):
            fault_point("tallier.reported")
        self._mail.note()

    def tidy(self) -> None:
        """Delete what is no longer needed: single shares at once, sums after a week, keys that open nothing."""
        self._memory.tidy()
        over = self._rounds.expire(self._clock().timestamp())
        if not over:
            return
        try:
            with self._journal.database.write() as connection:
                for digest, _ in over:
                    self._memory.forget(digest, connection=connection)
        except BaseException:
            self._rounds.clear()
            raise
        for digest, is_summed in over:
            self._rounds.drop(digest)
            log.info("round expired", extra={"round_digest": digest, "summed": is_summed})

    # One turn.

    def _handle(self, mail: Sequence[Message]) -> list[Outgoing]:
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
        return turn.letters

    def _take(self, turn: _Turn, message: Message) -> None:
        header = message.header
        state = self._rounds.state(header.round_digest)
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
            self._step(turn, message, machine.OpeningCame(opening, self._rounds.site()))
            return
        if state.opening is not None and header.task_digest != state.opening.round.task_digest:
            raise WrongDigest("a message names another task than its round is of")
        if header.kind == "input-share":
            if state.opening is None or state.stage not in ("open", "fixed"):
                raise WrongDigest("this tallier knows no such round, or it has expired")
            round = state.opening.round
            share = share_from_bytes(body, max_entries=round.num_queries * round.num_classes, terms=round.terms)
            fault_point("tallier.received")
            turn.pending.setdefault(round.digest, []).append((header.sender, share, message))
            return
        self._flush(turn, header.round_digest)
        self._step(turn, message, machine.SumAsked(SumRequest.decode(body), self._rounds.site()))

    def _step(self, turn: _Turn, message: Message, event: TallierEvent) -> None:
        self._note(turn, message, self._rounds.step(message.header.round_digest, event, turn.now))

    def _decline(self, turn: _Turn, message: Message, error: LabelerError, *, is_final: bool) -> None:
        body = replace(RefusalBody.of(error), is_final=is_final).encode()
        # The message's own task and round: this tallier may know no others.
        draft = Draft("refused", COORDINATOR, body, message.header.task_digest, message.header.round_digest)
        turn.send(draft, "final refusal sent" if is_final else "refusal sent")

    def _key_of(self, message: Message, state: TallierRound) -> str:
        """Return the key that must have signed a message, by what it claims to be."""
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

    def _flush(self, turn: _Turn, digest: str) -> None:
        """Take the shares of a round that came since its last step."""
        waiting = turn.pending.pop(digest, None)
        if waiting is not None:
            told = self._rounds.take(digest, [(agent, share) for agent, share, _ in waiting], turn.now)
            self._note(turn, waiting[-1][2], told)

    def _note(self, turn: _Turn, message: Message, told: Sequence[TallierEffect]) -> None:
        """Queue what is to be said of a message's round once its effects are durable."""
        digest = message.header.round_digest
        for effect in told:
            match effect:
                case machine.SendSum():
                    turn.sums[digest] = None
                case machine.FindWinners():
                    turn.winners.append(digest)
                case machine.Report():
                    turn.touched[digest] = None
                case machine.RefuseEvent(error):
                    _refused(message.message_id, digest, error)
                case machine.DeclineRequest(error, is_final):
                    _refused(message.message_id, digest, error)
                    self._decline(turn, message, error, is_final=is_final)

    def _keep(self, turn: _Turn) -> None:
        """Make everything durable that must be before anything is said, in one transaction."""
        changes = self._rounds.changes
        if not changes:
            return
        held = {
            (digest, agent): KeptShare(
                share_to_bytes(share), share.sharing_id, self._rounds.state(digest).fingerprints[agent]
            )
            for (digest, agent), share in changes.held.items()
        }
        turn.summed = {digest: aggregate_to_bytes(sum_) for digest, (_, _, sum_) in changes.summed.items()}
        with self._journal.database.write() as connection:
            self._mail.write_noted(connection)
            self._memory.keep_open(changes.opened, held, connection=connection)
            for digest, agent in changes.excluded:
                self._memory.exclude(digest, agent, connection=connection)
            self._journal.fix(
                {
                    digest: (contributors, others, turn.summed[digest])
                    for digest, (contributors, others, _) in changes.summed.items()
                },
                connection=connection,
            )
        self._rounds.changes = Changes()
        if held:
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
            state = self._rounds.state(digest)
            if state.stage in ("open", "fixed"):
                self._letter(turn, digest, "holdings", holdings_to_bytes(state.sharing_ids), "holdings sent")
        self._tend_winners(turn)

    def _sum(self, turn: _Turn, digest: str) -> bytes:
        if digest in turn.summed:
            return turn.summed[digest]
        aggregate = self._memory.load(digest).aggregate
        if aggregate is None:
            raise Unavailable("the sum of a round that was fixed is gone; start the tallier again")
        return aggregate

    def _ask_for_winners(self, turn: _Turn, digest: str) -> None:
        opening = self._rounds.state(digest).opening
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
        for opening, answer in self._winners.take():
            if isinstance(answer, Winner):
                fault_point("tallier.computed")
                turn.send(self._draft(opening, "winner", winner_to_bytes(answer)), "winners sent")
                continue
            told = {"problem": answer.reason, "sentence": answer.sentence}
            log.warning("winners could not be computed", extra={"round_digest": opening.round.digest} | told)
            turn.send(self._draft(opening, "refused", answer.encode()), "refusal sent")

    def _letter(self, turn: _Turn, digest: str, kind: Kind, body: bytes, taken: str) -> None:
        opening = self._rounds.state(digest).opening
        if opening is not None:
            turn.send(self._draft(opening, kind, body), taken)

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


def run_tallier(home: Path, *, stop: threading.Event, clock: Clock | None = None, wait_s: float = 20.0) -> None:
    """Serve as a tallier until told to stop.

    Args:
        stop: ends it within a moment; nothing is lost.
        wait_s: how long the coordinator may hold a poll.

    Raises:
        LabelerError: the home or the journal cannot be used.
    """
    with open_tallier(home, stop=stop, clock=clock or now_utc, wait_s=wait_s) as (link, driver):
        log.info("tallier ready", extra={"tallier": link.party_id})
        converse(link, driver, stop)
        link.mail.settle()
    log.info("tallier stopped", extra={"tallier": link.party_id})


@contextmanager
def open_tallier(
    home: Path,
    *,
    stop: threading.Event,
    clock: Clock,
    wait_s: float,
    door: CoordinatorDoor | None = None,
    winners_of: Callable[[WinnerGroup | None, PartyKeys], WinnerRounds] | None = None,
    allow_unsynced: bool = False,
) -> Iterator[tuple[PartyLink, TallierDriver]]:
    """Make a tallier from its home: its link and its driver.

    The optional parts are for simulations.

    Args:
        stop, wait_s: see `run_tallier`.
        door: see PartyLink.
        winners_of: makes what finds winners with the two other talliers.
        allow_unsynced: see `open_database`.
    """
    config = read_tallier_config(home)
    with open_journal(home, clock=clock, allow_unsynced=allow_unsynced) as (database, ledger, erasable):
        journal = TallierJournal(database, erasable, ledger)
        mark_home(database, erasable)
        for round_digest in journal.sweep():
            log.warning("round given up: the key of what was held is gone", extra={"round_digest": round_digest})
        keys = PartyKeys.load(home / KEYS_FILE)
        group = read_group(home, own_verify_key=keys.public.verify_key)
        winners = winners_of(group, keys) if winners_of else WinnerRounds(group, keys, engine=SecureEngine())
        with closing(winners):
            link = PartyLink(
                url=config.coordinator_url,
                party_id=config.tallier_id,
                keys=keys,
                coordinator_key=config.coordinator_verify_key,
                home=home,
                ledger=ledger,
                facts=lambda: winners.facts,
                stop=stop,
                ca_file=path_in_home(home, config.ca_file),
                wait_s=wait_s,
                door=door,
                clock=clock,
            )
            with closing(link):
                driver = TallierDriver(
                    link.mail,
                    coordinator_key=link.coordinator_key,
                    coordinator_seal_key=config.coordinator_seal_key,
                    agents=config.agents,
                    journal=journal,
                    winners=winners,
                    clock=clock,
                )
                yield link, driver
