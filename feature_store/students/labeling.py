"""Every public image labeled from a release, and forecasts of how well that will go from public images alone.

The one way from answers to labels of images: `labeler run`, `labeler student` and the service all take it, so that the
same release gives the same labels. Post-processing: it reads public features and released answers, and costs no
privacy.

**Divided counts** say how many labels are right, from counts that the student has not seen. Let z be normal noise of
the stated deviation sigma, drawn here. Then n + z and n - z are independent given the votes, since both are normal and
their covariance sigma^2 - sigma^2 is 0 (Rasines and Young 2023; Leiner et al. 2023, "data fission"). The same student
learns from n + z. Let a_qc be the share of class c among the labels that it gives to the s_q images of question q. The
votes there are t_q, no fewer than noise lets one tell. Then r is the share of images whose label a vote of their group
agrees with.

    t_q = max(sum_c (n + z)_qc, LEAST_DEVIATIONS sigma sqrt(2 C)).      w_q = s_q / t_q.
    r = sum_q w_q sum_c a_qc (n - z)_qc / sum_q w_q sum_c (n - z)_qc.

Of the denominator, too, no less is taken than LEAST_DEVIATIONS of its noise. Weights are a function of n + z, so the
noise in n - z is new: numerator and denominator are unbiased, and no overfitting raises them. A group counts by its
images and not by its votes, which fall where private records lie. Where votes at a question fall on classes as its
images do, independently of the student, r is the share of labels that are right. A student that also tells apart the
images of one question is right more often; votes of another kind of images (another camera) agree less often than
labels are right. So r bounds loosely, and a student is believed unless r contradicts it by more than its standard
error. With residuals e_q = w_q sum_c (a_qc - r) (n - z)_qc, the mean over draws of z, that is se = sqrt(sum_q e_q^2) /
denominator, the linearized error of a ratio (Cochran 1977, section 6.4); it holds the noise and the differences between
groups. Then

    p_T(c | x) proportional to p(c | x)^(1 / T)

is stated (`sharpened`). T is 1 where the mean of max_c p(c | x) lies in [r - SURELY_MORE se, r + min(se, MOST_OVER)],
else such that it is the nearer end. To raise takes more evidence than to lower. The order of classes stays, so
labels stay. If questions abstain by their noisy counts, those that are left have larger noise, and r comes out a little
too high. Public features, the release and stated noise are all that enters: post-processing, nothing is charged.

**A model** that was released shows no votes, so nothing contradicts a student of its labels. Public images tell how far
classes overlap. Let z be the images along their MIXTURE_AXES leading axes, at most C - 1 (as many as hold C means). A
mixture of C normal laws with one covariance is fitted to them by MIXTURE_ROUNDS rounds of expectation-maximization
(Dempster, Laird and Rubin 1977; McLachlan and Peel 2000, chapter 3) from the student's labels:

    mu_c = sum_i g_ic z_i / n_c,      n_c = sum_i g_ic,      W = mean_i z_i z_i^T - sum_c n_c mu_c mu_c^T / N,
    g_ic proportional to n_c exp(z_i^T W^-1 mu_c - mu_c^T W^-1 mu_c / 2).

The mean of g over the images is stated, of each image half at the student's label and half at the model's, since one of
them is wrong where they disagree. It is a **guess**: groups need not be classes, and a model that noise or wrong labels
made may follow groups. Public images do not tell that; a private evaluation does (`labeler evaluate`). All of it
follows from public features and the release: post-processing.

**Expectation.** A rehearsal without any private record finds how many labels a job can get right. The public images
are cut into as many natural groups as there are classes, which play the classes. Private records like them vote, noise
of the task's size is added, and a student learns from it and labels all images. The share that falls into its own group
is the expectation where the classes are the natural groups of the images. They seldom are exactly, so it is an upper
estimate. The lower one lets a quarter of the votes land anywhere, as where private images are of another kind
(labeler.expectation). Public and simulated throughout: nothing is charged.

**Stability**: how alike two draws of the noise label the images. Where noise is nearly as large as the votes, one draw
takes a whole class for another and the next does not. A confidence, a mean over draws, does not tell such a job from
one in which each label is a little doubtful. So a few further draws are simulated, and the range of the share of labels
that two of them agree on is stated. After a job (`stability`) the labels found are the truth, and each image brings
lambda votes of its class on average, the same votes in every draw. Lambda is read off the release: with b_qc the images
of question q that are labeled c, and e_qc = b_qc - mean_c b_qc,

    lambda = <e, n> / <e, b>.

Votes that fall on all classes alike drop out of it, and it weighs the cells where votes should be. So its noise is far
below that of the sum of all counts. It is a little too large where noise chose the labels. Before a job (`expect_on`)
the rehearsals are the draws.

**Radius** (`Task.ballot_radius`). At agent level the noise is R / mu votes. Below the length of an agent's centered
ballot (`labeler.methods.reverse_knn`) the radius R says nothing: votes and noise shrink together, and every agent
counts alike. Above it noise grows and votes do not. At instance level the noise is worth the more the larger R is. So R
is half of the length that a ballot has in rehearsal: as large as it may be and still, in all likelihood, below the
length of every agent's.

In rehearsal an agent holds public images, drawn at random, and the natural groups of the public images, as many as
there are classes, are their classes. Real records lie less well in groups, which makes ballots a little shorter: the
half is for them. The caller says how many records an agent holds; nothing private is read.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isqrt
from typing import Final

import numpy as np
from numpy.typing import NDArray

from feature_store.index.build import build_index, processor_engine
from feature_store.query_selection import Progress, QuerySet, select_queries, silent
from feature_store.students.answers import (
    NoisyAnswers,
    asked_posterior,
    cell_shares,
    fit_projection,
    majority_share,
    released_counts,
    sharpened,
    softmax,
    unit_rows,
    vote_agreement,
)
from feature_store.students.members import RIDGE
from feature_store.students.student import DRAWS, Learners, Student, assignment_of, fit_and_say
from labeler.errors import InvalidSetting
from labeler.expectation import ALIKE, UNLIKE, Expectation, expect, voting_records
from labeler.methods.reverse_knn import reverse_knn_ballots
from labeler.rounds.effects import Strategy
from labeler.task import Task

Label = Callable[[NoisyAnswers], NDArray[np.float64]]
"""Labels the public images from a release: probabilities, shape (num_images, num_classes)."""

LEAST_DEVIATIONS: Final = 3.0
"""Votes, in deviations of the noise in their sum, from which on they are told from noise; fewer count as many."""

SURELY_MORE: Final = 2.0
"""Standard errors by which counts must contradict a student before it is believed more; one makes it believed less."""

MOST_OVER: Final = 0.05
"""The most that may be stated beyond the share r that counts support, however large its standard error is."""

MOST_SURE: Final = 0.98
"""Mean confidence above which none is raised."""

DIVISIONS: Final = 3
"""Of the noise; of its draws a mean is taken."""

MIXTURE_AXES: Final = 64
MIXTURE_ROUNDS: Final = 5
"""Few, so that the mixture stays near the labels it began with."""

REHEARSALS: Final = 3
REDRAWS: Final = 5
"""Draws of the noise that are compared, each with each, for the stability of labels."""

LABELING: Final = "Labeling images"
_COLDEST, _HOTTEST = 0.1, 1e6
_HALVINGS: Final = 60


@dataclass(frozen=True, eq=False)
class LabeledImages:
    """The labels of every public image, given a release.

    Attributes:
        student: which learnt from it.
        probabilities: float64, shape (num_images, num_classes), rows sum to one. The label is the largest, and that
            probability its confidence: as the student says it, if votes that it has not seen do not contradict it.
        asked: shape (num_images,), which images were questions themselves, with an answer.
        answers: the release.
        stability: the least and the largest share of labels that two draws of the noise agree on; None where no counts
            with noise were released.
    """

    student: Student
    probabilities: NDArray[np.float64]
    asked: NDArray[np.bool_]
    answers: NoisyAnswers
    stability: tuple[float, float] | None = None


def label_images(
    answers: NoisyAnswers,
    public_features: NDArray[np.generic],
    *,
    rows: NDArray[np.int64] | None,
    kind: str = "planned",
    seed: int = 0,
    progress: Progress = silent,
) -> LabeledImages:
    """Train a student, and label every public image with it and with what was answered about the image itself.

    Args:
        answers: the release.
        public_features: shape (num_images, dimension).
        rows: shape (num_answers,), the image that each answer is about, or -1 for the center of a cluster; None where a
            model was asked for, which is about no image.
        kind, seed: see `fit_student`.
        progress: called for every student that is fitted; there may be fewer than the total that it states.

    Raises:
        BadData: features do not fit the answers.
    """
    fitted, most = itertools.count(), 1 + (DRAWS if kind == "planned" else 0) + DIVISIONS + REDRAWS

    def on_fit() -> None:
        progress(LABELING, min(next(fitted), most), most)

    learners = Learners(public_features, num_classes=answers.num_classes, seed=seed, on_fit=on_fit)
    student, said = fit_and_say(kind, answers, learners)
    asked = np.zeros(len(public_features), dtype=np.bool_)
    if rows is not None:
        asked[rows[(rows >= 0) & answers.answered]] = True
    assignment = assignment_of(answers, public_features)
    probabilities = _say(said, answers, assignment, rows)

    def label(release: NoisyAnswers) -> NDArray[np.float64]:
        return _say(fit_and_say(student.kind, release, learners)[1], release, assignment, rows)

    own, inferred, stable = 1.0, 1.0, None
    if answers.noisy_votes is not None and answers.is_counted:
        stable = stability(label, answers, probabilities.argmax(axis=1), assignment, seed=seed)
        own, inferred = temperatures(label, answers, probabilities, assignment, (asked, ~asked), seed=seed)
    elif rows is None:
        readings = probabilities.argmax(axis=1), answers.labels[assignment]
        right = told_apart(public_features, readings, answers.num_classes)
        own = inferred = _into(probabilities, right, right)
    probabilities[asked] = sharpened(probabilities[asked], own)
    probabilities[~asked] = sharpened(probabilities[~asked], inferred)
    progress(LABELING, most, most)
    # Of other images the student says no more than of those that were not asked about.
    cooled = student.temperature * (inferred if not asked.all() else own)
    return LabeledImages(replace(student, temperature=cooled), probabilities, asked, answers, stable)


def label_probabilities(
    answers: NoisyAnswers, learners: Learners, *, rows: NDArray[np.int64], kind: str = "planned"
) -> NDArray[np.float64]:
    """Return `label_images(...).probabilities` before unseen counts change the confidences; for many releases.

    Args:
        learners: of the public images, prepared once.
        rows: as for `label_images`.
    """
    said = fit_and_say(kind, answers, learners)[1]
    return _say(said, answers, assignment_of(answers, learners.features), rows)


def _say(
    probabilities: NDArray[np.float64],
    answers: NoisyAnswers,
    assignment: NDArray[np.int64],
    rows: NDArray[np.int64] | None,
) -> NDArray[np.float64]:
    """Return a student's probabilities of every image, together with the answers about images themselves."""
    own = np.zeros(0, dtype=np.int64) if rows is None else np.flatnonzero((rows >= 0) & answers.answered)
    if rows is not None and answers.noisy_votes is not None and answers.is_counted and len(own):
        images, counts = rows[own], answers.noisy_votes[own]
        trust = vote_agreement(probabilities.argmax(axis=1), answers, assignment)
        agreement = max(trust, majority_share(counts, answers.total_sigma_votes))
        # A student that is wrong as often as votes contradict it may not overrule what was answered about the image.
        doubted = trust * probabilities[images] + (1 - trust) / answers.num_classes
        probabilities[images] = asked_posterior(doubted, counts, answers, agreement)
    return probabilities


