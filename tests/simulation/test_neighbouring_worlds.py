"""An observer's view of an agent depends on no record: worlds apart in one record, or in all of them, look alike.

The real desks run one schedule of a seed several times, with other records at the first agent: one less; none of whose
label or attribute is the same; one alone; fifty more, as of one person. Same are who sends what to whom at which moment
and how long it is, how every job ends, how many commits and other effects there are until when, and every line of every
party's log, with its level. Federations of every way to ask that counts votes, one that trains in steps, one whose
agents' answers carry noise of their own, and one that opens the winners.

The evidence of every party is the same, too. Digests of releases differ, because releases may: they are what was paid
for. Job ids and round digests are drawn again in every world. Nothing else may differ, at the coordinator or an agent.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from labeler.evidence.derive import contradictions, derive, differences, rebuilt, software
from labeler.evidence.document import Evidence
from labeler.ledger.database import open_database
from labeler.ledger.evidence import EvidenceScope, agent_facts, coordinator_facts
from tests.simulation import lives, soft_heads, ways
from tests.simulation.campaign import memory_folder, run_case
from tests.simulation.case import Case, case_of
from tests.simulation.contract import Outcome
from tests.simulation.homes import RECORDS, VARIANTS, Templates, kind_of, remove_first, write_records
from tests.simulation.seeds import comes_through, seeds_where

ASKED = ("neighbours", "winners", "attributes", "records", "lives", "steps", "heads")
"""What is asked; of each one schedule in which shares come through."""

WORLDS = {"one less": RECORDS, "all wrong": RECORDS, "one alone": 1, "fifty more": RECORDS + 50}
"""Other records of the first agent, and how many are embedded; of the first world one is then deleted."""

DRAWN = re.compile(r"[0-9a-f]{12,}|\b(?:job|tok)-[\w-]+")
"""Digests and names that are drawn anew in every world."""

LATER = datetime(2100, 1, 1, tzinfo=UTC)

KNOWN = frozenset(vars(logging.makeLogRecord({}))) | {"message"}


class _Lines(logging.Handler):
    """Every line that any party logs, with all its fields."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        beside = {name: value for name, value in vars(record).items() if name not in KNOWN}
        text = DRAWN.sub("*", f"{record.getMessage()} {sorted(beside.items())}")
        self.lines.append((record.name, record.levelname, text))


@contextmanager
def logged() -> Iterator[_Lines]:
    """Return what is logged inside, of any level."""
    found, of_all = _Lines(), logging.getLogger("labeler")
    level = of_all.level
    logging.disable(logging.NOTSET)
    of_all.addHandler(found)
    of_all.setLevel(logging.DEBUG)
    try:
        yield found
    finally:
        of_all.setLevel(level)
        of_all.removeHandler(found)


def schedule(asked: str) -> Case:
    """One with more than a fault or two, in which shares come through all the same."""

    def is_one(case: Case) -> bool:
        way, release = ("neighbours", "winner") if asked == "winners" else (asked, "histogram")
        return (case.way, case.release) == (way, release) and comes_through(case) and bool(case.rates.lose)

    return case_of(seeds_where(is_one, 1)[0])


def evidence_of(home: Path) -> Evidence:
    """The document of a party, from its journal."""
    opened = open_database(home / "journal.db", read_only=True, allow_unsynced=True)
    with closing(opened) as database, database.read() as connection:
        if home.name == "coordinator":
            facts = coordinator_facts(connection, EvidenceScope(), delta=1e-5, read_at=LATER)
        else:
            facts = agent_facts(connection, EvidenceScope(), agent_id=home.name, delta=1e-5, read_at=LATER)
    return derive(facts, software("0"))


def without_draws(evidence: Evidence) -> Any:
    """A document without what is drawn again in every world, and the order of equal things settled."""
    text = evidence.model_dump_json()
    jobs: dict[str, str] = {}
    text = re.sub(r"job[-_][0-9a-f]+", lambda found: jobs.setdefault(found[0], f"job {len(jobs)}"), text)
    return re.sub(r'"(round_digest|release_digest|head)":"[0-9a-f]{64}"', r'"\1":""', text)


class Worlds:
    """Runs a case among separate homes, so that other tests keep their records."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._templates = Templates(folder / "templates")
        self.evidence: dict[str, Evidence] = {}
        """Of every party, after the latest schedule."""

    def seen(self, case: Case) -> Any:
        """All that anybody sees of a schedule."""
        place = self._folder / "schedule"
        place.mkdir()
        try:
            with logged() as found:
                outcome: Outcome = run_case(case, self._templates, place)
            parties = ("coordinator", *self._templates.of(case.shape).agents)
            self.evidence = {name: evidence_of(place / "federation" / name) for name in parties}
        finally:
            shutil.rmtree(place)
        assert not outcome.violation
        documents = {name: without_draws(evidence) for name, evidence in self.evidence.items()}
        return outcome.wire, outcome.states, outcome.steps, outcome.moments, documents, found.lines

    def replace_records(self, case: Case, world: str) -> None:
        """Give the first agent of `case.neighbour` the records of another world."""
        agent = self._templates.of(case.shape).agents[0]
        target = self._templates.of(case.shape).shard(agent, VARIANTS[1])
        shutil.rmtree(target)
        write_records(target, agent, WORLDS[world], kind=kind_of(case.way), is_wrong=world == "all wrong")
        if world == "one less":
            remove_first(target)
        for remembered in (one for module in (ways, lives, soft_heads) for one in vars(module).values()):
            if hasattr(remembered, "cache_clear"):  # what the witness has worked out of the records at this path
                remembered.cache_clear()


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    with memory_folder() as folder:
        yield Worlds(folder)


@pytest.mark.parametrize(
    "among",
    [("one less", "all wrong"), pytest.param(("one alone", "fifty more"), marks=pytest.mark.long)],
    ids=["ordinary", "extreme"],
)
@pytest.mark.parametrize("asked", ASKED)
def test_no_record_nor_all_of_them_change_anything_that_can_be_seen(
    worlds: Worlds, asked: str, among: tuple[str, ...]
) -> None:
    case = schedule(asked)
    one = worlds.seen(case)
    assert sum(kind == "input-share" for _, _, _, _, kind, _ in one[0]) >= 4
    assert one[-1], "nothing was logged, so nothing was compared"
    for world in among:
        worlds.replace_records(case, world)
        assert worlds.seen(case.neighbour) == one, world


def test_the_evidence_of_every_party_agrees_with_itself_and_says_what_was_charged(worlds: Worlds) -> None:
    worlds.seen(schedule("neighbours"))
    for name, evidence in worlds.evidence.items():
        assert not contradictions(evidence.facts), name
        assert not differences(evidence, rebuilt(evidence)), name
    assert sum(found.cadence.rounds_charged for found in worlds.evidence.pop("coordinator").tasks) > 0
    answered = 0
    for name, evidence in worlds.evidence.items():
        tasks = evidence.facts.tasks
        assert {job.asked for task in tasks for job in task.jobs} <= {(name,), ()}
        known = [task.task is not None for task in tasks if any(job.rounds for job in task.jobs)]
        assert all(known), "a task is written down with its first charge"
        answered += len(known)
    assert answered > 0
