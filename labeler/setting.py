"""What of a task a price may depend on, and whose presence a price is stated for.

The mechanisms and their sensitivities are written against `Setting`, and not against `labeler.task.Task`: a task knows
the methods, so no method may know the task. Whatever is not listed here moves no price.
"""

from __future__ import annotations

from typing import Final, Literal, Protocol

from labeler.life import Life
from labeler.training import Training

Level = Literal["instance", "agent"]
"""Whose presence a ledger accounts for."""

LEVELS: Final[tuple[Level, Level]] = ("instance", "agent")

StatedLevel = Literal["instance", "person", "agent"]
"""Whose presence a price is stated for: a person's follows from the same noise and is charged to no account."""


class Setting(Protocol):
    """The public numbers of a task; each is described in `labeler.task.Task`, which is one."""

    @property
    def method(self) -> str: ...

    @property
    def k(self) -> int: ...

    @property
    def sigma_votes(self) -> float: ...

    @property
    def max_queries(self) -> int: ...

    @property
    def steps(self) -> int: ...

    @property
    def rows(self) -> int: ...

    @property
    def num_classes(self) -> int: ...

    @property
    def num_negatives(self) -> int: ...

    @property
    def agents(self) -> int: ...

    @property
    def colluding_agents(self) -> int: ...

    @property
    def max_dropouts(self) -> int: ...

    @property
    def dishonest_talliers(self) -> int | None: ...

    @property
    def noise_contributors(self) -> int: ...

    @property
    def max_agent_records(self) -> int | None: ...

    @property
    def ballot_radius(self) -> int | None: ...

    @property
    def attributes_per_record(self) -> int | None: ...

    @property
    def votes_of_a_record(self) -> int: ...

    @property
    def records_per_person(self) -> int | None: ...

    @property
    def a_record_may_be_replaced(self) -> bool: ...

    @property
    def life(self) -> Life | None: ...

    @property
    def training(self) -> Training | None: ...

    @property
    def delta(self) -> float: ...

    @property
    def release(self) -> str: ...

    @property
    def abstain_below(self) -> int | None: ...

    @property
    def scale(self) -> int: ...

    @property
    def share_sigma_grid(self) -> float: ...
