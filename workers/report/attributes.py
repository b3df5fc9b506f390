"""What a report shows where an image may have any number of attributes: each of them, and a few images."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any, Final

MOST_IMAGES: Final = 24
"""Public images that a page shows, evenly chosen."""


@dataclass(frozen=True)
class AttributeOutcome:
    """One attribute over all public images.

    Attributes:
        on: how many images have it, as far as the answers say.
        confidence: mean probability that what is said of it is right, 0 to 1.
        right: share of the images of known truth on which that is right; None where there are none.
        commoner: how often always giving the commoner answer would be right, which is what to compare with.
    """

    name: str
    on: int
    confidence: float
    right: float | None = None
    commoner: float | None = None


@dataclass(frozen=True, eq=False)
class AttributeImage:
    """A public image with the names of its attributes; `truth` where the requester knows them."""

    source: str
    has: tuple[str, ...]
    truth: tuple[str, ...] | None = None
    thumbnail: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True, eq=False)
class AttributeReport:
    """What is said of all public images.

    Attributes:
        outcomes: of each attribute, in the order of the task.
        count: how many images there are.
        known: of how many the truth is known.
    """

    outcomes: tuple[AttributeOutcome, ...]
    images: tuple[AttributeImage, ...]
    count: int
    known: int

    @property
    def accuracy(self) -> float | None:
        """Mean over attributes of the share that is right."""
        shares = [one.right for one in self.outcomes if one.right is not None]
        return statistics.fmean(shares) if shares else None

    @property
    def commoner(self) -> float | None:
        """The same for always giving the commoner answer."""
        shares = [one.commoner for one in self.outcomes if one.commoner is not None]
        return statistics.fmean(shares) if shares else None

    @property
    def confidence(self) -> float:
        """Mean over images and attributes."""
        return statistics.fmean(one.confidence for one in self.outcomes)

    def to_json(self) -> dict[str, Any]:
        """The part of report.json that is about attributes."""
        return {
            "labelled": self.count,
            "mean_confidence": round(self.confidence, 6),
            **({} if self.accuracy is None else {"accuracy": self.accuracy, "checked": self.known}),
            **({} if self.commoner is None else {"always_the_commoner": self.commoner}),
            "attributes": [
                {"name": one.name, "images": one.on, "confidence": round(one.confidence, 6)}
                | ({} if one.right is None else {"accuracy": one.right, "always_the_commoner": one.commoner})
                for one in self.outcomes
            ],
        }
