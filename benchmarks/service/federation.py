"""A federation as `labeler up` starts it, in processes that end with the bench, and what its logs say."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from feature_store.backbones import load_backbone, read_spec
from feature_store.embedding import embed_source
from feature_store.shard import Shard
from labeler.errors import Unavailable
from workers.digits import CLASSES, write_digits
from workers.up import FederationPlan
from workers.up.home import DIGITS_BACKBONE, LocalFederation, make_federation

AGENTS: Final = 5
_STOP_S = 60.0


@dataclass(frozen=True, repr=False)
class RunningService:
    """A federation of real processes.

    Attributes:
        url: of its coordinator.
        token: of its first administrator.
        home: its folder.
    """

    url: str
    token: str
    home: Path

    def process_ids(self) -> dict[str, int]:
        """Return the current process ids by name."""
        pids: dict[str, int] = json.loads((self.home / "processes.json").read_bytes())
        return pids


@contextmanager
def running_service(home: Path) -> Iterator[RunningService]:
    """Run a federation in a separate process, ready, until the block ends."""
    with running_up(home) as (_, told):
        yield RunningService(told["url"], told["token"], home)


@contextmanager
def running_up(home: Path, *options: object) -> Iterator[tuple[int, dict[str, Any]]]:
    """Run `labeler up` until the block ends; yield its process id and the line that it prints when it is ready.

    Its log is beside its home.
    """
    said = home.with_suffix(".log")
    # A separate session, so that Ctrl-C stops the bench, which stops the federation in order.
    command = tied_command("up", "--home", home, *options, "--port", 0, "--json")
    with said.open("wb") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, start_new_session=True)
    with process:
        try:
            line = process.stdout.readline() if process.stdout is not None else b""
            if not line:
                raise Unavailable(f"the federation did not start: {said.read_text(errors='replace')[-1000:]}")
            yield process.pid, json.loads(line)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()


BUDGET_EPSILON: Final = 100.0
"""Finite, so that every charge passes the check of its cap, and more than the jobs of a minute cost."""


def new_federation(home: Path, agents: int) -> LocalFederation:
    """Make a federation of digits in a new folder."""
    home.mkdir(mode=0o700)
    return make_federation(home, FederationPlan(agents=agents, instance_epsilon=BUDGET_EPSILON))


def embed_public(folder: Path) -> Shard:
    """Embed the public digits once: requesters bring vectors."""
    inputs = folder / "inputs"
    inputs.mkdir()
    public = write_digits(inputs, seed=0, agents=AGENTS)["public"]
    backbone = load_backbone(read_spec(DIGITS_BACKBONE))
    embed_source(public, backbone, folder / "public.shard", classes=CLASSES, public=True)
    return Shard.open(folder / "public.shard")


def complaints(federation: LocalFederation) -> list[str]:
    """Return what any process logged as a warning or worse."""
    found = []
    for path in sorted(federation.logs.glob("*.log")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                found.append(f"{path.stem}: {line[:300]}")
                continue
            if entry.get("level") not in ("DEBUG", "INFO"):
                found.append(f"{path.stem}: {line[:600]}")
    return found


_KINDS: Final = {
    ("POST", "/v1/jobs:estimate"): "price",
    ("POST", "/v1/jobs"): "submit",
    ("GET", "/v1/jobs/{job_id}"): "status",
    ("GET", "/v1/jobs/{job_id}/labels"): "labels",
}


def seconds_inside(logs: Path, began_at: float) -> dict[str, list[float]]:
    """Return the times of requests by the coordinator's own log since a moment: from the end of their headers to the
    answer.

    A requester waits longer: until the coordinator reads what it sent, and until it reads what the coordinator wrote.

    Args:
        logs: folder of a federation's logs.
        began_at: seconds since 1970; what ended before is left out.
    """
    found: dict[str, list[float]] = {}
    for path in logs.glob("coordinator.log*"):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError, KeyError):
                entry = json.loads(line)
                kind = _KINDS.get((entry["method"], entry["route"]))
                if kind is not None and datetime.fromisoformat(entry["at"]).timestamp() >= began_at:
                    found.setdefault(kind, []).append(entry["ms"] / 1e3)
    return found


_PROGRAM = (
    "import sys; from workers.up.supervisor import die_with_parent; "
    "ask_the_kernel = die_with_parent(int(sys.argv.pop(1))); ask_the_kernel and ask_the_kernel(); "
    "from workers.cli import main; main()"
)


def tied_command(*arguments: object) -> list[str]:
    """Return a command of `labeler` for `subprocess`, as a child that ends with its parent, however the parent ends.

    A bench that is killed with SIGKILL cannot stop its federation. On Linux the child asks the kernel, before it loads
    anything, to kill it when its parent's thread ends. No hook between fork and exec does it, because the parent may
    have threads by then.
    """
    return [sys.executable, "-P", "-c", _PROGRAM, str(os.getpid()), *map(str, arguments)]
