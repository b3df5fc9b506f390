"""The journal in the folder of a run, as tests look into it."""

from __future__ import annotations

from pathlib import Path

from workers.run.labeling import open_run_journal


def charges_of(out: Path, level: str = "instance") -> list[tuple[str, int]]:
    """Return what was posted at a level, oldest first: the name of each charge, and its amount."""
    with open_run_journal(out / ".job") as journal:
        entries = journal.ledger.entries(limit=1000)
    return [(one.reservation_id, one.amount) for one in entries if one.kind == "post" and one.level == level]
