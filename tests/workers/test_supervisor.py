"""A supervisor of real processes: restarts, order, and nothing left behind."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import redis

from labeler.errors import InvalidSetting, Unavailable
from tests.processes import is_gone, tcp_sockets, wait_until
from workers.homes.new import make_coordinator_home
from workers.up.redis_server import MEMORY_BYTES, RedisServer
from workers.up.supervisor import (
    LONGEST_PAUSE_S,
    LOOK_AT_LOGS_S,
    MAX_LOG_BYTES,
    STEADY_S,
    Death,
    Program,
    Supervisor,
    die_with_parent,
    put_aside,
    role_launcher,
)

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
SLEEPER = "import time; print('up', flush=True); time.sleep(600)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEPER}"
ORDERLY = """
import os, signal, sys, time
def stop(*_):
    open("order", "a").write(os.environ["WHO"] + "\\n"); sys.exit(0)
signal.signal(signal.SIGTERM, stop); print("up", flush=True)
time.sleep(600)
"""


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def launcher(name: str, command: Sequence[str], *, output: Path) -> Callable[[], subprocess.Popen[bytes]]:
    """How to start any program, as `role_launcher` starts a role."""

    def launch() -> subprocess.Popen[bytes]:
        put_aside(output)
        try:
            with output.open("ab") as file:
                return subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    env=os.environ | {"WHO": name},
                    start_new_session=True,
                    preexec_fn=die_with_parent(),
                )
        except OSError as error:
            raise Unavailable(name) from error

    return launch


def program(folder: Path, name: str, code: str, *, stage: int = 0) -> Program:
    command = [sys.executable, "-c", code]
    return Program(name, stage, launcher(name, command, output=folder / f"{name}.log"))


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


def test_the_last_stage_stops_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"queue": 0, "service": 1, "party": 2}
    supervisor = Supervisor([program(tmp_path, name, ORDERLY, stage=stage) for name, stage in names.items()])
    supervisor.start()
    wait_until(lambda: all(is_up(tmp_path, name) for name in names))
    supervisor.stop(grace_s=120.0)
    assert (tmp_path / "order").read_text().split() == ["party", "service", "queue"]
    assert not supervisor.pids


def test_a_program_that_does_not_stop_is_killed(tmp_path: Path) -> None:
    supervisor = Supervisor([program(tmp_path, "stubborn", STUBBORN)])
    supervisor.start()
    wait_until(lambda: is_up(tmp_path, "stubborn"))
    pid = supervisor.pids["stubborn"]
    assert supervisor.stop(grace_s=0.2) == ["stubborn"]
    assert is_gone(pid)


def test_a_log_that_grows_is_put_aside_while_its_program_runs(tmp_path: Path) -> None:
    clock = Clock()
    output = tmp_path / "talker.log"
    code = "import sys, time\nfor line in sys.stdin: pass\nwhile True: print('word', flush=True); time.sleep(0.01)"
    command = [sys.executable, "-c", code]
    launch = launcher("talker", command, output=output)
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
from tests.workers.test_supervisor import program
from workers.up.supervisor import Supervisor
supervisor = Supervisor([program(Path({str(tmp_path)!r}), name, {STUBBORN!r}) for name in ("a", "b")])
supervisor.start()
print(*supervisor.pids.values(), flush=True)
time.sleep(600)
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        wait_until(lambda: is_up(tmp_path, "a") and is_up(tmp_path, "b"))
        process.kill()
    assert len(pids) == 2
    wait_until(lambda: all(is_gone(pid) for pid in pids))


def test_a_program_that_cannot_be_started_again_now_is_tried_later(tmp_path: Path) -> None:
    clock = Clock()
    command = tmp_path / "program"
    command.write_text("#!/bin/sh\nexit 1\n")
    command.chmod(0o700)
    start = launcher("flaky", [str(command)], output=tmp_path / "flaky.log")
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


# Roles, as forks of one process


def test_a_role_writes_to_its_log_and_ends_with_the_code_of_its_command(tmp_path: Path) -> None:
    helped = role_launcher("help", ["plan", "--help"], output=tmp_path / "help.log")()
    wrong = role_launcher("wrong", ["plan", "--no-such-option"], output=tmp_path / "wrong.log")()
    assert (helped.wait(), wrong.wait()) == (0, 2)
    assert "Usage: labeler plan" in (tmp_path / "help.log").read_text()
    assert "no-such-option" in (tmp_path / "wrong.log").read_text()


def test_a_role_leads_its_own_session_and_a_signal_that_kills_it_is_its_code(tmp_path: Path) -> None:
    home = tmp_path / "home"
    role = role_launcher("coordinator", ["serve", "--home", str(home)], output=tmp_path / "log")()
    with suppress(ProcessLookupError):  # it may end between the two looks
        wait_until(lambda: role.poll() is not None or os.getsid(role.pid) == role.pid)
    role.kill()
    assert role.wait() in (-signal.SIGKILL, 1, 2)  # it may have found that it has no home before it was killed


def test_a_party_comes_after_others_also_where_cores_are_shared_out_among_sessions() -> None:
    code = (
        "import os, time\n"
        "from pathlib import Path\n"
        "from workers.up.supervisor import PARTIES_NICE, step_back\n"
        "before, group = os.nice(0), Path('/proc/self/autogroup')\n"
        "step_back()\n"
        "assert os.nice(0) == min(19, before + PARTIES_NICE), os.nice(0)\n"
        "end = time.monotonic() + 60\n"
        "while group.exists() and (said := group.read_text()) and f'nice {PARTIES_NICE}' not in said:\n"
        "    assert time.monotonic() < end, said\n"
        "    time.sleep(0.02)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, start_new_session=True)


def test_a_role_dies_with_its_supervisor(tmp_path: Path) -> None:
    script = tmp_path / "supervisor.py"
    script.write_text(
        "import sys, time\n"
        "from pathlib import Path\n"
        "from workers.up.supervisor import role_launcher\n"
        "if __name__ == '__main__':\n"
        "    arguments = ['serve', '--home', sys.argv[1], '--port', '0']\n"
        "    role = role_launcher('coordinator', arguments, output=Path(sys.argv[2]))()\n"
        "    print(role.pid, flush=True)\n"
        "    time.sleep(120)\n"
    )
    home = tmp_path / "home"
    make_coordinator_home(home)
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
        "from workers.up.supervisor import WARMED\n"
        "for name in WARMED: importlib.import_module(name)\n"
        "print(threading.active_count(), *sorted(set(sys.modules) & set(sys.argv[1:])))\n"
    )
    heavy = ["torch", "torchvision", "timm", "faiss", "sklearn", "matplotlib", "pandas", "scipy.optimize", "mpyc"]
    ended = subprocess.run([sys.executable, "-c", code, *heavy], capture_output=True, text=True, check=True, cwd=ROOT)
    assert ended.stdout.split() == ["1"]


def test_what_every_agent_needs_for_its_first_noise_is_loaded_before_the_first_fork() -> None:
    """Else each of 64 agents loads it in its first job, all at the same time."""
    code = (
        "import importlib, sys\n"
        "from workers.up.supervisor import WARMED\n"
        "for name in WARMED: importlib.import_module(name)\n"
        "before = set(sys.modules)\n"
        "from labeler.noise import DiscreteGaussian\n"
        "from labeler.randomness import seeded_source\n"
        "DiscreteGaussian(1000.0).sample(seeded_source(0), 10)\n"
        "print(*sorted(set(sys.modules) - before))\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert ended.stdout.split() == []


# Our own redis-server: private, without a trace on disk, back at the same address after it died


def ping(url: str) -> bool:
    with redis.Redis.from_url(url) as client:
        return bool(client.ping())


@pytest.mark.parametrize("is_on_path", [True, False], ids=["on PATH", "bundled"])
def test_it_answers_its_owner_alone_keeps_nothing_and_is_gone_when_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_on_path: bool
) -> None:
    if not is_on_path:
        monkeypatch.setenv("PATH", str(tmp_path))
    folder = tmp_path / "redis"
    folder.mkdir(mode=0o755)
    with RedisServer(folder) as server:
        assert ping(server.url)
        assert server.is_running
        assert server.url.startswith("unix://")
        assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IMODE((folder / "redis.sock").stat().st_mode) == 0o700
        assert is_on_path or server.version.startswith("Valkey 9.")
        pid = server.process.pid
        with redis.Redis.from_url(server.url, decode_responses=True) as client:
            found = client.config_get("*")
        # A flood of mail is refused, and nothing is thrown away.
        assert (found["maxmemory-policy"], found["maxmemory"]) == ("noeviction", str(MEMORY_BYTES))
        assert (found["save"], found["appendonly"], found["port"]) == ("", "no", "0")
        assert tcp_sockets(pid) == []
    assert not server.is_running
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    server.stop()
    assert [path.name for path in folder.iterdir()] == ["redis.log"]


def test_a_folder_with_a_long_name_has_its_socket_elsewhere_closed_to_others(tmp_path: Path) -> None:
    with RedisServer(tmp_path / ("x" * 120)) as server:
        assert ping(server.url)
        place = Path(server.url.removeprefix("unix://").partition("?")[0]).parent
        assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert not place.exists()


def test_killed_it_comes_back_at_the_same_address(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis") as server:
        url, first = server.url, server.process.pid
        server.start()
        assert server.process.pid == first
        os.kill(first, signal.SIGKILL)
        while server.is_running:
            pass
        server.start()
        assert server.url == url
        assert server.process.pid != first
        assert ping(url)


def test_a_server_whose_supervisor_was_killed_is_replaced(tmp_path: Path) -> None:
    code = (
        "import os, signal, pathlib, sys; from workers.up.redis_server import RedisServer; "
        "server = RedisServer(pathlib.Path(sys.argv[1])); "
        "print(server.process.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "redis")]
    orphan = subprocess.run(command, cwd=ROOT, check=False, stdout=subprocess.PIPE)
    with RedisServer(tmp_path / "redis") as server:
        assert ping(server.url)
        with redis.Redis.from_url(server.url) as client:
            assert client.info("server")["process_id"] == server.process.pid != int(orphan.stdout)


def test_what_keeps_it_from_starting_is_said_in_its_own_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "redis-server"
    program.write_text("#!/bin/sh\necho no memory left > redis.log\nexit 1\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(Unavailable, match="did not start: no memory left"):
        RedisServer(tmp_path / "redis")


def test_without_any_redis_server_the_way_out_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(InvalidSetting, match="redis_url in"):
        RedisServer(tmp_path / "redis")


def test_valkey_on_path_is_taken_where_there_is_no_redis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for name in ("valkey-server", "redis-server"):  # where there are both, redis-server
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\necho this is {name} > redis.log\nexit 1\n")
        program.chmod(0o700)
        if name == "valkey-server" and shutil.which("redis-server"):
            continue
        with pytest.raises(Unavailable, match=f"did not start: this is {name}"):
            RedisServer(tmp_path / "redis")


def test_it_ends_with_the_process_that_started_it_when_told_to(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, sys; from workers.up.redis_server import RedisServer; "
        "from workers.up.supervisor import die_with_parent; "
        "server = RedisServer(pathlib.Path(sys.argv[1]), before_exec=die_with_parent()); "
        "print(server.process.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "redis")]
    pid = int(subprocess.run(command, cwd=ROOT, check=False, stdout=subprocess.PIPE).stdout)
    wait_until(lambda: is_gone(pid))
