"""What tests of other processes wait for."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from labeler.errors import InvalidSetting
from workers.serve import program


def wait_until(condition: Callable[[], object], *, seconds: float = 300.0, what: str = "it") -> None:
    """Wait for something that other processes do. The limit ends a test that hangs and promises nothing about time: on
    shared cores several federations run beside each other."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s for {what}"
        time.sleep(0.05)


def is_gone(pid: int) -> bool:
    """No process of that number runs; one that nobody has waited for counts as gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def tcp_sockets(pid: int) -> list[str]:
    """Return the lines about a process's TCP sockets, as Linux lists them."""
    own = {str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir()}
    lines = [line for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return [line for line in lines if f"socket:[{line.split()[9]}]" in own]


def has_caddy() -> bool:
    """Whether an edge can be started: by the caddy on PATH, or that of the extra `edge` in this environment."""
    try:
        return bool(program())
    except InvalidSetting:
        return False
