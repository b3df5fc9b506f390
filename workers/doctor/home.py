"""Where a party keeps what must not be lost: room, durable writes, SQLite, and a redis-server beside it."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from feature_store.room import is_full
from labeler.errors import LabelerError
from workers.doctor.finding import Finding, look, well, wrong

_LITTLE_ROOM: Final = 5 << 30
_TRIED_BYTES: Final = 4 << 20
_SLOW_SYNC_S: Final = 0.02
_SYNCS: Final = 16


def disk(home: str) -> Iterator[Finding]:
    """Room, and how long a durable write takes, where the home is or will be."""
    there = _existing(Path(home))
    free = shutil.disk_usage(there).free
    found = f"{free / 2**30:.1f} GiB free at {there}"
    try:
        with tempfile.TemporaryDirectory(prefix=".labeler-doctor-", dir=there) as folder:
            taken = _sync_seconds(Path(folder) / "tried")
    except OSError as error:
        if is_full(error):
            yield wrong(
                "disk", f"{found}, and 4 MiB cannot be written: {error.strerror}", "make room or raise the quota"
            )
        else:
            yield wrong(
                "disk", f"nothing can be written at {there}: {error.strerror}",
                "name a home that its user may write (--home), or mount it with write access",
            )  # fmt: skip
        return
    numbers = {"free_bytes": free, "sync_s": taken}
    words = f"{found}; a durable write takes {1e3 * taken:.2g} ms"
    if free < _LITTLE_ROOM:
        yield look("disk", words, "5 GiB are comfortable; `labeler prune` removes what ended jobs left", **numbers)
    elif taken > _SLOW_SYNC_S:
        yield look(
            "disk", words, "every charge is one durable write: use a local disk, not a network share", **numbers
        )  # fmt: skip
    else:
        yield well("disk", words, **numbers)


def sqlite(home: str) -> Iterator[Finding]:
    """Whether a journal can be kept there as it must be: write-ahead log, every commit durable."""
    from feature_store.journal.database import SQLITE_VERSION, open_database

    try:
        with tempfile.TemporaryDirectory(prefix=".labeler-doctor-", dir=_existing(Path(home))) as folder:
            database = open_database(Path(folder) / "journal.db")
            try:
                started = time.perf_counter()
                for _ in range(_SYNCS):
                    database.probe()
                taken = (time.perf_counter() - started) / _SYNCS
            finally:
                database.close()
    except (LabelerError, OSError) as error:
        yield wrong(
            "journal",
            str(error),
            "name a home on a local disk (--home), or a PostgreSQL database (docs/coordinator.md)",
        )
        return
    words = f"SQLite {SQLITE_VERSION}, write-ahead log, a commit takes {1e3 * taken:.2g} ms"
    yield well("journal", words, commit_s=taken)


def redis_server() -> Iterator[Finding]:
    """Whether one can be started; only a service needs it."""
    from workers.federation.redis_server import RedisServer

    try:
        with tempfile.TemporaryDirectory(prefix="labeler-doctor-") as folder, RedisServer(Path(folder)):
            pass
    except LabelerError as error:
        yield look("redis-server", str(error), "install redis-server, or name a running one; `labeler run` needs none")
        return
    yield well("redis-server", "starts, answers and ends")


def _existing(path: Path) -> Path:
    """The folder itself, or the nearest one above it that is there."""
    path = path.absolute()
    return next(parent for parent in (path, *path.parents) if parent.is_dir())


def _sync_seconds(file: Path) -> float:
    taken = []
    with file.open("wb", buffering=0) as out:
        out.write(os.urandom(_TRIED_BYTES))
        os.fsync(out.fileno())
        for _ in range(_SYNCS):
            started = time.perf_counter()
            out.write(bytes(4096))
            os.fsync(out.fileno())
            taken.append(time.perf_counter() - started)
    return statistics.median(taken)
