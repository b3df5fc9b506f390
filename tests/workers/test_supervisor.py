"""A supervisor of real processes: restarts, order, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from labeler.errors import Unavailable
from workers.federation.supervisor import (
    LONGEST_PAUSE_S,
    LOOK_AT_LOGS_S,
    MAX_LOG_BYTES,
    STEADY_S,
    Death,
    Program,
    Supervisor,
    launcher,
)

SLEEPER = "import time; print('up', flush=True); time.sleep(60)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEPER}"
ORDERLY = """
import os, signal, sys, time
def stop(*_):
    open("order", "a").write(os.environ["WHO"] + "\\n"); sys.exit(0)
signal.signal(signal.SIGTERM, stop); print("up", flush=True)
time.sleep(60)
"""


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def program(folder: Path, name: str, code: str, *, stage: int = 0) -> Program:
    command = [sys.executable, "-c", code]
    return Program(name, stage, launcher(name, command, output=folder / f"{name}.log", environment={"WHO": name}))


def is_gone(pid: int) -> bool:
    """No process of that number runs; one that nobody has waited for counts as gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until(condition: Callable[[], object], *, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def is_up(folder: Path, name: str) -> bool:
    path = folder / f"{name}.log"
    return path.exists() and "up" in path.read_text()


def next_death(supervisor: Supervisor) -> Death:
    seen: list[Death] = []
    wait_until(lambda: seen.extend(supervisor.tend()) or seen)
    return seen[0]


def test_a_program_that_keeps_dying_is_started_again_after_ever_longer_pauses(tmp_path: Path) -> None:
    clock = Clock()
    supervisor = Supervisor([program(tmp_path, "short", "raise SystemExit(3)")], clock=clock)
    supervisor.start()
    pauses = []
    for number in range(1, 8):
        death = next_death(supervisor)
        assert (death.name, death.code, death.deaths) == ("short", 3, number)
        pauses.append(death.restart_in_s)
        clock.now += death.restart_in_s - 0.01
        assert supervisor.tend() == []
        assert not supervisor.pids
        clock.now += 0.01
        supervisor.tend()
        assert "short" in supervisor.pids
    supervisor.stop()
    assert pauses == [1, 2, 4, 8, 16, LONGEST_PAUSE_S, LONGEST_PAUSE_S]


def test_a_program_that_ran_for_long_is_started_again_after_the_shortest_pause(tmp_path: Path) -> None:
    clock = Clock()
    supervisor = Supervisor([program(tmp_path, "short", "raise SystemExit(1)")], clock=clock)
    supervisor.start()
    for _ in range(3):
        clock.now += next_death(supervisor).restart_in_s
        supervisor.tend()
    clock.now += STEADY_S
    assert next_death(supervisor).restart_in_s == 1
    supervisor.stop()


def test_a_program_killed_by_a_signal_comes_back_as_another_process(tmp_path: Path) -> None:
    clock = Clock()
    supervisor = Supervisor([program(tmp_path, "sleeper", SLEEPER)], clock=clock)
    supervisor.start()
    first = supervisor.pids["sleeper"]
    os.kill(first, signal.SIGKILL)
    assert next_death(supervisor).code == -signal.SIGKILL
    clock.now += 1
    supervisor.tend()
    second = supervisor.pids["sleeper"]
    supervisor.stop()
    assert first != second
    assert is_gone(first)
    assert is_gone(second)


def test_the_last_stage_stops_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"queue": 0, "service": 1, "party": 2}
    supervisor = Supervisor([program(tmp_path, name, ORDERLY, stage=stage) for name, stage in names.items()])
    supervisor.start()
    wait_until(lambda: all(is_up(tmp_path, name) for name in names))
    supervisor.stop()
    assert (tmp_path / "order").read_text().split() == ["party", "service", "queue"]
    assert not supervisor.pids


def test_only_the_stage_that_was_named_is_started(tmp_path: Path) -> None:
    supervisor = Supervisor([program(tmp_path, "a", SLEEPER), program(tmp_path, "b", SLEEPER, stage=1)])
    supervisor.start(stage=1)
    assert set(supervisor.pids) == {"b"}
    supervisor.start()
    assert set(supervisor.pids) == {"a", "b"}
    supervisor.stop()


def test_a_program_that_does_not_stop_is_killed(tmp_path: Path) -> None:
    supervisor = Supervisor([program(tmp_path, "stubborn", STUBBORN)])
    supervisor.start()
    wait_until(lambda: is_up(tmp_path, "stubborn"))
    pid = supervisor.pids["stubborn"]
    assert supervisor.stop(grace_s=0.2) == ["stubborn"]
    assert is_gone(pid)


