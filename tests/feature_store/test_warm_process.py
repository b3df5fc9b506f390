"""Forks of a process that has loaded what learns: as much apart as processes of their own, and begun at once."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from feature_store import warm_process
from feature_store.warm_process import Ending, start_warm_process
from tests.feature_store.warm_without_forks import NO_MORE

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere a new process is started")
EXAMPLE = "tests.feature_store.warm_example"
REAL = warm_process.LOADED


@pytest.fixture(scope="module", autouse=True)
def _one_server() -> Iterator[None]:
    """One warm process for all tests of this file, and none behind it; what it loads costs little."""
    warm_process._caller.forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warm_process, "LOADED", ("sched",))
        yield
    warm_process._caller.forget()


def server() -> int:
    found = warm_process._caller._server
    assert found is not None
    return found.pid


def wait_for(place: Path) -> dict[str, Any]:
    end = time.monotonic() + 60
    while not place.exists():
        assert time.monotonic() < end, f"waited a minute for {place.name}"
        time.sleep(0.01)
    found: dict[str, Any] = json.loads(place.read_text())
    return found


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until_gone(pid: int) -> None:
    end = time.monotonic() + 60
    while not is_gone(pid):
        assert time.monotonic() < end, "waited a minute for its end"
        time.sleep(0.01)


def ended(process: Ending) -> int:
    return process.wait(60)


def test_it_has_its_input_and_words_and_what_is_loaded_and_nothing_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LABELER_TOKEN", "lab_secret")
    with tempfile.TemporaryFile() as given, (tmp_path / "held by the caller").open("w"):
        given.write(b"an order")
        given.seek(0)
        assert ended(start_warm_process(EXAMPLE, str(tmp_path / "one"), "7", stdin=given)) == 7
    found = wait_for(tmp_path / "one")
    assert found["given"] == "an order"
    assert found["is_loaded"]
    assert "lab_secret" not in json.dumps(found["environment"])
    # Its input, two that nobody hears, and what lists them: no way to the caller, nor to other forks.
    assert found["handles"][:3] == [0, 1, 2]
    assert len(found["handles"]) == 4


def test_nothing_that_one_leaves_is_met_by_the_next_of_the_same_process(tmp_path: Path) -> None:
    assert ended(start_warm_process(EXAMPLE, str(tmp_path / "one"), "0")) == 0
    before = server()
    assert ended(start_warm_process(EXAMPLE, str(tmp_path / "two"), "0")) == 0
    assert server() == before
    one, two = wait_for(tmp_path / "one"), wait_for(tmp_path / "two")
    assert one["pid"] != two["pid"]
    assert two["left"] is None
    assert two["given"] == ""


@pytest.mark.parametrize(("how", "code"), [("3", 3), ("raises", 1), ("killed", -signal.SIGXCPU)])
def test_its_end_is_told_as_that_of_a_process(tmp_path: Path, how: str, code: int) -> None:
    process = start_warm_process(EXAMPLE, str(tmp_path / "one"), how)
    assert ended(process) == code
    assert process.poll() == process.returncode == process.wait() == code


def test_it_is_killed_while_others_go_on(tmp_path: Path) -> None:
    one, other = (start_warm_process(EXAMPLE, str(tmp_path / name), "sleep") for name in ("one", "other"))
    wait_for(tmp_path / "one")
    pid = wait_for(tmp_path / "other")["pid"]
    assert one.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        one.wait(0.01)
    one.kill()
    one.kill()
    assert ended(one) == -signal.SIGKILL
    one.kill()
    assert other.poll() is None
    other.kill()
    assert ended(other) == -signal.SIGKILL
    assert is_gone(pid)


def test_many_at_once_each_have_their_own_end(tmp_path: Path) -> None:
    def run(code: int) -> int:
        return ended(start_warm_process(EXAMPLE, str(tmp_path / str(code)), str(code)))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(run, range(24))) == list(range(24))


def test_where_the_warm_process_is_killed_its_forks_are_too_and_the_next_call_begins_another(tmp_path: Path) -> None:
    process = start_warm_process(EXAMPLE, str(tmp_path / "one"), "sleep")
    pid, before = wait_for(tmp_path / "one")["pid"], server()
    os.kill(before, signal.SIGKILL)
    assert ended(process) == -signal.SIGKILL
    wait_until_gone(pid)
    assert ended(start_warm_process(EXAMPLE, str(tmp_path / "two"), "0")) == 0
    assert server() != before


def test_a_warm_process_that_hangs_is_ended_and_another_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ended(start_warm_process(EXAMPLE, str(tmp_path / "one"), "0")) == 0
    before = server()
    os.kill(before, signal.SIGSTOP)
    with monkeypatch.context() as impatient:
        impatient.setattr(warm_process, "BEGINS_S", 4.0)
        impatient.setattr(warm_process, "ENDS_S", 0.5)
        process = start_warm_process(EXAMPLE, str(tmp_path / "two"), "0")
    assert ended(process) == 0
    assert server() != before
    wait_until_gone(before)


def test_who_learns_late_that_a_warm_process_is_gone_does_not_end_the_one_begun_since(tmp_path: Path) -> None:
    line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with line, theirs:
        order = json.dumps([EXAMPLE, str(tmp_path / "lost"), "0"]).encode()
        late = warm_process._caller.call(order, [theirs.fileno()])
    os.kill(server(), signal.SIGKILL)
    wait_until_gone(server())
    process = start_warm_process(EXAMPLE, str(tmp_path / "one"), "sleep")
    now = server()
    warm_process._caller.forget(late)
    assert server() == now
    assert process.poll() is None
    process.kill()
    assert ended(process) == -signal.SIGKILL


def test_it_ends_with_its_caller(tmp_path: Path) -> None:
    code = f"""
