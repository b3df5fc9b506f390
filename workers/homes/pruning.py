"""What a home keeps beyond its use: found, counted, and removed, with every charge and every digest left where it is.

    coordinator    ended jobs older than an age: their folders, and what the journal needs no more of their rounds
    tallier        sums and shares of rounds that expired before
    each           older copies of `coordinator.head`; pages that the journal's file keeps of what was deleted

The owner of the home must not run: it would find things gone under its hands. A running coordinator is pruned over
HTTP instead (workers.commands.service), which is the same but for the journal's file.
"""

from __future__ import annotations

import re
import shutil
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from labeler.errors import InvalidSetting
from labeler.ledger.database import Database, open_database
from labeler.ledger.jobs import ForgottenJobs
from labeler.ledger.ledger import Ledger
from labeler.ledger.tallier_memory import TallierMemory
from labeler.system.clock import Clock, now_utc
from labeler.system.erasable import ERASABLE_FOLDER, KeyFolder
from workers.homes.keys import journal_of
from workers.homes.settings_file import COORDINATOR_FILE
from workers.party.home import AGENT_FILE, ANCHOR_FILE, SEEN_FILE, TALLIER_FILE
from workers.progress import ProgressCallback, silent

_AGE = re.compile(r"([0-9]{1,6})([smhd])")
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_AT_ONCE = 100


def parse_age(text: str) -> timedelta:
    """An age as people write it: 30d, 12h, 45m, 90s.

    Raises:
        InvalidSetting: it is none.
    """
    found = _AGE.fullmatch(text.strip())
    if found is None:
        raise InvalidSetting(f"an age is a whole number and d, h, m or s, for example 30d; found {text[:20]!r}")
    return timedelta(seconds=int(found[1]) * _UNIT_S[found[2]])


def prune_home(
    home: Path,
    age: timedelta,
    *,
    dry_run: bool,
    progress: ProgressCallback = silent,
    clock: Clock = now_utc,
) -> dict[str, Any]:
    """Remove what a stopped home keeps beyond an age.

    Args:
        age: what ended, or expired, longer ago than this goes.
        dry_run: only count.

    Returns:
        {"home", "jobs": [id], "rounds", "files": [name], "bytes", "dry_run"}; bytes are those of the home that went.

    Raises:
        InvalidSetting: it is no home.
        JournalInUse: its owner runs.
        JournalBroken: the ledger does not hold; nothing is removed then.
    """
    if not any((home / file).exists() for file in (COORDINATOR_FILE, AGENT_FILE, TALLIER_FILE)):
        raise InvalidSetting(f"{home} is no home of a coordinator, an agent or a tallier; is it the right folder?")
    before, size = clock() - age, _bytes_of(home)
    files = _old_heads(home, before)
    with closing(open_database(journal_of(home), anchor=home / ANCHOR_FILE)) as database:
        Ledger(database, clock=clock).verify()
        jobs = _jobs(home, database, before, clock, dry_run, progress) if (home / COORDINATOR_FILE).exists() else []
        rounds = _rounds(home, database, before, dry_run) if (home / TALLIER_FILE).exists() else 0
        if not dry_run:
            for file in files:
                file.unlink(missing_ok=True)
            database.compact()
            Ledger(database, clock=clock).verify()
    return {
        "home": str(home),
        "jobs": jobs,
        "rounds": rounds,
        "files": [file.name for file in files],
        "bytes": max(0, size - _bytes_of(home)),
        "dry_run": dry_run,
    }


def _jobs(
    home: Path,
    database: Database,
    before: datetime,
    clock: Clock,
    dry_run: bool,
    progress: ProgressCallback,
) -> list[str]:
    from workers.serve import read_settings

    folder = read_settings(home).home / "jobs"
    forgotten = ForgottenJobs(database, clock=clock)
    if dry_run:
        return forgotten.due(before, limit=1_000_000)
    done: list[str] = []
    while due := forgotten.due(before, limit=_AT_ONCE):
        for job_id in due:
            # The row first: a crash in between is made good by the coordinator's next sweep.
            forgotten.forget(job_id, "age")
            shutil.rmtree(folder / job_id, ignore_errors=True)
            done.append(job_id)
            progress("Jobs", len(done), max(len(done), len(due)))
    return done


def _rounds(home: Path, database: Database, before: datetime, dry_run: bool) -> int:
    memory = TallierMemory(database, KeyFolder(home / ERASABLE_FOLDER))
    old = [one.round.digest for one in memory.open_rounds() if one.expires_at < before.timestamp()]
    if not dry_run:
        for digest in old:
            memory.forget(digest)
    return len(old)


def _old_heads(home: Path, before: datetime) -> list[Path]:
    """Copies of what a party had seen, from each time that a restored journal was accepted."""
    return sorted(
        path for path in home.glob(f"{SEEN_FILE}.*Z") if datetime.fromtimestamp(path.stat().st_mtime, UTC) < before
    )


def _bytes_of(home: Path) -> int:
    return sum(path.lstat().st_size for path in home.rglob("*") if path.is_file() and not path.is_symlink())
