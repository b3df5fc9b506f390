"""Journals of every earlier version open with today's code: same chain, same balances, and they go on."""

from __future__ import annotations

import importlib
import pkgutil
import re
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from feature_store.journal.about import VERSION, metadata
from feature_store.journal.migrations.dumps import check_dump
from feature_store.journal.migrations.runner import STEPS, Upgraded, upgrade
from feature_store.journal.migrations.step import Step
from sqlalchemy import Connection, text
from sqlalchemy.exc import IntegrityError

import feature_store.journal
from feature_store.erasable import KeysInMemory
from feature_store.journal.agent_memory import AgentMemory
from feature_store.journal.anchor import Anchor
from feature_store.journal.chain import Head, canonical
from feature_store.journal.database import Database, open_database
from feature_store.journal.jobs import JobStore
from feature_store.journal.ledger import Charge, Ledger
from feature_store.journal.migrations import runner, v1_to_v2, v2_to_v3, v3_to_v4
from feature_store.journal.sequences import Sequences
from feature_store.journal.tallier_memory import TallierMemory
from labeler.errors import InvalidSetting, JournalBehind, JournalBroken, PrivacyRefusal, Replayed, Unavailable
from tests.homes import VERSIONS, KeptHome, unpack, unpack_dump
from tests.job_steps import take_step
from tests.postgres_server import PostgresServer
from tests.warm_python import WarmProgram

ROLES = (
    "coordinator", "agents/agent-1", "agents/agent-2", "agents/agent-3",
    "talliers/tallier-0", "talliers/tallier-1", "talliers/tallier-2",
)  # fmt: skip


def now() -> datetime:
    return datetime.now(UTC)


@pytest.fixture(params=VERSIONS)
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> KeptHome:
    """The home of one earlier version."""
    return unpack(request.param, tmp_path / "kept")


@pytest.fixture
def first(tmp_path: Path) -> KeptHome:
    """The home of the first version, which has the longest way to go."""
    return unpack(1, tmp_path / "first")


def opened(home: KeptHome, role: str = "coordinator", **options: Any) -> Database:
    journal = home.journal(role)
    return open_database(journal, anchor=journal.with_name("journal.head"), **options)


def accounts(ledger: Ledger) -> list[list[object]]:
    return [[one.account, one.level, one.cap, one.spent, one.posted] for one in ledger.balances()]


def backups(home: KeptHome, role: str = "coordinator") -> list[Path]:
    return sorted(path for path in home.journal(role).parent.glob("journal.db.v*") if path.suffix != ".head")


def plainly(path: Path, query: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(path)) as plain:
        return plain.execute(query).fetchall()


