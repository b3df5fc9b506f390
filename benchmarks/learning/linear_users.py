"""Linear models of arrays: of one agent, and of thousands of users of a simulation at once.

Both are `workers.learning.linear.train_rows` on other shapes of data. Users are trained in groups whose rows stay in a
core's cache over all steps; measurements showed larger groups to be slower.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from labeler.descent import MOST_WEIGHTS
from labeler.errors import BadData, InvalidSetting
from labeler.methods.blind_average import LinearTerms
from labeler.records import Rows, block_rows
from workers.learning.descent import descend
from workers.learning.linear import SLOPES, augmented, ball_axes, train_rows
from workers.progress import ProgressCallback, silent

NO_RECORD = -1
"""The label of a padding row: it is no record and changes nothing."""

_NUMBERS_AT_ONCE = 1 << 18

Truth = tuple[NDArray[np.bool_], NDArray[np.bool_]]
"""Masks: the class of each row, shape (users, rows, classes), and records, shape (users, rows, 1)."""


def train_linear(
    features: NDArray[np.floating], labels: NDArray[np.integer], *, terms: LinearTerms
) -> NDArray[np.float64]:
    """Train one agent's model, on arrays of shapes (num_records, dimension) and (num_records,); see `train_users`.

    Raises:
        PrivacyRefusal: more records than the terms' public bound, which the caller enforces.
    """
    if features.ndim != 2 or labels.shape != features.shape[:1] or (labels.size and int(labels.min()) < 0):
        raise BadData(f"records are rows with a class each, found shapes {features.shape} and {labels.shape}")
    _check(features[None], labels[None], terms)
    return train_rows(Rows.of(features, labels), terms=terms)


def train_users(
    features: NDArray[np.floating],
    labels: NDArray[np.integer],
    *,
    terms: LinearTerms,
    progress: ProgressCallback = silent,
) -> NDArray[np.float64]:
    """Train every user's own model, as `train_linear` would up to rounding.

    Args:
        features: shape (users, rows, dimension), any scale: rows are cut to `terms.feature_norm`.
        labels: shape (users, rows), classes from 0; NO_RECORD where a user has fewer records than rows.
        progress: called with the number of finished users.

    Returns:
        float64, shape (users, dimension + 1, num_classes); the last row of a model is the weight of the constant
        `terms.bias_feature`.

    Raises:
        BadData: a feature is not finite, a label is no class, or shapes do not fit.
        InvalidSetting: more weights than the proof's margin for rounding covers. Never for a number of records.
    """
    users, records, dimension = _check(features, labels, terms)
    weights, descent = np.empty((users, dimension + 1, terms.num_classes)), terms.descent

    def masked(scores: NDArray[np.float64], truth: Truth, /) -> NDArray[np.float64]:
        is_class, is_record = truth
        return SLOPES[terms.learner](scores, is_class) * is_record

    group = max(1, _NUMBERS_AT_ONCE // max(1, records * (dimension + 1)))
    at_once = block_rows(min(group, users) * (dimension + 1 + terms.num_classes))
    for start in range(0, users, group):
        part = slice(start, start + group)
        counts = np.array([descent.denominator(int(own)) for own in (labels[part] != NO_RECORD).sum(axis=1)])
        blocks = [
            (augmented(features[part, some], terms), _truth(labels[part, some], terms))
            for some in (slice(row, row + at_once) for row in range(0, records, at_once))
        ]
        weights[part] = descend(
            descent,
            lambda blocks=blocks: blocks,  # type: ignore[misc]  # a default binds what a loop changes
            masked,
            counts=counts[:, None, None].astype(np.float64),
            shape=(len(counts), dimension + 1, terms.num_classes),
            ball_axes=ball_axes(terms),
        )
        progress("Training users", min(start + group, users), users)
    return weights


def linear_scores(
    features: NDArray[np.floating], weights: NDArray[np.float64], *, terms: LinearTerms
) -> NDArray[np.float64]:
    """Return scores of a model on rows, prepared as in training; the class is the largest.

    Args:
        features: shape (n, dimension).
        weights: shape (dimension + 1, num_classes), of one user or an average of many.

    Returns:
        float64, shape (n, num_classes).
    """
    scores: NDArray[np.float64] = augmented(features, terms) @ weights
    return scores


def _truth(labels: NDArray[np.integer], terms: LinearTerms) -> Truth:
    return labels[..., None] == np.arange(terms.num_classes), (labels != NO_RECORD)[..., None]


def _check(features: NDArray[np.floating], labels: NDArray[np.integer], terms: LinearTerms) -> tuple[int, int, int]:
    if features.ndim != 3 or labels.shape != features.shape[:2] or features.shape[2] < 1:
        raise BadData(f"users' records are rows with one label each, found shapes {features.shape} and {labels.shape}")
    if not np.issubdtype(labels.dtype, np.integer) or not np.isfinite(features).all():
        raise BadData("features must be finite numbers and labels integers")
    if labels.size and not NO_RECORD <= int(labels.min()) <= int(labels.max()) < terms.num_classes:
        raise BadData(f"a label is no class of the task, which has {terms.num_classes}")
    users, records, dimension = features.shape
    if (dimension + 1) * terms.num_classes > MOST_WEIGHTS:
        raise InvalidSetting(
            f"{(dimension + 1) * terms.num_classes} weights are more than {MOST_WEIGHTS}, for which rounding is "
            "bounded; use fewer features, for example a public projection"
        )
    return users, records, dimension
