"""The tallier process: keeps its share of every ballot of a round, and adds them up once, when the round is paid for.

    open-round    whose shares it may take, until when                           -> holdings
    input-share   signed by an agent of the round, sealed to this tallier        -> stored, then holdings
    sum           signed by the coordinator: these agents, and no others ever    -> stored, then the sum, sealed;
                  in a winner round the sum stays here, and the winners are found with the two other talliers

Everything is durable before it is said, and encrypted under a key that no backup holds. After the sum single shares are
deleted from every file of the journal and their key is erased, and so it is of a round that expired without one. It
answers for one set of agents per round for ever, whoever asks and whatever dies: two sums over different agents would
differ by single ballots.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from feature_store.erasable import ERASABLE_FOLDER, KeyFolder
from feature_store.faults import fault_point
from feature_store.journal.erasable_home import check_home, mark_home
from feature_store.journal.ledger import Ledger
from feature_store.journal.migrations.opening import open_upgraded
from feature_store.journal.sequences import Sequences
from feature_store.keys import PartyKeys
from labeler.errors import (
    DuplicateAgent,
    Forged,
    InvalidSetting,
    LabelerError,
    NotEnrolled,
    PrivacyRefusal,
    ProtocolViolation,
    QuorumNotReached,
    Replayed,
    TooLarge,
    Unavailable,
    WrongDigest,
)
from labeler.messages import COORDINATOR, SEALED_KINDS, Kind, Message
from labeler.messages.rounds import OpenRound, SumRequest
from labeler.messages.shares import (
    aggregate_from_bytes,
    aggregate_to_bytes,
    holdings_to_bytes,
    share_from_bytes,
    share_to_bytes,
    winner_to_bytes,
)
from labeler.tally import InputShare, Tallier
from labeler.winner import Winner
from workers.party import PartyLink, converse
from workers.party_home import ANCHOR_FILE, JOURNAL_FILE, KEYS_FILE, SEEN_FILE, TallierConfig, read_tallier_config
from workers.party_mail import Draft
from workers.tallier_journal import TallierJournal
from workers.tallier_peers import read_group
from workers.tallier_winner import WinnerDesk, refusal_of
from workers.winner.child import MpycEngine
from workers.winner.engine import WinnerEngine

log = logging.getLogger("labeler.tallier")

MAX_OPEN_ROUNDS = 10_000
MAX_OPEN_BYTES = 64 * 2**30
"""Of single shares that the rounds which are open here could come to, were every agent to send the largest."""

COMPUTING_POLL_S = 0.5
"""How often a tallier looks for mail while it computes winners: it waits for those, not at the coordinator's door."""

SUM_KEPT_S = 7 * 86_400.0
"""How long a sum is kept after its round expired, for a coordinator that lost it on the way."""


def run_tallier(
    home: Path,
    *,
    stop: threading.Event,
    clock: Callable[[], datetime] | None = None,
    wait_s: float = 20.0,
    engine: WinnerEngine | None = None,
) -> None:
    """Serve as a tallier until told to stop.

    Args:
        home: the tallier's home (workers.party_home).
        stop: ends it within a moment; nothing is lost.
        clock: times with a time zone; the system's where absent.
        wait_s: how long the coordinator may hold a poll.
        engine: finds winners with the two other talliers; MPyC where absent.

    Raises:
        LabelerError: the home or the journal cannot be used.
    """
    clock = clock or _now
    config = read_tallier_config(home)
    with ExitStack() as owned:
        database = open_upgraded(home / JOURNAL_FILE, anchor=home / ANCHOR_FILE)
        owned.callback(database.close)
        ledger = Ledger(database, clock=clock)
        erasable = KeyFolder(home / ERASABLE_FOLDER)
        check_home(database, erasable, has_entries=ledger.verify().seq > 0)
        journal = TallierJournal(database, erasable, ledger)
        mark_home(database, erasable)
        for round_digest in journal.memory.sweep():
            log.warning("round given up: the key of what was held is gone", extra={"round_digest": round_digest})
        keys = PartyKeys.load(home / KEYS_FILE)
        group = read_group(home, own_verify_key=keys.public.verify_key)
        desk = WinnerDesk(group, keys, engine=engine or MpycEngine())
        owned.callback(desk.close)
        link = PartyLink(
            url=config.coordinator_url,
            party_id=config.tallier_id,
            keys=keys,
            coordinator_key=config.coordinator_verify_key,
            database=database,
            sequences=Sequences(database),
            journal_head=ledger.head,
            seen=home / SEEN_FILE,
            facts=lambda: desk.facts,
            stop=stop,
            ca_file=config.ca_file,
            wait_s=wait_s,
        )
        owned.callback(link.close)
        bench = _Bench(link, journal, config, clock, desk)
        log.info("tallier ready", extra={"tallier": config.tallier_id})
        converse(link, bench, stop)
        link.mail.settle()
    log.info("tallier stopped", extra={"tallier": config.tallier_id})


