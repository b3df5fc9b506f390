"""The clock of a simulation, and its account of a schedule."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

START = datetime(2026, 3, 1, 12, tzinfo=UTC)


class VirtualClock:
    """The time, which passes only where the schedule says so."""

    def __init__(self) -> None:
        self.passed_s = 0.0
        self.back_s = 0.0
        """How far the wall clock was set back; what never runs backwards does not know of it."""

    def utc(self) -> datetime:
        """The time now, with its zone."""
        return START + timedelta(seconds=self.passed_s - self.back_s)

    def unix_s(self) -> float:
        """The time now, unix time in seconds."""
        return self.utc().astimezone(UTC).timestamp()

    def steady_s(self) -> float:
        """Seconds that never run backwards."""
        return self.passed_s


@dataclass(frozen=True)
class Outcome:
    """How a schedule went.

    Attributes:
        seed: which.
        steps: turns that were taken.
        moments: between two effects, at each of which somebody could have died.
        faults: kind -> how often it happened.
        states: of the jobs at the end.
        violation: what must not have happened, in words; empty where nothing did.
        trace: what happened, step by step, where it was asked for.
        wire: (step, milliseconds, sender, recipient, kind, length) of every message that left.
    """

    seed: int
    steps: int
    moments: int
    faults: Counter[str]
    states: tuple[str, ...]
    violation: str = ""
    trace: tuple[str, ...] = ()
    wire: tuple[tuple[int, int, str, str, str, int], ...] = ()
