"""Every public image labelled: from a release to a student, and what it says of each image, asked about or not.

The one way from answers to labels of images: `labeler run`, `labeler student` and the service all take it, so that the
same release gives the same labels. Post-processing: it reads public features and released answers, and costs no
privacy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from feature_store.students.answers import NoisyAnswers
from feature_store.students.calibration import asked_posterior, vote_agreement
from feature_store.students.student import Student, StudentKind, assignment_of, fit_student
from labeler.methods import METHODS


@dataclass(frozen=True, eq=False)
class LabelledImages:
    """What a release says of every public image.

    Attributes:
        student: which learnt from it.
        probabilities: float64, shape (num_images, num_classes), rows sum to one; the label is the largest, and that
            probability a calibrated confidence.
        asked: shape (num_images,), which images were questions themselves, with an answer.
    """

    student: Student
    probabilities: NDArray[np.float64]
    asked: NDArray[np.bool_]


def label_images(
    answers: NoisyAnswers,
    public_features: NDArray[np.generic],
    *,
    rows: NDArray[np.int64] | None,
    kind: StudentKind = "auto",
    seed: int = 0,
) -> LabelledImages:
    """Train a student, and label every public image with it and with what was answered about the image itself.

    Args:
        answers: the release.
        public_features: shape (num_images, dimension).
        rows: shape (num_answers,), the image that each answer is about, or -1 for the centre of a cluster; None where a
            model was asked for, which is about no image.
        kind, seed: see `fit_student`.

    Raises:
        BadData: nothing was answered, or features do not fit the answers.
    """
    student = fit_student(kind, answers, public_features, num_classes=answers.num_classes, seed=seed)
    probabilities = student.predict_proba(public_features)
    asked = np.zeros(len(public_features), dtype=np.bool_)
    if rows is None:
        return LabelledImages(student, probabilities, asked)
    own = np.flatnonzero((rows >= 0) & answers.answered)
    asked[rows[own]] = True
    if answers.noisy_votes is not None and METHODS[answers.method].counts and len(own):
        agreement = vote_agreement(probabilities.argmax(axis=1), answers, assignment_of(answers, public_features))
        images = rows[own]
        probabilities[images] = asked_posterior(probabilities[images], answers.noisy_votes[own], answers, agreement)
    return LabelledImages(student, probabilities, asked)
