"""What the student says of every image: bands that hold each image once, and shares with the reach of chance."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feature_store.results.report.model import BANDS, Band, ImageLabels, bands
from feature_store.results.report.page import render_page, report_json
from feature_store.results.report.words import headline
from tests.feature_store.results.report.conftest import image_labels


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
