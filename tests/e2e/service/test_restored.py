"""A coordinator's journal that was edited, cut off or restored from an older copy is not served; and the way back."""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.service.conftest import Stopped
from tests.forked_command import run_forked

pytestmark = pytest.mark.slow


@pytest.fixture
def copy(stopped: Stopped, tmp_path: Path) -> Path:
    """The coordinator's home, to be damaged."""
    shutil.copytree(stopped.coordinator, tmp_path / "coordinator")
    return tmp_path / "coordinator"


def edit(home: Path, older: Path) -> None:
    """Change what one entry charges, with the triggers out of the way."""
    with closing(sqlite3.connect(home / "journal.db")) as connection, connection:
        for name in ("stay", "remain", "follow"):
            connection.execute(f"DROP TRIGGER ledger_entries_{name}")
        assert connection.execute("UPDATE ledger_entries SET amount = amount + 1 WHERE seq = 9").rowcount == 1


def cut_off(home: Path, older: Path) -> None:
    path = home / "journal.db"
    os.truncate(path, path.stat().st_size // 2)


def go_back(home: Path, older: Path) -> None:
    """An older copy of the journal, beside an anchor that remembers better."""
    for name in ("journal.db-wal", "journal.db-shm"):
        (home / name).unlink(missing_ok=True)
    shutil.copy2(older / "journal.db", home / "journal.db")


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (edit, "entry 9"),
        pytest.param(cut_off, "malformed|damaged|cannot be read", marks=pytest.mark.long),
        pytest.param(
            go_back,
            "this is an older copy, and what was charged since is missing from it. Restore the newest backup",
            marks=pytest.mark.long,
        ),
    ],
    ids=["edited", "cut off", "older"],
)
def test_a_journal_that_cannot_be_trusted_is_not_served_and_said_why(
    stopped: Stopped, copy: Path, labeler: Any, harm: Any, sentence: str
) -> None:
    harm(copy, stopped.older)
    code, said = run_forked("serve", "--home", copy, "--port", 0)
    assert code == 1
    assert re.search(sentence, said), said
    verified = labeler("journal", "verify", "--home", copy)
    assert verified.code == 1
    assert re.search(sentence, verified.err), verified.err
