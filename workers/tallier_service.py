"""The tallier process: keeps its share of every ballot of a round, and adds them up once, when the round is paid for.

    open-round    whose shares it may take, until when                           -> holdings
    input-share   signed by an agent of the round, sealed to this tallier        -> stored, then holdings
    sum           signed by the coordinator: these agents, and no others ever    -> stored, then the sum, sealed

Everything is durable before it is said. After the sum single shares are deleted, and of a round that expired
without one they are deleted too. It answers for one set of agents per round for ever, whoever asks and
whatever dies: two sums over different agents would differ by single ballots.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from feature_store.faults import fault_point
from feature_store.journal.charges import Charge
from feature_store.journal.database import Database, open_database
from feature_store.journal.ledger import Ledger
from feature_store.journal.sequences import Sequences
from feature_store.journal.tallier_memory import TallierMemory
from feature_store.keys import PartyKeys
from labeler.bodies import (
    OpenRound,
    SumRequest,
    aggregate_from_bytes,
    aggregate_to_bytes,
    holdings_to_bytes,
    share_from_bytes,
    share_to_bytes,
)
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
    WrongDigest,
)
from labeler.messages import COORDINATOR, Message
from labeler.tally import InputShare, Tallier
from workers.party import Draft, PartyLink, converse
from workers.party_home import ANCHOR_FILE, JOURNAL_FILE, KEYS_FILE, SEEN_FILE, TallierConfig, read_tallier_config

log = logging.getLogger("labeler.tallier")

SUMS = "rounds-summed"
"""The account in a tallier's ledger that counts sums."""

SUM_KEPT_S = 7 * 86_400.0
"""How long a sum is kept after its round expired, for a coordinator that lost it on the way."""


def run_tallier(
    home: Path, *, stop: threading.Event, clock: Callable[[], datetime] | None = None, wait_s: float = 20.0
) -> None:
    """Serve as a tallier until told to stop.

    Args:
        home: the tallier's home (workers.party_home).
        stop: ends it within a moment; nothing is lost.
        clock: times with a time zone; the system's where absent.
        wait_s: how long the coordinator may hold a poll.

    Raises:
        LabelerError: the home or the journal cannot be used.
    """
    clock = clock or _now
    config = read_tallier_config(home)
    with ExitStack() as owned:
        database = open_database(home / JOURNAL_FILE, anchor=home / ANCHOR_FILE)
        owned.callback(database.close)
        ledger = Ledger(database, clock=clock)
        ledger.verify()
        link = PartyLink(
            url=config.coordinator_url,
            party_id=config.tallier_id,
            keys=PartyKeys.load(home / KEYS_FILE),
            coordinator_key=config.coordinator_verify_key,
            database=database,
            sequences=Sequences(database),
            journal_head=ledger.head,
            seen=home / SEEN_FILE,
            facts=dict,
            stop=stop,
            ca_file=config.ca_file,
            wait_s=wait_s,
        )
        owned.callback(link.close)
        bench = _Bench(link, _Journal(database, ledger), config, clock)
        log.info("tallier ready", extra={"tallier": config.tallier_id})
        converse(link, bench.handle, stop)
    log.info("tallier stopped", extra={"tallier": config.tallier_id})


@dataclass
class _Open:
    """One round as this process knows it; the journal knows it better."""

    opening: OpenRound
    tallier: Tallier
    is_summed: bool


class _Journal:
    """A tallier's memory, with an entry in the ledger's chain for every sum.

    A journal that was replaced by an older copy would have forgotten which rounds were summed, and would sum them over
    other agents. The chain has a file that remembers its end, and the coordinator is told of it at every poll, so such
    a copy is found out. The entries are a count of rounds, not a price.
    """

    def __init__(self, database: Database, ledger: Ledger) -> None:
        self.memory = TallierMemory(database)
        self._database = database
        self._ledger = ledger
        ledger.open_account(SUMS, "agent", None)

    def fix(self, round_digest: str, contributors: Sequence[str], aggregate: bytes) -> None:
        with self._database.write() as connection:
            self.memory.fix(round_digest, contributors, aggregate, connection=connection)
            self._ledger.reserve(round_digest, [Charge(SUMS, "agent", 1)], connection=connection)
            self._ledger.post(round_digest, connection=connection)


class _Bench:
    """Handles what a poll brought."""

    def __init__(
        self, link: PartyLink, journal: _Journal, config: TallierConfig, clock: Callable[[], datetime]
    ) -> None:
        self._link = link
        self._journal = journal
        self._memory = journal.memory
        self._config = config
        self._clock = clock
        self._rounds: dict[str, _Open] | None = None

    def handle(self, mail: Sequence[Message]) -> None:
        """Take every message, then send the sums asked for, then say what is held of the rounds they touched."""
        try:
            rounds = self._known_rounds()
            self._expire(rounds)
            self._take_all(mail, rounds)
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
        for digest, data in sums.items():
            fault_point("tallier.summed")
            self._post(self._draft(rounds[digest].opening, "aggregate-share", data), "sum sent")
        for digest in touched:
            if digest in rounds:
                self._report(rounds[digest])
        self._link.taken(opened)

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
        self._memory.open_round(opening)
        if header.round_digest not in rounds:
            rounds[header.round_digest] = self._load(opening)

    def _store(self, message: Message, body: bytes, known: _Open) -> None:
        round, agent = known.opening.round, message.header.sender
        share = share_from_bytes(body, max_entries=round.num_queries * round.num_classes)
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

    def _draft(self, opening: OpenRound, kind: str, body: bytes) -> Draft:
        is_sum = kind == "aggregate-share"
        return Draft(
            "aggregate-share" if is_sum else "holdings",
            COORDINATOR,
            body,
            task_digest=opening.round.task_digest,
            round_digest=opening.round.digest,
            seal_to=self._config.coordinator_seal_key if is_sum else None,
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
                agent: share_from_bytes(share.data, max_entries=entries)
                for agent, share in kept.shares.items()
                if share.data is not None
            },
            excluded=kept.excluded,
            aggregate=aggregate,
            sharing_ids={agent: share.sharing_id for agent, share in kept.shares.items()},
            fingerprints={agent: share.fingerprint for agent, share in kept.shares.items()},
        )
        return _Open(opening, tallier, is_summed=aggregate is not None)

    def _expire(self, rounds: dict[str, _Open]) -> None:
        """Delete what is not needed any more: single shares at once, sums after a week."""
        now = self._clock().timestamp()
        for digest, known in list(rounds.items()):
            if now > known.opening.expires_at + (SUM_KEPT_S if known.is_summed else 0.0):
                self._memory.forget(digest)
                del rounds[digest]
                log.info("round expired", extra={"round_digest": digest, "summed": known.is_summed})


def _said(error: LabelerError) -> dict[str, str]:
    return {"problem": error.problem_type, "sentence": str(error)}


def _now() -> datetime:
    return datetime.now(UTC)
