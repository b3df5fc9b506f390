"""Who holds which records in a simulation: a pool of labelled features, dealt to any number of agents.

One pool serves a thousand agents as well as a million, so memory follows the pool and not the federation: an agent is a
row of places in the pool. Where there are more places than records, records are dealt again, though never twice to one
agent; what a simulation then says about accuracy is about agents who hold copies of each other's records.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from feature_store.index.definition import check_features
from feature_store.shard import Shard
from labeler.errors import InvalidSetting

NOBODY: Final = -1
"""Fills the row of an agent with fewer records than the largest."""

PRIVATE_SHARE: Final = 0.6
"""Of the records: what agents hold. The rest is public: some of it is asked about."""


@dataclass(frozen=True, eq=False)
class Federation:
    """Agents and their records. Private; does not print.

    Attributes:
        features: the pool, int16, shape (records, dimension), quantised.
        labels: int16, shape (records,), classes.
        places: int32, shape (agents, most): the records of each agent in ascending order of record id, then NOBODY.

    Raises:
        InvalidSetting: labels or places that do not belong to the pool.
    """

    features: NDArray[np.int16] = field(repr=False)
    labels: NDArray[np.int16] = field(repr=False)
    places: NDArray[np.int32] = field(repr=False)

    def __post_init__(self) -> None:
        if self.labels.shape != self.features.shape[:1] or self.places.ndim != 2 or not self.places.size:
            raise InvalidSetting("a federation has one label per record, and one row of places per agent")
        if self.places.min() < NOBODY or self.places.max() >= len(self.labels):
            raise InvalidSetting(f"places of a federation lie in a pool of {len(self.labels)} records")

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


@dataclass(frozen=True, eq=False)
class Pool:
    """Labelled features, divided into what agents hold and what is public.

    Attributes:
        name: of where they come from, for people.
        classes: in label order.
        public, truth: features of public images, and what they show, which only scoring reads.

    Raises:
        BadData: features outside the exact range.
    """

    name: str
    classes: tuple[str, ...]
    features: NDArray[np.int16] = field(repr=False)
    labels: NDArray[np.int16] = field(repr=False)
    public: NDArray[np.int16] = field(repr=False)
    truth: NDArray[np.int16] = field(repr=False)

    def __post_init__(self) -> None:
        check_features(self.features)
        check_features(self.public, what="public features")

    def deal(self, agents: int, *, records: int, seed: int) -> Federation:
        """Give every agent so many records, drawn without repetition as far as the pool goes, and then again.

        Args:
            records: of each.
            seed: of the deal; the first agents of a larger federation hold what those of a smaller one do.

        Raises:
            InvalidSetting: one agent would hold a record twice.
        """
        if not 1 <= records <= len(self.labels):
            raise InvalidSetting(
                f"an agent is dealt 1 to {len(self.labels)} records of {self.name}, none of them twice; found {records}"
            )
        rng, at_once = np.random.default_rng([seed, 2]), len(self.labels) // records
        deals = [
            rng.permutation(len(self.labels))[: at_once * records].reshape(at_once, records).astype(np.int32)
            for _ in range(math.ceil(agents / at_once))
        ]
        return Federation(self.features, self.labels, np.concatenate(deals)[:agents])

    def copies(self, agents: int, records: int) -> float:
        """How many agents hold a record, on average."""
        return agents * records / len(self.labels)


def divided(
    name: str, classes: tuple[str, ...], features: NDArray[np.int16], labels: NDArray[np.int16], *, seed: int
) -> Pool:
    """A pool in which PRIVATE_SHARE of the records, at random, are the agents'.

    Raises:
        InvalidSetting: too few records for both parts, or one whose class nobody knows.
    """
    if len(labels) < 10 or labels.min() < 0:
        raise InvalidSetting(
            f"a simulation deals at least 10 records whose classes are known; {name} has {len(labels)}"
        )
    order = np.random.default_rng([seed, 1]).permutation(len(labels))
    private, public = np.split(order, [int(PRIVATE_SHARE * len(order))])
    return Pool(name, classes, features[private], labels[private], features[public], labels[public])


def digits_pool(*, seed: int) -> Pool:
    """The 1,797 handwritten digits that come with scikit-learn, as pixels: no download and no backbone."""
    from feature_store.quantize import quantize
    from workers.digits import CLASSES, load_digits

    images, targets = load_digits()
    return divided(
        "the handwritten digits",
        CLASSES,
        quantize(images.reshape(len(images), -1)),
        targets.astype(np.int16),
        seed=seed,
    )


def shard_pool(shard: Shard, *, seed: int) -> Pool:
    """The records of a shard, those deleted left out."""
    if shard.has_attributes:
        raise InvalidSetting(
            f"{shard.path} holds attributes, any number per record, and this works with one class per record; run "
            "`labeler run` on it"
        )
    return divided("the shard", shard.classes, shard.features[shard.rows], shard.labels[shard.rows], seed=seed)
