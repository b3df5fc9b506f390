"""A party's side of its conversation with the coordinator: outbound only, signed both ways, repeated until taken.

    converse   poll, handle, answer, and poll again, until told to stop.
    poll       "anything for me?" -> messages, checked to be for this party; the coordinator's own head first.
    answer     post the answers to the last poll, and with them the next poll, which continues after it.

A message is marked as taken only when its effect is durable and the answer to it was accepted. A crash in between
repeats it, and every effect may happen twice: answers are deterministic, and stores keep the first of equals. The
numbers of messages that a turn opened are written with the party's next transaction, or when nothing else is to be
written.

The party watches the coordinator's journal (workers.party.coordinator). Every poll states the highest head ever seen,
with the coordinator's own signed answer that stated it. So one party's word alone stops nobody. A coordinator that
shows an older head has lost charges, so this party stops taking part. The file is read at every poll: a person who
consents to a restored journal (workers.homes.journals) need not stop the party.
"""

from __future__ import annotations

import logging
import random
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from labeler.errors import (
    Forged,
    Interrupted,
    JournalBehind,
    LabelerError,
    NotEnrolled,
    ProtocolViolation,
    Replayed,
    TooLarge,
    Unavailable,
    WrongVersion,
)
from labeler.ledger.backup import check_home
from labeler.ledger.chain import EMPTY, Head
from labeler.ledger.database import Connection, Database, open_database
from labeler.ledger.ledger import Ledger
from labeler.ledger.sequences import Sequences
from labeler.messages import COORDINATOR, Kind, Message, frame, read_frames
from labeler.messages.bodies import Mail, Poll
from labeler.system.clock import Clock, now_utc
from labeler.system.erasable import ERASABLE_FOLDER, KeyFolder
from labeler.system.keys import PartyKeys, verify
from workers.party.coordinator import CoordinatorDoor, CoordinatorHttp, SeenState, Unreachable
from workers.party.home import ANCHOR_FILE, JOURNAL_FILE, SEEN_FILE
from workers.service_process import tell_ready

log = logging.getLogger("labeler.party")


_Numbers = dict[tuple[str, str], int]


@dataclass(frozen=True, repr=False)
class Draft:
    """A message before it has a number and a signature.

    Attributes:
        body: in clear, or sealed before (labeler.system.keys.seal_body).
        seal_to: the recipient's seal key; None sends the body as it is.
        is_sealed: True where the body was sealed before.
    """

    kind: Kind
    recipient: str
    body: bytes
    task_digest: str = ""
    round_digest: str = ""
    seal_to: str | None = None
    is_sealed: bool = False

    def __repr__(self) -> str:
        return f"Draft(kind={self.kind!r}, recipient={self.recipient!r})"


class PartyMail:
    """A party's mail: opens, signs and numbers messages; see the module. Used by one thread."""

    def __init__(self, party_id: str, keys: PartyKeys, *, database: Database, sequences: Sequences) -> None:
        self.party_id = party_id
        self.keys = keys
        self._database = database
        self._sequences = sequences
        self._opened: _Numbers = {}
        self._taken: _Numbers = {}
        """The highest of each sender that had its effect, once it was looked up: only this process takes any."""
        self._unwritten: set[tuple[str, str]] = set()

    def open(self, message: Message, verify_key: str) -> bytes:
        """Check who signed a message and that it is new, and open its body.

        Args:
            verify_key: the pinned or enrolled key of the sender it names.

        Raises:
            ProtocolViolation: it is for another party.
            Forged: signature, digest or seal do not hold.
            Replayed: this or a later message of the sender was taken before.
        """
        self.check_envelope(message, verify_key)
        signed = (message.header.sender, verify_key)
        sequence = message.header.sequence
        if signed not in self._taken:
            self._taken[signed] = self._sequences.last(*signed)
        if sequence <= max(self._opened.get(signed, 0), self._taken[signed]):
            raise Replayed(f"message {sequence} of {message.header.sender!r} is not new: it or a later one was taken")
        body = self.keys.open(message)
        self._opened[signed] = sequence
        return body

    def check_envelope(self, message: Message, verify_key: str) -> None:
        """Check the recipient and the signature of a message."""
        if message.header.recipient != self.party_id:
            raise ProtocolViolation(f"a message for {message.header.recipient!r} came to {self.party_id!r}")
        verify(message, verify_key)

    def drop(self) -> None:
        """Drop what was opened since the last turn: it had no effect and may come again."""
        self._opened.clear()

    def note(self) -> None:
        """Note that everything opened had its effect, and its answers were taken."""
        self._taken |= self._opened
        self._unwritten |= self._opened.keys()
        self.drop()

    def write_noted(self, connection: Connection) -> None:
        """Write what was noted, in a transaction of the party's journal."""
        for sender, key in self._unwritten:
            self._sequences.taken(sender, self._taken[sender, key], verify_key=key, connection=connection)
        if self._unwritten:
            self._database.after_commit(self._unwritten.clear)

    def settle(self) -> None:
        """Write what was noted, if anything, in a separate transaction."""
        if self._unwritten:
            with self._database.write() as connection:
                self.write_noted(connection)

    def sign(self, draft: Draft) -> Message:
        """Return a draft with the next number for its recipient, signed."""
        return self.keys.message(
            draft.kind,
            sender=self.party_id,
            recipient=draft.recipient,
            task_digest=draft.task_digest,
            round_digest=draft.round_digest,
            sequence=self._sequences.next(draft.recipient),
            body=draft.body,
            seal_to=draft.seal_to,
            is_sealed=draft.is_sealed,
        )


