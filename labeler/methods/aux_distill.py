"""FedAUXfdp (Hoech et al. 2022): an agent answers with soft labels of two heads that carry its own noise.

The unit of `Task.sigma_votes` is the largest change by one record. Each agent adds all the noise to its own two heads
(labeler.methods.aux_distill), so that sigma^-2 is the sum of both heads' mu^2. Its later answers are a function
of the noisy heads and of public queries. They are shared and summed without noise, which is post-processing.

`workers.learning.private_heads` fits the heads and queries them.

**The local mechanism.** A client releases two linear heads once, with its own noise.

    own records, public negatives --fit--> (head, certainty head) --grid, discrete Gaussian--> all later answers.

Both heads come from a fixed number of gradient steps on a regularized, averaged logistic loss over features that are
cut to a public norm. All later answers of the client, to any party and in any number, are computed from the noisy heads
alone: post-processing. No other party's noise is needed (h = 1), so the guarantee needs neither talliers nor honest
neighbors.

**Setting.** c bounds the norm of a record's features with their constant. n >= 1 is a public number of records
(`min_records`), m is the number of public negatives, and C the number of public classes.

    J(B) = (1/N) sum_{(x, y) private} -log softmax(B x)_y + (lambda/2) |B|^2,      N = max(|D|, n)
    K(b) = (1/(N+m)) (sum_{x private} log(1 + exp(-b.x)) + sum_{x negative} log(1 + exp(b.x))) + (lambda'/2) |b|^2

J gives the head. K gives the certainty head, which distinguishes the client's records from public images of no client.

A client with fewer than n records still divides by n. It must not be refused instead: a refusal would distinguish n
records from n - 1. B has C rows whatever classes the client holds, and its noise depends on nothing private.

**Sensitivity of the head: s = 2 sqrt(2) c / (lambda n)**, one record added, removed or replaced, for any number of
records and of steps. `labeler.descent` is the mechanism and the proof, with L = sqrt(2) c and b = c^2/2
(`labeler.methods.blind_average`, fact 3). No client is refused because an optimizer did not converge, which would
reveal records. Heads that have not converged are as well protected, and a little less accurate.

**Sensitivity of the scores: s' = 2 c / (lambda' (n + m)).** Neighbors differ in private records only. The negatives
are additional public examples, counted in the mean and in its least number n + m. A private record's gradient is
-x / (1 + exp(b.x)), of norm at most L = c. So is a negative's, x / (1 + exp(-b.x)); b = c^2/4.

**With `max_records`**, n_max, a public bound that every site keeps, both sums are divided by n and n + m whatever |D|
is. One record added or removed moves the head by at most **sqrt(2) c / (lambda n)** and the scores by at most
**c / (lambda' (n + m))**: half the noise. `labeler.descent` has the proof ("With a public denominator"). Negatives are
public rows, so that the scores' r is (n_max + m) / (n + m), the head's n_max / n.

Steps are made until a head is within a millionth of its length of the minimizer, and at most MOST_STEPS: a function of
c, lambda and the loss alone. Rows of features may round differently when a record is gone, by FEATURE_ROUNDING of c.
This and the rounding of the steps are in `Descent.rounding_margin`, which is part of either sensitivity. Terms for
which it would be more than a hundredth are refused before anybody pays.

**Noise and price.** The noise is sigma_head s for the head and sigma_scores s' for the scores. In units of this noise
the two heads are one vector that one record moves by at most mu = (sigma_head^-2 + sigma_scores^-2)^(1/2). It is
released as the `VectorSum` of one agent with noise of standard deviation 1: rounding to the grid, discrete Gaussian
noise and the certified bound are that module's. So the composition of both releases is exact: mu^2 adds, while the
paper adds epsilons.

**Without scores** (`score_share` 0) the vector is the head alone, mu = 1 / sigma_head. No certainty head is fitted,
released or paid for. The certainty of every client at every image is the constant 1, which no record moves. The
proof and the event are those of the head. This is federated distillation (FedD), the baseline of Hoech et al. With a
share of 1 sigma_head would be infinite: labels come from the head alone, so they would be noise, or not private
without it. No such task is defined.

**A whole client.** |B| <= sqrt(2) c / lambda and |b| <= c / lambda', each times its r (`labeler.descent`). These bound
the vector that becomes zero with the client, the agent level: finite, and large.

References:
    Hoech, Rischke, Mueller, Samek 2022, "FedAUXfdp", Theorem 1 (2 sqrt(C) / (lambda n), c = 1) and algorithm 1.
    Chaudhuri, Monteleoni, Sarwate 2011, Corollary 8. Sattler, Korjakow, Rischke, Samek 2021, "FedAUX".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from labeler.accounting.events import IntegerSum
from labeler.accounting.integer import epsilon_bound
from labeler.descent import MOST_PUBLIC_ROWS, MOST_WEIGHTS, Descent, steps_to_converge
from labeler.errors import InvalidSetting, PrivacyRefusal
from labeler.methods.blind_average import one_model
from labeler.methods.sensitivity import BoundedNumbers, Method, kept_bound, most_trained, training_of
from labeler.noise import VectorSum
from labeler.randomness import ByteSource
from labeler.setting import Level

if TYPE_CHECKING:
    from labeler.records import Learner, Records, RunnerContext
    from labeler.tally import QueryBatch
    from labeler.task import Task


NEGATIVES_EVERY = 5
"""One query in five is a public negative example of the certainty scores, as in the paper of FedAUXfdp."""


def negatives(task: Task) -> range:
    """Return the task's queries that are public negative examples."""
    return range(0, task.max_queries, NEGATIVES_EVERY)


