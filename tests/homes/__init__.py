"""Homes as earlier versions left them, kept for the tests of upgrades; how they were made says `record_home.py`."""

from __future__ import annotations

import json
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KEPT = Path(__file__).parent
VERSIONS = (1, 2)


@dataclass(frozen=True)
class KeptHome:
    """A federation and an interrupted run, unpacked.

    Attributes:
        root: the folder.
        version: of its journals.
        facts: journal by folder: version, head, accounts, number of rows of each table, jobs.
    """

    root: Path
    version: int
    facts: dict[str, Any]

    @property
    def federation(self) -> Path:
        return self.root / "federation"

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def half_done(self) -> str:
        """The job whose charge was posted and which nobody answered."""
        [found] = [job for job, state in self.facts["coordinator"]["jobs"] if state == "tallying"]
        return str(found)

    def journal(self, role: str) -> Path:
        return self.federation / role / "journal.db"


def unpack(version: int, folder: Path) -> KeptHome:
    """The kept home of one version in a folder of its own."""
    with tarfile.open(KEPT / f"version-{version}.tar.xz") as archive:
        archive.extractall(folder, filter="tar")
    return KeptHome(folder, version, json.loads((folder / "facts.json").read_text()))


def unpack_dump(version: int, role: str, folder: Path) -> Path:
    """The kept journal of one version as PostgreSQL had it: a file of pg_dump. Role: coordinator or agent-1."""
    with tarfile.open(KEPT / f"dumps-{version}.tar.xz") as archive:
        archive.extract(f"version-{version}-{role}.sql", folder, filter="data")
    return folder / f"version-{version}-{role}.sql"
