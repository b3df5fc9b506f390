"""Logistic regression on public data: what a server fits to labels that agents have released.

    J(W) = (1/N) sum_i loss(W x_i, t_i) + (lambda/2) |W|^2

with the softmax loss of one row of W per class. L-BFGS in double precision starts at zero and runs until the gradient
is as small as asked, or until it gets no further, which is no error: what comes out is post-processing. It must never
see private records: how far it comes depends on them, so no sensitivity is proved for it. Agents train by
`workers.learning.descent`.

N is len(features) here; scikit-learn's C is 1 / (lambda N).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from labeler.errors import InvalidSetting

Array = NDArray[np.float64]

_MEMORY = 20
_MOST_ITERATIONS = 5000


@dataclass(frozen=True, eq=False)
class Fit:
    """Weights near the minimum.

    Attributes:
        weights: float64, shape (num_classes, dimension).
        iterations: of L-BFGS.
    """

    weights: Array
    iterations: int


def fit_multinomial(features: Array, targets: Array, *, regularisation: float, tolerance: float = 1e-5) -> Fit:
    """Softmax regression of class probabilities: one row of weights per class, also for classes nobody has.

    Args:
        features: public, shape (n, dimension), with the constant that carries the intercept; n at least 1.
        targets: shape (n, num_classes), rows are probabilities: one-hot labels, or soft labels.
        regularisation: lambda of the averaged loss.
        tolerance: distance from the minimiser that is tried for: |W - W*| <= |grad J(W)| / lambda.

    Raises:
        InvalidSetting: shapes do not fit, or a number is out of bounds.
    """
    if features.ndim != 2 or min(features.shape) < 1 or targets.ndim != 2 or len(features) != len(targets):
        raise InvalidSetting(f"features {features.shape} and targets {targets.shape} are not rows of the same records")
    if not 0 < regularisation < math.inf or not 0 < tolerance < math.inf:
        raise InvalidSetting(f"regularisation and tolerance must be positive, found {regularisation!r}, {tolerance!r}")
    shape = (targets.shape[1], features.shape[1])
    size, records = math.prod(shape), len(features)

    def objective(flat: Array) -> tuple[float, Array]:
        weights = flat.reshape(shape)
        scores = features @ weights.T
        scores -= scores.max(axis=1, keepdims=True)
        exponentials = np.exp(scores)
        totals = exponentials.sum(axis=1, keepdims=True)
        loss = float(np.log(totals).sum() - np.vdot(scores, targets))
        gradient = (exponentials / totals - targets).T @ features / records + regularisation * weights
        return loss / records + regularisation / 2 * float(flat @ flat), gradient.ravel()

    # L-BFGS-B looks at the gradient's largest entry; its norm is at most sqrt(size) times that.
    largest_entry = regularisation * tolerance / math.sqrt(size)
    options = {"maxcor": _MEMORY, "ftol": 0.0, "gtol": largest_entry, "maxiter": _MOST_ITERATIONS, "maxfun": 10**6}
    found = minimize(objective, np.zeros(size), jac=True, method="L-BFGS-B", options=options)
    return Fit(np.asarray(found.x, dtype=np.float64).reshape(shape), int(found.nit))
