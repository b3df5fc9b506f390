"""A check-up of this machine: its steps, each in a process of its own with a time limit, and what became of them.

Libraries for GPUs end the process where others raise, and some drivers never answer: a crash, an abort or a hang is a
finding too. What a step found before it died is kept, because it writes each finding as it is made.
`python -m workers.doctor.checkup WORK FILE PARENT ARGUMENTS` is the other side.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Literal

from labeler.errors import InvalidSetting
from workers.progress import ProgressCallback, silent

State = Literal["well", "look", "wrong"]
"""As it should be; works, but somebody should look; does not work, or is not exact."""


@dataclass(frozen=True)
class Finding:
    """One sentence about this machine.

    Attributes:
        what: was looked at, in a word or three.
        found: in words, without a full stop.
        to_do: what helps; empty where nothing has to be done.
        numbers: the same for machines, units in names.
    """

    what: str
    state: State
    found: str
    to_do: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self) | {"numbers": dict(self.numbers)}


def well(what: str, found: str, **numbers: float) -> Finding:
    """All as it should be."""
    return Finding(what, "well", found, numbers=numbers)


def look(what: str, found: str, to_do: str, **numbers: float) -> Finding:
    """It works, and could be better, or may surprise somebody."""
    return Finding(what, "look", found, to_do, numbers)


def wrong(what: str, found: str, to_do: str, **numbers: float) -> Finding:
    """It does not work, or not exactly."""
    return Finding(what, "wrong", found, to_do, numbers)


Work = Callable[..., Iterable[Finding]]

_LAST_WORDS: Final = 160
"""Characters of what a process complained of before it died that are repeated."""


@dataclass(frozen=True)
class Step:
    """A part of a check-up.

    Attributes:
        name: for --only, and in what is found.
        work: "module:function"; called with `arguments`, gives findings.
        limit_s: after which it counts as hanging.
        to_do: what helps where it dies or hangs.
        arguments: of the function; JSON values.
        environment: of its process, where ours does not say otherwise.
    """

    name: str
    work: str
    limit_s: float = 60.0
    to_do: str = "run the same step again with --only; if it repeats, report it with the output of --json"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


def run_alone(step: Step) -> list[Finding]:
    """Do a step in a new process, and end it and its children whatever happens."""
    with tempfile.TemporaryDirectory(prefix="labeler-doctor-") as folder:
        found, said = Path(folder) / "found", Path(folder) / "said"
        found.touch()
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        with said.open("wb") as words:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "workers.doctor.checkup", step.work, str(found), str(os.getpid()),
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
        findings = [Finding(**json.loads(line)) for line in found.read_text().splitlines() if line.endswith("}")]
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
    """What was found.

    Attributes:
        findings: in the order of the steps, with the step that found each.
        step_seconds: each step took.
    """

    findings: tuple[tuple[str, Finding], ...]
    step_seconds: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """All of it took."""
        return sum(self.step_seconds.values())

    @property
    def is_well(self) -> bool:
        """Nothing is wrong; there may be something to look at."""
        return all(finding.state != "wrong" for _, finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """One document."""
        return {
            "well": self.is_well,
            "seconds": round(self.seconds, 3),
            "step_seconds": {step: round(seconds, 3) for step, seconds in self.step_seconds.items()},
            "findings": [{"step": step} | finding.as_json() for step, finding in self.findings],
        }


def check_up(steps: Sequence[Step], *, only: Sequence[str] = (), progress: ProgressCallback = silent) -> CheckUp:
    """Run every step, or those that are named, each in a process of its own.

    Raises:
        InvalidSetting: a step that is named is not there.
    """
    unknown = set(only) - {step.name for step in steps}
    if unknown:
        known = ", ".join(step.name for step in steps)
        raise InvalidSetting(f"--only {sorted(unknown)[0]!r} is no step; choose among {known}")
    chosen = [step for step in steps if not only or step.name in only]
    findings: list[tuple[str, Finding]] = []
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
"""A few seconds on a machine that does nothing else."""

_CALM: Final = {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive", "OPENBLAS_THREAD_TIMEOUT": "4"}
"""What only compares results uses threads, and does not let them spin: a busy machine took four times as long."""


def steps(home: Path, *, gpu: bool) -> list[Step]:
    """The steps for this machine.

    Args:
        home: folder that a party keeps, or will keep, its journal in.
    """
    from feature_store.index import ENGINES  # here: the other side loads what its step needs, and no more

    place = {"home": str(home)}
    found = [
        Step("versions", "workers.doctor.machine:versions"),
        Step("processor", "workers.doctor.machine:processor"),
        Step("memory", "workers.doctor.machine:memory"),
        Step("clock", "workers.doctor.machine:clock"),
        Step("disk", "workers.doctor.machine:disk", arguments=place, to_do="use a local disk for the home"),
        Step("journal", "workers.doctor.machine:sqlite", arguments=place, to_do="use a local disk for the home"),
        Step("redis-server", "workers.doctor.machine:redis_server", to_do="name a running redis-server instead"),
    ]
    if gpu:
        found.append(Step("devices", "workers.doctor.engines:devices", limit_s=_DEVICE_S, to_do=_DRIVER))
    for engine in ENGINES:
        if engine == "auto" or (engine.endswith("-gpu") and not gpu):
            continue
        limit = _DEVICE_S if engine.endswith("-gpu") else _ENGINE_S
        name = {"engine": engine}
        to_do = f'do not use it: set engine = "numpy", and run --only engine-{engine} again'
        found.append(Step(f"engine-{engine}", "workers.doctor.engines:check", limit, to_do, name, _CALM))
    found.append(
        Step("features", "workers.doctor.speed:features", _DEVICE_S, arguments={"gpu": gpu}, environment=_CALM)
    )
    found.append(Step("speed", "workers.doctor.speed:speed", _DEVICE_S, arguments={"gpu": gpu}))
    return found


_DRIVER: Final = "look at nvidia-smi; a device that does not answer needs its driver, or the machine, to start again"


if __name__ == "__main__":
    _main(*sys.argv[1:])
