"""The data of a report: public facts and paid-for releases, nothing else.

There is no field for a ballot, a share, a count of private records or a sum without noise. There is none for a time
either, which grows with the private records. So no page made from these types can show one.

Labels, confidences and pictures of public images follow from released answers; the truth is the requester's own. So
nothing here costs privacy, and a number that looks bad is shown as it is.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from feature_store.results.scores import Scores, score
from labeler.errors import InvalidSetting
from labeler.planning import holds_against
from labeler.rounds.effects import AnswerStatus
from labeler.task import Task


@dataclass(frozen=True, eq=False)
class AnsweredQuery:
    """One question about public images, and what came back.

    Attributes:
        source: uri or file name of the public image, or a name for the group of images asked about.
        label: released class number; -1 unless the status is answered.
        truth: true class number where the requester knows it, for scoring only.
        noisy_votes: float64, shape (num_classes,), the noisy sum in votes that was released and paid
            for; None for the winner release and where nothing was released.
        thumbnails: PNG files of the public image, or of a few images of its group.
        group_size: how many public images the question stands for.
    """

    query_id: str
    source: str
    label: int
    status: AnswerStatus
    truth: int | None = None
    noisy_votes: NDArray[np.float64] | None = field(default=None, repr=False)
    thumbnails: tuple[bytes, ...] = field(default=(), repr=False)
    group_size: int = 1

    @property
    def is_right(self) -> bool | None:
        """True if the released label is the true one; None where there is no label or no truth."""
        if self.truth is None or self.status is not AnswerStatus.ANSWERED:
            return None
        return self.label == self.truth


@dataclass(frozen=True)
class StudentOutcome:
    """The model trained on the answers.

    Attributes:
        kind: what sort of student, in words.
        public_images: how many public images it learnt from.
        accuracy: share of unseen test images it is right on, 0 to 1; None without truth.
        test_images: how many those were.
        scores: the same class by class; None without truth, and of attributes.
    """

    kind: str
    public_images: int
    accuracy: float | None = None
    test_images: int | None = None
    scores: Scores | None = None


@dataclass(frozen=True)
class LevelPrice:
    """The guarantee at one level: an epsilon and how it was proved, or the reason why there is none.

    `participant_epsilon` is its value against one participant that reads the release (labeler.planning),
    `histogram_epsilon` that of the sums where winners are released and cost less.
    """

    epsilon: float | None
    method: str
    reason: str = ""
    participant_epsilon: float | None = None
    histogram_epsilon: float | None = None


@dataclass(frozen=True)
class PriceRow:
    """One way to price the releases; exactly one row of a report is the reported one."""

    name: str
    instance_epsilon: float | None
    agent_epsilon: float | None
    is_reported: bool = False


@dataclass(frozen=True)
class Privacy:
    """The cost of the answers.

    Attributes:
        delta: the failure probability of both guarantees.
        instance: one record of one agent, added or removed.
        agent: everything one agent sent.
        breakdown: the reported price beside others of the same releases.
        spent: (questions asked so far, instance epsilon so far), in order.
        person: all records of one person at one agent, where the task bounds how many vote.
        group: any `group_size` records of all agents, where the task names that number.
    """

    delta: float
    instance: LevelPrice
    agent: LevelPrice
    breakdown: tuple[PriceRow, ...] = ()
    spent: tuple[tuple[int, float], ...] = ()
    person: LevelPrice | None = None
    records_per_person: int | None = None
    group: LevelPrice | None = None
    group_size: int | None = None


@dataclass(frozen=True)
class CurvePoint:
    """Mean accuracy of students at one instance epsilon; `sd` over repetitions where there were some."""

    epsilon: float
    accuracy: float
    sd: float | None = None
    label: str = ""


@dataclass(frozen=True, eq=False)
class Coverage:
    """A map of the public set and how much of it the answers speak for.

    Attributes:
        points: float64, shape (num_drawn, 2), public images, or evenly chosen ones of many.
        point_query: int64, shape (num_drawn,), number of the answered query that covers each; -1 for none.
        query_points: float64, shape (num_queries, 2), where each query lies on the same map.
        fraction: share of all public images that an answered query covers, 0 to 1.
        public_images: how many public images there are.
        meaning: completes the sentence "An image counts as covered if it is ...".
    """

    points: NDArray[np.float64]
    point_query: NDArray[np.int64]
    query_points: NDArray[np.float64]
    fraction: float
    public_images: int
    meaning: str


@dataclass(frozen=True, eq=False)
class JobReport:
    """Everything the report of one job shows.

    Attributes:
        task: the task, whose public settings the page lists.
        queries: what was asked, in order.
        contributors: how many agents took part.
        public_images: how many public images the requester holds.
        student: None where none was trained.
        curve: accuracy against instance epsilon, where truth is known. It must cost
            nothing: students of this job's answers with more noise added, or data that need no protection.
        images: the labels of all public images; None where there are none.
        attributes: the same where an image may have any number of labels.
        stability: the least and the largest share of labels that two draws of the noise agree on; None where no noisy
            counts were released.
        coverage: None where it was not computed.
        versions: of this project and what the result depends on.
        is_seeded: True for a simulation; a reader who knows the seed can subtract its noise.
        not_covered: private records that the guarantee is not about, in a sentence.
        downloads: (name of a file in the page's folder, its content).
        compared: report.json of jobs that asked the same by other methods, each in a folder next to the page that is
            named after its method.
    """

    task: Task
    queries: tuple[AnsweredQuery, ...]
    privacy: Privacy
    contributors: int
    public_images: int
    student: StudentOutcome | None = None
    curve: tuple[CurvePoint, ...] = ()
    images: ImageLabels | None = None
    attributes: AttributeReport | None = None
    stability: tuple[float, float] | None = None
    coverage: Coverage | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    is_seeded: bool = False
    not_covered: str = ""
    backbone: str = ""
    job_id: str = ""
    created_at: str = ""
    downloads: tuple[tuple[str, str], ...] = (
        ("pseudo_labels.parquet", "every label, one row per question"),
        ("report.json", "the numbers of this page, for programs"),
    )
    compared: tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if self.task.release == "winner" and any(query.noisy_votes is not None for query in self.queries):
            raise InvalidSetting("the winner release opens no votes, so a report of it cannot show any")

    @cached_property
    def status_counts(self) -> dict[AnswerStatus, int]:
        """Number of queries that ended in each status, zeros included."""
        counts = dict.fromkeys(AnswerStatus, 0)
        for query in self.queries:
            counts[query.status] += 1
        return counts

    @property
    def holds_against(self) -> str:
        """For whom the price holds, in words."""
        instance = self.privacy.instance
        return holds_against(self.task, instance.participant_epsilon, instance.histogram_epsilon)

    @property
    def answered(self) -> int:
        return self.status_counts[AnswerStatus.ANSWERED]

    @cached_property
    def scored(self) -> tuple[int, int]:
        """(labels that are right, labels whose truth is known)."""
        marks = [query.is_right for query in self.queries if query.is_right is not None]
        return sum(marks), len(marks)

    @property
    def label_accuracy(self) -> float | None:
        """Share of the released labels that are right, among those whose truth is known."""
        right, known = self.scored
        return right / known if known else None

    @property
    def image_accuracy(self) -> float | None:
        """Share of the public images that are labeled right, among those whose truth is known."""
        return None if self.images is None else self.images.accuracy

    @cached_property
    def image_scores(self) -> Scores | None:
        """Scores of each class among the public images whose truth is known."""
        return None if self.images is None else self.images.scores(self.task.classes)

    @property
    def student_accuracy(self) -> float | None:
        return self.student.accuracy if self.student else None

    def class_name(self, label: int) -> str:
        """The name of a class number of this report."""
        return self.task.classes[label]


MOST_IMAGES: Final = 24
"""Public images that a page shows, evenly chosen."""


@dataclass(frozen=True)
class AttributeOutcome:
    """One attribute over all public images.

    Attributes:
        on: how many images have it, as far as the answers say.
        confidence: mean probability that what is said of it is right, 0 to 1.
        right: share of the images of known truth on which that is right; None where there are none.
        commoner: how often always giving the commoner answer would be right, which is what to compare with.
        recall: share of the images that have it of which that is said; None where none is known to have it.
        auroc: how well its probabilities tell the two apart (feature_store.results.scores).
    """

    name: str
    on: int
    confidence: float
    right: float | None = None
    commoner: float | None = None
    recall: float | None = None
    auroc: float | None = None


@dataclass(frozen=True, eq=False)
class AttributeImage:
    """A public image with the names of its attributes; `truth` where the requester knows them."""

    source: str
    has: tuple[str, ...]
    truth: tuple[str, ...] | None = None
    thumbnail: bytes | None = field(default=None, repr=False)


def _mean(shares: Iterable[float | None]) -> float | None:
    known = [one for one in shares if one is not None]
    return statistics.fmean(known) if known else None


@dataclass(frozen=True, eq=False)
class AttributeReport:
    """The labels of all public images of a job about attributes.

    Attributes:
        outcomes: of each attribute, in the order of the task.
        count: how many images there are.
        known: of how many the truth is known.
    """

    outcomes: tuple[AttributeOutcome, ...]
    images: tuple[AttributeImage, ...]
    count: int
    known: int

    @property
    def accuracy(self) -> float | None:
        """Mean over attributes of the share that is right."""
        return _mean(one.right for one in self.outcomes)

    @property
    def commoner(self) -> float | None:
        """Mean over attributes of the share that always giving the commoner answer would get right."""
        return _mean(one.commoner for one in self.outcomes)

    @property
    def confidence(self) -> float:
        """Mean over images and attributes."""
        return statistics.fmean(one.confidence for one in self.outcomes)

    def to_json(self) -> dict[str, Any]:
        """The part of report.json that is about attributes."""
        return {
            "labelled": self.count,
            "mean_confidence": round(self.confidence, 6),
            **({} if self.accuracy is None else {"accuracy": self.accuracy, "checked": self.known}),
            **({} if self.commoner is None else {"always_the_commoner": self.commoner}),
            "attributes": [
                {"name": one.name, "images": one.on, "confidence": round(one.confidence, 6)}
                | ({} if one.right is None else {"accuracy": one.right, "always_the_commoner": one.commoner})
                | ({} if one.right is None else {"recall": one.recall, "auroc": one.auroc})
                for one in self.outcomes
            ],
        }


BANDS = ((0.0, 0.5), (0.5, 0.75), (0.75, 0.9), (0.9, 1.0))
"""Bands of confidence, the lower end included; the last one holds 1."""

DOUBTFUL: Final = 0.75
"""Below it a label is doubtful."""

_DEVIATIONS = 1.96
"""On both sides of a share, of which 95 % lie between."""

MAX_FIRST = 8
"""Images to look at first, of each kind: wrong ones, and the least sure of the others."""

MAX_PER_BAND = 16
"""Images shown of each band of confidence, evenly chosen."""


@dataclass(frozen=True, eq=False)
class ImageLabels:
    """The labels of all public images, as `student_labels.parquet` holds them.

    Attributes:
        labels: int16, shape (n,).
        confidences: float64, shape (n,), what the student states of its label, 0 to 1.
        asked: bool, shape (n,), images that were questions themselves.
        truth: int16, shape (n,), true classes where the requester knows them, -1 elsewhere.
        thumbnails: PNG files by image number, for those of `numbers_to_show` that have a picture.
    """

    sources: Sequence[str]
    labels: NDArray[np.int16]
    confidences: NDArray[np.float64]
    asked: NDArray[np.bool_]
    truth: NDArray[np.int16]
    thumbnails: Mapping[int, bytes] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.sources)

    @cached_property
    def known(self) -> NDArray[np.bool_]:
        """Mask of the images whose truth is known."""
        return self.truth >= 0

    @cached_property
    def right(self) -> NDArray[np.bool_]:
        """Mask of the images whose label is the true one; False where the truth is not known."""
        found: NDArray[np.bool_] = self.known & (self.labels == self.truth)
        return found

    @property
    def accuracy(self) -> float | None:
        """Share of the labels that are right, among those whose truth is known."""
        return float(self.right.sum() / self.known.sum()) if self.known.any() else None

    def scores(self, classes: Sequence[str]) -> Scores | None:
        """Return the scores of each class; None where no truth is known."""
        second = np.where(self.labels == 1, self.confidences, 1 - self.confidences)  # read of two classes alone
        return score(self.truth, self.labels, second, classes)

    @property
    def mean_confidence(self) -> float:
        """The share of the labels that is right, as they state it themselves."""
        return float(np.mean(self.confidences))

    @property
    def median_confidence(self) -> float:
        """Half of the labels are stated with at least this."""
        return float(np.median(self.confidences))

    def band_of(self, low: float, high: float) -> NDArray[np.int64]:
        """Numbers of the images stated with a confidence in a band, the least sure first."""
        inside = (self.confidences >= low) & ((self.confidences < high) | (high >= 1))
        numbers = np.flatnonzero(inside)
        return numbers[np.argsort(self.confidences[numbers], kind="stable")]

    def shown_of_band(self, low: float, high: float) -> list[int]:
        """Return the images of a band that a page shows, evenly chosen."""
        numbers = self.band_of(low, high)
        return [int(number) for number in numbers[evenly(len(numbers), MAX_PER_BAND)]]

    def wrong(self) -> NDArray[np.int64]:
        """Numbers of the images whose label is wrong, the surest first: those tell most."""
        numbers = np.flatnonzero(self.known & ~self.right)
        return numbers[np.argsort(-self.confidences[numbers], kind="stable")]

    def unclear(self) -> NDArray[np.int64]:
        """Numbers of the other images, the least sure first; doubtful ones with a rare label before all others.

        Of a rare class every image counts, and its doubtful ones drown among those of the others. Rare is a label that
        at most half as many images have as if all labels were alike.
        """
        numbers = np.flatnonzero(~(self.known & ~self.right))
        counts = np.bincount(self.labels, minlength=1)
        is_rare = (2 * counts * np.count_nonzero(counts) <= len(self.labels))[self.labels[numbers]]
        confidences = self.confidences[numbers]
        return numbers[np.lexsort((confidences, ~(is_rare & (confidences < DOUBTFUL))))]

    def numbers_to_show(self) -> list[int]:
        """Images that a page shows, so that a caller reads no other picture."""
        first = [*self.wrong()[:MAX_FIRST], *self.unclear()[:MAX_FIRST]]
        rest = [number for low, high in BANDS for number in self.shown_of_band(low, high)]
        return sorted({int(number) for number in (*first, *rest)})


@dataclass(frozen=True)
class Band:
    """Labels stated with a confidence in a band, and how many of them are right.

    Attributes:
        stated: their mean confidence; 0 where there are none.
        right: of those, how many are.
    """

    low: float
    high: float
    count: int
    stated: float
    known: int
    right: int

    @property
    def share_right(self) -> float | None:
        """None where no truth is known."""
        return self.right / self.known if self.known else None

    def interval(self) -> tuple[float, float]:
        """Return the bounds of the share that is right, by chance alone, 95 % (Wilson 1927)."""
        if not self.known:
            return 0.0, 1.0
        share, square = self.right / self.known, _DEVIATIONS**2
        middle = (share + square / (2 * self.known)) / (1 + square / self.known)
        spread = math.sqrt(share * (1 - share) / self.known + square / (4 * self.known**2))
        reach = _DEVIATIONS * spread / (1 + square / self.known)
        return max(0.0, middle - reach), min(1.0, middle + reach)


def bands(images: ImageLabels, edges: Sequence[tuple[float, float]] = BANDS) -> tuple[Band, ...]:
    """Stated confidence, and how often it is right, band by band."""
    found = []
    for low, high in edges:
        numbers = images.band_of(low, high)
        stated = float(images.confidences[numbers].mean()) if len(numbers) else 0.0
        known, right = int(images.known[numbers].sum()), int(images.right[numbers].sum())
        found.append(Band(low, high, len(numbers), stated, known, right))
    return tuple(found)


def confusion(images: ImageLabels, num_classes: int) -> NDArray[np.int64]:
    """Count how often each true class (row) got each label (column), among images whose truth is known."""
    cells = images.truth[images.known].astype(np.int64) * num_classes + images.labels[images.known]
    return np.bincount(cells, minlength=num_classes**2).reshape(num_classes, num_classes)


def evenly(count: int, most: int) -> NDArray[np.int64]:
    """At most `most` of the numbers 0 to count - 1, evenly spaced, the first and the last among them."""
    if count <= most:
        return np.arange(count, dtype=np.int64)
    return np.unique(np.linspace(0, count - 1, most).round().astype(np.int64))
