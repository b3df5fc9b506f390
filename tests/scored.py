"""Models of our own file format to evaluate, small and with any numbers in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from feature_store.results.models import LINEAR, model_file
from labeler.methods.evaluate import Layout, Scored, even_edges
from labeler.planning import price
from labeler.privacy_card import privacy_card
from labeler.task import Task, Training


@lru_cache
def _card(fingerprint: str) -> Mapping[str, Any]:
    """Of a real job that released a linear model."""
    task = Task(
        name="t", classes=("a", "b"), method="blind-average", sigma_votes=30.0, delta=1e-5, max_queries=9, agents=2,
        training=Training(min_records=10, regularisation=0.1), backbone_fingerprint=fingerprint,
    )  # fmt: skip
    return privacy_card(task, price(task), is_seeded=False)


def linear_model(
    classes: Sequence[str], dimension: int, *, seed: int = 0, fingerprint: str = "", **arrays: Any
) -> bytes:
    """The file of a linear model with drawn weights."""
    weights = np.random.default_rng(seed).normal(size=(dimension + 1, len(classes)))
    return model_file({"weights": weights} | arrays, kind=LINEAR, classes=tuple(classes), card=_card(fingerprint))


def scored(
    classes: Sequence[str], dimension: int, *, layout: Layout = "confusion", bands: int = 3, **model: Any
) -> Scored:
    """The question of an evaluation of such a model."""
    return Scored(linear_model(classes, dimension, **model), even_edges(len(classes), bands), layout)
