"""`pytest --rerun-alone FILE`: tests that failed run once more, with nothing beside them; a run is green if they pass.

A test that passes then is flaky: it is printed as `flaky: TEST` and added to FILE, so that somebody mends it at its
cause. A test that fails twice has failed. Tests of what is private never run again (`NEVER_AGAIN`): a leak that shows
half of the time is a leak. CI asks for this; `make test` at a desk does not.

The second run is one process of pytest, which runs the tests one after the other in the order of the first run. This
module works with every runner that reports to the process that collected: forks, pytest-xdist, or none.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import pytest
from _pytest.terminal import TerminalReporter

NEVER_AGAIN: Final = re.compile(
    "accounting|noise|noisy|sampl|random|gaussian|clock|attack|adversar|audit|neighbo|leak|theft|secret|subnormal"
    "|operations_of|simulation|sensitivity|one_record|guessing"
)
"""Words in the name of a test, or of its file, that is about accounting, noise, the sampler, the clock or an attack."""


class RerunAlone:
    """A plugin that runs failed tests once more; see this module.

    Args:
        flaky: a text file, one test a line. It is begun if needed, and added to.
    """

    def __init__(self, flaky: Path) -> None:
        self._flaky = flaky
        self._failed: dict[str, str] = {}
        self._said: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.setdefault(report.nodeid, report.longreprtext)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        # Any other end (interrupted, an error of pytest, nothing collected) says nothing about single tests.
        of_xdist = hasattr(session.config, "workerinput")  # whose controller hears of every failure
        if of_xdist or session.exitstatus != pytest.ExitCode.TESTS_FAILED or not self._failed:
            return
        never = [test for test in self._failed if NEVER_AGAIN.search(test.lower())]
        again = [test for test in self._failed if test not in never]
        twice = self._failing_alone(session.config, again) if again else set()
        flaky = [test for test in again if test not in twice]
        self._said += [f"failed, and never runs again: {test}" for test in never]
        self._said += [f"failed twice: {test}" for test in again if test in twice]
        self._said += [f"flaky: {test}" for test in flaky]
        if flaky:
            self._flaky.parent.mkdir(parents=True, exist_ok=True)
            with self._flaky.open("a", encoding="utf-8") as file:
                file.writelines(f"{test}\n" for test in flaky)
        if len(flaky) == len(self._failed):
            session.exitstatus = pytest.ExitCode.OK
            reporter = session.config.pluginmanager.getplugin("terminalreporter")
            if isinstance(reporter, TerminalReporter):
                for outcome in ("failed", "error"):
                    for report in reporter.stats.pop(outcome, []):
                        reporter.stats.setdefault("flaky", []).append(report)

    def pytest_terminal_summary(self, terminalreporter: TerminalReporter) -> None:
        if not self._said:
            return
        terminalreporter.section("what failed, and once more alone")
        if "flaky" in terminalreporter.stats:  # else pytest prints these itself
            for test, text in self._failed.items():
                terminalreporter.write_line(f"{test}, the first time:\n{text}\n")
        for line in self._said:
            terminalreporter.write_line(line)

    @staticmethod
    def _failing_alone(config: pytest.Config, tests: list[str]) -> set[str]:
        """Return the tests that fail in a process of their own; all of them where it does not end well."""
        with tempfile.TemporaryDirectory() as cache:
            command = [sys.executable, "-m", "pytest", "-q", "-o", f"cache_dir={cache}", *tests]
            ended = subprocess.run(command, cwd=config.invocation_params.dir, check=False).returncode
            failed = Path(cache, "v/cache/lastfailed")
            if ended == pytest.ExitCode.OK:
                return set()
            if ended != pytest.ExitCode.TESTS_FAILED or not failed.exists():
                return set(tests)
            return set(json.loads(failed.read_text()))
