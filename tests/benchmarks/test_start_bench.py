"""The bench of starts counts what every process has used, and reports what people wait for."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from benchmarks import run_bench
from benchmarks.speed.start import cpu_seconds_below

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")

BUSY = """
import subprocess, sys, time
if len(sys.argv) > 1:
    child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE)
until = time.process_time() + 0.3
while time.process_time() < until: pass
print("done", flush=True)
time.sleep(60)
"""


def test_what_a_process_and_its_children_have_used_is_counted() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", BUSY, BUSY], stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            assert [process.stdout.readline(), process.stdout.readline()] == [b"done\n", b"done\n"]
            used = cpu_seconds_below(process.pid)
            assert len(used) == 2
            assert process.pid in used
            assert all(seconds >= 0.25 for seconds in used.values())
        finally:
            os.killpg(process.pid, 9)


@pytest.mark.long
@pytest.mark.slow
def test_the_start_bench_reports_starts_stops_and_light_commands() -> None:
    rows = run_bench("start")["rows"]
    found = {(row["method"], row["metric"]): row["value"] for row in rows}
    for method in ("first start", "second start", "stopped with a job under way"):
        assert found[method, "seconds until ready"] > 0
        assert found[method, "CPU seconds until ready"] > 0
        assert found[method, "seconds until stopped"] > 0
    assert found["second start", "starts in which something was killed"] == 0
    # Supervisor, nursery, its tracker, redis-server, coordinator, embedder, three talliers, five agents.
    assert found["second start", "processes"] == 14
    cases = {row["case"] for row in rows}
    assert {"labeler --help", "labeler status", "labeler plan"} <= cases
