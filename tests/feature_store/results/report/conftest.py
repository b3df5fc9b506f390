"""A small job to report on, made of drawn pictures and drawn votes."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from feature_store.results.report.coverage import map_public_set
from feature_store.results.report.model import (
    AnsweredQuery,
    CurvePoint,
    ImageLabels,
    JobReport,
    LevelPrice,
    PriceRow,
    Privacy,
    StudentOutcome,
)
from labeler.rounds.effects import AnswerStatus
from labeler.task import Task

ReportMaker = Callable[..., JobReport]


def png(side: int = 8, *, mode: str = "L", shade: int = 90) -> bytes:
    """A plain picture as a PNG file."""
    buffer = io.BytesIO()
    color: Any = shade if mode == "L" else (shade,) * len(mode)
    Image.new(mode, (side, side), color).save(buffer, "PNG")
    return buffer.getvalue()


def image_labels(num_classes: int, *, count: int = 80, has_truth: bool = True, source: str = "image") -> ImageLabels:
    """Labels of drawn images, surer the later they come; of every tenth image the truth is another class."""
    truth = np.arange(count) % num_classes
    labels = np.where(np.arange(count) % 10 == 3, (truth + 1) % num_classes, truth)
    found = ImageLabels(
        sources=[f"{source} image {number:03}" for number in range(count)],
        labels=labels.astype(np.int16),
        confidences=np.linspace(0.3, 1.0, count),
        asked=np.arange(count) % 8 == 0,
        truth=(truth if has_truth else np.full(count, -1)).astype(np.int16),
    )
    return replace(found, thumbnails={number: png() for number in found.numbers_to_show()})


@pytest.fixture(scope="session")
def make_report() -> ReportMaker:
    """Make the report of a job with truth and a histogram release; keywords replace its fields.

    `has_truth`, `release`, `classes` and `num_queries` shape the whole job consistently.
    """

    def make(
        *,
        has_truth: bool = True,
        release: str = "histogram",
        classes: tuple[str, ...] = ("cat", "dog", "owl"),
        num_queries: int = 12,
        source: str = "group",
        **changes: Any,
    ) -> JobReport:
        rng = np.random.default_rng(20261120)
        task = Task.model_validate(
            {
                "name": "Pets", "classes": classes, "method": "knn", "k": 5, "sigma_votes": 4.0, "delta": 1e-4,
                "max_queries": num_queries, "release": release, "agents": 5, "colluding_agents": 1, "max_dropouts": 1,
            }
        )  # fmt: skip
        labels = np.arange(num_queries) % len(classes)
        votes = rng.normal(0, 5, (num_queries, len(classes)))
        votes[np.arange(num_queries), labels] += 20
        queries = tuple(
            AnsweredQuery(
                f"q{number}",
                f"{source} {number}",
                int(label),
                AnswerStatus.ANSWERED,
                truth=(int(label) if number else 1) if has_truth else None,
                noisy_votes=votes[number] if release == "histogram" else None,
                thumbnails=(png(), png(), png()),
                group_size=4,
            )
            for number, label in enumerate(labels)
        )
        queries = (*queries[:-1], replace(queries[-1], label=-1, status=AnswerStatus.ABSTAINED))
        features = rng.normal(size=(max(80, num_queries), 6))
        report = JobReport(
            task=task,
            queries=queries,
            privacy=Privacy(
                1e-4,
                LevelPrice(0.9751, "exact bound for the integer mechanism"),
                LevelPrice(612.34, "exact bound for the integer mechanism"),
                (
                    PriceRow("exact bound for the integer mechanism", 0.9751, 612.34, True),
                    PriceRow("as in the paper", 1.31, 655.0),
                ),
                tuple((asked, 0.9751 * (asked / num_queries) ** 0.5) for asked in range(1, num_queries + 1)),
            ),
            contributors=5,
            public_images=80,
            student=StudentOutcome("nearest prototype", 80, *((0.961, 300) if has_truth else ())),
            curve=(CurvePoint(0.5, 0.8, 0.02), CurvePoint(1.0, 0.95), CurvePoint(4.0, 0.97)) if has_truth else (),
            images=image_labels(len(classes), has_truth=has_truth, source=source),
            coverage=map_public_set(features, features[:num_queries], np.array([q.label >= 0 for q in queries])),
            versions={"private-labeler": "0.1.0"},
        )
        return replace(report, **changes)

    return make
