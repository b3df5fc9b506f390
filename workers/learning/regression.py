"""Logistic regression to a certified distance from its minimum: the deterministic part of what a private head releases.

    J(W) = (1/N) sum_i loss(W x_i, t_i) + (lambda/2) |W|^2

with the softmax loss of one row of W per class, or the logistic loss of a single row. L-BFGS in double precision
starts at zero and runs until the gradient is as small as asked. J is lambda-strongly convex, hence |W - W*| <= |grad
J(W)| / lambda: the gradient at the point returned *proves* how far it is from the minimiser, whatever the optimiser
did. A point that is further away than `tolerance` is refused, since the sensitivity that noise is scaled to holds for
minimisers.

**Rounding.** The gradient is itself computed in double precision. For a gradient whose terms have norm at most g, the
mean of n of them over d features is off by less than 4 u g (n + d (1 + |W| c)) with u = 2^-53 and c the longest row:
n additions, d products and additions per score, and a softmax that is 1-Lipschitz in its scores. Features may
themselves round differently when a record is gone, by at most `FEATURE_ROUNDING` of their norm
(`workers.learning.public_map`), which moves a gradient (p - t) x^T by less than (sqrt(2) + c |W|) times as much. Both
are added before dividing by lambda.

N is an argument, not len(features): a private mean is taken over a public least number of records
(`labeler.local_heads`). (scikit-learn's C is 1 / (lambda N). With C = 1 / lambda the regulariser is N times weaker
and the sensitivity N times larger.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from labeler.errors import InvalidSetting, PrivacyRefusal
from labeler.local_heads import FEATURE_ROUNDING

Array = NDArray[np.float64]
Objective = Callable[[Array], tuple[float, Array]]

_MEMORY = 20
_MOST_ITERATIONS = 5000
_UNIT_ROUNDOFF = 2.0**-53


@dataclass(frozen=True, eq=False)
class Fit:
    """Weights near the minimum. Private where the records are: noise comes before anybody sees them.

    Attributes:
        weights: float64, shape (num_classes, dimension), or (dimension,) for two classes with one row of weights.
        distance: proven bound on the L2 distance from the minimiser.
        iterations: of L-BFGS.
    """

    weights: Array
    distance: float
    iterations: int

    def __repr__(self) -> str:
        return f"Fit(<weights redacted>, shape={self.weights.shape})"


def fit_multinomial(
    features: Array, targets: Array, *, regularisation: float, records: int, tolerance: float = 1e-5
) -> Fit:
    """Softmax regression of class probabilities: one row of weights per class, also for classes nobody has.

    Args:
        features: shape (n, dimension), with the constant that carries the intercept; n may be 0.
        targets: shape (n, num_classes), rows are probabilities: one-hot labels, or soft labels.
        regularisation: lambda of the averaged loss.
        records: N, what the sum of losses is divided by.
        tolerance: largest distance from the minimiser.

    Raises:
        InvalidSetting: shapes do not fit, or a number is out of bounds.
        PrivacyRefusal: the optimiser did not come as near as that.
    """
    _check(features, targets, regularisation, records, tolerance)
    shape = (targets.shape[1], features.shape[1])

    def objective(flat: Array) -> tuple[float, Array]:
        weights = flat.reshape(shape)
        scores = features @ weights.T
        scores -= scores.max(axis=1, keepdims=True)
        exponentials = np.exp(scores)
        totals = exponentials.sum(axis=1, keepdims=True)
        loss = float(np.log(totals).sum() - np.vdot(scores, targets))
        gradient = (exponentials / totals - targets).T @ features / records + regularisation * weights
        return loss / records + regularisation / 2 * float(flat @ flat), gradient.ravel()

    flat, distance, iterations = _minimise(objective, features, math.prod(shape), regularisation, records, tolerance)
    return Fit(flat.reshape(shape), distance, iterations)


def fit_binary(
    features: Array, is_positive: NDArray[np.bool_], *, regularisation: float, records: int, tolerance: float = 1e-5
) -> Fit:
    """Logistic regression of two classes with one row of weights; P(positive | x) = 1 / (1 + exp(-w.x)).

    Args:
        features: shape (n, dimension), with the constant that carries the intercept; n may be 0.
        is_positive: bool, shape (n,).
        regularisation, records, tolerance: as for `fit_multinomial`.

    Raises:
        InvalidSetting: shapes do not fit, or a number is out of bounds.
        PrivacyRefusal: the optimiser did not come as near as that.
    """
    _check(features, is_positive[:, None], regularisation, records, tolerance)
    signs = np.where(is_positive, 1.0, -1.0)

    def objective(weights: Array) -> tuple[float, Array]:
        margins = signs * (features @ weights)
        # log(1 + exp(-t)) and its slope, without overflow on either side.
        small = np.exp(-np.abs(margins))
        loss = float((np.log1p(small) + np.maximum(-margins, 0.0)).sum())
        slopes = np.where(margins > 0, small, 1.0) / (1.0 + small)
        gradient = features.T @ (-signs * slopes) / records + regularisation * weights
        return loss / records + regularisation / 2 * float(weights @ weights), gradient

    size = features.shape[1]
    return Fit(*_minimise(objective, features, size, regularisation, records, tolerance))


def _minimise(
    objective: Objective, features: Array, size: int, regularisation: float, records: int, tolerance: float
) -> tuple[Array, float, int]:
    # L-BFGS-B looks at the gradient's largest entry; its norm is at most sqrt(size) times that. Half is for rounding.
    largest_entry = regularisation * tolerance / (2 * math.sqrt(size))
    options = {"maxcor": _MEMORY, "ftol": 0.0, "gtol": largest_entry, "maxiter": _MOST_ITERATIONS}
    found = minimize(objective, np.zeros(size), jac=True, method="L-BFGS-B", options=options | {"maxfun": 10**6})
    weights = np.asarray(found.x, dtype=np.float64)
    gradient = objective(weights)[1]
    longest = math.sqrt(float(np.einsum("ij,ij->i", features, features).max(initial=0.0)))
    terms = len(features) + size * (1 + float(np.linalg.norm(weights)) * longest)
    rounding = 4 * _UNIT_ROUNDOFF * math.sqrt(2) * longest * terms
    rounding += FEATURE_ROUNDING * longest * (math.sqrt(2) + longest * float(np.linalg.norm(weights)))
    rounding *= max(1.0, len(features) / records)
    distance = (float(np.linalg.norm(gradient)) + rounding) / regularisation
    if not distance <= tolerance:
        raise PrivacyRefusal(
            f"the optimiser stopped further than {tolerance:g} from the minimum, where no sensitivity is proved; "
            "regularise more, or allow a larger tolerance in the terms"
        )
    return weights, distance, int(found.nit)


def _check(
    features: Array, targets: NDArray[np.generic], regularisation: float, records: int, tolerance: float
) -> None:
    if features.ndim != 2 or features.shape[1] < 1 or targets.ndim != 2 or len(features) != len(targets):
        raise InvalidSetting(f"features {features.shape} and targets {targets.shape} are not rows of the same records")
    if features.dtype != np.float64:
        raise InvalidSetting(f"the certificate is for double precision, found features of type {features.dtype}")
    if type(records) is not int or records < 1:
        raise InvalidSetting(f"a mean is taken over a whole number of at least 1, found {records!r}")
    if not 0 < regularisation < math.inf or not 0 < tolerance < math.inf:
        raise InvalidSetting(f"regularisation and tolerance must be positive, found {regularisation!r}, {tolerance!r}")
