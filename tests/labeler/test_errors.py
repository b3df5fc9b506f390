"""The error tree is complete, drawn as it is, and stable."""

from __future__ import annotations

import labeler.errors
from labeler.errors import LabelerError

ADORNED = {
    "api.coordinator.estimates",
    "api.client_http",
    "api.limits",
    "api.problems",
    "feature_store.decode_process",
    "workers.agent.ledger",
    "workers.party.coordinator",
}
"""Modules whose errors are errors of the tree that carry something beside it: what HTTP needs, which image it was,
which of a site's bounds it is about."""


def every_error(root: type[LabelerError] = LabelerError) -> list[type[LabelerError]]:
    below = [error for child in root.__subclasses__() for error in every_error(child)]
    return [error for error in (root, *below) if error.__module__ not in ADORNED]


def test_every_error_stands_in_the_drawn_tree() -> None:
    drawn = labeler.errors.__doc__ or ""
    assert [error.__name__ for error in every_error() if error.__name__ not in drawn] == []


def test_every_error_has_its_own_problem_type_and_a_documented_exit_code() -> None:
    types = [error.problem_type for error in every_error()]
    assert len(set(types)) == len(types)
    assert {error.exit_code for error in every_error()} == {1, 2, 75}


def test_every_error_lives_in_the_one_tree() -> None:
    assert {error.__module__ for error in every_error()} == {"labeler.errors"}
