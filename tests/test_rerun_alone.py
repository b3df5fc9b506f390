"""What failed runs once more, alone: chance does not fail a run, a defect does, and a leak never gets a second try."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rerun_alone import NEVER_AGAIN

pytestmark = pytest.mark.process

ROOT = Path(__file__).parent.parent

CONFTEST = """
import os
import re
from pathlib import Path
from tests.forks import Forks
from tests.rerun_alone import RerunAlone

def pytest_addoption(parser):
    parser.addoption("--rerun-alone")
    parser.addoption("--forks")

def pytest_configure(config):
    if config.getoption("--forks"):
        config.pluginmanager.register(Forks(2))
    if config.getoption("--rerun-alone"):
        config.pluginmanager.register(RerunAlone(Path(config.getoption("--rerun-alone"))))
"""

EVERY_SECOND_TIME = """
import os
import re
from pathlib import Path

def test_{name}():
    runs = Path(__file__).with_suffix(".runs")
    done = len(runs.read_text()) if runs.exists() else 0
    runs.write_text("x" * (done + 1))
    assert done % 2 == 1, "the first of two runs"

def test_sound():
    pass
"""


def run(folder: Path, *options: str, **files: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "--rootdir", str(folder), "--rerun-alone", str(folder / "log/flaky.txt")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [*command, *options, str(folder)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=folder,
    )


@pytest.mark.parametrize(
    "runner",
    [
        pytest.param(("--forks", "2"), id="forks"),
        pytest.param(("-n", "2"), id="xdist", marks=pytest.mark.long),
        pytest.param((), id="one process", marks=pytest.mark.long),
    ],
)
def test_a_test_that_fails_every_second_time_is_named_and_fails_no_run(tmp_path: Path, runner: tuple[str, ...]) -> None:
    done = run(tmp_path, *runner, test_one=EVERY_SECOND_TIME.format(name="races"))
    assert done.returncode == 0, done.stdout
    assert "flaky: test_one.py::test_races" in done.stdout.splitlines()
    assert "the first of two runs" in done.stdout  # what went wrong is still told
    assert (tmp_path / "log/flaky.txt").read_text() == "test_one.py::test_races\n"
    assert (tmp_path / "test_one.runs").read_text() == "xx"


def test_what_fails_twice_has_failed_and_chance_beside_it_is_named_all_the_same(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        test_one=EVERY_SECOND_TIME.format(name="races"),
        test_two="def test_broken():\n    assert 0\n",
    )
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert "flaky: test_one.py::test_races" in lines
    assert "failed twice: test_two.py::test_broken" in lines
    assert (tmp_path / "log/flaky.txt").read_text() == "test_one.py::test_races\n"


def test_a_leak_that_is_seen_half_of_the_time_is_a_leak(tmp_path: Path) -> None:
    done = run(tmp_path, test_one=EVERY_SECOND_TIME.format(name="clock_hides_one_record"))
    assert done.returncode == 1
    assert "flaky" not in done.stdout
    assert not (tmp_path / "log/flaky.txt").exists()
    assert (tmp_path / "test_one.runs").read_text() == "x"


@pytest.mark.long
@pytest.mark.parametrize("text", ["def test_", "import nothing_of_this_name\n"], ids=["syntax", "import"])
def test_a_file_that_cannot_be_collected_is_no_chance(tmp_path: Path, text: str) -> None:
    done = run(tmp_path, test_one=text)
    assert done.returncode == 2
    assert "flaky" not in done.stdout


def test_what_is_about_accounting_noise_sampler_clock_or_attacks_never_runs_again() -> None:
    files = [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")]
    never = {file for file in files if NEVER_AGAIN.search(file.lower())}
    wanted = ("accounting/", "noise", "randomness", "public_clock", "attacks", "neighbo", "sampled", "audit", "theft")
    assert {file for file in files if any(word in file for word in wanted)} <= never
    assert {Path(file).parts[1] for file in set(files) - never} >= {"api", "e2e", "workers", "feature_store", "labeler"}


def test_a_file_of_flaky_tests_that_is_there_already_is_added_to(tmp_path: Path) -> None:
    """As `make test-long` finds it after `make test`; in two words pytest takes it for a place of tests."""
    (command,) = set(re.findall(r"--rerun-alone.?\$\(FLAKY\)", (ROOT / "Makefile").read_text()))
    flaky = tmp_path / "flaky.txt"
    flaky.write_text("a test of before\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--markers", *command.replace("$(FLAKY)", str(flaky)).split()],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
