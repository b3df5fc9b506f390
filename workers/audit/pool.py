"""Labelled features that an audit deals to made-up agents: those of a shard, or handwritten digits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from feature_store.index.definition import check_features
from feature_store.shard import Shard
from labeler.errors import InvalidSetting

PRIVATE_SHARE: Final = 0.6
"""Of the records: what agents hold. The rest is public."""


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


def divided(
    name: str, classes: tuple[str, ...], features: NDArray[np.int16], labels: NDArray[np.int16], *, seed: int
) -> Pool:
    """A pool in which PRIVATE_SHARE of the records, at random, are the agents'.

    Raises:
        InvalidSetting: too few records for both parts, or one whose class nobody knows.
    """
    if len(labels) < 10 or labels.min() < 0:
        raise InvalidSetting(f"this deals at least 10 records whose classes are known; {name} has {len(labels)}")
    order = np.random.default_rng([seed, 1]).permutation(len(labels))
    private, public = np.split(order, [int(PRIVATE_SHARE * len(order))])
    return Pool(name, classes, features[private], labels[private], features[public], labels[public])


def digits_pool(*, seed: int) -> Pool:
    """The 1,797 handwritten digits that come with scikit-learn, as pixels: no download and no backbone."""
    from feature_store.rows import quantize
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