MAX_MAIL = 256
VERSION = "labeler/0.5"
"""The version of the program, stated at every poll for people to see."""

MAX_POST = 256
MAX_POST_BYTES = 16 * 1024 * 1024
"""Messages of one request, and their bytes unless a single letter has more. A coordinator receives a message of the
largest size, 64 MiB, from one party at a time, and what is refused is sent again.
"""

Letter = Sequence[Draft]
"""Messages that belong together, for example the shares of one answer: taken or refused as one."""

_ABOUT_HEADER_BYTES = 2048
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 30.0
_NEW_NUMBERS = 3

_HELD_BEHIND_LETTERS_S = 0.5
"""Seconds that a poll that travels with letters may be held. Its answer says that they were taken, and if it is lost
they are sent again.
"""


def said(error: LabelerError) -> dict[str, str]:
    """Return an error as fields of the party's own log."""
    return {"problem": error.problem_type, "sentence": str(error)}


def cause(error: Exception) -> dict[str, str]:
    """Return an error's fields for the party's own log: our sentence, or for a foreign error its origin without its
    words.
    """
    if isinstance(error, LabelerError):
        return said(error)
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return {"problem": type(error).__name__, "where": where}


class PartyLink:
    """A party's connection to the coordinator; see the module. Used by one thread.

    Args:
        url: of the coordinator; https, or http to this machine only.
        coordinator_key: the pinned key that the coordinator's signatures are checked with.
        home: of this party, where files remember the coordinator's highest head and its proof.
        ledger: this party's. Every poll states its head; it refuses a head that the coordinator has seen and it does
            not hold. Its journal keeps the numbers of messages.
        facts: stated to the coordinator at every poll.
        ca_file: certificates to check the coordinator's against; the system's where absent.
        wait_s: how long the coordinator may hold a poll while there is no mail.
        door: the way to the coordinator; HTTP to `url` where absent.

    Attributes:
        mail: opens, signs and numbers this party's messages.
        wait_s: how long the coordinator may hold a poll while there is no mail; may be changed between polls.
        polled_at: when the newest poll returned, in seconds of `ticks`.
        while_waiting: called before every pause in which nobody answers, which may last for days; it sends nothing.

    Raises:
        InvalidSetting: the address is not valid, or would send messages over a network in clear.
    """

    def __init__(
        self,
        *,
        url: str,
        party_id: str,
        keys: PartyKeys,
        coordinator_key: str,
        home: Path,
        ledger: Ledger,
        facts: Callable[[], Mapping[str, Any]],
        stop: threading.Event,
        ca_file: str | None = None,
        wait_s: float = 20.0,
        door: CoordinatorDoor | None = None,
        clock: Clock = now_utc,
        ticks: Callable[[], float] = time.monotonic,
    ) -> None:
        self.party_id = party_id
        self.coordinator_key = coordinator_key
        database = ledger.database
        self.mail = PartyMail(party_id, keys, database=database, sequences=Sequences(database, clock=clock))
        self._ledger = ledger
        self._own_seen = EMPTY
        self._seen = SeenState(home / SEEN_FILE)
        self._facts = facts
        self._stop = stop
        self.wait_s = wait_s
        self._ticks = ticks
        self.polled_at = ticks()
        self._after = self._next_after = ""
        self._came = b""
        self._last_answer = 0
        self._failures = 0
        self.while_waiting: Callable[[], None] = lambda: None
        self._is_known = False
        self._http = door or CoordinatorHttp(url, ca_file=ca_file, read_timeout_s=wait_s + 30.0, stop=stop)

    def close(self) -> None:
        """Close every connection."""
        self._http.close()

    def poll(self) -> list[Message]:
        """Wait for mail. What comes is for this party; `open` checks the sender.

        Raises:
            JournalBehind: the coordinator's journal is older than what this party has seen of it, or this party's own
                is than what the coordinator has seen.
            NotEnrolled: this party is not enrolled, or its keys were revoked.
            ProtocolViolation: the answer is not valid.
            Interrupted: told to stop.
        """
        self._seen.rest()
        answer, self._came = self._came, b""
        if not answer:
            # The first poll is answered at once, so that this party learns that it is known.
            asking = self._asking(self._after, self.wait_s if self._is_known else 0.0)
            answer = self._send("/v1/messages:poll", [asking], beside=self._seen.proof())
            self.polled_at = self._ticks()
        messages = read_frames(answer, max_messages=MAX_MAIL)
        if not messages or messages[0].header.kind != "poll":
            raise ProtocolViolation("the answer to a poll begins with the coordinator's own message; is the URL right?")
        first, *mail = messages
        self.mail.check_envelope(first, self.coordinator_key)
        if first.header.sender != COORDINATOR or first.header.sequence <= self._last_answer:
            raise Replayed("the answer to a poll is an old one, or not the coordinator's")
        self._last_answer = first.header.sequence
        note = Mail.decode(self.mail.keys.open(first))
        self._compare(note, first)
        self._next_after = note.after
        self.mail.drop()
        if not self._is_known:
            self._is_known = True
            tell_ready()
        return [message for message in mail if self._is_ours(message)]

    def answer(self, letters: Sequence[Letter]) -> list[LabelerError | None]:
        """Send the answers to the last poll's mail, which completes that poll; see `post_all`.

        The next poll travels with the letters where they fit into one request, and the next `poll` finds what it
        brought. Where the coordinator refuses that, every letter is sent by itself, so that one takes no other with it.
        """
        errors = self._answered_with_poll(letters)
        if errors is None:
            errors = self.post_all(letters)
        # Everything of the last poll is done; the next one asks for what comes after it.
        self._after = self._next_after
        return errors

    def _answered_with_poll(self, letters: Sequence[Letter]) -> list[LabelerError | None] | None:
        """Send all letters and the poll in one request; None if they have to be sent without the poll."""
        is_one = len(list(parcels(letters))) == 1 and sum(map(_size_of, letters)) <= MAX_POST_BYTES
        if not is_one:
            return None
        asking = self._asking(self._next_after, min(self.wait_s, _HELD_BEHIND_LETTERS_S))
        drafts = [*(draft for letter in letters for draft in letter), asking]
        try:
            self._came = self._send("/v1/messages", drafts, beside=self._seen.proof())
            self.polled_at = self._ticks()
        except (NotEnrolled, Forged):
            raise
        except (ProtocolViolation, TooLarge):
            return None
        return [None] * len(letters)

    def _asking(self, after: str, wait_s: float) -> Draft:
        seen, own = self._seen.head(), self._ledger.head()
        body = Poll(
            after=after,
            wait_s=wait_s,
            journal_seq=own.seq,
            journal_hash=own.hash if own.seq else "",
            coordinator_seq=seen.seq,
            coordinator_hash=seen.hash if seen.seq else "",
            program=VERSION,
            facts=self._facts(),
        ).encode()
        return Draft("poll", COORDINATOR, body)

    def post(self, drafts: Sequence[Draft]) -> None:
        """Send messages, in this order and in one request, until the coordinator has taken them all.

        Raises:
            NotEnrolled, Forged: the coordinator does not know this party or its keys.
            ProtocolViolation, TooLarge: it will not take them, for example because their round is over.
            Interrupted: told to stop.
        """
        self._send("/v1/messages", drafts)

    def post_all(self, letters: Sequence[Letter]) -> list[LabelerError | None]:
        """Send letters, as many in one request as it may hold; return for each the error with which it was refused, or
        None.

        A request is refused as a whole from its first message that is not taken. Then each of its letters is sent by
        itself, so that a round that is over takes no other with it. A letter sent twice counts once.

        Raises:
            NotEnrolled, Forged, Interrupted: see `post`.
        """
        found: list[LabelerError | None] = []
        for parcel in parcels(letters):
            refused = self._try([draft for letter in parcel for draft in letter])
            if refused is None or len(parcel) == 1:
                found += [refused] * len(parcel)
            else:
                found += [self._try(letter) for letter in parcel]
        return found

    def _try(self, drafts: Sequence[Draft]) -> LabelerError | None:
        try:
            self.post(drafts)
        except (NotEnrolled, Forged):
            raise
        except (ProtocolViolation, TooLarge) as error:
            return error
        return None

    def _is_ours(self, message: Message) -> bool:
        if message.header.recipient == self.party_id:
            return True
        log.warning("message for somebody else skipped", extra={"message_id": message.message_id})
        return False

    def _compare(self, note: Mail, signed: Message) -> None:
        seen = self._seen.head()
        told = Head(note.coordinator_seq, note.coordinator_hash) if note.coordinator_seq else EMPTY
        if told.seq < seen.seq or (told.seq == seen.seq and told.hash != seen.hash):
            raise JournalBehind(
                f"the coordinator's journal ends at entry {told.seq}, and this party has seen entry {seen.seq} of it: "
                "charges are missing from it. This party answers nothing until the coordinator's newest journal is "
                "back; if that is gone for good, a person at this site consents to the restored one with `labeler "
                "journal trust-restored`"
            )
        own = Head(note.journal_seq, note.journal_hash) if note.journal_seq else EMPTY
        if own not in (self._own_seen, self._ledger.head()):
            self._ledger.check_not_behind(own, witness="the coordinator")
            self._own_seen = own
        self._seen.keep(told, signed)

    def _send(self, path: str, drafts: Sequence[Draft], *, beside: bytes = b"") -> bytes:
        """Send until there is an answer: renumber where old numbers were seen, wait where nobody answers."""
        renumbered = 0
        while True:
            data = frame([self.mail.sign(draft) for draft in drafts]) + beside
            try:
                answer = self._http.post(path, data)
            except Replayed:
                # The first attempt arrived although its answer did not; sending it again changes nothing.
                renumbered += 1
                if renumbered > _NEW_NUMBERS:
                    raise
            except Unreachable as error:
                self._wait_after(error)
            else:
                if self._failures:
                    log.info("coordinator reached again", extra={"party": self.party_id})
                self._failures = 0
                return answer

    def _wait_after(self, error: Unreachable) -> None:
        pause = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(self._failures, 10))
        pause = max(pause * random.uniform(0.5, 1.0), error.retry_after_s)
        if self._failures == 0:
            log.warning(
                "coordinator cannot be reached; trying again",
                extra={"party": self.party_id} | said(error),
            )
        self._failures += 1
        self.while_waiting()
        if self._stop.wait(pause):
            raise Interrupted("stopped while the coordinator could not be reached") from None


