"""DP-Helmet (Kirschte et al. 2022): an agent contributes the weights of a linear model, and their mean is released.

A model travels the way of votes: asked about are the unit vectors of feature space, at which the scores of a linear
model are its weights. The unit of `Task.sigma_votes` is what one record can change, so that sigma is the noise
multiplier and the instance-level price is 1/sigma-GDP up to rounding, whatever the learner is.

How the weights are found: `labeler.convex`, `labeler.descent`, `workers.voting.blind_average`. With the learner "means"
they are sums of records by class, along public axes: `labeler.class_means`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from labeler.errors import InvalidSetting
from labeler.methods.sensitivity import kept_bound, training_of
from labeler.methods.terms import BoundedNumbers, MethodTraits
from labeler.setting import Setting, Training

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from labeler.class_means import MeanTerms
    from labeler.convex import LinearTerms
    from labeler.noise import VectorSum


def model_terms(setting: Setting) -> LinearTerms | MeanTerms:
    """How agents find their weights, and how far one record moves them.

    Raises:
        InvalidSetting: as for `linear_terms`.
    """
    from labeler.class_means import MeanTerms

    training = training_of(setting)
    if training.learner != "means" or training.axes is None:
        return linear_terms(setting)
    _check_rows(setting, training)
    return MeanTerms(
        num_classes=setting.num_classes,
        axes=training.axes,
        radius=training.radius,
        max_records=kept_bound(setting),
        may_replace=setting.a_record_may_be_replaced,
    )


def linear_terms(setting: Setting) -> LinearTerms:
    """How agents train, and how far one record moves what they find.

    Raises:
        InvalidSetting: the rows are not those of the public axes, the model has more weights than rounding is bounded
            for, or terms are out of bounds.
    """
    from labeler.convex import LinearTerms

    training = training_of(setting)
    if training.learner == "means":
        raise InvalidSetting("learner means trains no linear model, so it has no terms of one")
    _check_rows(setting, training)
    return LinearTerms(
        learner=training.learner,
        num_classes=setting.num_classes,
        regularisation=training.regularisation,
        clip_norm=training.clip_norm,
        radius=training.radius,
        iterations=training.iterations,
        min_records=training.min_records,
        max_records=kept_bound(setting),
    )


def _check_rows(setting: Setting, training: Training) -> None:
    from labeler.descent import MOST_WEIGHTS

    if training.axes is not None and setting.max_queries != training.axes + 1:
        raise InvalidSetting(
            f"with training.axes {training.axes} the rows of the model are one per axis and one for the constant; make "
            f"a task with max_queries = {training.axes + 1}, found {setting.max_queries}"
        )
    if setting.max_queries * setting.num_classes > MOST_WEIGHTS:
        raise InvalidSetting(
            f"a model of {setting.max_queries} rows and {setting.num_classes} classes has more than {MOST_WEIGHTS} "
            "weights, for which rounding is bounded; use a backbone of fewer numbers"
        )


def weight_sum(setting: Setting) -> VectorSum:
    """The one sum of the task, in units of the sensitivity s of one agent's weights.

    An agent's contribution is w / s, with s from `LinearTerms.sensitivity` or `MeanTerms.sensitivity`, where it is
    proved. The sum is one `VectorSum` with sensitivity 1 and largest norm R / s, noise shares from every agent or from
    the talliers. At agent level the vector of norm at most R / s becomes zero; at person level at most m records leave
    one after the other, see `labeler.methods.sensitivity`.
    """
    from labeler.noise import VectorSum

    terms = model_terms(setting)
    return VectorSum(
        dimension=setting.max_queries * setting.num_classes,
        largest_norm=terms.largest_norm / terms.sensitivity,
        sensitivity=1.0,
        sigma=setting.sigma_votes,
        agents=setting.agents,
        colluding_agents=setting.colluding_agents,
        max_dropouts=setting.max_dropouts,
        dishonest_talliers=setting.dishonest_talliers,
    )


def longest_weights_grid(setting: Setting) -> int:
    """The largest norm of one agent's weights, grid units, rounding to the grid included."""
    return weight_sum(setting).longest_grid


def check_weights(numbers: NDArray[np.int64], setting: Setting) -> None:
    """Refuse weights beyond what the price covers; their own length is private and not told."""
    weight_sum(setting).check(
        numbers,
        "the weights of an agent are longer than its learner can make them, which this task's price does not cover",
    )


TRAITS: Final = MethodTraits(
    "DP-Helmet",
    "the weights of a linear model trained on its records",
    sums="weights",
    asked_at_once=True,
    counts=False,
    asks_for_a_model=True,
    stated=BoundedNumbers(weight_sum, longest_weights_grid, check_weights),
)
