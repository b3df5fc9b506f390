"""The upgrade of one journal: verified, saved, changed step by step, verified again.

    read the version --current--> nothing to do
          | old
    verify the ledger -> have a backup made -> mark "upgrading" -> step -> step ... the last takes the mark away

Each step is one transaction, in SQLite as in PostgreSQL, with the new version in it, and it is committed only if the
ledger, read again from its first entry, ends where it did before. Whoever dies in a step leaves the journal of the step
before. With the mark at the first version nothing was changed, and the upgrade begins again; with the mark at a version
in between the journal is refused, and the backup is to be restored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from feature_store.clock import Clock
from feature_store.journal.about import (
    VERSION,
    About,
    begin_upgrade,
    check_current,
    check_not_half,
    end_upgrade,
    note_upgrade,
    write_version,
)
from feature_store.journal.anchor import Anchor, check_not_behind
from feature_store.journal.chain import Head, time_text
from feature_store.journal.database import Database
from feature_store.journal.migrations import v1_to_v2, v2_to_v3, v3_to_v4
from feature_store.journal.migrations.step import Step
from feature_store.journal.verification import hash_at, verify_if_there
from labeler.errors import JournalBroken

STEPS: tuple[Step, ...] = (v1_to_v2.STEP, v2_to_v3.STEP, v3_to_v4.STEP)
"""From the first version to this program's, without a gap."""

Save = Callable[[About, Head], str]
"""Make a backup of a journal at its version and head, or see that there is one, and name it."""


@dataclass(frozen=True)
class Upgraded:
    """An upgrade that was done.

    Attributes:
        source, target: versions.
        backup: the name of what to restore, were anything wrong.
        head: the end of the ledger, before and after.
    """

    source: int
    target: int
    backup: str
    head: Head


def upgrade(database: Database, *, save: Save, clock: Clock, steps: Sequence[Step] = STEPS) -> Upgraded | None:
    """Bring a journal that this process owns to this program's version; None where it is there already.

    Args:
        database: open for writing.
        save: called once, before anything is changed; what it raises stops the upgrade.
        steps: what leads from each version to the next.

    Raises:
        JournalBroken: the chain does not hold, before or after a step, or an upgrade stopped half way before.
        JournalBehind: the journal is older than its anchor remembers; it is not upgraded.
        InvalidSetting: it was made by a newer program.
        Unavailable: the disk is full or does not write; steps that are done stay, the others can be tried again.
    """
    about = database.about()
    if about.is_new:
        return None
    check_not_half(about, database.what)
    if not about.is_old:
        check_current(about, database.what)
        return None
    head = _trusted(database)
    name = save(about, head)
    with database.write() as connection:
        begin_upgrade(connection, {"from": about.version, "to": VERSION, "backup": name})
    done = about.version
    try:
        for step in _path(about.version, steps):
            _take(database, step, head, {"from": step.source, "at": time_text(clock()), "backup": name})
            done = step.target
    except Exception:
        if done == about.version:
            # Nothing was changed, so there is nothing half: it can be tried again without restoring anything.
            with database.write() as connection:
                end_upgrade(connection)
        raise
    return Upgraded(about.version, VERSION, name, head)


def _take(database: Database, step: Step, head: Head, note: dict[str, object]) -> None:
    with database.remodel() as connection:
        step.apply(connection)
        after = verify_if_there(connection)
        if after != head:
            raise JournalBroken(
                f"the step from version {step.source} to {step.target} changed the ledger of {database.what}; nothing "
                "of it was kept. Go on with the program that made the journal, and report this"
            )
        write_version(connection, step.target)
        note_upgrade(connection, step.target, note | {"seq": head.seq, "hash": head.hash})
        if step.target == VERSION:
            end_upgrade(connection)


def _trusted(database: Database) -> Head:
    """The end of the ledger, after reading all of it, and asking the anchor whether it is the newest."""
    with database.read() as connection:
        head = verify_if_there(connection)
        remembered = Anchor(database.anchor).read() if database.anchor is not None else None
        if remembered is not None:
            check_not_behind(
                remembered, end=head, found=hash_at(connection, remembered.seq), what=database.what,
                witness=database.anchor.name if database.anchor else "",
            )  # fmt: skip
    return head


def _path(source: int, steps: Sequence[Step]) -> list[Step]:
    found = [step for step in steps if step.source >= source]
    if [step.source for step in found] != list(range(source, VERSION)):
        raise AssertionError(f"the steps do not lead from version {source} to {VERSION}")
    return found
