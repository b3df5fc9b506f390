"""The guard refuses what a test that is not marked may not do, and says what to do; its list of files only shrinks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.guard import POLL_S, UNCONVERTED, Guard

MOST_UNCONVERTED = Counter(threads=65)


@pytest.fixture
def guard(request: pytest.FixtureRequest) -> Iterator[Guard]:
    """The guard of this run; what it refuses here fails no test."""
    found = request.config.pluginmanager.get_plugin("guard")
    assert isinstance(found, Guard)
    yield found
    found.refused.clear()


def bind() -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))


def connect() -> None:
    with socket.socket() as one:
        one.connect(("127.0.0.1", 9))


PLANTED: dict[str, Callable[[], object]] = {
    "binds a socket": bind,
    "connects a socket": connect,
    "starts a process": lambda: subprocess.run([sys.executable, "-c", ""], check=True),
    "forks": lambda: os.fork() or os._exit(1),
    "starts the thread": lambda: threading.Thread(target=print).start(),
    "sleeps": lambda: time.sleep(0.1),
}


@pytest.mark.parametrize("what", PLANTED)
def test_what_a_test_may_not_do_is_refused_with_what_to_do_though_the_program_catches_it(
    guard: Guard, what: str
) -> None:
    with pytest.raises(pytest.fail.Exception, match=rf"a test {what}.*give it a door.*or mark it with pytest.mark.pr"):
        PLANTED[what]()
    assert len(guard.refused) == 1


def test_a_look_at_what_is_waited_for_is_no_sleep(guard: Guard) -> None:
    time.sleep(POLL_S)
    assert guard.refused == []


@pytest.mark.process
def test_a_marked_test_may_do_all_of_it_and_meets_no_other_machine(guard: Guard) -> None:
    for what in set(PLANTED) - {"connects a socket", "forks"}:
        PLANTED[what]()
    with socket.socket() as one, pytest.raises(pytest.fail.Exception, match=r"connects to 192\.0\.2\.1"):
        one.connect(("192.0.2.1", 9))
    assert guard.refused == []


def test_files_that_are_not_converted_exist_and_are_no_more_than_they_were() -> None:
    here = Path(__file__).parent
    assert [file for file in UNCONVERTED if not (here / file).is_file()] == []
    left = Counter(UNCONVERTED.values())
    assert left <= MOST_UNCONVERTED, "the list tests/unconverted.txt only shrinks; convert the test, or mark it"
