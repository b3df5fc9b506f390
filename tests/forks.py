"""`pytest --forks auto`: collect once, then run the tests in forks of the process that collected.

    parent   imports and collects ---- forks ----> child  asks for a unit, runs its tests, asks for the next
             gives out units, heaviest first <---- reports of each test, as pytest serialises them

Five thousand tests take 15 s of a core to import and collect, and every worker of pytest-xdist does it again: forks
share it, and the libraries they never load themselves. A unit is a file, or the files whose tests ask for the same
federation of real processes, so that each federation starts once. What a unit sets up for its modules and packages is
torn down with it; what is set up for the session (a server of PostgreSQL, say) lives as long as its fork.

Tests with processes of their own (`process`, or in e2e/) are units apart, and no two of these run at the same time. So
what they wait for has at most one other test beside it.

A fork has its own captured output, folder of temporary files and random seeds. One that dies fails the test it was at,
and another goes on behind it. Nothing else may run in the parent when it forks: threads would not be copied, and locks
they hold would stay locked for ever. (Allocators of pyarrow and polars keep threads of their own, which are ready for
forks.) When all is told the parent ends at once: to free all libraries object by object takes 5 s of one core while
the other has nothing to do.
"""

from __future__ import annotations

import atexit
import os
import random
import signal
import sys
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

import pytest

Unit = list[int]


def has_processes(item: pytest.Item) -> bool:
    """Return whether a test is of those that run one after another: its processes, too, want a core."""
    return item.get_closest_marker("process") is not None or "/e2e/" in item.nodeid


def units_of(items: list[pytest.Item]) -> list[Unit]:
    """Indices of the items that belong together, in the order of their first.

    Files are joined where tests of theirs ask for the same fixture that hands out a shared federation. Tests with
    processes are apart from the others of their file.
    """
    of_file: dict[str, Unit] = {}
    shared: dict[str, str] = {}
    for index, item in enumerate(items):
        file = item.nodeid.partition("::")[0] + (" alone" if has_processes(item) else "")
        unit = of_file.setdefault(file, [])
        for name in _shared_federations(item):
            other = of_file[shared.setdefault(name, file)]
            if other is not unit:
                other += unit
                of_file |= {one: other for one, its in of_file.items() if its is unit}
                unit = other
        unit.append(index)
    return list({id(unit): unit for unit in of_file.values()}.values())


def _shared_federations(item: pytest.Item) -> Iterator[str]:
    """The fixtures of shared federations that a test asks for, with the folder that defines each."""
    known: dict[str, Any] = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
    for name, (*_, used) in known.items():
        if "federations" in used.argnames:
            yield f"{used.baseid}/{name}"


@dataclass
class Child:
    """A fork as its parent sees it.

    Attributes:
        pid: its process.
        pipe: to it.
        number: names its folder of temporary files.
        left: of its unit, what it has not ended yet.
        is_alone: its unit is of those that run one after another.
        is_waiting: it has nothing to do until such a unit ends.
    """

    pid: int
    pipe: Connection
    number: int
    left: deque[int] = field(default_factory=deque)
    is_alone: bool = False
    is_waiting: bool = False


