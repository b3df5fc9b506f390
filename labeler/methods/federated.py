"""DP-FedSGD (Abadi et al. 2016) and DP-FedAvg (McMahan et al. 2018): a public linear model is trained in steps.

Each step is over a secret sample of what agents hold.

A model is sent like votes, as for blind-average. The rows asked about are the unit vectors of feature space, or public
axes, together with the public model that the earlier steps have made (`labeler.methods.federated`). Each step is one
round. The unit of `Task.sigma_votes` is the clip. It bounds the change of one step's sum by one record
(`unit = "record"`) or one agent (`unit = "agent"`), so sigma is the noise multiplier of the papers.

**The cost of T steps.** Write D2 for the clip in grid units, rounding included (`labeler.noise`), v for the variance
that the h honest shares add, q for the rate.

| level | unit = "record" | unit = "agent" |
|---|---|---|
| instance | T rounds over secret samples (`accounting.sampled`) | the same twice (`accounting.replaced`) |
| agent | T R^2, R the radius: no sampling is counted on | T rounds over secret samples |

*Suppose that the unit that comes or goes is the one that is sampled.* A step is the sum of the others' vectors,
whatever they are, plus a vector of norm at most D2 with chance q, plus noise. *If an agent is sampled and one of its
records changes*, its vector becomes another of the ball. *If records are sampled and an agent goes*, fix all coins. A
step is then a Gaussian of the largest change that the agent makes. A mixture over coins that do not depend on the data
is no easier to tell apart than the worst of them. theta_t follows from what was opened, so steps compose adaptively.

**One pair for all steps.** The T steps are one composition, charged as the pair (mu'^2, delta_0) before the first of
them is opened. delta_0 is at most SPILL of mu'^2, so that ledgers of mu^2 bound it as they bound winners'
(`labeler.budget`). The composition is not cut: for one step alone the pair is hardly less than without sampling. An
agent that answers the first of a task's steps, in whatever order they come, is charged for all. Each further one costs
the least possible (`labeler.batching.round_charges`). A job that fails after its first step stays charged for all.

**PriFedSync** (Zheng et al. 2021): with `training.personal` each site also makes its own model, from the public
theta_t of a step and its own records (`workers.learning.personal`). *It costs nothing.* What a site sends is a function
of its records, its key and the question. The field gives the task another digest, as another name would, and changes
nothing else of it. A personal model is made when somebody at the site asks for it, and is no argument of any answer. So
what everybody else sees has the law that it has without, and every bound on it stays. Nothing is proved of a personal
model or of its predictions: they follow from private records without noise, and stay at the site.

References:
    Abadi et al. 2016. McMahan, Ramage, Talwar, Zhang 2018 (DP-FedAvg). Mironov, Talwar, Zhang 2019.
    Zhu, Dong, Wang 2022.

**An agent's answer in one step** over a secret sample.

    theta_t, public  -->  every agent: a secret sample, clipped, summed  -->  one noisy `VectorSum`  -->  theta_(t+1).

With unit "record" (DP-FedSGD) each record of an agent takes part in a step with chance q, by its own coin. The agent
sums the gradients of those that do, each cut to norm c, and projects the sum onto the ball of radius R c. It answers
with the result in units of c. With unit "agent" (DP-FedAvg) the agent tosses one coin and makes its local steps from
theta_t in any case. It answers with the change of the model cut to norm c, or with zero. An agent always answers: a
zero vector gets noise like any other.

**The coins** are words of the round's own key (`workers.agent.agent`), compared with floor(q 2^64). Each record's
chance is that number over 2^64, at most q, and no coin depends on another record. A price for q holds for less. The key
is drawn with the charge and erased with the round, and the answer is stored before a byte of it leaves. So there is one
sample for a round, or none, and only the agent can ever know it. The model is part of the round's digest
(`labeler.tally.QueryBatch`). A step that is asked again from another model is another round, with new coins and noise,
and one more of the T that were paid for.

**Fact 1, the gradient of a record is a function of the record and theta alone, to the last bit, and at most c long.**
A row z = (phi(x), 1) is cut to whole UNIT-ths number by number. theta is whole THETA_UNIT-ths, no column of it longer
than LONGEST_COLUMN. Every partial sum of z theta is then a whole number below
sqrt(2) UNIT LONGEST_COLUMN THETA_UNIT < 2^53: exact in double precision in any order and any block. Scores become a
vector d = p - e_y by a fixed sequence of operations on single numbers, each correctly rounded
(`workers.learning.linear`). Privacy does not depend on its resemblance to a softmax. d is shortened to c / |z| and cut
towards zero to whole UNIT-ths, which lengthens nothing. So |z d| = |z| |d| <= c: the margin 2^-40 with which c is taken
covers the few roundings of the two norms.

**Fact 2, one record added or removed moves the sum by its own gradient or not at all.** Sums of whole numbers are
exact, and the samples of the others do not depend on it. So it moves by at most c, and the ball moves no two vectors
further apart (it is convex). Reading whole numbers as doubles and the ball's own rounding are off by R (D + 10) 2^-53
at most, as in `labeler.methods.blind_average`, fact 4: they are in `sensitivity`.

**Fact 3, with unit "agent"** the answer is zero or a vector of norm at most c, which becomes zero if the agent goes.
Whatever a record changes, both vectors lie in one ball: at most 2 c apart.

Everything computed from the opened steps is post-processing (`labeler.linear_model`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Final, Literal

import numpy as np
from numpy.typing import NDArray

from labeler.accounting.sampled import IntegerReplaced, IntegerSampled
from labeler.budget import LEAST_DELTA_OF_WINNERS
from labeler.descent import MOST_WEIGHTS
from labeler.errors import BadData, InvalidSetting, PrivacyRefusal
from labeler.methods.blind_average import ball_rounding, check_dimension
from labeler.methods.sensitivity import BoundedNumbers, Method, training_of
from labeler.noise import VectorSum
from labeler.records import axes_of
from labeler.setting import StatedLevel

if TYPE_CHECKING:
    from labeler.accounting.events import IntegerSum
    from labeler.records import Learner, Records, RunnerContext
    from labeler.tally import QueryBatch
    from labeler.task import Task


def step_terms(task: Task) -> StepTerms:
    """Return one step as a mechanism.

    Raises:
        InvalidSetting: the rows are not those of the public axes, or too many.
    """
    training = training_of(task)
    if training.sampled is None:
        raise InvalidSetting(f"a task of method {task.method} does not say how it samples (training.sampled)")
    if training.axes is not None and task.rows != training.axes + 1:
        raise InvalidSetting(
            f"with training.axes {training.axes} each step asks for one row per axis and one for the constant; make a "
            f"task with max_queries = {(training.axes + 1) * task.steps}, found {task.max_queries}"
        )
    if task.rows * task.num_classes > MOST_WEIGHTS:
        raise InvalidSetting(
            f"a model of {task.rows} rows and {task.num_classes} classes has more than {MOST_WEIGHTS} weights, "
            "for which rounding is bounded; use training.axes, or a backbone of fewer numbers"
        )
    return StepTerms(
        num_classes=task.num_classes,
        rows=task.rows,
        clip=training.clip_norm,
        unit=training.sampled.unit,
        radius=max(1.0, training.radius),
        rate=Fraction(training.sampled.rate),
    )


def step_sum(task: Task) -> VectorSum:
    """Return the sum of one step, in units of `StepTerms.sensitivity`; `all_steps` is the event of all steps.

    An agent's contribution is the sum of its drawn records' clipped gradients on a ball, or its clipped update or zero,
    over `StepTerms.sensitivity`. That is proved to bound the change by its unit (labeler.methods.federated, facts 1 to
    3). Noise shares come from every agent, or from the talliers. This module states how T such sums over secret samples
    compose.
    """
    terms = step_terms(task)
    return VectorSum(
        dimension=terms.numbers,
        largest_norm=terms.largest_norm / terms.sensitivity,
        sensitivity=1.0,
        sigma=task.sigma_votes,
        agents=task.agents,
        colluding_agents=task.colluding_agents,
        max_dropouts=task.max_dropouts,
        dishonest_talliers=task.dishonest_talliers,
    )


def all_steps(task: Task, level: StatedLevel) -> IntegerSum:
    """Return all steps of a task as one event; see the module.

    Raises:
        InvalidSetting: the level is a person's, for which nothing is proved.
    """
    if level == "person":
        raise InvalidSetting("sampled training states no price for a person: its task has no records_per_person")
    terms, spec = step_terms(task), step_sum(task)
    by_record = terms.unit == "record"
    # If the sampled unit comes or goes, it is the record or the agent. If an agent is sampled, its records may change.
    step = spec.event(level if by_record else "agent")
    # Two vectors of one ball: at most twice as far apart as either is long, in norm and in every coordinate.
    is_replaced = not by_record and level == "instance"
    largest = step.largest_change * (2 if is_replaced else 1)
    if terms.rate == 1 or task.delta < LEAST_DELTA_OF_WINNERS or (by_record and level == "agent"):
        return replace(
            step,
            squared_sensitivity=step.squared_sensitivity * task.steps * (4 if is_replaced else 1),
            largest_change=largest,
            coordinates=step.coordinates * task.steps,
            level=level,
        )
    event = IntegerReplaced if is_replaced else IntegerSampled
    changes = {"largest_change": largest, "coordinates": step.coordinates * task.steps, "level": level}
    return event(**vars(step) | changes, sampling_rate=terms.rate, rounds=task.steps)


UNIT: Final = 2**20
"""Whole numbers per 1 of a coordinate of a row, and of a slope."""

THETA_UNIT: Final = 2**16
"""Whole numbers per 1 of a coordinate of the public model."""

LONGEST_COLUMN: Final = 2.0**15
"""Largest norm of one class's weights."""