def change(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as plain:
        for statement in statements:
            plain.execute(statement)
        plain.commit()


# What an upgrade keeps.


def test_every_journal_of_a_kept_home_is_upgraded_with_its_chain_balances_and_rows(kept: KeptHome) -> None:
    assert sorted(kept.facts) == sorted(ROLES)
    for role in ROLES:
        facts = kept.facts[role]
        told: list[Upgraded] = []
        with closing(opened(kept, role, tell=told.append)) as database:
            assert database.about().version == VERSION
            ledger = Ledger(database, clock=now)
            assert [ledger.verify().seq, ledger.head().hash] == (facts["head"] or [0, "0" * 64])
            assert accounts(ledger) == facts["accounts"]
            with database.read() as connection:
                for table, rows in facts["rows"].items():
                    if table != "journal_about":
                        assert connection.execute(text(f"SELECT count(*) FROM {table}")).scalar() == rows
        assert [(one.source, one.target) for one in told] == [(kept.version, VERSION)]


def test_before_an_upgrade_a_verified_copy_of_the_old_version_is_made_beside_the_journal(kept: KeptHome) -> None:
    told: list[Upgraded] = []
    opened(kept, tell=told.append).close()
    [copy] = backups(kept)
    assert [one.backup for one in told] == [copy.name]
    assert copy.name.startswith(f"journal.db.v{kept.version}-")
    assert copy.stat().st_mode & 0o777 == 0o600
    assert plainly(copy, "SELECT name, value FROM journal_about") == [("version", str(kept.version))]
    head = Head(*kept.facts["coordinator"]["head"])
    assert Anchor(copy.with_name(f"{copy.name}.head")).read() == head
    notes = dict(plainly(kept.journal("coordinator"), "SELECT name, value FROM journal_about"))
    assert set(notes) == {"version", *(f"upgraded_to_{to}" for to in range(kept.version + 1, VERSION + 1))}
    assert head.hash in notes[f"upgraded_to_{VERSION}"]
    assert copy.name in notes[f"upgraded_to_{VERSION}"]


def test_an_upgraded_ledger_takes_new_charges_and_refuses_what_the_old_one_had_no_room_for(kept: KeptHome) -> None:
    with closing(opened(kept)) as database:
        ledger = Ledger(database, clock=now)
        before = ledger.balance("federation", "instance")
        assert before.left is not None
        ledger.reserve("after the upgrade", [Charge("federation", "instance", before.left)])
        ledger.post("after the upgrade")
        after = ledger.verify()
        assert ledger.balance("federation", "instance").left == 0
    with closing(opened(kept)) as database:
        assert Ledger(database, clock=now).head() == after
    assert len(backups(kept)) == 1, "what is up to date is not copied again"


def test_an_upgraded_journal_has_the_tables_and_rules_that_a_new_one_has(kept: KeptHome, tmp_path: Path) -> None:
    for module in pkgutil.iter_modules(feature_store.journal.__path__):
        importlib.import_module(f"feature_store.journal.{module.name}")
    fresh = tmp_path / "fresh.db"
    with closing(open_database(fresh)) as database:
        database.create(*(table for table in metadata.sorted_tables if table.name != "journal_about"))
    wanted = {(kind, name): sql for kind, name, sql in schema(fresh)}
    for role in ("coordinator", "agents/agent-1", "talliers/tallier-0"):
        opened(kept, role).close()
        found = schema(kept.journal(role))
        assert [(kind, name) for kind, name, _ in found if (kind, name) not in wanted] == []
        for kind, name, sql in found:
            assert sql == wanted[kind, name], name
        ours = {name for kind, name, _ in found if kind == "table"}
        for kind, name, sql in wanted_of(fresh, ours):
            assert (kind, name, sql) in found


def schema(path: Path) -> list[tuple[str, str, str]]:
    rows = plainly(path, "SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL")
    return [
        (kind, name, re.sub(r"\s+", " ", sql.replace('"', "")).replace("( ", "(").strip()) for kind, name, sql in rows
    ]


def wanted_of(path: Path, tables: set[str]) -> Iterator[tuple[str, str, str]]:
    owners = dict(plainly(path, "SELECT name, tbl_name FROM sqlite_master"))
    yield from (row for row in schema(path) if owners[row[1]] in tables)


def test_rules_still_hold_in_tables_that_were_made_anew(first: KeptHome) -> None:
    with closing(opened(first, "agents/agent-1")) as database:
        for statement in (
            "UPDATE answered_rounds SET recipients = 'somebody'",
            "DELETE FROM answered_rounds",
            "INSERT INTO answered_rounds VALUES ('r', 'v', 'unpaid', 1, 1, 't', '[]')",
            "UPDATE sequences_taken SET last = 1",
            "DELETE FROM sequences_taken",
            "UPDATE ledger_entries SET amount = 0",
            "DELETE FROM ledger_entries",
        ):
            with pytest.raises(IntegrityError), database.write() as connection:
                connection.exec_driver_sql(statement)


# What an upgrade does not know, it refuses.


def test_an_answer_of_version_1_whose_recipients_nobody_knows_is_never_sent_again(first: KeptHome) -> None:
    with closing(opened(first, "agents/agent-1")) as database:
        memory = AgentMemory(database, Ledger(database, clock=now))
        with database.read() as connection:
            known = connection.execute(text("SELECT * FROM answered_rounds")).mappings().first()
        assert known is not None
        with pytest.raises(PrivacyRefusal, match="other talliers"):
            memory.charge(
                round_digest=known["round_digest"],
                shard_version=known["shard_version"],
                reservation_id=known["reservation_id"],
                charges=[Charge("agent:agent-1", "instance", 1)],
                num_queries=known["num_queries"],
                task_digest=known["task_digest"],
                max_queries=1000,
                recipients=[("tallier-0", "a" * 64)],
            )


def test_a_message_taken_under_version_1_is_not_taken_again_whatever_key_signs_it(first: KeptHome) -> None:
    [(last,)] = plainly(
        first.journal("agents/agent-1"), "SELECT last FROM sequences_taken WHERE sender = 'coordinator'"
    )
    with closing(opened(first, "agents/agent-1")) as database:
        numbers = Sequences(database)
        for key in ("a" * 64, "b" * 64):
            with pytest.raises(Replayed, match=f"message {last} was taken"):
                numbers.taken("coordinator", last, verify_key=key)
            numbers.taken("coordinator", last + 1, verify_key=key)
            with pytest.raises(Replayed):
                numbers.check("coordinator", last + 1, verify_key=key)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_round_asked_before_shares_were_noted_counts_as_having_passed_some_on(tmp_path: Path, version: int) -> None:
    home = unpack(version, tmp_path / "kept")
    noted = set()
    if version == 2:
        noted = {row[0] for row in plainly(home.journal("coordinator"), "SELECT job_id FROM round_shares")}
        change(home.journal("coordinator"), "DROP TABLE round_shares")
    asked = {
        job for (job,) in plainly(home.journal("coordinator"), "SELECT job_id FROM rounds WHERE state <> 'waiting'")
    }
    with closing(opened(home)) as database:
        jobs = JobStore(database, clock=now)
        assert {job for job in asked if all(one.has_shares for one in jobs.rounds(job))} == asked
    assert noted <= asked
    assert home.half_done in asked


def test_a_note_of_shares_that_the_journal_has_is_believed(tmp_path: Path) -> None:
    home = unpack(2, tmp_path / "kept")
    change(home.journal("coordinator"), "DROP TRIGGER round_shares_remain", "DELETE FROM round_shares")
    with closing(opened(home)) as database:
        assert not any(one.has_shares for one in JobStore(database, clock=now).rounds(home.half_done))


# The half-finished job goes on.


def test_the_half_finished_job_of_a_kept_home_can_be_completed(kept: KeptHome) -> None:
    """Its charge was posted; the release is stored once, the job completes, and nothing is charged again."""
    with closing(opened(kept)) as database:
        ledger, jobs = Ledger(database, clock=now), JobStore(database, clock=now)
        before = accounts(ledger)
        [of_it] = jobs.rounds(kept.half_done)
        assert (of_it.state, of_it.contributors) == ("posted", ("agent-1", "agent-2", "agent-3"))
        take_step(jobs, "store_release", kept.half_done, of_it.number, b"what was opened")
        assert [one.state for one in jobs.rounds(kept.half_done)] == ["opened"]
        assert jobs.release(kept.half_done, of_it.number) == b"what was opened"
        assert accounts(ledger) == before == kept.facts["coordinator"]["accounts"]
    with closing(opened(kept, "talliers/tallier-1")) as database:
        memory = TallierMemory(database, KeysInMemory())
        assert of_it.round_digest in {one.round.digest for one in memory.open_rounds()}


# Half an upgrade.


def test_a_journal_left_between_two_steps_is_refused_until_the_backup_is_restored(first: KeptHome) -> None:
    journal = first.journal("coordinator")

    def break_down(connection: Connection) -> None:
        raise Unavailable("the disk is full")

    with closing(open_database(journal, anchor=journal.with_name("journal.head"))) as database:
        with pytest.raises(Unavailable):
            upgrade(
                database,
                save=save_of(database),
                clock=now,
                steps=(v1_to_v2.STEP, Step(2, 3, break_down), v3_to_v4.STEP),
            )
        assert database.about().version == 2
    [copy] = backups(first)
    for door in (
        lambda: opened(first),
        lambda: Ledger(open_database(journal, read_only=True), clock=now),
    ):
        with pytest.raises(JournalBroken, match=rf"stopped half way, at version 2.*Restore .*{copy.name}"):
            door()
    assert backups(first) == [copy], "nothing half is copied over what is whole"
    # As docs/operate.md says.
    for ending in ("-wal", "-shm"):
        journal.with_name(journal.name + ending).unlink(missing_ok=True)
    shutil.copy2(copy, journal)
    with closing(opened(first)) as database:
        assert accounts(Ledger(database, clock=now)) == first.facts["coordinator"]["accounts"]


def save_of(database: Database) -> runner.Save:
    from feature_store.journal.migrations.opening import _saving

    return _saving(database, None, now)


def test_an_upgrade_that_fails_in_its_first_step_leaves_the_journal_as_it_was(first: KeptHome) -> None:
    journal = first.journal("agents/agent-1")
    before = sorted(schema(journal))

    def half_of_it(connection: Connection) -> None:
        v1_to_v2.apply(connection)
        raise Unavailable("the disk is full")

    with closing(open_database(journal, anchor=journal.with_name("journal.head"))) as database:
        with pytest.raises(Unavailable):
            upgrade(
                database,
                save=save_of(database),
                clock=now,
                steps=(Step(1, 2, half_of_it), v2_to_v3.STEP, v3_to_v4.STEP),
            )
        assert (database.about().version, database.about().upgrading) == (1, None)
    assert sorted(schema(journal)) == before
    with closing(opened(first, "agents/agent-1")) as database:
        assert accounts(Ledger(database, clock=now)) == first.facts["agents/agent-1"]["accounts"]


KILLED = """
import os, signal, sys
from pathlib import Path
from feature_store.journal.migrations import runner
from feature_store.journal.database import open_database
from feature_store.journal.migrations.step import Step
number = int(sys.argv[2])
steps = list(runner.STEPS)
def dying(connection, apply=steps[number].apply):
    apply(connection)
    os.kill(os.getpid(), signal.SIGKILL)
steps[number] = Step(steps[number].source, steps[number].target, dying)
runner.upgrade.__kwdefaults__["steps"] = tuple(steps)
open_database(sys.argv[1], anchor=Path(sys.argv[1]).with_name("journal.head"))
"""


@pytest.mark.parametrize("number", range(len(STEPS)))
def test_a_process_killed_within_a_step_leaves_the_version_before_it(first: KeptHome, number: int) -> None:
    journal = first.journal("coordinator")
    with closing(WarmProgram(KILLED, journal, number)) as dying:
        assert dying.wait() == -9
    with closing(open_database(journal, read_only=True)) as database:
        about = database.about()
    assert (about.version, about.upgrading is not None) == (STEPS[number].source, True)
    if number == 0:  # nothing was done, so it begins again
        with closing(opened(first)) as database:
            assert accounts(Ledger(database, clock=now)) == first.facts["coordinator"]["accounts"]
            assert database.about().upgrading is None
        return
    with pytest.raises(JournalBroken, match="stopped half way"):
        opened(first)


def test_a_step_that_touches_the_ledger_is_undone(first: KeptHome) -> None:
    journal = first.journal("coordinator")

    def forget_the_last_charge(connection: Connection) -> None:
        connection.exec_driver_sql("DROP TRIGGER ledger_entries_remain")
        connection.exec_driver_sql("DELETE FROM ledger_entries WHERE seq = (SELECT max(seq) FROM ledger_entries)")

    def add_one(connection: Connection) -> None:
        """A chain that holds, and is another one."""
        row = connection.execute(text("SELECT * FROM ledger_entries ORDER BY seq DESC LIMIT 1")).mappings().one()
        entry = dict(row) | {
            "seq": row["seq"] + 1, "kind": "open", "account": "new", "reservation_id": "", "amount": 0,
            "detail": canonical({"cap": None}), "previous_hash": row["hash"],
        }  # fmt: skip
        from feature_store.journal.chain import entry_hash

        entry["hash"] = entry_hash(entry)
        names = ", ".join(entry)
        holes = ", ".join(f":{name}" for name in entry)
        connection.execute(text(f"INSERT INTO ledger_entries ({names}) VALUES ({holes})"), entry)
        connection.exec_driver_sql(f"INSERT INTO ledger_accounts VALUES ('new', '{entry['level']}', NULL, 0, 0)")

    for evil, match in ((forget_the_last_charge, "was settled whole"), (add_one, "changed the ledger")):
        with closing(open_database(journal, anchor=journal.with_name("journal.head"))) as database:
            with pytest.raises(JournalBroken, match=match):
                upgrade(
                    database, save=save_of(database), clock=now, steps=(Step(1, 2, evil), v2_to_v3.STEP, v3_to_v4.STEP)
                )
            assert database.about().version == 1
    with closing(opened(first)) as database:
        assert accounts(Ledger(database, clock=now)) == first.facts["coordinator"]["accounts"]


def test_a_step_that_loses_a_row_others_refer_to_is_undone(first: KeptHome) -> None:
    journal = first.journal("coordinator")

    def lose(connection: Connection) -> None:
        connection.exec_driver_sql("DROP TRIGGER jobs_remain")
        connection.exec_driver_sql("DELETE FROM jobs")

    with closing(open_database(journal, anchor=journal.with_name("journal.head"))) as database:
        with pytest.raises(JournalBroken, match="refers to one of jobs that is not there"):
            upgrade(database, save=save_of(database), clock=now, steps=(Step(1, 2, lose), v2_to_v3.STEP, v3_to_v4.STEP))
        with database.read() as connection:
            assert connection.execute(text("SELECT count(*) FROM jobs")).scalar() == 5
        with pytest.raises(IntegrityError), database.write() as connection:  # references are followed again
            connection.exec_driver_sql("INSERT INTO idempotency_keys VALUES ('t', 'k', 'd', 'no such job')")


# What is not upgraded.


def test_a_journal_that_is_not_upgraded_is_refused_with_the_way_out(kept: KeptHome) -> None:
    with (
        closing(open_database(kept.journal("coordinator"), read_only=True)) as database,
        pytest.raises(InvalidSetting, match=rf"tables of version {kept.version}.*labeler journal upgrade --home"),
    ):
        Ledger(database, clock=now)


def test_a_journal_of_a_newer_program_is_refused_and_left_alone(kept: KeptHome) -> None:
    change(kept.journal("coordinator"), f"UPDATE journal_about SET value = '{VERSION + 1}' WHERE name = 'version'")
    with pytest.raises(InvalidSetting, match="made by a newer program"):
        opened(kept)
    assert backups(kept) == []


@pytest.mark.parametrize("written", ["", "two", "0", "-1"])
def test_a_version_that_no_program_wrote_is_refused(first: KeptHome, written: str) -> None:
    change(first.journal("coordinator"), f"UPDATE journal_about SET value = '{written}' WHERE name = 'version'")
    with pytest.raises(JournalBroken, match="names no version"):
        opened(first)


def test_a_journal_older_than_its_anchor_or_whose_chain_is_broken_is_not_upgraded(first: KeptHome) -> None:
    seq, _ = first.facts["coordinator"]["head"]
    Anchor(first.journal("coordinator").with_name("journal.head")).replace(Head(seq + 1, "a" * 64))
    with pytest.raises(JournalBehind):
        opened(first)
    change(first.journal("agents/agent-1"), "DROP TRIGGER ledger_entries_stay", "UPDATE ledger_entries SET amount = 1")
    with pytest.raises(JournalBroken, match="was changed"):
        opened(first, "agents/agent-1")
    for role in ("coordinator", "agents/agent-1"):
        assert plainly(first.journal(role), "SELECT name, value FROM journal_about") == [("version", "1")]
        assert backups(first, role) == []


def test_nothing_is_changed_where_no_backup_can_be_made(first: KeptHome, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise Unavailable("the disk is full")

    monkeypatch.setattr("feature_store.journal.backup._copy", full)
    with pytest.raises(Unavailable):
        opened(first)
    assert plainly(first.journal("coordinator"), "SELECT name, value FROM journal_about") == [("version", "1")]


def test_the_steps_lead_from_the_first_version_to_this_one_without_a_gap() -> None:
    assert [(step.source, step.target) for step in STEPS] == [(at, at + 1) for at in range(1, VERSION)]


# PostgreSQL.


@pytest.mark.parametrize("role", ["coordinator", "agent-1"])
@pytest.mark.parametrize("version", VERSIONS)
def test_a_journal_in_postgresql_is_upgraded_once_its_operator_names_a_dump_of_it(
    postgres_server: PostgresServer, tmp_path: Path, version: int, role: str
) -> None:
    home = unpack(version, tmp_path / "kept")
    facts = home.facts["coordinator" if role == "coordinator" else f"agents/{role}"]
    anchor = tmp_path / "journal.head"
    Anchor(anchor).replace(Head(*facts["head"]))
    url = postgres_server.new_database()
    dump = unpack_dump(version, role, tmp_path)
    postgres_server.restore(dump, url)
    with pytest.raises(InvalidSetting, match=r"pg_dump --file FILE URL.*labeler journal upgrade"):
        open_database(url, anchor=anchor)
    with closing(open_database(url, anchor=anchor, dump=dump)) as database:
        ledger = Ledger(database, clock=now)
        assert accounts(ledger) == facts["accounts"]
        assert ledger.verify() == Head(*facts["head"])
        with database.read() as connection:
            for table, rows in facts["rows"].items():
                if table != "journal_about":
                    assert connection.execute(text(f"SELECT count(*) FROM {table}")).scalar() == rows
        if role == "coordinator":
            jobs = JobStore(database, clock=now)
            take_step(jobs, "store_release", home.half_done, 0, b"what was opened")
            assert jobs.rounds(home.half_done)[0].has_shares
        else:
            AgentMemory(database, ledger)
            with pytest.raises(IntegrityError, match="stays"), database.write() as connection:
                connection.exec_driver_sql("UPDATE answered_rounds SET recipients = 'somebody'")
        numbers = Sequences(database)
        sender = "agent-2" if role == "coordinator" else "coordinator"
        with pytest.raises(Replayed) if version == 1 else closing(database):
            numbers.taken(sender, 1, verify_key="a" * 64)


def test_a_dump_that_is_cut_off_or_older_than_the_journal_is_no_backup(tmp_path: Path) -> None:
    home = unpack(2, tmp_path / "kept")
    head = Head(*home.facts["coordinator"]["head"])
    dump = unpack_dump(2, "coordinator", tmp_path)
    check_dump(dump, head)
    cut = tmp_path / "cut.sql"
    cut.write_bytes(dump.read_bytes()[:-200])
    with pytest.raises(InvalidSetting, match="no complete dump"):
        check_dump(cut, head)
    with pytest.raises(InvalidSetting, match="older than the journal"):
        check_dump(dump, Head(head.seq + 1, "b" * 64))
    with pytest.raises(InvalidSetting, match="cannot be read"):
        check_dump(tmp_path / "none.sql", head)
