"""Which classes are taken for which: a table small enough to read, or the pairs that are confused most often."""

from __future__ import annotations

from typing import Any

import numpy as np

from workers.report.images import confusion
from workers.report.model import JobReport

MOST_CLASSES = 12
"""Of more classes a table is wider than a page; then only pairs are named."""

MOST_PAIRS = 6
_DEEPEST = 45
"""Percent of colour in the fullest cell: words on it stay readable."""


def confusion_table(report: JobReport) -> dict[str, Any]:
    """Rows of true classes, columns of labels, of the images whose truth is known; and the most confused pairs."""
    images = report.images
    assert images is not None  # noqa: S101  # asked where truth is known alone
    counts = confusion(images, report.task.num_classes)
    totals = np.maximum(counts.sum(axis=1, keepdims=True), 1)
    names = [report.class_name(label) for label in range(report.task.num_classes)]
    rows = [
        {
            "name": names[true],
            "total": int(counts[true].sum()),
            "cells": [
                {
                    "count": int(counts[true, label]),
                    "depth": round(_DEEPEST * float(counts[true, label] / totals[true, 0])),
                    "is_right": true == label,
                }
                for label in range(len(names))
            ],
        }
        for true in range(len(names))
    ]
    return {"names": names, "rows": rows if len(names) <= MOST_CLASSES else [], "pairs": _pairs(counts, names)}


def _pairs(counts: np.ndarray[Any, np.dtype[np.int64]], names: list[str]) -> list[dict[str, Any]]:
    wrong = counts.copy()
    np.fill_diagonal(wrong, 0)
    order = np.argsort(-wrong, axis=None, kind="stable")[:MOST_PAIRS]
    found = []
    for cell in order.tolist():
        true, label = divmod(cell, len(names))
        if wrong[true, label]:
            total = int(counts[true].sum())
            found.append({"true": names[true], "label": names[label], "count": int(wrong[true, label]), "of": total})
    return found