class Forks:
    """The plugin; see this module."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._children: dict[Connection, Child] = {}
        self._units: list[Unit] = []
        self._started = 0
        self._session: pytest.Session | None = None
        atexit.register(self._end_at_once)  # before anything else is, so that it is called last

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._session = session

    def _end_at_once(self) -> None:
        if self._session is None or hasattr(sys, "last_value"):  # an error of pytest itself has a code of its own
            return
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(self._session.exitstatus)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed or session.config.option.collectonly:
            return None
        others = threading.active_count() - 1
        if others:
            raise pytest.UsageError(f"{others} threads run beside the one that collected, so it cannot be forked")
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        self._units.extend(units_of(session.items))
        try:
            for _ in range(min(self._count, len(self._units))):
                self._start(session)
            while self._children:
                for pipe in wait(list(self._children)):
                    self._hear(session, self._children[pipe])  # type: ignore[index]
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
                if session.shouldstop:
                    raise session.Interrupted(session.shouldstop)
        finally:
            for child in self._children.values():
                with suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGINT)  # it tears down what it has set up
                child.pipe.close()
                os.waitpid(child.pid, 0)
        return True

    def _start(self, session: pytest.Session) -> None:
        ours, theirs = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        number, self._started = self._started, self._started + 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on: threads of allocators
            pid = os.fork()
        if pid == 0:
            ours.close()
            for other in self._children:
                other.close()  # else a fork would not hear that the parent is gone
            _be_a_child(session, theirs, number)
        theirs.close()
        self._children[ours] = Child(pid, ours, number)

    def _give(self, session: pytest.Session, child: Child) -> None:
        """Give a child its next unit: one with processes, if no other child has one; or let it wait, or end."""
        kinds = [has_processes(session.items[unit[0]]) for unit in self._units]
        is_taken = any(one.is_alone for one in self._children.values())
        child.is_alone = wanted = True in kinds and not is_taken
        child.is_waiting = bool(kinds) and wanted not in kinds
        if child.is_waiting:
            return
        unit = self._units.pop(kinds.index(wanted)) if kinds else None
        child.left = deque(unit or ())
        with suppress(BrokenPipeError):
            child.pipe.send(unit)

    def _wake(self, session: pytest.Session) -> None:
        """Give something to do to those that waited for the end of a unit with processes."""
        for child in list(self._children.values()):
            if child.is_waiting:
                self._give(session, child)

    def _hear(self, session: pytest.Session, child: Child) -> None:
        config = session.config
        try:
            kind, told = child.pipe.recv()
        except (EOFError, ConnectionResetError):
            self._gone(session, child)
            return
        match kind:
            case "next":
                child.is_alone = False
                self._give(session, child)
                self._wake(session)
            case "report":
                report = config.hook.pytest_report_from_serializable(config=config, data=told)
                config.hook.pytest_runtest_logreport(report=report)
            case "ended":
                child.left.popleft()
                item = session.items[told]
                config.hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
            case "warning":
                name, text, file, line, when, nodeid = told
                message = warnings.WarningMessage(UserWarning(f"{name}: {text}"), UserWarning, file, line)
                config.hook.pytest_warning_recorded.call_historic(
                    kwargs={"warning_message": message, "when": when, "nodeid": nodeid, "location": None}
                )
            case "broken":
                self._fail(session, f"the end of fork {child.number}", told)

    def _gone(self, session: pytest.Session, child: Child) -> None:
        """A child has ended: well where it had nothing left, else it died at the first test that it had."""
        del self._children[child.pipe]
        child.pipe.close()
        _, status = os.waitpid(child.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if not child.left:
            if code:
                self._fail(session, f"the end of fork {child.number}", f"it ended with {code}")
            return
        at = child.left.popleft()
        self._fail(session, session.items[at].nodeid, f"the process that ran this test ended with {code}")
        if child.left:
            self._units.insert(0, list(child.left))
        if self._units:
            self._start(session)
        self._wake(session)

    @staticmethod
    def _fail(session: pytest.Session, nodeid: str, what: str) -> None:
        file = nodeid.partition("::")[0]
        report = pytest.TestReport(nodeid, (file, None, file), {}, "failed", what, "call")
        session.config.hook.pytest_runtest_logreport(report=report)
        session.config.hook.pytest_runtest_logfinish(nodeid=nodeid, location=(file, None, file))


class _Teller:
    """In a child, all that pytest would print goes to the parent."""

    def __init__(self, config: pytest.Config, pipe: Connection) -> None:
        self._config = config
        self._pipe = pipe
        self.is_told_of_the_past = True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._pipe.send(("report", data))

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, when: str, nodeid: str) -> None:
        if self.is_told_of_the_past:  # a plugin that comes late hears of all warnings of the collection
            return
        told = warning_message
        text = (told.category.__name__, str(told.message), told.filename, told.lineno, when, nodeid)
        self._pipe.send(("warning", text))


def _be_a_child(session: pytest.Session, pipe: Connection, number: int) -> NoReturn:
    code = 1
    try:
        _run_units(session, pipe, number)
        code = 0
    except KeyboardInterrupt:
        pass
    except BaseException:
        with suppress(OSError):
            pipe.send(("broken", traceback.format_exc()))
            code = 0  # and is told once
    finally:
        with suppress(BaseException):
            session._setupstate.teardown_exact(None)
        sys.stdout.flush()
        sys.stderr.flush()
        pipe.close()
        os._exit(code)  # what the parent registered for its end is the parent's


LEAST_WORK_S = 1.0
"""Of a processor, in the time of one unit: what a thread that has nothing to do does not take."""


class LeftBehind:
    """Threads that outlive the unit that began them and go on working: they take a core from every test behind them."""

    def __init__(self) -> None:
        self._worked: dict[int, float] = {}

    def found(self) -> list[str]:
        """Names and work of those that were there at the last look and have worked since."""
        before, self._worked = self._worked, {}
        told = []
        for thread in threading.enumerate():
            number = thread.native_id or 0
            with suppress(OSError, ValueError, IndexError):  # it has just ended, or this is no Linux
                fields = Path(f"/proc/self/task/{number}/stat").read_text().rpartition(")")[2].split()
                worked = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
                self._worked[number] = worked
                since = worked - before.get(number, worked)
                if since >= LEAST_WORK_S and thread is not threading.main_thread():
                    told.append(f"{thread.name}, {since:.1f} s")
        return told


def _run_units(session: pytest.Session, pipe: Connection, number: int) -> None:
    config = session.config
    manager = config.pluginmanager
    # The files that captured output goes to have one position, which forks would share.
    capture = manager.getplugin("capturemanager")
    capture.read_global_capture()
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture(in_=True)
    manager.getplugin("terminalreporter")._tw._file = Path(os.devnull).open("w")  # noqa: SIM115  # until the fork ends
    teller = _Teller(config, pipe)
    manager.register(teller)
    teller.is_told_of_the_past = False
    factory = config._tmp_path_factory  # type: ignore[attr-defined]
    factory._basetemp = factory.getbasetemp() / f"fork-{number}"
    factory._basetemp.mkdir(mode=0o700)
    random.seed()
    left = LeftBehind()
    while True:
        pipe.send(("next", None))
        unit: Unit | None = pipe.recv()
        if unit is None:
            break
        for index, following in zip(unit, [*unit[1:], None], strict=True):
            # Behind the last test of a unit everything below the session is torn down.
            after = session if following is None else session.items[following]
            config.hook.pytest_runtest_protocol(item=session.items[index], nextitem=after)
            pipe.send(("ended", index))
        for thread in left.found():
            file = session.items[unit[0]].nodeid.partition("::")[0]
            text = f"a thread that an earlier file left behind worked beside this one: {thread} of a processor"
            pipe.send(("warning", ("LeftBehind", text, file, 1, "runtest", file)))
    session._setupstate.teardown_exact(None)
