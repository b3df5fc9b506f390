"""Caps of accounts, as the settings of a coordinator and the policy of a site state them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from labeler.budget import MOST_EPSILON, budget_for
from labeler.setting import Level

Cap = Annotated[float, Field(gt=0, le=MOST_EPSILON, allow_inf_nan=False)] | Literal["unlimited"]
"""An epsilon as people write a cap; a larger one would promise nothing, and `unlimited` says that openly."""


class CapsTable(BaseModel):
    """The most that an account may ever spend, as settings files state it: `[federation]`, `[agents]`, `[budget]`.

    Attributes:
        instance_epsilon: for one record, at the file's delta, or "unlimited".
        agent_epsilon: for one agent's whole data, at the file's delta, or "unlimited".
        life_epsilon: the part of `instance_epsilon` set aside permanently for tasks with votes for life. If absent, no
            such task can be made.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    instance_epsilon: Cap
    agent_epsilon: Cap
    life_epsilon: Annotated[float, Field(gt=0, le=MOST_EPSILON, allow_inf_nan=False)] | None = None

    @model_validator(mode="after")
    def _life_is_a_part(self) -> CapsTable:
        if self.life_epsilon and self.instance_epsilon != "unlimited" and self.life_epsilon > self.instance_epsilon:
            raise ValueError("life_epsilon is a part of instance_epsilon, so it cannot be larger")
        return self

    def life_cap_nano(self, delta: float) -> int | None:
        """Return B, the budget of votes for life, in nano-units of mu^2; None if nothing is set aside.

        Raises:
            InvalidSetting: the epsilon is too small for any vote, or larger than what votes for life are proved for.
        """
        if self.life_epsilon is None:
            return None
        # Imported here: few federations cast votes for life.
        from labeler.accounting.lifetime import set_aside_nano

        return set_aside_nano(budget_for(self.life_epsilon, delta))

    def cap_nano(self, level: Level, delta: float) -> int | None:
        """Return the cap of one level in nano-units of mu^2, rounded down; None if unlimited."""
        cap = self.instance_epsilon if level == "instance" else self.agent_epsilon
        return None if cap == "unlimited" else budget_for(cap, delta)
