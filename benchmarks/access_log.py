"""How long a load's requests took inside the coordinator, out of the log that it writes in any case."""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Final

_KINDS: Final = {
    ("POST", "/v1/jobs:estimate"): "price",
    ("POST", "/v1/jobs"): "submit",
    ("GET", "/v1/jobs/{job_id}"): "status",
    ("GET", "/v1/jobs/{job_id}/labels"): "labels",
}


def seconds_inside(logs: Path, began_at: float) -> dict[str, list[float]]:
    """How long requests took by the coordinator's own log since a moment: from the end of their headers to the answer.

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
