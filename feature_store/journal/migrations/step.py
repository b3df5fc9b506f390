"""One step from a version of the tables to the next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sqlalchemy import Connection


@dataclass(frozen=True)
class Step:
    """What is done within one write transaction (`Database.remodel`).

    Attributes:
        source, target: versions, one apart.
        apply: makes the tables of the source those of the target. Tables that a journal lacks are not made: a store
            makes its own. It leaves `ledger_entries` and what it means as it is.
    """

    source: int
    target: int
    apply: Callable[[Connection], None]
