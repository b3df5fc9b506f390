"""Public images as a job sees them: the records of a public shard that were not deleted, in plain arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from feature_store.shard import Shard
from feature_store.students import Student


@dataclass(frozen=True, eq=False)
class PublicImages:
    """Public images with their features.

    Attributes:
        shard: where they come from; its deleted rows are not seen here.
        rows: which of its rows, shape (n,).
    """

    shard: Shard
    rows: NDArray[np.int64]

    @classmethod
    def of(cls, shard: Shard) -> PublicImages:
        """All images of a shard."""
        return cls(shard, shard.rows)

    @classmethod
    def labelled(cls, shard: Shard) -> PublicImages:
        """The images of a shard whose truth is known, to score on."""
        labels = np.asarray(shard.labels)[shard.rows]
        return cls(shard, shard.rows[(labels[:, 0] if shard.has_attributes else labels) >= 0])

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def features(self) -> NDArray[np.int16]:
        """int16, shape (n, dimension)."""
        return np.ascontiguousarray(self.shard.features[self.rows])

    @cached_property
    def labels(self) -> NDArray[np.int16]:
        """True classes for scoring, -1 where unknown; shape (n,), or (n, C) of attributes."""
        return np.asarray(self.shard.labels)[self.rows]

    @cached_property
    def sources(self) -> list[str]:
        """Name of each image within its source."""
        return [self.shard.sources[row] for row in self.rows.tolist()]

    @property
    def classes(self) -> tuple[str, ...]:
        return self.shard.classes

    @property
    def path(self) -> Path:
        return self.shard.path

    @property
    def backbone_name(self) -> str:
        """The backbone in words, for people."""
        described = self.shard.backbone
        return str(described.get("architecture") or described.get("kind") or "")

    def share_right(self, student: Student) -> float:
        """Share of these images, of which the truth is known, that a student is right on."""
        return float((student.predict(self.features) == self.labels).mean())

    def thumbnails(self, numbers: Sequence[int]) -> dict[int, bytes]:
        """PNG bytes per image number, for those that have a picture."""
        ids = {int(self.shard.record_ids[self.rows[number]]): number for number in numbers}
        return {ids[record_id]: png for record_id, png in self.shard.thumbnails(list(ids)).items()}
