"""A whole federation on one machine: its home, its processes, and the supervisor that starts and stops them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Epsilon = float | Literal["unlimited"]


@dataclass(frozen=True)
class FederationPlan:
    """The plan of a new federation; None leaves a field to its default, or to what is there.

    Attributes:
        agents: how many; 5 by default, or as many as there are shards.
        shards: one per agent, used in place; none: the digits of scikit-learn are dealt out.
        backbone: what embeds a requester's images; by default `pixels:8` for digits, and what the shards say.
        instance_epsilon: budget of the federation and of every agent, per private image.
        life_epsilon: what of the budget per image is set aside for votes for life; nothing where absent.
    """

    agents: int | None = None
    shards: tuple[Path, ...] = ()
    backbone: str | None = None
    instance_epsilon: Epsilon | None = None
    life_epsilon: float | None = None