@dataclass
class _Open:
    """One round as this process knows it; the journal knows it better."""

    opening: OpenRound
    tallier: Tallier
    is_summed: bool


class _Bench:
    """Handles what a poll brought."""

    def __init__(
        self,
        link: PartyLink,
        journal: TallierJournal,
        config: TallierConfig,
        clock: Callable[[], datetime],
        desk: WinnerDesk,
    ) -> None:
        self._link = link
        self._journal = journal
        self._memory = journal.memory
        self._config = config
        self._clock = clock
        self._desk = desk
        self._rounds: dict[str, _Open] | None = None

    def tidy(self) -> None:
        """Delete what is not needed any more."""
        self._expire(self._known_rounds())

    @property
    def due_in_s(self) -> float | None:
        """At once while winners are computed: it then waits for those, not at the coordinator's door."""
        return 0.0 if self._desk.is_busy else None

    def sent(self, errors: Sequence[LabelerError | None]) -> None:
        """Nothing is left to be sent after a turn."""

    def handle(self, mail: Sequence[Message]) -> list[Sequence[Draft]]:
        """Take every message, then send the sums asked for, then say what is held of the rounds they touched, then see
        to the winners that are being computed."""
        try:
            rounds = self._known_rounds()
            self._expire(rounds)
            self._take_all(mail, rounds)
            self._tend_winners()
            return []
        except LabelerError:
            # What is in memory may be ahead of the journal; only the journal counts.
            self._rounds = None
            raise

    def _take_all(self, mail: Sequence[Message], rounds: dict[str, _Open]) -> None:
        opened: list[Message] = []
        touched: dict[str, None] = {}
        sums: dict[str, bytes] = {}
        for message in mail:
            digest = message.header.round_digest
            try:
                self._take(message, rounds, opened, sums)
                if message.header.kind == "sum":
                    continue
            except Replayed:
                continue
            except (ProtocolViolation, PrivacyRefusal, QuorumNotReached, InvalidSetting) as error:
                about = {"message_id": message.message_id, "round_digest": digest}
                log.warning("message refused", extra=about | _said(error))
                if isinstance(error, Forged):
                    continue
            touched[digest] = None
        winners: list[_Open] = []
        for digest, data in sums.items():
            fault_point("tallier.summed")
            known = rounds.get(digest)
            if known is None:
                continue  # it expired while another sum was on its way
            if known.opening.round.terms is None:
                self._post(self._draft(known.opening, "aggregate-share", data), "sum sent")
            else:
                winners.append(known)
        if winners:
            # Asked for several, the last one counts: the coordinator gives one round at a time its turn.
            self._begin_winners(winners[-1])
        for digest in touched:
            if digest in rounds:
                self._report(rounds[digest])
        self._link.taken(opened)
        if sums:
            self._journal.forget_log()

    def _take(self, message: Message, rounds: dict[str, _Open], opened: list[Message], sums: dict[str, bytes]) -> None:
        header = message.header
        known = rounds.get(header.round_digest)
        body = self._link.open(message, self._key_of(message, known))
        opened.append(message)
        if header.kind == "open-round":
            self._open_round(message, body, rounds)
            return
        if known is None:
            raise WrongDigest("this tallier knows no such round, or it has expired")
        if header.task_digest != known.opening.round.task_digest:
            raise WrongDigest("a message names another task than its round is of")
        if header.kind == "input-share":
            self._store(message, body, known)
        else:
            sums[header.round_digest] = self._sum(body, known)

    def _key_of(self, message: Message, known: _Open | None) -> str:
        """The key a message must be signed with, by what it claims to be."""
        header = message.header
        if header.kind in ("open-round", "sum") and header.sender == COORDINATOR:
            return self._link.coordinator_key
        if header.kind != "input-share":
            raise ProtocolViolation(f"a tallier takes no message of kind {header.kind!r} from {header.sender!r}")
        if known is None:
            raise WrongDigest("a share came for a round that is not open here; the agent is asked again")
        key = known.opening.participants.get(header.sender)
        if key is None:
            raise NotEnrolled(f"agent {header.sender!r} takes no part in this round")
        return key

    def _open_round(self, message: Message, body: bytes, rounds: dict[str, _Open]) -> None:
        opening = OpenRound.decode(body)
        header = message.header
        if (header.task_digest, header.round_digest) != (opening.round.task_digest, opening.round.digest):
            raise WrongDigest("an open-round names another task or round than it holds")
        if opening.expires_at < self._clock().timestamp():
            raise ProtocolViolation("the round has expired")
        self._check_agents(opening)
        if header.round_digest not in rounds:
            _check_room(opening, [known.opening for known in rounds.values() if not known.is_summed])
        self._memory.open_round(opening)
        if header.round_digest not in rounds:
            rounds[header.round_digest] = self._load(opening)

    def _check_agents(self, opening: OpenRound) -> None:
        """Only agents that this tallier's own site knows add noise that anybody can count on.

        Raises:
            PrivacyRefusal: the round names another, or another key of one.
        """
        known = self._config.agents
        if known is None:
            return
        for agent, key in sorted(opening.participants.items()):
            if known.get(agent) != key:
                raise PrivacyRefusal(
                    f"[agents] of tallier.toml names {len(known)} agents and their keys, and the round names "
                    f"{agent!r} with the key {key[:16]}, which is none of them; an agent unknown here may add "
                    "no noise. Compare its key over the phone, add it, and restart this tallier"
                )

    def _store(self, message: Message, body: bytes, known: _Open) -> None:
        round, agent = known.opening.round, message.header.sender
        share = share_from_bytes(body, max_entries=round.num_queries * round.num_classes, terms=round.terms)
        if share.is_seeded:
            # Such a round would be void once it is paid for; this agent's part alone is refused instead.
            raise ProtocolViolation(f"the share of agent {agent!r} says that its noise came from a known seed")
        fault_point("tallier.received")
        try:
            known.tallier.receive(InputShare(agent, known.opening.tallier, message.header.round_digest, share))
        except DuplicateAgent:
            if not known.is_summed:
                self._memory.exclude(round.digest, agent)
            raise
        if not known.is_summed:
            self._memory.store_share(round.digest, agent, share_to_bytes(share), share.sharing_id, share.fingerprint())
        fault_point("tallier.stored")

    def _sum(self, body: bytes, known: _Open) -> bytes:
        """This tallier's sum, durable before it is sent."""
        self._check_agents(known.opening)
        request = SumRequest.decode(body)
        aggregate = known.tallier.aggregate_share(request.contributors)
        data = aggregate_to_bytes(aggregate)
        self._journal.fix(known.opening.round.digest, sorted(aggregate.contributors), data)
        known.is_summed = True
        fault_point("tallier.fixed")
        return data

    def _report(self, known: _Open) -> None:
        body = holdings_to_bytes(known.tallier.holdings)
        self._post(self._draft(known.opening, "holdings", body), "holdings sent")
        fault_point("tallier.reported")

    def _begin_winners(self, known: _Open) -> None:
        opening = known.opening
        try:
            if self._desk.begin(opening, known.tallier.aggregate_share(known.tallier.contributors)):
                log.info("winners being computed", extra={"round_digest": opening.round.digest})
        except (Unavailable, ProtocolViolation, InvalidSetting) as error:
            log.warning("winners cannot be computed", extra={"round_digest": opening.round.digest} | _said(error))
            self._post(self._draft(opening, "refused", refusal_of(error).encode()), "refusal sent")

    def _tend_winners(self) -> None:
        """Send what was computed; wait for what is being computed, and then not for mail as well."""
        self._desk.wait(COMPUTING_POLL_S)
        outcome = self._desk.take()
        if outcome is not None:
            about = {"round_digest": outcome.opening.round.digest}
            if isinstance(outcome.answer, Winner):
                fault_point("tallier.computed")
                body = winner_to_bytes(outcome.answer)
                self._post(self._draft(outcome.opening, "winner", body), "winners sent")
            else:
                told = {"problem": outcome.answer.reason, "sentence": outcome.answer.sentence}
                log.warning("winners could not be computed", extra=about | told)
                self._post(self._draft(outcome.opening, "refused", outcome.answer.encode()), "refusal sent")

    def _draft(self, opening: OpenRound, kind: Kind, body: bytes) -> Draft:
        return Draft(
            kind,
            COORDINATOR,
            body,
            task_digest=opening.round.task_digest,
            round_digest=opening.round.digest,
            seal_to=self._config.coordinator_seal_key if kind in SEALED_KINDS else None,
        )

    def _post(self, draft: Draft, what: str) -> None:
        about = {"task_digest": draft.task_digest, "round_digest": draft.round_digest}
        try:
            self._link.post([draft])
            log.info(what, extra=about)
        except (NotEnrolled, Forged):
            raise
        except (ProtocolViolation, TooLarge) as error:
            # The round is over for the coordinator; there is nobody to tell.
            log.info("report not taken", extra=about | _said(error))

    def _known_rounds(self) -> dict[str, _Open]:
        if self._rounds is None:
            openings = self._memory.open_rounds()
            self._rounds = {opening.round.digest: self._load(opening) for opening in openings}
        return self._rounds

    def _load(self, opening: OpenRound) -> _Open:
        """A round as the journal has it."""
        kept = self._memory.load(opening.round.digest)
        round = opening.round
        entries = round.num_queries * round.num_classes
        aggregate = None if kept.aggregate is None else aggregate_from_bytes(kept.aggregate)
        tallier = Tallier.resume(
            opening.tallier,
            round,
            shares={
                agent: share_from_bytes(share.data, max_entries=entries, terms=round.terms)
                for agent, share in kept.shares.items()
                if share.data is not None
            },
            excluded=kept.excluded,
            aggregate=aggregate,
            sharing_ids={agent: share.sharing_id for agent, share in kept.shares.items()},
            # Of every share ever taken, also of those that were not summed: a retry of one is no other share.
            fingerprints=kept.fingerprints,
        )
        return _Open(opening, tallier, is_summed=aggregate is not None)

    def _expire(self, rounds: dict[str, _Open]) -> None:
        """Delete what is not needed any more: single shares at once, sums after a week."""
        now = self._clock().timestamp()
        for digest, known in list(rounds.items()):
            if now > known.opening.expires_at + (SUM_KEPT_S if known.is_summed else 0.0):
                self._memory.forget(digest)
                del rounds[digest]
                self._journal.forget_log()
                log.info("round expired", extra={"round_digest": digest, "summed": known.is_summed})


