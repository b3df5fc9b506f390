"""The public model between steps of training (`labeler.federated`), from what the steps before have opened.

All of it is post-processing: theta_t follows from releases by public constants, the same to the last bit wherever it is
computed, since it only adds and multiplies number by number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from labeler.errors import BadData, InvalidSetting
from labeler.federated import on_grid
from labeler.methods.federated import step_terms
from labeler.methods.sensitivity import training_of

if TYPE_CHECKING:
    from labeler.release import Release
    from labeler.task import Task


def model_before(task: Task, releases: Sequence[Release]) -> NDArray[np.float64]:
    """The public model after so many steps, as the next is asked about it: whole THETA_UNIT-ths.

    Args:
        task: of a sampled method.
        releases: of its first rounds, in order.

    Returns:
        float64, shape (rows, num_classes).
    """
    return _trajectory(task, releases)[0]


def final_model(task: Task, releases: Sequence[Release]) -> NDArray[np.float64]:
    """The mean of the models after the last half of the steps: their noise averages out, at no price."""
    return _trajectory(task, releases)[1]


def _trajectory(task: Task, releases: Sequence[Release]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    training, terms = training_of(task), step_terms(task)
    sampled = training.sampled
    if sampled is None:
        raise InvalidSetting(f"a task of method {task.method} is not trained in steps")
    theta = np.zeros((task.rows, task.num_classes))
    speed, total, counted = np.zeros_like(theta), np.zeros_like(theta), 0
    for step, release in enumerate(releases):
        if release.noisy_votes is None or release.noisy_votes.shape != theta.shape:
            raise BadData("a step of training has opened something else than numbers of the model's shape")
        of_one = terms.clip * terms.sensitivity / (float(terms.rate) * len(release.contributors))
        if sampled.unit == "record":
            mean = release.noisy_votes * (of_one / training.min_records) + training.regularisation * theta
            speed = sampled.momentum * speed - sampled.learning_rate * mean
        else:
            speed = sampled.momentum * speed + release.noisy_votes * of_one
        theta = on_grid(theta + speed)
        if 2 * (step + 1) > len(releases):
            total, counted = total + theta, counted + 1
    return theta, total / max(1, counted)
