"""Ballots: the integer votes of one agent on a batch of queries, shape (num_queries, num_classes).

A ballot is a function of an agent's own records and the public queries alone. Each function here is
the definition of one way to vote, and its docstring proves what one record can change, which is all
that `labeler.methods` charges for.

All of them rest on exact similarities: integer features whose inner products do not depend on the
order of summation, with ties broken by record id (knn) or by query number (reverse-knn). With
rounded arithmetic, removing one record can flip near-ties among others, and the proofs fall.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from labeler.errors import InvalidSetting


def knn_ballots(neighbor_labels: NDArray[np.integer], *, num_classes: int) -> NDArray[np.int64]:
    """Count the labels of each query's nearest records (kNN-DPFL; Zhu et al. 2021, Algorithm 3).

    One record of an agent moves at most one vote per query. Order the records of an agent by
    (similarity to the query, record id): a total order in which two records' places do not depend on
    any third. Without the record r, the first k of it are those with r, less r if r was among them,
    plus the one that follows the k-th. So at most one neighbour is swapped for another: two
    coordinates change by one vote each, or none if their labels agree (L1 at most 2, squared L2 at
    most 2). Replacing r by r' also changes at most one member of the first k. An agent with fewer
    than k records votes with what it has: then one coordinate changes by one.

    Args:
        neighbor_labels: shape (num_queries, k), the class of each neighbour; -1 where there are
            fewer than k records.
        num_classes: C, the number of classes of the task.

    Returns:
        Votes, int64, shape (num_queries, num_classes); each row sums to at most k.

    Raises:
        InvalidSetting: a label is not a class of the task.
    """
    _check_labels(neighbor_labels, num_classes, least=-1)
    num_queries = neighbor_labels.shape[0]
    # One bin more than there are classes collects the missing neighbours, without a mask over the matrix.
    slots = num_classes + 1
    cells = neighbor_labels.astype(np.int64)
    cells[cells < 0] = num_classes
    cells += np.arange(num_queries, dtype=np.int64)[:, None] * slots
    votes = np.bincount(cells.ravel(), minlength=num_queries * slots).reshape(num_queries, slots)
    return np.ascontiguousarray(votes[:, :num_classes])


def attribute_ballots(neighbors: NDArray[np.integer], *, most: int) -> NDArray[np.int64]:
    """Count the attributes of each query's nearest records, of each record the first `most` that it has.

    What one record votes for is a function of its own attributes and of their public order: those it has, cut at
    `most` (tau-clipping: Zhu et al. 2020, "Private-kNN"; of records, not of models, so that it holds for each). Which
    records are the first k does not depend on it. `labeler.methods.knn` proves what follows.

    Args:
        neighbors: shape (num_queries, k, num_attributes), 1 where a neighbour has an attribute and 0 where not.
        most: tau, at least 1: public, and the same for every agent.

    Returns:
        Votes, int64, shape (num_queries, num_attributes): at most k each, at most k tau in a row.

    Raises:
        InvalidSetting: something else than 0 and 1, or tau below 1.
    """
    if most < 1:
        raise InvalidSetting(f"a record votes for at least one attribute, found {most}")
    if neighbors.size and (neighbors.min() < 0 or neighbors.max() > 1):
        raise InvalidSetting("a record has each attribute or has it not: 1 or 0")
    has = neighbors.astype(np.int32)
    kept = np.where(np.cumsum(has, axis=2) <= most, has, 0)
    return np.asarray(kept.sum(axis=1), dtype=np.int64)


def reverse_knn_ballots(
    nearest_queries: NDArray[np.integer], labels: NDArray[np.integer], *, num_queries: int, num_classes: int
) -> NDArray[np.int64]:
    """Let every record vote for its own class at its k nearest queries.

    The mirror image of `knn_ballots`: there each query looks for k records, here each record looks
    for k queries. Queries are public, so where a record votes depends on that record alone. Adding
    or removing it changes at most k coordinates by one vote each **in the whole batch**, however many
    queries there are: squared L2 sensitivity k, once, where kNN pays 2 for every query. With k = 1
    this is the histogram of (cell, class) over the Voronoi cells of the public queries.

    Replacing a record is a removal and an addition: per query at most one vote leaves and one
    arrives, over the batch at most 2k coordinates by one vote each (squared L2 at most 2k).

    Args:
        nearest_queries: shape (num_records, k), the query numbers each record votes at, all different
            within a row; -1 where there are fewer than k queries.
        labels: shape (num_records,), the class of each record.
        num_queries: Q, the number of queries in the batch.
        num_classes: C, the number of classes of the task.

    Returns:
        Votes, int64, shape (num_queries, num_classes).

    Raises:
        InvalidSetting: a label is not a class of the task.
    """
    _check_labels(labels, num_classes, least=0)
    cells = nearest_queries.astype(np.int64) * num_classes + labels.astype(np.int64)[:, None]
    cells = cells[nearest_queries >= 0]
    return np.bincount(cells, minlength=num_queries * num_classes).reshape(num_queries, num_classes)


def one_hot_ballots(predictions: NDArray[np.integer], *, num_classes: int) -> NDArray[np.int64]:
    """Cast one vote per query, for the class a locally trained model predicts (AE-DPFL; Zhu et al. 2021, Algorithm 2).

    One record may change the model and with it any prediction, so per query one vote may move: two
    coordinates by one (squared L2 at most 2).

    Args:
        predictions: shape (num_queries,), the predicted class; -1 casts no vote.
        num_classes: C, the number of classes of the task.

    Returns:
        Votes, int64, shape (num_queries, num_classes); each row sums to at most 1.

    Raises:
        InvalidSetting: a prediction is not a class of the task.
    """
    return knn_ballots(predictions[:, None], num_classes=num_classes)


def _check_labels(labels: NDArray[np.integer], num_classes: int, *, least: int) -> None:
    if labels.size and (labels.min() < least or labels.max() >= num_classes):
        raise InvalidSetting(
            f"a record carries a label outside the {num_classes} classes of the task; "
            "shards and task must list the same classes in the same order"
        )
