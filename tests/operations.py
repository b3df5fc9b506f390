"""Which operations a piece of work runs: every bytecode of the project and of numpy's own Python, in order.

Two neighboring worlds shall run the same ones. A branch taken in one of them alone, also within an expression, is seen;
how long arrays are is not. Where the number of tiles differs, compare sets.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
_TRACED = (*(str(ROOT / name) + "/" for name in ("labeler", "feature_store", "workers")), str(Path(np.__file__).parent))

Operation = tuple[str, int, int]
"""File and line of a function, and the place of an instruction in it."""


def operations(work: Callable[[], object]) -> list[Operation]:
    """The instructions that `work` runs, in this thread, in order."""
    done: list[Operation] = []
    before = sys.gettrace()

    def within(frame: FrameType, event: str, _: Any) -> Any:
        if event == "opcode":
            code = frame.f_code
            done.append((code.co_filename, code.co_firstlineno, frame.f_lasti))
        return within

    def enters(frame: FrameType, _: str, __: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_TRACED):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return within

    sys.settrace(enters)
    try:
        work()
    finally:
        sys.settrace(before)
    return done


def difference(one: list[Operation], other: list[Operation]) -> str:
    """Return where two worlds part, for people; empty where they do not."""
    for number, (here, there) in enumerate(zip_longest(one, other)):
        if here != there:
            last = one[max(0, number - 1)]
            return f"after {number} instructions, behind {last}: {here} or {there} ({len(one)} and {len(other)} in all)"
    return ""
