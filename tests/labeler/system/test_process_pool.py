"""Processes that meet what strangers sent: nothing of ours comes in, and nothing beyond a bound comes out."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from labeler.system.process_pool import Frames, UnsoundProcess, start_process
from tests.processes import is_gone, wait_until

pytestmark = pytest.mark.process

EXAMPLE = "tests.labeler.system.process_example"
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory and handles are looked at on Linux")


def frames_of(process: subprocess.Popen[bytes], silence_s: float = 240.0) -> Frames:
    return Frames(process.stdout, most_head_bytes=2**16, silence_s=silence_s)


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


@linux
def test_it_has_its_input_and_its_words_and_nothing_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABELER_TOKEN", "lab_secret")
    with tempfile.TemporaryFile() as given, (tmp_path / "held by the caller").open("w"):
        given.write(b"an order")
        given.seek(0)
        process = start_process(EXAMPLE, "ends", stdin=given, answers=True)
        frames = frames_of(process)
        found = frames.head()
        assert frames.exactly(6) == b"pixels"
        process.communicate()
    assert process.returncode == 0
    assert found["given"] == "an order"
    assert "lab_secret" not in str(found["environment"])
    # Its input, two that we may hear or not, and what lists them.
    assert found["handles"] == [0, 1, 2, 3]


@linux
@pytest.mark.parametrize(
    ("how", "codes"), [("fills its memory", {1}), ("takes a processor", {-signal.SIGXCPU, -signal.SIGKILL})]
)
def test_the_system_ends_one_that_takes_more_than_it_was_given(how: str, codes: set[int]) -> None:
    process = start_process(EXAMPLE, how, answers=True)
    frames = frames_of(process)
    frames.head()
    frames.exactly(6)
    with pytest.raises(UnsoundProcess):
        frames.head()
    process.communicate(timeout=240)
    assert process.returncode in codes


@pytest.mark.parametrize("how", ["hangs", "lies", "says no object", "ends"])
def test_one_that_hangs_or_lies_or_breaks_off_is_told_from_a_sound_one(how: str) -> None:
    process = start_process(EXAMPLE, how, answers=True)
    try:
        frames_of(process).head()
        frames = frames_of(process, silence_s=0.5)
        frames.exactly(6)
        with pytest.raises(UnsoundProcess):
            frames.head()
    finally:
        end(process)


def test_one_is_killed_while_others_go_on_and_a_look_that_raises_ends_the_wait() -> None:
    class Over(Exception):
        pass

    def look() -> None:
        raise Over

    one, other = (start_process(EXAMPLE, "hangs", answers=True) for _ in range(2))
    try:
        frames_of(one).head()
        frames_of(other).head()
        end(one)
        assert one.returncode == -signal.SIGKILL
        assert other.poll() is None
        with pytest.raises(Over):
            Frames(other.stdout, most_head_bytes=0, silence_s=240, look=look).exactly(7)
    finally:
        end(other)


@linux
def test_it_ends_with_its_caller() -> None:
    code = f"""
import time
from labeler.system.process_pool import Frames, start_process
process = start_process({EXAMPLE!r}, "hangs", answers=True)
print(Frames(process.stdout, most_head_bytes=2**16, silence_s=240).head()["pid"], flush=True)
time.sleep(600)
"""
    environment: dict[str, Any] = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment) as caller:
        assert caller.stdout is not None
        pid = int(caller.stdout.readline())
        caller.kill()
    wait_until(lambda: is_gone(pid), what="its end")
