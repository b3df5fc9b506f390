"""A guard: an unmarked test binds and connects no socket, starts no process or thread, sleeps no longer than a poll.

What a test would start it gets otherwise: a server behind a door (tests.doors), the mailbox in memory, a clock of its
own, or something that it waits for. No test, marked or not, connects to anything but this machine.
"""

from __future__ import annotations

import ipaddress
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.process_doors import wants_processes

_EVENTS: Final = {"socket.bind": "binds a socket", "socket.connect": "connects a socket"} | {
    "subprocess.Popen": "starts a process", "os.posix_spawn": "starts a process", "os.fork": "forks"
}  # fmt: skip
_THREADS: Final = ("door", "coordinator", "retention", "AnyIO", "asyncio_", "embed", "shard", "images", "winner")
"""Beginnings of names of threads that any test may have: those of doors, of a coordinator, of the product's pools."""

POLL_S: Final = 0.05
"""Between two looks at what a test waits for. A poll happens by chance, so no test fails for one; sleep is longer."""

UNCONVERTED: Final = dict(line.split() for line in Path(__file__).with_name("unconverted.txt").read_text().splitlines())
"""Files whose tests may still start "threads" and sleep. It only shrinks (tests/test_guard.py)."""

_start, _sleep = threading.Thread.start, time.sleep


class Guard:
    """The plugin; see this module. A refusal that the program catches fails its test all the same."""

    def __init__(self) -> None:
        self._left, self._is_running = "", False
        self._others: set[int] = set()
        self.refused: list[str] = []
        sys.addaudithook(self._hear)
        wants_processes[:] = [lambda: self._left == "all" or not self._is_running]
        threading.Thread.start = lambda thread: self._begin(thread)  # type: ignore[method-assign,assignment,misc]
        time.sleep = lambda seconds: self._wait(seconds)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        file = item.nodeid.partition("::")[0].removeprefix("tests/")
        is_free = item.get_closest_marker("process") or file.startswith("e2e/")
        # What an earlier test has left running is not this one's.
        self._others = {thread.ident or 0 for thread in threading.enumerate()} - {threading.get_ident()}
        self._left, self._is_running = "all" if is_free else UNCONVERTED.get(file, ""), True
        try:
            return (yield)
        finally:
            self._is_running = False

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self) -> Generator[None, object, object]:
        self._is_running = False  # what a file or the session shares ends with its last test
        try:
            return (yield)
        finally:
            told, self.refused = self.refused, []
            if told:
                raise pytest.fail.Exception("\n".join(told), pytrace=False)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
        # What a file or the session shares is made in whichever test comes first. It may be a server; who talks to it
        # needs sockets.
        is_shared, before = fixturedef.scope != "function", self._is_running
        self._is_running = before and not is_shared
        try:
            return (yield)
        finally:
            self._is_running = before

    def refuse(self, kind: str, what: str) -> None:
        """Refuse what the running test may not do."""
        if not self._is_running or self._left in ("all", kind) or threading.get_ident() in self._others:
            return
        to_do = "give it a door, a clock or a mailbox in memory, or mark it with pytest.mark.process (tests/guard.py)"
        self.refused.append(f"a test {what} and is not marked: {to_do}")
        raise pytest.fail.Exception(self.refused[-1])

    def _hear(self, event: str, details: tuple[Any, ...]) -> None:
        if event not in _EVENTS or not self._is_running:
            return
        if event == "subprocess.Popen" and str(details[0]).endswith("ldconfig"):
            return  # a library looks for another one while it is imported
        if event == "socket.connect" and isinstance(details[1], tuple) and not _is_here(details[1][0]):
            raise pytest.fail.Exception(f"a test connects to {details[1][0]}; tests use this machine alone")
        self.refuse("sockets", _EVENTS[event])

    def _begin(self, thread: threading.Thread) -> None:
        if not (thread.name.startswith(_THREADS) or threading.current_thread().name.startswith(_THREADS)):
            self.refuse("threads", f"starts the thread {thread.name!r}")
        _start(thread)

    def _wait(self, seconds: float) -> None:
        if seconds > POLL_S:
            self.refuse("threads", "sleeps")
        _sleep(seconds)


def _is_here(host: str) -> bool:
    """Return True for an address of this machine, or a name of it; any other name would be looked up elsewhere."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"
