"""One client's two heads, fitted, noised once and then free: what an agent of method `aux-distill` answers with.

    heads = fit_rows(records, negatives, terms=terms, maps=maps).released(terms, source=source)   private in, public out
    heads.soft_votes(queries)                                                    post-processing: no more price

The noise is local and drawn once. Drawn again for the same records, a second pair of heads would have to be paid for
again, so an agent keeps its heads, or the source of their noise, for as long as it keeps its records.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from feature_store.students.projection import softmax
from labeler.errors import InvalidSetting
from labeler.methods.aux_distill import FEATURE_ROUNDING, LocalHeadTerms
from labeler.randomness import ByteSource
from labeler.records import Array, Block, Rows, block_rows, kept
from workers.learning.certainty import certainty, fit_certainty
from workers.learning.descent import descend, softmax_slopes
from workers.learning.public_map import PublicMap, fit_public_map


@dataclass(frozen=True, eq=False)
class PrivateHeads:
    """What a client released: noisy, hence public.

    Attributes:
        head: noisy weights, float64, shape (num_classes, head_map.dimension).
        scores: noisy certainty head, float64, shape (score_map.dimension,); None where certainty was not asked for.
        head_map: public map in front of the head.
        score_map: public map in front of the certainty head.
        is_seeded: True where somebody may know the noise: nothing is protected (simulations).
    """

    head: Array
    scores: Array | None
    head_map: PublicMap
    score_map: PublicMap
    is_seeded: bool

    def soft_votes(
        self, queries: NDArray[np.floating], *, head_sharpness: float = 1.0, score_sharpness: float = 1.0
    ) -> Array:
        """f(x) g(x): certainty times class probabilities.

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
        """`soft_votes` of queries that both maps were applied to before; clients with equal maps share that work."""
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
        """Both heads under the noise of the terms they were fitted for."""
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
    """Both heads of records in memory, of maps of `public_maps`; they are private until `released`."""
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
    """The maps in front of both heads, checked: all that can be refused follows from public numbers, and is here.

    Raises:
        InvalidSetting: another number of negatives than the terms', negatives without axes, a map that gives other
            rows than the terms price, or that would magnify rounding errors.
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
    engine: str = "numpy",
) -> FittedHeads:
    """Both heads of records that are read in blocks, of any number: nothing here can be refused.

    Args:
        records: finite features as stored, and labels from 0 to terms.num_classes - 1.
        negatives: public images that are nobody's, as stored, terms.num_negatives of them.
        maps: of `public_maps`.
        engine: which devices may be used; see descent.descend.
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
        numbers=records.public_count * terms.head_dimension,
        engine=engine,
    )
    scores = None
    if terms.sigma_scores is not None:
        scores = _fit_scores(records, negatives, at_once, terms, score_map, engine)
    return FittedHeads(np.ascontiguousarray(weights.T), scores, head_map, score_map)


def _fit_scores(
    records: Rows,
    negatives: NDArray[np.floating],
    at_once: int,
    terms: LocalHeadTerms,
    score_map: PublicMap,
    engine: str,
) -> Array:
    def own(skip: int) -> Iterator[Block]:
        return ((score_map(features), True) for features, _ in records.read(at_once, skip))

    def public(skip: int) -> Iterator[Block]:
        parts = (slice(start, start + at_once) for start in range(skip * at_once, len(negatives), at_once))
        return ((score_map(negatives[part]), False) for part in parts)

    own_rows, public_rows = kept(own), kept(public)
    return fit_certainty(
        lambda: (rows for rows, _ in own_rows()),
        lambda: (rows for rows, _ in public_rows()),
        num_records=records.count,
        public_count=records.public_count,
        terms=terms,
        engine=engine,
    )
