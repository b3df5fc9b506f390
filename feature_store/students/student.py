"""Students: learn from released answers, label any image, and save to one file without pickle.

A student multiplies what its members say of an image (`feature_store.students.members`):

    P(c | x) proportional to the product of P_m(c | x)^(share of m),      each at least LEAST.

Members err in different places, so what one of them is sure of and the others do not deny is right more often than
what any of them says. There are three kinds:

* **followed**: the mean of matched components and prototypes, once more along the nearest neighbors of the public
  images. It takes every class to be as many images and nearly in one place, so a class whose votes noise has drowned
  still gets the images that no other class claims. For noise about as large as the votes.
* **blended**: spreading and discriminants. For groups of images that hold several classes, as held-out votes show.
* **pooled**: these and, counted twice, `followed`. For votes that stand out of the noise.

`planned`, the default, lets the release decide between them. Whatever is chosen follows from public features and from
what was released: post-processing, at no price.

References:
    Hinton 2002, "Training products of experts by minimizing contrastive divergence" (products of experts).
    Leiner, Duan, Wasserman, Ramdas 2023, "Data fission: splitting a single data point" (held-out votes).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from feature_store.students.answers import (
    Forms,
    NoisyAnswers,
    Projection,
    cell_shares,
    check_features,
    fit_temperature,
    released_counts,
    sharpened,
    softmax,
    unit_rows,
)
from feature_store.students.members import (
    Discriminant,
    DiscriminantLearner,
    Fit,
    Matched,
    MatchedLearner,
    PrototypeLearner,
    Prototypes,
    Spreading,
    SpreadingLearner,
)
from labeler.errors import BadData, InvalidSetting
from labeler.rounds.effects import STUDENT_KINDS, StudentKind
from labeler.steady import steady_arrays

Member = Prototypes | Matched | Spreading | Discriminant
Learner = PrototypeLearner | MatchedLearner | SpreadingLearner | DiscriminantLearner

SHARES: Final[Mapping[str, Mapping[str, float]]] = {
    "followed": {"followed": 1.0},
    "blended": {"spreading": 1 / 2, "discriminant": 1 / 2},
    "pooled": {"followed": 1 / 2, "spreading": 1 / 4, "discriminant": 1 / 4},
}
"""The members of each kind of student, and how much each counts; every member is a kind by itself for experiments."""

LEAST: Final = 1e-6
"""Probability of a class that a member rules out: the others may overrule it, at a price."""

STANDS_OUT: Final = 10.0
"""Votes of a class, in deviations of one count's noise, from which on more than the steadiest student is worth its
noise."""

LEAST_GAIN: Final = 0.15
LEAST_STANDARD_ERRORS: Final = 3.0
"""What `blended` must gain on held-out votes: groups of images are then impure for certain."""

_LEARNERS: Final[Mapping[str, type[Learner]]] = {
    "prototypes": PrototypeLearner,
    "matched": MatchedLearner,
    "spreading": SpreadingLearner,
    "discriminant": DiscriminantLearner,
}
_MODELS: Final[Mapping[str, type[Member]]] = {
    "prototypes": Prototypes,
    "matched": Matched,
    "spreading": Spreading,
    "followed": Spreading,
    "discriminant": Discriminant,
}
Predict = Callable[[NoisyAnswers], NDArray[np.int64]]
"""Fits on answers and returns the predicted class of every public image."""

_BLOCK_ROWS: Final = 4096
_TAU: Final = 0.5
_FOLDS: Final = 5
DRAWS: Final = 6
_LEAST_QUERIES_PER_CLASS: Final = 5


@dataclass(frozen=True, eq=False)
class Student:
    """A fitted student.

    Attributes:
        kind: followed, pooled, blended, or the name of one member (never `planned`).
        members: fitted to the same release, by name, in the order of `SHARES`.
        contradicted: estimated share of held-out votes that contradict what `planned` compared; empty if it
            compared nothing.
        temperature: makes its probabilities confidences (feature_store.students.labeling).
    """

    kind: str
    members: Mapping[str, Member] = field(repr=False)  # thousands of numbers, where a notebook shows it
    contradicted: Mapping[str, float] = field(default_factory=dict)
    temperature: float = 1.0

    def predict_proba(self, features: NDArray[np.generic]) -> NDArray[np.float64]:
        """Class probabilities of features of the task's backbone, shape (n, num_classes), as sure as labels state."""
        said = [one.predict_proba(features) for one in self.members.values()]
        return sharpened(_product(said, list(shares_of(self.kind).values())), self.temperature)

    def predict(self, features: NDArray[np.generic]) -> NDArray[np.int64]:
        """Most probable class, shape (n,); the lowest among equals."""
        return np.asarray(self.predict_proba(features).argmax(axis=1), dtype=np.int64)

    @property
    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """Everything the student consists of, by name."""
        arrays: dict[str, NDArray[np.generic]] = {"temperature": np.array(self.temperature)}
        for name, member in self.members.items():
            axes = member.projection
            arrays |= {f"{name}.mean": axes.mean, f"{name}.components": axes.components}
            arrays |= {f"{name}.model_{key}": np.asarray(getattr(member, key)) for key in member.FORMS}
        return arrays

    @classmethod
    def of_arrays(cls, kind: str, arrays: Mapping[str, NDArray[Any]]) -> Student:
        """Return the student that gave `arrays`.

        Raises:
            KeyError, TypeError, ValueError: it is no student.
        """
        members = {}
        for name in shares_of(kind):
            axes, model = Projection(arrays[f"{name}.mean"], arrays[f"{name}.components"]), _MODELS[name]
            members[name] = model(axes, **{key: arrays[f"{name}.model_{key}"] for key in model.FORMS})
        return cls(kind, members, temperature=float(np.ravel(arrays["temperature"])[0]))


