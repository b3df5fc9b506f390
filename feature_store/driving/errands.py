"""Errands: what others want written shares the commit of a turn.

A commit costs the same however much it holds, so whoever has something to write (a job that was submitted) hands it to
the driver, and waits. Each errand is undone by itself where it is refused, and takes nothing else of the turn with it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from feature_store.journal.database import Connection

Result = TypeVar("Result")


@dataclass(eq=False)
class Errand:
    """Something to be written, and whoever waits for it.

    Attributes:
        write: writes it within the transaction of a turn. It may run again, where the turn is done again piece by
            piece; what it did before was undone then. A `LabelerError` of it is a refusal.
        done: called once: with None when it is durable, else with why nothing of it was kept.
    """

    write: Callable[[Connection], None] = field(repr=False)
    done: Callable[[BaseException | None], None] = field(repr=False)
    is_settled: bool = False

    def settle(self, error: BaseException | None) -> None:
        """Tell who waits; the first time counts."""
        if not self.is_settled:
            self.is_settled = True
            self.done(error)


def run_errand(hand_in: Callable[[Errand], None], step: Callable[[Connection], Result]) -> Result:
    """Have a step written by the driver, and wait in this thread until it is durable.

    Args:
        step: see `Errand.write`.

    Returns:
        What the step returned.

    Raises:
        LabelerError: it was refused, or the journal cannot take it now; nothing of it was kept.
    """
    is_done = threading.Event()
    results: list[Result] = []
    failures: list[BaseException] = []

    def write(connection: Connection) -> None:
        results.clear()
        results.append(step(connection))

    def done(error: BaseException | None) -> None:
        if error is not None:
            failures.append(error)
        is_done.set()

    hand_in(Errand(write, done))
    is_done.wait()
    if failures:
        raise failures[0]
    return results[0]
