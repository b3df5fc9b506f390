"""Write a report into a folder, and make report.json: the numbers of a report for programs, which scripts rely on.

Each file appears whole or not at all, the page last.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from feature_store.results.report.model import JobReport, LevelPrice, Privacy, bands
from feature_store.results.report.page import render_page
from feature_store.results.report.pictures import PICTURE_FILES, draw_pictures
from feature_store.results.report.words import all_warnings
from labeler.rounds.effects import AnswerStatus
from labeler.system.files import replace_file


def write_report(report: JobReport, out: Path) -> None:
    """Write OUT/report.html and its pictures as PNG files.

    Everything is made before the first file is written. Pictures of an earlier report that this one has no
    data for are removed, so that a folder never shows two jobs. `report.json` and `pseudo_labels.parquet`,
    to which the page links, are the caller's to write.

    Args:
        out: the folder; made if it is missing.

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
    counts, task = report.status_counts, report.task
    labels: dict[str, Any] = {
        "asked": len(report.queries),
        "answered": counts[AnswerStatus.ANSWERED],
        "abstained": counts[AnswerStatus.ABSTAINED],
        "refused_budget": counts[AnswerStatus.REFUSED_BUDGET],
        "failed_quorum": counts[AnswerStatus.FAILED_QUORUM],
    }
    if report.label_accuracy is not None:
        labels["accuracy"] = report.label_accuracy
    images: dict[str, Any] = {}
    if report.attributes is not None:
        images = report.attributes.to_json()
    if report.images is not None:
        images = {"labelled": len(report.images), "median_confidence": round(report.images.median_confidence, 6)}
        if report.images.accuracy is not None:
            images |= {
                "accuracy": report.images.accuracy,
                "checked": int(report.images.known.sum()),
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
    document: dict[str, Any] = {
        "task": task.model_dump(mode="json") | {"digest": task.digest},
        "labels": labels,
        "images": images,
        "student": student,
        "privacy": {
            "delta": report.privacy.delta,
            "instance": _level(report.privacy.instance),
            "agent": _level(report.privacy.agent),
            **_person(report.privacy),
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
    for key, value in (("job_id", report.job_id), ("created_at", report.created_at), ("backbone", report.backbone)):
        if value:
            document[key] = value
    return document


def _person(privacy: Privacy) -> dict[str, Any]:
    if privacy.person is None:
        return {}
    return {"person": _level(privacy.person) | {"records_per_person": privacy.records_per_person}}


def _level(price: LevelPrice) -> dict[str, Any]:
    level: dict[str, Any] = {
        "epsilon": price.epsilon,
        "participant_epsilon": price.participant_epsilon,
        "method": price.method,
    }
    if price.reason:
        level["reason"] = price.reason
    return level
