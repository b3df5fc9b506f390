"""Homes as earlier versions left them, kept for the tests of upgrades; how they were made says `record_home.py`;
of those before rounds had one machine, `record_cuts.py`."""

from __future__ import annotations

import json
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KEPT = Path(__file__).parent
VERSIONS = (1, 2)
CUTS = ("agent.charged", "agent.stored", "coordinator.agreed", "coordinator.opened")
"""Where every process of a home of the version before machines was killed."""
WINNER_CUTS = ("coordinator.posted", "tallier.computed")
"""The same, of homes whose task releases the winner alone."""


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


@dataclass(frozen=True)
class CutHome:
    """A federation of two agents of the version before machines: one job completed, one of the same task cut off.

    Attributes:
        federation: its folder.
        facts: as `KeptHome.facts`.
        rounds: job, number, state and digest of each.
        release: what that version opened when it went on from here: votes, or labels where it is the winner alone.
    """

    federation: Path
    facts: dict[str, Any]
    rounds: list[tuple[str, int, str, str]]
    release: list[list[int]] | list[int]

    @property
    def done(self) -> str:
        return self._job(is_done=True)

    @property
    def half_done(self) -> str:
        return self._job(is_done=False)

    def _job(self, *, is_done: bool) -> str:
        [found] = [job for job, state in self.facts["coordinator"]["jobs"] if (state == "completed") == is_done]
        return str(found)


def unpack_cut(place: str, folder: Path, *, winner: bool = False) -> CutHome:
    """The kept home that was cut off at one place, in a folder of its own."""
    with tarfile.open(KEPT / f"{'winners-' if winner else ''}before-machines.tar.xz") as archive:
        wanted = [one for one in archive if one.name.split("/")[1:2] in ([place], ["facts.json"])]
        archive.extractall(folder, wanted, filter="tar")
    facts = json.loads((folder / "facts.json").read_text())[place]
    rounds, release = [tuple(row) for row in facts.pop("rounds")], facts.pop("release")
    return CutHome(folder / place / "federation", facts, rounds, release)


def unpack_dump(version: int, role: str, folder: Path) -> Path:
    """The kept journal of one version as PostgreSQL had it: a file of pg_dump. Role: coordinator or agent-1."""
    with tarfile.open(KEPT / f"dumps-{version}.tar.xz") as archive:
        archive.extract(f"version-{version}-{role}.sql", folder, filter="data")
    return folder / f"version-{version}-{role}.sql"
