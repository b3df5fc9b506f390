"""What will go: what people may still use, since when it is deprecated, what to use instead, and when it goes.

Versions are semantic: what is public (docs/upgrades.md says what that is) stays for two minor releases after the one
that deprecates it. Whoever uses it is told. A test fails in the release in which something was to go and did not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Deprecation:
    """One thing that will go.

    Attributes:
        what: as its users write it.
        instead: what they write from now on.
        since: the release that says so first, (major, minor).
        gone_in: the release that has it no more; at least two minor releases later.
    """

    what: str
    instead: str
    since: tuple[int, int]
    gone_in: tuple[int, int]

    def __str__(self) -> str:
        first, last = (f"{major}.{minor}" for major, minor in (self.since, self.gone_in))
        return f"{self.what} is deprecated since {first} and goes in {last}; use {self.instead}"


DEPRECATIONS: Final[Mapping[str, Deprecation]] = {
    "one-hot": Deprecation("the method name one-hot", "ensemble, its name in labels and prices", (0, 1), (0, 3)),
}
"""By a short name; docs/upgrades.md lists every one."""
