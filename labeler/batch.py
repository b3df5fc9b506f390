"""A batch of public queries, and the digest that ties every message of a round to it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from labeler.errors import InvalidSetting


@dataclass(frozen=True, eq=False)
class QueryBatch:
    """Quantised features of public queries, all asked in one round.

    Attributes:
        features: int16, shape (num_queries, dimension), made by the task's backbone.
        first_query: number of the first of them within the task, so that equal batches asked at
            different places of a task are different rounds.
        model: where a model is trained in steps, the public one that this step begins from (labeler.linear_model),
            float64 of shape (num_queries, num_classes).
        digest: SHA-256 over the place, the shapes and the bytes, in hexadecimal, of the model too. Noise is drawn per
            digest: the same queries asked again in the same place give the same noise, any change new noise. So the
            key of a round never serves two ballots: whatever of a batch decides one is in its digest.
    """

    features: NDArray[np.int16]
    first_query: int = 0
    model: NDArray[np.float64] | None = None
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        if self.features.dtype != np.int16 or self.features.ndim != 2 or not len(self.features):
            raise InvalidSetting(
                "a batch of queries must be an int16 array of shape (num_queries, dimension) with at least one row; "
                f"found {self.features.dtype} of shape {self.features.shape}"
            )
        # A copy that nobody can change: the noise of a round is tied to the digest of exactly these numbers.
        frozen = self.features.astype("<i2", order="C", copy=True)
        frozen.setflags(write=False)
        object.__setattr__(self, "features", frozen)
        header = f"labeler-batch/1 {self.first_query} {frozen.shape[0]} {frozen.shape[1]}\n".encode()
        sha256 = hashlib.sha256(header)
        sha256.update(frozen.data)
        if self.model is not None:
            model = self.model.astype("<f8", order="C", copy=True)
            model.setflags(write=False)
            object.__setattr__(self, "model", model)
            # Behind features whose length the header says, so that no batch without a model has these bytes.
            sha256.update(f"model {' '.join(map(str, model.shape))}\n".encode())
            sha256.update(model.data)
        object.__setattr__(self, "digest", sha256.hexdigest())

    def __len__(self) -> int:
        return len(self.features)
