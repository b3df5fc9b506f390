"""Progress of long work: one callable that libraries call and command lines draw."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from labeler.errors import Interrupted


class ProgressCallback(Protocol):
    """A callback for progress: `stage` in words, `done` of `total` steps."""

    def __call__(self, stage: str, done: int, total: int) -> None: ...


def silent(stage: str, done: int, total: int) -> None:
    """A progress callback that shows nothing."""


class StageClock:
    """A clock of the seconds spent per stage, in order of first appearance.

    They grow with the private records that were searched. So they are for the terminal or the log of the user that runs
    the job, and never for a file that may leave (feature_store.results.report has no place for them).
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time of the block to the stage `name`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    def in_words(self) -> str:
        """`read and check 0.21 s, label 3.2 s`."""
        return ", ".join(f"{name} {say_seconds(spent)}" for name, spent in self.seconds.items())


def say_seconds(seconds: float) -> str:
    """Return a duration with as many digits as people care for."""
    if seconds < 0.0095:
        return f"{1000 * seconds:.1f} ms"
    if seconds < 9.95:
        return f"{seconds:.2f} s" if seconds < 0.995 else f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, rest = divmod(whole, 3600)
    return f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s"


@contextmanager
def progress_bars(*, quiet: bool) -> Iterator[ProgressCallback]:
    """Draw one bar per stage on standard error; nothing when quiet.

    Raises:
        Interrupted: the user pressed Ctrl-C.
    """
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    known: dict[str, TaskID] = {}
    try:
        with Progress(*columns, console=Console(stderr=True), disable=quiet) as bars:

            def show(stage: str, done: int, total: int) -> None:
                if stage not in known:
                    known[stage] = bars.add_task(stage, total=total)
                bars.update(known[stage], completed=done, total=total)

            yield silent if quiet else show
    except KeyboardInterrupt:
        raise Interrupted("interrupted; run the same command again, and it continues where it can") from None