import os, sys, time
from feature_store import warm_process
warm_process.LOADED = ()
process = warm_process.start_warm_process({EXAMPLE!r}, {str(tmp_path / "one")!r}, "sleep")
print(warm_process._caller._server.pid, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as caller:
        assert caller.stdout is not None
        warm = int(caller.stdout.readline())
        pid = wait_for(tmp_path / "one")["pid"]
        caller.kill()
    wait_until_gone(warm)
    wait_until_gone(pid)


def test_one_that_has_ended_by_itself_is_begun_again(tmp_path: Path) -> None:
    """Nobody calls it for a minute: it goes, perhaps while somebody does."""
    assert ended(start_warm_process(EXAMPLE, str(tmp_path / "one"), "0")) == 0
    before = server()
    os.kill(before, signal.SIGTERM)
    assert ended(start_warm_process(EXAMPLE, str(tmp_path / "two"), "0")) == 0
    wait_until_gone(before)


def test_one_that_is_expected_is_there_before_it_is_called_also_after_it_has_ended(tmp_path: Path) -> None:
    warm_process._caller.forget()
    for name in ("first", "second"):
        warm_process._caller.expect()
        begun = server()
        warm_process._caller.expect()
        assert ended(start_warm_process(EXAMPLE, str(tmp_path / name), "0")) == 0
        assert server() == begun
        os.kill(begun, signal.SIGKILL)
        wait_until_gone(begun)


def test_what_is_forked_has_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warm_process._caller.forget()
    monkeypatch.setattr(warm_process, "LOADED", REAL)
    assert ended(start_warm_process(EXAMPLE, str(tmp_path / "one"), "0")) == 0
    names = [(thread / "comm").read_text().strip() for thread in Path(f"/proc/{server()}/task").iterdir()]
    # Arrow's allocator has one, which is ready for forks; any other would be missing in them, with the locks it holds.
    assert len([name for name in names if name != "jemalloc_bg_thd"]) == 1


def test_a_call_that_cannot_be_served_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from labeler.errors import Unavailable

    warm_process._caller.forget()
    monkeypatch.setattr(warm_process, "__name__", "tests.no_such_module")
    with pytest.raises(Unavailable, match="tried again"):
        start_warm_process(EXAMPLE, str(tmp_path / "one"), "0")


def test_where_no_more_can_be_forked_a_call_is_refused_and_those_that_run_go_on(tmp_path: Path) -> None:
    """Else a shortage while one job begins ended every other, which was then said to have been too much."""
    from labeler.errors import Unavailable

    # Of its own: a thread that another file left behind may begin the shared one with what that needs.
    caller = warm_process.Warm(lambda: ("tests.feature_store.warm_without_forks",))
    running = caller.start(EXAMPLE, str(tmp_path / "one"), "sleep")
    try:
        pid, before = wait_for(tmp_path / "one")["pid"], caller._server
        NO_MORE.touch()
        try:
            with pytest.raises(Unavailable, match="tried again"):
                caller.start(EXAMPLE, str(tmp_path / "two"), "0")
        finally:
            NO_MORE.unlink()
        assert ended(caller.start(EXAMPLE, str(tmp_path / "three"), "0")) == 0
        assert caller._server is before
        assert running.poll() is None
        assert not is_gone(pid)
    finally:
        running.kill()
        running.wait(60)
        caller.forget()
