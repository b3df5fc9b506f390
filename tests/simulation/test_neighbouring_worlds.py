"""What anybody sees of an agent hangs on no record: worlds apart in one record, or in all of them, look alike.

The real desks run one schedule of a seed several times, with other records at the first agent: one less; none of whose
label or attribute is the same; one alone; fifty more, as of one person. Same are who sends what to whom at which moment
and how long it is, how every job ends, how many commits and other effects there are until when, and every line of every
party's log, with its level. Federations of every way to ask that counts votes, one that trains in steps, one whose
agents' answers carry noise of their own, and one that opens the winners.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from feature_store.shard import Shard
from feature_store.shard_writer import ShardWriter
from labeler.randomness import seeded_source
from tests.simulation import lives, soft_heads, ways
from tests.simulation.campaign import memory_folder, run_case
from tests.simulation.case import Case, case_of
from tests.simulation.contract import Outcome
from tests.simulation.homes import FINGERPRINT, MAX_RECORDS, RECORDS, VARIANTS, Templates, image_digests
from tests.simulation.parties import mark_records
from tests.simulation.seeds import comes_through, seeds_where
from tests.simulation.subject import service
from tests.simulation.ways import CLASSES, DIMENSION, Way, attributes_of, points

ASKED = ("neighbours", "winners", "attributes", "records", "lives", "steps", "heads")
"""What is asked; of each one schedule in which shares come through."""

WORLDS = {"one less": RECORDS, "all wrong": RECORDS, "one alone": 1, "fifty more": RECORDS + 50}
"""Other records of the first agent, and how many are embedded; of the first world one is then deleted."""

DRAWN = re.compile(r"[0-9a-f]{12,}|\b(?:job|tok)-[\w-]+")
"""Digests and names that are drawn anew in every world."""

KNOWN = frozenset(vars(logging.makeLogRecord({}))) | {"message"}


class _Lines(logging.Handler):
    """Every line that any party logs, with all that is said beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        beside = {name: value for name, value in vars(record).items() if name not in KNOWN}
        text = DRAWN.sub("*", f"{record.getMessage()} {sorted(beside.items())}")
        self.lines.append((record.name, record.levelname, text))


@contextmanager
def logged() -> Iterator[_Lines]:
    """What is logged inside, of any level."""
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


def other_records(target: Path, agent: str, world: str, *, way: Way) -> None:
    """Records of another world in the place of an agent's."""
    shutil.rmtree(target)
    count = WORLDS[world]
    is_of_attributes = way == "attributes"
    site_key, digests = image_digests(agent, count) if way == "lives" else (None, None)
    attributes = attributes_of(agent, max(count, RECORDS + 1))[:count]
    labels = (np.arange(count) % len(CLASSES)).astype(np.int16)
    if world == "all wrong":
        attributes, labels = 1 - attributes, (labels + 1) % np.int16(len(CLASSES))
    with ShardWriter(
        target,
        classes=CLASSES,
        fingerprint=FINGERPRINT,
        dimension=DIMENSION,
        public=False,
        backbone={"kind": "pixels"},
        attributes=is_of_attributes,
        max_records=MAX_RECORDS,
        site_key=site_key,
        random_bytes=seeded_source(f"ids {agent}".encode()).bytes,
    ) as writer:
        writer.append(
            points(max(count, RECORDS + 1), f"records {agent}")[:count].astype(np.float64),
            attributes if is_of_attributes else labels,
            [f"{agent}/{number}.png" for number in range(count)],
            image_digests=digests,
        )
        writer.finish()
    mark_records(target, agent)
    if world == "one less":
        shard = Shard.open(target)
        shard.delete(shard.record_ids[:1])


class Worlds:
    """Runs a case among homes of its own, so that other tests keep their records."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "templates").mkdir()
        self._templates = Templates(folder / "templates", service().complete)

    def seen(self, case: Case) -> Any:
        """All that anybody sees of a schedule."""
        place = self._folder / "schedule"
        place.mkdir()
        try:
            with logged() as found:
                outcome: Outcome = run_case(case, self._templates, place, service())
        finally:
            shutil.rmtree(place)
        assert not outcome.violation
        return outcome.wire, outcome.states, outcome.steps, outcome.moments, found.lines

    def replace_records(self, case: Case, world: str) -> None:
        """Give the first agent of `case.neighbour` the records of another world."""
        agent = self._templates.of(case.shape).agents[0]
        target = self._templates.of(case.shape).shard(agent, VARIANTS[1])
        other_records(target, agent, world, way=case.way)
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
