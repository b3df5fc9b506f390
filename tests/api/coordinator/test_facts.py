"""What parties say of themselves: taken where it is known and bounded, refused when it comes, left out where kept."""

from __future__ import annotations

from typing import Any

import pytest

from api.coordinator.roster import MAX_CLASS_CHARACTERS, Facts, check_facts, facts_of
from labeler.errors import ProtocolViolation
from labeler.task import MOST_CLASSES
from labeler.untrusted import MOST_PROBE_CHARACTERS

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
    assert kept == Facts("sha256:a", ("cat", "a dog"), 1280, version="0.1.0")
