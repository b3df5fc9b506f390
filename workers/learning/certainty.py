"""How sure a client may be about an image: does it look like the client's own records, or like public images of no one?

The certainty head is a logistic regression of the client's private records against the public negatives that all
clients share (Sattler et al. 2021). A client that has only ever seen ships answers ships with a weight near 1 and
everything else with a weight near 0, so a sum of weighted answers is led by those who know. Which records a client
holds decides the head, so the head is private: `labeler.methods.aux_distill` proves that one record moves it by at most
2 c / (lambda (n + m)), because negatives are the same on neighbouring data, and releases it under noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
from scipy.special import expit

from labeler.methods.aux_distill import LocalHeadTerms
from labeler.records import Array, Block
from workers.learning.descent import descend, logistic_slopes

RowBlocks = Callable[[], Iterable[Array]]
"""Reads all rows once, block by block; the same at every call."""


def fit_certainty(
    records: RowBlocks,
    negatives: RowBlocks,
    *,
    num_records: int,
    public_count: int,
    terms: LocalHeadTerms,
    engine: str = "numpy",
) -> Array:
    """The certainty head without noise, shape (terms.score_dimension,): private.

    The mean is over the client's records, at least `terms.min_records` of them, and the negatives; with
    `terms.max_records` both numbers are public.

    Args:
        records: the client's own, blocks of shape (r, terms.score_dimension), float64, norm at most terms.clip_norm.
        negatives: public, terms.num_negatives of them, likewise.
        num_records: how many the client has; may be 0.
        public_count: a public number that stands for it, by which a device is chosen.
        engine: which devices may be used; see descent.descend.
    """

    def blocks() -> Iterator[Block]:
        for side, is_own in ((records, True), (negatives, False)):
            for rows in side():
                yield rows, is_own

    weights = descend(
        terms.score_descent,
        blocks,
        logistic_slopes,
        counts=float(terms.score_descent.denominator(num_records + terms.num_negatives)),
        shape=(terms.score_dimension, 1),
        ball_axes=(0, 1),
        numbers=(public_count + terms.num_negatives) * terms.score_dimension,
        engine=engine,
    )
    return weights[:, 0]


def certainty(scores: Array, features: Array, *, sharpness: float = 1.0) -> Array:
    """The certainty head's probability that a query is like the client's records: in [0, 1], shape (num_queries,).

    Args:
        scores: the head, shape (dimension,).
        features: of queries, shape (num_queries, dimension).
        sharpness: factor on the head; a strongly regularised head is timid, and to raise its voice costs no privacy.
    """
    return np.asarray(expit(sharpness * (features @ scores)))
