"""What a simulation runs, by which clock, and what it tells of a schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from labeler.driver.mail import Mailbox
from tests.simulation.homes import START


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


class Coordinator(Protocol):
    """The coordinator while it lives."""

    def tick(self) -> None:
        """Take every step that can be taken now."""

    def take(self, data: bytes) -> bytes:
        """Take posted messages."""

    def poll(self, data: bytes) -> bytes:
        """Answer a poll."""

    def submit(
        self,
        name: str,
        task_digest: str,
        questions: NDArray[np.int16],
        *,
        sizes: Sequence[int],
        deadline_s: float,
        by: str,
    ) -> str:
        """Take a job whose questions are prepared; its id.

        Raises:
            LabelerError: it is not taken.
        """

    def cancel(self, job_id: str) -> None:
        """Cancel a job; nothing happens where it has ended."""

    def enrol_anew(self, party_id: str, verify_key: str, seal_key: str) -> None:
        """Give a party other keys."""

    def close(self) -> None:
        """Let go of everything; what is not on disk is lost."""


@dataclass(frozen=True)
class Subject:
    """The coordinator that is looked at.

    Attributes:
        boot: makes it from its home, over a mailbox and a clock.
        complete: makes in a home what the coordinator makes at its first start.
    """

    boot: Callable[[Path, Mailbox, VirtualClock], Coordinator]
    complete: Callable[[Path], None]


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
