"""What this machine has: versions, processor, memory, clock; and where a party keeps what must not be lost.

A home needs room, durable writes, SQLite, and a redis-server beside it.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from labeler.errors import LabelerError
from labeler.system.files import is_full
from workers.doctor.checkup import Finding, look, well, wrong

_PACKAGES: Final = ("numpy", "torch", "faiss-gpu", "faiss-cpu", "llvmlite", "timm", "pyarrow", "sqlalchemy", "redis")
_LITTLE_MEMORY: Final = 4 << 30
_UNLIMITED: Final = 1 << 60
_CLOCK_NOT_SET: Final = 5
"""What adjtimex answers where nobody sets the clock by another (TIME_ERROR)."""


def versions() -> Iterator[Finding]:
    """Of Python, of this package and of what it computes with."""
    found = {"python": platform.python_version(), "private-labeler": _version("private-labeler")}
    found |= {name: _version(name) for name in _PACKAGES}
    words = ", ".join(f"{name} {number}" for name, number in found.items() if number)
    if not (3, 11) <= sys.version_info[:2] < (3, 14):
        yield wrong("versions", words, "use Python 3.11, 3.12 or 3.13")
    else:
        yield well("versions", words)


def processor() -> Iterator[Finding]:
    """Its name, the cores this process may use, the instructions that matter."""
    fields = _first_processor()
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    names = {
        "avx2": "AVX2",
        "avx512bw": "AVX-512",
        "avx_vnni": "AVX-VNNI",
        "avx512_vnni": "AVX-512 VNNI",
        "amx_int8": "AMX",
    }
    has = [name for flag, name in names.items() if flag in flags]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    name = fields.get("model name", platform.processor() or platform.machine())
    found = f"{name}, {cores} cores, {', '.join(has) or 'no vector instructions that are used here'}"
    quota = _quota_cores()
    if quota is not None and quota < cores:
        yield look(
            "processor", f"{found}; a quota lets it use {quota:g} of them",
            f"set OMP_NUM_THREADS={max(1, int(quota))}: more threads than that wait for each other",
            cores=cores, quota_cores=quota,
        )  # fmt: skip
    else:
        yield well("processor", found, cores=cores)


def memory() -> Iterator[Finding]:
    """What is there, what is free, and where a container sets a limit."""
    fields = {
        name: int(rest.split()[0]) << 10
        for name, _, rest in (line.partition(":") for line in _text("/proc/meminfo").splitlines())
        if rest.split()
    }
    if not fields:
        yield look("memory", "this system does not say", "see that 4 GiB are free")
        return
    total, free = fields["MemTotal"], fields.get("MemAvailable", fields["MemFree"])
    limit = _number("/sys/fs/cgroup/memory.max")
    if limit is not None and limit < total:
        total, free = limit, min(free, limit - (_number("/sys/fs/cgroup/memory.current") or 0))
    found = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    numbers = {"total_bytes": total, "free_bytes": free}
    if free < _LITTLE_MEMORY:
        help_ = "4 GiB are comfortable; with less, set memory_limit so that shards are searched in blocks"
        yield look("memory", found, help_, **numbers)
    else:
        yield well("memory", found, **numbers)


def clock() -> Iterator[Finding]:
    """Deadlines, certificates and tokens go by it."""
    installed = max(Path(__file__).stat().st_mtime, Path(sys.executable).lstat().st_mtime)
    behind = installed - time.time()
    if behind > 60:
        yield wrong(
            "clock", f"{time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC is before these files were installed",
            "set the clock: deadlines, certificates and tokens go by it",
        )  # fmt: skip
        return
    found = f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime())} UTC"
    if _adjtimex() == _CLOCK_NOT_SET:
        yield look(
            "clock", f"{found}; nobody sets it by another clock",
            "run chrony or systemd-timesyncd: parties whose clocks differ by minutes refuse each other",
        )  # fmt: skip
    else:
        yield well("clock", found)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _first_processor() -> dict[str, str]:
    block = _text("/proc/cpuinfo").split("\n\n", 1)[0]
    return {name.strip(): rest.strip() for name, _, rest in (line.partition(":") for line in block.splitlines())}


def _quota_cores() -> float | None:
    words = _text("/sys/fs/cgroup/cpu.max").split()
    return int(words[0]) / int(words[1]) if len(words) == 2 and words[0].isdecimal() else None


def _adjtimex() -> int:
    function = getattr(ctypes.CDLL(None), "adjtimex", None) if sys.platform == "linux" else None
    # Only asked: a struct of zeros changes nothing, and 512 bytes are more than it has.
    return -1 if function is None else int(function(ctypes.create_string_buffer(512)))


def _number(path: str) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() and int(text) < _UNLIMITED else None


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


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
    from labeler.ledger.database import SQLITE_VERSION, open_database

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
    from workers.up.redis_server import RedisServer

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
