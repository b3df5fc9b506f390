"""Witnesses: parties that have seen more of the coordinator's journal than this one holds.

A journal restored from an older copy has lost charges, and only those who saw the newer one can tell. Their word alone
would let any one party stop the service, so it takes proof: every answer to a poll is signed by the coordinator and
states the head of its journal; a party keeps the answer that told it the furthest head, and sends it along with its
next poll. What this coordinator's own key has signed and its journal does not hold is missing from the journal.

Without proof only that party is refused, because it would not believe this coordinator's answers either; people see its
claim in the list of parties, and jobs go on.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict

from labeler.errors import JournalBehind, LabelerError
from labeler.ledger.chain import Head
from labeler.ledger.ledger import Ledger
from labeler.messages import COORDINATOR, Message
from labeler.messages.bodies import Mail, Poll
from labeler.system.keys import verify

log = logging.getLogger("labeler.mailroom")

MAX_KNOWN = 4096
"""Heads that were found in the journal, or told to parties, and need not be looked for again."""


class Witnesses:
    """Compares what parties have seen of the journal with the journal.

    Args:
        verify_key: the coordinator's own, which what it signed before is checked with.
    """

    def __init__(self, ledger: Ledger, verify_key: str) -> None:
        self._ledger = ledger
        self._verify_key = verify_key
        self._lock = threading.Lock()
        self._proven: dict[str, int] = {}
        self._claimed: dict[str, int] = {}
        self._known: OrderedDict[tuple[int, str], None] = OrderedDict()

    @property
    def sentence(self) -> str:
        """Why the journal is known to be behind, and by whom; empty while it is not."""
        with self._lock:
            first = next(iter(self._proven.items()), None)
        return "" if first is None else _behind(*first)

    @property
    def doubters(self) -> tuple[str, ...]:
        """Parties that say, without proof, to have seen what the journal does not hold."""
        with self._lock:
            return tuple(sorted(self._claimed))

    def claim(self, party_id: str) -> str:
        """What a party says of the journal and cannot prove; empty where it says nothing."""
        with self._lock:
            seq = self._claimed.get(party_id)
        return "" if seq is None else f"says that it has seen entry {seq} of the coordinator's journal, without proof"

    def forget(self, party_id: str) -> None:
        """A party is believed no longer, or has seen what the journal holds."""
        with self._lock:
            self._proven.pop(party_id, None)
            self._claimed.pop(party_id, None)

    def compare(self, party_id: str, poll: Poll, proof: Message | None) -> None:
        """Compare what a party has seen with the journal.

        It gets no answer where they differ, so that what it has seen is not overwritten once the journal has grown
        longer than that. Where its site has consented to this journal, it says so by what it has seen.

        Args:
            party_id: who polls; its signature was checked.
            proof: an answer to a poll as this coordinator signed it; None where none came.

        Raises:
            JournalBehind: the journal does not hold what the party says it has seen.
        """
        if not poll.coordinator_seq or self._holds(Head(poll.coordinator_seq, poll.coordinator_hash)):
            self.forget(party_id)
            if poll.coordinator_seq:
                self.told(Head(poll.coordinator_seq, poll.coordinator_hash))
            return
        seen = self._signed(proof)
        if seen is not None and not self._holds(seen):
            self._note(self._proven, self._claimed, party_id, seen.seq)
            raise JournalBehind(
                f"{_behind(party_id, seen.seq)}. Nothing is handed out until the newest journal is back, or the site "
                "consents to this one (labeler journal trust-restored)"
            )
        self._note(self._claimed, self._proven, party_id, poll.coordinator_seq)
        raise JournalBehind(
            f"{party_id} says that it has seen entry {poll.coordinator_seq} of the coordinator's journal, which does "
            "not hold it, and sent no answer with this coordinator's signature that proves it. Only this party is "
            "refused: restore its coordinator.proof, or tell the operator; where the journal was restored, the site "
            "consents to it (labeler journal trust-restored)"
        )

    def is_held(self, party_id: str, poll: Poll) -> bool:
        """Whether what a party has seen was found in the journal before, so that nobody has to look again."""
        with self._lock:
            if party_id in self._proven or party_id in self._claimed:
                return False
            return not poll.coordinator_seq or (poll.coordinator_seq, poll.coordinator_hash) in self._known

    def told(self, head: Head) -> None:
        """A head of this journal that parties are told now: they will say that they have seen it."""
        with self._lock:
            self._known[head.seq, head.hash] = None
            while len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)

    def _note(self, into: dict[str, int], out_of: dict[str, int], party_id: str, seq: int) -> None:
        with self._lock:
            is_news = party_id not in into
            into[party_id] = seq
            out_of.pop(party_id, None)
        if is_news and into is self._proven:
            log.error("journal is behind", extra={"party": party_id, "seq": seq})
        elif is_news:
            log.warning("a party says without proof that the journal is behind", extra={"party": party_id, "seq": seq})

    def _holds(self, head: Head) -> bool:
        try:
            self._ledger.check_not_behind(head)
        except JournalBehind:
            return False
        return True

    def _signed(self, proof: Message | None) -> Head | None:
        """The head that this coordinator once stated under its signature; None where it is not its own statement."""
        if proof is None or proof.header.kind != "poll" or proof.header.sender != COORDINATOR:
            return None
        try:
            verify(proof, self._verify_key)
            stated = Mail.decode(proof.body)
        except LabelerError:
            return None
        return Head(stated.coordinator_seq, stated.coordinator_hash) if stated.coordinator_seq else None


def _behind(party_id: str, seq: int) -> str:
    return (
        f"{party_id} has seen entry {seq} of the coordinator's journal, and this journal does not hold it: it is an "
        "older copy, and charges are missing from it"
    )
