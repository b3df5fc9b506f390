"""A check-up of this machine: runs steps, each in a separate process with a time limit, and collects their findings.

Libraries for GPUs end the process where others raise, and some drivers never answer: a crash, an abort or a hang is a
finding too. A step writes each finding as it is made, so its findings survive its death. `python -m
checks.doctor.checkup WORK FILE PARENT ARGUMENTS` is the other side.

The steps that need no numerical library are here: versions, processor, memory, clock, and what a home needs (room,
durable writes, SQLite, a redis-server). Those of engines are in `checks.doctor.engines`.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, Literal

from labeler.errors import InvalidSetting, LabelerError
from labeler.system.files import is_full
from workers.progress import ProgressCallback, silent

State = Literal["well", "look", "wrong"]
"""As it should be; works, but somebody should look; does not work, or is not exact."""


@dataclass(frozen=True)
class CheckFinding:
    """One sentence about this machine.

    Attributes:
        what: was looked at, in a word or three.
        found: in words, without a full stop.
        to_do: the remedy; empty where nothing has to be done.
        numbers: the same for machines, units in names.
    """

    what: str
    state: State
    found: str
    to_do: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self) | {"numbers": dict(self.numbers)}


def well(what: str, found: str, **numbers: float) -> CheckFinding:
    """Return a finding that all is as it should be."""
    return CheckFinding(what, "well", found, numbers=numbers)


def look(what: str, found: str, to_do: str, **numbers: float) -> CheckFinding:
    """Return a finding that it works, and could be better, or may surprise somebody."""
    return CheckFinding(what, "look", found, to_do, numbers)


def wrong(what: str, found: str, to_do: str, **numbers: float) -> CheckFinding:
    """Return a finding that it does not work, or not exactly."""
    return CheckFinding(what, "wrong", found, to_do, numbers)


Work = Callable[..., Iterable[CheckFinding]]

_LAST_WORDS: Final = 160
"""Characters that are repeated of a dead process's last complaint."""


@dataclass(frozen=True)
class Step:
    """A part of a check-up.

    Attributes:
        name: for --only, and in what is found.
        work: "module:function"; called with `arguments`, gives findings.
        limit_s: after which it counts as hanging.
        to_do: the remedy where it dies or hangs.
        arguments: of the function; JSON values.
        environment: of its process, where ours does not say otherwise.
    """

    name: str
    work: str
    limit_s: float = 60.0
    to_do: str = "run the same step again with --only; if it repeats, report it with the output of --json"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


