"""How sure a client may be about an image: does it look like the client's own records, or like public images of no one?

The certainty head is a logistic regression of the client's private records against the public negatives that all
clients share (Sattler et al. 2021). A client that has only ever seen ships answers ships with a weight near 1 and
everything else with a weight near 0, so a sum of weighted answers is led by those who know. Which records a client
holds decides the head, so the head is private: `labeler.local_heads` proves that one record moves it by at most 2 c /
(lambda (n + m)), because negatives are the same on neighbouring data, and releases it under noise.
"""

from __future__ import annotations

import numpy as np
from scipy.special import expit

from labeler.local_heads import LocalHeadTerms
from workers.learning.regression import Array, Fit, fit_binary


def fit_certainty(records: Array, negatives: Array, *, terms: LocalHeadTerms) -> Fit:
    """The certainty head without noise: private.

    The mean is over the client's records, at least `terms.min_records` of them, and the negatives.

    Args:
        records: the client's own, shape (n, terms.score_dimension), float64, norm at most terms.clip_norm; n may be 0.
        negatives: public, shape (terms.num_negatives, terms.score_dimension), likewise.
        terms: the mechanism.

    Raises:
        InvalidSetting: shapes do not fit.
        PrivacyRefusal: the optimiser did not come within terms.tolerance.
    """
    return fit_binary(
        np.concatenate([records, negatives]),
        np.arange(len(records) + len(negatives)) < len(records),
        regularisation=terms.score_regularisation,
        records=max(len(records), terms.min_records) + len(negatives),
        tolerance=terms.tolerance,
    )


def certainty(scores: Array, features: Array, *, sharpness: float = 1.0) -> Array:
    """The certainty head's probability that a query is like the client's records: in [0, 1], shape (num_queries,).

    Args:
        scores: the head, shape (dimension,).
        features: of queries, shape (num_queries, dimension).
        sharpness: factor on the head; a strongly regularised head is timid, and to raise its voice costs no privacy.
    """
    return np.asarray(expit(sharpness * (features @ scores)))
