"""The steps of a training: all of them, or its first ones where only its time is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass
class FirstSteps:
    """A cut of trainings.

    Attributes:
        most: steps that a training takes at most.
        whole: the most steps that a training would have taken; 0 where nothing was trained.
    """

    most: int
    whole: int = 0


_CUT: ContextVar[FirstSteps | None] = ContextVar("first steps", default=None)


@contextmanager
def first_steps(most: int) -> Iterator[FirstSteps]:
    """Cut the trainings of this thread to their first steps: for drawn rows alone, since nothing is proved of such."""
    cut = FirstSteps(most)
    before = _CUT.set(cut)
    try:
        yield cut
    finally:
        _CUT.reset(before)


def steps(count: int) -> range:
    """Return the numbers of the steps that a training of `count` steps takes."""
    cut = _CUT.get()
    if cut is None:
        return range(count)
    cut.whole = max(cut.whole, count)
    return range(min(count, cut.most))