def head_terms(task: Task) -> LocalHeadTerms:
    """Return the two heads' terms: sigma^-2 is their mu^2 together, of which the scores take `score_share`; at 0 there
    are none.

    Every fifth query is a public negative.
    """
    training = training_of(task)
    sigma_head, sigma_scores = divided_noise(task.sigma_votes, training.score_share)
    return LocalHeadTerms(
        num_classes=task.num_classes,
        head_dimension=training.dimension + 1,
        score_dimension=training.dimension + 1,
        min_records=training.min_records,
        num_negatives=len(negatives(task)),
        sigma_head=sigma_head,
        sigma_scores=sigma_scores,
        head_regularisation=training.regularisation,
        score_regularisation=training.regularisation,
        clip_norm=training.clip_norm,
        max_records=kept_bound(task),
    )


def divided_noise(sigma: float, score_share: float) -> tuple[float, float | None]:
    """Return (sigma_head, sigma_scores), whose sigma^-2 add up to that of `sigma`; no scores where their share is 0."""
    return sigma / math.sqrt(1 - score_share), sigma / math.sqrt(score_share) if score_share else None


def both_heads(task: Task) -> VectorSum:
    """Return the noisy vector that is priced: one agent's two heads, as `labeler.methods.aux_distill` proves."""
    return head_terms(task).mechanism


def check_soft_votes(numbers: NDArray[np.int64], task: Task) -> None:
    """Refuse numbers that are not soft labels; the message does not tell them."""
    # Entries first: only bounded entries can be summed without wrapping around.
    if numbers.min() < 0 or numbers.max() > task.scale or numbers.sum(axis=1).max() > task.scale:
        raise PrivacyRefusal("soft votes of one agent lie between 0 and 1, and add up to at most 1 per query")


Weights = NDArray[np.float64]

FEATURE_ROUNDING = 2.0**-32
"""Fraction of c by which rows computed together may affect a row of features (see `workers.learning.private_heads`)."""

MOST_STEPS = 2000
"""Enough to converge for lambda down to c^2/570; below, a head has not converged."""


