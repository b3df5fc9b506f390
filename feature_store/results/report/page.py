"""A report as files: report.html, its pictures, and report.json for programs.

The page is one without scripts that loads nothing, not even from the same folder.

The template holds the words and the look; this module prepares what it fills in. Jinja2 escapes every
value, because class names and file names come from strangers, and the page's content security policy
forbids scripts and requests in case something slips through. Each file appears whole or not at all, the page last.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from jinja2 import Environment
from PIL import Image

from feature_store.results.page_templates import count, figure_card, page_templates
from feature_store.results.report import coverage, words
from feature_store.results.report.model import (
    MAX_FIRST,
    AnsweredQuery,
    AttributeImage,
    ImageLabels,
    JobReport,
    LevelPrice,
    bands,
    confusion,
)
from feature_store.results.report.pictures import OTHER_COLOR, PICTURE_FILES, Picture, class_colors, draw_pictures
from feature_store.results.report.words import all_warnings
from feature_store.results.scores import Scores
from labeler.budget import say_epsilon, say_estimate
from labeler.expectation import say_stability
from labeler.methods import METHODS, contribution_in_words, unit_in_words
from labeler.rounds.effects import AnswerStatus
from labeler.system.files import replace_file

_MOST_CLASSES = 30
_OPEN_TILES = 12


def render_page(report: JobReport, pictures: dict[str, Picture]) -> str:
    """The page as text; `pictures` as from `draw_pictures`."""
    questions = question_tiles(report)
    images = report.images
    template = "report.html.j2" if report.attributes is None else "attributes.html.j2"
    return (
        _templates()
        .get_template(template)
        .render(
            report=report,
            pictures=pictures,
            headline=words.headline(report),
            guarantee=words.guarantee(report),
            stable="" if report.stability is None else say_stability(*report.stability),
            warnings=words.all_warnings(report),
            cards=_cards(report),
            questions=questions,
            open_questions=questions[:_OPEN_TILES],
            folded_questions=questions[_OPEN_TILES:],
            has_truth=report.label_accuracy is not None or report.image_accuracy is not None,
            has_groups=any(query.group_size > 1 for query in report.queries),
            longest_word=min(24, max(len(word) for name in report.task.classes for word in re.split(r"[\s-]+", name))),
            has_bars=any(tile["bars"] for tile in questions),
            wrong=[] if images is None else image_tiles(report, images.wrong()[:MAX_FIRST].tolist()),
            wrong_count=0 if images is None else len(images.wrong()),
            unclear=[] if images is None else image_tiles(report, images.unclear()[:MAX_FIRST].tolist()),
            sure=[] if images is None else _bands(report, images),
            confusion=None if report.image_accuracy is None else confusion_table(report),
            found=words.class_by_class(report.image_scores),
            recalls=_recalls(report.image_scores),
            delta=words.say_delta(report.privacy.delta),
            classes=_class_rows(report),
            attribute_rows=_attribute_rows(report),
            attribute_tiles=[]
            if report.attributes is None
            else [_with_attributes(one) for one in report.attributes.images],
            meaning=words.what_epsilon_means(report),
            price_rows=_price_rows(report),
            price_lines=(*words.noise_in_words(report.task), *words.without_a_bound(report)),
            kept=words.never_revealed(report),
            released=words.was_released(report),
            curve=[
                (say_estimate(point.epsilon, digits=3), words.say_percent(point.accuracy), point)
                for point in report.curve
            ],
            settings=_settings(report),
            compared=compared_methods(report_json(report)) if report.compared else [],
        )
    )


@cache
def _templates() -> Environment:
    """Compiled once: a coordinator's processes make a page for every job."""
    environment = page_templates("feature_store", "results/report")
    environment.filters |= {"percent": words.say_percent, "count": count}
    return environment


def _bands(report: JobReport, images: ImageLabels) -> list[dict[str, Any]]:
    """Confidence band by band, with some images of each; the least sure band first."""
    return [
        {
            "name": f"{100 * band.low:g} to {100 * band.high:g} %",
            "count": band.count,
            "width": round(100 * band.count / len(images), 1),
            "stated": words.say_percent(band.stated) if band.count else "–",
            "right": "–" if band.share_right is None else words.say_percent(band.share_right),
            "known": band.known,
            "tiles": image_tiles(report, images.shown_of_band(band.low, band.high)),
        }
        for band in bands(images)
    ]


