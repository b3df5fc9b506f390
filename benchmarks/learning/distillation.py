"""One round from many clients' heads to one server model: certainty-weighted soft labels, summed, divided, learned.

    label(x) = sum_i f_i(x) g_i(x) / sum_i f_i(x)                          (Hoech et al. 2022, equation 1)

Client i answers a public image x with S f_i(x) g_i(x) in whole numbers, f its certainty in [0, 1] and g its class
probabilities. The answers travel as secret shares, so nobody sees a single client's; only the sum is opened. No noise
is added here: the heads were released under local noise before (`labeler.methods.aux_distill`), and everything on this
page is post-processing of them. The sum of a row is the sum of certainties, as every g sums to one: it need not be
sent.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.learning.regression import Array, fit_multinomial
from feature_store.students.projection import softmax
from labeler.errors import InvalidSetting, PrivacyRefusal
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
