"""The permanent record of what each image of an agent has spent on votes for life: a keyed digest and a number.

An account belongs to an image, whatever record holds it now: its key is the digest of the image under the site's key
(labeler.system.site_key), which survives a new import, another backbone and new record ids. A deleted record leaves
only its account. If that were deleted too, the same image could come back with a second budget.

What a round spends is written in the transaction that stores its answer, before a byte of it leaves. If another round
has changed the spends since the answer was computed, the answer is not stored but computed again
(`LifetimeSpends.add`). A round that failed later, or was never opened, stays spent. Database rules ensure that spends
only grow and that no row is deleted.

The ledger's chain has an entry for every round that was answered so, whatever it spent (`LifetimeSpends.commitment`),
in that same transaction. So every head that covers an answer covers its spends: a copy of the home from between charge
and answer is behind the heads already seen. If the head moved only when something was spent, it would tell which
images have run out.

A round writes a row for **every** image that was looked at, with 0 if it stays silent. The answer leaves after its
spends are stored, so a round that wrote fewer rows would tell by its speed how many images were silent.

    life_spends     digest, spent        one row per image that was ever looked at
    life_rounds     seq, round, key      one row per stored round: the spends from which an answer was computed
    life_aside      account, nano        how much of a ledger's account was set aside for it, once
    life_closed     reason               the spends were lost (an older journal was restored): no image votes
"""

from __future__ import annotations

import hashlib
import json
import secrets
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, Executable, func, insert, select
from sqlalchemy import update as change
from sqlalchemy.dialects import postgresql, sqlite

from labeler.errors import InvalidSetting, JournalBroken, PrivacyRefusal
from labeler.ledger.database import Database
from labeler.ledger.ledger import Charge, Ledger
from labeler.ledger.schema import ledger_entries, life_aside, life_closed, life_rounds, life_spends
from labeler.system.site_key import DIGEST_WORDS, Digests

SET_ASIDE = "votes-for-life"
"""Prefix of the reservations that set B aside in an account."""

CLOSED = (
    "an older journal was restored at this site, so nobody knows what its records have spent on votes for life since; "
    "they cast none any more"
)
OTHER_KEY = (
    "the shard's images are known under another site key than those that have voted for life, so that nobody could "
    "tell what each has spent; embed them again with the site key that they were embedded with before"
)
NO_DIGESTS = (
    "votes for life need a shard that knows its images again, and this one was made without a site key; embed the "
    "images again"
)


_COMMITTED = "spends"
_SALT_BYTES = 16


@dataclass(frozen=True, eq=False, repr=False)
class Spent:
    """The spends of images, as of one moment of the journal. Private: it does not print.

    Attributes:
        version: number of rounds that had spent by then.
        spent: nano-units of mu^2 of each image asked about, int64, shape (n,).
    """

    version: int
    spent: NDArray[np.int64]

    def __repr__(self) -> str:
        return "Spent(<private>)"


@dataclass(frozen=True, eq=False)
class CastVotes:
    """The spends of an answer, to be written with it. Private: it does not print.

    Attributes:
        version: of the spends from which it was computed.
        site_key: name of the key that the digests are under.
        digests: of all images that were looked at, each once, int64, shape (n, 2).
        nano: what each spends, int64, shape (n,), 0 if it is silent.
    """

    version: int
    site_key: str
    digests: Digests = field(repr=False)
    nano: NDArray[np.int64] = field(repr=False)

    def __repr__(self) -> str:
        return "CastVotes(<private>)"