def _cards(report: JobReport) -> list[dict[str, str]]:
    price, agent = report.privacy.instance, report.privacy.agent
    delta = words.say_delta(report.privacy.delta)
    cards = [
        figure_card(
            "epsilon, one image",
            say_epsilon(price.epsilon) if price.epsilon is not None else "no bound",
            f"at delta {delta}" if price.epsilon is not None else price.reason,
        )
    ]
    if report.images is not None:
        asked = int(report.images.asked.sum())
        unit = f"{asked:,} of them asked about, {len(report.images) - asked:,} inferred"
        cards.append(figure_card("images labeled", f"{len(report.images):,}", unit))
    if report.attributes is not None:
        each = count(len(report.attributes.outcomes), "attribute")
        cards.append(figure_card("images labeled", f"{report.attributes.count:,}", f"{each} of each"))
    right, known = report.scored
    checked = f"; {right:,} of {known:,} that can be checked are right" if known else ""
    cards.append(
        figure_card("questions answered", f"{report.answered:,}", f"of {len(report.queries):,} asked{checked}")
    )
    if report.student is not None and report.student.accuracy is not None:
        tested = f" on {count(report.student.test_images, 'unseen image')}" if report.student.test_images else ""
        figure = words.say_percent(report.student.accuracy)
        balanced = words.class_by_class(report.student.scores)
        cards.append(
            figure_card("student right", figure, f"{report.student.kind}{tested}{balanced and f'; {balanced}'}")
        )
    if (person := report.privacy.person) is not None:
        most = count(report.privacy.records_per_person or 1, "image")
        unit = person.reason or f"all images of one person at one agent, of which at most {most} vote"
        cards.append(figure_card("epsilon, one person", say_epsilon(person.epsilon), unit))
    if (group := report.privacy.group) is not None:
        unit = group.reason or "all agents together, whichever images come or go"
        cards.append(
            figure_card(f"epsilon, {count(report.privacy.group_size or 1, 'image')}", say_epsilon(group.epsilon), unit)
        )
    cards.append(
        figure_card(
            "epsilon, whole agent",
            say_epsilon(agent.epsilon) if agent.epsilon is not None else "no bound",
            # The first half says what is missing; the whole of it stands where the price is explained.
            agent.reason.split(";")[0] or f"of {report.contributors:,} that took part; {report.task.quorum:,} needed",
        )
    )
    return cards


MOVES: Final = "one record moves "
"""Begins most sentences of `Method.one_record`; a table's heading says it once."""


