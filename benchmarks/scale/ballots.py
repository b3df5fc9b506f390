"""Many agents over one pool of labelled features, and their ballots at once, each as the agent alone would cast it.

An agent is a row of places in the pool, so memory follows the pool and not the federation. Where there are more places
than records, records are dealt again, though never twice to one agent.

    knn            one matrix product scores all records of a group of agents; every agent keeps its own first k
    reverse-knn    one search finds the nearest queries of all records of a group
    ensemble       the heads of a group are trained together (benchmarks.scale.heads_together)
    blind-average  likewise (benchmarks.learning.linear_users.train_users)

What counts votes is equal bit for bit to `workers.voting` of one agent after the other: similarities are exact
integers, and the same functions count. What is trained is equal up to rounding (blind-average), or up to where the
optimiser of one agent stops (ensemble). Tests hold both to the real agents.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.learning.linear_users import train_users
from feature_store.index.build import build_index
from feature_store.index.definition import NO_KEY, pack, ranks_of
from labeler.errors import InvalidSetting
from labeler.methods import MethodName
from labeler.methods.blind_average import linear_terms, weight_sum
from labeler.methods.ensemble import one_hot_ballots
from labeler.methods.knn import knn_ballots
from labeler.methods.reverse_knn import reverse_knn_ballots
from labeler.records import FEATURE_ONE
from labeler.tally import QueryBatch
from labeler.task import Task
from workers.audit.pool import Pool

NOBODY: Final = -1
"""Fills the row of an agent with fewer records than the largest."""

GROUP_NUMBERS: Final = 2**22
"""Numbers of one group of agents: 32 MiB in double precision."""

Ballots = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Federation:
    """Agents and their records. Private; does not print.

    Attributes:
        features: the pool, int16, shape (records, dimension), quantised.
        labels: int16, shape (records,), classes.
        places: int32, shape (agents, most): the records of each agent in ascending order of record id, then NOBODY.
    """

    features: NDArray[np.int16] = field(repr=False)
    labels: NDArray[np.int16] = field(repr=False)
    places: NDArray[np.int32] = field(repr=False)

    @classmethod
    def dealt(cls, pool: Pool, agents: int, *, records: int, seed: int) -> Federation:
        """Give every agent so many records, drawn without repetition as far as the pool goes, and then again.

        Args:
            records: of each.
            seed: of the deal; the first agents of a larger federation hold what those of a smaller one do.

        Raises:
            InvalidSetting: one agent would hold a record twice.
        """
        if not 1 <= records <= len(pool.labels):
            raise InvalidSetting(
                f"an agent is dealt 1 to {len(pool.labels)} records of {pool.name}, none of them twice; found {records}"
            )
        rng, at_once = np.random.default_rng([seed, 2]), len(pool.labels) // records
        deals = [
            rng.permutation(len(pool.labels))[: at_once * records].reshape(at_once, records).astype(np.int32)
            for _ in range(math.ceil(agents / at_once))
        ]
        return cls(pool.features, pool.labels, np.concatenate(deals)[:agents])

    def __len__(self) -> int:
        return len(self.places)

    @property
    def most_records(self) -> int:
        """Of one agent."""
        return int(self.places.shape[1])

    def part(self, agents: slice) -> Federation:
        """Some of the agents, over the same pool."""
        return Federation(self.features, self.labels, self.places[agents])

    def record_labels(self) -> NDArray[np.int16]:
        """int16, shape (agents, most_records); NOBODY where there is no record."""
        return np.where(self.places == NOBODY, np.int16(NOBODY), self.labels[self.places])

    def record_features(self) -> NDArray[np.int16]:
        """int16, shape (agents, most_records, dimension); anything where there is no record."""
        return np.asarray(self.features[self.places])


def ballots_of(task: Task, batch: QueryBatch, agents: Federation) -> Ballots:
    """What each agent of a group contributes, without noise.

    Args:
        task: what is asked, of a method of SIMULATED.
        agents: the group and its records; of `group_size` agents at most.

    Returns:
        int64, shape (agents, num_queries, num_classes). Private.

    """
    return _WAYS[task.method](task, batch, agents)


def group_size(task: Task, batch: QueryBatch, federation: Federation) -> int:
    """How many agents answer at once: as many as keep within GROUP_NUMBERS, at least one."""
    records, dimension = federation.most_records, int(federation.features.shape[1])
    votes = len(batch) * task.num_classes
    found = {"knn": records * len(batch), "ensemble": records * (records + 4 * task.num_classes)}.get(task.method, 0)
    return max(1, GROUP_NUMBERS // max(votes, records * dimension, found))


def _knn(task: Task, batch: QueryBatch, agents: Federation) -> Ballots:
    labels = agents.record_labels()
    count, most = labels.shape
    features = agents.record_features().reshape(count * most, -1).astype(np.float32)
    scores = batch.features.astype(np.float32) @ features.T  # exact: see feature_store.index.definition
    # A place in an agent's row is the rank of the record's id, which is all that ties ask for.
    keys = pack(scores.reshape(len(batch), count, most), np.arange(most, dtype=np.int64))
    keys[:, labels == NOBODY] = NO_KEY
    k = min(task.k, most)
    if k < most:
        keys.partition(k - 1, axis=2)
    first = keys[:, :, :k]
    nobody = first == NO_KEY
    ranks = np.where(nobody, 0, ranks_of(first))
    nearest = np.where(nobody, np.int16(NOBODY), labels[np.arange(count)[None, :, None], ranks])
    votes = knn_ballots(nearest.reshape(-1, k), num_classes=task.num_classes)
    return np.ascontiguousarray(votes.reshape(len(batch), count, -1).swapaxes(0, 1))


def _reverse_knn(task: Task, batch: QueryBatch, agents: Federation) -> Ballots:
    # Cut to the smallest ids, as `Records.first` cuts.
    labels = agents.record_labels()[:, : task.max_agent_records]
    features = agents.record_features()[:, : task.max_agent_records]
    has_record = labels != NOBODY
    queries = build_index(batch.features, np.arange(len(batch)))
    nearest = queries.search(features[has_record], min(task.k, len(batch))).record_ids
    # Every agent has cells of its own in one long table of votes.
    of_agent = np.repeat(np.arange(len(labels), dtype=np.int64), has_record.sum(axis=1))
    votes = reverse_knn_ballots(
        nearest + of_agent[:, None] * len(batch),
        labels[has_record],
        num_queries=len(labels) * len(batch),
        num_classes=task.num_classes,
    )
    return votes.reshape(len(labels), len(batch), -1)


def _ensemble(task: Task, batch: QueryBatch, agents: Federation) -> Ballots:
    # Loaded where it is wanted: most simulations never train.
    from benchmarks.scale.heads_together import fit_heads
    from workers.learning.linear import INVERSE_REGULARISATION, integer_head, predict

    labels = agents.record_labels()
    features = agents.record_features().astype(np.float64) / FEATURE_ONE
    fitted = fit_heads(features, labels, num_classes=task.num_classes, inverse_regularisation=INVERSE_REGULARISATION)
    heads = np.stack(
        [
            integer_head(weights, np.isin(np.arange(task.num_classes), own))
            for weights, own in zip(fitted, labels, strict=True)
        ]
    )
    votes = one_hot_ballots(predict(heads, batch.features).ravel(), num_classes=task.num_classes)
    return votes.reshape(len(labels), len(batch), -1)


def _blind_average(task: Task, batch: QueryBatch, agents: Federation) -> Ballots:
    terms, spec = linear_terms(task), weight_sum(task)
    features = agents.record_features().astype(np.float32) / FEATURE_ONE
    weights = train_users(features, agents.record_labels(), terms=terms)
    shape = (len(batch), task.num_classes)
    return np.stack([spec.quantize(own / terms.sensitivity).reshape(shape) for own in weights])


_WAYS: Final[Mapping[str, Callable[[Task, QueryBatch, Federation], Ballots]]] = {
    "knn": _knn,
    "reverse-knn": _reverse_knn,
    "ensemble": _ensemble,
    "blind-average": _blind_average,
}

SIMULATED: Final[tuple[MethodName, ...]] = ("knn", "reverse-knn", "ensemble", "blind-average")
"""Methods that can answer for many agents at once; aux-distill fits each agent's private heads alone, and federated
asks again and again about a model that has changed."""
