"""The report of a labelling job: one page for people, pictures, and the same numbers for programs."""

from workers.report.coverage import map_public_set
from workers.report.model import (
    AnsweredQuery,
    Coverage,
    CurvePoint,
    JobReport,
    LevelPrice,
    PriceRow,
    Privacy,
    ReferencePoint,
    StudentOutcome,
)
from workers.report.publish import write_report
from workers.report.summary import report_json
from workers.report.thumbnails import MAX_PER_QUERY, SIDE, shown_queries

__all__ = [
    "MAX_PER_QUERY",
    "SIDE",
    "AnsweredQuery",
    "Coverage",
    "CurvePoint",
    "JobReport",
    "LevelPrice",
    "PriceRow",
    "Privacy",
    "ReferencePoint",
    "StudentOutcome",
    "map_public_set",
    "report_json",
    "shown_queries",
    "write_report",
]
