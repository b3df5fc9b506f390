"""One step of a check-up in a process of its own, with a time limit: a crash, an abort or a hang is a finding.

Libraries for GPUs end the process where others raise, and some drivers never answer. What a step found before it
died is kept: it writes each finding as it is made. `python -m workers.doctor.alone WORK FILE PARENT ARGUMENTS` is the
other side.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from workers.doctor.finding import Finding, wrong

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
                [sys.executable, "-P", "-m", "workers.doctor.alone", step.work, str(found), str(os.getpid()),
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
    from workers.federation.supervisor import die_with_parent

    ask_the_kernel = die_with_parent(int(parent))
    if ask_the_kernel:
        ask_the_kernel()
    module, _, name = work.partition(":")
    function: Work = getattr(import_module(module), name)
    with Path(file).open("a") as found:
        for finding in function(**json.loads(arguments)):
            found.write(json.dumps(finding.as_json(), allow_nan=False) + "\n")
            found.flush()


if __name__ == "__main__":
    _main(*sys.argv[1:])
