"""The entries of a ledger as a chain of hashes, and the small anchor file that remembers the end of the chain.

    hash = SHA-256(canonical JSON of version, seq, at, kind, account, level, reservation_id, amount, detail and the
           hash of the entry before)

Changing, dropping or reordering an entry changes every hash after it. A `Head` (the last sequence number and its
hash) therefore stands for the whole history. A copy of it elsewhere reveals that a journal was cut or rewritten.
Canonical JSON has sorted keys, no blanks, and only ASCII. `detail` is hashed as the stored text.

A head is sent in clear, and a cap has few likely values, which a reader of heads could try. So each entry's detail
begins with a random salt of 16 bytes (`salted`), and such a trial fails. The salt is stored with the entry, so
verification needs no secret.

Suppose yesterday's copy replaces a journal. Its chain holds, but charges since yesterday are gone and could be spent
again. The `Anchor` file is written after every commit and compared at the start. A ledger that ends before its anchor,
or holds another entry there, is refused. A ledger that goes further than its anchor is in order: the process died
between the two writes.

The anchor is one short record in one disk sector. It is overwritten in place and synced at most once a second, so most
commits need no second sync. After a power cut the anchor may be slightly old, which only makes the check milder.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

from labeler.errors import InvalidSetting, JournalBehind, TooLarge, Unavailable
from labeler.system.files import replace_file

Kind = Literal["open", "cap", "reserve", "post", "answer", "void"]

KINDS: tuple[str, ...] = get_args(Kind)

GENESIS = "0" * 64
"""The previous hash that the first entry names."""

MAX_DETAIL_BYTES = 16 * 1024

SALT_BYTES = 16

_SALT = "salt"
SALTED = f'{{"{_SALT}":"'
"""Prefix of the stored detail of an entry; its salt follows in hexadecimal digits."""
_VERSION = "labeler-ledger/1"
_HASH = re.compile(r"[0-9a-f]{64}")
_WRITTEN = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{6}Z")


@dataclass(frozen=True)
class Head:
    """The end of a ledger, which identifies everything before it.

    Attributes:
        seq: sequence number of the last entry; 0 if there is none.
        hash: hash of the last entry, 64 hex digits; all zeros if there is none.
    """

    seq: int
    hash: str

    def __post_init__(self) -> None:
        if type(self.seq) is not int or self.seq < 0:
            raise InvalidSetting(f"a sequence number is a whole number of at least 0, found {self.seq!r}")
        if type(self.hash) is not str or not _HASH.fullmatch(self.hash):
            raise InvalidSetting("the hash of an entry is 64 hexadecimal digits in lower case")
        if (self.seq == 0) != (self.hash == GENESIS):
            raise InvalidSetting("the hash of all zeros belongs to sequence number 0, and to no other")


EMPTY = Head(0, GENESIS)
"""The head of a ledger without entries."""


@dataclass(frozen=True)
class Entry:
    """One entry of the ledger; it never changes.

    Attributes:
        seq: 1, 2, 3, ... without gaps.
        at: when it was written; never earlier than the entry before it.
        kind: "open" and "cap" set a cap. "reserve", "post" and "void" move a charge. "answer" moves none: it says that
            the answer that a charge paid for was stored.
        reservation_id: the charge; empty for "open" and "cap".
        amount: nano-units of mu^2; the cap for "open" and "cap" (0 if it is not limited, see `detail`); 0 for
            "answer".
        detail: further facts, JSON, without the salt.
        previous_hash, hash: the links of the chain.
    """

    seq: int
    at: datetime
    kind: Kind
    account: str
    level: str
    reservation_id: str
    amount: int
    detail: Mapping[str, Any]
    previous_hash: str
    hash: str


def entry_hash(row: Mapping[str, Any]) -> str:
    """Return the hash of an entry as it is stored (`at` and `detail` as texts)."""
    fields = {
        "version": _VERSION,
        "seq": row["seq"],
        "at": row["at"],
        "kind": row["kind"],
        "account": row["account"],
        "level": row["level"],
        "reservation_id": row["reservation_id"],
        "amount": row["amount"],
        "detail": row["detail"],
        "previous_hash": row["previous_hash"],
    }
    return hashlib.sha256(canonical(fields).encode("ascii")).hexdigest()


def entry_of(row: Mapping[str, Any]) -> Entry:
    """Return an entry from its stored form.

    Raises:
        ValueError: the row was never written by this program.
    """
    detail = json.loads(row["detail"])
    if not isinstance(detail, dict):
        raise ValueError("no detail as it is stored")
    detail.pop(_SALT, None)
    return Entry(**{**row, "at": time_of(row["at"]), "detail": detail})


def canonical(value: object) -> str:
    """Return the canonical JSON of a value: one spelling per value.

    Raises:
        TypeError, ValueError: the value is not JSON, or holds NaN or infinity.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def detail_text(detail: Mapping[str, Any]) -> str:
    """Return the detail of an entry as it is stored.

    Raises:
        InvalidSetting: the detail is not JSON, a key is not text, or it has a salt already.
        TooLarge: the text is longer than MAX_DETAIL_BYTES.
    """
    if not detail:
        return "{}"
    try:
        written = canonical(dict(detail))
    except (TypeError, ValueError):
        raise InvalidSetting("the detail of a ledger entry is JSON: texts, whole and finite numbers, lists") from None
    if not all(type(key) is str for key in detail):
        raise InvalidSetting("the detail of a ledger entry has texts as keys")
    if _SALT in detail:
        raise InvalidSetting("the salt of a ledger entry is drawn when it is written")
    if len(written) > MAX_DETAIL_BYTES:
        raise TooLarge(f"the detail of a ledger entry is at most {MAX_DETAIL_BYTES} bytes, found {len(written)}")
    return written