def run_alone(step: Step) -> list[CheckFinding]:
    """Run a step in a new process, and end it and its children whatever happens."""
    with tempfile.TemporaryDirectory(prefix="labeler-doctor-") as folder:
        found, said = Path(folder) / "found", Path(folder) / "said"
        found.touch()
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        with said.open("wb") as words:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "checks.doctor.checkup", step.work, str(found), str(os.getpid()),
                 json.dumps(dict(step.arguments))],
                stdin=subprocess.DEVNULL,
                stdout=words,
                stderr=words,
                env=dict(step.environment) | os.environ | {"PYTHONPATH": path},
                start_new_session=True,
            )  # fmt: skip
            try:
                code = process.wait(step.limit_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        findings = [CheckFinding(**json.loads(line)) for line in found.read_text().splitlines() if line.endswith("}")]
        if code != 0:
            findings.append(wrong(step.name, _end_in_words(code, step.limit_s, said), step.to_do))
        return findings


def _end_in_words(code: int | None, limit_s: float, said: Path) -> str:
    if code is None:
        return f"did not end within {limit_s:g} s and was ended"
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else "failed"
    lines = [line.strip() for line in said.read_text(errors="replace").splitlines() if line.strip()]
    last = next((line for line in reversed(lines) if not line.startswith(("File ", "~", "^"))), "")
    return f"{how}: {last[:_LAST_WORDS]}" if last else f"{how} without a word"


def _main(work: str, file: str, parent: str, arguments: str) -> None:
    from workers.up.supervisor import die_with_parent

    ask_the_kernel = die_with_parent(int(parent))
    if ask_the_kernel:
        ask_the_kernel()
    module, _, name = work.partition(":")
    function: Work = getattr(import_module(module), name)
    with Path(file).open("a") as found:
        for finding in function(**json.loads(arguments)):
            found.write(json.dumps(finding.as_json(), allow_nan=False) + "\n")
            found.flush()


@dataclass(frozen=True)
class CheckUp:
    """The results of a check-up.

    Attributes:
        findings: in the order of the steps, with the step that found each.
        step_seconds: the time that each step took.
    """

    findings: tuple[tuple[str, CheckFinding], ...]
    step_seconds: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """The time of all steps."""
        return sum(self.step_seconds.values())

    @property
    def is_well(self) -> bool:
        """True where nothing is wrong; there may be something to look at."""
        return all(finding.state != "wrong" for _, finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """Return the results as one document."""
        return {
            "well": self.is_well,
            "seconds": round(self.seconds, 3),
            "step_seconds": {step: round(seconds, 3) for step, seconds in self.step_seconds.items()},
            "findings": [{"step": step} | finding.as_json() for step, finding in self.findings],
        }


def check_up(steps: Sequence[Step], *, only: Sequence[str] = (), progress: ProgressCallback = silent) -> CheckUp:
    """Run every step, or those that are named, each in a separate process.

    Raises:
        InvalidSetting: a step that is named is not there.
    """
    unknown = set(only) - {step.name for step in steps}
    if unknown:
        known = ", ".join(step.name for step in steps)
        raise InvalidSetting(f"--only {sorted(unknown)[0]!r} is not a step; choose among {known}")
    chosen = [step for step in steps if not only or step.name in only]
    findings: list[tuple[str, CheckFinding]] = []
    taken: dict[str, float] = {}
    for number, step in enumerate(chosen):
        progress("Check-up", number, len(chosen))
        started = time.perf_counter()
        findings += [(step.name, finding) for finding in run_alone(step)]
        taken[step.name] = time.perf_counter() - started
    progress("Check-up", len(chosen), len(chosen))
    return CheckUp(tuple(findings), taken)


_DEVICE_S: Final = 240.0
"""Limit of a step on a device: the first product of a fresh installation may compile for minutes."""


_ENGINE_S: Final = 120.0
"""Limit of a step of an engine, which takes a few seconds on an idle machine."""

_CALM: Final = {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive", "OPENBLAS_THREAD_TIMEOUT": "4"}
"""Environment of steps that only compare results: threads do not spin: a busy machine took four times as long."""


def steps(home: Path, *, gpu: bool) -> list[Step]:
    """Return the steps for this machine.

    Args:
        home: folder that a party keeps, or will keep, its journal in.
    """
    from feature_store.index import ENGINES  # imported here: the other side loads what its step needs, and no more

    place = {"home": str(home)}
    found = [
        Step("versions", "checks.doctor.checkup:versions"),
        Step("processor", "checks.doctor.checkup:processor"),
        Step("memory", "checks.doctor.checkup:memory"),
        Step("clock", "checks.doctor.checkup:clock"),
        Step("disk", "checks.doctor.checkup:disk", arguments=place, to_do="use a local disk for the home"),
        Step("journal", "checks.doctor.checkup:sqlite", arguments=place, to_do="use a local disk for the home"),
        Step("redis-server", "checks.doctor.checkup:redis_server", to_do="name a running redis-server instead"),
    ]
    if gpu:
        found.append(Step("devices", "checks.doctor.engines:devices", limit_s=_DEVICE_S, to_do=_DRIVER))
    for engine in ENGINES:
        if engine == "auto" or (engine.endswith("-gpu") and not gpu):
            continue
        limit = _DEVICE_S if engine.endswith("-gpu") else _ENGINE_S
        name = {"engine": engine}
        to_do = f'do not use it: set engine = "numpy", and run --only engine-{engine} again'
        found.append(Step(f"engine-{engine}", "checks.doctor.engines:check", limit, to_do, name, _CALM))
    found.append(
        Step("features", "checks.doctor.engines:features", _DEVICE_S, arguments={"gpu": gpu}, environment=_CALM)
    )
    found.append(Step("speed", "checks.doctor.engines:speed", _DEVICE_S, arguments={"gpu": gpu}))
    return found


_DRIVER: Final = "look at nvidia-smi; a device that does not answer needs its driver, or the machine, to start again"


_PACKAGES: Final = (
    "numpy",
    "torch",
    "faiss-gpu",
    "faiss-cpu",
    "onnxruntime",
    "timm",
    "pyarrow",
    "sqlalchemy",
    "redis",
)
_LITTLE_MEMORY: Final = 4 << 30
_UNLIMITED: Final = 1 << 60
_CLOCK_NOT_SET: Final = 5
"""The answer of adjtimex where nobody sets the clock by another (TIME_ERROR)."""


def versions() -> Iterator[CheckFinding]:
    """Report the versions of Python, of this package and of what it computes with."""
    found = {"python": platform.python_version(), "private-labeler": _version("private-labeler")}
    found |= {name: _version(name) for name in _PACKAGES}
    words = ", ".join(f"{name} {number}" for name, number in found.items() if number)
    if not (3, 11) <= sys.version_info[:2] < (3, 14):
        yield wrong("versions", words, "use Python 3.11, 3.12 or 3.13")
    else:
        yield well("versions", words)


def processor() -> Iterator[CheckFinding]:
    """Report its name, the cores this process may use, the instructions that matter."""
    fields = _first_processor()
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    names = {
        "avx2": "AVX2",
        "avx512bw": "AVX-512",
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


def memory() -> Iterator[CheckFinding]:
    """Report total and free memory, and the limit of a container."""
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


def clock() -> Iterator[CheckFinding]:
    """Check the clock, by which deadlines, certificates and tokens go."""
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
    # A query only: a struct of zeros changes nothing, and 512 bytes are more than it has.
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


def disk(home: str) -> Iterator[CheckFinding]:
    """Check the room, and the time of a durable write, where the home is or will be."""
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


def sqlite(home: str) -> Iterator[CheckFinding]:
    """Check that a journal can be kept there as it must be: write-ahead log, every commit durable."""
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


def redis_server() -> Iterator[CheckFinding]:
    """Check that a redis-server can be started; only a service needs it."""
    from workers.up.redis_server import RedisServer

    try:
        with tempfile.TemporaryDirectory(prefix="labeler-doctor-") as folder, RedisServer(Path(folder)) as server:
            version = server.version
    except LabelerError as error:
        yield look("redis-server", str(error), "install redis-server, or name a running one; `labeler run` needs none")
        return
    yield well("redis-server", f"{version} starts, answers and ends")


def _existing(path: Path) -> Path:
    """Return the folder itself, or the nearest one above it that is there."""
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


if __name__ == "__main__":
    _main(*sys.argv[1:])