def parcels(letters: Sequence[Letter]) -> Iterator[list[Letter]]:
    """Split letters into requests: whole, in order, within the number and size that one request may hold."""
    parcel: list[Letter] = []
    count, size = 0, 0
    for letter in letters:
        bytes_of = _size_of(letter)
        if parcel and (count + len(letter) > MAX_POST or size + bytes_of > MAX_POST_BYTES):
            yield parcel
            parcel, count, size = [], 0, 0
        parcel.append(letter)
        count, size = count + len(letter), size + bytes_of
    if parcel:
        yield parcel


def _size_of(letter: Letter) -> int:
    return sum(len(draft.body) + _ABOUT_HEADER_BYTES for draft in letter)


@dataclass(frozen=True)
class Outgoing:
    """A letter of a turn, with what the log says of it.

    Attributes:
        taken: the line for when the coordinator has taken it; empty for none.
        about: fields of that line, and of the one about a refusal.
    """

    drafts: tuple[Draft, ...]
    taken: str
    about: Mapping[str, str]


def log_fates(
    to: logging.Logger, letters: Sequence[Outgoing], errors: Sequence[LabelerError | None], *, refused: str
) -> set[Kind]:
    """Log what became of a turn's letters; return the kinds of messages that were taken.

    Args:
        errors: of each letter, None where it was taken. A refused one is about a round or a job that is over.
        refused: the line for a letter that was refused.
    """
    taken: set[Kind] = set()
    for letter, error in zip(letters, errors, strict=True):
        if error is not None:
            to.warning(refused, extra=dict(letter.about) | said(error))
            continue
        taken |= {draft.kind for draft in letter.drafts}
        if letter.taken:
            to.info(letter.taken, extra=dict(letter.about))
    return taken


