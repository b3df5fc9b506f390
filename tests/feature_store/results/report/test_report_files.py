"""What a report leaves in its folder: whole files, the current ones only, and numbers in a stable shape."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from feature_store.results.report.coverage import MAX_SHOWN, map_public_set, places_to_show
from feature_store.results.report.model import PNG_SIGNATURE, AnsweredQuery, LevelPrice
from feature_store.results.report.page import render_page, report_json, write_report
from feature_store.results.report.words import what_epsilon_means
from labeler.errors import InvalidSetting, UnreadableImage

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
    broken = replace(report.queries[0], thumbnails=(PNG_SIGNATURE + b"and then nothing",))
    with pytest.raises(UnreadableImage, match="q0"):
        write_report(replace(report, queries=(broken, *report.queries[1:])), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_photographs_are_shrunk_and_stay_in_color(make_report, tmp_path):
    buffer = io.BytesIO()
    noise = np.random.default_rng(1).integers(0, 255, (600, 900, 3), dtype=np.uint8)
    Image.fromarray(noise).save(buffer, "PNG")
    report = make_report()
    queries = tuple(replace(query, thumbnails=(buffer.getvalue(),)) for query in report.queries)
    write_report(replace(report, queries=queries), tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "data:image/jpeg" in page
    assert len(page) < 1_000_000


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
    with pytest.raises(InvalidSetting, match="goes with the number of records"):
        replace(report.privacy, person=LevelPrice(1.25, "proved"))


def test_a_report_without_a_student_or_an_agent_epsilon_is_still_json(make_report):
    report = make_report(student=None)
    privacy = replace(report.privacy, agent=LevelPrice(None, "", "records are not bounded"))
    document = report_json(replace(report, privacy=privacy))
    assert document["student"] == {}
    assert document["privacy"]["agent"] == {
        "epsilon": None, "participant_epsilon": None, "method": "", "reason": "records are not bounded",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"label": 0, "status": "abstained"}, "cannot carry label"),
        ({"label": -1, "status": "answered"}, "cannot carry label"),
        ({"label": -1, "status": "failed_quorum", "noisy_votes": np.zeros(3)}, "released nothing"),
        ({"label": 1, "status": "answered", "thumbnails": (b"GIF89a",)}, "not a PNG"),
        ({"label": 1, "status": "answered", "group_size": 0}, "at least one image"),
    ],
)
def test_a_query_that_contradicts_itself_is_refused(change, words):
    with pytest.raises(InvalidSetting, match=words):
        AnsweredQuery("q", "s", **change)


def test_a_report_that_contradicts_its_task_is_refused(make_report):
    report = make_report()
    winner = report.task.model_copy(update={"release": "winner"})
    bad_label = replace(report.queries[0], label=3)
    bad_votes = replace(report.queries[0], noisy_votes=np.array([1.0, np.nan, 0.0]))
    for change, words in (
        ({"task": winner}, "opens no votes"),
        ({"queries": ()}, "at least one query"),
        ({"queries": (bad_label, *report.queries[1:])}, "outside the 3 classes"),
        ({"queries": (bad_votes, *report.queries[1:])}, "not finite"),
        ({"contributors": 6}, "not possible"),
        ({"queries": report.queries[1:]}, "same queries"),
        ({"downloads": (("http://a/b", "x"),)}, "bare name"),
    ):
        with pytest.raises(InvalidSetting, match=words):
            replace(report, **change)
    for epsilon in (float("nan"), float("inf"), -1.0):
        with pytest.raises(InvalidSetting, match="finite and not negative"):
            LevelPrice(epsilon, "m")


def test_questions_are_shown_by_urgency_and_never_too_many(make_report):
    report = make_report(num_queries=300, classes=("a", "b"), coverage=None)
    places = places_to_show(report.queries)
    assert len(places) == len(set(places)) == MAX_SHOWN
    assert places[:2] == [0, 299], "the wrong answer, then the one without a label"
    gaps = [float(abs(np.diff(report.queries[place].noisy_votes)[0])) for place in places[2:]]
    assert gaps == sorted(gaps), "then the least clear first"
    assert places_to_show(report.queries[:3]) == [0, *sorted((1, 2), key=lambda place: _gap(report.queries[place]))]


def _gap(query):
    return float(abs(np.diff(query.noisy_votes)[0]))


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


def test_the_map_refuses_features_that_do_not_fit():
    with pytest.raises(InvalidSetting, match="do not fit"):
        map_public_set(np.zeros((3, 2)), np.zeros((2, 3)), np.array([True, True]))
    with pytest.raises(InvalidSetting, match="cells"):
        map_public_set(np.eye(3), np.eye(3), np.ones(3, bool), cells=np.array([0, 1, 3]))
