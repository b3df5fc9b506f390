"""Seeds by what their schedules are, so that no test depends on one seed: another draw gives it others of the kind."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count, islice

from tests.simulation.case import Case, case_of

Wanted = Callable[[Case], bool]


def seeds_where(wanted: Wanted, most: int, *, first: int = 0) -> tuple[int, ...]:
    """The first seeds of schedules that are as wanted."""
    return tuple(islice((seed for seed in count(first) if wanted(case_of(seed))), most))


def comes_through(case: Case) -> bool:
    """Little hinders its jobs, so that shares of all of them leave."""
    return not case.unnamed and ends_by_itself(case)


def ends_by_itself(case: Case) -> bool:
    """None of its jobs waits for its deadline."""
    return not case.has_reasons_to_wait and all(one.deadline_s >= 500 for one in case.jobs)


def is_left_to_a_tallier(case: Case) -> bool:
    """A tallier's site does not name an agent that has to answer, and nothing else keeps a job from its end."""
    return bool(case.unnamed) and ends_by_itself(case) and not case.max_dropouts and len(case.jobs) == 1


def of(*ways: str) -> Wanted:
    """Such a schedule, asked in one of these ways."""
    return lambda case: case.way in ways and case.release == "histogram" and comes_through(case)


def comes_late(case: Case) -> bool:
    """A model is trained in steps without an agent, which is away when it is first asked and comes back."""
    return of("steps")(case) and case.away is not None and case.max_dropouts > 0
