"""report.json: the numbers of a report for programs, in a shape that scripts rely on."""

from __future__ import annotations

from typing import Any

from labeler.rounds.effects import AnswerStatus
from workers.report.images import bands
from workers.report.model import JobReport, LevelPrice, Privacy
from workers.report.words import all_warnings


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
