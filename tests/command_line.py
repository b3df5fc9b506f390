"""The command line of `labeler`, run in the process of a test: the fixture `labeler`, which conftests import."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from workers.cli import main


@dataclass(frozen=True)
class Outcome:
    """The output of a command, and how it ended; what it complained of stands on one line."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """Return what --json printed."""
        return json.loads(self.out)


Labeler = Callable[..., Outcome]


@pytest.fixture
def labeler(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Labeler:
    """`labeler(...)` runs the command line with these arguments."""

    def run(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["labeler", *map(str, arguments)])
        capsys.readouterr()
        code = 0
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        printed = capsys.readouterr()
        return Outcome(code, printed.out, " ".join(printed.err.split()))

    return run