def forms_of(kind: str) -> Forms:
    """Return the type and the shape of each array of a kind of student, by name.

    Raises:
        KeyError: there is no such kind.
    """
    forms: dict[str, tuple[type[np.generic], tuple[str, ...]]] = {"temperature": (np.float64, ("one",))}
    for name in shares_of(kind):
        forms[f"{name}.mean"] = np.float64, ("dimension",)
        forms[f"{name}.components"] = np.float64, ("dimension", f"{name} reduced")
        for key, (dtype, sizes) in _MODELS[name].FORMS.items():
            forms[f"{name}.model_{key}"] = dtype, tuple(one if one == "classes" else f"{name} {one}" for one in sizes)
    return forms


def shares_of(kind: str) -> Mapping[str, float]:
    """Return the members of a kind and how much each counts; a member is a kind by itself.

    Raises:
        KeyError: there is no such kind.
    """
    if kind not in SHARES and kind not in _MODELS:
        raise KeyError(kind)
    return SHARES.get(kind, {kind: 1.0})


def _product(said: Sequence[NDArray[np.float64]], shares: Sequence[float]) -> NDArray[np.float64]:
    if len(said) == 1:
        return said[0]
    return softmax(np.average([np.log(np.maximum(one, LEAST)) for one in said], axis=0, weights=shares))


