"""The selection by groups finds what a full sort of the keys finds, however many similarities are equal."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from feature_store.index.definition import pack
from feature_store.index.engine_torch import _GROUP, first_of_tile, interleaved


@given(
    seed=st.integers(0, 2**32 - 1),
    panels=st.integers(1, 3),
    records=st.integers(1, 12 * _GROUP),
    count=st.integers(1, 12),
    values=st.sampled_from([1, 2, 3, 40, 2**24]),
)
def test_the_first_of_a_tile_are_those_of_a_full_sort(
    seed: int, panels: int, records: int, count: int, values: int
) -> None:
    rng = np.random.default_rng(seed)
    similarities = rng.integers(-values, values, (3, panels * records)).clip(-(2**24) + 1).astype(np.float32)
    ranks = np.sort(rng.choice(2**37, panels * records, replace=False)).astype(np.int64)
    found = first_of_tile(_laid(similarities.T, records).T, _laid(ranks, records), count, records).numpy()
    assert np.array_equal(np.sort(found, axis=1), np.sort(pack(similarities, ranks), axis=1)[:, :count])


def _laid(by_record: NDArray[Any], panel_rows: int) -> torch.Tensor:
    """What belongs to records, as it lies on a device: panel after panel."""
    return torch.cat([interleaved(panel) for panel in torch.from_numpy(by_record).split(panel_rows)]).contiguous()
