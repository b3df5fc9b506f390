"""What released versions keep on disk is opened by this one, with the same numbers (tests/golden/write_storage.py)."""

from __future__ import annotations

import json
import tarfile
from importlib.metadata import version
from pathlib import Path

import pytest

from labeler.errors import JournalBroken
from labeler.ledger.database import open_database
from tests.golden.write_storage import HOMES, STORAGE, read_all
from workers.homes.journals import verify_journal
from workers.party.home import ANCHOR_FILE, JOURNAL_FILE

RELEASED = sorted(STORAGE.glob("*.tar.xz"))


@pytest.fixture(params=RELEASED, ids=lambda path: path.name.removesuffix(".tar.xz"))
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    with tarfile.open(request.param) as archive:
        archive.extractall(tmp_path, filter="tar")
    for name in HOMES:  # its owner starts once, which brings an older journal on
        (tmp_path / name).chmod(0o700)
        open_database(tmp_path / name / JOURNAL_FILE, anchor=tmp_path / name / ANCHOR_FILE).close()
    return tmp_path


@pytest.mark.process  # a finished run reads its shards in threads
def test_homes_a_shard_and_a_jobs_folder_are_opened_with_the_same_numbers(stored: Path) -> None:
    assert read_all(stored) == json.loads((stored / "numbers.json").read_text())


def test_a_journal_with_another_amount_is_noticed(stored: Path) -> None:
    journal = stored / "agent-1" / "journal.db"
    seen = verify_journal(stored / "agent-1")["entries"]
    data = journal.read_bytes()
    place = data.rindex(b"federation") if b"federation" in data else data.index(b"agent:agent-1")
    journal.write_bytes(data[:place] + b"F" + data[place + 1 :])
    with pytest.raises(JournalBroken):
        verify_journal(stored / "agent-1")
    assert seen > 1


def test_this_version_has_stored_what_it_writes() -> None:
    assert version("private-labeler") in [path.name.removesuffix(".tar.xz") for path in RELEASED], (
        "a release stores what it writes: python -m tests.golden.write_storage"
    )
