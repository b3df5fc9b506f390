"""Every sum that a journal keeps, against a model that adds all entries up again: random steps, crashes and restarts.

Sums are kept every three entries and a start reads the last seven, so that every boundary is met. The walk is seeded.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from random import Random
from typing import Final, cast

import pytest

from labeler.budget import UNBOUNDED_NANO, NothingLeft
from labeler.errors import BudgetExceeded
from labeler.ledger import verification
from labeler.ledger.agent_memory import AgentMemory
from labeler.ledger.database import Connection, Database
from labeler.ledger.ledger import WRITTEN_OFF, Charge, Ledger
from labeler.ledger.promises import RequesterShares
from labeler.setting import LEVELS
from labeler.task import Level
from tests.labeler.ledger.conftest import Clock, Place

ACCOUNTS: Final = ("federation", "agent:a", "agent:b", "agent:c")
REQUESTERS: Final = ("tok-1", "tok-2")
TASKS: Final = ("t" * 64, "u" * 64)
STEPS: Final = 120

Key = tuple[str, Level]


class Crash(Exception):
    """The process dies before the commit."""


@dataclass
class Kept:
    """A reservation of the model."""

    state: str
    charges: dict[Key, int]
    held: dict[Key, int]
    requester: str = ""


@dataclass
class Model:
    """Caps, reservations and entries; every sum is added up again."""

    caps: dict[Key, int | None] = field(default_factory=dict)
    kept: dict[str, Kept] = field(default_factory=dict)
    entries: list[tuple[str, str, Key | None, int]] = field(default_factory=list)
    answered: list[tuple[int, str, int]] = field(default_factory=list)
    """Number of the entry, task and queries of each answer."""

    def copy(self) -> Model:
        kept = {name: Kept(one.state, one.charges, one.held, one.requester) for name, one in self.kept.items()}
        return Model(dict(self.caps), kept, list(self.entries), list(self.answered))

    def spent_at(self, seq: int) -> Counter[Key]:
        sums: Counter[Key] = Counter()
        for kind, _, key, amount in self.entries[:seq]:
            if key is not None:
                sums[key] += {"reserve": amount, "void": -amount}.get(kind, 0)
        return sums

    def held(self) -> Counter[Key]:
        sums: Counter[Key] = Counter()
        for one in self.kept.values():
            if one.state == "reserved":
                sums.update(one.held)
        return sums

    def posted(self) -> Counter[Key]:
        sums: Counter[Key] = Counter()
        for kind, _, key, amount in self.entries:
            if kind == "post" and key is not None:
                sums[key] += amount
        return sums

    def room(self, key: Key) -> int:
        cap = self.caps[key]
        return 2**63 - 1 if cap is None else cap - self.spent_at(len(self.entries))[key] - self.held()[key]

    def without(self) -> dict[Level, frozenset[str]]:
        """The accounts that something was reserved for without a charge at a level; all write-offs are one."""
        at: dict[tuple[str, str], set[Level]] = {}
        for name, one in self.kept.items():
            for account, level in one.charges if one.state != "void" else ():
                at.setdefault((account, WRITTEN_OFF if name.startswith(WRITTEN_OFF) else name), set()).add(level)
        return {
            level: frozenset(account for (account, _), known in at.items() if level not in known) for level in LEVELS
        }

    def taken(self, requester: str) -> tuple[dict[Level, int], int]:
        own = [one for one in self.kept.values() if one.requester == requester and one.state != "void"]
        amounts = [sum(amount for (_, at), amount in one.charges.items() if at == "agent") for one in own]
        bounded = sum(amount for amount in amounts if amount < UNBOUNDED_NANO)
        unbounded = UNBOUNDED_NANO if any(amount >= UNBOUNDED_NANO for amount in amounts) else 0
        instance = sum(amount for one in own for (_, at), amount in one.charges.items() if at == "instance")
        return {"instance": instance, "agent": bounded + unbounded}, 3 * len(own)

    # Steps, as the ledger takes them.

    def append(self, kind: str, name: str, rows: dict[Key, int]) -> None:
        self.entries += [(kind, name, key, amount) for key, amount in rows.items()]

    def reserve(self, name: str, charges: dict[Key, int], held: dict[Key, int], requester: str = "") -> None:
        if any(amount > self.room(key) for key, amount in (charges | held).items()):
            raise BudgetExceeded("", account="", level="", asked=0, left=0, cap=0, last_spenders=())
        self.kept[name] = Kept("reserved", charges, held, requester)
        self.append("reserve", name, charges)

    def post(self, name: str) -> None:
        one = self.kept[name]
        one.state = "posted"
        self.append("post", name, one.charges)
        if one.held:
            self.reserve(f"{name}/held", one.held, {})
            self.post(f"{name}/held")

    def void(self, name: str) -> None:
        one = self.kept[name]
        one.state = "void"
        self.append("void", name, one.charges)


class Walk:
    """A random walk of a ledger and of its model."""

    def __init__(self, place: Place, clock: Clock, random: Random) -> None:
        self.place, self.clock, self.random, self.model = place, clock, random, Model()
        self.database: Database = place.open()
        self.number = 0
        self._open()
        for key in [(account, level) for account in ACCOUNTS for level in LEVELS]:
            self.ledger.open_account(*key, 500)
            self.model.caps[key] = 500
            self.model.entries.append(("cap", "", key, 0))

    def _open(self) -> None:
        self.ledger = Ledger(self.database, clock=self.clock)
        self.memory = AgentMemory(self.database, self.ledger, clock=self.clock)

    def restart(self) -> None:
        """Open the journal again, and check it as a start does."""
        self.place.close()
        self.database = self.place.open()
        self._open()
        assert self.ledger.verify(is_whole=False) == self.ledger.verify() == self.ledger.head()

    def step(self) -> None:
        """Take one step in the ledger and the model, or in neither: where it is refused, or crashes."""
        self.clock.turn(minutes=self.random.choice((-1, 0, 1, 5)))
        before = self.model.copy()
        kinds = (self.cap, *3 * (self.reserve,), *3 * (self.end,), self.divide, *2 * (self.answer,))
        taken = self.random.choice(kinds)
        try:
            with self.database.write() as connection:
                taken(connection)
                if self.random.random() < 0.1:
                    raise Crash
        except (Crash, BudgetExceeded):
            self.model = before
        if self.random.random() < 0.03:
            self.write_off()

    def name(self) -> str:
        self.number += 1
        return f"job-{self.number}"

    def charges(self, accounts: tuple[str, ...]) -> dict[Key, int]:
        """Some amounts in some accounts, mostly at both levels, in the order in which the ledger is told them."""
        keys: list[Key] = []
        for account in self.random.sample(accounts, self.random.randint(1, len(accounts))):
            levels = LEVELS if self.random.random() < 0.9 else (self.random.choice(LEVELS),)
            keys += [(account, level) for level in levels if (account, level) in self.model.caps]
        return {key: self.random.randint(1, 9) for key in keys}

    def take(
        self, name: str, charges: dict[Key, int], held: dict[Key, int], connection: Connection, by: str = ""
    ) -> None:
        """Reserve in both; each refuses where the other does."""

        def ours() -> None:
            self.ledger.reserve(name, _told(charges), held_back=_told(held), connection=connection)

        try:
            self.model.reserve(name, charges, held, by)
        except BudgetExceeded:
            with pytest.raises(BudgetExceeded):
                ours()
            raise
        ours()

    def cap(self, connection: Connection) -> None:
        key: Key = (self.random.choice(ACCOUNTS), self.random.choice(LEVELS))
        cap = self.random.choice((None, 100, 300, 900, 2000))
        is_below = (
            cap is not None
            and key in self.model.caps
            and cap < (self.model.spent_at(len(self.model.entries))[key] + self.model.held()[key])
        )
        if is_below:
            with pytest.raises(BudgetExceeded):
                self.ledger.open_account(*key, cap, connection=connection)
            return
        self.ledger.open_account(*key, cap, connection=connection)
        if key not in self.model.caps or self.model.caps[key] != cap:
            self.model.caps[key] = cap
            self.model.entries.append(("cap", "", key, 0))

    def reserve(self, connection: Connection) -> None:
        """Charge some accounts, and hold others without an entry; or charge one for a requester."""
        charges = self.charges(ACCOUNTS)
        if not charges:
            return
        if len(charges) > 2:
            some = list(charges)[: self.random.randint(1, 2)]
            rest = {key: amount for key, amount in charges.items() if key not in some}
            self.take(self.name(), {key: charges[key] for key in some}, rest, connection)
            return
        account = next(iter(charges))[0]
        charges = {key: amount for key, amount in charges.items() if key[0] == account}
        if (account, "agent") in charges and self.model.caps[account, "agent"] is None and self.random.random() < 0.5:
            charges[account, "agent"] = UNBOUNDED_NANO
        name, by = self.name(), self.random.choice(REQUESTERS)
        self.take(name, charges, {}, connection, by)
        amounts: dict[Level, int] = {level: amount for (_, level), amount in charges.items()}
        RequesterShares().note(by, [(name, amounts)], life_nano=3, connection=connection)

    def _open_one(self) -> str | None:
        names = [name for name, one in self.model.kept.items() if one.state == "reserved"]
        return self.random.choice(names) if names else None

    def end(self, connection: Connection) -> None:
        """Post or void, twice: the second time changes nothing."""
        name = self._open_one()
        if name is None:
            return
        is_posted = self.random.random() < 0.5
        for _ in range(2):
            if is_posted:
                self.ledger.post(name, connection=connection)
            else:
                self.ledger.void(name, NothingLeft(name, "never-asked"), connection=connection)
        if is_posted:
            self.model.post(name)
        else:
            self.model.void(name)

    def divide(self, connection: Connection) -> None:
        """Give a worst case back and reserve a part of it, in one transaction; a part always fits."""
        name = self._open_one()
        if name is None:
            return
        one = self.model.kept[name]
        self.ledger.void(name, NothingLeft(name, "divided"), connection=connection)
        self.model.void(name)
        part = {key: self.random.randint(1, amount) for key, amount in (one.charges | one.held).items()}
        self.take(f"{name}/0", part, {}, connection)

    def answer(self, connection: Connection) -> None:
        """Charge a round of a task, as an agent does."""
        charges = {key: amount for key, amount in self.charges(ACCOUNTS[:1]).items() if amount <= self.model.room(key)}
        if not charges:
            return
        name, queries, task = self.name(), self.random.randint(1, 4), self.random.choice(TASKS)
        self.memory.charge(
            round_digest=f"{self.number:064x}", shard_version="v1", reservation_id=name, charges=_told(charges),
            num_queries=queries, task_digest=task, max_queries=10**9, recipients=[("t0", "k")], connection=connection,
        )  # fmt: skip
        self.model.reserve(name, charges, {})
        self.model.answered.append((len(self.model.entries) + 1, task, queries))
        self.model.post(name)

    def write_off(self) -> None:
        """Spend everything that is left in an account."""
        limited = [key for key, cap in self.model.caps.items() if cap is not None]
        if not limited:
            return
        key = self.random.choice(limited)
        left = self.model.room(key)
        assert self.ledger.write_off(*key, "a test") == left
        if left:
            name = f"{WRITTEN_OFF}{len(self.model.entries) + 1}"
            self.model.reserve(name, {key: left}, {})
            self.model.post(name)

    def check(self) -> None:
        """Compare every sum of now."""
        model, end = self.model, len(self.model.entries)
        assert self.ledger.head().seq == end
        spent, held, posted = model.spent_at(end), model.held(), model.posted()
        balances = {(one.account, one.level): one for one in self.ledger.balances()}
        assert balances.keys() == model.caps.keys()
        for key, one in balances.items():
            assert (one.cap, one.spent, one.posted) == (model.caps[key], spent[key] + held[key], posted[key]), key
            assert one.cap is None or one.spent <= one.cap
        assert self.ledger.charged_without() == model.without()
        with self.database.read() as connection:
            shares = RequesterShares()
            for requester in REQUESTERS:
                assert shares.taken(requester, connection=connection) == model.taken(requester)
        for task in TASKS:
            assert self.memory.queries_of(task) == sum(many for _, of, many in model.answered if of == task)

    def check_history(self) -> None:
        """Compare the sums after every entry, and the queries since every moment."""
        for seq in range(len(self.model.entries) + 1):
            expected = {key: amount for key, amount in self.model.spent_at(seq).items() if amount}
            found = self.ledger.spent_at(seq)
            assert {key: amount for key, amount in found.items() if amount} == expected, seq
            for account in ACCOUNTS:
                of = self.ledger.spent_at(seq, account=account)
                assert {key: amount for key, amount in of.items() if amount} == {
                    key: amount for key, amount in expected.items() if key[0] == account
                }
        entries = self.ledger.entries(limit=1000)
        assert [(one.kind, one.reservation_id, one.amount) for one in entries if one.kind not in ("open", "cap")] == [
            (kind, name, amount) for kind, name, _, amount in self.model.entries if kind != "cap"
        ]
        for since in {entry.at + timedelta(seconds=shift) for entry in entries for shift in (-1, 0, 1)}:
            late = {entry.seq for entry in entries if entry.at >= since}
            assert self.memory.queries_since(since) == sum(many for seq, _, many in self.model.answered if seq in late)


def _told(charges: dict[Key, int]) -> list[Charge]:
    return [Charge(account, cast("Level", level), amount) for (account, level), amount in charges.items()]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2, 3))])
def test_every_sum_is_what_all_entries_add_up_to(
    place: Place, clock: Clock, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr("labeler.ledger.ledger.SUMS_EVERY", 3)
    monkeypatch.setattr(verification, "RECENT", 7)
    monkeypatch.setattr(verification, "_BATCH", 5)
    walk = Walk(place, clock, Random(seed))
    for number in range(STEPS):
        walk.step()
        walk.check()
        if number % 10 == 9:
            walk.restart()
    assert {one.state for one in walk.model.kept.values()} >= {"posted", "void"}
    assert any(one.held for one in walk.model.kept.values() if one.state == "posted")
    assert len(walk.model.entries) > STEPS // 2
    assert walk.model.answered
    walk.check_history()
    for name in [name for name, one in walk.model.kept.items() if one.state == "reserved"]:
        walk.ledger.void(name, NothingLeft(name, "never-asked"))
        walk.model.void(name)
    walk.check()
    assert not walk.model.held().total()
