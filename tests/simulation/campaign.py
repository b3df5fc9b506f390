"""Many schedules: in several processes, over ranges of seeds that can be gone on with, and none of them for too long.

A campaign writes where it is into a file after every chunk, whole or not at all: counts, faults, and every seed that
was found, each with the command that replays it. Started again with the same file it goes on behind the last chunk.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import logging
import multiprocessing
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from labeler.errors import BadData, InvalidSetting, Unavailable
from labeler.system.files import replace_file
from tests.simulation.case import case_of
from tests.simulation.contract import Outcome
from tests.simulation.homes import Templates
from tests.simulation.world import run_case
from workers.up.supervisor import die_with_parent

CHUNK = 20
"""Schedules between two writings of the file."""

LONGEST_S = 45 * 60.0
"""No campaign runs longer; the next one goes on."""

_IN_MEMORY = Path("/dev/shm")
_PREFIX = "labeler-schedules-"
_LOCK = "in-use"
_BORN_S = 600.0
"""A folder without a lock is somebody's that is just being made, for as long."""

_FORMAT = "labeler-simulation/"
_VERSION = f"{_FORMAT}5"
"""What a seed stands for; a file of another version is refused, since its seeds were other schedules."""


@dataclass
class Report:
    """The results of a range of seeds.

    Attributes:
        first, last: the range, without `last`.
        following: the first seed that was not run.
        steps, moments: of all schedules together.
        seconds: that they took, all processes together.
        cpu_s: of which a processor was at work.
        elapsed_s: from beginning to end, of all calls that had a part in it.
        faults: kind -> how often it happened.
        states: state -> jobs that ended in it.
        found: seed -> what must not have happened.
    """

    first: int
    last: int
    following: int
    steps: int = 0
    moments: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0
    elapsed_s: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    states: Counter[str] = field(default_factory=Counter)
    found: dict[int, str] = field(default_factory=dict)

    @property
    def schedules(self) -> int:
        """Return how many were run."""
        return self.following - self.first

    def add(self, outcome: Outcome | Report) -> None:
        """Count one schedule, or all of the next chunk."""
        self.steps += outcome.steps
        self.moments += outcome.moments
        self.faults.update(outcome.faults)
        self.states.update(outcome.states)
        if isinstance(outcome, Report):
            self.following = outcome.following
            self.seconds += outcome.seconds
            self.cpu_s += outcome.cpu_s
            self.found.update(outcome.found)
        elif outcome.violation:
            self.found[outcome.seed] = outcome.violation


def replay_command(seed: int) -> str:
    """Return what shows one schedule again, step by step."""
    return f"labeler bench simulate --seeds {seed}:{seed + 1} --trace"


