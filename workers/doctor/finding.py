"""What a step of a check-up found: in words for people, in numbers for machines, with what to do about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

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
