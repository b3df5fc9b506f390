"""Models of our own file format to evaluate, small and with any numbers in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from feature_store.results.models import LINEAR, model_file
from labeler.methods.evaluate import Layout, Scored, even_edges


def linear_model(
    classes: Sequence[str], dimension: int, *, seed: int = 0, fingerprint: str = "", **arrays: Any
) -> bytes:
    """The file of a linear model with drawn weights."""
    card = {"backbone_fingerprint": fingerprint, "training": {"min_records": 10, "regularisation": 0.1}}
    weights = np.random.default_rng(seed).normal(size=(dimension + 1, len(classes)))
    given = {"weights": weights} | arrays
    return model_file(given, kind=LINEAR, classes=tuple(classes), card=card)


def scored(
    classes: Sequence[str], dimension: int, *, layout: Layout = "confusion", bands: int = 3, **model: Any
) -> Scored:
    """The question of an evaluation of such a model."""
    return Scored(linear_model(classes, dimension, **model), even_edges(len(classes), bands), layout)
