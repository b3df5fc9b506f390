"""What each image of an agent has spent on votes for life: a keyed digest and a number, kept for ever.

An account is an image's, whatever record holds it now: its key is the digest of the image under the site's key
(labeler.system.site_key), which stays through a new import, another backbone and new record ids. A record that is
deleted leaves its account and nothing else; were that deleted too, the same image could come back with a second budget.

What a round spends is written in the transaction that stores its answer, before a byte of it leaves. What was computed
from spends that another round has changed since is not stored (`LifetimeSpends.add`): it is computed again. A round
that failed later, or was never opened, stays spent. Spends only grow, and no row goes: rules of the database.

The ledger's chain has an entry for every round that was answered so, whatever it spent (`LifetimeSpends.commitment`),
in that same transaction. So every head that covers an answer covers its spends: a copy of the home from between charge
and answer is behind what was seen of it. A head that moved only when something was spent would tell who has run out.

A round writes a row for **every** image that was looked at, with 0 where it fell silent: the answer leaves after its
spends are stored, so a round that wrote fewer rows would tell by its haste how many images were silent.

    life_spends     digest, spent        one row per image that was ever looked at
    life_rounds     seq, round, key      one row per round that was stored: which spends an answer was computed from
    life_aside      account, nano        how much of a ledger's account was set aside for it, once
    life_closed     reason               the spends are not known any more (an older journal was restored): none vote
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
"""How the reservations begin that set B aside in an account."""

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
    """What images have spent, as of one moment of the journal. Private: it does not print.

    Attributes:
        version: how many rounds had spent by then.
        spent: nano-units of mu^2 of each image asked about, int64, shape (n,).
    """

    version: int
    spent: NDArray[np.int64]

    def __repr__(self) -> str:
        return "Spent(<private>)"


@dataclass(frozen=True, eq=False)
class CastVotes:
    """What an answer spends, to be written with it. Private: it does not print.

    Attributes:
        version: of the spends from which it was computed.
        site_key: name of the key that the digests are under.
        digests: of all images that were looked at, each once, int64, shape (n, 2).
        nano: what each spends, int64, shape (n,), 0 where it is silent.
    """

    version: int
    site_key: str
    digests: Digests = field(repr=False)
    nano: NDArray[np.int64] = field(repr=False)

    def __repr__(self) -> str:
        return "CastVotes(<private>)"


class LifetimeSpends:
    """See the module. Of one agent's journal, used by one thread."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def check(self, site_key: str | None, *, connection: Connection | None = None) -> None:
        """Refuse a shard whose images cannot be told to have voted before; a fact of how the site was set up.

        Args:
            site_key: name of the key of the shard's digests; None where it has none.

        Raises:
            PrivacyRefusal: it has none, or another than those who have voted; or the spends were lost.
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
        """What images have spent, all of one moment.

        Args:
            digests: int64, shape (n, 2), each image once.
        """
        with self._database.read() as connection:
            version = _version(connection)
            rows = connection.execute(select(life_spends.c.digest, life_spends.c.spent)).all()
        known = {bytes(digest): int(nano) for digest, nano in rows}
        return Spent(version, np.array([known.get(key, 0) for key in _keys(digests)], dtype=np.int64))

    def add(self, round_digest: str, cast: CastVotes, *, connection: Connection) -> None:
        """Write what an answer spends, in the transaction that stores the answer.

        Raises:
            PrivacyRefusal: another round has spent since it was computed, or this one has: compute it again, or send
                what was stored. Or see `check`.
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
        """What the ledger's entry of an answer says: a salted hash of what all images have spent, of one size.

        Called after `add`, in the same transaction.
        """
        salt = secrets.token_hex(_SALT_BYTES)
        return {_COMMITTED: f"{salt}:{_hash(connection, salt)}"}

    def verify(self) -> None:
        """Compare what images have spent with the ledger's last entry of an answer, whose chain holds.

        Raises:
            JournalBroken: somebody has written to one of the two.
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
        """How many rounds of votes for life were answered."""
        with self._database.read() as connection:
            return _version(connection)


def set_aside(ledger: Ledger, account: str, nano: int, *, connection: Connection | None = None) -> None:
    """Charge an account, once and for ever, with what votes for life may cost one of its records.

    Asked for less than before it changes nothing: what was promised stays charged. Asked for more it charges the rest.

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
    with database.reading(connection) as joined:
        if (joined.execute(select(life_aside.c.nano).where(mine)).scalar() or 0) >= nano:
            return
    with database.writing(connection) as joined:
        before = joined.execute(select(life_aside.c.nano).where(mine)).scalar() or 0
        if before >= nano:
            return
        # Named by the sum, so that the same step again is the same reservation.
        name = f"{SET_ASIDE}/{account}/{nano}"
        detail = {"votes_for_life_nano": nano}
        ledger.reserve(name, [Charge(account, "instance", nano - before)], detail=detail, connection=joined)
        ledger.post(name, detail=detail, connection=joined)
        if before:
            joined.execute(change(life_aside).where(mine).values(nano=nano))
        else:
            joined.execute(insert(life_aside), {"account": account, "nano": nano})


def all_set_aside(database: Database) -> dict[str, int]:
    """How much was set aside in each account, nano-units of mu^2; accounts in which nothing was are left out."""
    with database.read() as connection:
        return {account: int(nano) for account, nano in connection.execute(select(life_aside))}


def close_lifetimes(database: Database, reason: str) -> None:
    """The spends are not known any more: no record of this journal casts votes for life again."""
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
    """One statement for images that are known and for those that are not: which they are takes no other time."""
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    statement = dialect.insert(life_spends)
    more = life_spends.c.spent + statement.excluded.spent
    added: Executable = statement.on_conflict_do_update(index_elements=["digest"], set_={"spent": more})
    return added


def _keys(digests: Digests) -> list[bytes]:
    joined, size = np.ascontiguousarray(digests, dtype="<i8").tobytes(), 8 * DIGEST_WORDS
    return [joined[start : start + size] for start in range(0, len(joined), size)]
