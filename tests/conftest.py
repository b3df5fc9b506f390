"""Fixtures that every test may use: the data folder, a GPU, a seeded source of randomness."""

from __future__ import annotations

import gc
import os
import re
import signal
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

import hypothesis
import numpy as np
import pytest

from labeler.errors import LabelerError
from tests import process_doors, quick_syncs, quick_tables  # noqa: F401  # nobody waits for disks, tables, processes
from tests.forked_command import begin_server
from tests.forks import Forks
from tests.guard import Guard
from tests.postgres_server import PostgresServer, postgres_running
from tests.rerun_alone import RerunAlone

# What is imported here stays: the garbage collector need not walk through millions of objects of libraries again and
# again, neither while they are loaded, which takes half as long without, nor beside every test.
gc.disable()

# No test may need an idle machine, so no example has to be quick; and what passed once passes again, so a change is not
# told of what it has not caused. `--hypothesis-profile "other examples"` draws anew.
SLOW = (hypothesis.HealthCheck.too_slow,)
ANY_MACHINE = hypothesis.settings(deadline=None, suppress_health_check=SLOW)
hypothesis.settings.register_profile("other examples", ANY_MACHINE)
hypothesis.settings.register_profile("any machine", ANY_MACHINE, derandomize=True, database=None)
hypothesis.settings.load_profile("any machine")

# A shell starts what runs in its background with Ctrl-C ignored, and every process started here would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder of real images and the real backbone; skips where it is absent."""
    default = Path(__file__).parent.parent.parent / "shared" / "data"
    root = Path(os.environ.get("LABELER_DATA", default))
    if not root.is_dir():
        pytest.skip(f"no data folder: set LABELER_DATA (looked in {root.name!r})")
    return root


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """A PostgreSQL server with its own data, at full durability; started where a test asks for it."""
    with postgres_running() as server:
        yield server


HERE = Path(__file__).parent

_OBJECTS = re.compile(r"<(?:private|public) shard|<redacted>| object at 0x|<[\w.]+ at 0x")


@pytest.fixture(autouse=True)
def _sentences_name_no_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every error of ours that any test meets: its sentence names a file or a party, never how an object prints."""
    make = LabelerError.__init__

    def checked(self: LabelerError, *arguments: object, **more: object) -> None:
        make(self, *arguments, **more)
        assert not _OBJECTS.search(str(self)), f"the sentence of a {type(self).__name__} prints an object: {self}"

    monkeypatch.setattr(LabelerError, "__init__", checked)


@pytest.fixture
def rng() -> np.random.Generator:
    """Random data for tests (never noise: noise comes from labeler.randomness)."""
    return np.random.default_rng(20261120)


LONG_S = 1200
"""When a long test, or one of real processes, counts as stuck: some need minutes of a core, which five others share."""

FIRST = ("e2e", "workers", "checks", "benchmarks", "feature_store", "api", "labeler", "golden")
"""Files of these folders begin in this order: those of real processes wait most and last longest, so that what is left
when one worker has nothing more to begin is short."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forks", metavar="N", help="run the tests in N forks of the process that collects them, or auto")
    parser.addoption(
        "--rerun-alone", metavar="FILE", help="run what failed once more, alone; FILE names what passes then"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Guard(), "guard")
    wanted = config.getoption("--forks")
    if wanted is not None:
        config.pluginmanager.register(Forks(_auto() if wanted == "auto" else int(wanted)))
    flaky = config.getoption("--rerun-alone")
    if flaky is not None:
        config.pluginmanager.register(RerunAlone(Path(flaky)))


def _auto() -> int:
    """Four processes more than there are cores: tests of real processes wait for others, those of journals for disks.

    With two more, a third of two cores had nothing to do.
    """
    return len(os.sched_getaffinity(0)) + 4 if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1) + 4


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order files, give time on a busy machine to tests that need it, and skip what needs a GPU where there is none."""
    for item in items:
        needs_time = item.get_closest_marker("long") or item.path.is_relative_to(HERE / "e2e")
        if needs_time and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LONG_S))
    items.sort(key=lambda item: FIRST.index(top) if (top := item.path.relative_to(HERE).parts[0]) in FIRST else 0)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available() and not _needs_gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))


def _needs_gpu() -> bool:
    return os.environ.get("LABELER_REQUIRE_GPU", "") not in ("", "0")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With LABELER_REQUIRE_GPU=1 a test that needs a GPU runs, or fails: a skip there would look like a pass."""
    report = yield
    if report.skipped and item.get_closest_marker("gpu") and _needs_gpu():
        report.outcome, report.longrepr = "failed", f"skipped where LABELER_REQUIRE_GPU is set: {report.longrepr}"
    return report


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.getoption("--forks") and any("federations" in _fixtures(i) for i in session.items):
        begin_server()
    gc.freeze()
    gc.enable()


def _fixtures(item: pytest.Item) -> Sequence[str]:
    return getattr(item, "fixturenames", ())


def pytest_unconfigure(config: pytest.Config) -> None:
    if config.getoption("--forks") is None:
        gc.unfreeze()  # libraries complain about what is not freed when the process ends, unless it ends at once
