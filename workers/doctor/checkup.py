"""All steps, one after the other, and what became of them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from labeler.errors import InvalidSetting
from workers.doctor.alone import Step, run_alone
from workers.doctor.finding import Finding
from workers.progress import ProgressCallback, silent


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
