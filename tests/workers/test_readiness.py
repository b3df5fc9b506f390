"""A process rings once when it is ready, for whoever asked to be told, and what it starts itself does not ring."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from workers.readiness import NOTIFY, Bell, tell_ready

ROOT = Path(__file__).parent.parent.parent

RINGS = "from workers.readiness import tell_ready; tell_ready()"


def ring(bell: Bell, code: str) -> int:
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=os.environ | {NOTIFY: bell.address})
    assert process.wait(60) == 0
    return process.pid


def test_a_bell_hears_which_processes_are_ready() -> None:
    with Bell() as bell:
        assert bell.rung() == set()
        first, second = ring(bell, RINGS), ring(bell, RINGS)
        assert bell.rung() == {first, second}
        assert bell.rung() == set()


def test_a_process_rings_once_and_its_children_do_not_ring_in_its_name() -> None:
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {RINGS!r}], check=True)"
    with Bell() as bell:
        pid = ring(bell, f"{RINGS}; tell_ready(); {child}")
        assert bell.rung() == {pid}


def test_whoever_was_not_asked_says_nothing_and_a_bell_that_is_gone_stops_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(NOTIFY, raising=False)
    tell_ready()
    with Bell() as bell:
        address = bell.address
    monkeypatch.setenv(NOTIFY, address)
    tell_ready()
    assert NOTIFY not in os.environ


@pytest.mark.parametrize("words", [b"", b"READY=0\nMAINPID=7", b"READY=1", b"READY=1\nMAINPID=me", b"\xff\xfe=\n="])
def test_words_that_are_none_ring_for_nobody(words: bytes) -> None:
    with Bell() as bell, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        address = bell.address
        stranger.sendto(words, f"\0{address[1:]}" if address.startswith("@") else address)
        assert bell.rung() == set()


def test_the_words_are_those_that_systemd_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind("notify")
        monkeypatch.setenv(NOTIFY, "notify")
        tell_ready()
        assert systemd.recv(100) == f"READY=1\nMAINPID={os.getpid()}".encode()
