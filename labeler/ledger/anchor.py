"""A small file beside a journal that remembers how far its ledger had come.

A journal that was replaced by yesterday's copy is a perfect journal: its chain holds, and what was charged since
yesterday is gone and could be spent again. The anchor is written after every commit and compared at the start: a
ledger that ends before its anchor, or holds another entry there, is refused. One that goes further than its anchor
is in order: the process died between the two.

The file is overwritten in place, one short record in one disk sector, and synced at most once a second: after a
power cut it may be a moment old, which only makes it milder, and a commit costs no second sync.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

from labeler.errors import InvalidSetting, JournalBehind, Unavailable
from labeler.ledger.chain import Head
from labeler.system.files import replace_file

RECORD_BYTES = 192
SYNC_EVERY_S = 1.0

WHAT_TO_DO = (
    "Restore the newest backup of the journal together with its anchor; as a last resort "
    "`labeler journal accept-restored` treats all that is left as spent"
)

_READ_ATTEMPTS = 5


class Anchor:
    """The remembered head of one ledger.

    Args:
        path: the file; its folder must exist.
        sync_every_s: the first change after so long syncs it; none does where infinite, but the one that makes it.
    """

    def __init__(self, path: Path, *, sync_every_s: float = SYNC_EVERY_S) -> None:
        self.path = path
        self._sync_every_s = sync_every_s
        self._synced_at = -SYNC_EVERY_S
        self._parsed: tuple[bytes | None, Head | None] = (None, None)
        self._accepted: bytes | None = None

    def read(self) -> Head | None:
        """What is remembered; None where there is no file.

        Raises:
            JournalBehind: the file holds no head.
        """
        for attempt in range(_READ_ATTEMPTS):
            try:
                data = read_small(self.path, RECORD_BYTES)
                if data != self._parsed[0]:
                    self._parsed = (data, _parse(data))
                return self._parsed[1]
            except FileNotFoundError:
                return None
            except (InvalidSetting, ValueError, KeyError, TypeError):
                time.sleep(0.01 * attempt)  # another process may be in the middle of writing it
            except OSError as error:
                raise Unavailable(f"{self.path.name} cannot be read: {error.strerror}") from error
        raise JournalBehind(
            f"{self.path.name} is damaged, so nobody can tell whether the journal is the newest copy. {WHAT_TO_DO}"
        )

    def is_another(self) -> bool:
        """Whether somebody else has written the file since this process wrote it, or found it right (`accept`).

        Not where it is gone or cannot be read: then it cannot be told of a charge, and nothing is answered.
        """
        try:
            return read_small(self.path, RECORD_BYTES) != self._accepted
        except OSError:
            return False

    def accept(self, head: Head) -> None:
        """What was read is of this ledger."""
        self._accepted = _record(head)

    def remember(self, head: Head) -> None:
        """Write the head down; called after the commit that made it.

        Raises:
            Unavailable: the file cannot be written. The commit itself is kept.
        """
        try:
            record = _record(head)
            self._write(record)
            self._parsed = (record, head)
            self._accepted = record
        except OSError as error:
            raise Unavailable(
                f"{self.path.name} cannot be written ({error.strerror}). The last step was kept in the journal; make "
                "room or repair the folder, then repeat it: twice equals once"
            ) from error

    def replace(self, head: Head) -> None:
        """Make the file anew, whatever was in it."""
        replace_file(self.path, _record(head), mode=0o600)

    def _write(self, record: bytes) -> None:
        try:
            handle = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            replace_file(self.path, record, mode=0o600)
            return
        try:
            os.pwrite(handle, record, 0)
            now = time.monotonic()
            if now - self._synced_at >= self._sync_every_s:
                os.fsync(handle)
                self._synced_at = now
        finally:
            os.close(handle)


def check_not_behind(head: Head, *, end: Head, found: str | None, what: str, witness: str) -> None:
    """Refuse a ledger of which somebody has seen more, or another one.

    Args:
        head: what was seen.
        end: where the ledger ends.
        found: the hash of its entry `head.seq`; None where there is none.
        what: the journal in words.
        witness: who saw it.

    Raises:
        JournalBehind: the journal is older than what was seen, or has another history.
    """
    if end.seq < head.seq:
        raise JournalBehind(
            f"{what} ends at entry {end.seq}, and {witness} has seen entry {head.seq}: this is an older copy, and what "
            f"was charged since is missing from it. {WHAT_TO_DO}"
        )
    if found != head.hash:
        raise JournalBehind(
            f"{what} has another entry {head.seq} than {witness} has seen: it was restored from an older copy and went "
            f"on from there, or is another journal. {WHAT_TO_DO}"
        )


def read_small(path: Path, most: int) -> bytes:
    """A file of at most so many bytes; one byte more of a longer one. By three calls: a party looks at every poll."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(handle, most + 1)
    finally:
        os.close(handle)


def _record(head: Head) -> bytes:
    text = json.dumps({"seq": head.seq, "hash": head.hash, "check": _check(head)})
    return text.encode("ascii").ljust(RECORD_BYTES - 1) + b"\n"


def _parse(data: bytes) -> Head:
    if len(data) > RECORD_BYTES:
        raise ValueError("longer than a record")
    found = json.loads(data)
    head = Head(found["seq"], found["hash"])
    if found["check"] != _check(head):
        raise ValueError("half of one record and half of another")
    return head


def _check(head: Head) -> str:
    """Tells a record from two halves of different ones."""
    return hashlib.sha256(f"{head.seq} {head.hash}".encode("ascii")).hexdigest()[:16]
