"""Parties at the coordinator: who is silent is named, and what parties say of themselves is bounded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from api.coordinator.roster import MAX_CLASS_CHARACTERS, Health, PartyFacts, Roster, check_facts, facts_of
from labeler.driver.mail_memory import MemoryMailbox
from labeler.errors import ProtocolViolation, Unavailable
from labeler.task import MOST_CLASSES
from labeler.untrusted import MOST_PROBE_CHARACTERS
from tests.api.conftest import House


class Silent(MemoryMailbox):
    """A mailbox of which nothing answers."""

    def check(self) -> None:
        raise Unavailable("redis does not answer")


def looked_at(house: House, *, mailbox: MemoryMailbox | None = None, waiting: int = 0) -> dict[str, tuple[bool, str]]:
    """What each part says."""
    nobody = cast(Any, None)
    roster = Roster(house.config, house.stores, nobody, nobody, nobody, clock=house.clock)
    health = Health(
        house.config,
        house.ledger,
        witnesses=cast(Any, SimpleNamespace(sentence="", doubters=())),
        roster=roster,
        mailbox=mailbox or MemoryMailbox(),
        room=lambda: "there is room",
        waiting_for_embedder=lambda: waiting,
    )
    view = health.readiness()
    assert view.ready == all(check.ok for check in view.checks)
    return {check.name: (check.ok, check.detail) for check in view.checks}


def test_one_part_that_fails_is_named_and_hides_no_other(house: House) -> None:
    found = looked_at(house, mailbox=Silent())
    assert found["redis"] == (False, "redis does not answer")
    assert found["storage"] == (True, "there is room")
    assert found["journal"][0]


def test_agents_count_as_there_while_they_were_heard_of_lately(house: House) -> None:
    assert looked_at(house)["agents"] == (True, "3 of 3 are there")
    house.clock.turn(seconds=61)
    silent = (False, "0 of 3 agents are there, 1 is needed; silent: east, north, west")
    assert looked_at(house)["agents"] == silent


def test_every_tallier_is_needed(house: House) -> None:
    for number in range(3):
        said = looked_at(house)["talliers"]
        assert said == (False, f"tallier number {', '.join(map(str, range(number, 3)))} of 3 is not enrolled")
        house.parties.enrol(f"t{number}", "tallier", f"{number + 1:064x}", f"{number + 8:064x}", tallier=number)
    assert looked_at(house)["talliers"] == (False, "talliers not heard from for 60 s: t0, t1, t2")


def test_an_embedder_is_missed_when_jobs_wait_for_it(house: House) -> None:
    mailbox = MemoryMailbox()
    assert looked_at(house, mailbox=mailbox)["embedder"][0]
    for waiting, said in ((1, "1 job waits for questions; start `labeler embedder`"), (2, "2 jobs wait")):
        ok, detail = looked_at(house, mailbox=mailbox, waiting=waiting)["embedder"]
        assert not ok
        assert said in detail
    mailbox.show_life("embedder", for_s=60.0)
    assert looked_at(house, mailbox=mailbox, waiting=3)["embedder"] == (True, "is there")


GOOD = {"backbone_fingerprint": "sha256:a", "classes": ["cat", "a dog"], "dimension": 1280}
BAD: list[dict[str, Any]] = [
    {"classes": 5},
    {"classes": "cat"},
    {"classes": {"cat": 1}},
    {"classes": ["cat", 5]},
    {"classes": ["cat", ""]},
    {"classes": ["\x1b[2J"]},
    {"classes": ["c" * (MAX_CLASS_CHARACTERS + 1)]},
    {"classes": ["c"] * (MOST_CLASSES + 1)},
    {"backbone_fingerprint": 5},
    {"backbone_fingerprint": "a\nb"},
    {"backbone_fingerprint": "a" * 201},
    {"dimension": 0},
    {"dimension": True},
    {"dimension": "64"},
    {"dimension": 2**20 + 1},
    {"records": 100},
    {"probe": "AAAA"},  # of which dimension?
    {"probe": "AAAA", "dimension": 4},
    {"probe": "no base64", "dimension": 4},
    {"probe": "A" * (MOST_PROBE_CHARACTERS + 4), "dimension": 1},
    {"probe": 5, "dimension": 1},
]


@pytest.mark.parametrize("facts", [{}, GOOD, {"classes": []}, {"probe": "AAAA" * 2, "dimension": 3}])
def test_facts_that_hold_are_taken_as_they_are(facts: dict[str, Any]) -> None:
    assert check_facts(facts) == facts


@pytest.mark.parametrize("facts", BAD, ids=range(len(BAD)))
def test_facts_that_do_not_hold_are_refused_without_being_repeated(facts: dict[str, Any]) -> None:
    with pytest.raises(ProtocolViolation) as caught:
        check_facts(facts)
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_what_was_told_is_kept_with_the_version_of_the_program() -> None:
    kept = facts_of(GOOD | {"version": "0.1.0"})
    assert kept == PartyFacts("sha256:a", ("cat", "a dog"), 1280, version="0.1.0")
