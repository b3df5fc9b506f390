"""The task fields that move its price, and the unit that the price protects.

**Votes for life**: how much a record may ever spend, and how near a query has to be for it to vote. Both are public and
the same for every agent. `labeler.accounting.lifetime` proves the promise.

**Training**: how agents fit the model that they answer with, if a price depends on it.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Annotated, Any, Final, Literal

from pydantic import (
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from labeler.descent import MOST_RECORDS
from labeler.settings import PlainNumbers

DEFAULT_DELTA: Final = 1e-5
"""The failure probability of a guarantee that names none."""

PLANNED_QUERIES: Final = 20
PLANNED_AGENTS: Final = 3
PLANNED_CLASSES: Final = 10
"""The numbers of a plan that names none: there is no job yet from which they follow."""

LEAST: Final = 1e-60
"""Least absolute value of a number that somebody else chooses for arithmetic on private records (labeler.steady)."""

MOST_LIFE_NANO: Final = 10**10
"""The largest B: mu^2 = 10. It promises little (epsilon 17 at delta 1e-5), and the corrections of integer noise are
still far below any delta in use."""


class Life(PlainNumbers):
    """Votes for life: each record carries a spend through all tasks, and votes only while it stays within B."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, use_attribute_docstrings=True)

    budget_nano: Annotated[int, Field(ge=1, le=MOST_LIFE_NANO)]
    """B, the most that one record may ever spend on votes, nano-units of mu^2. All tasks of this kind together are
    sqrt(B)-GDP for one record, however many are asked; B is the largest of any task that the agent answers."""
    least_similarity: Annotated[float, Field(ge=-1, le=1, allow_inf_nan=False)]
    """A record votes only at queries whose cosine with it is at least this. So queries far from a record cost it
    nothing."""
    asked_classes: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """Only records of these classes vote, by their own label; None: all. A job costs nothing to records of classes that
    it does not ask about."""

    def least_product(self, one: int) -> int:
        """Return the smallest inner product of integer features that reaches the similarity: exact on every machine.

        Args:
            one: length, in integers, of a feature of length 1.
        """
        return math.ceil(Fraction(self.least_similarity) * one**2)


NOTHING_TRAINED: Final = {"min_records": 1, "regularisation": 1.0, "clip_norm": 1.0, "iterations": 200}
"""Values of the fields that say how other learners train, for the learners that have no choice (FIXED)."""

PLAIN: Final = "linear"
"""The learner of a task without training, if its method takes this one: it has one spelling, none."""

_ONE_WAY: Final = "which trains in one fixed way"
FIXED: Final = {
    "means": "which sums records and trains nothing", PLAIN: _ONE_WAY, "network": _ONE_WAY, "adapted": _ONE_WAY,
}  # fmt: skip
"""Learners that read no field about training, and why. "means" reads others; those that cast votes read none at all."""

MOST_AXES: Final = 1_000_000

WIDE_RADIUS: Final = 2.0**20
"""Default radius of learner "means", in records: longer sums would be cut, and the noise stays the same."""


MOST_STEPS: Final = 10_000
"""Most steps of sampled training: each is a round, with a commit and a message of every party."""


class Sampled(PlainNumbers):
    """Public terms of `federated`, which trains in steps over secret samples (labeler.methods.federated)."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, use_attribute_docstrings=True)

    rate: Annotated[float, Field(ge=1e-6, le=1, allow_inf_nan=False)]
    """q, the chance with which a record, or an agent, takes part in a step. It is drawn secretly in each step. Noise is
    divided by it, so that at a tiny rate the first step, which pays for all, would leave no model."""
    unit: Literal["record", "agent"] = "record"
    """What is sampled and clipped, record or agent. record: an agent sums the clipped gradients of the records it has
    drawn (DP-FedSGD). agent: an agent that has drawn itself contributes its clipped update (DP-FedAvg)."""
    learning_rate: Annotated[float, Field(ge=LEAST, le=1e6, allow_inf_nan=False)] = 1.0
    """Of a gradient step: the coordinator's, or each of an agent's own if the unit is the agent."""
    momentum: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = 0.0
    """The part of a step with which the next one begins."""
    local_steps: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Gradient steps of an agent over all its records in one round, if the unit is the agent."""

    @model_validator(mode="after")
    def _check(self) -> Sampled:
        if self.unit == "record" and self.local_steps != 1:
            raise ValueError(
                "training.sampled.local_steps must be 1 where the unit is a record: a record's part in several steps "
                'is no sum that can be clipped record by record; use unit = "agent"'
            )
        return self


