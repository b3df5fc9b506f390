"""What the student says of every public image: which to look at first, how sure it is, and how often it is right.

Labels, confidences and pictures of public images follow from released answers; the truth is the requester's own. So
nothing here costs privacy, and a number that looks bad is shown as it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from labeler.errors import InvalidSetting

BANDS = ((0.0, 0.5), (0.5, 0.75), (0.75, 0.9), (0.9, 1.0))
"""Bands of confidence, the lower end included; the last one holds 1."""

_DEVIATIONS = 1.96
"""On both sides of a share, of which 95 % lie between."""

MAX_FIRST = 8
"""Images to look at first, of each kind: wrong ones, and the least sure of the others."""

MAX_PER_BAND = 16
"""Images shown of each band of confidence, evenly chosen."""


@dataclass(frozen=True, eq=False)
class ImageLabels:
    """The labels of all public images, as `student_labels.parquet` holds them.

    Attributes:
        labels: int16, shape (n,).
        confidences: float64, shape (n,), what the student states of its label, 0 to 1.
        asked: bool, shape (n,), images that were questions themselves.
        truth: int16, shape (n,), true classes where the requester knows them, -1 elsewhere.
        thumbnails: PNG files by image number, for those of `numbers_to_show` that have a picture.
    """

    sources: Sequence[str]
    labels: NDArray[np.int16]
    confidences: NDArray[np.float64]
    asked: NDArray[np.bool_]
    truth: NDArray[np.int16]
    thumbnails: Mapping[int, bytes] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        count = len(self.sources)
        if not count or any(len(column) != count for column in (self.labels, self.confidences, self.asked, self.truth)):
            raise InvalidSetting("labels of images need one label, confidence, origin and truth for each, and an image")
        if not np.isfinite(self.confidences).all() or self.confidences.min() < 0 or self.confidences.max() > 1:
            raise InvalidSetting("a confidence lies between 0 and 1")

    def __len__(self) -> int:
        return len(self.sources)

    @cached_property
    def known(self) -> NDArray[np.bool_]:
        """Whose truth is known."""
        return self.truth >= 0

    @cached_property
    def right(self) -> NDArray[np.bool_]:
        """Whose label is the true one; False where the truth is not known."""
        found: NDArray[np.bool_] = self.known & (self.labels == self.truth)
        return found

    @property
    def accuracy(self) -> float | None:
        """Share of the labels that are right, among those whose truth is known."""
        return float(self.right.sum() / self.known.sum()) if self.known.any() else None

    @property
    def median_confidence(self) -> float:
        """Half of the labels are stated with at least this."""
        return float(np.median(self.confidences))

    def band_of(self, low: float, high: float) -> NDArray[np.int64]:
        """Numbers of the images stated with a confidence in a band, the least sure first."""
        inside = (self.confidences >= low) & ((self.confidences < high) | (high >= 1))
        numbers = np.flatnonzero(inside)
        return numbers[np.argsort(self.confidences[numbers], kind="stable")]

    def wrong(self) -> NDArray[np.int64]:
        """Numbers of the images whose label is wrong, the surest first: those tell most."""
        numbers = np.flatnonzero(self.known & ~self.right)
        return numbers[np.argsort(-self.confidences[numbers], kind="stable")]

    def unclear(self) -> NDArray[np.int64]:
        """Numbers of the other images, the least sure first."""
        numbers = np.flatnonzero(~(self.known & ~self.right))
        return numbers[np.argsort(self.confidences[numbers], kind="stable")]

    def numbers_to_show(self) -> list[int]:
        """Images that a page shows, so that a caller reads no other picture."""
        first = [*self.wrong()[:MAX_FIRST], *self.unclear()[:MAX_FIRST]]
        rest = [number for low, high in BANDS for number in evenly_of(self.band_of(low, high), MAX_PER_BAND)]
        return sorted({int(number) for number in (*first, *rest)})


@dataclass(frozen=True)
class Band:
    """Labels stated with a confidence in a band, and how many of them are right.

    Attributes:
        stated: their mean confidence; 0 where there are none.
        right: of those, how many are.
    """

    low: float
    high: float
    count: int
    stated: float
    known: int
    right: int

    @property
    def share_right(self) -> float | None:
        """None where no truth is known."""
        return self.right / self.known if self.known else None

    def interval(self) -> tuple[float, float]:
        """Where the share that is right may lie, by chance alone, 95 % (Wilson 1927)."""
        if not self.known:
            return 0.0, 1.0
        share, square = self.right / self.known, _DEVIATIONS**2
        middle = (share + square / (2 * self.known)) / (1 + square / self.known)
        spread = math.sqrt(share * (1 - share) / self.known + square / (4 * self.known**2))
        reach = _DEVIATIONS * spread / (1 + square / self.known)
        return max(0.0, middle - reach), min(1.0, middle + reach)


def bands(images: ImageLabels, edges: Sequence[tuple[float, float]] = BANDS) -> tuple[Band, ...]:
    """How sure the labels are, and how often right, band by band."""
    found = []
    for low, high in edges:
        numbers = images.band_of(low, high)
        found.append(
            Band(
                low,
                high,
                len(numbers),
                float(images.confidences[numbers].mean()) if len(numbers) else 0.0,
                int(images.known[numbers].sum()),
                int(images.right[numbers].sum()),
            )
        )
    return tuple(found)


def confusion(images: ImageLabels, num_classes: int) -> NDArray[np.int64]:
    """How often each true class (row) got each label (column), among images whose truth is known."""
    cells = images.truth[images.known].astype(np.int64) * num_classes + images.labels[images.known]
    return np.bincount(cells, minlength=num_classes**2).reshape(num_classes, num_classes)


def evenly_of(numbers: NDArray[np.int64], most: int) -> list[int]:
    """At most so many of some numbers, evenly spaced, the first and the last among them."""
    if len(numbers) <= most:
        return [int(number) for number in numbers]
    places = np.unique(np.linspace(0, len(numbers) - 1, most).round().astype(np.int64))
    return [int(number) for number in numbers[places]]
