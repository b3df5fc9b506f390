"""Care for the journal of a home: verify it, copy it, continue after lost charges, and prune what jobs left.

A home is a coordinator's, an agent's or a tallier's. Verifying and copying do not disturb the process that owns it.

When a coordinator's newest journal is gone for good, its operator accepts an older one, and every site that has seen
the newer one consents. Consent is to one journal: the operator reads out the head at which it was accepted. The site
writes it down in place of the head it had seen. From then on the coordinator must show a journal that holds it.

Pruning removes data that a home no longer needs. Every charge and every digest stays. It removes

    coordinator    ended jobs older than an age: their folders, and what the journal no longer needs of their rounds.
    tallier        sums and shares of rounds that expired before.
    each           older copies of `coordinator.head`; pages that the journal's file keeps of deleted data.

The owner of the home must not run: pruning would remove files that it uses. A running coordinator is pruned over HTTP
instead (workers.commands.console), which is the same except for the journal's file.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from labeler.budget import budget_for, epsilon_left, say_epsilon_left
from labeler.errors import InvalidSetting, JournalBehind, LabelerError
from labeler.ledger.backup import accept_restored, backup, renew_home
from labeler.ledger.chain import Anchor, Head
from labeler.ledger.database import Database, open_database
from labeler.ledger.jobs import ForgottenJobs
from labeler.ledger.ledger import Balance, Ledger
from labeler.ledger.lifetimes import LifetimeSpends
from labeler.ledger.tallier_memory import TallierMemory
from labeler.system.clock import Clock, now_utc
from labeler.system.erasable import ERASABLE_FOLDER, KeyFolder
from labeler.system.files import replace_file, sync_folder
from labeler.system.site_key import SITE_KEY_FILE
from labeler.task import Level
from workers.agent.decisions import APPROVED_FOLDER, REFUSED_FOLDER, STOPPED_FILE
from workers.agent.policy import read_policy
from workers.homes.new import PUBLIC_FILE, existing_journal, journal_of
from workers.party.home import (
    AGENT_FILE,
    ANCHOR_FILE,
    CA_FILE,
    COORDINATOR_FILE,
    JOURNAL_FILE,
    KEYS_FILE,
    POLICY_FILE,
    PREDICTING,
    PROOF_FILE,
    SEEN_FILE,
    SHARED_FOLDER,
    TALLIER_FILE,
    read_agent_config,
)
from workers.progress import ProgressCallback, silent
from workers.tallier.peers import IDENTITY_FILE, PEERS_FILE

BESIDE: Final = (
    *(AGENT_FILE, TALLIER_FILE, COORDINATOR_FILE, POLICY_FILE, KEYS_FILE, SEEN_FILE, PROOF_FILE),
    *(PUBLIC_FILE, CA_FILE, STOPPED_FILE, IDENTITY_FILE, PEERS_FILE, SITE_KEY_FILE),
)
"""Files without which a journal is useless, in the order in which they are copied."""

DECIDED: Final = (APPROVED_FOLDER, REFUSED_FOLDER)
"""Folders of people's decisions about tasks. A no is written before a yes is removed, so it is copied after it."""

_HEAD = re.compile(r"([1-9][0-9]{0,17}):([0-9a-f]{64})")


def verify_journal(home: Path) -> dict[str, Any]:
    """Read the whole ledger of a home again, and verify it.

    Raises:
        JournalBroken: an entry was changed, a balance is not the sum of its entries, or what images have spent is
            not what the last answer said.
        JournalBehind: it is older than what its anchor remembers.
    """
    with _opened(home, read_only=True) as database:
        head = Ledger(database, clock=now_utc).verify()
        LifetimeSpends(database).verify()
        return {"entries": head.seq, "hash": head.hash}


