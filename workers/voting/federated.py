"""Sampled training: an agent answers a step with clipped gradients of records it has drawn, or with its clipped update.

The rows asked about are those of a linear model, as for blind-average; beside them stands the public model as the steps
before have made it. What is drawn, and by which coins, is of the round's own key alone (`labeler.federated`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from labeler.batch import QueryBatch
from labeler.errors import InvalidSetting
from labeler.federated import check_model
from labeler.linear_model import axes_of
from labeler.methods.federated import step_sum, step_terms
from labeler.methods.sensitivity import training_of
from labeler.randomness import ByteSource
from labeler.task import Task
from workers.learning.sampled_steps import clipped_update, rows_on_grid, sampled_gradients
from workers.voting.records import Records


def step_ballots(task: Task, batch: QueryBatch, records: Records, *, source: ByteSource) -> NDArray[np.int64]:
    """What an agent adds to one step, on the grid, in units of what its unit can change; shape (rows, num_classes).

    Args:
        batch: one step's rows, with the public model.
        records: the agent's; all of them, since a cut would let one record replace another.
        source: the agent's secret source of this round's coins, at its beginning.

    Raises:
        InvalidSetting: no public model.
        BadData: it is not one of this task.
    """
    training, terms = training_of(task), step_terms(task)
    sampled = training.sampled
    if sampled is None or batch.model is None:
        raise InvalidSetting("a step of sampled training is asked with the public model that it begins from")
    # Said before the charge by `Agent.check`, and again here, of public numbers alone: beyond its grid a model could
    # make one record's scores infinite, and with them the sum.
    check_model(batch.model, task)
    axes, rows = axes_of(task, batch.features), records.trainable(None)
    if sampled.unit == "record":
        vector = sampled_gradients(
            rows_on_grid(rows, axes, num_classes=task.num_classes), rows.count, batch.model, terms=terms, source=source
        )
    else:
        vector = clipped_update(
            rows,
            batch.model,
            terms=terms,
            axes=axes,
            rate=sampled.learning_rate,
            shrink=training.regularisation,
            local_steps=sampled.local_steps,
            source=source,
        )
    return step_sum(task).quantize(vector / terms.sensitivity).reshape(len(batch), task.num_classes)
