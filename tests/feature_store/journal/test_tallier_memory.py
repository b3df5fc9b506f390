"""A tallier sums a round once for ever, over shares it was sent once, also when it is restarted in between."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from feature_store.erasable import ErasableKeys, KeyFolder, KeysInMemory, is_locked_away
from feature_store.journal.backup import backup
from feature_store.journal.database import Database, open_database
from feature_store.journal.tallier_memory import KeptRound, KeptShare, TallierMemory
from feature_store.journal.tallier_tables import tallier_shares
from labeler.errors import (
    BadData,
    DuplicateAgent,
    InvalidSetting,
    LateShare,
    NotFound,
    PrivacyRefusal,
    ProtocolViolation,
    WrongDigest,
)
from labeler.messages.rounds import OpenRound
from labeler.tally import Round
from tests.feature_store.journal.conftest import Place, refuses

ROUND = Round("a" * 64, "b" * 64, num_queries=2, num_classes=2, quorum=2)
DIGEST = ROUND.digest
AGENTS = ("alice", "bob", "carol")


def opening(round: Round = ROUND, *, expires_at: float = 1e9) -> OpenRound:
    return OpenRound(round, 0, {agent: f"{at:064x}" for at, agent in enumerate(AGENTS)}, expires_at)


def kept(agent: str) -> KeptShare:
    return KeptShare(b"share of " + agent.encode(), agent.encode().ljust(16, b"."), agent.encode().ljust(32, b"."))


def send(memory: TallierMemory, agent: str) -> None:
    share = kept(agent)
    assert share.data is not None
    memory.store_share(DIGEST, agent, share.data, share.sharing_id, share.fingerprint)


@pytest.fixture
def memory(database: Database) -> TallierMemory:
    memory = TallierMemory(database, KeysInMemory())
    memory.open_round(opening())
    return memory


@pytest.fixture
def full(memory: TallierMemory) -> TallierMemory:
    for agent in AGENTS:
        send(memory, agent)
    return memory


def contents(memory: TallierMemory) -> tuple[object, ...]:
    found = memory.load(DIGEST)
    return found.shares, found.excluded, found.contributors, found.aggregate, found.is_forgotten


def test_a_round_is_opened_once_and_the_same_again_changes_nothing(memory: TallierMemory) -> None:
    memory.open_round(opening())
    assert memory.open_rounds() == [opening()]
    with pytest.raises(WrongDigest, match="never changes"):
        memory.open_round(opening(expires_at=2e9))
    other = Round("c" * 64, "b" * 64, 2, 2, 2)
    memory.open_round(opening(other))
    assert {one.round for one in memory.open_rounds()} == {ROUND, other}


def test_what_was_never_opened_is_not_found(memory: TallierMemory) -> None:
    for step in (
        lambda: memory.load("0" * 64),
        lambda: memory.store_share("0" * 64, "alice", b"s", b"i", b"f"),
        lambda: memory.exclude("0" * 64, "alice"),
        lambda: memory.fix("0" * 64, ["alice"], b"sum"),
        lambda: memory.forget("0" * 64),
    ):
        with pytest.raises(NotFound):
            step()


def test_a_restarted_tallier_finds_everything_it_had(place: Place, tmp_path: Path) -> None:
    memory = TallierMemory(place.open(), KeyFolder(tmp_path / "erasable"))
    memory.open_round(opening())
    for agent in AGENTS:
        send(memory, agent)
    memory.exclude(DIGEST, "carol")
    place.close()
    found = TallierMemory(place.open(), KeyFolder(tmp_path / "erasable")).load(DIGEST)
    assert found.opened == opening()
    assert dict(found.shares) == {agent: kept(agent) for agent in ("alice", "bob")}
    assert (found.excluded, found.contributors, found.aggregate) == ({"carol"}, None, None)


def test_the_same_share_again_changes_nothing_before_and_after_the_sum(full: TallierMemory) -> None:
    before = contents(full)
    send(full, "alice")
    assert contents(full) == before
    full.fix(DIGEST, ["alice", "bob"], b"sum")
    after = contents(full)
    for agent in AGENTS:
        send(full, agent)
    assert contents(full) == after


def test_a_second_share_of_an_agent_excludes_it_for_good(full: TallierMemory) -> None:
    for _ in range(2):
        with pytest.raises(DuplicateAgent, match="two different"):
            full.store_share(DIGEST, "alice", b"other", b"i" * 16, b"f" * 32)
    with pytest.raises(DuplicateAgent):
        send(full, "alice")
    found = full.load(DIGEST)
    assert (found.excluded, set(found.shares)) == ({"alice"}, {"bob", "carol"})
    with pytest.raises(ProtocolViolation, match="'alice'"):
        full.fix(DIGEST, ["alice", "bob"], b"sum")


def test_an_excluded_agent_may_not_send_afterwards(memory: TallierMemory) -> None:
    memory.exclude(DIGEST, "alice")
    memory.exclude(DIGEST, "alice")
    with pytest.raises(DuplicateAgent):
        send(memory, "alice")
    assert memory.load(DIGEST).excluded == {"alice"}


def test_the_sum_is_fixed_once_and_single_shares_are_dropped(full: TallierMemory, database: Database) -> None:
    full.fix(DIGEST, ["bob", "alice"], b"the sum")
    full.fix(DIGEST, ["alice", "bob"], b"the sum")
    found = full.load(DIGEST)
    assert (found.contributors, found.aggregate) == ({"alice", "bob"}, b"the sum")
    assert {agent: share.data for agent, share in found.shares.items()} == {"alice": None, "bob": None}
    assert found.shares["alice"].fingerprint == kept("alice").fingerprint
    assert found.fingerprints == {agent: kept(agent).fingerprint for agent in AGENTS}
    for names, data in ((["alice"], b"the sum"), (list(AGENTS), b"the sum"), (["alice", "bob"], b"another")):
        with pytest.raises(PrivacyRefusal, match="summed"):
            full.fix(DIGEST, names, data)
    full.exclude(DIGEST, "alice")
    with pytest.raises(DuplicateAgent):
        full.store_share(DIGEST, "alice", b"other", b"i" * 16, b"f" * 32)
    with pytest.raises(LateShare):
        full.store_share(DIGEST, "dave", b"s", b"i" * 16, b"f" * 32)
    again = full.load(DIGEST)
    assert (again.contributors, again.excluded, again.aggregate) == ({"alice", "bob"}, set(), b"the sum")
    with database.read() as connection:
        assert connection.execute(text("SELECT count(*) FROM tallier_shares WHERE share IS NOT NULL")).scalar() == 0


@pytest.mark.parametrize("size", [100, 100_000], ids=["in its row", "in pages of its own"])
@pytest.mark.parametrize("how", ["summed", "excluded", "forgotten"])
def test_nothing_of_a_dropped_share_is_left_in_a_file_while_the_journal_is_open(
    sqlite_place: Place, size: int, how: str
) -> None:
    database = sqlite_place.open()
    memory = TallierMemory(database, KeysInMemory())
    memory.open_round(opening())
    for agent in AGENTS:
        memory.store_share(DIGEST, agent, b"share of " + agent.encode() * size, b"i" * 16, agent.encode().ljust(32))
    if how == "summed":
        memory.fix(DIGEST, AGENTS, b"the sum")
    elif how == "excluded":
        for agent in AGENTS:
            memory.exclude(DIGEST, agent)
    else:
        memory.forget(DIGEST)
    database.forget_log()
    assert memory.load(DIGEST).opened == opening()
    folder = Path(sqlite_place.target).parent
    left = b"".join(path.read_bytes() for path in folder.iterdir())
    assert b"share of" not in left, [path for path in folder.iterdir() if b"share of" in path.read_bytes()]
    assert not any(agent.encode() * 50 in left for agent in AGENTS)


def test_what_is_deleted_is_overwritten_on_every_writing_connection(sqlite_place: Place) -> None:
    with sqlite_place.open().write() as connection:
        assert connection.exec_driver_sql("PRAGMA secure_delete").scalar() == 1


@pytest.mark.parametrize("names", [[], ["alice", "alice"]])
def test_a_sum_is_over_agents_each_once(full: TallierMemory, names: list[str]) -> None:
    with pytest.raises(InvalidSetting):
        full.fix(DIGEST, names, b"sum")


def test_a_forgotten_round_keeps_its_contributors_and_gives_no_sum(full: TallierMemory) -> None:
    full.fix(DIGEST, ["alice", "bob"], b"sum")
    for _ in range(2):
        full.forget(DIGEST)
    found = full.load(DIGEST)
    assert (found.contributors, found.aggregate, found.is_forgotten) == ({"alice", "bob"}, None, True)
    assert full.open_rounds() == []
    full.open_round(opening())
    assert full.open_rounds() == []
    for names in (["alice", "bob"], ["alice"]):
        with pytest.raises(PrivacyRefusal):
            full.fix(DIGEST, names, b"sum")


def test_a_round_that_was_given_up_is_never_summed(full: TallierMemory) -> None:
    full.forget(DIGEST)
    assert full.load(DIGEST).shares == {}
    with pytest.raises(PrivacyRefusal, match="given up"):
        full.fix(DIGEST, ["alice", "bob"], b"sum")
    with pytest.raises(LateShare):
        full.store_share(DIGEST, "dave", b"s", b"i" * 16, b"f" * 32)


def test_of_many_sums_at_once_one_is_fixed(full: TallierMemory) -> None:
    sets = [["alice", "bob"], ["bob", "carol"], ["alice", "carol"]] * 4

    def fix(names: list[str]) -> frozenset[str] | None:
        try:
            full.fix(DIGEST, names, b"sum of " + ",".join(names).encode())
        except PrivacyRefusal:
            return None
        return frozenset(names)

    with ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(fix, sets))
    assert set(answers) - {None} == {full.load(DIGEST).contributors}
    assert answers.count(None) == 8


def test_of_two_shares_sent_at_once_neither_is_summed(memory: TallierMemory) -> None:
    def store(number: int) -> str:
        try:
            memory.store_share(DIGEST, "alice", b"s%d" % number, b"i" * 16, bytes([number]) * 32)
        except DuplicateAgent:
            return "refused"
        return "kept"

    with ThreadPoolExecutor(2) as threads:
        assert sorted(threads.map(store, (1, 2))) == ["kept", "refused"]
    assert memory.load(DIGEST).excluded == {"alice"}


STATEMENTS = [
    "UPDATE tallier_rounds SET contributors = '[\"alice\"]'",
    "UPDATE tallier_rounds SET contributors = NULL, aggregate = NULL, state = 'open'",
    "UPDATE tallier_rounds SET contributors = NULL, aggregate = NULL, state = 'forgotten'",
    "UPDATE tallier_rounds SET aggregate = round_bytes",
    "UPDATE tallier_shares SET state = 'excluded'",
    "UPDATE tallier_shares SET fingerprint = round_bytes",
    "DELETE FROM tallier_rounds",
    "DELETE FROM tallier_shares",
]


def test_the_database_itself_keeps_what_was_summed(full: TallierMemory, database: Database) -> None:
    full.fix(DIGEST, ["alice", "bob"], b"sum")
    before = contents(full)
    some_bytes = "x'00'" if database.dialect == "sqlite" else "'\\x00'::bytea"
    refuses(database, *(statement.replace("round_bytes", some_bytes) for statement in STATEMENTS))
    assert contents(full) == before


def test_a_share_prints_nowhere(full: TallierMemory, database: Database) -> None:
    found = full.load(DIGEST)
    printed = [repr(found), str(found), repr(found.shares), repr(full)]
    failures: list[Callable[[], object]] = [
        lambda: full.store_share(DIGEST, "alice", b"share of mallory", b"i" * 16, b"f" * 32),
        lambda: full.fix(DIGEST, ["dave"], b"share of all"),
    ]
    for failure in failures:
        with pytest.raises(ProtocolViolation) as refusal:
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
    """What somebody with a copy of the journal and these keys reads."""
    with open_database(path, read_only=True) as database:
        found = TallierMemory(database, keys).load(DIGEST)
    return [share.data for share in found.shares.values() if share.data] + [found.aggregate] * (not found.shares)


@pytest.mark.parametrize("how", ["summed", "forgotten"])
def test_a_backup_of_single_shares_says_nothing_once_they_are_summed_or_given_up(
    sqlite_place: Place, tmp_path: Path, how: str
) -> None:
    keys = KeyFolder(tmp_path / "erasable")
    memory = TallierMemory(sqlite_place.open(), keys)
    memory.open_round(opening())
    for agent in AGENTS:
        send(memory, agent)
    yesterday = tmp_path / "yesterday.db"
    backup(Path(sqlite_place.target), yesterday, anchor=tmp_path / "yesterday.head")
    assert opened_by(keys, yesterday) == [kept(agent).data for agent in AGENTS]
    held = held_in(yesterday)
    assert len(held) == 3
    assert all(is_locked_away(one) for one in held)
    memory.fix(DIGEST, AGENTS, b"the sum") if how == "summed" else memory.forget(DIGEST)
    assert keys.names() == ([DIGEST + ".sum"] if how == "summed" else [])
    for thief in (keys, KeyFolder(tmp_path / "erasable")):
        with pytest.raises(BadData, match="gives the round up"):
            opened_by(thief, yesterday)


def test_a_sum_is_erased_with_its_key_when_the_round_is_forgotten(sqlite_place: Place, tmp_path: Path) -> None:
    keys = KeyFolder(tmp_path / "erasable")
    memory = TallierMemory(sqlite_place.open(), keys)
    memory.open_round(opening())
    for agent in AGENTS:
        send(memory, agent)
    memory.fix(DIGEST, AGENTS, b"the sum")
    yesterday = tmp_path / "yesterday.db"
    backup(Path(sqlite_place.target), yesterday, anchor=tmp_path / "yesterday.head")
    (held,) = held_in(yesterday)
    assert is_locked_away(held)
    memory.forget(DIGEST)
    assert keys.names() == []
    with pytest.raises(BadData):
        opened_by(KeyFolder(tmp_path / "erasable"), yesterday)


def test_keys_stay_when_the_step_that_would_erase_them_is_undone(full: TallierMemory, database: Database) -> None:
    with suppress(KeyError), database.write() as connection:
        full.fix(DIGEST, AGENTS, b"the sum", connection=connection)
        raise KeyError
    with suppress(KeyError), database.write() as connection:
        full.forget(DIGEST, connection=connection)
        raise KeyError
    assert [share.data for share in full.load(DIGEST).shares.values()] == [kept(agent).data for agent in AGENTS]


def test_a_start_gives_up_rounds_whose_key_is_gone_and_erases_keys_that_open_nothing(database: Database) -> None:
    keys = KeysInMemory()
    memory = TallierMemory(database, keys)
    rounds = [Round(f"{number:064x}", "b" * 64, 2, 2, 2) for number in range(4)]
    for one in rounds:
        memory.open_round(opening(one))
        memory.store_share(one.digest, "alice", b"s", b"i" * 16, b"f" * 32)
    for one in rounds[:2]:
        memory.fix(one.digest, ["alice"], b"sum")
    keys.erase(rounds[0].digest + ".sum")
    keys.erase(rounds[2].digest + ".shares")
    keys.draw("f" * 64 + ".shares")
    keys.draw("home")
    assert sorted(memory.sweep()) == sorted([rounds[0].digest, rounds[2].digest])
    assert keys.names() == sorted([rounds[1].digest + ".sum", rounds[3].digest + ".shares", "home"])
    assert memory.sweep() == []
    assert {one.round for one in memory.open_rounds()} == {rounds[1], rounds[3]}


def test_what_an_older_version_kept_in_clear_is_read_summed_and_gone(memory: TallierMemory, database: Database) -> None:
    with database.write() as connection:
        connection.execute(
            tallier_shares.insert(),
            [
                {
                    "round_digest": DIGEST, "agent_id": agent, "state": "held", "share": kept(agent).data,
                    "sharing_id": kept(agent).sharing_id, "fingerprint": kept(agent).fingerprint,
                }
                for agent in ("alice", "bob")
            ],
        )  # fmt: skip
    send(memory, "carol")
    assert memory.sweep() == []
    assert dict(memory.load(DIGEST).shares) == {agent: kept(agent) for agent in AGENTS}
    memory.fix(DIGEST, AGENTS, b"sum")
    assert memory.load(DIGEST).aggregate == b"sum"
    with database.read() as connection:
        assert connection.execute(text("SELECT count(*) FROM tallier_shares WHERE share IS NOT NULL")).scalar() == 0
