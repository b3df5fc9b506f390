"""Strangers at the door: connections that never finish their headers."""

from __future__ import annotations

import contextlib
import socket
import struct
from pathlib import Path

import httpx2
import numpy as np
import pytest

from tests.e2e.conftest import MOST_IDLE
from tests.e2e.service.conftest import Service
from tests.e2e.service.harm import new_task, submit
from tests.processes import wait_until

pytestmark = pytest.mark.slow

HELD = 300
ADDRESSES = 3
MOST_LOG_BYTES = 100_000


def hold(service: Service, source: str) -> socket.socket:
    host, port = service.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=300, source_address=(source, 0))
    connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Slow: ")
    return connection


def held_open(service: Service, pid: int) -> int:
    """How many connections of the attacker's addresses the coordinator holds: by the kernel's table and its own files.

    Not a count of all its files: those of its own parts (polls of parties, its journal, its queue) come and go.
    """
    port = f"{int(service.url.rpartition(':')[2]):04X}"
    files = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            files.add(str(link.readlink()))
    attackers = {struct.pack("<I", 0x7F000002 + number).hex().upper() for number in range(ADDRESSES)}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(
        row[1].endswith(f":{port}") and row[2].partition(":")[0] in attackers and f"socket:[{row[9]}]" in files
        for row in rows
    )


def test_connections_that_never_finish_their_headers_hold_nobody_up(
    service: Service, digit_features: np.ndarray
) -> None:
    pid = service.pid("coordinator")
    log = service.home / "logs" / "coordinator.log"
    written = log.stat().st_size
    with contextlib.ExitStack() as held, service.client() as client:
        job = submit(client, new_task(client, "during slow headers"), digit_features)
        for number in range(HELD):
            held.enter_context(hold(service, f"127.0.0.{2 + number % ADDRESSES}"))
            if number % 50 == 0:
                # Over a connection of its own: of those that wait the longest idle one is closed, which may be ours.
                with service.client() as another:
                    assert another.readiness().ready
        wait_until(lambda: held_open(service, pid) > 0, what="the first connection to be taken")
        wait_until(lambda: held_open(service, pid) <= MOST_IDLE, what="connections over the limit to close")
        with httpx2.Client(
            trust_env=False, transport=httpx2.HTTPTransport(local_address="127.0.0.2"), timeout=300
        ) as neighbour:
            assert neighbour.get(f"{service.url}/healthz").status_code == 200, "from the attacker's own address"
        assert client.wait(job.job_id).state == "completed"
    quiet = [line for line in log.read_bytes()[written:].splitlines() if b'"INFO"' not in line]
    assert sum(map(len, quiet)) < MOST_LOG_BYTES