@dataclass(frozen=True)
class LocalHeadTerms:
    """Everything public that two released heads, their noise and their price depend on; the module is the definition.

    Attributes:
        num_classes: C, all public classes; a client fits all of them whatever it holds.
        head_dimension: numbers per record that the head sees, with the constant.
        score_dimension: numbers per record that the certainty head sees, with the constant.
        min_records: n, the denominator of the mean loss if a client has fewer records.
        num_negatives: m, public negatives of the certainty head.
        sigma_head: noise on each weight of the head, in units of the head's sensitivity.
        sigma_scores: the same for the certainty head. None: no certainty head is fitted or released.
        head_regularisation: lambda.
        score_regularisation: lambda'.
        clip_norm: c.
        max_records: n_max, the most records a client may have, as a public fact; None if there is none.

    Raises:
        InvalidSetting: a number is out of bounds, or there are more weights or negatives than rounding is bounded for.
        UnsafeGrid: no grid fits these numbers.
    """

    num_classes: int
    head_dimension: int
    score_dimension: int
    min_records: int
    num_negatives: int
    sigma_head: float
    sigma_scores: float | None
    head_regularisation: float = 0.01
    score_regularisation: float = 0.01
    clip_norm: float = 1.0
    max_records: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_classes", "head_dimension", "score_dimension", "min_records", "num_negatives"):
            least = 2 if name == "num_classes" else 1
            if type(value := getattr(self, name)) is not int or value < least:
                raise InvalidSetting(
                    f"{name} of local heads must be a whole number of at least {least}, found {value!r}"
                )
        for name in (
            "sigma_head",
            "sigma_scores",
            "head_regularisation",
            "score_regularisation",
            "clip_norm",
        ):
            number = getattr(self, name)
            if not (number is None and name == "sigma_scores") and not 0 < number < math.inf:
                raise InvalidSetting(f"{name} of local heads must be positive and finite, found {number!r}")
        if max(self.num_classes * self.head_dimension, self.score_dimension) > MOST_WEIGHTS:
            raise InvalidSetting(
                f"local heads of {self.num_classes} classes and {self.head_dimension} numbers have more than "
                f"{MOST_WEIGHTS} weights, for which rounding is bounded; look at fewer axes"
            )
        if self.num_negatives > MOST_PUBLIC_ROWS:
            raise InvalidSetting(
                f"rounding is bounded for at most {MOST_PUBLIC_ROWS} public negatives, found {self.num_negatives}"
            )
        if self.max_records is not None and (type(self.max_records) is not int or self.max_records < 1):
            raise InvalidSetting(f"max_records of local heads must be a whole number, found {self.max_records!r}")
        _ = self.mechanism  # Refuses numbers that no grid fits.

    @property
    def head_descent(self) -> Descent:
        """Return the training of the head."""
        return Descent(
            lipschitz=math.sqrt(2) * self.clip_norm,
            smoothness=self.clip_norm**2 / 2,
            regularisation=self.head_regularisation,
            least=self.min_records,
            columns=self.num_classes,
            iterations=self._steps(self.clip_norm**2 / 2, self.head_regularisation, public=0),
            feature_rounding=FEATURE_ROUNDING,
            most=self.max_records,
        )

    @property
    def score_descent(self) -> Descent:
        """Return the training of the certainty head."""
        return Descent(
            lipschitz=self.clip_norm,
            smoothness=self.clip_norm**2 / 4,
            regularisation=self.score_regularisation,
            least=self.min_records + self.num_negatives,
            columns=1,
            iterations=self._steps(self.clip_norm**2 / 4, self.score_regularisation, public=self.num_negatives),
            feature_rounding=FEATURE_ROUNDING,
            most=None if self.max_records is None else self.max_records + self.num_negatives,
        )

    def _steps(self, smoothness: float, regularisation: float, *, public: int) -> int:
        most = self.min_records if self.max_records is None else self.max_records
        crowding = (most + public) / (self.min_records + public)
        return steps_to_converge(crowding * smoothness, regularisation, most=MOST_STEPS)

    @property
    def head_sensitivity(self) -> float:
        """Return s with rounding: L2 distance between heads on neighboring data."""
        return self.head_descent.sensitivity

    @property
    def score_sensitivity(self) -> float:
        """Return s' with rounding: L2 distance between certainty heads on neighboring data."""
        return self.score_descent.sensitivity

    @property
    def head_noise(self) -> float:
        """Return the standard deviation of the noise on one weight of the head."""
        return self.sigma_head * self.head_sensitivity

    @property
    def score_noise(self) -> float:
        """Return the standard deviation of the noise on one weight of the certainty head; 0 if there is none."""
        return 0.0 if self.sigma_scores is None else self.sigma_scores * self.score_sensitivity

    @property
    def mechanism(self) -> VectorSum:
        """Return both heads, each in units of its noise, as the sum of one agent."""
        head_radius = self.head_descent.largest_norm
        size, radius, mu = self.num_classes * self.head_dimension, head_radius / self.head_noise, 1 / self.sigma_head
        if self.sigma_scores is not None:
            score_radius = self.score_descent.largest_norm
            size += self.score_dimension
            radius, mu = math.hypot(radius, score_radius / self.score_noise), math.hypot(mu, 1 / self.sigma_scores)
        # If noise hides more than any head holds, two heads still are at most twice the radius apart.
        return VectorSum(dimension=size, largest_norm=radius, sensitivity=min(mu, 2 * radius), sigma=1.0, agents=1)

    def event(self, level: Level = "instance") -> IntegerSum:
        """Return the release of both heads, once, as an event; later answers from them add none."""
        return self.mechanism.event(level)

    def epsilon(self, delta: float, level: Level = "instance") -> float:
        """Return the certified epsilon of the release of both heads at this delta."""
        return epsilon_bound(self.event(level), delta)

    def as_in_paper_epsilon(self, delta: float) -> float:
        """Return epsilon of the same noise by the paper's route, with half of delta for each head.

        sqrt(2 log(1.25 / delta)) / sigma for sensitivities 2 sqrt(C) c / (lambda n) and 2 c / (lambda' (n + m)),
        added up. Only for comparison with `epsilon`: the calibration is no bound above epsilon 1.
        """
        calibration = math.sqrt(2 * math.log(2.5 / delta))
        head = 2 * math.sqrt(self.num_classes) * self.clip_norm / (self.head_regularisation * self.min_records)
        total = calibration * head / self.head_noise
        return total if self.sigma_scores is None else total + calibration / self.sigma_scores

    def release(self, head: Weights, scores: Weights | None, *, source: ByteSource) -> tuple[Weights, Weights | None]:
        """Round both heads to the grid, add noise once, and return the publishable heads.

        Args:
            head: float64, shape (num_classes, head_dimension), as `head_descent` defines it.
            scores: float64, shape (score_dimension,), likewise; None exactly where the terms have no certainty head.
            source: the client's secret source. One source must never serve two different pairs of heads.

        Returns:
            Noisy head and certainty head, shapes as given.

        Raises:
            InvalidSetting: a shape is not the terms'.
            PrivacyRefusal: a head is not finite, or longer than descent can make it: it was made in another way.
        """
        if head.shape != (self.num_classes, self.head_dimension):
            raise InvalidSetting(
                f"these terms release a head of shape {(self.num_classes, self.head_dimension)}, found {head.shape}"
            )
        if (scores is None) != (self.sigma_scores is None) or (
            scores is not None and scores.size != self.score_dimension
        ):
            raise InvalidSetting("these terms and the certainty head that was given do not fit each other")
        parts = [head.ravel() / self.head_noise]
        if scores is not None:
            parts.append(scores.ravel() / self.score_noise)
        mechanism = self.mechanism
        noisy = mechanism.open(mechanism.contribution(np.concatenate(parts), source=source))
        split = head.size
        noisy_scores = None if scores is None else noisy[split:] * self.score_noise
        return (noisy[:split] * self.head_noise).reshape(head.shape), noisy_scores


