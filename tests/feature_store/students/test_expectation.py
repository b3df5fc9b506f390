"""A rehearsal on public images: well-separated groups are expected to be found, and noise takes it away."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from feature_store.rows import quantize
from feature_store.students.labeling import expect_on
from labeler.errors import InvalidSetting
from labeler.task import Task, parse_task


def task(**changes: Any) -> Task:
    fields = {"name": "t", "classes": list("abcd"), "method": "reverse-knn", "k": 1, "sigma_votes": 5.0, "delta": 1e-5}
    return parse_task(fields | {"max_queries": 12, "agents": 3, "colluding_agents": 1} | changes)


def images(spread: float) -> np.ndarray:
    rng = np.random.default_rng(1)
    return quantize(rng.normal(size=(4, 30))[rng.integers(0, 4, 400)] + spread * rng.normal(size=(400, 30)))


def test_what_geometry_and_noise_allow_is_expected() -> None:
    clear, quiet = images(0.1), task()
    assert (expect_on(quiet, clear).high or 0) > 0.9
    assert (expect_on(task(sigma_votes=5000.0), clear).high or 1) < 0.6
    assert (expect_on(task(sigma_votes=5000.0), clear)).warning
    assert expect_on(quiet, clear) == expect_on(quiet, clear)


def test_too_few_images_are_refused_and_models_not_rehearsed() -> None:
    with pytest.raises(InvalidSetting, match="too few for 12 questions"):
        expect_on(task(), images(0.1)[:8])
    training = {"min_records": 150, "regularisation": 0.01}
    model = task(method="blind-average", max_queries=31, training=training)
    assert expect_on(model, images(0.1)).low is None
