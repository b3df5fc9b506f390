"""DP-Helmet: an agent contributes the weights of a linear model that it trained (Kirschte et al., Algorithm 1).

The rows asked about are no images: they are the unit vectors of feature space and zero, at which a linear model's
scores are its weights and its intercept. So a model travels the way of votes. With `training.axes` they are public axes
and a centre, along which agents look at their records (`labeler.linear_model`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from labeler.batch import QueryBatch
from labeler.class_means import MeanTerms
from labeler.errors import InvalidSetting
from labeler.linear_model import PublicAxes, axes_of
from labeler.methods.blind_average import model_terms, weight_sum
from labeler.methods.sensitivity import kept_bound
from labeler.task import Task
from workers.learning.class_means import class_sums
from workers.learning.linear import train_rows
from workers.voting.model_store import ModelStore
from workers.voting.records import Records, most_trained


def weight_ballots(
    task: Task, batch: QueryBatch, records: Records, models: ModelStore, *, engine: str = "numpy"
) -> NDArray[np.int64]:
    """The agent's weights on the grid, in units of their sensitivity, shape (rows asked about, num_classes).

    Args:
        batch: as many rows as the model has (`workers.agent.agent.Agent.check`).
        models: where the weights are kept: trained once per batch and version of the records.
        engine: which devices may be used; see workers.learning.descent.
    """

    def train() -> NDArray[np.int64]:
        terms, axes = model_terms(task), axes_of(task, batch.features)
        weights = (
            _sums(task, terms, records, axes)
            if isinstance(terms, MeanTerms)
            else train_rows(records.trainable(most_trained(task)), terms=terms, axes=axes, engine=engine)
        )
        return weight_sum(task).quantize(weights / terms.sensitivity)

    answer = models.once(records.version, f"blind-average {task.digest} {batch.digest}", train)
    return answer.reshape(len(batch), task.num_classes)


def _sums(task: Task, terms: MeanTerms, records: Records, axes: PublicAxes | None) -> NDArray[np.float64]:
    """Of all records: where no bound is kept none are cut, since a cut would let one record replace another."""
    if axes is None:
        raise InvalidSetting("class means are along public axes, and the task has none")
    return class_sums(records.trainable(kept_bound(task)), terms=terms, axes=axes)