def compared_methods(summary: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return a column for each method that answered the same questions, the job's own first; each value in words.

    Args:
        summary: report.json of the job.
    """
    jobs = [summary, *summary.get("compared", {}).values()]
    return [
        {
            "method": job["task"]["method"],
            "system": METHODS[job["task"]["method"]].system,
            "labels": words.say_percent(job["images"].get("accuracy")),
            "student": words.say_percent(job["student"].get("accuracy")),
            "answers": f"{job['labels']['answered']:,} of {job['labels']['asked']:,}",
            "epsilon": say_epsilon(job["privacy"]["instance"]["epsilon"]),
            "agent": "no bound"
            if job["privacy"]["agent"]["epsilon"] is None
            else say_epsilon(job["privacy"]["agent"]["epsilon"]),
            "one_record": job["privacy"].get("one_record", "–").removeprefix(MOVES),
        }
        for job in jobs
    ]


def _class_rows(report: JobReport) -> dict[str, Any]:
    """The most frequent released labels with their counts, and how many classes are left out."""
    labels = np.array([query.label for query in report.queries])
    counts = np.bincount(labels[labels >= 0], minlength=report.task.num_classes)
    right = np.array([query.is_right is True for query in report.queries])
    known = np.array([query.is_right is not None for query in report.queries])
    right_counts = np.bincount(labels[right], minlength=report.task.num_classes)
    known_counts = np.bincount(labels[known], minlength=report.task.num_classes)
    order = np.argsort(-counts, kind="stable")[:_MOST_CLASSES]
    if report.task.num_classes <= _MOST_CLASSES:
        order = np.arange(report.task.num_classes)
    colors = class_colors(labels.tolist(), report.task.num_classes)
    most = max(1, int(counts.max()))
    rows = [
        {
            "name": report.class_name(label),
            "color": colors.get(label, OTHER_COLOR),
            "count": int(counts[label]),
            "width": round(100 * int(counts[label]) / most, 1),
            "right": f"{right_counts[label]:,} of {known_counts[label]:,}" if known_counts[label] else "–",
        }
        for label in order.tolist()
    ]
    return {"rows": rows, "left_out": report.task.num_classes - len(rows)}


def _recalls(scores: Scores | None) -> list[dict[str, Any]]:
    """Recall of each class, the lowest first."""
    if scores is None:
        return []
    rows = zip(scores.classes, scores.counts, scores.found, scores.recalls, strict=True)
    known = sorted((row for row in rows if row[3] is not None), key=lambda row: row[3] or 0.0)
    return [
        {"name": name, "found": f"{hits:,} of {own:,}", "share": words.say_percent(recall)}
        for name, own, hits, recall in known[:_MOST_CLASSES]
    ]


def _attribute_rows(report: JobReport) -> list[dict[str, Any]]:
    said = report.attributes
    return [
        {
            "name": one.name,
            "on": f"{one.on:,}",
            "width": round(100 * one.on / said.count, 1),
            "stated": words.say_percent(one.confidence),
            "right": words.say_percent(one.right),
            "commoner": words.say_percent(one.commoner),
            "recall": words.say_percent(one.recall),
            "auroc": "–" if one.auroc is None else f"{one.auroc:.3f}",
        }
        for one in (said.outcomes if said is not None else ())
        if said is not None
    ]


def _price_rows(report: JobReport) -> list[dict[str, Any]]:
    return [
        {
            "name": row.name,
            "instance": (say_epsilon if row.is_reported else say_estimate)(row.instance_epsilon, digits=5),
            "agent": (say_epsilon if row.is_reported else say_estimate)(row.agent_epsilon, digits=5),
            "is_reported": row.is_reported,
        }
        for row in report.privacy.breakdown
    ]


def _settings(report: JobReport) -> list[tuple[str, str]]:
    task = report.task
    traits = task.traits
    unit = unit_in_words(task)
    opened = {"histogram": f"the noisy sum of {traits.sums}", "winner": "only the winning class"}[task.release]
    rows = [
        ("Task", task.name),
        ("Classes" if task.attributes_per_record is None else "Attributes", f"{task.num_classes:,}"),
        ("Attributes a record votes for", "" if task.attributes_per_record is None else f"{task.votes_of_a_record:,}"),
        ("What an agent answers with", f"{contribution_in_words(task)} ({traits.with_k(task)})"),
        ("What is opened", f"{opened} ({task.release})"),
        ("Noise counted on", f"{words.say_number(task.sigma_votes)} {unit} (sigma)"),
        ("Noise in a full sum", f"{words.say_number(task.total_sigma_votes)} {unit}" if task.noise_parties else ""),
        ("Agents", f"{task.agents:,}; {task.colluding_agents:,} may collude, {task.max_dropouts:,} may drop out"),
        ("Talliers", words.talliers(task)),
        ("Rows of the model" if traits.model_rows(task) else "Questions at most", f"{task.rows:,}"),
        ("Steps of training", "" if task.sampled is None else f"{task.steps:,}"),
        ("Grid", f"{task.scale:,} units per vote" if unit == "votes" else ""),
        ("Proof for one image", report.privacy.instance.method),
        ("Proof for a whole agent", report.privacy.agent.method),
        ("Backbone", report.backbone),
        ("Backbone fingerprint", task.backbone_fingerprint),
        ("Task digest", task.digest),
        ("Job", report.job_id),
        ("Made", report.created_at),
    ]
    return [(name, value) for name, value in rows if value] + list(report.versions.items())


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
    shown = [(place + 1, report.queries[place]) for place in coverage.places_to_show(report.queries)]
    tallest = max([0.0, *(float(query.noisy_votes.max()) for _, query in shown if query.noisy_votes is not None)])
    return [_question(report, number, query, tallest) for number, query in shown]


def image_tiles(report: JobReport, numbers: Sequence[int]) -> list[dict[str, Any]]:
    """Some of the public images with their labels."""
    return [] if report.images is None else [_image(report, number) for number in numbers]


def _with_attributes(image: AttributeImage) -> dict[str, Any]:
    name = ", ".join(image.has) or "none of them"
    mark = "unmarked" if image.truth is None else "right" if image.truth == image.has else "wrong"
    pictures = [] if image.thumbnail is None else [coverage.open_picture(image.thumbnail, image.source)]
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
    images = [coverage.open_picture(png, query.query_id) for png in query.thumbnails[: coverage.MAX_PER_QUERY]]
    answered = query.status is AnswerStatus.ANSWERED
    mark = {True: "right", False: "wrong", None: "unmarked" if answered else "none"}[query.is_right]
    name = report.class_name(query.label) if answered else "no label"
    said = f"answered {name}" if answered else STATUS_WORDS[query.status]
    what = "image asked about" if query.group_size == 1 else f"one of {query.group_size:,} images asked about"
    truth = report.class_name(query.truth) if query.truth is not None and mark in ("wrong", "none") else None
    group = f"{count(query.group_size, 'image')} · " if query.group_size > 1 else ""
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
    pictures = [] if png is None else [coverage.open_picture(png, images.sources[number])]
    return {
        "images": [_picture(one, f"{images.sources[number]}, labeled {name}, {sure}") for one in pictures],
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
        "uri": coverage.data_uri(image),
        "alt": alt,
        "is_tiny": coverage.is_tiny(image),
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


MOST_CLASSES = 12
"""Of more classes a table is wider than a page; then only pairs are named."""

MOST_PAIRS = 6
_DEEPEST = 45
"""Percent of color in the fullest cell: words on it stay readable."""


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


def write_report(report: JobReport, out: Path) -> None:
    """Write OUT/report.html and its pictures as PNG files.

    Everything is made before the first file is written. Pictures of an earlier report that this one has no
    data for are removed, so that a folder never shows two jobs. `report.json` and `pseudo_labels.parquet`,
    to which the page links, are the caller's to write.

    Raises:
        UnreadableImage: a thumbnail is not a readable PNG image; nothing is written.
    """
    pictures = draw_pictures(report)
    page = render_page(report, pictures)
    out.mkdir(parents=True, exist_ok=True)
    for picture in pictures.values():
        replace_file(out / picture.file_name, picture.png)
    current = {picture.file_name for picture in pictures.values()}
    for name in PICTURE_FILES:
        if name not in current:
            (out / name).unlink(missing_ok=True)
    replace_file(out / "report.html", page.encode())


def report_json(report: JobReport) -> dict[str, Any]:
    """The report as a dict that `json.dumps` takes; accuracy keys stand only where truth is known."""
    task, person, most = report.task, report.privacy.person, report.privacy.records_per_person
    group = report.privacy.group
    labels: dict[str, Any] = {"asked": len(report.queries)}
    labels |= {str(status): count for status, count in report.status_counts.items()}
    if report.label_accuracy is not None:
        labels["accuracy"] = report.label_accuracy
    images: dict[str, Any] = {}
    if report.attributes is not None:
        images = report.attributes.to_json()
    if report.images is not None:
        images = {
            "labelled": len(report.images),
            "mean_confidence": round(report.images.mean_confidence, 6),
            "median_confidence": round(report.images.median_confidence, 6),
        }
        if report.stability is not None:
            images["stability"] = dict(zip(("low", "high"), report.stability, strict=True))
        if report.image_scores is not None:
            images |= {
                **report.image_scores.to_json(),
                "calibration": [
                    {"from": band.low, "to": band.high, "labels": band.count, "stated": band.stated}
                    | {"checked": band.known, "right": band.right}
                    for band in bands(report.images)
                ],
            }
    student: dict[str, Any] = {}
    if report.student is not None:
        student = {"kind": report.student.kind, "public_images": report.student.public_images}
        if report.student.accuracy is not None:
            student |= {"accuracy": report.student.accuracy, "test_images": report.student.test_images}
            student |= {} if report.student.scores is None else report.student.scores.to_json()
    document: dict[str, Any] = {
        "task": task.model_dump(mode="json") | {"digest": task.digest},
        "labels": labels,
        "images": images,
        "student": student,
        "privacy": {
            "delta": report.privacy.delta,
            "instance": _level(report.privacy.instance),
            **({} if (one := task.traits.one_record(task)) is None else {"one_record": one}),
            "agent": _level(report.privacy.agent),
            **({} if person is None else {"person": _level(person) | {"records_per_person": most}}),
            **({} if group is None else {"group": _level(group) | {"group_size": report.privacy.group_size}}),
            "colluding_agents": task.colluding_agents,
            "holds_against": report.holds_against,
            **({} if task.dishonest_talliers is None else {"dishonest_talliers": task.dishonest_talliers}),
            "breakdown": [
                {
                    "name": row.name,
                    "instance_epsilon": row.instance_epsilon,
                    "agent_epsilon": row.agent_epsilon,
                    "reported": row.is_reported,
                }
                for row in report.privacy.breakdown
            ],
            "seeded": report.is_seeded,
        },
        "agents": {
            "number": task.agents,
            "contributed": report.contributors,
            "quorum": task.quorum,
            "colluding": task.colluding_agents,
            "max_dropouts": task.max_dropouts,
        },
        "public_images": report.public_images,
        "versions": dict(report.versions),
        "warnings": list(all_warnings(report)),
    }
    if report.coverage is not None:
        document["coverage"] = report.coverage.fraction
    if report.curve:
        document["curve"] = [
            {"epsilon": point.epsilon, "accuracy": point.accuracy, "sd": point.sd} for point in report.curve
        ]
    if report.compared:
        document["compared"] = {job["task"]["method"]: dict(job) for job in report.compared}
    for key, value in (("job_id", report.job_id), ("created_at", report.created_at), ("backbone", report.backbone)):
        if value:
            document[key] = value
    return document


def _level(price: LevelPrice) -> dict[str, Any]:
    level: dict[str, Any] = {
        "epsilon": price.epsilon,
        "participant_epsilon": price.participant_epsilon,
        "method": price.method,
    }
    if price.reason:
        level["reason"] = price.reason
    return level
