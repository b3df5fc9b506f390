"""Access tokens: shown once when they are made, stored as a hash, and found by it.

A token is 256 bits from the operating system, so its SHA-256 cannot be searched; nothing slower is needed.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Literal

from sqlalchemy import Connection, func, select, update

from labeler.errors import InvalidSetting, NotFound
from labeler.ledger.database import Database, insert_rows, now_utc, select_rows
from labeler.ledger.schema import ROLES, tokens
from labeler.system.clock import Clock

Role = Literal["admin", "requester", "viewer"]

PREFIX = "lab_"
_SECRET_BYTES = 32
_MAX_SECRET = 200
_MAX_NAME = 100
_MOST_KNOWN = 10_000

_SHOWN = (tokens.c.token_id, tokens.c.name, tokens.c.role, tokens.c.created_at, tokens.c.revoked_at)


@dataclass(frozen=True)
class TokenRecord:
    """A token without its secret.

    Attributes:
        token_id: its name in records and logs; not secret.
        name: for people.
        revoked_at: when it was revoked; None while it is active.
    """

    token_id: str
    name: str
    role: Role
    created_at: datetime
    revoked_at: datetime | None = None


class TokenStore:
    """All access tokens of a coordinator.

    Found tokens are cached: only this object revokes any, and a revocation clears the cache.
    """

    def __init__(self, database: Database, *, clock: Clock = now_utc) -> None:
        self._database = database
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[str, TokenRecord] = {}
        self._revocations = 0

    def create(self, name: str, role: Role, *, connection: Connection | None = None) -> tuple[TokenRecord, str]:
        """Make a token.

        Returns:
            Its record, and the secret "lab_..."; it cannot be shown a second time.

        Raises:
            InvalidSetting: there is no such role, or the name is empty, too long or not printable.
        """
        if role not in ROLES:
            raise InvalidSetting(f"the role of a token is {', '.join(ROLES)}; found {role!r}")
        if not 1 <= len(name) <= _MAX_NAME or not name.isprintable():
            raise InvalidSetting(f"the name of a token has 1 to {_MAX_NAME} printable characters")
        secret = PREFIX + secrets.token_urlsafe(_SECRET_BYTES)
        record = TokenRecord(f"tok_{secrets.token_hex(8)}", name, role, self._clock())
        with self._database.writing(connection) as joined:
            insert_rows(joined, tokens, asdict(record) | {"secret_digest": _digest(secret)})
        return record, secret

    def find(self, secret: str) -> TokenRecord | None:
        """Return the token of a secret, unless it was revoked.

        The lookup key is a hash that the caller cannot steer, and it is compared in constant time. So the time of an
        answer tells nothing about any secret.
        """
        if not isinstance(secret, str) or not secret.startswith(PREFIX) or len(secret) > _MAX_SECRET:
            return None
        digest = _digest(secret)
        revocations = self._revocations
        with self._database.read() as connection:
            row = select_rows(connection, tokens, secret_digest=digest).first()
        if row is None or not hmac.compare_digest(row.secret_digest, digest) or row.revoked_at is not None:
            return None
        record = TokenRecord(row.token_id, row.name, row.role, row.created_at)
        with self._lock:
            if revocations == self._revocations and len(self._known) < _MOST_KNOWN:
                self._known[digest] = record
        return record

    def known(self, secret: str) -> TokenRecord | None:
        """Return the token of a secret that was found before and not revoked since, without a database query."""
        return self._known.get(_digest(secret))

    def name_of(self, token_id: str) -> str:
        """Return the name of a token, which never changes; empty if there is no such token."""
        with self._database.read() as connection:
            found = select_rows(connection, tokens, token_id=token_id).first()
        return "" if found is None else str(found.name)

    def is_active(self, token_id: str) -> bool:
        """Return whether a token exists and was not revoked."""
        with self._database.read() as connection:
            row = select_rows(connection, tokens, token_id=token_id).first()
        return row is not None and row.revoked_at is None

    def revoke(self, token_id: str) -> TokenRecord:
        """Revoke a token permanently; a second time changes nothing.

        Raises:
            NotFound: there is no such token.
        """
        this = tokens.c.token_id == token_id
        with self._database.write() as joined:
            joined.execute(update(tokens).where(this, tokens.c.revoked_at.is_(None)).values(revoked_at=self._clock()))
            row = joined.execute(select(*_SHOWN).where(this)).first()
        with self._lock:
            self._revocations += 1
            self._known.clear()
        if row is None:
            raise NotFound(f"there is no token {token_id[:100]!r}; look at the list of tokens")
        return TokenRecord(**row._mapping)

    def count(self) -> int:
        """Return the number of active tokens; 0 if the first has yet to be made."""
        query = select(func.count()).select_from(tokens).where(tokens.c.revoked_at.is_(None))
        with self._database.read() as joined:
            return int(joined.execute(query).scalar_one())

    def list(self, *, connection: Connection | None = None) -> list[TokenRecord]:
        """Return every token, oldest first, including revoked ones."""
        query = select(*_SHOWN).order_by(tokens.c.created_at, tokens.c.token_id)
        with self._database.reading(connection) as joined:
            return [TokenRecord(**row._mapping) for row in joined.execute(query)]


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()
