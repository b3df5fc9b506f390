"""An agent's records as those who vote see them. Private; does not print."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Records:
    """The records of a shard that were not deleted.

    Attributes:
        features: int16, shape (num_records, dimension), quantised.
        record_ids: int64, shape (num_records,), unique.
        labels: int16, shape (num_records,), classes.
        version: of the shard: another whenever a record came or went.
    """

    features: NDArray[np.int16] = field(repr=False)
    record_ids: NDArray[np.int64] = field(repr=False)
    labels: NDArray[np.int16] = field(repr=False)
    version: str

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        return "Records(<private>)"
