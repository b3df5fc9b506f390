"""A module of ours in a process of its own that meets what strangers sent, without our environment.

Its environment may not hold what ours holds (passwords, tokens), and its libraries take one thread each, so that it
costs the core it was given. What bounds its memory and its time is said by the module; whoever starts it ends it.
"""

from __future__ import annotations

import os
import subprocess
import sys
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
        },
    )
