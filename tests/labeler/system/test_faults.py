"""A fault point kills exactly the process it should, once, and does nothing otherwise."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from labeler.errors import InvalidSetting
from labeler.ledger.database import open_database
from labeler.ledger.ledger import Ledger
from labeler.system.faults import fault_point, listening
from labeler.system.files import replace_file

ROOT = Path(__file__).parent.parent.parent


def reach(name: str, fault: Path | None) -> int:
    """The exit status of a process that passes one fault point."""
    code = f"from labeler.system.faults import fault_point; fault_point({name!r}); print('alive')"
    environment = {key: value for key, value in os.environ.items() if key != "LABELER_FAULTS"}
    if fault is not None:
        environment["LABELER_FAULTS"] = str(fault)
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, check=False, stdout=subprocess.DEVNULL
    ).returncode


@pytest.mark.process
def test_a_process_kills_itself_at_the_named_point_and_only_once(tmp_path: Path) -> None:
    fault = tmp_path / "fault"
    replace_file(fault, b"tallier.stored\n")
    assert reach("tallier.received", fault) == 0
    assert fault.exists()
    assert reach("tallier.stored", fault) == -signal.SIGKILL
    assert not fault.exists()
    assert reach("tallier.stored", fault) == 0
    assert reach("tallier.stored", None) == 0


@pytest.mark.process
def test_another_process_is_killed_where_one_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = tmp_path / "fault"
    monkeypatch.setenv("LABELER_FAULTS", str(fault))
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as victim:
        replace_file(fault, f"agent.sent\n{victim.pid}\n".encode())
        fault_point("agent.charged")
        assert victim.poll() is None
        fault_point("agent.sent")
        assert victim.wait(240) == -signal.SIGKILL
    assert not fault.exists()


@pytest.mark.process
def test_a_victim_that_is_gone_already_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = tmp_path / "fault"
    monkeypatch.setenv("LABELER_FAULTS", str(fault))
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait(240)
    replace_file(fault, f"agent.sent\n{gone.pid}\n".encode())
    fault_point("agent.sent")
    assert not fault.exists()


@pytest.mark.parametrize("victim", ["0", "1", "-1", "-5", "x", "2 3"])
def test_a_group_of_processes_is_never_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str) -> None:
    fault = tmp_path / "fault"
    fault.write_text(f"agent.sent\n{victim}\n")
    monkeypatch.setenv("LABELER_FAULTS", str(fault))
    with pytest.raises(InvalidSetting, match="one process"):
        fault_point("agent.sent")


def test_an_unknown_point_is_refused_whether_faults_are_on_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LABELER_FAULTS", raising=False)
    with pytest.raises(InvalidSetting, match=r"agent\.snet"):
        fault_point("agent.snet")


class Ended(BaseException):
    """The exception with which a simulation ends a party."""


def test_whoever_listens_hears_of_every_moment_between_two_effects(tmp_path: Path) -> None:
    heard: list[str] = []
    with open_database(tmp_path / "journal.db", allow_unsynced=True) as database:
        ledger = Ledger(database, clock=lambda: datetime(2026, 3, 1, tzinfo=UTC))
        with listening(heard.append):
            ledger.open_account("site", "instance", None)
            fault_point("agent.charged")
            replace_file(tmp_path / "file", b"whole")
        ledger.open_account("site", "agent", None)
    assert heard == ["commit", "committed", "agent.charged", "rename", "renamed"]


@pytest.mark.parametrize(("moment", "kept"), [("commit", 0), ("committed", 1)])
def test_what_ends_before_a_commit_never_happened_and_after_it_has(tmp_path: Path, moment: str, kept: int) -> None:
    def end(name: str) -> None:
        if name == moment:
            raise Ended

    with open_database(tmp_path / "journal.db", allow_unsynced=True) as database:
        ledger = Ledger(database, clock=lambda: datetime(2026, 3, 1, tzinfo=UTC))
        with listening(end), pytest.raises(Ended):
            ledger.open_account("site", "instance", None)
        assert len(ledger.balances()) == kept
        # Nothing hangs: the next transaction goes on.
        ledger.open_account("site", "agent", None)
        assert len(ledger.balances()) == kept + 1