class LifetimeSpends:
    """The spends in one agent's journal (see the module); used by one thread."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def check(self, site_key: str | None, *, connection: Connection | None = None) -> None:
        """Refuse a shard whose images cannot be matched to earlier votes. This depends only on how the site was set up.

        Args:
            site_key: name of the key of the shard's digests; None if it has none.

        Raises:
            PrivacyRefusal: it has none, or a different one than earlier votes had; or the spends were lost.
        """
        if site_key is None:
            raise PrivacyRefusal(NO_DIGESTS)
        with self._database.reading(connection) as joined:
            if joined.execute(select(life_closed.c.reason).limit(1)).first() is not None:
                raise PrivacyRefusal(CLOSED)
            known = joined.execute(select(life_rounds.c.site_key).order_by(life_rounds.c.seq).limit(1)).scalar()
        if known is not None and known != site_key:
            raise PrivacyRefusal(OTHER_KEY)

    def spent(self, digests: Digests) -> Spent:
        """Return the spends of images, all of one moment.

        Args:
            digests: int64, shape (n, 2), each image once.
        """
        with self._database.read() as connection:
            version = _version(connection)
            rows = connection.execute(select(life_spends.c.digest, life_spends.c.spent)).all()
        known = {bytes(digest): int(nano) for digest, nano in rows}
        return Spent(version, np.array([known.get(key, 0) for key in _keys(digests)], dtype=np.int64))

    def add(self, round_digest: str, cast: CastVotes, *, connection: Connection) -> None:
        """Write the spends of an answer, in the transaction that stores the answer.

        Raises:
            PrivacyRefusal: another round has spent since it was computed: compute it again. Or this round has spent:
                send the stored answer. Or see `check`.
        """
        self.check(cast.site_key, connection=connection)
        if _version(connection) != cast.version:
            raise PrivacyRefusal("another round has spent of the same records meanwhile; this one is computed again")
        row = {"seq": cast.version + 1, "round_digest": round_digest, "site_key": cast.site_key}
        connection.execute(insert(life_rounds), row)
        spends = zip(_keys(cast.digests), cast.nano.tolist(), strict=True)
        rows = [{"digest": key, "spent": nano} for key, nano in spends]
        if rows:
            connection.execute(_added(connection), rows)

    def commitment(self, *, connection: Connection) -> dict[str, str]:
        """Return the content of an answer's ledger entry: a salted hash of all spends, of constant size.

        Called after `add`, in the same transaction.
        """
        salt = secrets.token_hex(_SALT_BYTES)
        return {_COMMITTED: f"{salt}:{_hash(connection, salt)}"}

    def verify(self) -> None:
        """Compare the spends with the ledger's last "answer" entry; the chain must be verified already.

        Raises:
            JournalBroken: somebody has changed one of the two.
        """
        last = select(ledger_entries.c.detail).where(ledger_entries.c.kind == "answer")
        with self._database.read() as connection:
            detail = connection.execute(last.order_by(ledger_entries.c.seq.desc()).limit(1)).scalar()
            if detail is None:
                return
            salt, _, expected = str(json.loads(detail).get(_COMMITTED)).partition(":")
            if _hash(connection, salt) != expected:
                raise JournalBroken(
                    f"{self._database.what}: what images have spent on votes for life is not what the ledger's last "
                    "answer says. Keep the file as evidence and restore the newest backup"
                )

    def rounds(self) -> int:
        """Return the number of rounds of votes for life that were answered."""
        with self._database.read() as connection:
            return _version(connection)


def set_aside(ledger: Ledger, account: str, nano: int) -> None:
    """Charge an account, once and permanently, with the most that votes for life may cost one of its records.

    A smaller amount than before changes nothing, because the earlier promise stays charged. A larger amount charges
    the difference.

    Args:
        nano: B, nano-units of mu^2.

    Raises:
        BudgetExceeded: the account has too little left.
        NotFound: it was never opened.
    """
    if type(nano) is not int or nano < 1:
        raise InvalidSetting(f"what is set aside is a whole number of nano-units of at least 1, found {nano!r}")
    database = ledger.database
    mine = life_aside.c.account == account
    with database.read() as joined:
        if (joined.execute(select(life_aside.c.nano).where(mine)).scalar() or 0) >= nano:
            return
    with database.write() as joined:
        before = joined.execute(select(life_aside.c.nano).where(mine)).scalar() or 0
        if before >= nano:
            return
        # Named by the sum, so that a repeated step makes the same reservation.
        name = f"{SET_ASIDE}/{account}/{nano}"
        detail = {"votes_for_life_nano": nano}
        ledger.reserve(name, [Charge(account, "instance", nano - before)], detail=detail, connection=joined)
        ledger.post(name, detail=detail, connection=joined)
        if before:
            joined.execute(change(life_aside).where(mine).values(nano=nano))
        else:
            joined.execute(insert(life_aside), {"account": account, "nano": nano})


def all_set_aside(database: Database, *, connection: Connection | None = None) -> dict[str, int]:
    """Return the amount set aside in each account, nano-units of mu^2; accounts with none are left out."""
    with database.reading(connection) as joined:
        return {account: int(nano) for account, nano in joined.execute(select(life_aside))}


def close_lifetimes(database: Database, reason: str) -> None:
    """Mark the spends as lost: no record of this journal casts votes for life again."""
    with database.write() as connection:
        if connection.execute(select(life_closed.c.reason).limit(1)).first() is None:
            connection.execute(insert(life_closed), {"reason": reason})


def _version(connection: Connection) -> int:
    return int(connection.execute(select(func.max(life_rounds.c.seq))).scalar() or 0)


def _hash(connection: Connection, salt: str) -> str:
    rows = connection.execute(select(life_spends).order_by(life_spends.c.digest)).all()
    spent = np.array([nano for _, nano in rows], dtype="<i8")
    found = hashlib.sha256(f"{salt}:{_version(connection)}:{len(rows)}:".encode())
    found.update(b"".join(bytes(digest) for digest, _ in rows))
    found.update(spent.tobytes())
    return found.hexdigest()


def _added(connection: Connection) -> Executable:
    """Return one statement for known and new images, so that timing does not tell which they are."""
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    statement = dialect.insert(life_spends)
    more = life_spends.c.spent + statement.excluded.spent
    added: Executable = statement.on_conflict_do_update(index_elements=["digest"], set_={"spent": more})
    return added


def _keys(digests: Digests) -> list[bytes]:
    joined, size = np.ascontiguousarray(digests, dtype="<i8").tobytes(), 8 * DIGEST_WORDS
    return [joined[start : start + size] for start in range(0, len(joined), size)]
