"""How a trained model votes on questions that stand for groups of public images.

A question may be one image, or a whole group of similar ones: then the agent votes for the class its model finds most
probable over the group, and the mean over many images is right far more often than one answer. It is one vote all the
same.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from labeler.errors import BadData, InvalidSetting
from labeler.methods.ensemble import one_hot_ballots


def group_ballots(
    probabilities: NDArray[np.floating], groups: NDArray[np.integer], *, num_groups: int, least_certainty: float = 0.0
) -> NDArray[np.int64]:
    """One vote per group, for the class of the largest mean probability; none where that is not large enough.

    An agent that knows six of ten digits is sure of nothing when it sees a seventh; its vote would only be noise with
    a direction. Abstaining is a row of zeros.

    What it costs: a row is one vote or none, so leaving an agent out moves at most one vote per group (squared L2 at
    most 1), and one record, which may change the whole model, at most one vote here and one there (at most 2).
    Groups are public; `least_certainty` may be public or the agent's own.

    Args:
        probabilities: of one agent's model, shape (num_images, num_classes), finite.
        groups: the question that stands for each public image, shape (num_images,), from 0.
        num_groups: how many questions there are; one that stands for no image gets no vote.
        least_certainty: mean probability below which the agent abstains.

    Returns:
        Votes, int64, shape (num_groups, num_classes), what `labeler.contribution` takes for method ensemble.

    Raises:
        BadData: probabilities that are no finite matrix.
        InvalidSetting: groups of another length or beyond num_groups.
    """
    if probabilities.ndim != 2 or not probabilities.size or not np.isfinite(probabilities).all():
        raise BadData("probabilities must be a finite matrix, one row per public image, one column per class")
    if groups.shape != probabilities.shape[:1] or groups.min() < 0 or groups.max() >= num_groups:
        raise InvalidSetting(f"every public image belongs to one of the {num_groups} questions")
    sums = np.zeros((num_groups, probabilities.shape[1]))
    np.add.at(sums, groups, probabilities)
    sizes = np.bincount(groups, minlength=num_groups)
    means = sums / np.maximum(sizes, 1)[:, None]
    ballots = one_hot_ballots(means.argmax(axis=1), num_classes=means.shape[1])
    ballots[(sizes == 0) | (means.max(axis=1) < least_certainty)] = 0
    return ballots
