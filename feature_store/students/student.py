"""A student: learns from released answers, labels any image, saves to one file without pickle."""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from feature_store.students.answers import NoisyAnswers, check_features, soft_labels
from feature_store.students.calibration import fit_temperature, sharpened
from feature_store.students.centred import CentredLearner
from feature_store.students.choice import Predict, choose
from feature_store.students.linear_probe import LinearLearner, LinearProbe
from feature_store.students.projection import Projection, unit_rows
from feature_store.students.prototypes import PrototypeLearner, Prototypes
from feature_store.students.spreading import Spreading, SpreadingLearner
from labeler.errors import BadData, InvalidSetting

Model = Prototypes | LinearProbe | Spreading
Learner = PrototypeLearner | LinearLearner | SpreadingLearner
StudentKind = Literal["auto", "centred", "prototypes", "linear-probe", "spreading"]

_LEARNERS: dict[str, type[Learner]] = {
    "prototypes": PrototypeLearner,
    "linear-probe": LinearLearner,
    "spreading": SpreadingLearner,
}
"""From the simplest to the richest: the ladder of feature_store.students.choice."""

_MODELS: dict[str, type[Model]] = {
    "centred": Prototypes,
    "prototypes": Prototypes,
    "linear-probe": LinearProbe,
    "spreading": Spreading,
}
_FORMAT = "labeler-student/1"
_BLOCK_ROWS = 4096


@dataclass(frozen=True, eq=False)
class Student:
    """A fitted student.

    Attributes:
        kind: which student it is (never `auto`).
        model: its parameters, made from public features and released answers only.
        contradicted: estimated share of votes that contradict each student `auto` compared; empty if it
            compared none.
        temperature: by which its probabilities are made calibrated confidences (feature_store.students.calibration).
    """

    kind: str
    model: Model
    contradicted: dict[str, float] = field(default_factory=dict)
    temperature: float = 1.0

    def predict_proba(self, features: NDArray[np.generic]) -> NDArray[np.float64]:
        """Calibrated class probabilities of features of the task's backbone, shape (n, num_classes)."""
        return sharpened(self.model.predict_proba(features), self.temperature)

    def predict(self, features: NDArray[np.generic]) -> NDArray[np.int64]:
        """Most probable class, shape (n,); the lowest among equals."""
        return np.asarray(self.predict_proba(features).argmax(axis=1), dtype=np.int64)

    @property
    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """What the student consists of, by name."""
        own = {f"model_{name}": np.asarray(value) for name, value in vars(self.model).items() if name != "projection"}
        shared = {"mean": self.model.projection.mean, "components": self.model.projection.components}
        return shared | own | {"temperature": np.array(self.temperature)}

    @classmethod
    def of_arrays(cls, kind: str, arrays: Mapping[str, NDArray[Any]]) -> Student:
        """The student of what `arrays` gave; one saved before there was a temperature has none.

        Raises:
            KeyError, TypeError, ValueError: it is no student.
        """
        parameters = {key.removeprefix("model_"): one for key, one in arrays.items() if key.startswith("model_")}
        model = _MODELS[kind](Projection(arrays["mean"], arrays["components"]), **parameters)
        return cls(kind, model, temperature=float(np.ravel(arrays.get("temperature", 1.0))[0]))

    def save(self, path: Path | str) -> None:
        """Write one .npz file, whole or not at all."""
        target = Path(path)
        partial = target.with_name(target.name + ".partial")
        with partial.open("wb") as file:
            np.savez(
                file,
                format=np.array(_FORMAT),
                kind=np.array(self.kind),
                **self.arrays,  # type: ignore[arg-type]  # numpy's stubs take the next option for an array
            )
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)


def load_student(path: Path | str) -> Student:
    """Read what `Student.save` wrote.

    Raises:
        BadData: no such file, or not a student.
    """
    try:
        with Path(path).open("rb") as file, np.load(file, allow_pickle=False) as stored:
            if str(stored["format"]) != _FORMAT:
                raise BadData(f"{Path(path).name} is a student of another version; train it again")
            return Student.of_arrays(str(stored["kind"]), {key: stored[key] for key in stored.files})
    except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise BadData(f"{Path(path).name} is not a saved student ({type(error).__name__})") from None


