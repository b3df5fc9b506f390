"""The entries of a ledger as a chain of hashes: each holds the hash of the one before it.

    hash = SHA-256(canonical JSON of version, seq, at, kind, account, level, reservation_id, amount, detail and the
           hash of the entry before)

Whoever changes, drops or reorders an entry changes every hash after it. A `Head` (the last sequence number and its
hash) therefore stands for the whole history; kept anywhere else, it shows that a journal was cut or rewritten.
Canonical JSON: keys sorted, no blanks, ASCII. `detail` enters as the text that is stored.

A head is sent in clear, and a cap has few likely values. So each entry's detail begins with a random salt of 16 bytes
(`salted`): whoever sees heads cannot find out by trying what an entry says. The salt is stored with the entry, so
verification needs no secret.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, get_args

from labeler.errors import InvalidSetting, TooLarge

Kind = Literal["open", "cap", "reserve", "post", "answer", "void"]

KINDS: tuple[str, ...] = get_args(Kind)

GENESIS = "0" * 64
"""What the first entry names as the hash before it."""

MAX_DETAIL_BYTES = 16 * 1024

SALT_BYTES = 16

_SALT = "salt"
SALTED = f'{{"{_SALT}":"'
"""Begins the stored detail of an entry; its salt follows in hexadecimal digits."""
_VERSION = "labeler-ledger/1"
_HASH = re.compile(r"[0-9a-f]{64}")
_WRITTEN = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{6}Z")


@dataclass(frozen=True)
class Head:
    """The end of a ledger: it stands for everything before it.

    Attributes:
        seq: of the last entry; 0 where there is none.
        hash: of the last entry, 64 hex digits; all zeros where there is none.
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
    """One line of the ledger, as it stays for ever.

    Attributes:
        seq: 1, 2, 3, ... without gaps.
        at: when it was written; never before the entry before it.
        kind: "open" and "cap" set a cap; "reserve", "post" and "void" move a charge; "answer" says that what a charge
            paid for was stored, and moves none.
        reservation_id: which charge; empty for "open" and "cap".
        amount: nano-units of mu^2; the cap for "open" and "cap" (0 where it is not limited, see `detail`); 0 for
            "answer".
        detail: what else was known, JSON, without the salt.
        previous_hash, hash: the chain.
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
    """The hash of an entry as it is stored (`at` and `detail` as texts)."""
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
    """An entry as it is read, from an entry as it is stored.

    Raises:
        ValueError: the row was never written by this program.
    """
    detail = json.loads(row["detail"])
    if not isinstance(detail, dict):
        raise ValueError("no detail as it is stored")
    detail.pop(_SALT, None)
    return Entry(**{**row, "at": time_of(row["at"]), "detail": detail})


def canonical(value: object) -> str:
    """JSON with one spelling.

    Raises:
        TypeError, ValueError: the value is not JSON, or holds NaN or infinity.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def detail_text(detail: Mapping[str, Any]) -> str:
    """The detail of an entry as it is stored.

    Raises:
        InvalidSetting: it is not JSON, or not an object with texts as keys, or names a salt of its own.
        TooLarge: it is longer than MAX_DETAIL_BYTES.
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
    """The detail of new entries, from what `detail_text` wrote: nobody who lacks it can compute their hashes."""
    rest = "}" if detail == "{}" else f",{detail[1:]}"
    return f'{SALTED}{secrets.token_hex(SALT_BYTES)}"{rest}'


def time_text(at: datetime) -> str:
    """A time as it is stored: UTC with microseconds, so that texts sort as times do.

    Raises:
        InvalidSetting: the time has no time zone.
    """
    if at.tzinfo is None:
        raise InvalidSetting("the ledger's clock gives times with a time zone, such as datetime.now(UTC)")
    return at.astimezone(UTC).isoformat(timespec="microseconds").removesuffix("+00:00") + "Z"


def time_of(written: str) -> datetime:
    """The time that a stored text stands for.

    Raises:
        ValueError: `time_text` writes no such text.
    """
    if not _WRITTEN.fullmatch(written):
        raise ValueError("no time as it is stored")
    return datetime.fromisoformat(written)