def backup_home(home: Path, out: Path) -> dict[str, Any]:
    """Copy everything of a home that cannot be recreated into a new folder, while its process runs.

    Erasable keys stay where they are: what was erased in the home must not lie in any backup. So a home made from this
    copy refuses to serve until a person accepts what that means (labeler.ledger.backup).

    Raises:
        InvalidSetting: the folder exists, or the journal is PostgreSQL's, which has its own tools.
    """
    target = journal_of(home)
    if not isinstance(target, Path):
        raise InvalidSetting(
            "this journal is in PostgreSQL: copy it with pg_dump or a base backup, and the rest of the home, which is "
            "keys.json, coordinator.toml and journal.head, beside it"
        )
    if out.exists():
        raise InvalidSetting(f"{out} exists; a backup never replaces another. Name a new folder")
    made = [out, *(one for one in out.parents if not one.exists())]
    out.mkdir(mode=0o700, parents=True)
    try:
        found = [name for name in BESIDE if (home / name).is_file()]
        for name in found:
            shutil.copy2(home / name, out / name)
        for folder in DECIDED:
            if (home / folder).is_dir():
                shutil.copytree(home / folder, out / folder)
        head = backup(target, out / JOURNAL_FILE, anchor=out / ANCHOR_FILE)
    except BaseException:
        shutil.rmtree(out)
        with suppress(OSError):  # another process has put something there by now
            for parent in made[1:]:
                parent.rmdir()
        raise
    sync_folder(out)
    return {"out": str(out), "files": [*found, JOURNAL_FILE, ANCHOR_FILE], "entries": head.seq, "hash": head.hash}


def write_off_account(home: Path, account: str, level: Level, *, reason: str) -> dict[str, Any]:
    """Treat all that is left of one account as spent.

    Raises:
        JournalInUse: the owner of the home runs.
        NotFound: there is no such account.
    """
    with _opened(home, read_only=False) as database:
        ledger = Ledger(database, clock=now_utc)
        ledger.verify()
        amount = ledger.write_off(account, level, reason)
    return {"account": account, "level": level, "written_off_nano": amount}


def accept_restored_journal(home: Path, *, reason: str) -> dict[str, Any]:
    """Accept an older or restored journal; all that is left counts as spent.

    See labeler.ledger.backup. A party's erasable keys are replaced: nothing is kept of any round from before.

    Returns:
        The accepted head; `next`, the lines that say what to do now (`_caps_to_set`); and `witness` where the agent
        keeps one. A person copies the new head there: a command that overwrote it would be all that an attacker needs
        to undo spends.

    Raises:
        JournalBehind: it has no account (but a tallier's), so nothing can be counted as spent.
    """
    witness = read_agent_config(home).witness_file if (home / AGENT_FILE).exists() else None
    with _opened(home, read_only=False) as database:
        if not (home / TALLIER_FILE).exists() and not Ledger(database, clock=now_utc, anchored=False).balances():
            # Its owner would open new accounts, with all of their budgets. A tallier charges nobody.
            raise JournalBehind(
                f"{database.what} has no account, so nothing of what was spent could be counted: it is older than its "
                "owner's first start. Restore a backup made later; if there is none, make a new home"
            )
        head = accept_restored(database, clock=now_utc, reason=reason)
        if (home / AGENT_FILE).exists() or (home / TALLIER_FILE).exists():
            renew_home(database, KeyFolder(home / ERASABLE_FOLDER))
        balances = Ledger(database, clock=now_utc).balances()
    accepted = {"entries": head.seq, "hash": head.hash, "head": f"{head.seq}:{head.hash}", "witness": witness}
    return accepted | {"next": _caps_to_set(home, balances)}


def _caps_to_set(home: Path, balances: Sequence[Balance]) -> list[str]:
    """Return the next step after a restore, and the cap to set for each account that is limited.

    All of an account counts as spent. A cap that pays for one more job of epsilon e holds the whole mu^2: its epsilon
    is that of spent + budget_for(e), rounded down, and less than the old cap plus e.
    """
    try:
        if (home / AGENT_FILE).exists():
            delta, file = read_policy(home / POLICY_FILE).budget.delta, f"[budget] of {home / POLICY_FILE}"
        elif (home / COORDINATOR_FILE).exists():
            from workers.serve import read_settings

            delta, file = read_settings(home).delta, f"[federation] or [agents] of {home / COORDINATOR_FILE}"
        else:
            return []
    except LabelerError as error:
        return [f"Next: mend the settings, which cannot be read ({error}); then raise the caps there."]
    other = "the coordinator's" if (home / AGENT_FILE).exists() else "the hospitals'"
    lines = [
        f"Next: find in {other} ledger the largest job that was left (labeler budget, labeler agent budget: one more), "
        f"and raise the cap in {file} to no more than this:"
    ]
    for one in balances:
        if one.cap is None:
            continue
        caps = ", ".join(
            f"{left:g} was left: {say_epsilon_left(epsilon_left(one.spent + budget_for(left, delta), delta), digits=4)}"
            for left in _LEFT
        )
        lines.append(f"  {one.account}, {one.level}_epsilon: if {caps}")
    return lines


_LEFT = (0.1, 0.5, 1.0)
"""Examples of what another ledger may show as left."""


