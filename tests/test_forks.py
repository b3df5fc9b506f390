"""Tests in forks: each runs once and is reported, units stay together, and a process that dies fails its test alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).parent.parent

CONFTEST = """
import os, pytest
from tests import forks

forks.LEAST_WORK_S = 0.1

def pytest_configure(config):
    config.pluginmanager.register(forks.Forks(int(os.environ["FORKS"])))

@pytest.fixture(scope="session")
def federations(tmp_path_factory):
    yield str(tmp_path_factory.mktemp("federation"))
    print_into("torn-down")

@pytest.fixture
def service(federations):
    return federations

def print_into(name):
    with open(os.environ["TOLD"], "a") as file:
        file.write(f"{name} {os.getpid()}\\n")
"""


def run(folder: Path, ends_with: int = 0, forks: int = 2, **files: str) -> tuple[str, list[list[str]]]:
    """Return what pytest printed, and what the tests wrote: a word and the process that wrote it."""
    (folder / "conftest.py").write_text(CONFTEST)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(f"import os, signal\nfrom conftest import print_into\n{text}")
    told = folder / "told"
    told.touch()
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "--rootdir", folder, folder]
    environment = os.environ | {
        "TOLD": str(told),
        "FORKS": str(forks),
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(folder))),
    }
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=folder)
    assert done.returncode == ends_with
    return done.stdout + done.stderr, [line.split() for line in told.read_text().splitlines()]


def test_every_test_runs_once_in_a_fork_and_a_failure_is_told_with_its_output(tmp_path: Path) -> None:
    printed, told = run(
        tmp_path,
        ends_with=1,
        test_one="def test_a(tmp_path):\n    print_into(tmp_path.parent.name)\n",
        test_two="def test_b():\n    print_into('b')\n    print('seen by nobody else')\n    assert 1 == 2\n",
    )
    assert "1 failed, 1 passed" in printed
    assert "assert 1 == 2" in printed
    assert "seen by nobody else" in printed
    assert [word.partition("-")[0] for word, _ in sorted(told)] == ["b", "fork"]


def test_a_process_that_dies_fails_its_test_and_the_rest_of_the_file_runs(tmp_path: Path) -> None:
    printed, told = run(
        tmp_path,
        ends_with=1,
        test_one=(
            "def test_a():\n    print_into('a')\n"
            "def test_dies():\n    os.kill(os.getpid(), signal.SIGKILL)\n"
            "def test_c():\n    print_into('c')\n"
        ),
        test_two="def test_d():\n    print_into('d')\n",
    )
    assert "1 failed, 3 passed" in printed
    assert "the process that ran this test ended with -9" in printed
    assert "test_one.py::test_dies" in printed
    assert sorted(word for word, _ in told) == ["a", "c", "d"]


@pytest.mark.long
def test_files_that_ask_for_the_same_federation_share_a_process_and_what_was_set_up_is_torn_down(
    tmp_path: Path,
) -> None:
    test = "def test_{0}(service):\n    print_into('{0}')\n"
    printed, told = run(
        tmp_path, test_one=test.format("a"), test_other="def test_x():\n    pass\n", test_two=test.format("b")
    )
    assert "3 passed" in printed
    process_of = dict(told)
    assert process_of["a"] == process_of["b"] == process_of["torn-down"]
    assert [word for word, _ in told] == ["a", "b", "torn-down"]


@pytest.mark.skipif(sys.platform != "linux", reason="how much a thread has worked stands in /proc")
@pytest.mark.long
def test_a_thread_that_a_file_leaves_behind_and_that_still_works_is_told(tmp_path: Path) -> None:
    busy = "import threading, time\ndef work():\n    while True: pass\n"
    begun = "threading.Thread(target=work, name='busy one', daemon=True).start()\n"
    while_it_works = "    begun = time.process_time()\n    while time.process_time() < begun + 0.6: pass\n"
    printed, _ = run(
        tmp_path,
        forks=1,
        test_one=f"{busy}def test_a():\n    {begun}",
        test_two=f"import time\ndef test_b():\n{while_it_works}",
    )
    assert "2 passed" in printed
    assert "an earlier file left behind worked beside this one: busy one" in printed
    assert "test_two.py" in printed


@pytest.mark.long
@pytest.mark.parametrize("text", ["assert False\n", "def test_a(:\n"])
def test_what_cannot_be_collected_is_told_and_nothing_runs(tmp_path: Path, text: str) -> None:
    printed, told = run(tmp_path, ends_with=2, test_one=text, test_two="def test_b():\n    print_into('b')\n")
    assert "1 error" in printed
    assert told == []


ALONE = """
import time, pytest
from pathlib import Path

@pytest.mark.process
def test_alone(tmp_path):
    print_into("begins")
    time.sleep(0.2)
    print_into("ends")
"""


def test_tests_with_processes_run_one_after_another_while_the_others_of_their_files_go_on(tmp_path: Path) -> None:
    with_others = ALONE + "\n\ndef test_other():\n    print_into('other')\n"
    printed, told = run(tmp_path, forks=3, test_one=with_others, test_two=ALONE, test_three=ALONE)
    assert "4 passed" in printed
    words = [word for word, _ in told]
    assert [word for word in words if word != "other"] == ["begins", "ends"] * 3
    assert words.index("other") < len(words) - 1
