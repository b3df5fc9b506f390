"""Every student recovers synthetic classes from noisy answers, survives odd input, and comes back from disk.

Accuracies are those of fixed seeds, with the noise drawn from numpy (no release is made here). The classes
are 8 standard deviations apart and votes 8 or more above the noise, so 0.9 is far from what chance takes.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from feature_store.query_selection import select_queries
from feature_store.results.models import model_file, read_model
from feature_store.rows import quantize
from feature_store.students import NoisyAnswers, fit_student
from labeler.errors import BadData, InvalidSetting
from labeler.rounds.effects import STUDENT_KINDS, StudentKind

CLASSES = 5
BROKEN = np.ones((400, 60))
BROKEN[7, 3] = np.nan


@dataclasses.dataclass(frozen=True)
class World:
    answers: NoisyAnswers
    public: NDArray[np.int16]
    test: NDArray[np.int16]
    truth: NDArray[np.int64]


@functools.cache
def world() -> World:
    """Classes made of Gaussian groups; reverse-knn votes of 1,500 private records at ten questions."""
    rng, queries, sigma = np.random.default_rng(0), 10, 12.0
    centres = rng.standard_normal((CLASSES, 60)) * 1.2
    sizes = {"private": 1500, "public": 400, "test": 300}
    group = {name: rng.integers(0, len(centres), size) for name, size in sizes.items()}
    data = {
        name: quantize(centres[group[name]] + 0.8 * rng.standard_normal((size, 60))) for name, size in sizes.items()
    }
    chosen = select_queries(data["public"], strategy="clustered", count=queries, seed=0)
    nearest = (data["private"].astype(np.int64) @ chosen.features.astype(np.int64).T).argmax(axis=1)
    votes = np.zeros((queries, CLASSES))
    np.add.at(votes, (nearest, group["private"] % CLASSES), 1)
    noisy = votes + sigma * rng.standard_normal(votes.shape)
    answers = NoisyAnswers(
        features=chosen.features,
        labels=noisy.argmax(axis=1),
        noisy_votes=noisy,
        total_sigma_votes=sigma,
        num_classes=CLASSES,
        assignment=chosen.assignment,
    )
    return World(answers, data["public"], data["test"], group["test"] % CLASSES)


def accuracy(kind: StudentKind, case: World) -> float:
    student = fit_student(kind, case.answers, case.public, num_classes=CLASSES)
    return float((student.predict(case.test) == case.truth).mean())


@pytest.mark.parametrize("kind", STUDENT_KINDS)
@pytest.mark.parametrize("without", [None, "noisy_votes", "assignment"])
def test_students_recover_classes_from_histograms_from_winners_and_where_images_find_their_question(
    kind: StudentKind, without: str | None
) -> None:
    case = world()
    answers = dataclasses.replace(case.answers, **{without: None} if without else {})  # type: ignore[arg-type]
    assert accuracy(kind, dataclasses.replace(case, answers=answers)) > 0.9


@pytest.mark.parametrize("kind", STUDENT_KINDS)
def test_probabilities_are_those_of_the_seed_again_and_of_the_file(kind: StudentKind, tmp_path: Path) -> None:
    case = world()
    first, again = (fit_student(kind, case.answers, case.public, num_classes=CLASSES, seed=4) for _ in range(2))
    said = first.predict_proba(case.test)
    assert said.shape == (300, CLASSES)
    np.testing.assert_allclose(said.sum(axis=1), 1.0)
    assert said.min() >= 0
    np.testing.assert_array_equal(said, again.predict_proba(case.test))
    (tmp_path / "student").write_bytes(model_file(first.arrays, kind=first.kind, classes=tuple("abcde"), card={}))
    np.testing.assert_array_equal(said, read_model(tmp_path / "student").predict_proba(case.test))


@pytest.mark.parametrize("kind", STUDENT_KINDS)
def test_a_single_answered_query_makes_everything_its_class(kind: StudentKind) -> None:
    case = world()
    labels = np.full(10, -1)
    labels[3] = 2
    answers = dataclasses.replace(case.answers, labels=labels, noisy_votes=None)
    student = fit_student(kind, answers, case.public, num_classes=CLASSES)
    assert set(student.predict(case.test).tolist()) <= {0, 2}
    assert student.predict(case.public[answers.assignment == 3]).tolist().count(2) >= 1  # type: ignore[operator]


@pytest.mark.parametrize("kind", STUDENT_KINDS)
def test_more_classes_than_answers_is_fine(kind: StudentKind) -> None:
    case = world()
    wide = dataclasses.replace(
        case.answers, num_classes=40, noisy_votes=np.pad(case.answers.noisy_votes, ((0, 0), (0, 35)))
    )
    student = fit_student(kind, wide, case.public, num_classes=40)
    assert (student.predict(case.test) == case.truth).mean() > 0.8


@pytest.mark.parametrize("kind", STUDENT_KINDS)
def test_two_public_images_are_enough(kind: StudentKind) -> None:
    rows = quantize(np.array([[1.0, 0.0, 0.1], [0.0, 1.0, 0.1]]))
    answers = NoisyAnswers(features=rows, labels=np.array([0, 1]), total_sigma_votes=0.0, num_classes=2)
    student = fit_student(kind, answers, rows, num_classes=2)
    assert student.predict(rows).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"public_features": BROKEN}, "NaN"),
        ({"public_features": np.ones((400, 30))}, "dimension"),
        ({"public_features": np.ones((399, 60))}, "400 public images"),
        ({"kind": "oracle"}, "unknown student"),
        ({"num_classes": CLASSES + 1}, "classes"),
    ],
)
def test_what_does_not_fit_the_answers_is_refused(changes: dict[str, Any], sentence: str) -> None:
    case = world()
    asked: dict[str, Any] = {"kind": "planned", "public_features": case.public, "num_classes": CLASSES}
    with pytest.raises((BadData, InvalidSetting), match=sentence):
        fit_student(answers=case.answers, **asked | changes)


@pytest.mark.parametrize(("features", "sentence"), [(BROKEN, "NaN"), (np.ones((3, 30)), "dimension")])
def test_a_student_labels_no_features_that_it_cannot_read(features: NDArray[np.float64], sentence: str) -> None:
    case = world()
    with pytest.raises(BadData, match=sentence):
        fit_student("prototypes", case.answers, case.public, num_classes=CLASSES).predict(features)


@pytest.mark.filterwarnings("ignore:invalid value encountered in divide:RuntimeWarning:sklearn")
@pytest.mark.parametrize("kind", STUDENT_KINDS)
@pytest.mark.parametrize("world", ["one line", "one image", "no votes", "much noise"])
def test_where_nothing_tells_classes_apart_probabilities_are_numbers(kind: StudentKind, world: str) -> None:
    """Images on one line of which one answer came, images that are all alike, no count, and noise that drowns all."""
    rng = np.random.default_rng(0)
    public = rng.normal(size=(40, 1 if world == "one line" else 6)) + 0.01
    if world == "one image":
        public[:] = public[0]
    labels = np.array([1, -1, -1, -1]) if world == "one line" else np.array([0, 1, 2, 0])
    answers = NoisyAnswers(
        features=public[:4],
        labels=labels,
        total_sigma_votes=1e6 if world == "much noise" else 0.0,
        num_classes=3,
        noisy_votes={"no votes": np.zeros((4, 3)), "much noise": 1e6 * rng.normal(size=(4, 3))}.get(world),
        assignment=np.arange(40) % 4,
    )
    said = fit_student(kind, answers, public, num_classes=3).predict_proba(public)
    assert np.isfinite(said).all()
    assert np.allclose(said.sum(axis=1), 1)