class Personal(PlainNumbers):
    """A site's own model, made from the shared one (labeler.methods.federated); no price depends on it."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, use_attribute_docstrings=True)

    helper: Literal["identity", "interpolation", "proximal"] = "interpolation"
    """How a site uses the shared model. identity: its own training starts there, for a fixed number of steps.
    interpolation: (1 - alpha) own + alpha shared weights. proximal: its own training is drawn towards it."""
    alpha: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    """The part of the shared model: 1 is the shared model, 0 a site's own. None: every site chooses, on its own
    records."""

    @model_validator(mode="after")
    def _check(self) -> Personal:
        if self.helper == "identity" and self.alpha is not None:
            raise ValueError(
                "training.personal.alpha means nothing for helper identity, whose training starts from the shared "
                "model; leave it out"
            )
        return self

    @model_serializer(mode="wrap")
    def _leave_out_what_sites_choose(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in dump(self).items() if value is not None}


class Training(PlainNumbers):
    """Public terms by which an agent fits the model that it answers with, as far as the price depends on them."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, use_attribute_docstrings=True)

    min_records: Annotated[int, Field(ge=1, le=2**40)]
    """n, a public lower bound on the records of every agent. It bounds how far one record moves a model. An agent with
    fewer still takes part, as if its missing records said nothing."""
    regularisation: Annotated[float, Field(ge=LEAST, le=1e6, allow_inf_nan=False)]
    """lambda of the mean loss + lambda/2 |weights|^2."""
    clip_norm: Annotated[float, Field(ge=LEAST, le=1e6, allow_inf_nan=False)] = 1.0
    """c; features are cut to this L2 norm, whatever a record holds."""
    max_records: Annotated[int, Field(ge=1, le=MOST_RECORDS)] | None = None
    """n_max, a public bound on the records of every agent, which every site must keep. A site declares it when it
    embeds (`labeler embed --max-records`); an agent whose shard does not keep it refuses the task. Then one record
    moves a model by half as much, and half the noise gives the same price (labeler.descent). Not possible if the task
    caps the records of a person."""
    learner: Literal["softmax", "svm", "logistic", "means", "linear", "network", "adapted"] = "softmax"
    """blind-average: "softmax", or "svm" or "logistic" with one class against the rest; or "means", which trains
    nothing: sums of records by class along the axes (labeler.methods.blind_average). It ignores fields about training.
    ensemble: "linear", the same as no training; "network", one hidden layer; or "adapted", the same fitted to the
    features of the questions, too. They take no other field, and have one price (labeler.methods.ensemble)."""
    radius: Annotated[float, Field(ge=LEAST, le=1e9, allow_inf_nan=False)] = 100.0
    """blind-average: R, the largest norm of the weights; for "means" of its sums, in records, and then WIDE_RADIUS by
    default."""
    iterations: Annotated[int, Field(ge=1, le=100_000)] = 200
    """blind-average: gradient steps."""
    axes: Annotated[int, Field(ge=1, le=MOST_AXES)] | None = None
    """blind-average: the number of public axes that, with a public center, map features before the model
    (labeler.linear_model); they are the rows that are asked about. None: features are not mapped. For learner "means"
    it is then one less than `max_queries`, which a run chooses by the noise (labeler.expectation.axes_for)."""
    dimension: Annotated[int, Field(ge=1, le=1_000_000)] = 32
    """aux-distill: the number of leading axes of the public negatives along which features are taken: fewer than the
    negatives, and at most as many as a feature has numbers."""
    score_share: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = 0.2
    """aux-distill: the part of mu^2 for the certainty scores; the head takes the rest. 0: no scores are trained or paid
    for, and every agent's soft labels weigh the same (FedD)."""
    sampled: Sampled | None = None
    """federated: its terms. Then `iterations` are its steps, each a round. `clip_norm` is c, to which the gradient of a
    record or the update of an agent is cut. `radius` bounds the norm of one agent's sum of a step, in clips.
    `min_records` is the number of records per agent that a gradient is averaged over, whatever the real number.
    `regularisation` shrinks the public model from step to step."""
    personal: Personal | None = None
    """federated: every site also makes a model of its own, which it uses at home (`labeler agent predict`) and never
    sends. It changes neither the price nor an answer."""

    @model_validator(mode="before")
    @classmethod
    def _say_what_means_nothing(cls, given: Any) -> Any:
        # A learner without training needs no fields that say how, and has one spelling.
        if isinstance(given, dict) and given.get("learner") in (*FIXED,):
            return {**NOTHING_TRAINED, **({"radius": WIDE_RADIUS} if given["learner"] == "means" else {}), **given}
        return given

    @field_validator("score_share", mode="before")
    @classmethod
    def _leave_the_head_a_budget(cls, share: Any) -> Any:
        if share == 1 and not isinstance(share, bool):
            raise ValueError(
                "must be less than 1: labels come from the head, and those of a head without budget are not private"
            )
        if isinstance(share, float) and 0 < share < LEAST:
            raise ValueError(f"must be 0, or at least {LEAST:g}, so that no noise is too large for numbers")
        return share

    @model_validator(mode="after")
    def _check(self) -> Training:
        if self.learner in FIXED:
            others = {name: one.default for name, one in Training.model_fields.items() if name != "learner"}
            ignored = NOTHING_TRAINED if self.learner == "means" else others | NOTHING_TRAINED
            told = sorted(name for name, value in ignored.items() if getattr(self, name) != value)
            if told:
                raise ValueError(
                    f"training.{told[0]} means nothing for learner {self.learner}, {FIXED[self.learner]}; leave it out"
                )
        if self.sampled is not None:
            self._check_steps()
        elif self.personal is not None:
            raise ValueError(
                "training.personal only means something where training is sampled (method federated), whose public "
                "model a site personalizes; take it out"
            )
        if self.max_records is not None and self.max_records < self.min_records:
            raise ValueError(
                f"training.max_records must be at least the min_records {self.min_records} that a mean is taken over, "
                f"found {self.max_records}"
            )
        return self

    def _check_steps(self) -> None:
        if self.learner != "softmax":
            raise ValueError(f"training.learner must be softmax where training is sampled, found {self.learner}")
        if self.max_records is not None:
            raise ValueError(
                "training.max_records means nothing where training is sampled: a record comes or goes in any case"
            )
        if not 1e-3 <= self.clip_norm <= 1e3:
            raise ValueError(
                "training.clip_norm must lie between 0.001 and 1000 where training is sampled, for the grid that "
                f"gradients lie on; found {self.clip_norm:g}"
            )
        if self.iterations > MOST_STEPS:
            raise ValueError(
                f"training.iterations must be at most {MOST_STEPS} where training is sampled, since each step is a "
                f"round; found {self.iterations}"
            )

    @model_serializer(mode="wrap")
    def _leave_out_what_is_not_asked(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # A task without the field is written, and hashed, as it was before the field existed.
        fields: dict[str, Any] = dump(self)
        for later in ("max_records", "axes", "sampled", "personal"):
            if fields.get(later) is None:
                fields.pop(later, None)
        return fields


Level = Literal["instance", "agent"]
"""The units whose presence a ledger accounts for."""

LEVELS: Final[tuple[Level, Level]] = ("instance", "agent")

StatedLevel = Literal["instance", "person", "agent"]
"""The units whose presence a price is stated for: a person's follows from the same noise and is never charged."""