MARGIN: Final = 2.0**-40
"""Relative margin for the rounding of two norms and a quotient (Fact 1)."""


@dataclass(frozen=True)
class StepTerms:
    """One step as a mechanism; see the module.

    Attributes:
        num_classes: K.
        rows: rows of the model: one per number of a row, and one for the constant.
        clip: c.
        unit: "record" or "agent", which is clipped and sampled.
        radius: R, the largest norm of an agent's sum, in clips; with unit "agent" it is 1.
        rate: q, exactly.

    Raises:
        InvalidSetting: a value is out of bounds.
    """

    num_classes: int
    rows: int
    clip: float
    unit: Literal["record", "agent"]
    radius: float
    rate: Fraction

    def __post_init__(self) -> None:
        if self.num_classes < 2 or self.rows < 2 or not 0 < self.clip < math.inf:
            raise InvalidSetting("a step has at least two classes and rows, and clips at a positive finite norm")
        if not 0 < self.rate <= 1 or not self.radius >= 1:
            raise InvalidSetting(f"a step samples at a rate up to 1 into a ball of at least 1 clip, found {self}")

    @property
    def numbers(self) -> int:
        """Return D, the number of coordinates."""
        return self.rows * self.num_classes

    @property
    def feature_norm(self) -> float:
        """Return the largest norm of rows without their constant; longer ones are cut."""
        return 1.0

    @property
    def bias_feature(self) -> float:
        """Return the constant that is added to a row."""
        return 1.0

    @property
    def reach(self) -> float:
        """Return R, in clips."""
        return self.radius if self.unit == "record" else 1.0

    @property
    def largest_norm(self) -> float:
        """Return a bound on an agent's vector in clips, rounding included: the change by one agent."""
        return self.reach + ball_rounding(self.reach, self.numbers)

    @property
    def sensitivity(self) -> float:
        """Return how far the presence of the sampled unit moves an agent's vector, in clips, rounding included."""
        return min(1 + MARGIN + 2 * ball_rounding(self.reach, self.numbers), 2 * self.largest_norm)

    @property
    def threshold(self) -> int:
        """Return the threshold in 2^64 below which a coin says yes."""
        return math.floor(self.rate * 2**64)


