"""What a report says: bounds never rounded down, hints from released votes alone, bands that hold each image once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feature_store.results.report.model import BANDS, Band, ImageLabels, JobReport, bands
from feature_store.results.report.page import render_page, report_json
from feature_store.results.report.words import (
    all_warnings,
    best_guess,
    class_totals,
    headline,
)
from labeler.budget import say_epsilon
from tests.feature_store.results.report.conftest import image_labels

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


def of(confidences: list[float], *, truth: int = 0) -> ImageLabels:
    count = len(confidences)
    return ImageLabels(
        sources=[str(number) for number in range(count)],
        labels=np.zeros(count, dtype=np.int16),
        confidences=np.array(confidences),
        asked=np.zeros(count, dtype=np.bool_),
        truth=np.full(count, truth, dtype=np.int16),
    )


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40))
def test_every_image_lies_in_one_band(confidences: list[float]) -> None:
    images = of(confidences)
    assert sum(band.count for band in bands(images)) == len(images)
    assert sorted(number for low, high in BANDS for number in images.band_of(low, high)) == list(range(len(images)))


def test_a_share_has_the_reach_of_chance() -> None:
    band = Band(0.9, 1.0, 100, 0.95, 100, 90)
    low, high = band.interval()
    # Wilson's interval of 90 of 100 at 95 %: 0.826 to 0.945 (Wilson 1927; Agresti, Coull 1998).
    assert (low, high) == (pytest.approx(0.8256, abs=1e-3), pytest.approx(0.9448, abs=1e-3))
    assert Band(0.9, 1.0, 5, 0.95, 0, 0).share_right is None


def test_numbers_for_programs_hold_the_calibration(make_report) -> None:  # type: ignore[no-untyped-def]
    document = report_json(make_report())["images"]
    assert (document["labelled"], document["accuracy"], document["checked"]) == (80, 0.9, 80)
    assert sum(band["labels"] for band in document["calibration"]) == 80
    assert "accuracy" not in report_json(make_report(has_truth=False))["images"]


def test_doubtful_images_with_a_rare_label_come_first_and_sure_ones_do_not(make_report) -> None:  # type: ignore[no-untyped-def]
    """Of 40 images 3 have the rare label: two of them doubtful, one sure."""
    images = image_labels(2, count=40, has_truth=False)
    labels = np.zeros(40, dtype=np.int16)
    confidences = np.linspace(0.5, 0.99, 40)
    labels[[5, 9, 38]] = 1
    unequal = replace(images, labels=labels, confidences=confidences)
    assert unequal.unclear()[:4].tolist() == [5, 9, 0, 1]
    assert unequal.unclear().tolist().index(38) == 38
    # Where labels are alike none is rare, and the least sure come first.
    assert images.unclear().tolist() == np.argsort(images.confidences, kind="stable").tolist()


def test_a_headline_of_unequal_classes_says_both_accuracies(make_report) -> None:  # type: ignore[no-untyped-def]
    images = image_labels(2, count=100)
    truth = (np.arange(100) % 10 == 0).astype(np.int16)
    unequal = replace(images, truth=truth, labels=np.zeros(100, dtype=np.int16))
    report = make_report(classes=("well", "ill"), images=unequal)
    assert "90.0 % of all 100 public images are labeled right, 50.0 % where each class counts alike." in headline(
        report
    )
    said = report_json(report)["images"]
    assert (said["balanced_accuracy"], said["recall"]) == (0.5, {"well": 1.0, "ill": 0.0})
    assert "0 of 10" in render_page(report, {})
    assert "alike" not in headline(make_report(classes=("well", "ill")))


@given(st.floats(min_value=1e-12, max_value=999_999))
def test_a_bound_that_is_said_is_never_below_the_bound(epsilon):
    assert float(say_epsilon(epsilon).replace(",", "")) >= epsilon


def test_the_best_guess_is_a_coin_at_epsilon_zero_and_grows_as_theory_says():
    assert best_guess(0.0, 0.0) == 0.5
    assert best_guess(1.0, 0.0) == pytest.approx(math.e / (1 + math.e))
    assert best_guess(1.0, 1e-2) == pytest.approx((math.e + 1e-2) / (1 + math.e))
    assert best_guess(5000.0, 1e-4) == 1.0
