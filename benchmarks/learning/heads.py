"""One round from many clients' heads to one server model: certainty-weighted soft labels, summed, divided, learned.

    label(x) = sum_i f_i(x) g_i(x) / sum_i f_i(x)                          (Hoech et al. 2022, equation 1)

Client i answers a public image x with S f_i(x) g_i(x) in whole numbers, f its certainty in [0, 1] and g its class
probabilities. The answers travel as secret shares, so nobody sees a single client's; only the sum is opened. No noise
is added here: the heads were released under local noise before (`labeler.methods.aux_distill`), and everything on this
page is post-processing of them. The sum of a row is the sum of certainties, as every g sums to one: it need not be
sent.

How much noise two private heads get in the paper's tables: its two budgets as shares, and the least for a price.

Logistic regression on public data: what a server fits to labels that agents have released.

    J(W) = (1/N) sum_i loss(W x_i, t_i) + (lambda/2) |W|^2

with the softmax loss of one row of W per class. L-BFGS in double precision starts at zero and runs until the gradient
is as small as asked, or until it gets no further, which is no error: what comes out is post-processing. It must never
see private records: how far it comes depends on them, so no sensitivity is proved for it. Agents train by
`workers.learning.descent`.

N is len(features) here; scikit-learn's C is 1 / (lambda N).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from feature_store.students.answers import softmax
from labeler.accounting.gaussian import mu_of_epsilon
from labeler.errors import InvalidSetting, PrivacyRefusal
from labeler.methods.aux_distill import LocalHeadTerms
from labeler.randomness import ByteSource
from labeler.sharing import split, unshard
from workers.learning.private_heads import PublicMap, fit_public_map

DEFAULT_SCALE = 1 << 16
"""S: grid units of a vote."""

STUDENT_DIMENSIONS = 128
STUDENT_REGULARISATION = 1e-4
_STUDENT_TOLERANCE = 3.0
# Nothing is proved of the server model, so its optimiser may stop where accuracy no longer moves.


@dataclass(frozen=True, eq=False)
class ServerModel:
    """A linear head on frozen features, learned from public images and released labels.

    Attributes:
        weights: float64, shape (num_classes, features.dimension).
        features: public map in front of it.
    """

    weights: Array
    features: PublicMap

    def predict_proba(self, inputs: NDArray[np.floating]) -> Array:
        """Class probabilities, shape (n, num_classes)."""
        return softmax(self.features(inputs) @ self.weights.T)


def grid_votes(soft_votes: Array, *, scale: int = DEFAULT_SCALE) -> NDArray[np.int64]:
    """Soft votes as whole numbers from 0 to scale, with no row summing to more than scale.

    Rounded down, because rounding to the nearest could push a row beyond the bound that talliers and tasks rely on.

    Raises:
        PrivacyRefusal: a vote is not finite, is negative, or a row is more than one vote.
    """
    votes = np.floor(np.asarray(soft_votes, dtype=np.float64) * scale)
    rows = votes.sum(axis=1)
    # The comparison is false for NaN as well.
    if not (votes.min(initial=0) >= 0 and rows.max(initial=0) <= scale):
        raise PrivacyRefusal("soft votes must be numbers from 0 to 1 that sum to at most 1 for a query")
    return votes.astype(np.int64)


def sum_votes(
    votes: Iterable[NDArray[np.int64]], *, sources: Iterable[ByteSource], talliers: int = 2
) -> NDArray[np.int64]:
    """The sum of all clients' votes through secret shares: what talliers open, in one process.

    Args:
        votes: one array per client, all of one shape (num_queries, num_classes).
        sources: one secret source per client, for the masks of its shares.
        talliers: 2 or 3.

    Raises:
        InvalidSetting: there is no client.
    """
    totals: list[NDArray[np.uint64]] | None = None
    shape: tuple[int, ...] = ()
    for ballots, source in zip(votes, sources, strict=True):
        shares = [share.expand() for share in split(ballots.ravel(), num_talliers=talliers, source=source)]
        totals = shares if totals is None else [total + share for total, share in zip(totals, shares, strict=True)]
        shape = ballots.shape
    if totals is None:
        raise InvalidSetting("a sum of votes needs at least one client")
    return unshard(totals).reshape(shape)


def soft_labels(total: NDArray[np.int64]) -> Array:
    """Equation 1: a row of sums divided by its own sum; equal shares where no client is certain of anything.

    Args:
        total: summed votes, shape (num_queries, num_classes), not negative.

    Returns:
        float64, same shape, rows sum to one.
    """
    certainties = total.sum(axis=1, keepdims=True).astype(np.float64)
    return np.where(certainties > 0, total / np.where(certainties > 0, certainties, 1.0), 1 / total.shape[1])


def student_features(public: NDArray[np.floating]) -> PublicMap:
    """The map of a server model: centre and first axes of all public features, STUDENT_DIMENSIONS at most."""
    return fit_public_map(public, dimensions=min(STUDENT_DIMENSIONS, *public.shape))


def distil(
    public: NDArray[np.floating],
    labels: Array,
    *,
    features: PublicMap | None = None,
    regularisation: float = STUDENT_REGULARISATION,
) -> ServerModel:
    """The server model: softmax regression of soft labels on public features. No private datum is near it.

    Args:
        public: features of the distillation images as stored, shape (num_queries, stored).
        labels: soft labels, shape (num_queries, num_classes).
        features: public map in front of the model; by default fitted to `public` by `student_features`.
        regularisation: of its averaged loss.
    """
    features = features or student_features(public)
    fit = fit_multinomial(
        features(public),
        labels,
        regularisation=regularisation,
        tolerance=_STUDENT_TOLERANCE,
    )
    return ServerModel(fit.weights, features)


def paper_scores_share(
    epsilon_scores: float = 0.1, epsilon_head: float = 0.5, *, delta_scores: float = 1e-5, delta_head: float = 1e-5
) -> float:
    """The share of mu^2 that the paper's two budgets give to the certainty head: 0.05 for its 0.1 and 0.5."""
    scores, head = mu_of_epsilon(epsilon_scores, delta_scores), mu_of_epsilon(epsilon_head, delta_head)
    return scores**2 / (scores**2 + head**2)


def solve_noise(terms: LocalHeadTerms, *, epsilon: float, delta: float, scores_share: float) -> LocalHeadTerms:
    """The same terms with the least noise for which the release of both heads is certified (epsilon, delta).

    Args:
        terms: everything but the noise.
        epsilon: for both heads together, instance level.
        delta: in (0, 1).
        scores_share: share of mu^2 for the certainty head, in (0, 1); 0 for none. `paper_scores_share` has the paper's.

    Raises:
        InvalidSetting: a number is out of bounds.
    """
    if not 0 <= scores_share < 1:
        raise InvalidSetting(f"the share of the certainty head lies in [0, 1), found {scores_share!r}")
    if not 0 < epsilon < math.inf:
        raise InvalidSetting(f"epsilon must be positive and finite, found {epsilon!r}")
    mu = mu_of_epsilon(epsilon, delta)
    while True:
        solved = replace(
            terms,
            sigma_head=1 / (mu * math.sqrt(1 - scores_share)),
            sigma_scores=1 / (mu * math.sqrt(scores_share)) if scores_share else None,
        )
        found = solved.epsilon(delta)
        if found <= epsilon:
            return solved
        # Rounding and the certificate cost about a hundredth; epsilon grows with mu at least in proportion.
        mu *= min(epsilon / found, 1 - 1e-6)


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