def temperatures(
    label: Label,
    answers: NoisyAnswers,
    probabilities: NDArray[np.float64],
    assignment: NDArray[np.integer],
    parts: tuple[NDArray[np.bool_], ...],
    *,
    seed: int,
) -> tuple[float, ...]:
    """Return the temperature of each part of the labels: not 1 where unseen counts contradict it; see the module.

    Args:
        label: the whole way from a release to probabilities.
        answers: the release, with noisy votes.
        probabilities: shape (num_images, num_classes), what `label` gave for it.
        assignment: shape (num_images,), the answer that stands for each image.
        parts: masks of shape (num_images,); each gets its own temperature, 1 where it is empty.
        seed: of the noise that is drawn here.
    """
    if answers.total_sigma_votes == 0:
        return (1.0,) * len(parts)
    right, errors = unseen_agreement(label, answers, assignment, parts, seed=seed)
    low, high = right - SURELY_MORE * errors, right + np.minimum(errors, MOST_OVER)
    return tuple(_into(probabilities[part], low[number], high[number]) for number, part in enumerate(parts))


def unseen_agreement(
    label: Label,
    answers: NoisyAnswers,
    assignment: NDArray[np.integer],
    parts: tuple[NDArray[np.bool_], ...],
    *,
    seed: int,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the share r of each part's labels with which unseen votes agree, and its standard error; see the module.

    Args:
        label, answers, assignment, parts, seed: as for `temperatures`; sigma is more than 0.

    Returns:
        Two arrays of shape (num_parts,); r may lie outside of 0 to 1.
    """
    counts, sigma, rng = released_counts(answers), answers.total_sigma_votes, np.random.default_rng(seed)
    queries, classes = counts.shape
    sizes = np.array([np.bincount(assignment[part], minlength=queries) for part in parts]) * answers.answered
    agreeing, votes, squares = np.zeros((len(parts), queries)), np.zeros((len(parts), queries)), np.zeros(len(parts))
    for _ in range(DIVISIONS):
        noise = rng.normal(0.0, sigma, counts.shape)
        learned = label(_heard(answers, counts + noise, math.sqrt(2) * sigma)).argmax(axis=1)
        told = np.maximum((counts + noise).sum(axis=1), LEAST_DEVIATIONS * sigma * math.sqrt(2 * classes))
        shares = np.array([cell_shares(learned[part], assignment[part], counts.shape) for part in parts])
        weights, unseen = sizes / told / DIVISIONS, counts - noise
        agreeing += weights * (shares * unseen).sum(axis=2)
        votes += weights * unseen.sum(axis=1)
        squares += DIVISIONS * (weights**2).sum(axis=1)
    # The noise in n is in every division; that drawn here is not.
    least = LEAST_DEVIATIONS * sigma * np.sqrt(classes * squares * (1 + 1 / DIVISIONS))
    total = np.maximum(np.maximum(votes.sum(axis=1), least), np.finfo(float).tiny)
    right = agreeing.sum(axis=1) / total
    return right, np.sqrt(((agreeing - right[:, None] * votes) ** 2).sum(axis=1)) / total


def told_apart(features: NDArray[np.generic], readings: tuple[NDArray[np.integer], ...], num_classes: int) -> float:
    """Return the share of labels that is right if classes are the groups of the images; see the module, "A model".

    Args:
        features: shape (num_images, dimension).
        readings: labels of every image, each of shape (num_images,), at which the mean is taken; groups begin with the
            first.
        num_classes: C.
    """
    axes = fit_projection(features, dimensions=min(num_classes - 1, MIXTURE_AXES), seed=0)
    rows = (unit_rows(features) - axes.mean) @ axes.components
    around = rows.T @ rows / len(rows)
    around += (RIDGE * np.trace(around) / len(around) + np.finfo(float).tiny) * np.eye(len(around))
    groups: NDArray[np.float64] = np.eye(num_classes)[readings[0]]
    for _ in range(1 + MIXTURE_ROUNDS):
        sizes = groups.sum(axis=0)
        means = (groups.T @ rows) / np.maximum(sizes, np.finfo(float).tiny)[:, None]
        within = around - (means * sizes[:, None]).T @ means / len(rows)
        weights = np.linalg.solve(within, means.T)
        heights = np.log(np.maximum(sizes, np.finfo(float).tiny)) - 0.5 * np.einsum("cd,dc->c", means, weights)
        groups = softmax(rows @ weights + heights)
    return float(np.mean([groups[np.arange(len(rows)), reading] for reading in readings]))


def _heard(answers: NoisyAnswers, noisy_votes: NDArray[np.float64], sigma: float) -> NoisyAnswers:
    """Return the same questions with other counts."""
    labels = np.where(answers.answered, noisy_votes.argmax(axis=1), -1)
    return replace(answers, noisy_votes=noisy_votes, labels=labels, total_sigma_votes=sigma)


def _into(probabilities: NDArray[np.float64], low: float, high: float) -> float:
    """The temperature nearest to 1 at which the mean confidence lies between two shares; the upper one counts more."""
    if not len(probabilities):
        return 1.0
    stated = float(probabilities.max(axis=1).mean())
    right = min(max(stated, min(low, MOST_SURE)), max(high, 1 / probabilities.shape[1]))
    if right == stated:
        return 1.0
    coldest, hottest = math.log(_COLDEST), math.log(_HOTTEST)
    for _ in range(_HALVINGS):
        middle = (coldest + hottest) / 2
        is_too_sure = bool(sharpened(probabilities, math.exp(middle)).max(axis=1).mean() > right)
        coldest, hottest = (middle, hottest) if is_too_sure else (coldest, middle)
    return math.exp(hottest)


def stability(
    label: Label, answers: NoisyAnswers, labels: NDArray[np.integer], assignment: NDArray[np.integer], *, seed: int
) -> tuple[float, float] | None:
    """Return the least and the largest share of labels that two draws of the noise agree on; see the module.

    Args:
        label: the whole way from a release to probabilities.
        answers: the release, with noisy votes.
        labels: shape (num_images,), found from it.
        assignment: shape (num_images,), the answer that stands for each image.
        seed: of the noise that is drawn here.

    Returns:
        None where there is no noise.
    """
    assert answers.noisy_votes is not None  # noqa: S101  # the caller looks
    sigma, answered = answers.total_sigma_votes, answers.answered
    if sigma == 0:
        return None
    cells = np.zeros(answers.noisy_votes.shape)
    np.add.at(cells, (assignment, labels), 1.0)
    if math.isfinite(answers.most_votes):  # each question gets as many votes, however many images it stands for
        cells /= np.maximum(cells.sum(axis=1, keepdims=True), 1.0)
    apart = (cells - cells.mean(axis=1, keepdims=True))[answered]
    of_each = float((apart * answers.noisy_votes[answered]).sum()) / max(float((apart * cells[answered]).sum()), 1e-9)
    rng = np.random.default_rng(seed)
    votes = rng.poisson(max(of_each, 0.0) * cells)
    noisy = [votes + rng.normal(0.0, sigma, votes.shape) for _ in range(REDRAWS)]
    return _agreement([label(_heard(answers, one, sigma)).argmax(axis=1) for one in noisy])


def _agreement(draws: Sequence[NDArray[np.integer]]) -> tuple[float, float]:
    """Return the least and the largest share of labels on which two of the draws agree."""
    shares = [round(float((one == other).mean()), 3) for one, other in itertools.combinations(draws, 2)]
    return min(shares), max(shares)


RADIUS_REHEARSALS: Final = 5
MOST_IMAGES: Final = 5000
"""Of more images a public sample is taken."""


def expect_on(task: Task, features: NDArray[np.int16], *, records: int | None = None, seed: int = 0) -> Expectation:
    """Return how many labels a job of a task can be expected to get right on these images, all questions asked.

    Args:
        features: int16, shape (num_images, dimension), of the public images.
        records: see `labeler.expectation.expect`.
        seed: public.

    Raises:
        InvalidSetting: there are fewer images than questions or classes.
    """
    known = expect(task, records=records)
    if known.low is None:
        return known
    if len(features) < max(task.max_queries, task.num_classes + 1):
        raise InvalidSetting(
            f"{len(features)} public images are too few for {task.max_queries} questions, {task.num_classes} classes"
        )
    rng = np.random.default_rng(seed)
    if len(features) > max(MOST_IMAGES, task.max_queries):
        features = features[np.sort(rng.choice(len(features), max(MOST_IMAGES, task.max_queries), replace=False))]
    groups, questions = _divided(features, classes=task.num_classes, questions=task.max_queries, seed=seed)
    learners = Learners(features, num_classes=task.num_classes)
    unlike, alike = (
        [_rehearse(task, learners, groups, questions, share, records, rng) for _ in range(REHEARSALS)]
        for share in (UNLIKE, ALIKE)
    )
    low, high = (float((np.array(draws) == groups).mean()) for draws in (unlike, alike))
    # Natural groups need not be the classes, which may be told apart better. So geometry alone only takes away.
    low, high = min(low * UNLIKE / ALIKE, high, known.low), max(high * ALIKE, known.high or 0.0)
    stable = _agreement(unlike)[0], _agreement(alike)[1]
    return replace(known, low=round(low, 3), high=round(high, 3), stability=stable)


def _divided(
    features: NDArray[np.int16], *, classes: int, questions: int, seed: int
) -> tuple[NDArray[np.int64], QuerySet]:
    """Return the natural group of each public image, which plays its class, and the questions of a rehearsal."""
    groups = select_queries(features, strategy="clustered", count=classes, seed=seed).assignment
    strategy: Strategy = "all" if questions == len(features) else "clustered"
    return groups, select_queries(features, strategy=strategy, count=questions, seed=seed)


def _rehearse(
    task: Task,
    learners: Learners,
    groups: NDArray[np.int64],
    questions: QuerySet,
    share: float,
    records: int | None,
    rng: np.random.Generator,
) -> NDArray[np.integer]:
    """Return the group into which a student puts each image, after one draw of votes and noise."""
    cells = np.zeros((len(questions), task.num_classes))
    np.add.at(cells, (questions.assignment, groups), 1.0)
    assumed = voting_records(task, records)
    each = task.traits.votes(task, len(questions), assumed or 0)
    sizes = np.maximum(cells.sum(axis=1, keepdims=True), 1.0)
    # Where records choose, more of them meet where more images lie; else each question gets its votes.
    votes = each * (cells / sizes) * (1.0 if assumed is None else sizes / sizes.mean())
    smeared = share * votes + (1 - share) * votes.sum(axis=1, keepdims=True) / task.num_classes
    noisy = rng.poisson(smeared) + rng.normal(0.0, task.total_sigma_votes, smeared.shape)
    answers = NoisyAnswers.of(
        task,
        features=questions.features,
        labels=noisy.argmax(axis=1).astype(np.int16),
        noisy_votes=noisy,
        assignment=questions.assignment,
    )
    return np.asarray(label_probabilities(answers, learners, rows=questions.rows).argmax(axis=1))


def propose_radius(
    features: NDArray[np.int16], *, questions: int, num_classes: int, k: int, records: int, seed: int = 0
) -> int:
    """R, in whole votes, at least 1.

    Args:
        features: int16, shape (num_images, dimension), of the public images.
        questions: Q; clusters of them, or all images where it is their number.
        num_classes: C.
        k: questions at which a record votes.
        records: of one agent, as far as anybody may know; rather too few than too many.
        seed: public.

    Raises:
        InvalidSetting: there are fewer images than questions or classes, or no record.
    """
    if len(features) < max(questions, num_classes) or records < 1:
        raise InvalidSetting(
            f"a radius is proposed from at least one record and {max(questions, num_classes)} public images (as many "
            f"as questions and classes), found {records} and {len(features)}"
        )
    groups, asked = _divided(features, classes=num_classes, questions=questions, seed=seed)
    index = build_index(asked.features, np.arange(questions), engine=processor_engine())
    rng = np.random.default_rng(seed)
    squares = []
    for _ in range(RADIUS_REHEARSALS):
        own = rng.integers(0, len(features), records)
        nearest = index.search(features[own], min(k, questions)).record_ids
        ballot = reverse_knn_ballots(nearest, groups[own], num_queries=questions, num_classes=num_classes)
        centred = num_classes * ballot - ballot.sum(axis=1, keepdims=True)
        squares.append(int((centred**2).sum()))
    return max(1, isqrt(sorted(squares)[RADIUS_REHEARSALS // 2] // (2 * num_classes) ** 2))
