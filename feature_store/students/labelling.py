"""Every public image labelled: from a release to a student, and what it says of each image, asked about or not.

The one way from answers to labels of images: `labeler run`, `labeler student` and the service all take it, so that the
same release gives the same labels. Post-processing: it reads public features and released answers, and costs no
privacy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from feature_store.students.answers import NoisyAnswers
from feature_store.students.calibration import asked_posterior, majority_share, sharpened, vote_agreement
from feature_store.students.rehearsal import temperatures
from feature_store.students.student import Learners, Student, assignment_of, fit_student
from labeler.methods import METHODS
from labeler.rounds.effects import StudentKind


@dataclass(frozen=True, eq=False)
class LabelledImages:
    """What a release says of every public image.

    Attributes:
        student: which learnt from it.
        probabilities: float64, shape (num_images, num_classes), rows sum to one; the label is the largest, and that
            probability a calibrated confidence; where noise drowned the votes, no more than a rehearsal allows
            (feature_store.students.rehearsal).
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
        BadData: features do not fit the answers.
    """
    learners = Learners(public_features, num_classes=answers.num_classes, seed=seed)
    student = fit_student(kind, answers, public_features, num_classes=answers.num_classes, seed=seed, learners=learners)
    asked = np.zeros(len(public_features), dtype=np.bool_)
    if rows is not None:
        asked[rows[(rows >= 0) & answers.answered]] = True
    probabilities = _say(student, answers, public_features, rows)
    if answers.noisy_votes is None or not METHODS[answers.method].counts:
        return LabelledImages(student, probabilities, asked)

    def label(release: NoisyAnswers) -> NDArray[np.float64]:
        again = fit_student(
            cast(StudentKind, student.kind),
            release,
            public_features,
            num_classes=release.num_classes,
            seed=seed,
            learners=learners,
        )
        return _say(again, release, public_features, rows)

    assignment = assignment_of(answers, public_features)
    own, inferred = temperatures(label, answers, probabilities, assignment, (asked, ~asked), seed=seed)
    probabilities[asked] = sharpened(probabilities[asked], own)
    probabilities[~asked] = sharpened(probabilities[~asked], inferred)
    # Of other images the student says no more than of those that were not asked about.
    cooled = student.temperature * (inferred if not asked.all() else own)
    return LabelledImages(replace(student, temperature=cooled), probabilities, asked)


def _say(
    student: Student, answers: NoisyAnswers, public_features: NDArray[np.generic], rows: NDArray[np.int64] | None
) -> NDArray[np.float64]:
    """What a student says of every image, together with what was answered about the image itself."""
    probabilities = student.predict_proba(public_features)
    own = np.zeros(0, dtype=np.int64) if rows is None else np.flatnonzero((rows >= 0) & answers.answered)
    if rows is not None and answers.noisy_votes is not None and METHODS[answers.method].counts and len(own):
        images, counts = rows[own], answers.noisy_votes[own]
        trust = vote_agreement(probabilities.argmax(axis=1), answers, assignment_of(answers, public_features))
        agreement = max(trust, majority_share(counts, answers.total_sigma_votes))
        # A student that is wrong as often as votes contradict it may not overrule what was answered about the image.
        doubted = trust * probabilities[images] + (1 - trust) / answers.num_classes
        probabilities[images] = asked_posterior(doubted, counts, answers, agreement)
    return probabilities
