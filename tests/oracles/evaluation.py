"""The definition of an evaluation, in Python's own loops: one record, one vote, one cell; AUROC by every pair."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction


def count(
    layout: str, edges: Sequence[float], classes: int, records: Sequence[tuple[int, int, float]]
) -> dict[tuple[int, ...], int]:
    """Votes in each cell that has one, of records (true class, predicted class, confidence)."""
    votes: dict[tuple[int, ...], int] = {}
    for truth, predicted, confidence in records:
        assert 0 <= truth < classes
        band = 0
        for edge in edges:
            if confidence >= edge:
                band += 1
        is_right = 1 if truth == predicted else 0
        cell = {
            "confusion": (predicted, band, truth),
            "classes": (is_right, band, truth),
            "bands": (is_right, band),
        }[layout]
        votes[cell] = votes.get(cell, 0) + 1
    return votes


def auroc(first: Sequence[int], second: Sequence[int]) -> Fraction:
    """How often a score of the second class is above one of the first; equal ones count half."""
    won = sum(Fraction(1 + (two > one) - (two < one), 2) for one in first for two in second)
    return won / (len(first) * len(second))
