"""A student: learns from released answers, labels any image, saves to one file without pickle."""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feature_store.students.answers import NoisyAnswers, check_features, soft_labels
from feature_store.students.averaged import Averaged, AveragedLearner
from feature_store.students.blended import SHARES, Blended
from feature_store.students.calibration import fit_temperature, sharpened
from feature_store.students.centred import CentredLearner
from feature_store.students.choice import Predict, choose, votes_stand_out
from feature_store.students.discriminant import DiscriminantLearner
from feature_store.students.linear_probe import LinearLearner, LinearProbe
from feature_store.students.matched import Matched, MatchedLearner
from feature_store.students.projection import Projection, unit_rows
from feature_store.students.prototypes import PrototypeLearner, Prototypes
from feature_store.students.spreading import Spreading, SpreadingLearner
from labeler.errors import BadData, InvalidSetting
from labeler.rounds.effects import STUDENT_KINDS, StudentKind

Simple = Prototypes | Matched | Averaged | LinearProbe | Spreading
Model = Simple | Blended[Simple]
Learner = PrototypeLearner | LinearLearner | SpreadingLearner
Reader = AveragedLearner | CentredLearner | MatchedLearner | DiscriminantLearner
_LEARNERS: dict[str, type[Learner]] = {
    "prototypes": PrototypeLearner,
    "linear-probe": LinearLearner,
    "spreading": SpreadingLearner,
}
"""Those that learn from what the release says about each image, from the simplest to the richest."""

_READERS: dict[str, Callable[..., Reader]] = {
    "averaged": AveragedLearner,
    "matched": MatchedLearner,
    "centred": CentredLearner.of,
    "discriminant": DiscriminantLearner,
}
"""Those that read the noisy counts themselves, rather than what they say about each image."""

_LADDERS: dict[str, tuple[str, ...]] = {
    "planned": ("averaged", "blended"),
    "auto": tuple(_LEARNERS),
}
"""Kinds that let released votes decide (feature_store.students.choice), from the least sensitive to noise on."""

PLANNED_GAIN, PLANNED_STANDARD_ERRORS = 0.15, 3.0
"""What the second rung of `planned` must gain: groups of images are then impure for certain. The first is the one that
noise misleads least."""

