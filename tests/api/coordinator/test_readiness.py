"""Readiness: a part that is silent is named, and one that fails does not hide the others."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from api.coordinator.roster import agents_live, embedder_there, readiness, talliers_live
from labeler.errors import NotReady, Unavailable
from tests.api.conftest import House


def test_one_part_that_fails_makes_the_service_not_ready_and_is_named() -> None:
    def silent() -> str:
        raise Unavailable("redis does not answer")

    probes: dict[str, Callable[[], str]] = {"journal": lambda: "3 entries", "redis": silent, "agents": lambda: "3 of 3"}
    view = readiness(probes)
    assert not view.ready
    assert [(check.name, check.ok) for check in view.checks] == [("journal", True), ("redis", False), ("agents", True)]
    assert view.checks[1].detail == "redis does not answer"
    assert readiness({"journal": lambda: "fine"}).ready


def test_agents_count_as_there_while_they_were_heard_of_lately(house: House) -> None:
    agents = house.parties.list(role="agent")
    assert agents_live(agents, 3, now=house.clock(), live_s=60.0) == "3 of 3 are there"
    house.clock.turn(seconds=61)
    with pytest.raises(NotReady, match="0 of 3 agents are there, 2 are needed; silent: east, north, west"):
        agents_live(agents, 2, now=house.clock(), live_s=60.0)
    with pytest.raises(NotReady, match="0 of 0"):
        agents_live([], 0, now=house.clock(), live_s=60.0)


def test_every_tallier_is_needed(house: House) -> None:
    for number in range(2):
        house.parties.enrol(f"t{number}", "tallier", f"{number + 1:064x}", f"{number + 8:064x}", tallier=number)
    talliers = house.parties.list(role="tallier")
    with pytest.raises(NotReady, match="tallier number 2 of 3 is not enrolled"):
        talliers_live(talliers, 3, now=house.clock(), live_s=60.0)
    with pytest.raises(NotReady, match="talliers not heard from for 60 s: t0, t1"):
        talliers_live(talliers, 2, now=house.clock(), live_s=60.0)


def test_an_embedder_is_missed_when_jobs_wait_for_it() -> None:
    assert embedder_there(True, 3) == "is there"
    assert "labeler embedder" in embedder_there(False, 0)
    with pytest.raises(
        NotReady, match=r"no embedder was heard from lately, and 1 job waits .* start `labeler embedder`"
    ):
        embedder_there(False, 1)
    with pytest.raises(NotReady, match="2 jobs wait"):
        embedder_there(False, 2)