@contextmanager
def memory_folder() -> Iterator[Path]:
    """An empty folder, in memory where the machine has such a place: a simulated disk need not survive a power cut.

    What somebody who was killed has left there is removed first: memory that no process would give back.
    """
    place = _IN_MEMORY if _IN_MEMORY.is_dir() and os.access(_IN_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    remove_abandoned(place)
    held = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
    try:
        with (held / _LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            folder = held / "schedules"
            folder.mkdir()
            yield folder
    finally:
        shutil.rmtree(held, ignore_errors=True)


def remove_abandoned(place: Path) -> None:
    """Remove the folders of those who do not live any more: the system has let go of their locks."""
    for folder in place.glob(f"{_PREFIX}*"):
        # Another user's cannot be opened, and somebody else may remove it at this moment.
        with contextlib.suppress(OSError):
            if not (folder / _LOCK).exists():
                if time.time() - folder.stat().st_mtime > _BORN_S:
                    shutil.rmtree(folder, ignore_errors=True)
                continue
            with (folder / _LOCK).open("r") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)


class Stage:
    """A stage on which schedules run, one after the other, over the same templates.

    Args:
        folder: an empty folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._templates = Templates(folder / "templates")

    def run(self, seed: int, *, traced: bool = False, shorter: bool = False) -> Outcome:
        """Run the schedule of a seed, or that of its neighbor with one record less."""
        place = self._folder / "schedule"
        place.mkdir()
        case = case_of(seed)
        try:
            return run_case(case.neighbour if shorter else case, self._templates, place, traced=traced)
        finally:
            shutil.rmtree(place)


def read_seeds(text: str) -> tuple[int, int]:
    """A range of seeds, A:B without B.

    Raises:
        InvalidSetting: it is none.
    """
    first, colon, last = text.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise InvalidSetting(f"seeds are A:B, two whole numbers with A below B, found {text[:40]!r}")
    return int(first), int(last)


def run_seeds(
    first: int,
    last: int,
    *,
    resume: Path | None = None,
    processes: int = 1,
    longest_s: float = LONGEST_S,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Report:
    """Run a range of schedules, or what is left of it.

    Args:
        first, last: the range, without `last`.
        resume: file to go on with and to write into; None keeps nothing.
        processes: at a time; with 1 it is this one.
        longest_s: begin no chunk after this long, at most `LONGEST_S`.
        on_progress: told how many are done, of how many.

    Raises:
        BadData: the file is none of a campaign.
        InvalidSetting: it is of another range, or its seeds were other schedules.
        Unavailable: one of the processes was killed; what came before is in the file.
    """
    report = Report(first, last, first) if resume is None or not resume.exists() else _read(resume, first, last)
    chunks = [(start, min(start + CHUNK, last)) for start in range(report.following, last, CHUNK)]
    begun, before = time.monotonic(), report.elapsed_s

    def take(chunk: Report) -> bool:
        """Count a chunk; whether another one may begin."""
        elapsed_s = time.monotonic() - begun
        report.add(chunk)
        report.elapsed_s = before + elapsed_s
        on_progress(report.schedules, report.last - report.first)
        if resume is not None:
            replace_file(resume, json.dumps({"version": _VERSION} | vars(report), indent=1).encode())
        return elapsed_s < min(longest_s, LONGEST_S)

    if processes == 1:
        for chunk in chunks:
            if not take(_run_chunk(*chunk)):
                break
        return report
    try:
        _run_together(chunks, min(processes, len(chunks)), take)
    except BrokenProcessPool:
        raise Unavailable(
            "a process that ran schedules was killed, perhaps for want of memory; those before seed "
            f"{report.following} are counted, and the same command with --resume goes on behind them"
        ) from None
    finally:
        remove_abandoned(_IN_MEMORY)
    return report


def _run_together(chunks: list[tuple[int, int]], processes: int, take: Callable[[Report], bool]) -> None:
    """Chunks in several processes, taken in their order: the file then says one number."""
    if not chunks:
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_end_with, initargs=(os.getpid(),)) as pool:
        waiting, is_time = [], True
        for chunk in chunks:
            waiting.append(pool.submit(_run_chunk, *chunk))
            # A few ahead of the one that is waited for.
            if len(waiting) < 2 * processes:
                continue
            is_time = take(waiting.pop(0).result())
            if not is_time:
                break
        # From behind: what was not begun is left to the next call, and what is left of it here has no gap.
        while not is_time and waiting and waiting[-1].cancel():
            waiting.pop()
        for one in waiting:
            take(one.result())


def _end_with(parent: int) -> None:
    """In a process of the pool: where the campaign is killed, it is, too."""
    if (ask_the_kernel := die_with_parent(parent)) is not None:
        ask_the_kernel()


def _read(path: Path, first: int, last: int) -> Report:
    try:
        content: dict[str, Any] = json.loads(path.read_bytes())
        version = str(content.pop("version"))
        if not version.startswith(_FORMAT):
            raise ValueError("version")
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        raise BadData(f"{path.name} is no file of a campaign of schedules; name another one") from None
    if version != _VERSION:
        raise InvalidSetting(
            f"{path.name} is of version {version.removeprefix(_FORMAT)[:8]} of the schedules, in which a seed stood "
            f"for another one; this is version {_VERSION.removeprefix(_FORMAT)}. Name another file; what that one "
            "found is replayed by the program that wrote it"
        )
    try:
        content["faults"], content["states"] = Counter(content["faults"]), Counter(content["states"])
        content["found"] = {int(seed): str(text) for seed, text in content["found"].items()}
        report = Report(**content)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        raise BadData(f"{path.name} is no file of a campaign of schedules; name another one") from None
    if (report.first, report.last) != (first, last):
        raise InvalidSetting(
            f"{path.name} is about seeds {report.first}:{report.last}, and {first}:{last} were asked for; name the "
            "same, or another file"
        )
    return report


def _run_chunk(first: int, last: int) -> Report:
    """Run a chunk in this process; what parties log of their deaths is for nobody."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        report, stage = Report(first, last, last), _stage()
        gc.disable()  # what a schedule leaves behind is looked through once a chunk, not a hundred times
        started, worked = time.perf_counter(), time.process_time()
        for seed in range(first, last):
            report.add(stage.run(seed))
        gc.collect()
        report.seconds, report.cpu_s = time.perf_counter() - started, time.process_time() - worked
    finally:
        gc.enable()
        logging.disable(before)
    return report


@cache
def _stage() -> Stage:
    """Of this process, for as long as it lives."""
    folder = memory_folder()
    place = folder.__enter__()
    multiprocessing.util.Finalize(None, folder.__exit__, (None, None, None), exitpriority=10)
    stage = Stage(place)
    stage.run(0)  # what is imported when it is first used
    # It stays for good: walking through it took the garbage collector a seventh of the time.
    gc.collect()
    gc.freeze()
    return stage
