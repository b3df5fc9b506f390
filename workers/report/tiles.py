"""Small cards of images: what was asked, and what the student says; each with its picture where there is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from labeler.rounds.effects import AnswerStatus
from workers.report import thumbnails, words
from workers.report.attributes import AttributeImage
from workers.report.model import AnsweredQuery, JobReport

MOST_BARS = 3
"""Classes with the most votes that a question names."""

STATUS_WORDS = {
    AnswerStatus.ANSWERED: "answered",
    AnswerStatus.ABSTAINED: "too unclear",
    AnswerStatus.REFUSED_BUDGET: "budget spent",
    AnswerStatus.FAILED_QUORUM: "agents missing",
}


def question_tiles(report: JobReport) -> list[dict[str, Any]]:
    """Questions that a page shows, what went wrong first."""
    shown = thumbnails.choose(report)
    tallest = max([0.0, *(float(query.noisy_votes.max()) for _, query in shown if query.noisy_votes is not None)])
    return [_question(report, number, query, tallest) for number, query in shown]


def image_tiles(report: JobReport, numbers: Sequence[int]) -> list[dict[str, Any]]:
    """Some of the public images with their labels."""
    return [] if report.images is None else [_image(report, number) for number in numbers]


def attribute_tiles(report: JobReport) -> list[dict[str, Any]]:
    """Some of the public images with the attributes that they have."""
    said = report.attributes
    return [] if said is None else [_with_attributes(image) for image in said.images]


def _with_attributes(image: AttributeImage) -> dict[str, Any]:
    name = ", ".join(image.has) or "none of them"
    mark = "unmarked" if image.truth is None else "right" if image.truth == image.has else "wrong"
    pictures = [] if image.thumbnail is None else [thumbnails.open_picture(image.thumbnail, image.source)]
    return {
        "images": [_picture(one, f"{image.source}: {name}") for one in pictures],
        "mark": mark,
        "name": name,
        "small": "",
        "truth": (", ".join(image.truth or ()) or "none of them") if mark == "wrong" else None,
        "source": image.source,
        "where": image.source,
        "bars": [],
    }


def _question(report: JobReport, number: int, query: AnsweredQuery, tallest: float) -> dict[str, Any]:
    images = [thumbnails.open_picture(png, query.query_id) for png in query.thumbnails[: thumbnails.MAX_PER_QUERY]]
    answered = query.status is AnswerStatus.ANSWERED
    mark = {True: "right", False: "wrong", None: "unmarked" if answered else "none"}[query.is_right]
    name = report.class_name(query.label) if answered else "no label"
    said = f"answered {name}" if answered else STATUS_WORDS[query.status]
    what = "image asked about" if query.group_size == 1 else f"one of {query.group_size:,} images asked about"
    truth = report.class_name(query.truth) if query.truth is not None and mark in ("wrong", "none") else None
    group = f"{words.count(query.group_size, 'image')} · " if query.group_size > 1 else ""
    return {
        "images": [_picture(image, f"Question {number}, {what}, {query.source}: {said}") for image in images],
        "mark": mark,
        "name": name,
        "small": "" if answered else STATUS_WORDS[query.status],
        "truth": truth,
        "source": query.source,
        "where": f"{group}{query.source}",
        "bars": _bars(report, query, tallest) if tallest > 0 else [],
    }


def _image(report: JobReport, number: int) -> dict[str, Any]:
    images = report.images
    assert images is not None  # noqa: S101  # asked by image_tiles alone
    label, truth = int(images.labels[number]), int(images.truth[number])
    mark = "unmarked" if truth < 0 else "right" if truth == label else "wrong"
    name, sure = report.class_name(label), words.say_percent(float(images.confidences[number]))
    png = images.thumbnails.get(number)
    pictures = [] if png is None else [thumbnails.open_picture(png, images.sources[number])]
    return {
        "images": [_picture(one, f"{images.sources[number]}, labelled {name}, {sure}") for one in pictures],
        "mark": mark,
        "name": name,
        "small": f"{sure}{', asked' if images.asked[number] else ''}",
        "truth": report.class_name(truth) if mark == "wrong" else None,
        "source": images.sources[number],
        "where": images.sources[number],
        "bars": [],
    }


def _picture(image: Image.Image, alt: str) -> dict[str, Any]:
    return {
        "uri": thumbnails.data_uri(image),
        "alt": alt,
        "is_tiny": thumbnails.is_tiny(image),
        "width": image.width,
        "height": image.height,
    }


def _bars(report: JobReport, query: AnsweredQuery, tallest: float) -> list[dict[str, Any]]:
    """The classes with the most released noisy votes, each with its name; noise below zero shows as none."""
    votes = query.noisy_votes
    if votes is None:
        return []
    order = np.argsort(-votes, kind="stable")[:MOST_BARS].tolist()
    return [
        {
            "name": report.class_name(label),
            "width": round(100 * float(np.clip(votes[label] / tallest, 0, 1)), 1),
            "votes": words.say_number(float(votes[label])),
            "is_answer": label == query.label,
        }
        for label in order
    ]