def ballots(task: Task, batch: QueryBatch, records: Records, context: RunnerContext) -> NDArray[np.int64]:
    """Return certainty times class probability of each query on the grid: at least 0, and at most 1 (the scale) in a
    row.

    The agent fits both heads to its records, adds noise once, and then uses the noisy ones only. Every fifth query is
    a public negative, from which the certainty score learns to recognize kinds of images that the agent has. Without
    scores every certainty is 1. Rounding cannot lift a row above the scale: C <= 2^17 probabilities add up to
    1 + C 2^-52 at most, whose part above the scale of 2^24 is less than one.

    Returns:
        Grid units, int64, shape (num_queries, num_classes). The agent's noise is included.
    """

    def answer() -> NDArray[np.int64]:
        votes = context.learner.soft_votes(
            records.trainable(most_trained(task)), batch.features, terms=head_terms(task), source=context.local_noise()
        )
        # Rounded down, so that a row never adds up to more than one.
        return np.asarray(np.floor(votes * task.scale), dtype=np.int64)

    return context.models.once(records.version, f"aux-distill {task.digest} {batch.digest}", answer)


def check_dimension(task: Task, dimension: int) -> None:
    """Refuse a task that uses more axes than a feature has numbers.

    Raises:
        PrivacyRefusal: the task does.
    """
    if training_of(task).dimension > dimension:
        raise PrivacyRefusal(
            f"the task looks at {training_of(task).dimension} axes (training.dimension) of features that have "
            f"{dimension} numbers"
        )


def check_negatives(task: Task, batch: QueryBatch, learner: Learner) -> None:
    """Refuse queries from which no public map can be made; called before the charge, with public numbers alone.

    Raises:
        InvalidSetting: they are all the same, or a map of them would magnify rounding errors.
    """
    learner.check_negatives(batch.features, head_terms(task))


METHOD: Final = Method(
    "FedAUXfdp",
    "soft labels of a model with noise of its own, weighted by how certain it may be",
    sums="soft labels",
    ballots=ballots,
    # A soft vote of one is a whole row of an agent that is certain.
    stated=BoundedNumbers(both_heads, lambda task: task.scale, check_soft_votes),
    takes=frozenset({"training.dimension"}),
    learners=("softmax",),
    single_round=True,
    has_local_noise=True,
    negatives=negatives,
    check_room=check_dimension,
    check_questions=check_negatives,
    is_attacked=True,
    one_record=one_model,
)