def fit_student(
    kind: StudentKind,
    answers: NoisyAnswers,
    public_features: NDArray[np.generic],
    *,
    num_classes: int,
    seed: int = 0,
) -> Student:
    """Train a student on a release. Post-processing: costs no privacy.

    Each public image takes the soft labels of the query that stands for it; an unanswered query says nothing.

    Args:
        kind: `auto` lets released votes decide between the three older kinds (see feature_store.students.choice);
            `centred` reads the counts themselves (see feature_store.students.centred).
        answers: the release.
        public_features: shape (num_images, dimension), the public images, asked about or not. Images
            the student will be judged on do not belong here.
        num_classes: C, as in the task.
        seed: same arguments, same student.

    Raises:
        BadData: NaN, zero rows, another dimension or number of images than the answers'.
        InvalidSetting: unknown kind, or a number of classes other than the answers'.
    """
    if kind not in get_args(StudentKind):
        raise InvalidSetting(f"unknown student {kind!r}; choose one of {', '.join(get_args(StudentKind))}")
    if num_classes != answers.num_classes:
        raise InvalidSetting(f"the answers have {answers.num_classes} classes, the student is asked for {num_classes}")
    check_features(public_features, "public")
    assignment = assignment_of(answers, public_features)
    if kind == "centred":
        centred = CentredLearner(public_features, num_classes=num_classes, seed=seed)
        student = Student(kind, centred.learn(answers, _standing(answers, assignment)))
        return _calibrated(student, answers, public_features, assignment)
    kinds = list(_LEARNERS) if kind == "auto" else [kind]
    learners = {name: _LEARNERS[name](public_features, num_classes=num_classes, seed=seed) for name in kinds}
    if kind != "auto":
        return _calibrated(
            Student(kind, _fit(learners[kind], answers, assignment)), answers, public_features, assignment
        )

    def predictor(learner: Learner) -> Predict:
        return lambda seen: np.asarray(_fit(learner, seen, assignment).predict_proba(public_features).argmax(axis=1))

    ladder = {name: predictor(learner) for name, learner in learners.items()}
    chosen, errors = choose(ladder, answers, assignment, seed=seed)
    compared = {name: error for name, error in errors.items() if math.isfinite(error)}
    student = Student(chosen, _fit(learners[chosen], answers, assignment), compared)
    return _calibrated(student, answers, public_features, assignment)


def _calibrated(
    student: Student, answers: NoisyAnswers, features: NDArray[np.generic], assignment: NDArray[np.int64]
) -> Student:
    said = student.model.predict_proba(features)
    return replace(student, temperature=fit_temperature(student.kind, said, answers, assignment))


def _fit(learner: Learner, answers: NoisyAnswers, assignment: NDArray[np.int64]) -> Model:
    weights = answers.answered[_standing(answers, assignment)].astype(np.float64)
    return learner.fit(soft_labels(answers)[assignment], weights)


def _standing(answers: NoisyAnswers, assignment: NDArray[np.int64]) -> NDArray[np.int64]:
    if not answers.answered[assignment].any():
        raise BadData("the answered queries stand for no public image; check the assignment against the queries")
    return assignment


def assignment_of(answers: NoisyAnswers, features: NDArray[np.generic]) -> NDArray[np.int64]:
    """The answer that stands for each public image, shape (num_images,): the one it was given, else the most similar.

    Raises:
        BadData: images of another dimension or number.
    """
    if features.shape[1] != answers.features.shape[1]:
        raise BadData(
            f"the queries have dimension {answers.features.shape[1]}, the public features {features.shape[1]}; "
            "embed both with the backbone of the task"
        )
    if answers.assignment is not None:
        if len(answers.assignment) != len(features):
            raise BadData(
                f"the answers assign {len(answers.assignment)} public images to queries, "
                f"but there are features of {len(features)}"
            )
        return answers.assignment.astype(np.int64)
    queries = unit_rows(answers.features).T
    blocks = [
        (unit_rows(features[start : start + _BLOCK_ROWS]) @ queries).argmax(axis=1)
        for start in range(0, len(features), _BLOCK_ROWS)
    ]
    return np.concatenate(blocks).astype(np.int64)
