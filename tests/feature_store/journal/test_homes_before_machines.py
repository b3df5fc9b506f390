"""Journals of the version before rounds had one machine are upgraded as they are, half-done jobs included."""

from __future__ import annotations

import importlib
import pkgutil
import re
import sqlite3
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest
from feature_store.journal.about import VERSION
from feature_store.journal.migrations.runner import Upgraded

import feature_store.journal
from feature_store.erasable import ERASABLE_FOLDER, KeyFolder
from feature_store.journal.agent_rounds import JournalRounds
from feature_store.journal.database import Database, metadata, open_database
from feature_store.journal.erasable_home import check_home
from feature_store.journal.jobs import JobStore
from feature_store.journal.ledger import Ledger
from feature_store.journal.tallier_memory import TallierMemory
from tests.homes import CUTS, CutHome, unpack_cut

AGENTS = ("agents/agent-1", "agents/agent-2")
TALLIERS = ("talliers/tallier-0", "talliers/tallier-1", "talliers/tallier-2")

ANSWERS = {
    "agent.charged": ("charged", None),
    "agent.stored": ("charged", "stored"),
    "coordinator.agreed": ("stored", "stored"),
    "coordinator.opened": ("stored", "stored"),
}
"""How far the two agents had come with the half-done round."""


def now() -> datetime:
    return datetime.now(UTC)


@pytest.fixture(params=CUTS)
def place(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def cut(place: str, tmp_path: Path) -> CutHome:
    return unpack_cut(place, tmp_path / "kept")


def upgraded(home: Path) -> Database:
    return open_database(home / "journal.db", anchor=home / "journal.head")


def rules(path: Path) -> dict[str, str]:
    """What SQLite says of tables, indices and triggers, spaces and quotes apart."""
    with closing(sqlite3.connect(path)) as plain:
        found = plain.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
    return {name: re.sub(r"\s+", " ", sql.replace('"', "")).replace("( ", "(").strip() for name, sql in found}


def test_every_journal_is_upgraded_with_its_chain_and_balances(cut: CutHome) -> None:
    assert sorted(cut.facts) == sorted(("coordinator", *AGENTS, *TALLIERS))
    for role, facts in cut.facts.items():
        journal = cut.federation / role / "journal.db"
        told: list[Upgraded] = []
        with closing(open_database(journal, anchor=journal.with_name("journal.head"), tell=told.append)) as database:
            ledger = Ledger(database, clock=now)
            assert (database.about().version, [one.source for one in told]) == (VERSION, [3])
            assert [ledger.verify().seq, ledger.head().hash] == facts["head"]
            balances = [[one.account, one.level, one.cap, one.spent, one.posted] for one in ledger.balances()]
            assert balances == facts["accounts"]


@pytest.mark.parametrize("place", CUTS[-1:])
def test_its_tables_have_the_rules_that_new_ones_have(cut: CutHome, tmp_path: Path) -> None:
    for module in pkgutil.iter_modules(feature_store.journal.__path__):
        importlib.import_module(f"feature_store.journal.{module.name}")
    fresh = tmp_path / "fresh.db"
    with closing(open_database(fresh)) as database:
        database.create(*(table for table in metadata.sorted_tables if table.name != "journal_about"))
    wanted = rules(fresh)
    for role in cut.facts:
        upgraded(cut.federation / role).close()
        found = rules(cut.federation / role / "journal.db")
        assert {name: sql for name, sql in found.items() if wanted.get(name) != sql} == {}, role


def test_keys_answers_shares_and_rounds_are_found_as_they_were_left(cut: CutHome, place: str) -> None:
    with closing(upgraded(cut.federation / "coordinator")) as database:
        jobs = JobStore(database, clock=now)
        [of_it] = jobs.rounds(cut.half_done)
        assert (cut.half_done, of_it.number, of_it.state, of_it.round_digest) in cut.rounds
        assert jobs.unfinished_ids() == [cut.half_done]
    answers, shares, sums = [], [], []
    for role in (*AGENTS, *TALLIERS):
        home = cut.federation / role
        keys = KeyFolder(home / ERASABLE_FOLDER)
        with closing(upgraded(home)) as database:
            check_home(database, keys, has_entries=True)
            if role in AGENTS:
                answer = JournalRounds(database, keys).kept(of_it.round_digest)
                answers.append(answer and answer.stage)
            else:
                memory = TallierMemory(database, keys)
                assert of_it.round_digest in {one.round.digest for one in memory.open_rounds()}
                kept = memory.load(of_it.round_digest)
                shares.append(sorted(kept.shares))
                sums.append(kept.aggregate is not None)
    assert tuple(answers) == ANSWERS[place]
    held = ["agent-1", "agent-2"] if place.startswith("coordinator") else []
    assert shares == [held] * len(TALLIERS)
    assert sums == [place == "coordinator.opened"] * len(TALLIERS)