class Learners:
    """Everything students need of the public images, prepared once for any number of releases about them.

    Args:
        public_features: shape (num_images, dimension).
        num_classes: C.
        seed: same arguments, same students.
        on_fit: called before each student is fitted, for those who wait.

    Raises:
        BadData: NaN, or zero rows.
    """

    def __init__(
        self,
        public_features: NDArray[np.generic],
        *,
        num_classes: int,
        seed: int = 0,
        on_fit: Callable[[], None] = lambda: None,
    ) -> None:
        check_features(public_features, "public")
        self._on_fit = on_fit
        self.features, self.num_classes, self.seed = public_features, num_classes, seed
        self._made: dict[str, Learner] = {}

    def fit(self, kind: str, answers: NoisyAnswers, assignment: NDArray[np.int64]) -> dict[str, Fit[Member]]:
        """Return the fitted members of one kind of student, and what each says of the public images.

        Raises:
            BadData: no answered query stands for a public image.
        """
        if not answers.answered[assignment].any():
            raise BadData("the answered queries stand for no public image; check the assignment against the queries")
        self._on_fit()
        return {name: self._fit(name, answers, assignment) for name in shares_of(kind)}

    def _fit(self, name: str, answers: NoisyAnswers, assignment: NDArray[np.int64]) -> Fit[Member]:
        if name != "followed":
            return self._learner(name).learn(answers, assignment)
        said = self.steady(answers, assignment)
        flowing = self._learner("spreading")
        assert isinstance(flowing, SpreadingLearner)  # noqa: S101  # by the table
        return flowing.fit(said, np.ones(len(said)))

    def steady(self, answers: NoisyAnswers, assignment: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the mean of matched components and prototypes on the public images: what noise misleads least."""
        two = (self._learner(name).learn(answers, assignment) for name in ("matched", "prototypes"))
        return np.asarray(np.mean([one.public for one in two], axis=0))

    def labels(self, kind: str, answers: NoisyAnswers, assignment: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the class that a kind of student gives to each public image, shape (num_images,)."""
        said = [one.public for one in self.fit(kind, answers, assignment).values()]
        return np.asarray(_product(said, list(shares_of(kind).values())).argmax(axis=1))

    def _learner(self, name: str) -> Learner:
        if name not in self._made:
            self._made[name] = _LEARNERS[name](self.features, num_classes=self.num_classes, seed=self.seed)
        return self._made[name]


def fit_student(
    kind: StudentKind | str,
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
        kind: `planned` lets the release decide; else one of `SHARES` or one member; see the module.
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
    if num_classes != answers.num_classes:
        raise InvalidSetting(f"the answers have {answers.num_classes} classes, the student is asked for {num_classes}")
    return fit_and_say(kind, answers, learners or Learners(public_features, num_classes=num_classes, seed=seed))[0]


def fit_and_say(
    kind: StudentKind | str, answers: NoisyAnswers, learners: Learners
) -> tuple[Student, NDArray[np.float64]]:
    """Train a student on a release about prepared images, and return it with what it says of them; see `fit_student`.

    Returns:
        The student, and `predict_proba` of the public images, which are not projected and searched again.
    """
    if kind not in STUDENT_KINDS and kind not in _MODELS:
        raise InvalidSetting(f"unknown student {kind!r}; choose one of {', '.join(STUDENT_KINDS)}")
    assignment = assignment_of(answers, learners.features)
    compared: dict[str, float] = {}
    chosen = str(kind)
    if kind == "planned":
        chosen, compared = _planned(learners, answers, assignment, learners.seed)
    fits = learners.fit(chosen, answers, assignment)
    said = _product([one.public for one in fits.values()], list(shares_of(chosen).values()))
    # As its file will hold it: an evaluation refuses numbers that are not steady.
    arrays = steady_arrays(Student(chosen, {name: one.model for name, one in fits.items()}).arrays)
    student = replace(Student.of_arrays(chosen, arrays), contradicted=compared)
    # As `predict_proba` says it of a student without a temperature.
    student = replace(student, temperature=fit_temperature(sharpened(said, 1.0), answers, assignment))
    return student, sharpened(said, student.temperature)


def assignment_of(answers: NoisyAnswers, features: NDArray[np.generic]) -> NDArray[np.int64]:
    """Return the answer that stands for each public image, shape (num_images,): its own, else the most similar.

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


def _planned(
    learners: Learners, answers: NoisyAnswers, assignment: NDArray[np.int64], seed: int
) -> tuple[str, dict[str, float]]:
    """The kind that suits a release, and the share of held-out votes that contradict what was compared."""
    predictors: tuple[Predict, Predict] = (
        lambda seen: np.asarray(learners.steady(seen, assignment).argmax(axis=1)),
        lambda seen: learners.labels("blended", seen, assignment),
    )
    compare = _on_winners if answers.noisy_votes is None else _on_votes
    (steady, blended), standard_error = compare(predictors, answers, assignment, np.random.default_rng(seed))
    compared = {"steady": steady, "blended": blended} if math.isfinite(steady) else {}
    if steady - blended > max(LEAST_GAIN * steady, LEAST_STANDARD_ERRORS * standard_error):
        return "blended", compared
    if answers.noisy_votes is None:
        return "followed", compared
    votes = float(answers.noisy_votes[answers.answered].sum()) / answers.num_classes
    return ("pooled" if votes >= STANDS_OUT * answers.total_sigma_votes else "followed"), compared


def _on_votes(
    predictors: tuple[Predict, Predict],
    answers: NoisyAnswers,
    assignment: NDArray[np.integer],
    rng: np.random.Generator,
) -> tuple[tuple[float, float], float]:
    """Errors of two predictors on held-out votes, and the standard error of their difference.

    A noisy histogram with known noise splits into two independent ones (data fission). With z fresh noise of the same
    deviation, n + tau z and n - z / tau are independent. A student is fitted to the first, which is hardly noisier than
    the release, and judged on the second, unbiasedly and without leaving out any query. The mean over a few z takes
    most of the added noise away again.
    """
    sigma, votes = answers.total_sigma_votes, released_counts(answers)
    # Below the noise of a sum over all coordinates the total is unknown; a larger one only makes the choice cautious.
    total = max(float(votes.sum()), sigma * math.sqrt(votes.size), 1.0)
    agreed, shares = np.zeros(2), np.zeros((2, *votes.shape))
    for _ in range(DRAWS):
        extra = sigma * rng.standard_normal(votes.shape)
        seen = replace(answers, noisy_votes=votes + _TAU * extra, total_sigma_votes=sigma * math.hypot(1, _TAU))
        for number, predict in enumerate(predictors):
            share = cell_shares(predict(seen), assignment, votes.shape) * answers.answered[:, None]
            agreed[number] += float(((votes - extra / _TAU) * share).sum()) / DRAWS
            shares[number] += share / DRAWS
    first, second = np.maximum(0.0, 1.0 - agreed / total)
    apart = float(np.linalg.norm(shares[0] - shares[1]))
    return (float(first), float(second)), sigma * math.sqrt(1 + 1 / (_TAU**2 * DRAWS)) * apart / total


def _on_winners(
    predictors: tuple[Predict, Predict],
    answers: NoisyAnswers,
    assignment: NDArray[np.integer],
    rng: np.random.Generator,
) -> tuple[tuple[float, float], float]:
    """Errors of two predictors by cross-validation over queries.

    With few queries a fold would take a class away: then nothing is known.
    """
    answered = np.flatnonzero(answers.answered)
    if len(answered) < _LEAST_QUERIES_PER_CLASS * answers.num_classes:
        return (math.nan, math.nan), math.inf
    shape = (len(answers.labels), answers.num_classes)
    wrong = np.zeros((2, shape[0]))
    for held_out in np.array_split(rng.permutation(answered), _FOLDS):
        labels = answers.labels.copy()
        labels[held_out] = -1
        seen = replace(answers, labels=labels)
        for number, predict in enumerate(predictors):
            share = cell_shares(predict(seen), assignment, shape)
            wrong[number][held_out] = 1.0 - share[held_out, answers.labels[held_out]]
    first, second = wrong[:, answered]
    return (float(first.mean()), float(second.mean())), float((first - second).std(ddof=1)) / math.sqrt(len(answered))
