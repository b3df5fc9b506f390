"""Caps of accounts, as the settings of a coordinator and the policy of a site state them."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from labeler.budget import MOST_EPSILON, budget_for
from labeler.setting import Level

EpsilonCap = Annotated[float, Field(gt=0, le=MOST_EPSILON, allow_inf_nan=False)]
Cap = EpsilonCap | Literal["unlimited"]
"""A larger cap would promise nothing; `unlimited` says that openly."""


class CapsTable(BaseModel):
    """A table of caps in a settings file: the most that an account may ever spend, at the file's delta."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, use_attribute_docstrings=True)

    instance_epsilon: Cap
    """On what is learned about one record."""
    agent_epsilon: Cap
    """On what is learned about one agent's whole data."""
    life_epsilon: EpsilonCap | None = None
    """The part of `instance_epsilon` set aside permanently for tasks with votes for life (`Task.lifetime_budget`). All
    such tasks together cost one record no more. If absent, none is made or answered."""

    @model_validator(mode="after")
    def _life_is_a_part(self) -> Self:
        if self.life_epsilon and self.instance_epsilon != "unlimited" and self.life_epsilon > self.instance_epsilon:
            raise ValueError("life_epsilon is a part of instance_epsilon, so it cannot be larger")
        return self

    def cap_nano(self, level: Level, delta: float) -> int | None:
        """Return the cap of one level in nano-units of mu^2, rounded down; None if unlimited."""
        cap = self.instance_epsilon if level == "instance" else self.agent_epsilon
        return None if cap == "unlimited" else budget_for(cap, delta)

    def set_aside_nano(self, delta: float) -> int | None:
        """Return B, the budget of votes for life, in nano-units of mu^2; None if nothing is set aside.

        Raises:
            InvalidSetting: the epsilon is too small for any vote, or larger than what votes for life are proved for.
        """
        # Imported on use: few federations cast votes for life.
        from labeler.accounting.lifetime import set_aside_nano

        return None if self.life_epsilon is None else set_aside_nano(budget_for(self.life_epsilon, delta))
