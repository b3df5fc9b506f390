"""A module of ours in a process of its own that meets what strangers sent, without our environment.

Its environment may not hold what ours holds (passwords, tokens), and its libraries take one thread each, so that it
costs the core it was given. Its module says how much memory and time it may take (`bound_process`); whoever starts it
ends it.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import IO

_KEPT = ("LD_LIBRARY_PATH", "SYSTEMROOT", "TMPDIR")
"""Of our environment: where libraries are found, and where temporary files go."""


def start_own_process(
    module: str, *arguments: str, stdin: IO[bytes] | None = None, answers: bool = False
) -> subprocess.Popen[bytes]:
    """Start a module; what it complains of is heard by nobody, since it could quote what it was sent.

    Args:
        module: run as `python -m` runs it.
        arguments: of its command line.
        stdin: a file that it reads, else nothing.
        answers: whether its standard output is a pipe for us to read.
    """
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments],
        stdin=subprocess.DEVNULL if stdin is None else stdin,
        stdout=subprocess.PIPE if answers else subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={key: os.environ[key] for key in _KEPT if key in os.environ}
        | {
            "PYTHONPATH": os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path),
            "ARROW_DEFAULT_MEMORY_POOL": "system",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            # As workers.cli has it: nothing of what is validated is shown to packages that extend pydantic.
            "PYDANTIC_DISABLE_PLUGINS": "__all__",
        },
    )


def bound_process(room_bytes: int, cpu_s: int | None = None) -> None:
    """Bound this process, which meets what strangers sent: its memory, its time, and that it leaves no core behind.

    Where memory of the machine is short the system shall end this process, and not another one. To be called again
    where the room is another.

    Args:
        room_bytes: of data, beyond which an allocation fails.
        cpu_s: seconds of processors after which it is ended; None for no limit.
    """
    resource.setrlimit(resource.RLIMIT_DATA, (room_bytes, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    if cpu_s is not None:
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
