"""Care for the journal of a home: verify it, copy it, and go on after charges were lost.

A home is a coordinator's, an agent's or a tallier's. Verifying and copying do not disturb the process that owns it.

When a coordinator's newest journal is gone for good, its operator accepts an older one, and every site that has seen
the newer one consents. Consent is to one journal: the operator reads out the head at which it was accepted, the site
writes it down in place of what it had seen, and from then on the coordinator must show a journal that holds it.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from labeler.errors import InvalidSetting, JournalBehind
from labeler.ledger.backup import accept_restored, backup, renew_home
from labeler.ledger.chain import Anchor, Head
from labeler.ledger.database import Database, open_database
from labeler.ledger.ledger import Ledger
from labeler.ledger.lifetimes import LifetimeSpends
from labeler.system.clock import now_utc
from labeler.system.erasable import ERASABLE_FOLDER, KeyFolder
from labeler.system.files import replace_file, sync_folder
from labeler.task import Level
from workers.agent.decisions import APPROVED_FOLDER, REFUSED_FOLDER, STOPPED_FILE
from workers.homes.keys import existing_journal, journal_of
from workers.homes.new import PUBLIC_FILE
from workers.homes.settings_file import COORDINATOR_FILE
from workers.party.home import (
    AGENT_FILE,
    ANCHOR_FILE,
    CA_FILE,
    JOURNAL_FILE,
    KEYS_FILE,
    POLICY_FILE,
    PROOF_FILE,
    SEEN_FILE,
    TALLIER_FILE,
    read_agent_config,
)
from workers.tallier.peers import IDENTITY_FILE, PEERS_FILE

BESIDE: Final = (
    *(AGENT_FILE, TALLIER_FILE, COORDINATOR_FILE, POLICY_FILE, KEYS_FILE, SEEN_FILE, PROOF_FILE),
    *(PUBLIC_FILE, CA_FILE, STOPPED_FILE, IDENTITY_FILE, PEERS_FILE),
)
"""What a journal is useless without, in the order in which it is copied."""

DECIDED: Final = (APPROVED_FOLDER, REFUSED_FOLDER)
"""What people have decided about tasks. A no is written before a yes is removed, so it is copied after it."""

_HEAD = re.compile(r"([1-9][0-9]{0,17}):([0-9a-f]{64})")


def verify_journal(home: Path) -> dict[str, Any]:
    """Read the whole ledger of a home again.

    Raises:
        JournalBroken: an entry was changed, or a balance is not what the entries add up to, or what images have spent
            is not what the last answer said.
        JournalBehind: it is older than what its anchor remembers.
    """
    with _opened(home, read_only=True) as database:
        head = Ledger(database, clock=now_utc).verify()
        LifetimeSpends(database).verify()
        return {"entries": head.seq, "hash": head.hash}


def backup_home(home: Path, out: Path) -> dict[str, Any]:
    """Copy everything of a home that cannot be made again, while its process runs, into a new folder.

    Erasable keys stay where they are: what was erased in the home must not lie in any backup, so a home that is made
    of this copy refuses to serve until a person accepts what that means (labeler.ledger.backup).

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
        with suppress(OSError):  # somebody else has put something there by now
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
    """Go on with an older journal, or a restored one; all that is left counts as spent.

    See labeler.ledger.backup. A party's erasable keys are made anew: nothing is kept of any round from before.

    Returns:
        The accepted head; `witness`, where the agent keeps one, of which a person makes a copy of the new head: a
        command that overwrote it would be all that somebody needs who wants spends undone.

    Raises:
        JournalBehind: it has no account (but a tallier's), so nothing can be counted as spent.
    """
    witness = read_agent_config(home).witness_file if (home / AGENT_FILE).exists() else None
    with _opened(home, read_only=False) as database:
        if not (home / TALLIER_FILE).exists() and not Ledger(database, clock=now_utc, anchored=False).balances():
            # Its owner would open the accounts anew, with all of their budgets. A tallier charges nobody.
            raise JournalBehind(
                f"{database.what} has no account, so nothing of what was spent could be counted: it is older than its "
                "owner's first start. Restore a backup made later; if there is none, make a new home"
            )
        head = accept_restored(database, clock=now_utc, reason=reason)
        if (home / AGENT_FILE).exists() or (home / TALLIER_FILE).exists():
            renew_home(database, KeyFolder(home / ERASABLE_FOLDER))
    return {"entries": head.seq, "hash": head.hash, "head": f"{head.seq}:{head.hash}", "witness": witness}


def trust_restored_journal(home: Path, head: str) -> dict[str, Any]:
    """A site consents to the coordinator's journal as it was restored: this party takes part again.

    The party may be running: it reads what it has seen at every poll. What it had seen before is kept beside it, in a
    file named by the time.

    Args:
        head: the accepted head, ENTRY:HASH, as `accept_restored_journal` told it to the operator.

    Raises:
        InvalidSetting: the home is no party's, the head cannot be read, or this party has seen no other journal.
    """
    if not (home / AGENT_FILE).exists() and not (home / TALLIER_FILE).exists():
        raise InvalidSetting(
            f"{home} is no home of an agent or a tallier; those who watched the coordinator's journal consent. The "
            "coordinator's own journal is accepted with `labeler journal accept-restored`"
        )
    accepted = _parse_head(head)
    path = home / SEEN_FILE
    if not path.exists():
        raise InvalidSetting(f"{home} has seen nothing of the coordinator's journal, so there is nothing to consent to")
    try:
        seen = Anchor(path).read()
    except JournalBehind:
        seen = None  # damaged: nothing can be told of it, and consent replaces it
    if seen == accepted:
        raise InvalidSetting(
            f"this party has seen just this head, entry {accepted.seq}; there is nothing to consent to"
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
