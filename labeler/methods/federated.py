"""DP-FedSGD (Abadi et al. 2016) and DP-FedAvg (McMahan et al. 2018): a public linear model is trained in steps.

Each step is over a secret sample of what agents hold.

A model travels the way of votes, as for blind-average: the rows asked about are the unit vectors of feature space, or
public axes, and beside them the public model as the steps before have made it (`labeler.federated`). Each step is one
round. The unit of `Task.sigma_votes` is the clip: what one record (`unit = "record"`) or one agent (`unit = "agent"`)
can change in the sum of one step, so that sigma is the noise multiplier of the papers.

**What T steps cost.** Write D2 for the clip in grid units, rounding included (`labeler.noise`), v for the variance
that the h honest shares add, q for the rate.

| level | unit = "record" | unit = "agent" |
|---|---|---|
| instance | T rounds over secret samples (`accounting.sampled`) | the same twice (`accounting.replaced`) |
| agent | T R^2, R the radius: no sampling is counted on | T rounds over secret samples |

*Where the unit that comes or goes is the one that is sampled*, a step is the sum of the others' vectors, whatever they
are, plus a vector of norm at most D2 with chance q, plus noise. *Where an agent is sampled and one of its records
changes*, its vector becomes another of the ball. *Where records are sampled and an agent goes*, fix all coins: a step
is then a Gaussian of the change that the agent makes at most, and a mixture over coins that do not depend on the data
is no easier to tell apart than the worst of them. theta_t follows from what was opened, so steps compose adaptively.

**One pair for all steps.** The T steps are one composition, charged as the pair (mu'^2, delta_0) before the first of
them is opened, with delta_0 at most SPILL of mu'^2, so that ledgers of mu^2 bound it as they bound winners'
(`labeler.budget`). It is not cut: of one step alone the pair is hardly less than a step without sampling. Whoever is
asked the first of a task's steps, in whatever order they come, is charged for all; each further one the least there is
(`labeler.batching.round_charges`). A job that fails after its first step stays charged for all of them.

**PriFedSync** (Zheng et al. 2021) trains a model of its own at every agent beside the one that is shared. What an agent
keeps is not released and costs nothing: `labeler.local_heads` and a site's own shell are the place for it.

References:
    Abadi et al. 2016. McMahan, Ramage, Talwar, Zhang 2018 (DP-FedAvg). Mironov, Talwar, Zhang 2019.
    Zhu, Dong, Wang 2022.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Final

from labeler.errors import InvalidSetting
from labeler.methods.sensitivity import training_of
from labeler.methods.terms import BoundedNumbers, MethodTraits
from labeler.setting import Setting, StatedLevel

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from labeler.accounting.events import IntegerSum
    from labeler.federated import StepTerms
    from labeler.noise import VectorSum


def step_terms(setting: Setting) -> StepTerms:
    """One step as a mechanism.

    Raises:
        InvalidSetting: the rows are not those of the public axes, or too many.
    """
    from labeler.descent import MOST_WEIGHTS
    from labeler.federated import StepTerms

    training = training_of(setting)
    if training.sampled is None:
        raise InvalidSetting(f"a task of method {setting.method} does not say how it samples (training.sampled)")
    if training.axes is not None and setting.rows != training.axes + 1:
        raise InvalidSetting(
            f"with training.axes {training.axes} each step asks for one row per axis and one for the constant; make a "
            f"task with max_queries = {(training.axes + 1) * setting.steps}, found {setting.max_queries}"
        )
    if setting.rows * setting.num_classes > MOST_WEIGHTS:
        raise InvalidSetting(
            f"a model of {setting.rows} rows and {setting.num_classes} classes has more than {MOST_WEIGHTS} weights, "
            "for which rounding is bounded; use training.axes, or a backbone of fewer numbers"
        )
    return StepTerms(
        num_classes=setting.num_classes,
        rows=setting.rows,
        clip=training.clip_norm,
        unit=training.sampled.unit,
        radius=max(1.0, training.radius),
        rate=Fraction(training.sampled.rate),
    )


def step_sum(setting: Setting) -> VectorSum:
    """The sum of one step, in units of `StepTerms.sensitivity`; of all steps `all_steps` is the event.

    An agent's contribution is the sum of its drawn records' clipped gradients on a ball, or its clipped update or zero,
    over `StepTerms.sensitivity`, where it is proved what its unit can change (labeler.federated, facts 1 to 3). Noise
    shares come from every agent, or from the talliers. How T such sums over secret samples compose: this module.
    """
    from labeler.noise import VectorSum

    terms = step_terms(setting)
    return VectorSum(
        dimension=terms.numbers,
        largest_norm=terms.largest_norm / terms.sensitivity,
        sensitivity=1.0,
        sigma=setting.sigma_votes,
        agents=setting.agents,
        colluding_agents=setting.colluding_agents,
        max_dropouts=setting.max_dropouts,
        dishonest_talliers=setting.dishonest_talliers,
    )


def all_steps(setting: Setting, level: StatedLevel) -> IntegerSum:
    """All steps of a task as one event; see the module.

    Raises:
        InvalidSetting: the level is a person's, for which nothing is proved.
    """
    from labeler.accounting.sampled import IntegerReplaced, IntegerSampled
    from labeler.budget import LEAST_DELTA_OF_WINNERS

    if level == "person":
        raise InvalidSetting("sampled training states no price for a person: its task has no records_per_person")
    terms, spec = step_terms(setting), step_sum(setting)
    by_record = terms.unit == "record"
    # What is sampled comes or goes: the record, or the agent. An agent that is sampled has other records.
    step = spec.event(level if by_record else "agent")
    # Two vectors of one ball: at most twice as far apart as either is long, in norm and in every coordinate.
    is_replaced = not by_record and level == "instance"
    largest = step.largest_change * (2 if is_replaced else 1)
    if terms.rate == 1 or setting.delta < LEAST_DELTA_OF_WINNERS or (by_record and level == "agent"):
        return replace(
            step,
            squared_sensitivity=step.squared_sensitivity * setting.steps * (4 if is_replaced else 1),
            largest_change=largest,
            coordinates=step.coordinates * setting.steps,
            level=level,
        )
    event = IntegerReplaced if is_replaced else IntegerSampled
    return event(
        squared_sensitivity=step.squared_sensitivity,
        largest_change=largest,
        grid_scale=step.grid_scale,
        share_sigma_grid=step.share_sigma_grid,
        noise_contributors=step.noise_contributors,
        coordinates=step.coordinates * setting.steps,
        level=level,
        sampling_rate=terms.rate,
        rounds=setting.steps,
    )


def longest_step_grid(setting: Setting) -> int:
    """The largest norm of one agent's numbers, grid units, rounding to the grid included."""
    return step_sum(setting).longest_grid


def check_step(numbers: NDArray[np.int64], setting: Setting) -> None:
    """Refuse numbers beyond what the price covers; their own length is private and not told."""
    sentence = "the numbers of an agent are longer than a clipped sum can be, which this task's price does not cover"
    step_sum(setting).check(numbers, sentence)


TRAITS: Final = MethodTraits(
    "DP-FedSGD, DP-FedAvg",
    "in each step, the clipped gradients of a secret sample of its records, or its clipped update",
    sums="clipped gradients",
    asked_at_once=True,
    counts=False,
    asks_for_a_model=True,
    is_sampled=True,
    stated=BoundedNumbers(step_sum, longest_step_grid, check_step, all_steps),
)
