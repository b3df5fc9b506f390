"""Hints from released votes alone: right about what is there, silent where nothing is to be said."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from feature_store.results.report.model import JobReport
from feature_store.results.report.words import all_warnings, class_totals

Maker = Callable[..., JobReport]


def with_totals(report: JobReport, totals: Sequence[float]) -> JobReport:
    return with_rows(report, np.outer(np.full(len(report.queries), 1 / len(report.queries)), totals))


def noise_of(report: JobReport) -> float:
    return report.task.total_sigma_votes * len(report.queries) ** 0.5


def test_a_class_whose_votes_are_noise_is_named_and_others_are_not(make_report: Maker) -> None:
    report = make_report()
    noise = noise_of(report)
    (line,) = class_totals(with_totals(report, [13 * noise, 2.9 * noise, 3.1 * noise]))
    assert "for dog add up to no more than noise" in line
    assert "cat" not in line
    assert "owl" not in line


def test_where_a_class_with_its_share_would_hardly_show_none_is_called_silent(make_report: Maker) -> None:
    """A few questions at a small price: classes are told apart question by question, their totals are not."""
    report = make_report()
    noise, sigma = noise_of(report), report.task.total_sigma_votes
    clear = 4 * sigma * np.eye(3)[np.arange(len(report.queries)) % 3]
    clear[0] = 0.0
    assert clear.sum(axis=0).min() < 3.9 * noise
    assert class_totals(with_rows(report, clear)) == ()
    assert class_totals(with_totals(report, [14 * noise, 2.9 * noise, 0.5 * noise])) == ()


def test_classes_that_drown_others_are_told_with_their_ratio(make_report: Maker) -> None:
    report = make_report()
    noise = noise_of(report)
    (line,) = class_totals(with_totals(report, [200 * noise, 50 * noise, 5 * noise]))
    assert "cat got about 40 times the votes of owl" in line
    assert class_totals(with_totals(report, [90 * noise, 50 * noise, 5 * noise])) == ()


def test_votes_that_are_all_noise_are_called_guesses(make_report: Maker) -> None:
    report = make_report()
    (line,) = class_totals(with_totals(report, [1.0, 0.0, -1.0]))
    assert "guessed" in line
    assert line in all_warnings(with_totals(report, [1.0, 0.0, -1.0]))


def test_centred_ballots_on_a_ball_name_no_class_as_silent(make_report: Maker) -> None:
    """Below the mean is below zero there, whoever holds the class; and balanced questions add up to nothing."""
    report = on_a_ball(make_report())
    noise = noise_of(report)
    assert class_totals(with_totals(report, [20 * noise, -8 * noise, -12 * noise])) == ()
    clear = 6 * report.task.total_sigma_votes * (np.eye(3)[np.arange(len(report.queries)) % 3] - 1 / 3)
    assert class_totals(with_rows(report, clear)) == ()


def on_a_ball(report: JobReport) -> JobReport:
    task = report.task.model_copy(update={"method": "reverse-knn", "ballot_radius": 20})
    return replace(report, task=task)


def with_rows(report: JobReport, rows: np.ndarray) -> JobReport:
    queries = tuple(replace(query, noisy_votes=row) for query, row in zip(report.queries, rows, strict=True))
    return replace(report, queries=queries)
