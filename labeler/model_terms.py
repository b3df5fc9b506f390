"""What a task says of its learners, as mechanisms: the terms they train by, and the events that its price adds up.

For methods that answer with real numbers the unit of `Task.sigma_votes` is what one record can change, so that sigma is
the noise multiplier and the instance-level price is 1/sigma-GDP up to rounding, whatever the learner is:

* **blind-average.** An agent's contribution is w / s: its weights over their sensitivity (`LinearTerms.sensitivity`).
  The sum is one `VectorSum` with sensitivity 1 and largest norm R / s, noise shares from every agent.
* **aux-distill.** Each agent adds all the noise to its own two heads (labeler.local_heads), so that sigma^-2 is the
  sum of both heads' mu^2. What it answers afterwards is a function of the noisy heads and of public queries; it is
  shared and summed without noise, which is post-processing.

**Caps per person** (`Task.records_per_person`, m; see `labeler.sensitivity`). At instance level a cap that binds makes
one record a replacement, which both sensitivities are for (`labeler.convex`, fact 1). At person level at most m records
leave and none enters: m removals one after the other, each within the sensitivity whatever the others are, so m
times the sensitivity by the triangle inequality, and at most twice the norm bound of one agent's vector, within which
both vectors lie (`VectorSum.group_distance`).
"""

from __future__ import annotations

import math

from labeler.accounting.events import IntegerSum
from labeler.convex import LinearTerms
from labeler.descent import MOST_WEIGHTS
from labeler.errors import InvalidSetting
from labeler.local_heads import LocalHeadTerms
from labeler.sensitivity import records_of_a_person, without_sensitivity
from labeler.task import StatedLevel, Task, Training
from labeler.vector_sum import VectorSum


def training_of(task: Task) -> Training:
    """How agents train.

    Raises:
        InvalidSetting: the task's method trains nothing that its price depends on.
    """
    if task.training is None:
        raise InvalidSetting(f"a task of method {task.method} does not say how agents train")
    return task.training


def linear_terms(task: Task) -> LinearTerms:
    """How agents of a blind-average task train, and how far one record moves what they find.

    Raises:
        InvalidSetting: the model has more weights than rounding is bounded for, or terms are out of bounds.
    """
    training = training_of(task)
    if task.max_queries * task.num_classes > MOST_WEIGHTS:
        raise InvalidSetting(
            f"a model of {task.max_queries} rows and {task.num_classes} classes has more than {MOST_WEIGHTS} weights, "
            "for which rounding is bounded; use a backbone of fewer numbers"
        )
    return LinearTerms(
        learner=training.learner,
        num_classes=task.num_classes,
        regularisation=training.regularisation,
        clip_norm=training.clip_norm,
        radius=training.radius,
        iterations=training.iterations,
        min_records=training.min_records,
    )


def weight_sum(task: Task) -> VectorSum:
    """The one sum of a blind-average task, in units of the sensitivity of one agent's weights."""
    terms = linear_terms(task)
    return VectorSum(
        dimension=task.max_queries * task.num_classes,
        largest_norm=terms.largest_norm / terms.sensitivity,
        sensitivity=1.0,
        sigma=task.sigma_votes,
        agents=task.agents,
        colluding_agents=task.colluding_agents,
        max_dropouts=task.max_dropouts,
    )


def head_terms(task: Task) -> LocalHeadTerms:
    """The two heads of an aux-distill task: sigma^-2 is their mu^2 together, of which the scores take `score_share`.

    Every fifth query is a public negative.
    """
    training = training_of(task)
    return LocalHeadTerms(
        num_classes=task.num_classes,
        head_dimension=training.dimension + 1,
        score_dimension=training.dimension + 1,
        min_records=training.min_records,
        num_negatives=task.num_negatives,
        sigma_head=task.sigma_votes / math.sqrt(1 - training.score_share),
        sigma_scores=task.sigma_votes / math.sqrt(training.score_share),
        head_regularisation=training.regularisation,
        score_regularisation=training.regularisation,
        clip_norm=training.clip_norm,
    )


def answer_sum(task: Task) -> VectorSum:
    """The noisy vector whose price a task has that does not count votes: the sum of all agents, or each agent's own.

    Raises:
        PrivacyRefusal: nobody has stated the sensitivity of the task's method.
    """
    match task.method:
        case "blind-average":
            return weight_sum(task)
        case "aux-distill":
            return head_terms(task).mechanism
        case other:
            raise without_sensitivity(other)


def model_event(task: Task, level: StatedLevel) -> IntegerSum:
    """One answer of every agent to a task whose method does not count votes, rounding included.

    Args:
        task: of such a method.
        level: whose presence is protected.

    Raises:
        InvalidSetting: the level is a person's, and the task has no `records_per_person`.
    """
    return answer_sum(task).event(level, records=records_of_a_person(task) if level == "person" else 1)


def largest_distance(task: Task, level: StatedLevel) -> float:
    """How far neighbouring data move that vector before it is rounded, in the unit of `sigma_votes`; for real noise."""
    spec = answer_sum(task)
    if level == "agent":
        return spec.largest_norm * task.sigma_votes / spec.sigma
    records = records_of_a_person(task) if level == "person" else 1
    return spec.group_distance(records) * task.sigma_votes / spec.sigma