_REFUSED_PAUSE_S = 10.0
_PASSING_PAUSE_S = 2.0


class Handler(Protocol):
    """A party's treatment of its mail; without network or threads."""

    def tidy(self) -> None:
        """Do what is due by the clock, such as erasing; send nothing.

        Called whether or not the coordinator answers. Otherwise the coordinator could keep data alive by being away, or
        by turning this party away.
        """
        ...

    @property
    def due_in_s(self) -> float | None:
        """Return after how many seconds `handle` wants to be called without mail; None where it need not be."""
        ...

    def handle(self, mail: Sequence[Message]) -> Sequence[Outgoing]:
        """Apply every message durably; return what is to be sent. Raises only what concerns them all."""
        ...

    def sent(self, letters: Sequence[Outgoing], errors: Sequence[LabelerError | None]) -> None:
        """Handle the fate of the letters: each was taken unless it has an error, and need not come again."""
        ...


@contextmanager
def open_journal(
    home: Path, *, clock: Clock, elsewhere: Path | None = None, allow_unsynced: bool = False
) -> Iterator[tuple[Database, Ledger, KeyFolder]]:
    """Open a party's journal, its ledger and its erasable keys; refuse a home that was restored.

    Args:
        elsewhere: see Ledger.
        allow_unsynced: see `open_database`.
    """
    with open_database(home / JOURNAL_FILE, anchor=home / ANCHOR_FILE, allow_unsynced=allow_unsynced) as database:
        ledger, keys = Ledger(database, clock=clock, elsewhere=elsewhere), KeyFolder(home / ERASABLE_FOLDER)
        check_home(database, keys, has_entries=ledger.verify(is_whole=False).seq > 0)
        yield database, ledger, keys


