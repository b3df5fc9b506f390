"""Small real shards for tests of what runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from feature_store.shard import Shard
from feature_store.shard_writer import ShardWriter
from labeler.randomness import seeded_source

CLASSES = ("cat", "dog", "eel")
DIMENSION = 16

MakeShard = Callable[..., Shard]


@pytest.fixture
def make_shard(tmp_path: Path) -> MakeShard:
    """Write a shard of clearly separated classes; every test gets its own folder."""

    def make(
        name: str,
        *,
        records: int = 60,
        seed: int = 0,
        public: bool = False,
        classes: tuple[str, ...] = CLASSES,
        fingerprint: str = "backbone",
    ) -> Shard:
        rng = np.random.default_rng(seed)
        centres = np.random.default_rng(7).normal(size=(len(classes), DIMENSION))
        labels = (np.arange(records) % len(classes)).astype(np.int16)
        features = centres[labels] + 0.3 * rng.normal(size=(records, DIMENSION))
        with ShardWriter(
            tmp_path / name,
            classes=classes,
            fingerprint=fingerprint,
            dimension=DIMENSION,
            public=public,
            backbone={"kind": "pixels"},
            random_bytes=seeded_source(f"ids {name} {seed}".encode()).bytes,
        ) as writer:
            writer.append(features, labels, [f"{name}/{number}.png" for number in range(records)])
            writer.finish()
        return Shard.open(tmp_path / name)

    return make
