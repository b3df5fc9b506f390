"""A tallier sums a round once, over shares it was sent once, also when it is restarted in between.

What is refused to whom in which words is the machine's (tests/labeler/rounds/test_tallier.py); here the
journal keeps it whatever a caller believes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from labeler.errors import BadData, InvalidSetting, NotFound, PrivacyRefusal, ProtocolViolation, StorageFull
from labeler.ledger.backup import backup
from labeler.ledger.database import Database, open_database
from labeler.ledger.tallier_memory import KeptRound, KeptShare, TallierMemory
from labeler.messages.bodies import OpenRound
from labeler.system.erasable import ErasableKeys, KeyFolder, KeysInMemory, is_locked_away
from labeler.system.faults import listening
from labeler.tally import Round
from tests.full_disk import no_room
from tests.labeler.ledger.conftest import Place, at_once, refuses, undone

ROUND = Round("a" * 64, "b" * 64, num_queries=2, num_classes=2, quorum=2)
DIGEST = ROUND.digest
AGENTS = ("alice", "bob", "carol")


def opening(round: Round = ROUND, *, expires_at: float = 1e9) -> OpenRound:
    return OpenRound(round, 0, {agent: f"{at:064x}" for at, agent in enumerate(AGENTS)}, expires_at)


def kept(agent: str) -> KeptShare:
    return KeptShare(b"share of " + agent.encode(), agent.encode().ljust(16, b"."), agent.encode().ljust(32, b"."))


def other(data: bytes = b"other") -> KeptShare:
    return KeptShare(data, b"i" * 16, b"f" * 32)


@dataclass
class Journal:
    """A memory and its database, a transaction for each step."""

    database: Database
    keys: ErasableKeys = field(default_factory=KeysInMemory)

    def __post_init__(self) -> None:
        self.memory = TallierMemory(self.database, self.keys)

    def open(self, opened: OpenRound) -> None:
        with self.database.write() as connection:
            self.memory.keep_open({opened.round.digest: opened}, {}, connection=connection)

    def hold(self, agent: str, share: KeptShare | None = None, *, digest: str = DIGEST) -> None:
        with self.database.write() as connection:
            self.memory.keep_open({}, {(digest, agent): share or kept(agent)}, connection=connection)

    def fix(self, agents: Sequence[str], aggregate: bytes, *, digest: str = DIGEST) -> None:
        with self.database.write() as connection:
            of_round = self.memory.load(digest, connection=connection)
            self.memory.fix_open(
                {digest: (agents, set(of_round.shares) - set(agents), aggregate)}, connection=connection
            )

    def load(self) -> KeptRound:
        return self.memory.load(DIGEST)


@pytest.fixture
def empty(database: Database) -> Journal:
    journal = Journal(database)
    journal.open(opening())
    return journal


@pytest.fixture
def full(empty: Journal) -> Journal:
    for agent in AGENTS:
        empty.hold(agent)
    return empty


def contents(journal: Journal) -> tuple[object, ...]:
    found = journal.load()
    return found.shares, found.excluded, found.contributors, found.aggregate, found.is_forgotten


def test_a_round_is_opened_once(empty: Journal) -> None:
    assert empty.memory.open_rounds() == [opening()]
    for again in (opening(), opening(expires_at=2e9)):
        with pytest.raises(IntegrityError):
            empty.open(again)
    assert empty.memory.open_rounds() == [opening()]
    other = Round("c" * 64, "b" * 64, 2, 2, 2)
    empty.open(opening(other))
    assert {one.round for one in empty.memory.open_rounds()} == {ROUND, other}


def test_what_was_never_opened_is_not_found(empty: Journal) -> None:
    for step in (
        lambda: empty.memory.load("0" * 64),
        lambda: empty.memory.exclude("0" * 64, "alice"),
        lambda: empty.memory.forget("0" * 64),
    ):
        with pytest.raises(NotFound):
            step()
    assert not empty.memory.knows("0" * 64)
    with pytest.raises(IntegrityError):
        empty.hold("alice", digest="0" * 64)
    with pytest.raises(PrivacyRefusal), empty.database.write() as connection:
        empty.memory.fix_open({"0" * 64: (["alice"], [], b"sum")}, connection=connection)


def test_a_restarted_tallier_finds_everything_it_had(place: Place, tmp_path: Path) -> None:
    journal = Journal(place.open(), KeyFolder(tmp_path / "erasable"))
    journal.open(opening())
    for agent in AGENTS:
        journal.hold(agent)
    journal.memory.exclude(DIGEST, "carol")
    place.close()
    found = TallierMemory(place.open(), KeyFolder(tmp_path / "erasable")).load(DIGEST)
    assert found.opened == opening()
    assert dict(found.shares) == {agent: kept(agent) for agent in ("alice", "bob")}
    assert (found.excluded, found.contributors, found.aggregate) == ({"carol"}, None, None)


def test_a_share_that_is_there_is_never_replaced_before_or_after_the_sum(full: Journal) -> None:
    before = contents(full)
    for share in (None, other()):
        with pytest.raises(IntegrityError):
            full.hold("alice", share)
    assert contents(full) == before
    full.fix(["alice", "bob"], b"sum")
    after = contents(full)
    for agent in AGENTS:
        with pytest.raises(IntegrityError):
            full.hold(agent)
    assert contents(full) == after


def test_an_excluded_agent_is_not_summed_and_may_not_send_afterwards(full: Journal) -> None:
    for _ in range(2):
        full.memory.exclude(DIGEST, "alice")
        with pytest.raises(IntegrityError):
            full.hold("alice")
    found = full.load()
    assert (found.excluded, set(found.shares)) == ({"alice"}, {"bob", "carol"})
    full.memory.exclude(DIGEST, "dave")  # who has not sent anything yet
    with pytest.raises(IntegrityError):
        full.hold("dave")
    before = contents(full)
    with pytest.raises(ProtocolViolation, match="'alice'"):
        full.fix(["alice", "bob"], b"sum")
    assert contents(full) == before


def test_the_sum_is_fixed_once_and_single_shares_are_dropped(full: Journal, database: Database) -> None:
    full.fix(["bob", "alice"], b"the sum")
    found = full.load()
    assert (found.contributors, found.aggregate) == ({"alice", "bob"}, b"the sum")
    assert {agent: share.data for agent, share in found.shares.items()} == {"alice": None, "bob": None}
    assert found.shares["alice"].fingerprint == kept("alice").fingerprint
    assert found.fingerprints == {agent: kept(agent).fingerprint for agent in AGENTS}
    for names, data in ((["alice"], b"the sum"), (list(AGENTS), b"the sum"), (["alice", "bob"], b"another")):
        with pytest.raises(PrivacyRefusal, match="not open"):
            full.fix(names, data)
    full.memory.exclude(DIGEST, "alice")
    for agent in ("alice", "dave"):
        with pytest.raises(IntegrityError):
            full.hold(agent, other())
    again = full.load()
    assert (again.contributors, again.excluded, again.aggregate) == ({"alice", "bob"}, set(), b"the sum")
    with database.read() as connection:
        assert connection.execute(text("SELECT count(*) FROM tallier_shares WHERE share IS NOT NULL")).scalar() == 0


@pytest.mark.parametrize("size", [100, 100_000], ids=["in its row", "in pages of its own"])
@pytest.mark.parametrize("how", ["summed", "excluded", "forgotten"])
def test_nothing_of_a_dropped_share_is_left_in_a_file_while_the_journal_is_open(
    sqlite_place: Place, size: int, how: str
) -> None:
    database = sqlite_place.open()
    journal = Journal(database)
    journal.open(opening())
    for agent in AGENTS:
        journal.hold(agent, KeptShare(b"share of " + agent.encode() * size, b"i" * 16, agent.encode().ljust(32)))
    if how == "summed":
        journal.fix(AGENTS, b"the sum")
    elif how == "excluded":
        for agent in AGENTS:
            journal.memory.exclude(DIGEST, agent)
    else:
        journal.memory.forget(DIGEST)
    database.forget_log()
    assert journal.load().opened == opening()
    folder = Path(sqlite_place.target).parent
    left = b"".join(path.read_bytes() for path in folder.iterdir())
    assert b"share of" not in left, [path for path in folder.iterdir() if b"share of" in path.read_bytes()]
    assert not any(agent.encode() * 50 in left for agent in AGENTS)


@pytest.mark.parametrize(("names", "aggregate"), [([], b"sum"), (["alice"], b"")])
def test_a_sum_is_over_agents_and_not_empty(full: Journal, names: list[str], aggregate: bytes) -> None:
    before = contents(full)
    with pytest.raises(InvalidSetting):
        full.fix(names, aggregate)
    assert contents(full) == before


def test_a_forgotten_round_keeps_its_contributors_and_gives_no_sum(full: Journal) -> None:
    full.fix(["alice", "bob"], b"sum")
    for _ in range(2):
        full.memory.forget(DIGEST)
    found = full.load()
    assert (found.contributors, found.aggregate, found.is_forgotten) == ({"alice", "bob"}, None, True)
    assert full.memory.open_rounds() == []
    with pytest.raises(IntegrityError):
        full.open(opening())
    with pytest.raises(PrivacyRefusal):
        full.fix(["alice", "bob"], b"sum")


def test_a_round_that_was_given_up_is_never_summed(full: Journal) -> None:
    full.memory.forget(DIGEST)
    assert full.load().shares == {}
    with pytest.raises(PrivacyRefusal, match="not open"):
        full.fix(["alice", "bob"], b"sum")
    with pytest.raises(IntegrityError):
        full.hold("dave", other())


def test_of_many_sums_at_once_one_is_fixed(full: Journal) -> None:
    sets = [["alice", "bob"], ["bob", "carol"], ["alice", "carol"]] * 4

    def fix(number: int) -> frozenset[str]:
        full.fix(sets[number], b"sum of " + ",".join(sets[number]).encode())
        return frozenset(sets[number])

    answers = at_once(12, fix, PrivacyRefusal)
    found = full.load()
    assert [one for one in answers if one] == [found.contributors]
    assert found.aggregate == b"sum of " + ",".join(sorted(found.contributors)).encode()


def test_the_database_itself_keeps_what_was_summed(full: Journal, database: Database) -> None:
    full.fix(["alice", "bob"], b"sum")
    before = contents(full)
    some_bytes = "x'00'" if database.dialect == "sqlite" else "'\\x00'::bytea"
    refuses(
        database,
        "UPDATE tallier_rounds SET contributors = '[\"alice\"]'",
        "UPDATE tallier_rounds SET contributors = NULL, aggregate = NULL, state = 'open'",
        "UPDATE tallier_rounds SET contributors = NULL, aggregate = NULL, state = 'forgotten'",
        f"UPDATE tallier_rounds SET aggregate = {some_bytes}",
        "UPDATE tallier_shares SET state = 'excluded'",
        f"UPDATE tallier_shares SET fingerprint = {some_bytes}",
        "DELETE FROM tallier_rounds",
        "DELETE FROM tallier_shares",
    )
    assert contents(full) == before


def test_a_share_prints_nowhere(full: Journal, database: Database) -> None:
    found = full.load()
    printed = [repr(found), str(found), repr(found.shares), repr(full.memory)]
    failures: list[Callable[[], object]] = [
        lambda: full.hold("alice", other(b"share of mallory")),
        lambda: full.fix(["dave"], b"share of all"),
    ]
    for failure in failures:
        with pytest.raises((ProtocolViolation, IntegrityError)) as refusal:
            failure()
        printed.append(str(refusal.value))
    with pytest.raises(IntegrityError) as broken, database.write() as connection:
        connection.execute(
            text("INSERT INTO tallier_shares (round_digest, agent_id, state, share) VALUES ('x', 'y', 'held', :share)"),
            {"share": b"share of mallory"},
        )
    printed.append(str(broken.value))
    assert isinstance(found, KeptRound)
    assert not any("share of" in one and "share of agent" not in one for one in printed), printed


# Erased with its key.


def held_in(path: Path) -> list[bytes]:
    """Whatever of shares and sums a copy of the journal holds."""
    with open_database(path, read_only=True) as database, database.read() as connection:
        rows = connection.execute(text("SELECT share FROM tallier_shares WHERE share IS NOT NULL")).scalars().all()
        rows = [*rows, *connection.execute(text("SELECT aggregate FROM tallier_rounds")).scalars().all()]
    return [bytes(row) for row in rows if row is not None]


def opened_by(keys: ErasableKeys, path: Path) -> list[object]:
    """Return what somebody with a copy of the journal and these keys reads."""
    with open_database(path, read_only=True) as database:
        found = TallierMemory(database, keys).load(DIGEST)
    return [share.data for share in found.shares.values() if share.data] + [found.aggregate] * (not found.shares)


@pytest.mark.parametrize("how", ["summed", "forgotten"])
def test_a_backup_of_single_shares_says_nothing_once_they_are_summed_or_given_up(
    sqlite_place: Place, tmp_path: Path, how: str
) -> None:
    keys = KeyFolder(tmp_path / "erasable")
    journal = Journal(sqlite_place.open(), keys)
    journal.open(opening())
    for agent in AGENTS:
        journal.hold(agent)

    def backed_up(name: str, count: int) -> Path:
        copy = tmp_path / f"{name}.db"
        backup(Path(sqlite_place.target), copy, anchor=tmp_path / f"{name}.head")
        assert [is_locked_away(one) for one in held_in(copy)] == [True] * count
        return copy

    def is_closed(copy: Path) -> bool:
        for thief in (keys, KeyFolder(tmp_path / "erasable")):
            with pytest.raises(BadData, match="gives the round up"):
                opened_by(thief, copy)
        return True

    yesterday = backed_up("yesterday", 3)
    assert opened_by(keys, yesterday) == [kept(agent).data for agent in AGENTS]
    if how == "summed":
        journal.fix(AGENTS, b"the sum")
        assert keys.names() == [DIGEST + ".sum"]
        assert is_closed(yesterday)
        yesterday = backed_up("today", 1)
    journal.memory.forget(DIGEST)
    assert keys.names() == []
    assert is_closed(yesterday)


def test_keys_stay_when_the_step_that_would_erase_them_is_undone(full: Journal, database: Database) -> None:
    with undone(database) as connection:
        full.memory.fix_open({DIGEST: (AGENTS, [], b"the sum")}, connection=connection)
    with undone(database) as connection:
        full.memory.forget(DIGEST, connection=connection)
    assert [share.data for share in full.load().shares.values()] == [kept(agent).data for agent in AGENTS]


def test_a_start_gives_up_rounds_whose_key_is_gone_and_erases_keys_that_open_nothing(database: Database) -> None:
    keys = KeysInMemory()
    journal = Journal(database, keys)
    memory = journal.memory
    rounds = [Round(f"{number:064x}", "b" * 64, 2, 2, 2) for number in range(4)]
    for one in rounds:
        journal.open(opening(one))
        journal.hold("alice", other(b"s"), digest=one.digest)
    for one in rounds[:2]:
        journal.fix(["alice"], b"sum", digest=one.digest)
    keys.erase_all([rounds[0].digest + ".sum"])
    keys.erase_all([rounds[2].digest + ".shares"])
    keys.draw("f" * 64 + ".shares")
    keys.draw("home")
    assert sorted(memory.sweep()) == sorted([rounds[0].digest, rounds[2].digest])
    assert keys.names() == sorted(
        [rounds[1].digest + ".sum", rounds[3].digest + ".shares", rounds[3].digest + ".sum", "home"]
    )
    assert memory.sweep() == []
    assert {one.round for one in memory.open_rounds()} == {rounds[1], rounds[3]}


def test_keys_of_what_was_not_kept_are_erased_by_the_process_that_drew_them(database: Database, tmp_path: Path) -> None:
    keys = KeyFolder(tmp_path / "erasable")
    journal, memory = Journal(database, keys), TallierMemory(database, keys)
    one, new = ROUND, Round("c" * 64, "b" * 64, 2, 2, 2)
    journal.open(opening(one))
    journal.hold("alice")
    keys.draw("home")
    kept_names = sorted([DIGEST + ".shares", DIGEST + ".sum", "home"])

    def on_a_full_disk(what: str) -> None:
        if what == "commit":
            raise no_room()

    with pytest.raises(StorageFull), listening(on_a_full_disk):
        journal.open(opening(new))
    assert len(keys.names()) == 5, "a key is durable before its row"
    memory.tidy()
    assert keys.names() == kept_names
    with pytest.raises(StorageFull), listening(on_a_full_disk):
        journal.fix(["alice"], b"sum")
    memory.tidy()
    assert keys.names() == kept_names
    assert journal.load().shares["alice"] == kept("alice")
    journal.fix(["alice"], b"sum")
    memory.tidy()
    assert keys.names() == sorted([DIGEST + ".sum", "home"])
    assert journal.load().aggregate == b"sum"