_MODELS: dict[str, type[Simple]] = {
    "averaged": Averaged,
    "followed": Spreading,
    "matched": Matched,
    "centred": Prototypes,
    "discriminant": LinearProbe,
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
    model: Model = field(repr=False)  # thousands of numbers, where a notebook shows it
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
        temperature = {"temperature": np.array(self.temperature)}
        if not isinstance(self.model, Blended):
            return _arrays_of(self.model) | temperature
        members = zip(SHARES[self.kind], self.model.members, strict=True)
        return {
            f"{kind}.{name}": one for kind, model in members for name, one in _arrays_of(model).items()
        } | temperature

    @classmethod
    def of_arrays(cls, kind: str, arrays: Mapping[str, NDArray[Any]]) -> Student:
        """The student of what `arrays` gave; one saved before there was a temperature has none.

        Raises:
            KeyError, TypeError, ValueError: it is no student.
        """
        model: Model
        if kind in SHARES:
            members = [_model_of(one, _below(arrays, f"{one}.")) for one in SHARES[kind]]
            model = Blended(members, list(SHARES[kind].values()))
        else:
            model = _model_of(kind, arrays)
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


def _arrays_of(model: Simple) -> dict[str, NDArray[np.generic]]:
    own = {f"model_{name}": np.asarray(value) for name, value in vars(model).items() if name != "projection"}
    return {"mean": model.projection.mean, "components": model.projection.components} | own


def _model_of(kind: str, arrays: Mapping[str, NDArray[Any]]) -> Simple:
    return _MODELS[kind](Projection(arrays["mean"], arrays["components"]), **_below(arrays, "model_"))


def _below(arrays: Mapping[str, NDArray[Any]], prefix: str) -> dict[str, NDArray[Any]]:
    return {key.removeprefix(prefix): one for key, one in arrays.items() if key.startswith(prefix)}


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


class Learners:
    """What students need of the public images, prepared once for any number of releases about them.

    Args:
        public_features: shape (num_images, dimension).
        num_classes: C.
        seed: same arguments, same students.

    Raises:
        BadData: NaN, or zero rows.
    """

    def __init__(self, public_features: NDArray[np.generic], *, num_classes: int, seed: int = 0) -> None:
        check_features(public_features, "public")
        self.features, self.num_classes, self.seed = public_features, num_classes, seed
        self._made: dict[str, Learner | Reader] = {}

    def fit(self, kind: str, answers: NoisyAnswers, assignment: NDArray[np.int64]) -> Model:
        """The model of one kind of student, which is no ladder."""
        if kind in SHARES:
            members = [self._fit(one, answers, assignment) for one in SHARES[kind]]
            return Blended(members, list(SHARES[kind].values()))
        return self._fit(kind, answers, assignment)

    def _fit(self, kind: str, answers: NoisyAnswers, assignment: NDArray[np.int64]) -> Simple:
        if not answers.answered[assignment].any():
            raise BadData("the answered queries stand for no public image; check the assignment against the queries")
        if kind == "followed":
            said = self._fit("averaged", answers, assignment).predict_proba(self.features)
            flowing = self._learner("spreading")
            assert isinstance(flowing, SpreadingLearner)  # noqa: S101  # by the table
            return flowing.fit(said, np.ones(len(said)))
        learner = self._learner(kind)
        if isinstance(learner, Reader):
            return learner.learn(answers, assignment)
        return learner.fit(soft_labels(answers)[assignment], answers.answered[assignment].astype(np.float64))

    def _learner(self, kind: str) -> Learner | Reader:
        if kind not in self._made:
            make = _READERS.get(kind) or _LEARNERS[kind]
            self._made[kind] = make(self.features, num_classes=self.num_classes, seed=self.seed)
        return self._made[kind]


def fit_student(
    kind: StudentKind,
    answers: NoisyAnswers,
    public_features: NDArray[np.generic],
    *,
    num_classes: int,
    seed: int = 0,
    learners: Learners | None = None,
) -> Student:
    """Train a student on a release. Post-processing: costs no privacy.

    An unanswered query says nothing.

    Args:
        kind: `planned` reads the counts themselves: `followed` (what `averaged` says of the public images, once more
            along their nearest neighbours) where noise is about as large as the votes, `pooled` where they stand out,
            `blended` where held-out votes show groups of several classes; `auto` is what decided before there was
            `planned`, kept so that jobs of then give the same labels again. Any other names one kind; see its module.
        answers: the release.
        public_features: shape (num_images, dimension), the public images, asked about or not. Images
            the student will be judged on do not belong here.
        num_classes: C, as in the task.
        seed: same arguments, same student.
        learners: of these images, where there is more than one release about them.

    Raises:
        BadData: NaN, zero rows, another dimension or number of images than the answers'.
        InvalidSetting: unknown kind, or a number of classes other than the answers'.
    """
    if kind not in STUDENT_KINDS:
        raise InvalidSetting(f"unknown student {kind!r}; choose one of {', '.join(STUDENT_KINDS)}")
    if num_classes != answers.num_classes:
        raise InvalidSetting(f"the answers have {answers.num_classes} classes, the student is asked for {num_classes}")
    prepared = learners or Learners(public_features, num_classes=num_classes, seed=seed)
    assignment = assignment_of(answers, public_features)
    chosen: str = kind
    compared: dict[str, float] = {}
    if kind in _LADDERS:

        def predictor(name: str) -> Predict:
            return lambda seen: np.asarray(
                prepared.fit(name, seen, assignment).predict_proba(public_features).argmax(axis=1)
            )

        rungs = {name: predictor(name) for name in _LADDERS[kind]}
        least = {} if kind == "auto" else {"least_gain": PLANNED_GAIN, "least_standard_errors": PLANNED_STANDARD_ERRORS}
        chosen, errors = choose(rungs, answers, assignment, seed=seed, **least)
        if kind == "planned" and chosen == "averaged":
            chosen = "pooled" if votes_stand_out(answers) else "followed"
        compared = {name: error for name, error in errors.items() if math.isfinite(error)}
    student = Student(chosen, prepared.fit(chosen, answers, assignment), compared)
    said = student.model.predict_proba(public_features)
    return replace(student, temperature=fit_temperature(student.kind, said, answers, assignment))


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
