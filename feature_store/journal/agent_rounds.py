"""What an agent keeps of a round: that it is open, then what it has sent, then only that there is nothing any more.

    charged --> stored --> erased     charged: paid for, nothing has left; its key lies in the folder of erasable keys
        \\____________________^       stored:  the bodies of its messages, encrypted under that key
                                      erased:  for ever; the key is gone, so every copy of what was stored is noise

A round is opened in the transaction that charges it, after its key is durable; the key is drawn at random and says
nothing of any other. What is stored is durable before a byte of it leaves, and is never replaced, so an answer that was
asked for again is the stored one. It is erased once the coordinator says that every tallier has what it needs, and at
the latest when nobody may ask any more. `answered_rounds` keeps for ever that the round was charged.

A round that was answered by a version without this table is one of which nothing is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import CheckConstraint, Column, Connection, ForeignKey, LargeBinary, Table, Text, insert, select, update

from feature_store.erasable import ErasableKeys, lock_away, take_out
from feature_store.journal.agent_memory import answered_rounds
from feature_store.journal.columns import Moment, check_moment, json_text, one_of
from feature_store.journal.database import Database, metadata
from feature_store.journal.rules import forbid, remain, stay
from labeler.answered import ANSWERED_TO_OTHERS, NOT_KEPT, Recipients
from labeler.errors import PrivacyRefusal

agent_rounds = Table(
    "agent_rounds",
    metadata,
    Column("round_digest", Text, ForeignKey("answered_rounds.round_digest"), primary_key=True),
    Column("state", Text, nullable=False),
    Column("kept_until", Moment, nullable=False),
    Column("answer", LargeBinary, nullable=True),
    CheckConstraint(one_of("state", ("charged", "stored", "erased")), name="state"),
    CheckConstraint("(state = 'stored') = (answer IS NOT NULL)", name="stored"),
    sqlite_strict=True,
)
stay(agent_rounds, ("round_digest", "kept_until"))
remain(agent_rounds)
forbid(
    agent_rounds,
    "once",
    on="UPDATE",
    when="OLD.state = 'erased' OR NEW.state = 'charged' "
    "OR (OLD.answer IS NOT NULL AND NEW.answer IS NOT NULL AND NEW.answer IS DISTINCT FROM OLD.answer)",
    because="an answer is stored once and erased for ever",
)


class JournalRounds:
    """A `workers.round_store.RoundStore` in an agent's journal.

    Args:
        database: the agent's journal.
        keys: erasable keys, outside of the journal and of every backup.
    """

    def __init__(self, database: Database, keys: ErasableKeys) -> None:
        self._database = database
        self._keys = keys
        database.create(answered_rounds, agent_rounds)

    def open(self, round_digest: str, kept_until: datetime, *, connection: Connection) -> None:
        """Begin a round that is charged in the same transaction; its key is durable when this returns.

        Args:
            round_digest: a round that `AgentMemory.charge` has just taken the price of.
            kept_until: after which nobody may ask any more, and everything is erased.
            connection: the transaction of the charge.
        """
        self._keys.draw(round_digest)
        row = {"round_digest": round_digest, "state": "charged", "kept_until": check_moment(kept_until)}
        connection.execute(insert(agent_rounds), row)

    def stored(self, round_digest: str, recipients: Recipients) -> tuple[bytes, ...] | None:
        """See RoundStore."""
        query = (
            select(answered_rounds.c.recipients, agent_rounds.c.state, agent_rounds.c.answer)
            .join(agent_rounds, answered_rounds.c.round_digest == agent_rounds.c.round_digest, isouter=True)
            .where(answered_rounds.c.round_digest == round_digest)
        )
        with self._database.read() as connection:
            row = connection.execute(query).one_or_none()
        if row is None:
            return None
        key = self._keys.read(round_digest)
        if key is None or row.state not in ("charged", "stored"):
            raise PrivacyRefusal(NOT_KEPT)
        if row.recipients != json_text([list(recipient) for recipient in recipients]):
            raise PrivacyRefusal(ANSWERED_TO_OTHERS)
        return None if row.answer is None else take_out(key, round_digest, bytes(row.answer))

    def key(self, round_digest: str) -> bytes:
        """See RoundStore."""
        with self._database.read() as connection:
            query = select(agent_rounds.c.state).where(agent_rounds.c.round_digest == round_digest)
            state = connection.execute(query).scalar()
        key = self._keys.read(round_digest)
        if key is None or state not in ("charged", "stored"):
            raise PrivacyRefusal(NOT_KEPT)
        return key

    def store(self, round_digest: str, recipients: Recipients, bodies: Sequence[bytes]) -> tuple[bytes, ...]:
        """See RoundStore."""
        locked = lock_away(self.key(round_digest), round_digest, tuple(bodies))
        with self._database.write() as connection:
            connection.execute(
                update(agent_rounds)
                .where(agent_rounds.c.round_digest == round_digest, agent_rounds.c.state == "charged")
                .values(state="stored", answer=locked)
            )
        stored = self.stored(round_digest, recipients)
        if stored is None:
            raise PrivacyRefusal(NOT_KEPT)
        return stored

    def erase(self, round_digest: str) -> None:
        """See RoundStore. A round that was never charged here is left alone."""
        with self._database.write() as connection:
            connection.execute(
                update(agent_rounds)
                .where(agent_rounds.c.round_digest == round_digest, agent_rounds.c.state != "erased")
                .values(state="erased", answer=None)
            )
        # After the row: where the process dies in between, the key of an erased round is found by `sweep`.
        self._keys.erase(round_digest)

    def expire(self, now: datetime) -> list[str]:
        """Erase every round that nobody may ask for any more; their digests."""
        query = (
            select(agent_rounds.c.round_digest)
            .where(agent_rounds.c.state != "erased", agent_rounds.c.kept_until < check_moment(now))
            .order_by(agent_rounds.c.round_digest)
        )
        with self._database.read() as connection:
            over = list(connection.execute(query).scalars())
        for round_digest in over:
            self.erase(round_digest)
        return over

    def sweep(self) -> None:
        """Erase every key that opens nothing, and close every round whose key is gone; done at the start of a process.

        A key without a round was drawn for a charge that was never made durable; one of an erased round outlived a
        process that died while it erased.
        """
        query = select(agent_rounds.c.round_digest).where(agent_rounds.c.state != "erased")
        with self._database.read() as connection:
            alive = set(connection.execute(query).scalars())
        for round_digest in sorted(alive):
            if self._keys.read(round_digest) is None:
                self.erase(round_digest)
        for name in self._keys.names():
            # Digests only: other keys of the home are not a round's.
            if len(name) == 64 and name not in alive:
                self._keys.erase(name)

    def __repr__(self) -> str:
        return "JournalRounds(<private>)"
