"""What a job about attributes gives back: `workers.run.publishing` for records with any number of labels.

From the releases alone, at no price: a head per attribute, what it says of every public image, a report.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from feature_store.results.image_labels import ON
from feature_store.results.models import ATTRIBUTES
from feature_store.results.report.model import (
    MOST_IMAGES,
    AttributeImage,
    AttributeOutcome,
    AttributeReport,
    StudentOutcome,
)
from feature_store.students.attributes import LabelledAttributes, attributes_of
from labeler.release import Release
from workers.run.preparation import PreparedJob


@dataclass(frozen=True, eq=False)
class AttributeResult:
    """What was read off the releases.

    Attributes:
        labelled: the student, and what it says of every public image.
        outcome: of the student, where there are images to score it on.
    """

    labelled: LabelledAttributes
    outcome: StudentOutcome
    report: AttributeReport


def read_releases(prepared: PreparedJob, releases: Sequence[Release]) -> AttributeResult:
    """Fit the heads, label the public images, and score both where truth is known."""
    task, queries, public = prepared.task, prepared.queries, prepared.public
    opened = [one for one in releases if one.noisy_votes is not None]
    labelled = attributes_of(
        task,
        np.concatenate([one.noisy_votes for one in opened if one.noisy_votes is not None]),
        np.concatenate([np.full(len(one.labels), len(one.contributors)) for one in opened]),
        queries.features,
        public.features,
        rows=queries.rows,
        seed=prepared.job.file.student.seed,
    )
    outcome = StudentOutcome(kind=ATTRIBUTES, public_images=len(public))
    if prepared.test is not None:
        said = labelled.student.predict_proba(prepared.test.features) >= ON
        right = float((said == prepared.test.labels).mean())
        outcome = replace(outcome, accuracy=right, test_images=len(prepared.test))
    return AttributeResult(labelled, outcome, _report(prepared, labelled))


def _report(prepared: PreparedJob, labelled: LabelledAttributes) -> AttributeReport:
    public, names = prepared.public, prepared.task.classes
    has = labelled.probabilities >= ON
    sure = np.where(has, labelled.probabilities, 1 - labelled.probabilities)
    truth: NDArray[np.int16] | None = None
    if public.shard.has_attributes and public.classes == names and (public.labels >= 0).any():
        truth = public.labels
    known = np.zeros(len(public), dtype=np.bool_) if truth is None else truth[:, 0] >= 0
    outcomes = tuple(
        AttributeOutcome(
            name=name,
            on=int(has[:, place].sum()),
            confidence=float(sure[:, place].mean()),
            right=None if truth is None else float((has[known, place] == truth[known, place]).mean()),
            commoner=None if truth is None else _commoner(truth[known, place]),
        )
        for place, name in enumerate(names)
    )
    numbers = np.unique(np.linspace(0, len(public) - 1, min(MOST_IMAGES, len(public))).astype(np.int64)).tolist()
    pictures = public.thumbnails(numbers)
    images = tuple(
        AttributeImage(
            source=public.sources[number],
            has=tuple(names[place] for place in np.flatnonzero(has[number])),
            truth=None
            if truth is None or not known[number]
            else tuple(names[place] for place in np.flatnonzero(truth[number] == 1)),
            thumbnail=pictures.get(number),
        )
        for number in numbers
    )
    return AttributeReport(outcomes, images, len(public), int(known.sum()))


def _commoner(truth: NDArray[np.int16]) -> float:
    """How often whoever always gave the commoner answer would be right."""
    share = float(truth.mean())
    return max(share, 1 - share)