def on_grid(theta: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a model as it is asked about: no column too long, and whole THETA_UNIT-ths, cut towards zero."""
    squares = np.zeros(theta.shape[1])
    for row in theta:
        squares += row * row
    lengths = np.sqrt(squares) * (1 + MARGIN)
    # Slightly shorter than the longest, so that a shortened model is not shortened again.
    factors = np.where(lengths > LONGEST_COLUMN, LONGEST_COLUMN * (1 - 2.0**-20) / np.maximum(lengths, 1.0), 1.0)
    shorter = theta * factors
    return np.asarray(np.trunc(shorter * THETA_UNIT) / THETA_UNIT)


def check_model(theta: NDArray[np.float64], task: Task) -> None:
    """Refuse an array that is not a public model of the task.

    Raises:
        BadData: another shape, a number that is not finite or not on the grid, or a column that is too long.
    """
    if theta.dtype != np.float64 or theta.shape != (task.rows, task.num_classes) or not np.isfinite(theta).all():
        raise BadData(f"the public model of a step has shape ({task.rows}, {task.num_classes}), finite float64")
    if np.abs(theta).max() > LONGEST_COLUMN or not np.array_equal(on_grid(theta), theta):
        raise BadData("the public model of a step is not on its grid, or too long")


def ballots(task: Task, batch: QueryBatch, records: Records, context: RunnerContext) -> NDArray[np.int64]:
    """Return an agent's part of one step, on the grid, in units of its unit's largest change; shape (rows,
    num_classes).

    It uses all of its records, since a cut would let one record replace another.

    Raises:
        InvalidSetting: there is no public model.
        BadData: it is not one of this task.
    """
    if batch.model is None:
        raise InvalidSetting("a step of sampled training is asked with the public model that it begins from")
    # `check_questions` checked this before the charge; check again, with public numbers alone: beyond its grid a
    # model could make one record's scores infinite, and with them the sum.
    check_model(batch.model, task)
    terms = step_terms(task)
    vector = context.learner.step(
        records.trainable(None),
        batch.model,
        terms=terms,
        axes=axes_of(task, batch.features),
        training=training_of(task),
        source=context.local_noise(),
    )
    return step_sum(task).quantize(vector / terms.sensitivity).reshape(len(batch), task.num_classes)


def check_questions(task: Task, batch: QueryBatch, _: Learner) -> None:
    """Refuse a batch that is not a step of the task.

    Raises:
        PrivacyRefusal: not all rows of one step, or no model.
        BadData: the model is not one of this task.
    """
    if batch.model is None or batch.first_query % task.rows:
        raise PrivacyRefusal(
            "a step of sampled training asks about all rows of its model, with the public model that it begins from"
        )
    check_model(batch.model, task)


def one_record(task: Task) -> str:
    """Return what one record changes, in words."""
    terms = step_terms(task)
    by_record = terms.unit == "record"
    return (
        f"{'a record' if by_record else 'an agent'} moves a step by at most one clip, and takes part in it with a "
        f"chance of {float(terms.rate):g} that nobody else learns: that is counted on where it comes or goes, and "
        + ("not at the other level" if by_record else "twice where one of its records changes what it adds")
    )


METHOD: Final = Method(
    "DP-FedSGD, DP-FedAvg",
    "in each step, the clipped gradients of a secret sample of its records, or its clipped update",
    sums="clipped gradients",
    ballots=ballots,
    stated=BoundedNumbers.of_vectors(
        step_sum,
        "the numbers of an agent are longer than a clipped sum can be, which this task's price does not cover",
        all_steps,
    ),
    takes=frozenset({"training.axes", "training.sampled"}),
    learners=("softmax",),
    single_round=True,
    labels="images",
    check_room=check_dimension,
    check_questions=check_questions,
    is_attacked=True,
    one_record=one_record,
)
