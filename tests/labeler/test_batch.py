"""The digest of a batch changes whenever anything an answer depends on does."""

from __future__ import annotations

import numpy as np
import pytest

from labeler.errors import InvalidSetting
from labeler.tally import QueryBatch

FEATURES = np.arange(12, dtype=np.int16).reshape(3, 4)


def test_equal_batches_have_equal_digests_whatever_their_memory_layout() -> None:
    assert QueryBatch(FEATURES).digest == QueryBatch(np.asfortranarray(FEATURES)).digest


def test_bytes_shape_and_place_all_count() -> None:
    changed = FEATURES.copy()
    changed[0, 0] += 1
    batches = [
        QueryBatch(FEATURES),
        QueryBatch(changed),
        QueryBatch(FEATURES.reshape(4, 3)),
        QueryBatch(FEATURES, first_query=3),
    ]
    assert len({batch.digest for batch in batches}) == 4


def test_a_batch_cannot_be_changed_under_its_digest() -> None:
    features = FEATURES.copy()
    batch = QueryBatch(features)
    features[0, 0] += 1
    assert batch.features[0, 0] == FEATURES[0, 0]
    with pytest.raises(ValueError, match="read-only"):
        batch.features[0, 0] = 1


@pytest.mark.parametrize("features", [FEATURES.astype(np.float32), FEATURES[:0], FEATURES[0]])
def test_what_is_no_batch_of_quantised_features_is_refused(features: np.ndarray) -> None:
    with pytest.raises(InvalidSetting, match="int16 array"):
        QueryBatch(features)
