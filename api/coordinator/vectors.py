"""Feature vectors as requesters send them: quantised here, or on the grid already and then left as they are.

Quantising twice would move entries by a unit, and ask another question than the one sent.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from feature_store.quantize import on_grid, quantize
from labeler.errors import BadData, InvalidSetting


def quantised_rows(features: NDArray[np.float64]) -> NDArray[np.int16]:
    """Rows that are on the grid already as they are, all others quantised; each row by itself."""
    ready = on_grid(features)
    result = np.empty(features.shape, dtype=np.int16)
    result[ready] = features[ready].astype(np.int16)
    if not ready.all():
        result[~ready] = quantize(features[~ready])
    return result


def matrix_of(features: NDArray[np.floating | np.int16] | Sequence[Sequence[float]]) -> NDArray[np.floating | np.int16]:
    """Vectors as an array.

    Raises:
        BadData: integers that are not int16.
        InvalidSetting: rows of different lengths.
    """
    if isinstance(features, np.ndarray):
        if features.dtype != np.int16 and not np.issubdtype(features.dtype, np.floating):
            raise BadData(f"features must be floats, or int16 made by quantize; found {features.dtype}")
        return features
    lengths = {len(row) for row in features}
    if len(lengths) != 1:
        raise InvalidSetting(f"feature vectors of one job have one length; found {sorted(lengths)[:5]}")
    return np.array(features, dtype=np.float64)
