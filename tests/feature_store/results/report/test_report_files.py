"""What a report leaves in its folder: whole files, the current ones only, and numbers in a stable shape."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from feature_store.results.report.coverage import map_public_set
from feature_store.results.report.model import LevelPrice
from feature_store.results.report.page import render_page, report_json, write_report
from feature_store.results.report.words import what_epsilon_means
from labeler.errors import UnreadableImage

PICTURES = {"accuracy_vs_epsilon", "budget", "price", "coverage", "vote_margins", "calibration"}


def names(folder):
    return {path.name for path in folder.iterdir()}


def test_a_report_is_a_page_and_readable_pictures_and_nothing_else(make_report, tmp_path):
    write_report(make_report(), tmp_path / "new" / "out")
    out = tmp_path / "new" / "out"
    assert names(out) == {"report.html"} | {f"{name}.png" for name in PICTURES}
    for name in PICTURES:
        with Image.open(io.BytesIO((out / f"{name}.png").read_bytes())) as image:
            image.load()
            assert min(image.size) > 150
            pixels = np.asarray(image.convert("L"))
        assert len(np.unique(pixels)) > 10
        rim = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
        assert (rim == rim[0]).all(), f"{name} is cut off at its rim"


def test_pictures_of_an_earlier_report_do_not_stay(make_report, tmp_path):
    write_report(make_report(), tmp_path)
    (tmp_path / "own.png").write_bytes(b"mine")
    write_report(make_report(release="winner", has_truth=False), tmp_path)
    assert names(tmp_path) == {"report.html", "budget.png", "price.png", "coverage.png", "own.png"}


def test_a_thumbnail_that_is_no_image_leaves_nothing_behind(make_report, tmp_path):
    report = make_report()
    broken = replace(report.queries[0], thumbnails=(b"\x89PNG\r\n\x1a\nand then nothing",))
    with pytest.raises(UnreadableImage, match="q0"):
        write_report(replace(report, queries=(broken, *report.queries[1:])), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_report_json_has_the_promised_shape(make_report):
    document = json.loads(json.dumps(report_json(make_report()), allow_nan=False))
    assert {"task", "labels", "student", "privacy", "agents", "versions"} <= set(document)
    assert document["labels"] == {
        "asked": 12, "answered": 11, "abstained": 1, "refused_budget": 0, "failed_quorum": 0, "accuracy": 10 / 11,
    }  # fmt: skip
    assert document["student"]["accuracy"] == 0.961
    assert document["privacy"]["delta"] == 1e-4
    method = "exact bound for the integer mechanism"
    assert document["privacy"]["instance"] == {"epsilon": 0.9751, "participant_epsilon": None, "method": method}
    assert set(document["privacy"]["agent"]) == {"epsilon", "participant_epsilon", "method"}
    assert document["agents"] == {"number": 5, "contributed": 5, "quorum": 4, "colluding": 1, "max_dropouts": 1}
    assert document["privacy"]["colluding_agents"] == 1
    assert "any one participant, who may be the reader" in document["privacy"]["holds_against"]
    assert "seconds" not in json.dumps(document)


def test_report_json_without_truth_has_no_accuracy_anywhere(make_report):
    assert "accuracy" not in json.dumps(report_json(make_report(has_truth=False)))


def test_a_report_states_a_person_where_the_task_does_and_says_so_where_it_does_not(make_report):
    report = make_report()
    assert "person" not in report_json(report)["privacy"]
    assert any("does not bound how many images of one person vote" in said for said in what_epsilon_means(report))
    privacy = replace(report.privacy, person=LevelPrice(1.25, "proved"), records_per_person=2)
    stated = replace(report, privacy=privacy)
    found = report_json(stated)["privacy"]["person"]
    assert (found["epsilon"], found["records_per_person"]) == (1.25, 2)
    assert any("at most 2 vote, epsilon is 1.25" in said for said in what_epsilon_means(stated))
    page = render_page(stated, {})
    assert "epsilon, one person" in page
    assert "at most 2 images vote" in page


def test_a_report_without_a_student_or_an_agent_epsilon_is_still_json(make_report):
    report = make_report(student=None)
    privacy = replace(report.privacy, agent=LevelPrice(None, "", "records are not bounded"))
    document = report_json(replace(report, privacy=privacy))
    assert document["student"] == {}
    assert document["privacy"]["agent"] == {
        "epsilon": None, "participant_epsilon": None, "method": "", "reason": "records are not bounded",
    }  # fmt: skip


def test_the_map_covers_cells_of_answered_queries_only():
    features = np.eye(4)[[0, 0, 1, 1, 2, 3]]
    cells = np.array([0, 0, 1, 1, -1, 2])
    chart = map_public_set(features, np.eye(4)[:3], np.array([True, False, True]), cells=cells)
    assert chart.point_query.tolist() == [0, 0, -1, -1, -1, 2]
    assert chart.fraction == 0.5


def test_the_map_without_cells_covers_what_is_near_an_answered_query(rng):
    centers = 10 * np.eye(3, 8)
    features = np.repeat(centers, 40, axis=0) + rng.normal(size=(120, 8)) * 0.3
    chart = map_public_set(features, centers, np.array([True, True, False]))
    assert set(chart.point_query[80:].tolist()) == {-1}
    assert (chart.point_query[:40] == 0).mean() > 0.8
    assert 0.5 < chart.fraction < 0.67
    again = map_public_set(features, centers, np.array([True, True, False]))
    assert np.array_equal(chart.points, again.points)
