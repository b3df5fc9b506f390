"""What a question is called, and after which image: one rule, so that the service and `labeler run` say the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_BLOCK_ROWS = 4096


@dataclass(frozen=True)
class QuestionNames:
    """What a job asked, in words.

    Attributes:
        query_ids: one per answer.
        sources: name of the image that each answer is about, or that lies nearest to its cluster's centre.
    """

    query_ids: tuple[str, ...]
    sources: tuple[str, ...]

    @classmethod
    def of(cls, rows: NDArray[np.int64], sources: Sequence[str], *, kind: str | None) -> QuestionNames:
        """Name answers after the images of these rows.

        Args:
            rows: see `query_rows`.
            sources: of all images.
            kind: "query" or "cluster", of which answers are numbered; None: an answer is called like its image.

        Raises:
            IndexError: a row is no image.
        """
        named = tuple(sources[row] for row in rows.tolist())
        ids = named if kind is None else tuple(f"{kind}-{number:06d}" for number in range(len(named)))
        return cls(ids, named)


def query_rows(
    rows: NDArray[np.int64],
    assignment: NDArray[np.int64],
    *,
    centres: NDArray[np.int16],
    images: NDArray[np.int16] | None,
) -> NDArray[np.int64]:
    """The image that each answer is about, or the one most similar to it in its cluster; the lowest row among equals.

    Similarity is the cosine with the centre. Products of quantised features are whole numbers below 2^53, so that it
    is the same number wherever it is computed.

    Args:
        rows: shape (num_answers,), -1 for the centre of a cluster.
        assignment: shape (num_images,), the answer that stands for each image.
        centres: int16, shape (num_answers, dimension), what is asked.
        images: int16, shape (num_images, dimension); None where they are gone: then the first of each cluster.

    Returns:
        int64, shape (num_answers,); 0 for a cluster without images.
    """
    if not (rows < 0).any():
        return rows
    similarity = np.zeros(len(assignment))
    if images is not None:
        for start in range(0, len(images), _BLOCK_ROWS):
            block = slice(start, start + _BLOCK_ROWS)
            wide = images[block].astype(np.float64)
            products = np.einsum("id,id->i", wide, centres[assignment[block]].astype(np.float64))
            similarity[block] = products / np.linalg.norm(wide, axis=1)
    # Ascending by similarity, and among equals the lowest row last: what is written last stays.
    order = np.lexsort((-np.arange(len(assignment)), similarity))
    nearest = np.zeros(len(rows), dtype=np.int64)
    nearest[assignment[order]] = order
    return nearest
