"""The durable memory of a tallier: the shares it was sent, the excluded agents, and its permanent sums.

A round is summed over one set of agents. The set and the sum are fixed in one transaction, which also drops the single
shares. The fingerprint of each share stays, so that a repeated share is still recognized. When a round is forgotten the
set of agents stays, and the round takes no share and gives no sum any more.

Shares and sums are kept encrypted. Each kind has one key per round, which lies outside the journal and outside every
backup (labeler.system.erasable). Both are drawn when the round is opened, with one sync. The shares' key is erased when
the sum is fixed, the sum's key when the round is forgotten. From then on no backup, log or replica of this journal
holds them any more.

Shares are secret: nothing here prints them.

The state machine (labeler.rounds.tallier) decides about repeated, late or wrong messages; the tables enforce the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from sqlalchemy import Connection, Row, literal_column, select

from labeler.errors import BadData, InvalidSetting, NotFound, PrivacyRefusal, ProtocolViolation
from labeler.ledger.backup import UnusedKeys
from labeler.ledger.database import Database, insert_rows, select_rows, update_rows
from labeler.ledger.schema import tallier_rounds, tallier_shares
from labeler.messages.bodies import OpenRound
from labeler.system.erasable import ErasableKeys, lock_away, take_out

_SHARES, _SUM = ".shares", ".sum"
_KEPT = {"open": (_SHARES, _SUM), "fixed": (_SUM,)}


@dataclass(frozen=True, repr=False)
class KeptShare:
    """The stored share of one agent. Secret: does not print.

    Attributes:
        data: as it was received (labeler.messages.bodies.share_to_bytes); None once it was summed or dropped.
        sharing_id: 16 bytes.
        fingerprint: 32 bytes, of the whole share.
    """

    data: bytes | None
    sharing_id: bytes
    fingerprint: bytes

    def __repr__(self) -> str:
        return "KeptShare(<redacted>)"


@dataclass(frozen=True, repr=False)
class KeptRound:
    """The stored state of one round, from which a restarted tallier continues. Secret: does not print.

    Attributes:
        opened: the round as the coordinator described it.
        shares: agent id -> its share, of those not excluded; after the sum, of those summed, without the data.
        fingerprints: agent id -> fingerprint of every share that was ever taken, also of those dropped since.
        excluded: agents that sent two different shares.
        contributors: the agents summed, or None.
        aggregate: the sum (labeler.messages.bodies.aggregate_to_bytes), or None.
        is_forgotten: the round takes no share and gives no sum any more.
    """

    opened: OpenRound
    shares: Mapping[str, KeptShare]
    fingerprints: Mapping[str, bytes]
    excluded: frozenset[str]
    contributors: frozenset[str] | None
    aggregate: bytes | None
    is_forgotten: bool

    def __repr__(self) -> str:
        return f"KeptRound({self.opened.round.digest[:12]!r}, agents={len(self.shares)}, <redacted>)"


_round, _share = tallier_rounds.c, tallier_shares.c
# As the indexes of few rows have it.
_IS_KEPT = _round.state != literal_column("'forgotten'")
_IS_HELD = _share.state == literal_column("'held'")


class TallierMemory:
    """The memory of one tallier, in its own journal; `connection` joins a write transaction."""

    def __init__(self, database: Database, keys: ErasableKeys) -> None:
        self._database = database
        self._keys = keys
        self._unused = UnusedKeys(database, keys, endings=(_SHARES, _SUM), needed=_needed_keys)

    def open_rounds(self) -> list[OpenRound]:
        """Return every round that was not forgotten, summed or not."""
        with self._database.read() as joined:
            query = select(_round.opened).where(_IS_KEPT).order_by(_round.round_digest)
            return [OpenRound.decode(bytes(opened)) for opened in joined.execute(query).scalars()]

    def exclude(self, round_digest: str, agent_id: str, *, connection: Connection | None = None) -> None:
        """Take no more shares of an agent in a round and drop the one that is held; after the sum, change nothing.

        Raises:
            NotFound: the round was never opened here.
        """
        with self._database.writing(connection) as joined:
            if self._round(round_digest, joined).state != "open":
                return
            if not _close_share(joined, round_digest, agent_id, "excluded"):
                this = {"round_digest": round_digest, "agent_id": agent_id}
                if select_rows(joined, tallier_shares, **this).first() is None:
                    insert_rows(joined, tallier_shares, this | {"state": "excluded"})

    def load(self, round_digest: str, *, connection: Connection | None = None) -> KeptRound:
        """Return the stored state of a round.

        Raises:
            NotFound: it was never opened here.
            BadData: the stored data was changed, or its key is gone (`sweep` gives such a round up).
        """
        with self._database.reading(connection) as joined:
            row = self._round(round_digest, joined)
            shares = select_rows(joined, tallier_shares, ("agent_id",), round_digest=round_digest).all()
        return KeptRound(
            opened=OpenRound.decode(bytes(row.opened)),
            shares={
                one.agent_id: KeptShare(
                    self._opened(round_digest + _SHARES, f"{round_digest} {one.agent_id}", one.share),
                    bytes(one.sharing_id),
                    bytes(one.fingerprint),
                )
                for one in shares
                if one.state in ("held", "summed")
            },
            fingerprints={one.agent_id: bytes(one.fingerprint) for one in shares if one.fingerprint is not None},
            excluded=frozenset(one.agent_id for one in shares if one.state == "excluded"),
            contributors=None if row.contributors is None else frozenset(row.contributors),
            aggregate=self._opened(round_digest + _SUM, round_digest, row.aggregate),
            is_forgotten=row.state == "forgotten",
        )

    def noise_key(self, round_digest: str) -> bytes:
        """Return the secret from which this tallier's noise in a round is drawn, if talliers add noise (labeler.noise).

        It is the key that encrypts the round's shares. It is durable before the first share is, the same after a crash,
        and erased once the sum is durable with its noise in it. A tallier that lost it has no shares to add noise to.
        """
        return self._keys.draw(round_digest + _SHARES)

    def knows(self, round_digest: str) -> bool:
        """Return whether a round was ever opened here."""
        with self._database.read() as connection:
            return select_rows(connection, tallier_rounds, round_digest=round_digest).first() is not None

    def keep_open(
        self,
        opened: Mapping[str, OpenRound],
        held: Mapping[tuple[str, str], KeptShare],
        *,
        connection: Connection,
    ) -> None:
        """Store new rounds and shares; if the caller is wrong and they are not new, the rules of the tables refuse.

        Args:
            opened: by digest, rounds that were unknown.
            held: by round and agent, shares of open rounds, with their data.
        """
        keys = {digest + _SHARES for digest, _ in held}
        self._keys.draw_all(keys.union(*((digest + _SHARES, digest + _SUM) for digest in opened)))
        new = [{"round_digest": digest, "opened": one.encode(), "state": "open"} for digest, one in opened.items()]
        insert_rows(connection, tallier_rounds, *new)
        shares: list[dict[str, Any]] = []
        for (digest, agent), share in held.items():
            locked = lock_away(self._keys.draw(digest + _SHARES), f"{digest} {agent}", (share.data or b"",))
            row = {"round_digest": digest, "agent_id": agent, "state": "held", "share": locked}
            shares.append(row | {"sharing_id": share.sharing_id, "fingerprint": share.fingerprint})
        insert_rows(connection, tallier_shares, *shares)

    def fix_open(
        self, summed: Mapping[str, tuple[Collection[str], Collection[str], bytes]], *, connection: Connection
    ) -> None:
        """Fix the summed agents and the sums of open rounds, once and permanently, and drop the single shares.

        Call this before a sum leaves.

        Args:
            summed: by digest: agents summed, agents whose share is held but not summed, the sum.

        Raises:
            InvalidSetting: a sum of nobody, or an empty one.
            PrivacyRefusal: a round is not open.
            ProtocolViolation: no share of one of the agents is held.
        """
        for digest, (contributors, others, aggregate) in summed.items():
            if not contributors or not aggregate:
                raise InvalidSetting("a sum is over at least one agent, and is not empty")
            locked = lock_away(self._keys.draw(digest + _SUM), digest, (aggregate,))
            values = {"state": "fixed", "contributors": sorted(contributors), "aggregate": locked}
            if update_rows(connection, tallier_rounds, values, round_digest=digest, state="open") != 1:
                raise PrivacyRefusal(f"round {digest[:12]!r} is not open, so it is not summed")
            for agent in sorted(contributors):
                if not _close_share(connection, digest, agent, "summed"):
                    raise ProtocolViolation(
                        f"no share is held of agent {agent!r} in round {digest[:12]!r}, so it is not summed; agree on "
                        "the contributors again"
                    )
            for agent in sorted(others):
                _close_share(connection, digest, agent, "dropped")
        if summed:
            # Once the sums are durable: if the process dies in between, `sweep` finds the keys.
            self._database.after_commit(partial(self._keys.erase_all, [digest + _SHARES for digest in summed]))

    def forget(self, round_digest: str, *, connection: Connection | None = None) -> None:
        """Drop the sum and every share of a round; the set of summed agents stays. The round stays closed permanently.

        Raises:
            NotFound: it was never opened here.
        """
        with self._database.writing(connection) as joined:
            self._round(round_digest, joined)
            gone = {"state": "forgotten", "aggregate": None}
            update_rows(joined, tallier_rounds, gone, round_digest=round_digest)
            dropped = {"state": "dropped", "share": None}
            update_rows(joined, tallier_shares, dropped, round_digest=round_digest, state="held")
            gone_keys = [round_digest + _SHARES, round_digest + _SUM]
            self._database.after_commit(partial(self._keys.erase_all, gone_keys))

    def sweep(self) -> list[str]:
        """Erase every key that opens nothing, and give up every round whose key is gone; done when a process starts.

        Returns:
            Digests of the rounds that were given up.
        """
        known = set(self._keys.names())
        with self._database.read() as connection:
            held = set(connection.execute(select(_share.round_digest).where(_IS_HELD)).scalars())
            kept = connection.execute(select(_round.round_digest, _round.state).where(_IS_KEPT))
            states = dict.fromkeys(held, "forgotten") | {row.round_digest: row.state for row in kept}
        needed = {"open": _SHARES, "fixed": _SUM}
        lost = [
            digest
            for digest, state in sorted(states.items())
            if (state == "fixed" or digest in held) and digest + needed.get(state, "") not in known
        ]
        for digest in lost:
            self.forget(digest)
        self._unused.erase()
        return lost

    def tidy(self) -> None:
        """Erase unused keys, for example of shares or sums that a full disk did not keep; see UnusedKeys."""
        self._unused.erase_what_was_undone()

    def _opened(self, key_name: str, context: str, data: bytes | None) -> bytes | None:
        """Return stored data, decrypted."""
        if data is None:
            return None
        key = self._keys.read(key_name)
        if key is None:
            raise BadData(
                "the key of a round is gone from the folder of erasable keys, so what this tallier holds of it cannot "
                "be opened; start the tallier again, which gives the round up"
            )
        (plain,) = take_out(key, context, bytes(data))
        return plain

    def _round(self, round_digest: str, connection: Connection) -> Row[Any]:
        found = select_rows(connection, tallier_rounds, round_digest=round_digest).first()
        if found is None:
            raise NotFound(
                f"round {round_digest[:12]!r} was never opened at this tallier; the coordinator opens it first"
            )
        return found


def _close_share(connection: Connection, round_digest: str, agent_id: str, state: str) -> bool:
    """Remove a held share from a round; return whether there was one."""
    this = {"round_digest": round_digest, "agent_id": agent_id, "state": "held"}
    return update_rows(connection, tallier_shares, {"state": state, "share": None}, **this) == 1


def _needed_keys(connection: Connection) -> list[str]:
    query = select(_round.round_digest, _round.state).where(_IS_KEPT)
    return [digest + ending for digest, state in connection.execute(query) for ending in _KEPT[state]]
