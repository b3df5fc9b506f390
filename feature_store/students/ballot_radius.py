"""Which ball to draw ballots onto (`Task.ballot_radius`), from public images: a rehearsal of one agent's ballot.

At agent level the noise is R / mu votes. Below the length of an agent's centred ballot (`labeler.ball`) the radius R
says nothing: votes and noise shrink together, and every agent counts alike. Above it noise grows and votes do not. At
instance level the noise is worth the more the larger R is. So R is half of the length that a ballot has in rehearsal:
as large as it may be and still, in all likelihood, below the length of every agent's.

In rehearsal an agent holds public images, drawn at random, and the natural groups of the public images, as many as
there are classes, are their classes. Real records lie less well in groups, which makes ballots a little shorter: the
half is for them. How many records an agent holds is for whoever asks to say; nothing private is read.
"""

from __future__ import annotations

from math import isqrt
from typing import Final

import numpy as np
from numpy.typing import NDArray

from feature_store.index.build import build_index
from feature_store.query_selection import select_queries
from labeler.ballots import reverse_knn_ballots
from labeler.errors import InvalidSetting

REHEARSALS: Final = 5


def propose_radius(
    features: NDArray[np.int16], *, questions: int, num_classes: int, k: int, records: int, seed: int = 0
) -> int:
    """R, in whole votes, at least 1.

    Args:
        features: int16, shape (num_images, dimension), of the public images.
        questions: Q; clusters of them, or all images where it is their number.
        num_classes: C.
        k: questions at which a record votes.
        records: of one agent, as far as anybody may know; rather too few than too many.
        seed: public.

    Raises:
        InvalidSetting: there are fewer images than questions or classes, or no record.
    """
    if len(features) < max(questions, num_classes) or records < 1:
        raise InvalidSetting(
            f"a radius is proposed from at least one record and {max(questions, num_classes)} public images (as many "
            f"as questions and classes), found {records} and {len(features)}"
        )
    groups = select_queries(features, strategy="clustered", count=num_classes, seed=seed).assignment
    strategy = "all" if questions == len(features) else "clustered"
    asked = select_queries(features, strategy=strategy, count=questions, seed=seed).features  # type: ignore[arg-type]
    index = build_index(asked, np.arange(questions))
    rng = np.random.default_rng(seed)
    squares = []
    for _ in range(REHEARSALS):
        own = rng.integers(0, len(features), records)
        nearest = index.search(features[own], min(k, questions)).record_ids
        ballot = reverse_knn_ballots(nearest, groups[own], num_queries=questions, num_classes=num_classes)
        centred = num_classes * ballot - ballot.sum(axis=1, keepdims=True)
        squares.append(int((centred**2).sum()))
    return max(1, isqrt(sorted(squares)[REHEARSALS // 2] // (2 * num_classes) ** 2))
