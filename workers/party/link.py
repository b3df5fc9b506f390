"""The link of an agent or a tallier to its coordinator: outbound HTTP only, signed both ways, repeated until taken.

    poll       "anything for me?" -> messages, checked to be for this party; the coordinator's own head first
    post       this party's messages, with new sequence numbers at each attempt, until the coordinator takes them
    answer     what the last poll has come to is posted, and with it travels the next poll, which goes on after it

A message is marked as taken only when its effect is durable and the answer to it was accepted. A crash in between
repeats it, and every effect may happen twice: answers are deterministic, and stores keep the first of equals.

The coordinator's journal is watched: its highest head ever seen is kept in a file, told at every poll with the
coordinator's own signed answer that stated it (so that one party's word alone stops nobody), and a
coordinator that shows an older one has lost charges, so this party stops taking part. The file is read at every poll:
a person who consents to a restored journal (workers.homes.journals) need not stop the party.

What is done with the mail, and what is waited for, is the conversation (workers.party.conversation).
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from labeler.errors import (
    Forged,
    Interrupted,
    JournalBehind,
    LabelerError,
    NotEnrolled,
    ProtocolViolation,
    Replayed,
    TooLarge,
)
from labeler.ledger.chain import EMPTY, Head
from labeler.ledger.database import Database
from labeler.ledger.sequences import Sequences
from labeler.messages import COORDINATOR, Message, frame, read_frames
from labeler.messages.bodies import Mail, Poll
from labeler.system.clock import Clock, now_utc
from labeler.system.keys import PartyKeys
from workers.party.home import SEEN_FILE
from workers.party.http import CoordinatorDoor, CoordinatorHttp, Unreachable
from workers.party.mail import Draft, PartyMail
from workers.party.seen import Seen
from workers.service_process import tell_ready

log = logging.getLogger("labeler.party")

MAX_MAIL = 256
VERSION = "labeler/0.5"
"""Of the program, told at every poll for people to see."""

MAX_POST = 256
MAX_POST_BYTES = 16 * 1024 * 1024
"""Messages of one request, and their bytes unless a single letter has more: a coordinator receives a message of the
largest size, 64 MiB, from one party at a time, and what is refused is sent again."""

Letter = Sequence[Draft]
"""Messages that belong together, for example the shares of one answer: taken or refused as one."""

_ABOUT_HEADER_BYTES = 2048
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 30.0
_NEW_NUMBERS = 3

_HELD_BEHIND_LETTERS_S = 0.5
"""How long a poll that travels with letters may be held: its answer says that they were taken, and where it is lost
they are sent again."""


class PartyLink:
    """See the module. Used by one thread.

    Attributes:
        mail: opens, signs and numbers this party's messages.
        wait_s: how long the coordinator may hold a poll while there is no mail; may be changed between polls.
        polled_at: when the newest poll returned, in seconds of `ticks`.

    Args:
        url: of the coordinator; https, or http to this machine only.
        coordinator_key: the pinned key that the coordinator's signatures are checked with.
        home: of this party, where files remember the coordinator's highest head and its proof.
        database: its journal, which keeps the numbers of messages.
        journal_head: the head of its own ledger, told at every poll.
        check_own: refuses a head of its own ledger that the ledger does not hold: the coordinator has seen it.
        facts: what the coordinator is told at every poll.
        ca_file: certificates to check the coordinator's against; the system's where absent.
        wait_s: how long the coordinator may hold a poll while there is no mail.
        door: the way to the coordinator; HTTP to `url` where absent.

    Attributes:
        while_waiting: called before every pause in which nobody answers, which may last for days; it sends nothing.

    Raises:
        InvalidSetting: the address is none, or would send messages over a network in clear.
    """

    def __init__(
        self,
        *,
        url: str,
        party_id: str,
        keys: PartyKeys,
        coordinator_key: str,
        home: Path,
        database: Database,
        journal_head: Callable[[], Head],
        check_own: Callable[[Head], None],
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
        self.mail = PartyMail(party_id, keys, database=database, sequences=Sequences(database, clock=clock))
        self._journal_head = journal_head
        self._check_own = check_own
        self._own_seen = EMPTY
        self._seen = Seen(home / SEEN_FILE)
        self._facts = facts
        self._stop = stop
        self.wait_s = wait_s
        self._ticks = ticks
        self.polled_at = ticks()
        self._after = self._next_after = ""
        self._came = b""
        self._last_answer = 0
        self._failures = 0
        self.while_waiting: Callable[[], None] = _nothing
        self._is_known = False
        self._http = door or CoordinatorHttp(url, ca_file=ca_file, read_timeout_s=wait_s + 30.0, stop=stop)

    def __enter__(self) -> PartyLink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every connection."""
        self._http.close()

    def poll(self) -> list[Message]:
        """Wait for mail. What comes is for this party; who sent it, `open` checks.

        Raises:
            JournalBehind: the coordinator's journal is older than what this party has seen of it, or this party's own
                is than what the coordinator has seen.
            NotEnrolled: this party is not enrolled, or its keys were revoked.
            ProtocolViolation: the answer is none.
            Interrupted: told to stop.
        """
        answer, self._came = self._came, b""
        if not answer:
            self._seen.rest()
            # The first is answered at once, so that this party knows that it is known.
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
        note = Mail.decode(self.mail.open_sealed(first))
        self._compare(note, first)
        self._next_after = note.after
        self.mail.drop()
        if not self._is_known:
            self._is_known = True
            tell_ready()
        return [message for message in mail if self._is_ours(message)]

    def handled(self) -> None:
        """Everything of the last poll is done with; the next one asks for what comes after it."""
        self._after = self._next_after

    def answer(self, letters: Sequence[Letter]) -> list[LabelerError | None]:
        """Send what the mail of the last poll has come to, which is done with then; see `post_all`.

        The next poll travels with the letters where they fit into one request, and the next `poll` finds what it
        brought. Where the coordinator refuses that, every letter is sent by itself, so that one takes no other with it.
        """
        errors = self._answered_with_poll(letters)
        if errors is None:
            errors = self.post_all(letters)
        self.handled()
        return errors

    def _answered_with_poll(self, letters: Sequence[Letter]) -> list[LabelerError | None] | None:
        """All letters were taken, and with them the poll; or None: they are to be sent without."""
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
        seen, own = self._seen.head(), self._journal_head()
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
        """Send letters, as many in one request as it may hold: of each the error with which it was not taken, or None.

        A request is refused as a whole from its first message that is not taken. Then each of its letters is sent by
        itself, so that a round that is over takes no other with it; what is sent twice counts once.

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

    def open(self, message: Message, verify_key: str) -> bytes:
        """See PartyMail.open; `message` is as `poll` returned it."""
        return self.mail.open(message, verify_key)

    def taken(self, messages: Sequence[Message]) -> None:
        """See PartyMail.taken."""
        self.mail.taken(messages)

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
        if own not in (self._own_seen, self._journal_head()):
            self._check_own(own)
            self._own_seen = own
        self._seen.keep(told, signed)

    def _send(self, path: str, drafts: Sequence[Draft], *, beside: bytes = b"") -> bytes:
        """Send until there is an answer: new numbers where old ones were seen, patience where nobody answers."""
        renumbered = 0
        while True:
            data = frame([self.mail.sign(draft) for draft in drafts]) + beside
            try:
                answer = self._http.post(path, data)
            except Replayed:
                # The first attempt arrived although its answer did not; sent anew it changes nothing.
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
                extra={"party": self.party_id, "problem": error.problem_type, "sentence": str(error)},
            )
        self._failures += 1
        self.while_waiting()
        if self._stop.wait(pause):
            raise Interrupted("stopped while the coordinator could not be reached") from None


def _nothing() -> None:
    """There is nothing to see to."""


def parcels(letters: Sequence[Letter]) -> Iterator[list[Letter]]:
    """Letters as they go into requests: whole, in order, within the number and size of what one request may hold."""
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