def converse(
    link: PartyLink, handler: Handler, stop: threading.Event, *, held_s: Callable[[], float] | None = None
) -> None:
    """Poll, handle and send until told to stop; wait out what passes by itself, and log what does not.

    Args:
        held_s: after how many seconds the results of `handle` may leave, and the next poll with them, also where it
            raised (`workers.agent.public_clock`); at once where absent. If told to stop meanwhile, nothing leaves: what
            was answered is stored, and its mail comes again.

    Raises:
        LabelerError: this party's own journal or files cannot be used any more.
    """
    link.while_waiting = handler.tidy
    longest_s = link.wait_s
    while not stop.is_set():
        try:
            handler.tidy()
            link.wait_s = _wait_s(handler, longest_s)
            mail = link.poll()
            if not mail:
                link.mail.settle()
            try:
                letters = handler.handle(mail)
            finally:
                left_s = 0.0 if held_s is None else held_s()
                is_over = left_s > 0 and stop.wait(left_s)
            if is_over:
                return
            link.wait_s = _wait_s(handler, longest_s)  # the next poll may travel with the letters
            handler.sent(letters, link.answer([letter.drafts for letter in letters]))
        except Interrupted:
            return
        except (NotEnrolled, Forged) as error:
            _pause(
                error, "the coordinator does not accept this party; an administrator has to enrol its keys", link, stop
            )
        except JournalBehind as error:
            _pause(error, "a journal is behind; this party takes no part", link, stop)
        except WrongVersion as error:
            _pause(
                error, "the coordinator's program is of another version; one of the two has to be upgraded", link, stop
            )
        except (ProtocolViolation, TooLarge, Unavailable) as error:
            _pause(error, "mail could not be handled; trying again", link, stop, pause_s=_PASSING_PAUSE_S)


def _wait_s(handler: Handler, longest_s: float) -> float:
    due_in_s = handler.due_in_s
    return longest_s if due_in_s is None else min(longest_s, due_in_s)


def _pause(
    error: LabelerError, what: str, link: PartyLink, stop: threading.Event, *, pause_s: float = _REFUSED_PAUSE_S
) -> None:
    log.error(what, extra={"party": link.party_id} | said(error))
    stop.wait(pause_s)
