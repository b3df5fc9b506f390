"""What was answered as CSV: one line per round, safe to open in a spreadsheet."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any, Final

COLUMNS: Final = (
    "at",
    "task_id",
    "name",
    "requesters",
    "method",
    "classes",
    "job_id",
    "round",
    "queries",
    "talliers",
    "instance_epsilon",
    "agent_epsilon",
    "delta",
    "instance_nano",
    "agent_nano",
)
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")


def as_csv(rounds: Sequence[Mapping[str, Any]]) -> str:
    """The lines with a heading. Lists are joined by semicolons; a price without a bound is an empty cell.

    A text of others that a spreadsheet would take for a formula gets an apostrophe in front.
    """
    written = io.StringIO()
    lines = csv.writer(written, lineterminator="\n")
    lines.writerow(COLUMNS)
    for one in rounds:
        lines.writerow([_cell(one[name]) for name in COLUMNS])
    return written.getvalue()


def _cell(value: object) -> object:
    if value is None:
        return ""
    text = "; ".join(map(str, value)) if isinstance(value, list | tuple) else value
    return f"'{text}" if isinstance(text, str) and text.startswith(_FORMULA) else text
