"""A site's own model, made at the site from the shared one and its records (PriFedSync, Zheng et al. 2021).

    shared model, public  +  all records of one site  -->  a personal model, which stays there.

Rows are those of the shared model: (phi(x), 1), whole numbers (`labeler.methods.federated`). Let n be the number of
records and C INVERSE_REGULARISATION. A site's own model minimizes over the weights w, one column per class,

    J(w) = sum over its records of -log softmax(z w)_y  +  |w|^2 / (2 C).

The three helpers of `training.personal`, with a = alpha and v the shared model:

| helper | the personal model |
|---|---|
| interpolation | (1 - a) argmin J  +  a v: equation 2.1, once, after the last step |
| proximal | argmin J(w) + n s/2 times |w - v|^2, with s = a / (1 - a) times the mean curvature of the loss |
| identity | LOCAL_STEPS gradient steps of length 1 from v on J / n: F is the identity, and local training follows |

The mean curvature is that of the bound which training descends (workers.learning.linear): the mean of |z|^2 / 2 over
records and numbers of a row. So at a = 1/2 the pull weighs as much as the records do in a mean direction. a = 1 is the
shared model to the last bit, a = 0 the site's own.

**Choosing alpha.** Without one the site tries GRID on its own records: each fold is predicted by a model of the others.
The alpha under which the held-out labels are most likely wins, of equals the largest. Likelihood, and not the number of
right predictions, because the model states a confidence. The shared model has seen the held-out records too. Its price
bounds what that gives away.

**Privacy.** All of this is private, and nothing of it leaves the site: neither weights, nor predictions, nor alpha. It
runs when a person at the site asks for it, outside of every answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from scipy.special import log_softmax

from labeler.errors import InvalidSetting
from labeler.methods.federated import UNIT
from labeler.records import Array, Block, PublicAxes, Records, kept
from labeler.setting import Personal
from workers.learning.descent import softmax_slopes
from workers.learning.linear import INVERSE_REGULARISATION, minimize, rows_on_grid

GRID: Final = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
"""What a site chooses alpha from."""

FOLDS: Final = 5

MOST_CHOOSING: Final = 4096
"""Records that alpha is chosen on, those of smallest id, if there are more."""

LOCAL_STEPS: Final = 50
"""Gradient steps of helper identity."""


@dataclass(frozen=True, eq=False)
class PersonalModel:
    """A site's own model. Private; does not print.

    Attributes:
        weights: float64, shape (rows, num_classes), as those of the shared model.
        alpha: the part of the shared model; None for helper identity.
        scores: of each alpha of GRID, the mean log-likelihood of a held-out label; empty where none was chosen.
    """

    weights: Array = field(repr=False)
    alpha: float | None = field(repr=False)
    scores: tuple[float, ...] = field(default=(), repr=False)


def personal_model(records: Records, shared: Array, *, axes: PublicAxes | None, personal: Personal) -> PersonalModel:
    """Make a site's own model of its records and the shared model.

    Args:
        records: all that the site answers with; without one, the result is the shared model.
        shared: float64, shape (rows, num_classes).
        axes: the public map before the model; None if it reads features as they are.
        personal: what the task says.

    Raises:
        InvalidSetting: the model has another number of rows than features and axes say.
    """
    rows = (records.all_features.shape[1] if axes is None else axes.count) + 1
    if len(shared) != rows:
        raise InvalidSetting(f"the shared model has {len(shared)} rows, and features of the site need {rows}")
    if not len(records):
        return PersonalModel(shared, None if personal.helper == "identity" else 1.0)
    if personal.helper == "identity":
        return PersonalModel(_Training(records, shared, axes).from_shared(), None)
    scores: tuple[float, ...] = ()
    alpha = personal.alpha
    if alpha is None:
        scores = _scores(records, shared, axes, personal.helper)
        alpha = max(zip(scores, GRID, strict=True))[1]
    return PersonalModel(_Training(records, shared, axes).at(alpha, personal.helper), alpha, scores)


def _scores(records: Records, shared: Array, axes: PublicAxes | None, helper: str) -> tuple[float, ...]:
    """Return the mean log-likelihood of a held-out label under each alpha of GRID."""
    chosen = records.first(MOST_CHOOSING)
    if len(chosen) < 2:
        return (0.0,) * len(GRID)
    # Ids are random and permanent, so a record stays in its fold.
    order = chosen.rows[np.argsort(chosen.record_ids)]
    folds, total = min(FOLDS, len(order)), np.zeros(len(GRID))
    for held in (np.sort(order[fold::folds]) for fold in range(folds)):
        rest = np.setdiff1d(chosen.rows, held)
        training = _Training(replace(chosen, rows=rest), shared, axes)
        models = [training.at(alpha, helper) for alpha in GRID]
        for rows, labels in rows_on_grid(replace(chosen, rows=held).trainable(None), axes, num_classes=shared.shape[1]):
            likely = [log_softmax(rows / UNIT @ model, axis=1) for model in models]
            total += [one[np.arange(len(labels)), labels].sum() for one in likely]
    return tuple((total / len(chosen)).tolist())


class _Training:
    """Trainings on one set of records, from one shared model."""

    def __init__(self, records: Records, shared: Array, axes: PublicAxes | None) -> None:
        self._count, self._shared = len(records), shared
        size, classes = shared.shape
        seen = records.trainable(None)

        def prepared(skip: int) -> Iterator[Block]:
            for rows, labels in rows_on_grid(seen, axes, num_classes=classes, skip=skip):
                yield rows / UNIT, labels[:, None] == np.arange(classes)

        self._blocks = kept(prepared)
        self._products = np.zeros((size, size))
        for rows, _ in self._blocks():
            self._products += rows.T @ rows
        self._own: Array | None = None

    def at(self, alpha: float, helper: str) -> Array:
        """Return the personal model of an alpha."""
        if alpha == 1:
            return self._shared
        if self._own is None:
            self._own = self._towards(0.0)
        if helper == "interpolation":
            return (1 - alpha) * self._own + alpha * self._shared
        curvature = float(np.trace(self._products)) / (2 * self._products.shape[0])
        return self._own if alpha == 0 else self._towards(alpha / (1 - alpha) * curvature)

    def _towards(self, pull: float) -> Array:
        """Return argmin J(w) + pull/2 |w - shared|^2, trained from there."""
        ridge = 1 / INVERSE_REGULARISATION + pull
        anchor = (pull / ridge) * self._shared.T
        inverse = np.linalg.inv(self._products / 2 + ridge * np.eye(len(self._products)))
        return minimize(self._blocks, inverse, ridge, start=anchor, anchor=anchor).T

    def from_shared(self) -> Array:
        """Return the model after LOCAL_STEPS steps from the shared one."""
        local = self._shared.copy()
        for _ in range(LOCAL_STEPS):
            gradient = local / INVERSE_REGULARISATION
            for rows, truth in self._blocks():
                gradient += rows.T @ softmax_slopes(rows @ local, truth)
            # A row is at most the root of 2 long and softmax curves at most a half, so that no step goes too far.
            local = local - gradient / self._count
        return local
