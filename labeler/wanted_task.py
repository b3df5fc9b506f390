"""A task as people ask for it, in a task file or over REST, before those who answer have decided their part.

One model of these words: a new setting of a task is written in `labeler.task` and here, and both doors have it. Who
takes part, the backbone and the number of queries come with those who answer; `settled` puts them beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from labeler.life import MOST_LIFE_NANO
from labeler.methods import Method, ReleaseKind
from labeler.plain_numbers import PlainNumbers
from labeler.task import MOST_CLASSES, PositiveFinite, Printable, Sigma, Task, Training, parse_task

ClassName = Annotated[Printable, Field(max_length=200)]


class LifeRequest(PlainNumbers):
    """Votes for life: what an image may ever spend, and how near a query has to be for it to vote."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    least_similarity: Annotated[float, Field(ge=-1, le=1, allow_inf_nan=False)]
    budget_nano: Annotated[int, Field(ge=1, le=MOST_LIFE_NANO)] | None = None
    """Nano-units of mu^2; all that the federation has set aside, when neither this nor `epsilon` is given."""
    epsilon: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] | None = None
    """The same as what all votes of an image may ever cost, at the task's delta; in place of `budget_nano`."""
    asked_classes: Annotated[tuple[ClassName, ...], Field(min_length=1, max_length=MOST_CLASSES)] | None = None
    """Only images of these classes vote, and pay for it; of all, when absent."""

    @model_validator(mode="after")
    def _said_once(self) -> LifeRequest:
        if self.epsilon is not None and self.budget_nano is not None:
            raise ValueError("give budget_nano or epsilon, not both: both say what an image may ever spend")
        return self


class WantedTask(PlainNumbers):
    """What is asked, how it is answered and what it may cost; each field as `labeler.task.Task` explains it.

    Attributes:
        sigma_votes: the noise nobody can subtract, in votes; or give `epsilon` instead.
        epsilon: the instance-level price wanted; the noise is solved for it.
        colluding_agents: participants that may know their own noise, because they read the release or collude; where
            nothing is said `labeler.collusion.resolve_colluding_agents` decides.
        life: votes for life; of a service only, whose agents remember.
        classes: public class names in label order; those of whoever answers when absent.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    name: Annotated[Printable, Field(min_length=1, max_length=200)]
    classes: Annotated[tuple[Printable, ...], Field(min_length=2, max_length=MOST_CLASSES)] | None = None
    method: Method = "knn"
    k: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    sigma_votes: Sigma | None = None
    epsilon: PositiveFinite | None = None
    delta: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)]
    release: ReleaseKind = "histogram"
    colluding_agents: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    max_dropouts: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    max_agent_records: Annotated[int, Field(ge=1, le=2**40)] | None = None
    ballot_radius: Annotated[int, Field(ge=1, le=2**40)] | None = None
    records_per_person: Annotated[int, Field(ge=1, le=2**40)] | None = None
    attributes_per_record: Annotated[int, Field(ge=1, le=MOST_CLASSES)] | None = None
    life: LifeRequest | None = None
    training: Training | None = None
    dishonest_talliers: Literal[1, 2] | None = None
    abstain_below: Annotated[int, Field(ge=0, le=2**40)] | None = None

    @model_validator(mode="after")
    def _noise_or_price(self) -> WantedTask:
        if (self.sigma_votes is None) == (self.epsilon is None):
            raise ValueError("give exactly one of sigma_votes (the noise) and epsilon (the price to solve it for)")
        if self.life is not None and self.epsilon is not None:
            raise ValueError(
                "give sigma_votes with life, not epsilon: whatever the noise, all votes for life together cost one "
                "price; the noise decides how many votes an image has"
            )
        return self

    def settled(self, decided: Mapping[str, Any], *, agents: int) -> Task:
        """The task, with what the others decide, and solved for sigma where a price was given.

        Args:
            decided: fields of the task that are not asked for, or that replace what was.
            agents: how many take part.

        Raises:
            InvalidTask: a field is out of bounds, no noise reaches the price, or a round fits no message.
            UnsafeGrid: see Task.scale.
        """
        # Whoever only asks needs no arithmetic of prices: a client loads these words alone.
        from labeler.batching import check_round_fits
        from labeler.collusion import resolve_colluding_agents
        from labeler.solving import solve_sigma

        fields = self.model_dump(exclude={"epsilon"}, exclude_none=True) | {
            **decided,
            "agents": agents,
            "colluding_agents": resolve_colluding_agents(
                self.colluding_agents,
                agents=agents,
                max_dropouts=self.max_dropouts,
                method=self.method,
                dishonest_talliers=self.dishonest_talliers,
            ),
        }
        task = parse_task({"sigma_votes": 1.0} | fields)
        check_round_fits(task, task.max_queries)
        if self.epsilon is None:
            return task
        return parse_task(fields | {"sigma_votes": solve_sigma(task, self.epsilon)})
