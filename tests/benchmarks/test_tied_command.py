"""Who started a federation for a while and is killed leaves nothing of it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks.tied_command import tied_command

STARTS_A_FEDERATION = """
import subprocess, sys, time
from benchmarks.tied_command import tied_command
child = subprocess.Popen(tied_command("up", "--home", sys.argv[1], "--agents", 2, "--port", 0), start_new_session=True,
                         stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(child.pid, flush=True)
time.sleep(600)
"""


def alive(pids: set[int]) -> set[int]:
    """Which of these run; one that has ended and waits for its parent does not."""
    found = set()
    for pid in pids:
        with suppress(OSError):
            state = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
            found |= {pid} if state != "Z" else set()
    return found


def programs(home: Path) -> set[int]:
    try:
        return set(json.loads((home / "processes.json").read_bytes()).values())
    except FileNotFoundError:
        return set()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel is asked on Linux only")
def test_a_federation_ends_with_a_bench_that_is_killed(tmp_path: Path) -> None:
    home = tmp_path / "federation"
    command = [sys.executable, "-c", STARTS_A_FEDERATION, str(home)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as bench:
        try:
            assert bench.stdout is not None
            child = int(bench.stdout.readline())
            end = time.monotonic() + 90
            while len(programs(home)) < 3:
                assert time.monotonic() < end, "the federation did not begin to start"
                time.sleep(0.1)
        finally:
            bench.kill()
    started = programs(home) | {child}
    while left := alive(started):
        assert time.monotonic() < end, f"{left} of {started} outlived the bench that started them"
        time.sleep(0.1)


def test_a_tied_command_is_the_command(tmp_path: Path) -> None:
    done = subprocess.run(tied_command("plan", "--nonsense"), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "No such option" in done.stderr
