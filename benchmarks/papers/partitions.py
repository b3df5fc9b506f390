"""Partitions of a data set among agents, as in the papers: rows of one set in, one list of rows per agent out.

A partition is part of an experiment's set-up: it reads labels, which no party of a real job could do. Same labels, same
seed: same partition, so that every method of a table votes or learns with the same agents.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]

MNIST_CASE: Final = "MNIST, 100 agents x 600 of 6 digits"
USPS_CASE: Final = "MNIST -> USPS, 60 agents x 1,000"
"""Names of these two federations in tables and charts: rows of one case are compared with each other."""


def mnist_partition(
    labels: NDArray[np.int64], *, agents: int = 100, digits_per_agent: int = 6, records: int = 600, seed: int
) -> list[Rows]:
    """Return agents that each know some of the digits (Zhu et al. 2021, section 5.1).

    The paper has 100 agents with 600 records of 6 digits, and gives no rule for who gets which digits. Here a digit has
    places at agents in proportion to its records, and an agent draws its digits at random in proportion to the places
    left. The records of a digit are dealt evenly to its agents: `records` / `digits_per_agent` of each digit, or a few
    less where the set is used up. (MNIST at the paper's size: at least 99 of 100.) No record is at two agents.

    Args:
        labels: int64, shape (n,), classes from 0.
        digits_per_agent: classes of each agent.
        records: most records one of them has; divisible by `digits_per_agent`.

    Returns:
        Per agent its rows, ascending.
    """
    counts = np.bincount(labels)
    rng = np.random.default_rng(seed)
    places = _in_proportion(agents * digits_per_agent, counts, most=agents)
    holders: list[list[int]] = [[] for _ in counts]
    left = places.copy()
    for agent in range(agents):
        # A class with as many places left as there are agents left must be taken by all of them.
        must = np.flatnonzero(left == agents - agent)
        weights = np.where(left < agents - agent, left, 0).astype(float)
        drawn = digits_per_agent - len(must)
        others = rng.choice(len(counts), drawn, replace=False, p=weights / weights.sum()).tolist() if drawn else []
        for digit in [*must.tolist(), *others]:
            holders[digit].append(agent)
            left[digit] -= 1
    partition: list[list[Rows]] = [[] for _ in range(agents)]
    for digit, owners in enumerate(holders):
        rows = rng.permutation(np.flatnonzero(labels == digit))[: len(owners) * (records // digits_per_agent)]
        for owner, part in zip(owners, np.array_split(rows, max(1, len(owners))), strict=False):
            partition[owner].append(part)
    return [np.sort(np.concatenate(parts)) for parts in partition]


def iid_partition(labels: NDArray[np.int64], *, clients: int, records: int | None = None, seed: int) -> list[Rows]:
    """Return equal random parts; with `records`, that many for each client and the rest for nobody."""
    order = np.random.default_rng(seed).permutation(len(labels))
    if records is not None:
        order = order[: clients * records]
    return [np.sort(part) for part in np.array_split(order, clients)]


def dirichlet_partition(labels: NDArray[np.int64], *, clients: int, alpha: float, seed: int) -> list[Rows]:
    """Return equally many records per client, in class shares from a symmetric Dirichlet (Hsu, Qi, Brown 2019).

    Clients take their records one after another; a class that is used up is left out and the others' shares are scaled
    up, as in Hsu et al. Small alpha: few classes per client; large alpha: all alike.

    Args:
        labels: int64, shape (n,), classes from 0.
        clients: how many; each gets n // clients records.
        alpha: concentration, above 0.
        seed: of the draw.

    Returns:
        Per client its rows, ascending.

    References:
        Hsu, Qi, Brown 2019, "Measuring the effects of non-identical data distribution for federated visual
        classification", section 3.
    """
    rng = np.random.default_rng(seed)
    num_classes = int(labels.max()) + 1
    left = [rng.permutation(np.flatnonzero(labels == label)) for label in range(num_classes)]
    shares = rng.dirichlet(np.full(num_classes, alpha), size=clients)
    taken: list[list[Rows]] = [[] for _ in range(clients)]
    for client in range(clients):
        wanted = len(labels) // clients
        while wanted:
            available = np.array([len(rows) for rows in left])
            weights = np.where(available > 0, shares[client], 0.0)
            # With a tiny alpha every class a client wants may be used up: then it takes what is left, evenly.
            weights = weights if weights.sum() > 0 else (available > 0).astype(float)
            counts = np.minimum(rng.multinomial(wanted, weights / weights.sum()), available)
            for label in np.flatnonzero(counts):
                taken[client].append(left[label][: counts[label]])
                left[label] = left[label][counts[label] :]
            wanted -= int(counts.sum())
    return [np.sort(np.concatenate(parts)) for parts in taken]


def shard_partition(labels: NDArray[np.int64], *, clients: int, shards_per_client: int, seed: int) -> list[Rows]:
    """Return records sorted by label, cut into equal shards, dealt at random (McMahan et al. 2017, section 3)."""
    count = clients * shards_per_client
    rng = np.random.default_rng(seed)
    by_label = np.lexsort((rng.random(len(labels)), labels))
    size = len(labels) // count
    shards = by_label[: size * count].reshape(count, size)
    dealt = rng.permutation(count).reshape(clients, shards_per_client)
    return [np.sort(shards[own].ravel()) for own in dealt]


def _in_proportion(total: int, counts: NDArray[np.int64], *, most: int) -> NDArray[np.int64]:
    """Return whole numbers up to `most` that sum to a total, in proportion to counts as far as possible (Webster's
    method).
    """
    given = np.zeros(len(counts), dtype=np.int64)
    for _ in range(total):
        given[np.argmax(np.where(given < most, counts / (2 * given + 1), -1.0))] += 1
    return given