def _check_room(opening: OpenRound, others: Sequence[OpenRound]) -> None:
    """No coordinator can fill this tallier's disk: it is asked again later, when rounds were summed or have expired.

    Raises:
        TooLarge: too many rounds are open, or their shares could come to too many bytes.
    """
    if len(others) >= MAX_OPEN_ROUNDS:
        raise TooLarge(
            f"{len(others)} rounds are open at this tallier and were not summed, at most {MAX_OPEN_ROUNDS} may be; the "
            "coordinator asks again once some were summed or have expired"
        )
    wanted, held = _most_bytes(opening), sum(map(_most_bytes, others))
    if held + wanted > MAX_OPEN_BYTES:
        raise TooLarge(
            f"the shares of a round could come to {wanted} bytes and those of {len(others)} open rounds to {held}, at "
            f"most {MAX_OPEN_BYTES} are kept at this tallier; ask fewer queries at a time, or wait until rounds were "
            "summed or have expired"
        )


def _most_bytes(opening: OpenRound) -> int:
    round = opening.round
    # Where rows are checked, ballots with a column for votes not cast come beside the noise.
    columns = 2 * round.num_classes + 1 if round.terms is not None and round.terms.row_total else round.num_classes
    return 8 * round.num_queries * columns * len(opening.participants)


def _said(error: LabelerError) -> dict[str, str]:
    return {"problem": error.problem_type, "sentence": str(error)}


def _now() -> datetime:
    return datetime.now(UTC)
