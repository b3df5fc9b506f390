"""Private heads of FedAUXfdp: the public map in front, certainty, and both heads under noise.

**The map** turns a stored feature into the input row of a private head. It depends on public images alone, and its
rows have a public bound on their norm.

    x -> z = (x - mean) basis -> (r z / max(|z|, l), a),      r^2 + a^2 = c^2.

The mean and the principal axes (`basis`) are those of the public negatives, which every client has. So no private image
decides how another one is mapped. (The paper's equation 4 divides by the largest private norm. Then one record would
scale all others, and the proof would fail.) No row is longer than c, which is the bound in the sensitivity. The
constant a carries the intercept.

**Rounding.** A matrix product may round a row differently when another record is gone. If |z| is tiny, dividing by it
would turn that error into another direction altogether. The least length l, a tenth of the public rows' length,
prevents this. A map is refused if rounding could move a row by more than `FEATURE_ROUNDING` of c, for stored rows of
norm at most 2. The margin of `labeler.methods.aux_distill` covers that much.

Centering matters more than anything else here. Features of a network are positive and share a large mean. Without
centering, a head's noise along that mean would move all queries together.

**Certainty** says how sure a client may be about an image: does it look like the client's own records, or like public
images of no one? The certainty head is a logistic regression of the client's private records against the public
negatives that all clients share (Sattler et al. 2021). If a client has only ever seen ships, it gives a ship a weight
near 1 and everything else a weight near 0. So clients that know a class lead the sum of weighted answers.
A client's records decide the head, so the head is private. `labeler.methods.aux_distill` releases it under noise. It
proves that one record moves the head by at most 2 c / (lambda (n + m)), because negatives are the same on neighboring
data.

**Both heads** of one client are fitted, and noise is added once. An agent of method `aux-distill` answers with them, at
no further price:

    heads = fit_rows(records, negatives, terms=terms, maps=maps).released(terms, source=source)   private in, public out
    heads.soft_votes(queries)                                                    post-processing: no more price

The noise is local and drawn once. A second pair of heads, with new noise for the same records, would have to be paid
for again. So an agent keeps its heads, or the source of their noise, for as long as it keeps its records.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from feature_store.students.answers import softmax
from labeler.errors import InvalidSetting
from labeler.methods.aux_distill import FEATURE_ROUNDING, LocalHeadTerms
from labeler.randomness import ByteSource
from labeler.records import Array, Block, Blocks, Rows, block_rows, kept
from workers.learning.descent import descend, logistic_slopes, softmax_slopes

CONSTANT_SHARE = 0.1
"""a / c: the constant coordinate, as a share of the norm c."""

LEAST_LENGTH = 0.1
"""l, as a share of the root mean square length of the public rows."""

_INSIDE = 1 - 1e-12
_STORED_NORM = 2.0
_LEAST_VARIANCE = 1e-9


@dataclass(frozen=True, eq=False)
class PublicMap:
    """The public map in front of a head; the module's docstring defines it.

    Attributes:
        mean: float64, shape (stored,).
        basis: float64, shape (stored, reduced); None keeps all coordinates as they are.
        least_length: l.
        clip_norm: c.

    Raises:
        InvalidSetting: a number is out of bounds.
    """

    mean: Array
    basis: Array | None
    least_length: float
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.least_length < math.inf or not 0 < self.clip_norm < math.inf:
            raise InvalidSetting("a map's least length and norm must be positive and finite")

    @property
    def dimension(self) -> int:
        """The number of components of an output row, with the constant."""
        return (len(self.mean) if self.basis is None else self.basis.shape[1]) + 1

    @property
    def rounding(self) -> float:
        """A bound on how far a row may move when other rows are computed with it, as a share of c.

        A product of d terms is off by at most (d + 2) 2^-52 times the norms. Two such products differ by at most twice
        that.
        """
        spread = 1.0 if self.basis is None else float(np.linalg.norm(self.basis))
        reach = (_STORED_NORM + float(np.linalg.norm(self.mean))) * spread
        return 2 * (len(self.mean) + 2) * 2.0**-52 * reach / self.least_length

    def __call__(self, features: NDArray[np.floating]) -> Array:
        """Return rows of norm c at most, float64, shape (n, dimension)."""
        if features.ndim != 2 or features.shape[1] != len(self.mean):
            raise InvalidSetting(f"this map takes rows of {len(self.mean)} numbers, found shape {features.shape}")
        rows = features.astype(np.float64)
        rows = rows - self.mean if self.basis is None else rows @ self.basis - self.mean @ self.basis
        norms = np.sqrt(np.einsum("ij,ij->i", rows, rows))[:, None]
        constant = CONSTANT_SHARE * self.clip_norm * _INSIDE
        length = math.sqrt(1 - CONSTANT_SHARE**2) * self.clip_norm * _INSIDE
        # Rows are stretched as well as cut, because a row near the mean should count as much as any other.
        rows *= length / np.maximum(norms, self.least_length)
        return np.hstack([rows, np.full((len(rows), 1), constant)])


def plain_map(dimension: int, *, clip_norm: float = 1.0) -> PublicMap:
    """Return a map without a mean or axes, which only scales rows to one length, as in the paper."""
    return PublicMap(np.zeros(dimension), None, LEAST_LENGTH, clip_norm)


def fit_public_map(public: NDArray[np.floating], *, dimensions: int, clip_norm: float = 1.0) -> PublicMap:
    """Fit the map to public images: center on their mean, and keep their first principal axes.

    Each axis is divided by the root of its standard deviation, because the axes that tell classes apart are rarely the
    longest.

    Args:
        public: features of public images, shape (m, stored).
        dimensions: axes kept, at most min(m, stored).
        clip_norm: c.

    Raises:
        InvalidSetting: a number is out of bounds, or there are fewer images than axes.
    """
    if not 1 <= dimensions <= min(public.shape):
        raise InvalidSetting(
            f"{dimensions} axes cannot be fitted to public features of shape {public.shape}; take fewer, or more images"
        )
    rows = public.astype(np.float64)
    mean = rows.mean(axis=0)
    rows -= mean
    variances, axes = np.linalg.eigh(rows.T @ rows / len(rows))
    kept = slice(None, -dimensions - 1, -1)
    floor = _LEAST_VARIANCE * max(float(variances[-1]), np.finfo(float).tiny)
    basis = axes[:, kept] * np.maximum(variances[kept], floor) ** -0.25
    length = math.sqrt(float(np.einsum("ij,ij->", rows @ basis, rows @ basis)) / len(rows))
    if length == 0:
        raise InvalidSetting("the public features are all the same, so they have no axes")
    return PublicMap(mean, basis, LEAST_LENGTH * length, clip_norm)


def fit_certainty(blocks: Blocks, *, num_records: int, terms: LocalHeadTerms) -> Array:
    """Fit the certainty head without noise and return it, shape (terms.score_dimension,). It is private.

    The loss is a mean over the client's records and the negatives. Its denominator counts at least `terms.min_records`
    records. With `terms.max_records` the denominator is public.

    Args:
        blocks: rows of the client's records (True) and of the terms.num_negatives public negatives (False), each of
            shape (r, terms.score_dimension), float64, norm at most terms.clip_norm.
        num_records: how many records the client has; may be 0.
    """
    weights = descend(
        terms.score_descent,
        blocks,
        logistic_slopes,
        counts=float(terms.score_descent.denominator(num_records + terms.num_negatives)),
        shape=(terms.score_dimension, 1),
        ball_axes=(0, 1),
    )
    return weights[:, 0]


def certainty(scores: Array, features: Array, *, sharpness: float = 1.0) -> Array:
    """Return the certainty head's probability that each query is like the client's records.

    The result has shape (num_queries,) and values in [0, 1].

    Args:
        scores: the head, shape (dimension,).
        features: of queries, shape (num_queries, dimension).
        sharpness: factor on the head. A strongly regularized head stays near 1/2; amplifying it costs no privacy.
    """
    return np.asarray(expit(sharpness * (features @ scores)))


@dataclass(frozen=True, eq=False)
class PrivateHeads:
    """The heads that a client released: noisy, hence public.

    Attributes:
        head: noisy weights, float64, shape (num_classes, head_map.dimension).
        scores: noisy certainty head, float64, shape (score_map.dimension,); None if certainty was not asked for.
        head_map: public map in front of the head.
        score_map: public map in front of the certainty head.
        is_seeded: True in simulations: somebody may know the noise, so nothing is protected.
    """

    head: Array
    scores: Array | None
    head_map: PublicMap
    score_map: PublicMap
    is_seeded: bool

    def soft_votes(
        self, queries: NDArray[np.floating], *, head_sharpness: float = 1.0, score_sharpness: float = 1.0
    ) -> Array:
        """Return f(x) g(x): certainty times class probabilities.

        Args:
            queries: stored features, shape (num_queries, stored).
            head_sharpness: factor on the head's scores before the softmax.
            score_sharpness: factor on the certainty head's score.

        Returns:
            float64, shape (num_queries, num_classes), entries and sums of rows in [0, 1].
        """
        return self.votes_of_rows(
            self.head_map(queries),
            self.score_map(queries),
            head_sharpness=head_sharpness,
            score_sharpness=score_sharpness,
        )

    def votes_of_rows(
        self, head_rows: Array, score_rows: Array, *, head_sharpness: float = 1.0, score_sharpness: float = 1.0
    ) -> Array:
        """Return `soft_votes` of rows that both maps have made already.

        Clients with equal maps share the work of mapping.
        """
        probabilities = softmax(head_sharpness * (head_rows @ self.head.T))
        if self.scores is None:
            return probabilities
        return probabilities * certainty(self.scores, score_rows, sharpness=score_sharpness)[:, None]


@dataclass(frozen=True, eq=False)
class FittedHeads:
    """Both heads before the noise: private.

    Attributes:
        head, scores, head_map, score_map: as in `PrivateHeads`, without noise.
    """

    head: Array
    scores: Array | None
    head_map: PublicMap
    score_map: PublicMap

    def released(self, terms: LocalHeadTerms, *, source: ByteSource) -> PrivateHeads:
        """Return both heads under the noise of the terms they were fitted for."""
        head, scores = terms.release(self.head, self.scores, source=source)
        return PrivateHeads(head, scores, self.head_map, self.score_map, source.is_seeded)

    def __repr__(self) -> str:
        return f"FittedHeads(<weights redacted>, shape={self.head.shape})"


def fit_heads(
    features: NDArray[np.floating],
    labels: NDArray[np.integer],
    negatives: NDArray[np.floating],
    *,
    terms: LocalHeadTerms,
    head_map: PublicMap | None = None,
    score_map: PublicMap | None = None,
) -> FittedHeads:
    """Fit both heads to records in memory, with the maps of `public_maps`. The heads are private until `released`."""
    if labels.shape != (len(features),) or (len(labels) and not 0 <= labels.min() <= labels.max() < terms.num_classes):
        raise InvalidSetting(f"labels must be one per record, from 0 to {terms.num_classes - 1}")
    maps = public_maps(negatives, terms=terms, head_map=head_map, score_map=score_map)
    return fit_rows(Rows.of(features, labels), negatives, terms=terms, maps=maps)


def public_maps(
    negatives: NDArray[np.floating],
    *,
    terms: LocalHeadTerms,
    head_map: PublicMap | None = None,
    score_map: PublicMap | None = None,
) -> tuple[PublicMap, PublicMap]:
    """Return the maps in front of both heads, after checking them.

    Every refusal follows from public numbers, and all of them happen here.

    Raises:
        InvalidSetting: the negatives are not as many as the terms say, or have no axes. Or a map gives rows of another
            dimension or norm than the terms price, or would magnify rounding errors.
    """
    if len(negatives) != terms.num_negatives:
        raise InvalidSetting(f"these terms have {terms.num_negatives} public negatives, found {len(negatives)}")

    @cache
    def default_map(dimension: int) -> PublicMap:
        return fit_public_map(negatives, dimensions=dimension - 1, clip_norm=terms.clip_norm)

    head_map = head_map or default_map(terms.head_dimension)
    score_map = score_map or default_map(terms.score_dimension)
    for found, wanted in ((head_map, terms.head_dimension), (score_map, terms.score_dimension)):
        if found.dimension != wanted or found.clip_norm > terms.clip_norm:
            raise InvalidSetting(
                f"a map gives {found.dimension} numbers of norm {found.clip_norm:g}; "
                f"the terms price {wanted} of norm {terms.clip_norm:g}"
            )
        if not found.rounding <= FEATURE_ROUNDING:
            raise InvalidSetting("a map would magnify rounding errors of private rows; whiten less, or keep fewer axes")
    return head_map, score_map


def fit_rows(
    records: Rows,
    negatives: NDArray[np.floating],
    *,
    terms: LocalHeadTerms,
    maps: tuple[PublicMap, PublicMap],
) -> FittedHeads:
    """Fit both heads to any number of records, which are read in blocks.

    `public_maps` has checked what is public; `Records.trainable` hands over no more records than declared.

    Args:
        records: finite features as stored, and labels from 0 to terms.num_classes - 1.
        negatives: stored features of the public negatives, terms.num_negatives of them.
        maps: the result of `public_maps`.

    Raises:
        PrivacyRefusal: there are more records than the terms declare to be the most.
    """
    head_map, score_map = maps
    at_once = block_rows(records.dimension + max(head_map.dimension + terms.num_classes, score_map.dimension))
    classes = np.arange(terms.num_classes)

    def labelled(skip: int) -> Iterator[Block]:
        for features, labels in records.read(at_once, skip):
            yield head_map(features), labels[:, None] == classes

    blocks = kept(labelled)
    weights = descend(
        terms.head_descent,
        blocks,
        softmax_slopes,
        counts=float(terms.head_descent.denominator(records.count)),
        shape=(terms.head_dimension, terms.num_classes),
        ball_axes=(0, 1),
    )
    if terms.sigma_scores is None:
        return FittedHeads(np.ascontiguousarray(weights.T), None, head_map, score_map)

    def own(skip: int) -> Iterator[Block]:
        return ((score_map(features), True) for features, _ in records.read(at_once, skip))

    def public(skip: int) -> Iterator[Block]:
        parts = (slice(start, start + at_once) for start in range(skip * at_once, len(negatives), at_once))
        return ((score_map(negatives[part]), False) for part in parts)

    own_rows, public_rows = kept(own), kept(public)
    scores = fit_certainty(
        lambda: chain(own_rows(), public_rows()),
        num_records=records.count,
        terms=terms,
    )
    return FittedHeads(np.ascontiguousarray(weights.T), scores, head_map, score_map)
