"""What anybody sees of an agent hangs on no record: worlds apart in one record, or in all of them, look alike.

The real desks run one schedule of a seed several times, with other records at the first agent: one less; none of whose
label or attribute is the same; one alone; fifty more, as of one person. Same are who sends what to whom at which moment
and how long it is, how every job ends, how many commits and other effects there are until when, and every line of every
party's log, with its level. Federations of all four ways to ask, and one that opens the winners.
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
from workers.studies.simulation import ways
from workers.studies.simulation.campaign import memory_folder, run_case
from workers.studies.simulation.case import Case, case_of
from workers.studies.simulation.contract import Outcome
from workers.studies.simulation.homes import FINGERPRINT, RECORDS, VARIANTS, Templates
from workers.studies.simulation.subject import service
from workers.studies.simulation.ways import CLASSES, DIMENSION, attributes_of, points

SEEDS = {3: "steps", 5: "attributes", 6: "neighbours", 12: "neighbours", 16: "records"}
"""Schedules in which shares come through, and what is asked in each; that of 6 opens the winners."""

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


def other_records(target: Path, agent: str, world: str, *, is_of_attributes: bool) -> None:
    """Records of another world in the place of an agent's."""
    shutil.rmtree(target)
    count = WORLDS[world]
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
        random_bytes=seeded_source(f"ids {agent}".encode()).bytes,
    ) as writer:
        writer.append(
            points(max(count, RECORDS + 1), f"records {agent}")[:count].astype(np.float64),
            attributes if is_of_attributes else labels,
            [f"{agent}/{number}.png" for number in range(count)],
        )
        writer.finish()
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
        other_records(target, agent, world, is_of_attributes=case.way == "attributes")
        for remembered in vars(ways).values():
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
@pytest.mark.parametrize("seed", SEEDS)
def test_no_record_nor_all_of_them_change_anything_that_can_be_seen(
    worlds: Worlds, seed: int, among: tuple[str, ...]
) -> None:
    case = case_of(seed)
    assert (case.way, case.release) == (SEEDS[seed], "winner" if seed == 6 else "histogram")
    one = worlds.seen(case)
    assert sum(kind == "input-share" for _, _, _, _, kind, _ in one[0]) >= 4
    assert one[-1], "nothing was logged, so nothing was compared"
    for world in among:
        worlds.replace_records(case, world)
        assert worlds.seen(case.neighbour) == one, world