def trust_restored_journal(home: Path, head: str) -> dict[str, Any]:
    """Consent, for a site, to the coordinator's restored journal: this party takes part again.

    The party may be running: it reads what it has seen at every poll. What it had seen before is kept in a file named
    by the time.

    Args:
        head: the accepted head, ENTRY:HASH, as `accept_restored_journal` returned it to the operator.

    Raises:
        InvalidSetting: the home is no party's, the head cannot be read, or this party has seen no other journal.
    """
    if not (home / AGENT_FILE).exists() and not (home / TALLIER_FILE).exists():
        raise InvalidSetting(
            f"{home} is not the home of an agent or a tallier: only they watch the coordinator's journal and consent. "
            "At the coordinator, accept its journal with `labeler journal accept-restored`"
        )
    accepted = _parse_head(head)
    path = home / SEEN_FILE
    if not path.exists():
        raise InvalidSetting(f"{home} has seen nothing of the coordinator's journal, so there is nothing to consent to")
    try:
        seen = Anchor(path).read()
    except JournalBehind:
        seen = None  # damaged: it says nothing, and consent replaces it
    if seen == accepted:
        raise InvalidSetting(
            f"this party has seen exactly this head, entry {accepted.seq}; there is nothing to consent to"
        )
    kept = home / f"{SEEN_FILE}.{now_utc():%Y%m%dT%H%M%S%fZ}"
    replace_file(kept, path.read_bytes(), mode=0o600)
    Anchor(path).replace(accepted)
    return {
        "seen": None if seen is None else {"entries": seen.seq, "hash": seen.hash},
        "accepted": {"entries": accepted.seq, "hash": accepted.hash},
        "kept": str(kept),
    }


def _parse_head(text: str) -> Head:
    found = _HEAD.fullmatch(text.strip())
    if found is None:
        raise InvalidSetting(
            "--head must be ENTRY:HASH, a number and 64 hexadecimal digits, as `labeler journal accept-restored` "
            f"printed it at the coordinator; found {len(text)} characters that are not"
        )
    return Head(int(found[1]), found[2])


@contextmanager
def _opened(home: Path, *, read_only: bool) -> Iterator[Database]:
    with closing(open_database(existing_journal(home), anchor=home / ANCHOR_FILE, read_only=read_only)) as database:
        yield database


_AGE = re.compile(r"([0-9]{1,6})([smhd])")
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_AT_ONCE = 100


def parse_age(text: str) -> timedelta:
    """Parse an age as people write it: 30d, 12h, 45m, 90s.

    Raises:
        InvalidSetting: it is not valid.
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
        age: what ended, or expired, longer ago than this is removed.
        dry_run: only count.

    Returns:
        {"home", "jobs": [id], "rounds", "files": [name], "bytes", "dry_run"}; bytes are those removed from the home.

    Raises:
        InvalidSetting: it is no home.
        JournalInUse: its owner runs.
        JournalBroken: the ledger does not hold; nothing is removed then.
    """
    if not any((home / file).exists() for file in (COORDINATOR_FILE, AGENT_FILE, TALLIER_FILE)):
        raise InvalidSetting(f"{home} is not the home of a coordinator, an agent or a tallier; is it the right folder?")
    before, size = clock() - age, _bytes_of(home)
    files = _old_files(home, before)
    with closing(open_database(journal_of(home), anchor=home / ANCHOR_FILE)) as database:
        Ledger(database, clock=clock).verify()
        jobs = _jobs(home, database, before, clock, dry_run, progress) if (home / COORDINATOR_FILE).exists() else []
        rounds = _rounds(home, database, before, dry_run) if (home / TALLIER_FILE).exists() else 0
        if not dry_run:
            for file in files:
                if file.is_dir():
                    shutil.rmtree(file, ignore_errors=True)
                else:
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
            # The row first: after a crash in between, the coordinator's next sweep removes the rest.
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


def _old_files(home: Path, before: datetime) -> list[Path]:
    """Return the copies of what a party had seen, from each time that a restored journal was accepted, the shared
    models that an agent kept, and the folders of predictions that were killed.
    """
    found = [path for name in (f"{SEEN_FILE}.*Z", f"{SHARED_FOLDER}/*", f"{PREDICTING}*") for path in home.glob(name)]
    return sorted(path for path in found if datetime.fromtimestamp(path.stat().st_mtime, UTC) < before)


def _bytes_of(home: Path) -> int:
    return sum(path.lstat().st_size for path in home.rglob("*") if path.is_file() and not path.is_symlink())
