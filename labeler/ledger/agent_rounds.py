"""What an agent keeps of a round: that it is open, then what it has sent, then only that there is nothing any more.

    charged --> stored --> erased     charged: paid for, nothing has left; its key lies in the folder of erasable keys
        \\____________________^       stored:  the bodies of its messages, encrypted under that key
                                      erased:  for ever; the key is gone, so every copy of what was stored is noise

A round is opened in the transaction that charges it, after its key is durable; the key is drawn at random and says
nothing of any other. What is stored is durable before a byte of it leaves, and is never replaced, so an answer that was
asked for again is the stored one. It is erased once the coordinator says that every tallier has what it needs, and at
the latest when nobody may ask any more. `answered_rounds` keeps for ever that the round was charged.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Literal

from sqlalchemy import Connection, bindparam, select, update

from labeler.errors import PrivacyRefusal
from labeler.ledger.database import Database, insert_rows, update_rows
from labeler.ledger.erasable_home import UnusedKeys
from labeler.ledger.schema import agent_rounds, answered_rounds
from labeler.rounds.agent import NOT_KEPT, Recipients
from labeler.system.erasable import ErasableKeys, lock_away, take_out


@dataclass(frozen=True, repr=False)
class KeptAnswer:
    """What is kept of one round at an agent. Its bodies are sealed, and private all the same: it does not print.

    Attributes:
        recipients: for whom it was charged.
        leaves_at: unix time in seconds before which what is stored may not leave; 0 where it may.
        held_s: how far that was away when it was stored, so that a clock that is set back does not make it long.
    """

    stage: Literal["charged", "stored", "erased"]
    recipients: Recipients
    bodies: tuple[bytes, ...] | None
    leaves_at: float = 0.0
    held_s: float = 0.0

    def __repr__(self) -> str:
        return f"KeptAnswer({self.stage!r}, <private>)"


_LEAVES = b"leaves at "
"""Begins the part of a stored answer that says when it may leave; a sealed body begins with random bytes."""

_IS_KEPT = agent_rounds.c.state != "erased"


_KEPT = (
    select(answered_rounds.c.recipients, agent_rounds.c.state, agent_rounds.c.answer)
    .outerjoin_from(answered_rounds, agent_rounds, answered_rounds.c.round_digest == agent_rounds.c.round_digest)
    .where(answered_rounds.c.round_digest == bindparam("round_digest"))
)
_OVER = (
    select(agent_rounds.c.round_digest)
    .where(_IS_KEPT, agent_rounds.c.kept_until < bindparam("now", type_=agent_rounds.c.kept_until.type))
    .order_by(agent_rounds.c.round_digest)
)


def _kept_rounds(connection: Connection) -> set[str]:
    return set(connection.execute(select(agent_rounds.c.round_digest).where(_IS_KEPT)).scalars())


class JournalRounds:
    """What an agent keeps of its rounds, in its journal and in keys outside of it (labeler.rounds.agent)."""

    def __init__(self, database: Database, keys: ErasableKeys) -> None:
        self._database = database
        self._keys = keys
        self._unused = UnusedKeys(database, keys, endings=("",), needed=_kept_rounds)

    def open(self, rounds: Mapping[str, datetime], *, connection: Connection) -> None:
        """Begin rounds that are charged in the same transaction; their keys are durable when this returns.

        Args:
            rounds: by digest, rounds that `AgentMemory.charge` has just taken the price of, each with the moment after
                which nobody may ask for it any more, and everything is erased.
            connection: the transaction of the charge.
        """
        self._keys.draw_all(rounds)
        rows = [{"round_digest": digest, "state": "charged", "kept_until": until} for digest, until in rounds.items()]
        insert_rows(connection, agent_rounds, *rows)

    def kept(self, round_digest: str, *, connection: Connection | None = None) -> KeptAnswer | None:
        """What is kept of a round; None where it was never charged."""
        with self._database.reading(connection) as joined:
            row = joined.execute(_KEPT, {"round_digest": round_digest}).first()
        if row is None:
            return None
        recipients: Recipients = tuple((tallier, key) for tallier, key in json.loads(row.recipients))
        key = self._keys.read(round_digest)
        if key is None or row.state not in ("charged", "stored"):
            return KeptAnswer("erased", recipients, None)
        if row.answer is None:
            return KeptAnswer("charged", recipients, None)
        bodies = take_out(key, round_digest, bytes(row.answer))
        if not (bodies and bodies[0].startswith(_LEAVES)):
            return KeptAnswer("stored", recipients, bodies)
        leaves_at, held_s = map(float, bodies[0].removeprefix(_LEAVES).split())
        return KeptAnswer("stored", recipients, bodies[1:], leaves_at, held_s)

    def is_stored(self, round_digest: str) -> bool:
        """Whether the answer to a round is durable."""
        kept = self.kept(round_digest)
        return kept is not None and kept.stage == "stored"

    def key_of_charged(self, round_digest: str) -> bytes:
        """The round's own 32 secret bytes, the same until they are erased: of noise, masks, and what is stored.

        Of a round that the caller knows to be charged: without a look into the journal.

        Raises:
            PrivacyRefusal: they are erased.
        """
        key = self._keys.read(round_digest)
        if key is None:
            raise PrivacyRefusal(NOT_KEPT)
        return key

    def store_new(
        self,
        round_digest: str,
        bodies: Sequence[bytes],
        *,
        connection: Connection,
        leaves_at: float = 0.0,
        held_s: float = 0.0,
    ) -> bool:
        """Keep an answer in a transaction of many; whether it was kept: what was stored first stands.

        Args:
            leaves_at, held_s: before when it may not leave, also after a restart, see KeptAnswer; 0 for at once.

        Raises:
            PrivacyRefusal: the round is erased, or was never charged.
        """
        key = self._keys.read(round_digest)
        if key is None:
            raise PrivacyRefusal(NOT_KEPT)
        moment = (_LEAVES + f"{leaves_at!r} {held_s!r}".encode(),) if leaves_at else ()
        locked = lock_away(key, round_digest, (*moment, *bodies))
        stored = {"state": "stored", "answer": locked}
        return update_rows(connection, agent_rounds, stored, round_digest=round_digest, state="charged") == 1

    def erase_in(self, rounds: Collection[str], *, connection: Connection) -> None:
        """Erase rounds in a transaction: their rows there, their keys, all at once, when that is durable.

        Where the process dies in between, the key of an erased round is found by `sweep`; where its key could not be
        overwritten, by `tidy`.
        """
        if rounds:
            these = (agent_rounds.c.round_digest.in_(rounds), _IS_KEPT)
            connection.execute(update(agent_rounds).where(*these).values(state="erased", answer=None))
            self._database.after_commit(partial(self._keys.erase_all, tuple(rounds)))

    def over(self, now: datetime) -> list[str]:
        """Every round that is kept although nobody may ask for it any more."""
        with self._database.read() as connection:
            return list(connection.execute(_OVER, {"now": now}).scalars())

    def sweep(self) -> None:
        """Erase every key that opens nothing, and close every round whose key is gone; done at the start of a process.

        A key without a round was drawn for a charge that was never made durable; one of an erased round outlived a
        process that died while it erased.
        """
        with self._database.read() as connection:
            alive = _kept_rounds(connection)
        with self._database.write() as connection:
            self.erase_in(sorted(alive.difference(self._keys.names())), connection=connection)
        self._unused.erase()

    def tidy(self) -> None:
        """See UnusedKeys: of charges, for example, that a full disk did not keep."""
        self._unused.erase_what_was_undone()

    def __repr__(self) -> str:
        return "JournalRounds(<private>)"