def salted(detail: str) -> str:
    """Add a random salt to the output of `detail_text`; without it, nobody can compute the hash of the entry."""
    rest = "}" if detail == "{}" else f",{detail[1:]}"
    return f'{SALTED}{secrets.token_hex(SALT_BYTES)}"{rest}'


def time_text(at: datetime) -> str:
    """Return a time as it is stored: UTC with microseconds, so that texts sort as times do.

    Raises:
        InvalidSetting: the time has no time zone.
    """
    if at.tzinfo is None:
        raise InvalidSetting("the ledger's clock gives times with a time zone, such as datetime.now(UTC)")
    return at.astimezone(UTC).isoformat(timespec="microseconds").removesuffix("+00:00") + "Z"


def time_of(written: str) -> datetime:
    """Return the time that a stored text represents.

    Raises:
        ValueError: `time_text` writes no such text.
    """
    if not _WRITTEN.fullmatch(written):
        raise ValueError("no time as it is stored")
    return datetime.fromisoformat(written)


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
        sync_every_s: the least time between two syncs. If infinite, only creating the file syncs.
    """

    def __init__(self, path: Path, *, sync_every_s: float = SYNC_EVERY_S) -> None:
        self.path = path
        self._sync_every_s = sync_every_s
        self._synced_at = -SYNC_EVERY_S
        self._accepted: bytes | None = None

    def read(self) -> Head | None:
        """Return the remembered head; None if there is no file.

        Raises:
            JournalBehind: the file holds no head.
        """
        for attempt in range(_READ_ATTEMPTS):
            try:
                return _parse(read_small(self.path, RECORD_BYTES))
            except FileNotFoundError:
                return None
            except (InvalidSetting, ValueError, KeyError, TypeError):
                time.sleep(0.01 * attempt)  # another process may be writing it right now
            except OSError as error:
                raise Unavailable(f"{self.path.name} cannot be read: {error.strerror}") from error
        raise JournalBehind(
            f"{self.path.name} is damaged, so nobody can tell whether the journal is the newest copy. {WHAT_TO_DO}"
        )

    def is_another(self) -> bool:
        """Return whether another process has written the file since this one last wrote or accepted it (`accept`).

        Return False if the file is gone or unreadable. Then no charge can be recorded in it, so nothing is answered
        anyway.
        """
        try:
            return read_small(self.path, RECORD_BYTES) != self._accepted
        except OSError:
            return False

    def accept(self, head: Head) -> None:
        """Note that the file's content was checked and belongs to this ledger."""
        self._accepted = _record(head)

    def remember(self, head: Head) -> None:
        """Write the head to the file; called after the commit that made it.

        Raises:
            Unavailable: the file cannot be written. The commit itself is kept.
        """
        try:
            record = _record(head)
            self._write(record)
            self._accepted = record
        except OSError as error:
            raise Unavailable(
                f"{self.path.name} cannot be written ({error.strerror}). The last step was kept in the journal; make "
                "room or repair the folder, then repeat it: twice equals once"
            ) from error

    def replace(self, head: Head) -> None:
        """Write a new file, whatever the old one held."""
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


def read_small(path: Path, most: int) -> bytes:
    """Return at most `most` + 1 bytes of a file.

    It takes only three system calls, because a party reads the anchor at every poll.
    """
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
    """Return a checksum that detects a record made of two halves."""
    return hashlib.sha256(f"{head.seq} {head.hash}".encode("ascii")).hexdigest()[:16]
