"""Pruning of stopped homes: what is old goes, what proves the accounts stays, and a dry run touches nothing."""

from __future__ import annotations

import os
import secrets
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest

from api.coordinator import submission
from labeler.errors import JournalInUse
from labeler.ledger.database import open_database
from labeler.ledger.jobs import ForgottenJobs
from labeler.ledger.tallier_memory import KeptShare, TallierMemory
from labeler.messages.bodies import OpenRound
from labeler.system.erasable import ERASABLE_FOLDER, KeyFolder
from labeler.tally import Round
from tests.api.conftest import House, TestClock, clock, house
from tests.command_line import Labeler
from workers.homes.journals import prune_home, verify_journal
from workers.homes.new import coordinator_toml

__all__ = ["clock", "house"]

DAY = timedelta(days=1)


@pytest.fixture
def stopped(house: House) -> tuple[House, list[str]]:
    """A coordinator's home with one old cancelled job, a completed one of a minute ago, and one that runs."""
    text = coordinator_toml(
        public_url="http://127.0.0.1:1", redis_url="redis://127.0.0.1:1/0", delta=1e-5,
        instance_epsilon="unlimited", agent_epsilon="unlimited", classes=None, backbones={},
    )  # fmt: skip
    (house.config.home / "coordinator.toml").write_text(text)
    jobs = [house.submit(house.task(), 2, start=3 * number).job_id for number in range(3)]
    submission.cancel(jobs[0], stores=house.stores)
    house.clock.turn(days=2)
    house.jobs.change(jobs[1], "completed", expected=("queued",))
    house.clock.turn(minutes=1)
    return house, jobs


def folders(house: House) -> list[str]:
    return sorted(path.name for path in (house.config.home / "jobs").iterdir())


def test_a_coordinators_old_jobs_go_and_its_chain_still_verifies(stopped: tuple[House, list[str]]) -> None:
    house, (old, young, running) = stopped
    home = house.config.home
    with pytest.raises(JournalInUse):
        prune_home(home, DAY, dry_run=True)
    head = house.ledger.head()
    house.database.close()
    (home / "journal.db").chmod(0o600)
    planned = prune_home(home, DAY, dry_run=True, clock=house.clock)
    assert (planned["jobs"], planned["bytes"]) == ([old], 0)
    assert folders(house) == sorted([old, young, running])
    told: list[tuple[int, int]] = []
    done = prune_home(home, DAY, dry_run=False, clock=house.clock, progress=lambda _, *steps: told.append(steps))
    assert done["jobs"] == [old]
    assert told == [(1, 1)]
    assert folders(house) == sorted([young, running])
    assert verify_journal(home)["hash"] == head.hash
    assert prune_home(home, DAY, dry_run=False, clock=house.clock)["jobs"] == []
    with closing(open_database(home / "journal.db", anchor=home / "journal.head", read_only=True)) as database:
        assert list(ForgottenJobs(database).at([old, young, running])) == [old]


def test_the_command_counts_and_removes_and_says_so_to_machines(
    stopped: tuple[House, list[str]], labeler: Labeler
) -> None:
    house, (old, young, _) = stopped
    house.database.close()
    # The test's clock is set to the past: by the real one both have ended long ago.
    prune = ("prune", "--home", house.config.home, "--older-than", "1d", "--json")
    for _ in range(2):
        assert labeler(*prune, "--dry-run").document["jobs"] == [old, young]
    found = labeler(*prune)
    assert found.code == 0
    assert (found.document["jobs"], found.document["dry_run"]) == ([old, young], False)
    assert labeler(*prune, "--dry-run").document["jobs"] == []


def test_a_talliers_expired_rounds_are_forgotten_and_its_file_shrinks(tmp_path: Path, clock: TestClock) -> None:
    home = tmp_path / "tallier-0"
    home.mkdir(mode=0o700)
    (home / "tallier.toml").write_text("")
    copies = [home / f"coordinator.head.2026030{number}T120000000000Z" for number in (1, 2)]
    now = clock().timestamp()
    for path, age_s in zip(copies, (2 * 86_400, 60), strict=True):
        path.write_bytes(b"{}")
        os.utime(path, (now - age_s, now - age_s))
    rounds = []
    with closing(open_database(home / "journal.db", anchor=home / "journal.head")) as database:
        from labeler.ledger.ledger import Ledger

        Ledger(database, clock=clock).open_account("rounds-summed", "agent", None)
        memory = TallierMemory(database, KeyFolder(home / ERASABLE_FOLDER))
        for age_s in (2 * 86_400, 60):
            keys = {"east": secrets.token_hex(32), "west": secrets.token_hex(32)}
            one = Round(secrets.token_hex(32), secrets.token_hex(32), 2, 3, 2)
            share = KeptShare(secrets.token_bytes(400_000), b"s" * 16, b"f" * 32)
            with database.write() as connection:
                opened, held = {one.digest: OpenRound(one, 0, keys, now - age_s)}, {(one.digest, "east"): share}
                memory.keep_open(opened, held, connection=connection)
            rounds.append(one.digest)
    before = (home / "journal.db").stat().st_size
    assert prune_home(home, DAY, dry_run=True, clock=clock)["rounds"] == 1
    done = prune_home(home, DAY, dry_run=False, clock=clock)
    assert (done["rounds"], done["files"]) == (1, [copies[0].name])
    assert (home / "journal.db").stat().st_size < before - 300_000
    assert copies[1].exists()
    verify_journal(home)
    with closing(open_database(home / "journal.db", anchor=home / "journal.head")) as database:
        memory = TallierMemory(database, KeyFolder(home / ERASABLE_FOLDER))
        assert memory.load(rounds[0]).is_forgotten
        assert memory.load(rounds[1]).shares["east"].data is not None
