"""What a process of this machine has cost so far, as Linux tells it; None elsewhere."""

from __future__ import annotations

import os
from pathlib import Path


def cpu_seconds(pid: int) -> float | None:
    """CPU seconds of a process and all its threads, in user and system mode; None where nobody tells."""
    try:
        # The name stands in parentheses and may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mib(pid: int) -> float | None:
    """Memory of a process that lies in RAM, in MiB; None where nobody tells."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) for line in lines if line.startswith("VmRSS:")]
    return found[0] / 1024 if found else None
