"""Evidence does not depend on a record: of two worlds that differ in one, every party's document is the same.

Digests of releases differ, because releases may: they are what was paid for. Job ids and round digests are drawn again
in every world. Nothing else may differ, at the coordinator or at an agent.
"""

from __future__ import annotations

import re
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from labeler.evidence.derive import contradictions, derive, differences, rebuilt, software
from labeler.evidence.document import Evidence
from labeler.ledger.database import open_database
from labeler.ledger.evidence import Wanted, agent_facts, coordinator_facts
from tests.simulation.campaign import memory_folder
from tests.simulation.case import case_of
from tests.simulation.homes import Templates
from tests.simulation.world import World

SEEDS = (3, 5)
LATER = datetime(2100, 1, 1, tzinfo=UTC)


def documents(folder: Path, seed: int, templates: Templates, *, shorter: bool) -> dict[str, Evidence]:
    """Every party's document after the schedule of a seed."""
    folder.mkdir()
    case = case_of(seed).neighbour if shorter else case_of(seed)
    template = templates.of(case.shape)
    world = World(case, template, folder)
    assert not world.run().violation
    return {name: made(world.folder / name, name) for name in ("coordinator", *template.agents)}


def made(home: Path, name: str) -> Evidence:
    opened = open_database(home / "journal.db", read_only=True, allow_unsynced=True)
    with closing(opened) as database, database.read() as connection:
        if name == "coordinator":
            facts = coordinator_facts(connection, Wanted(), delta=1e-5, read_at=LATER)
        else:
            facts = agent_facts(connection, Wanted(), agent_id=name, delta=1e-5, read_at=LATER)
    return derive(facts, software("0"))


def without_draws(evidence: Evidence) -> Any:
    """A document without what is drawn again in every world, and the order of equal things settled."""
    text = evidence.model_dump_json()
    jobs: dict[str, str] = {}
    text = re.sub(r"job[-_][0-9a-f]+", lambda found: jobs.setdefault(found[0], f"job {len(jobs)}"), text)
    return re.sub(r'"(round_digest|release_digest|head)":"[0-9a-f]{64}"', r'"\1":""', text)


@pytest.mark.parametrize("seed", SEEDS)
def test_one_record_changes_no_document_of_any_party(seed: int) -> None:
    with memory_folder() as folder:
        templates = Templates(folder / "templates")
        one = documents(folder / "one", seed, templates, shorter=False)
        other = documents(folder / "other", seed, templates, shorter=True)
    assert one.keys() == other.keys()
    for name, evidence in one.items():
        assert without_draws(evidence) == without_draws(other[name]), name
        assert not contradictions(evidence.facts), name
        assert not differences(evidence, rebuilt(evidence)), name
    answered = 0
    charged = sum(found.cadence.rounds_charged for found in one["coordinator"].tasks)
    assert charged > 0
    for name in one.keys() - {"coordinator"}:
        tasks = one[name].facts.tasks
        assert {job.asked for task in tasks for job in task.jobs} <= {(name,), ()}
        known = [task.task is not None for task in tasks if any(job.rounds for job in task.jobs)]
        assert all(known), "a task is written down with its first charge"
        answered += len(known)
    assert answered > 0
