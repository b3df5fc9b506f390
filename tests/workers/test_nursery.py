"""Roles as forks: each is a program with its own session, log and exit code, and dies with its supervisor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from workers.federation.nursery import CAN_FORK, role_launcher, warm

pytestmark = pytest.mark.skipif(not CAN_FORK, reason="roles are forked on Linux alone")


def wait_until(condition: Callable[[], object], *, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_role_writes_to_its_log_and_ends_with_the_code_of_its_command(tmp_path: Path) -> None:
    helped = role_launcher("help", ["plan", "--help"], output=tmp_path / "help.log", environment={})()
    wrong = role_launcher("wrong", ["plan", "--no-such-option"], output=tmp_path / "wrong.log", environment={})()
    assert (helped.wait(), wrong.wait()) == (0, 2)
    assert "Usage: labeler plan" in (tmp_path / "help.log").read_text()
    assert "no-such-option" in (tmp_path / "wrong.log").read_text()


def test_a_role_leads_its_own_session_and_a_signal_that_kills_it_is_its_code(tmp_path: Path) -> None:
    home = tmp_path / "home"
    role = role_launcher("coordinator", ["serve", "--home", str(home)], output=tmp_path / "log", environment={})()
    wait_until(lambda: role.poll() is not None or os.getsid(role.pid) == role.pid)
    role.kill()
    assert role.wait() in (-signal.SIGKILL, 1, 2)  # it may have found that it has no home before it was killed


def test_a_party_comes_after_others_also_where_cores_are_shared_out_among_sessions() -> None:
    code = (
        "import os, time\n"
        "from pathlib import Path\n"
        "from workers.federation.nursery import PARTIES_NICE, step_back\n"
        "before, group = os.nice(0), Path('/proc/self/autogroup')\n"
        "step_back()\n"
        "assert os.nice(0) == min(19, before + PARTIES_NICE), os.nice(0)\n"
        "end = time.monotonic() + 60\n"
        "while group.exists() and (said := group.read_text()) and f'nice {PARTIES_NICE}' not in said:\n"
        "    assert time.monotonic() < end, said\n"
        "    time.sleep(0.02)\n"
    )
    folder = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=folder, start_new_session=True)


def test_a_role_dies_with_its_supervisor(tmp_path: Path) -> None:
    script = tmp_path / "supervisor.py"
    script.write_text(
        "import sys, time\n"
        "from pathlib import Path\n"
        "from workers.federation.nursery import role_launcher\n"
        "if __name__ == '__main__':\n"
        "    arguments = ['serve', '--home', sys.argv[1], '--port', '0']\n"
        "    role = role_launcher('coordinator', arguments, output=Path(sys.argv[2]), environment={})()\n"
        "    print(role.pid, flush=True)\n"
        "    time.sleep(120)\n"
    )
    home = tmp_path / "home"
    made = subprocess.run(
        [sys.executable, "-m", "workers.cli", "serve", "--home", str(home), "--init"], capture_output=True, check=True
    )
    assert made.returncode == 0
    # A coordinator without a redis-server waits for it: long enough to see it end with its supervisor.
    with subprocess.Popen(
        [sys.executable, str(script), str(home), str(tmp_path / "log")], stdout=subprocess.PIPE, text=True
    ) as supervisor:
        assert supervisor.stdout is not None
        pid = int(supervisor.stdout.readline())
        supervisor.kill()
    wait_until(lambda: is_gone(pid))


def test_what_is_shared_by_all_roles_starts_no_thread_and_holds_no_learning_library() -> None:
    code = (
        "import importlib, sys, threading\n"
        "from workers.federation.nursery import WARMED\n"
        "for name in WARMED: importlib.import_module(name)\n"
        "print(threading.active_count(), *sorted(set(sys.modules) & set(sys.argv[1:])))\n"
    )
    heavy = ["torch", "torchvision", "timm", "faiss", "sklearn", "matplotlib", "pandas", "scipy.optimize", "mpyc"]
    ended = subprocess.run(
        [sys.executable, "-c", code, *heavy], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    assert ended.stdout.split() == ["1"]


def test_a_warmed_process_serves_every_later_fork(tmp_path: Path) -> None:
    warm()
    roles = [
        role_launcher(f"role-{number}", ["serve", "--help"], output=tmp_path / f"{number}.log", environment={})()
        for number in range(2)
    ]
    assert [role.wait() for role in roles] == [0, 0]
    said = [(tmp_path / f"{number}.log").read_text() for number in range(2)]
    assert all("Run the coordinator of a home" in words for words in said)


def test_the_environment_of_a_role_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LABELER_URL", raising=False)
    told = {"LABELER_URL": "nowhere", "LABELER_TOKEN": "x"}
    role = role_launcher("status", ["status"], output=tmp_path / "log", environment=told)()
    assert role.wait() == 2
    assert "nowhere" in (tmp_path / "log").read_text() or "http" in (tmp_path / "log").read_text()
    assert "LABELER_URL" not in os.environ
