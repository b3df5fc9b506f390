"""A service under load while its processes are killed at random: is every label still charged exactly once?

A federation runs as `labeler up` starts it. Requesters submit jobs one after the other and send a request again when
the service is away, as `Idempotency-Key` allows. Meanwhile SIGKILL hits a random process every few seconds:
coordinator, embedder, an agent, a tallier or redis-server. When the load ends, every job must have completed, and every
journal must hold each charge exactly once (`benchmarks.service.service`).
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks import BenchRow, rows_of
from benchmarks.service.federation import AGENTS, RunningService, embed_public, new_federation, running_service
from benchmarks.service.requesters import Answer, PlainConnection, put_under_load
from benchmarks.service.service import MAX_QUERIES, discrepancies, wanted_of
from labeler.errors import Unavailable
from workers.progress import ProgressCallback, silent

REQUESTERS: Final = 8
AWAY: Final = frozenset({429, 502, 503})
"""Answers after which a requester tries again."""

AWAY_S: Final = 60.0
"""Longest that the service may be away for one request."""

EVERY_S: Final = (2.0, 8.0)
"""Bounds of the pause between two kills."""

SEED: Final = 1


class PatientConnection(PlainConnection):
    """A connection that sends a request again while the service is away, for `AWAY_S` at most."""

    async def ask(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        until = time.monotonic() + AWAY_S
        while True:
            try:
                answer = await super().ask(method, path, body, headers)
                if answer.status not in AWAY or time.monotonic() > until:
                    return answer
            except Unavailable:
                self.close()
                if time.monotonic() > until:
                    raise
            await asyncio.sleep(0.5)


class Killer(threading.Thread):
    """A thread that kills a random process every few seconds until it is stopped.

    Attributes:
        kills: how often each kind of process was killed.
        back_s: seconds until the coordinator answered /healthz again, per kill of it.
    """

    def __init__(self, service: RunningService, seed: int) -> None:
        super().__init__(daemon=True)
        self.kills: Counter[str] = Counter()
        self.back_s: list[float] = []
        self._service, self._choose, self._stop_event = service, random.Random(seed), threading.Event()

    def run(self) -> None:
        while not self._stop_event.wait(self._choose.uniform(*EVERY_S)):
            name, pid = self._choose.choice(sorted(self._service.process_ids().items()))
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # it has just been killed, and is not back yet
            self.kills[name.split("-")[0]] += 1
            if name == "coordinator":
                self.back_s.append(self._seconds_until_back())

    def stop(self) -> None:
        """Stop killing."""
        self._stop_event.set()
        self.join()

    def _seconds_until_back(self) -> float:
        killed_at = time.monotonic()
        while time.monotonic() < killed_at + AWAY_S:
            try:
                with urllib.request.urlopen(f"{self._service.url}/healthz", timeout=1.0):
                    break
            except (urllib.error.URLError, OSError):
                time.sleep(0.05)
        return time.monotonic() - killed_at


def bench_soak(*, data: Path | None = None, full: bool = False, progress: ProgressCallback = silent) -> list[BenchRow]:
    """Load a service for a minute or ten, kill its processes at random, and reconcile every journal with the jobs.

    Journals lie on the disk of `data`; else in the system's folder for temporary files.
    """
    seconds = 600.0 if full else 60.0
    with tempfile.TemporaryDirectory(dir=data) as name:
        folder = Path(name)
        progress("Soak", 0, 2)
        home = folder / "federation"
        federation = new_federation(home, AGENTS)
        public = embed_public(folder)
        with running_service(federation.home) as service:
            killer = Killer(service, SEED)
            load = put_under_load(
                service.url,
                service.token,
                wanted_of(public),
                requesters=REQUESTERS,
                seconds=seconds,
                connect=PatientConnection,
                on_start=killer.start,
                on_end=killer.stop,
            )
        progress("Soak", 1, 2)
        wrong = discrepancies(federation, load.jobs) + load.queries_not_used_once(MAX_QUERIES)
        progress("Soak", 2, 2)
    pause = f"{EVERY_S[0]:.0f} to {EVERY_S[1]:.0f} s"
    case = f"{REQUESTERS} requesters, {seconds:.0f} s, a random process killed every {pause}"
    settings = {"seed": SEED, "kills": dict(killer.kills), "errors": load.errors[:20], "wrong": wrong[:20]}
    rows: list[tuple[str, str, float, str | None]] = [
        ("the killer", "kills", killer.kills.total(), None),
        ("jobs", "completed", len(load.jobs), None),
        ("jobs", "that ended otherwise", len(load.errors), "0"),
        ("journals", "charges that do not add up", len(wrong), "0"),
    ]
    if killer.back_s:
        killed = "a killed coordinator"
        rows.append((killed, "seconds until it answers, median", float(np.median(killer.back_s)), "at most 5"))
        rows.append((killed, "seconds until it answers, longest", max(killer.back_s), None))
    return rows_of(case, rows, seconds=load.wall_s, settings=settings)
