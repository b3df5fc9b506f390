"""Which module of this package finds the answers of which method: the one place that names them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from labeler.batch import QueryBatch
from labeler.methods import Method
from labeler.randomness import ByteSource
from labeler.task import Task
from workers.voting.aux_distill import soft_ballots
from workers.voting.blind_average import weight_ballots
from workers.voting.ensemble import check_head, ensemble_ballots, most_records
from workers.voting.federated import step_ballots
from workers.voting.model_store import ModelStore
from workers.voting.neighbors import NeighborVotes
from workers.voting.records import Records, most_trained


@dataclass(frozen=True)
class Means:
    """What an agent answers with beside its records.

    Attributes:
        models: where models are kept while a round is open.
        local_noise: gives the agent's secret source of chance of its own for this batch, at its beginning: of noise, or
            of who takes part in a step.
        engine: the agent's, which says what devices it may train on.
    """

    neighbors: NeighborVotes = field(repr=False)
    models: ModelStore = field(repr=False)
    local_noise: Callable[[], ByteSource] = field(repr=False)
    engine: str = "numpy"


Way = Callable[[Task, QueryBatch, Records, Means], NDArray[np.int64]]
"""Finds an agent's answers, int64, shape (num_queries, num_classes); private."""

WAYS: Final[Mapping[Method, Way]] = {
    "knn": lambda task, batch, records, means: means.neighbors.knn(task, batch, records),
    "reverse-knn": lambda task, batch, records, means: means.neighbors.reverse_knn(task, batch, records),
    "ensemble": lambda task, batch, records, means: ensemble_ballots(task, batch, records, means.models),
    "blind-average": lambda task, batch, records, means: weight_ballots(
        task, batch, records, means.models, engine=means.engine
    ),
    "aux-distill": lambda task, batch, records, means: soft_ballots(
        task, batch, records, means.models, source=means.local_noise(), engine=means.engine
    ),
    "federated": lambda task, batch, records, means: step_ballots(task, batch, records, source=means.local_noise()),
}
"""As many as `labeler.methods.METHODS`; a test looks."""


def most_rows(task: Task, dimension: int) -> int | None:
    """Return how many records take part in an agent's answer at most, by public facts; None for all of them.

    Args:
        dimension: numbers of a feature of its shard.
    """
    match task.method:
        case "ensemble":
            return most_records(dimension=dimension, num_classes=task.num_classes)
        case "reverse-knn":
            return task.max_agent_records
        case "blind-average" | "aux-distill":
            return most_trained(task)
        case _:
            return None


def check_size(task: Task, dimension: int) -> None:
    """Refuse what an agent has no room to answer, before the charge and from public facts alone.

    Of the other methods the task bounds what is trained (`labeler.descent.MOST_WEIGHTS`).

    Args:
        dimension: numbers of a feature of its shard.

    Raises:
        PrivacyRefusal: the message says what would be smaller.
    """
    if task.method == "ensemble":
        check_head(task, dimension)
