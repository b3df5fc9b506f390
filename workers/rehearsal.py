"""A rehearsal of jobs on labeled public images: the share of labels that come out right at each noise.

The labeled images play both sides. In each of DRAWS divisions one half of them, of each class, are the private records,
dealt to as many agents as the task has. The other half is scored. Agents answer by the task's own method, noise of the
task's size is added to their sum, and the usual student labels all public images. Public images cost no privacy, so
nothing is charged.

**What it draws.** If records choose their questions (reverse-knn), the rehearsal wants as many records as the caller
says, drawn from the half with replacement: each record votes for itself, so a record that is there twice is like two
that look alike. More than MOST_RECORDS are not drawn; then the votes are multiplied, which leaves the ratio of votes to
noise as it is. For other methods each record is there once, because two equal neighbors would be too good. Images whose
class is not known are labeled as well, so that a job's own images serve, of which a part was labeled by hand.

**The range** is for the next job. Let a be the mean share of right labels over the n divisions, s their standard
deviation and m the number of labeled images. With t of Student's distribution for n - 1 degrees

    a -+ t sqrt((1 + 1/n) s^2 + a (1 - a) / m).

The first term is a prediction interval: another division, other noise. The second is what a sample of m images leaves
open about all images like them; divisions of one sample do not show it. All of this holds for private images that are
like the labeled ones, and says nothing of others.

References:
    Hahn, Meeker 1991, Statistical Intervals, section 4.7 (prediction intervals).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as students_t
from sklearn.cluster import KMeans  # noqa: F401  # its threads are limited only once they are loaded
from threadpoolctl import threadpool_limits

from feature_store.query_selection import QuerySet, select_queries
from feature_store.students import Learners, NoisyAnswers
from feature_store.students.labeling import label_probabilities
from labeler.errors import InvalidSetting
from labeler.expectation import voting_records
from labeler.methods.reverse_knn import project
from labeler.randomness import seeded_source
from labeler.records import ModelStore, Records, RunnerContext
from labeler.tally import QueryBatch
from labeler.task import Task
from workers.learning.learner import Trainer
from workers.progress import ProgressCallback, silent
from workers.voting import NeighborIndexes

DRAWS: Final = 8
"""Divisions of the labeled images."""

SURE: Final = 0.9
"""Share of jobs that are to fall into the range."""

MOST_IMAGES: Final = 4000
"""Of more images a public sample is taken."""

MOST_RECORDS: Final = 20_000
"""Records that are drawn; of more, the votes are multiplied."""

FEWEST_OF_A_CLASS: Final = 2

REHEARSING: Final = "Rehearsing jobs"


@dataclass(frozen=True, eq=False)
class RehearsalImages:
    """Public images of which some have a known class.

    Attributes:
        features: int16, shape (n, dimension).
        labels: integers, shape (n,); -1 where unknown.
    """

    features: NDArray[np.int16]
    labels: NDArray[np.integer]

    @property
    def known(self) -> int:
        """The number of images whose class is known."""
        return int((self.labels >= 0).sum())

    def check(self, classes: Sequence[str]) -> None:
        """Refuse labels of which a half would miss a class.

        Raises:
            InvalidSetting: a class has fewer than two images.
        """
        counts = np.bincount(self.labels[self.labels >= 0], minlength=len(classes))
        few = [name for name, count in zip(classes, counts, strict=True) if count < FEWEST_OF_A_CLASS]
        if few:
            raise InvalidSetting(
                f"a rehearsal needs at least {FEWEST_OF_A_CLASS} labeled public images of each class, found fewer of "
                f"{', '.join(few[:5])}{' and others' * (len(few) > 5)}; label some more, or leave the labels out"
            )

    def sample(self, most: int, seed: int) -> RehearsalImages:
        """Return at most this many of them, those of a known class first."""
        if len(self.labels) <= most:
            return self
        rng = np.random.default_rng(seed)
        order = rng.permutation(len(self.labels))
        chosen = np.sort(order[np.argsort(self.labels[order] < 0, kind="stable")][:most])
        return RehearsalImages(self.features[chosen], self.labels[chosen])


def rehearse(
    tasks: Sequence[Task],
    images: RehearsalImages,
    *,
    records: int | None = None,
    draws: int = DRAWS,
    seed: int = 0,
    progress: ProgressCallback = silent,
) -> NDArray[np.float64]:
    """Return the share of right labels of each task in each division, shape (draws, tasks).

    Args:
        tasks: that differ in their noise and their number of questions alone.
        records: private records of all agents together; RECORDS_EACH of each agent if None.
        seed: public.
    """
    rng = np.random.default_rng(seed)
    learners = Learners(images.features, num_classes=tasks[0].num_classes)
    right = np.empty((draws, len(tasks)))
    with threadpool_limits(1):  # of small matrices: threads wait for each other longer than one works
        for draw in range(draws):
            progress(REHEARSING, draw, draws)
            right[draw] = _rehearse_once(tasks, learners, images.labels, records, rng, seed=draw)
        progress(REHEARSING, draws, draws)
    return right


def _rehearse_once(
    tasks: Sequence[Task],
    learners: Learners,
    labels: NDArray[np.integer],
    records: int | None,
    rng: np.random.Generator,
    *,
    seed: int,
) -> list[float]:
    """Return the share of right labels of each task in one division."""
    features = learners.features.astype(np.int16, copy=False)
    private = _half_of_each_class(labels, rng)
    scored = (labels >= 0) & ~private
    noise = rng.normal(size=(max(task.max_queries for task in tasks), tasks[0].num_classes))
    asked: dict[int, tuple[QuerySet, NDArray[np.float64]]] = {}
    right = []
    for task in tasks:
        count = task.max_queries
        if count not in asked:
            questions = select_queries(features, count=count, seed=seed)
            asked[count] = (
                questions,
                _votes(task, questions.features, features, labels, np.flatnonzero(private), records, rng),
            )
        questions, votes = asked[count]
        noisy = votes + task.total_sigma_votes * noise[:count]
        answers = NoisyAnswers.of(
            task,
            features=questions.features,
            labels=noisy.argmax(axis=1).astype(np.int16),
            noisy_votes=noisy if task.release == "histogram" else None,
            assignment=questions.assignment,
        )
        found = label_probabilities(answers, learners, rows=questions.rows).argmax(axis=1)
        right.append(float((found == labels)[scored].mean()))
    return right


def _half_of_each_class(labels: NDArray[np.integer], rng: np.random.Generator) -> NDArray[np.bool_]:
    """Return which images are private records: of the known ones every second of each class, in a random order."""
    order = rng.permutation(len(labels))
    by_class = order[np.argsort(labels[order], kind="stable")]
    by_class = by_class[labels[by_class] >= 0]
    half = np.zeros(len(labels), dtype=np.bool_)
    half[by_class[rng.integers(2) :: 2]] = True
    return half


def _votes(
    task: Task,
    questions: NDArray[np.int16],
    public: NDArray[np.int16],
    classes: NDArray[np.integer],
    private: NDArray[np.int64],
    records: int | None,
    rng: np.random.Generator,
) -> NDArray[np.float64]:
    """Return the sum of all agents' ballots without noise, in votes, shape (questions, classes)."""
    voting = voting_records(task, records)
    wanted = len(private) if voting is None else voting
    drawn = min(wanted, MOST_RECORDS)
    rows = rng.permutation(private) if voting is None else rng.choice(private, drawn)
    features, labels = public[rows], classes[rows].astype(np.int16)
    batch = QueryBatch(questions)
    total = np.zeros((len(questions), task.num_classes))
    for agent in range(task.agents):
        own = slice(agent, None, task.agents)
        held = Records(features[own], np.arange(len(labels[own])), labels[own], f"agent {agent}")
        if not len(held):
            continue
        neighbors = NeighborIndexes(dimension=features.shape[1], engine="numpy")
        source = partial(seeded_source, f"rehearsal {agent}".encode())
        context = RunnerContext(neighbors, ModelStore(), source, Trainer(), source)
        ballots = task.traits.ballots(task, batch, held, context) * (wanted / drawn)
        if task.ballot_radius is not None:
            ballots = (
                project(np.rint(ballots).astype(np.int64), radius=task.ballot_radius, scale=task.scale) / task.scale
            )
        total += ballots
    return total


def prediction_interval(
    right: NDArray[np.float64], *, labeled: int, sure: float = SURE
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the range of the next job's share of right labels, of each column; see the module.

    Args:
        right: shape (draws, tasks).
        labeled: m, the images whose class is known.
    """
    count, mean = len(right), right.mean(axis=0)
    reach = students_t.ppf((1 + sure) / 2, count - 1) * np.sqrt(
        (1 + 1 / count) * right.var(axis=0, ddof=1) + mean * (1 - mean) / labeled
    )
    return np.clip(mean - reach, 0.0, 1.0), np.clip(mean + reach, 0.0, 1.0)