def test_a_program_that_stops_by_itself_is_not_said_to_be_killed(tmp_path: Path) -> None:
    supervisor = Supervisor([program(tmp_path, "sleeper", SLEEPER)])
    supervisor.start()
    assert supervisor.stop() == []


def test_a_log_that_grows_is_put_aside_while_its_program_runs(tmp_path: Path) -> None:
    clock = Clock()
    output = tmp_path / "talker.log"
    code = "import sys, time\nfor line in sys.stdin: pass\nwhile True: print('word', flush=True); time.sleep(0.01)"
    command = [sys.executable, "-c", code]
    launch = launcher("talker", command, output=output, environment={})
    supervisor = Supervisor([Program("talker", 0, launch, output)], clock=clock)
    supervisor.start()
    wait_until(lambda: output.exists() and output.stat().st_size > 0)
    with output.open("ab") as file:
        file.truncate(MAX_LOG_BYTES + 1)
    clock.now += 2 * LOOK_AT_LOGS_S
    supervisor.tend()
    assert output.stat().st_size < MAX_LOG_BYTES
    older = tmp_path / "talker.log.1"
    assert older.stat().st_size > MAX_LOG_BYTES
    assert older.stat().st_mode & 0o777 == 0o600
    before = output.stat().st_size
    wait_until(lambda: output.stat().st_size > before)
    supervisor.stop()
    assert b"\0" not in output.read_bytes(), "it appends where the file ends now"


def test_what_a_program_has_started_itself_is_ended_with_it(tmp_path: Path) -> None:
    code = f"import subprocess,sys; p = subprocess.Popen([sys.executable, '-c', {SLEEPER!r}]); print(p.pid, flush=True)"
    supervisor = Supervisor([program(tmp_path, "parent", code)], clock=Clock())
    supervisor.start()
    next_death(supervisor)
    # Both write to one log, and who comes first is the machine's choice.
    (grandchild,) = (int(word) for word in (tmp_path / "parent.log").read_text().split() if word.isdecimal())
    supervisor.stop()
    wait_until(lambda: is_gone(grandchild))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux kills children of a dead parent")
def test_nothing_is_left_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    code = f"""
import sys, time
from pathlib import Path
from tests_programs import program
from workers.federation.supervisor import Supervisor
supervisor = Supervisor([program(Path({str(tmp_path)!r}), name, {STUBBORN!r}) for name in ("a", "b")])
supervisor.start()
print(*supervisor.pids.values(), flush=True)
time.sleep(60)
"""
    helper = "import sys\nfrom workers.federation.supervisor import Program, launcher\n"
    helper += "def program(folder, name, code):\n"
    helper += "    command = [sys.executable, '-c', code]\n"
    helper += "    return Program(name, 0, launcher(name, command, output=folder / f'{name}.log', environment={}))\n"
    (tmp_path / "tests_programs.py").write_text(helper)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        wait_until(lambda: is_up(tmp_path, "a") and is_up(tmp_path, "b"))
        process.kill()
    assert len(pids) == 2
    wait_until(lambda: all(is_gone(pid) for pid in pids))


def test_a_program_that_does_not_exist_is_named(tmp_path: Path) -> None:
    start = launcher("ghost", ["/no/such/program"], output=tmp_path / "ghost.log", environment={})
    with pytest.raises(Unavailable, match="ghost"):
        Supervisor([Program("ghost", 0, start)]).start()


def test_a_program_that_cannot_be_started_again_now_is_tried_later(tmp_path: Path) -> None:
    clock = Clock()
    command = tmp_path / "program"
    command.write_text("#!/bin/sh\nexit 1\n")
    command.chmod(0o700)
    start = launcher("flaky", [str(command)], output=tmp_path / "flaky.log", environment={})
    supervisor = Supervisor([Program("flaky", 0, start)], clock=clock)
    supervisor.start()
    next_death(supervisor)
    command.rename(tmp_path / "away")
    clock.now += 1
    assert [death.code for death in supervisor.tend()] == [75]
    (tmp_path / "away").rename(command)
    clock.now += 2
    supervisor.tend()
    assert "flaky" in supervisor.pids
    supervisor.stop()


def test_a_log_that_has_grown_large_is_put_aside(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(b"x" * (MAX_LOG_BYTES + 1))
    supervisor = Supervisor([program(tmp_path, "a", SLEEPER)])
    supervisor.start()
    wait_until(lambda: is_up(tmp_path, "a"))
    supervisor.stop()
    assert (tmp_path / "a.log").stat().st_size < 100
    assert (tmp_path / "a.log.1").stat().st_size > MAX_LOG_BYTES
