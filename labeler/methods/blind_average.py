"""DP-Helmet (Kirschte et al. 2022): an agent contributes the weights of a linear model, and their mean is released.

A model is sent like votes. The questions are the unit vectors of feature space, at which the scores of a linear model
are its weights. The unit of `Task.sigma_votes` is the largest change by one record. So sigma is the noise multiplier
and the instance-level price is 1/sigma-GDP up to rounding, for every learner.

`labeler.descent` and `workers.learning.linear` find the weights. With the learner "means" they are sums of records by
class, along public axes: `labeler.methods.blind_average`.

**Sensitivities of model release**: how far one record can move a regularized linear model, with proofs.

Throughout, features have norm at most c. The loss of a record z at weights w has a gradient of norm at most L and is
smooth with constant b.

    F_D(w) = (1/m) sum_{z in D} loss(w; z) + (lambda/2) |w|^2,        m = max(|D|, n).

Here n is public, "the least number of records". Dividing by n if there are fewer makes F total, so that no agent is
refused, or seen to be refused, for the size of a private set.

**Fact 1, one record moves the gradient of F by at most 2L/n**, at every w. Replacing a record: 2L/m <= 2L/n. Adding
one to k >= n records: sum(gradients) (1/k - 1/(k+1)) + gradient/(k+1), at most L/(k+1) + L/(k+1) < 2L/n. To k < n
records: L/n. So one bound serves both neighboring relations, at every size. (If the sum is always divided by n, one
record added or removed changes it by L/n. That needs a public bound on |D|: `labeler.descent`, "With a public
denominator".)

**Fact 2, a gradient step is a contraction.** For 0 < a <= 2/(b + 2 lambda) the step T(w) = w - a grad F(w) satisfies
|T(w) - T(v)| <= (1 - a lambda) |w - v|. Proof: F - (lambda/2)|.|^2 is convex and b-smooth, so its gradient g is
co-coercive: <g(w) - g(v), w - v> >= |g(w) - g(v)|^2 / b. We have
T(w) - T(v) = (1 - a lambda)(w - v) - a (g(w) - g(v)). So the squared norm is at most
(1 - a lambda)^2 |w - v|^2 - a (2 (1 - a lambda)/b - a) |g(w) - g(v)|^2. The last term is not positive when
a (b + 2 lambda) <= 2.

**Fact 3, the losses.** Softmax: the gradient is (p - e_y) x^T, and |p - e_y|^2 = (1 - p_y)^2 + sum_{j != y} p_j^2 <=
2 (1 - p_y)^2, so L = sqrt(2) c for every number of classes. Its Hessian in the scores, diag(p) - p p^T, has no
eigenvalue above 1/2 (Gershgorin: p_i (1 - p_i) + p_i (1 - p_i) <= 1/2), so b = c^2/2. Huberized hinge of one class: a
slope in [-1, 0] that changes at a rate of at most 1/(2h), so L = c, b = c^2/(2h). Logistic, one column of weights: a
slope in [-1, 1] that changes at a rate of at most 1/4, so L = c, b = c^2/4. All K classes at once, as one vector of
squared norm sum |w_k|^2: L = sqrt(K) c, attained by the hinge if every margin is violated. b is the same, as the
classes do not interact.

**Fact 4, a short softmax model has short gradients.** If |w| <= R, two scores of a row differ by at most
g = sqrt(2) R c, as |w_i - w_j| <= sqrt(2) R. So 1 - p_y <= q = (K-1)/(K-1 + e^-g), and every
p_j <= m = 1/(1 + (K-1) e^-g). With sum_{j != y} p_j^2 <= (1 - p_y) min(1 - p_y, m) the gradient has norm at most
L = c sqrt(q^2 + q min(q, m)). That is sqrt(1 - 1/K) c at R = 0, which is exact, and never more than sqrt(2) c.

**Fact 5, short logistic models have short gradients.** The slope of ln(1 + exp(-y f.x)) at a score f.x has the
magnitude 1 / (1 + exp(y f.x)). If |f_k| <= R in each class, |f_k.x| <= R c, so it is at most q = 1 / (1 + e^-(R c)) and
L = sqrt(K) q c. That is sqrt(K) c / 2 at R = 0, which is exact, and never more than sqrt(K) c. The projection keeps
every f_k within R. Descent keeps it within r c / lambda, r = max_records / n or 1, as well: the classes do not
interact, so the bound on a norm in `labeler.descent` holds for each class, with the longest gradient c of one.

**Class means as a model**: how far one record moves an agent's sums along public axes, with the proof.

    record (x, y)  --public axes-->  z, |z| <= 1;  phi(x) = (sqrt(15) z, 1) / 4  -->  g(x, y) = phi(x) tensor e_y
    agent: u = sum of g over its records, projected onto the ball of radius R  -->  one `VectorSum`  -->  class means.

Nothing is trained and nothing is divided by a private count: the noisy sum is opened. The last number of phi counts the
records of each class, so classes of unequal size are read as such. A reader names the class of the largest posterior
(`labeler.linear_model`). That is post-processing, as are the labels and the student refined on public images from them.

**Fact 1, g depends on its record alone, to the last bit.** A (x - m) is a row of whole numbers, exact in any order
(`labeler.linear_model`). Its squares are added one axis after the other, number by number, so that neither the order
nor the size of a block of rows matters (`workers.learning.linear`). The root and the division are correctly
rounded. Then phi is cut, towards zero, to whole 2^-30ths. Sums of whole numbers are exact in every order.

**Fact 2, |g| <= 1 + (k + 4) 2^-52** for k axes. The sum of squares is off by at most a relative (k + 1) 2^-53, the root
by half of that and its own rounding. The division, the factor sqrt(15) / 4 and the product add one each. 1/4 is exact.
Cutting towards zero lengthens nothing.

**Fact 3, one record added or removed moves u by g**: by at most 1, whatever the others are and however many. A cap on
the records of a person may replace a record, which moves u by g - g': at most 2. (Opposite rows of one class attain
sqrt(15) / 2, as their count stays.)

**Fact 4, the ball moves no two vectors further apart**: it is convex, and the nearest point of a convex set is a
1-Lipschitz function. In double precision the result is within R (D + 10) 2^-53 of that point, D its number of
coordinates. Reading whole numbers as doubles turns and lengthens u by a relative 2^-53, which the ball makes
2 * 2^-53 R at most. A norm of D numbers is off by a relative (D + 3) 2^-53; then come a quotient and a product. So

    sensitivity  =  r (1 + (k + 4) 2^-52) + R (D + 10) 2^-52,       r = 1, or 2 if a cap may replace.

It is never more than the distance of two vectors of the ball. **Agent level**: a vector of norm at most R becomes zero.
If every site keeps at most `max_records`, R is at most that. **Person level**: `labeler.methods.sensitivity`.

At instance level the radius moves no price; it bounds the effect of an agent that lies, and the cost of a whole agent.
The ball shortens the sum of an agent with more than R records that agree, and never turns it.

References:
    Wahdany et al. 2025 (DPPL-Mean) sum records as they are, Mehta et al. 2023 divide by a covariance; both are measured
    in docs/math/rivals.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, cast, get_args

from labeler.descent import MOST_WEIGHTS, Descent
from labeler.errors import InvalidSetting, PrivacyRefusal
from labeler.methods.sensitivity import BoundedNumbers, Method, kept_bound, most_trained, training_of
from labeler.noise import VectorSum
from labeler.records import axes_of
from labeler.setting import Training

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from labeler.records import Records, RunnerContext
    from labeler.tally import QueryBatch
    from labeler.task import Task


COUNTED: Final = 0.25
"""The constant of a record of class means, which counts it."""

ALONG: Final = math.sqrt(1 - COUNTED**2)
"""Length of the rest, so that a record has length one."""


def model_terms(task: Task) -> LinearTerms | MeanTerms:
    """Return how agents find their weights, and how far one record moves them.

    Raises:
        InvalidSetting: as for `linear_terms`.
    """
    training = training_of(task)
    if training.learner != "means" or training.axes is None:
        return linear_terms(task)
    _check_rows(task, training)
    return MeanTerms(
        num_classes=task.num_classes,
        axes=training.axes,
        radius=training.radius,
        max_records=kept_bound(task),
        may_replace=task.a_record_may_be_replaced,
    )


def linear_terms(task: Task) -> LinearTerms:
    """Return how agents train, and how far one record moves the result.

    Raises:
        InvalidSetting: the rows are not those of the public axes, the model has more weights than rounding is bounded
            for, or terms are out of bounds.
    """
    training = training_of(task)
    if training.learner == "means":
        raise InvalidSetting("learner means trains no linear model, so it has no terms of one")
    _check_rows(task, training)
    return LinearTerms(
        learner=cast(Learner, training.learner),
        num_classes=task.num_classes,
        regularisation=training.regularisation,
        clip_norm=training.clip_norm,
        radius=training.radius,
        iterations=training.iterations,
        min_records=training.min_records,
        max_records=kept_bound(task),
    )


def _check_rows(task: Task, training: Training) -> None:
    if training.axes is not None and task.max_queries != training.axes + 1:
        raise InvalidSetting(
            f"with training.axes {training.axes} the rows of the model are one per axis and one for the constant; make "
            f"a task with max_queries = {training.axes + 1}, found {task.max_queries}"
        )
    if task.max_queries * task.num_classes > MOST_WEIGHTS:
        raise InvalidSetting(
            f"a model of {task.max_queries} rows and {task.num_classes} classes has more than {MOST_WEIGHTS} "
            "weights, for which rounding is bounded; use a backbone of fewer numbers"
        )


def weight_sum(task: Task) -> VectorSum:
    """Return the one sum of the task, in units of the sensitivity s of one agent's weights.

    An agent's contribution is w / s, with s from `LinearTerms.sensitivity` or `MeanTerms.sensitivity`, which prove
    it. The sum is one `VectorSum` with sensitivity 1 and largest norm R / s, noise shares from every agent or from
    the talliers. At agent level the vector of norm at most R / s becomes zero. At person level at most m records leave
    one after the other, see `labeler.methods.sensitivity`.
    """
    terms = model_terms(task)
    return VectorSum(
        dimension=task.max_queries * task.num_classes,
        largest_norm=terms.largest_norm / terms.sensitivity,
        sensitivity=1.0,
        sigma=task.sigma_votes,
        agents=task.agents,
        colluding_agents=task.colluding_agents,
        max_dropouts=task.max_dropouts,
        dishonest_talliers=task.dishonest_talliers,
    )


Learner = Literal["softmax", "svm", "logistic"]

HUBER_WIDTH = 0.1
"""h: the hinge is rounded for margins in (1 - h, 1 + h). The value of Kirschte et al."""


def softmax_lipschitz(*, clip_norm: float, radius: float, num_classes: int) -> float:
    """Return L of fact 4: the longest gradient of a softmax loss at weights of norm at most R; sqrt(2) c for large R.

    Args:
        clip_norm: c, norm of a row.
        radius: R, of the whole model.
        num_classes: K.
    """
    check_positive(clip_norm=clip_norm, radius=radius)
    _check_classes(num_classes)
    shrink = (num_classes - 1) * math.exp(-math.sqrt(2) * radius * clip_norm)
    wrong, likeliest = (num_classes - 1) / (num_classes - 1 + shrink / (num_classes - 1)), 1 / (1 + shrink)
    return clip_norm * math.sqrt(wrong**2 + wrong * min(wrong, likeliest))


@dataclass(frozen=True)
class LinearTerms:
    """A linear learner as a mechanism: everything public that its weights, and their sensitivity, depend on.

    Rows x become [x', s], x' = x cut to norm r, s = c/10 and r^2 + s^2 = c^2: their norm is at most c (`bias_feature`,
    `feature_norm`). From w = 0, `iterations` times,

        w <- project(w - a grad F_D(w)),        a = 2 / (b + 2 lambda),

    on all records at once. project cuts the whole model (softmax) or the model of each class (the others) to norm R.
    With `max_records`, F_D is always divided by n, and a = 2 / (b max_records/n + 2 lambda). This is the projected SGD
    of Kirschte et al. with the whole local set as its batch. No record has a place in an order, so only D and these
    terms decide the weights, and the number of steps does not depend on D.
    (Their line "R f / |f|" would lengthen short models, which is no projection, and no contraction: short ones stay
    unchanged here.)

    **Sensitivity, instance level: 2L / (n lambda)**, one record added, removed or replaced, converged or not. L is from
    fact 4 (softmax, at most sqrt(2) c), sqrt(K) c (all K classes of the svm) or fact 5 (all K of the logistic, at most
    sqrt(K) c). `labeler.descent` has the proof, and
    the part of rounding. It is the bound of the exact minimizer, and never larger than the paper's 2 (L + R lambda)/(n
    lambda). The paper's second summand bounds a change of the regularizer that does not happen. It is attained up to a
    few percent by the svm (`tests/workers/learning/test_linear.py`).

    **With `max_records`, a public bound that every site keeps: L / (n lambda)**, one record added or removed, by the
    same module's proof. It is for tasks in which no cap makes one record replace another.

    **User level**: |w| <= min(R, r L/lambda) for softmax, min(sqrt(K) R, r L/lambda) for the others;
    r = max_records / n, 1 without that bound.

    Attributes:
        learner: "softmax", multinomial logistic regression; one class against the rest: "svm", a huberized hinge, or
            "logistic", ln(1 + exp(-y f.x)).
        num_classes: K, from the task, never from labels.
        regularisation: lambda.
        clip_norm: c.
        radius: R, of the whole softmax model, or of each class of the others.
        iterations: number of steps.
        min_records: n; a user with fewer records takes part as above, with a smaller model.
        max_records: n_max, the most records a user may have, as a public fact; None if there is none.

    Raises:
        InvalidSetting: a value is out of bounds, or rounding would cost more than a hundredth of the bound.

    References:
        Kirschte et al., "Distributed DP-Helmet", Algorithms 1 and 3, Lemma 2, Theorem 11, Corollary 10.
    """

    learner: Learner
    num_classes: int
    regularisation: float
    clip_norm: float
    radius: float
    iterations: int
    min_records: int
    max_records: int | None = None

    def __post_init__(self) -> None:
        if self.learner not in get_args(Learner):
            raise InvalidSetting(f"a linear learner is one of {', '.join(get_args(Learner))}, found {self.learner!r}")
        check_positive(regularisation=self.regularisation, clip_norm=self.clip_norm, radius=self.radius)
        check_count(iterations=self.iterations, min_records=self.min_records)
        if self.max_records is not None:
            check_count(max_records=self.max_records)
        _check_classes(self.num_classes)
        _ = self.descent  # Refuses numbers for which double precision proves nothing.

    @property
    def bias_feature(self) -> float:
        """Return s: the constant that carries the intercept; the last feature, and so the last row of weights."""
        return self.clip_norm / 10

    @property
    def feature_norm(self) -> float:
        """Return r, the largest norm of a record's own features; longer ones are cut."""
        return math.sqrt(self.clip_norm**2 - self.bias_feature**2)

    @property
    def lipschitz(self) -> float:
        """Return L of the whole model at every point that descent can reach, facts 3 to 5."""
        if self.learner == "svm":
            return math.sqrt(self.num_classes) * self.clip_norm
        # Descent with gradients of norm L stays within r L / lambda, for every R: of a softmax, or of one class.
        crowding = 1.0 if self.max_records is None else self.max_records / self.min_records
        steepest = self.clip_norm * (math.sqrt(2) if self.learner == "softmax" else 1.0)
        reached = min(self.radius, crowding * steepest / self.regularisation)
        if self.learner == "logistic":
            return math.sqrt(self.num_classes) * self.clip_norm / (1 + math.exp(-reached * self.clip_norm))
        return softmax_lipschitz(clip_norm=self.clip_norm, radius=reached, num_classes=self.num_classes)

    @property
    def smoothness(self) -> float:
        """Return b, of the loss without the regularizer, fact 3."""
        return self.clip_norm**2 / {"softmax": 2, "svm": 2 * HUBER_WIDTH, "logistic": 4}[self.learner]

    @property
    def descent(self) -> Descent:
        """Return the training as a mechanism."""
        return Descent(
            lipschitz=self.lipschitz,
            smoothness=self.smoothness,
            regularisation=self.regularisation,
            least=self.min_records,
            columns=self.num_classes,
            iterations=self.iterations,
            radius=self.radius,
            balls=1 if self.learner == "softmax" else self.num_classes,
            most=self.max_records,
        )

    @property
    def learning_rate(self) -> float:
        """Return a, the longest step that fact 2 allows."""
        return self.descent.learning_rate

    @property
    def largest_norm(self) -> float:
        """Return a bound on the norm of the whole model, rounding included; the agent-level sensitivity."""
        return self.descent.largest_norm

    @property
    def sensitivity(self) -> float:
        """Return a bound on the distance of one user's weights on neighboring sets, instance level, rounding included.

        One record added, removed or, without `max_records`, replaced; for any number of records, also below
        `min_records`.
        """
        return self.descent.sensitivity

    @property
    def rounding_margin(self) -> float:
        """Return the share of the bound that covers double precision."""
        return self.descent.rounding_margin


def check_positive(**values: float) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise InvalidSetting(f"{name} must be a positive finite number, found {value!r}")


def _check_classes(num_classes: int) -> None:
    check_count(num_classes=num_classes)
    if num_classes < 2:
        raise InvalidSetting("a classifier tells at least two classes apart, found num_classes 1")


def check_count(**values: int) -> None:
    for name, value in values.items():
        if type(value) is not int or value < 1:
            raise InvalidSetting(f"{name} must be a whole number of at least 1, found {value!r}")


FINE = 2**30
"""Whole numbers per 1 of a coordinate of phi: fewer than 2^33 records add up within 64 bits."""


def ball_rounding(radius: float, numbers: int) -> float:
    """Return how far a vector projected onto a ball in double precision may be from the exact one; fact 4."""
    return radius * (numbers + 10) * 2.0**-53


@dataclass(frozen=True)
class MeanTerms:
    """Class sums as a mechanism; see the module.

    Attributes:
        num_classes: K, from the task, never from labels.
        axes: k, public axes along which features are measured.
        radius: R, the longest sum of an agent, records.
        max_records: the most records an agent may have, as a public fact; None if there is none.
        may_replace: whether a cap may let one record replace another.

    Raises:
        InvalidSetting: a value is out of bounds.
    """

    num_classes: int
    axes: int
    radius: float
    max_records: int | None = None
    may_replace: bool = False

    def __post_init__(self) -> None:
        if self.num_classes < 2 or self.axes < 1 or not 0 < self.radius < math.inf:
            raise InvalidSetting("class means have at least two classes, one axis and a positive finite radius")
        if self.max_records is not None and self.max_records < 1:
            raise InvalidSetting(f"max_records must be at least 1, found {self.max_records}")

    @property
    def numbers(self) -> int:
        """Return D: one row of K per axis, and one that counts records, for the center that is asked about."""
        return (self.axes + 1) * self.num_classes

    @property
    def feature_norm(self) -> float:
        """Return the length to which a mapped row is cut when it is scored: no row is longer."""
        return 1.0

    @property
    def bias_feature(self) -> float:
        """Return 1: a class has a share of the records, hence an intercept."""
        return 1.0

    @property
    def reach(self) -> float:
        """Return R, the radius onto which an agent's sums are projected."""
        return self.radius if self.max_records is None else min(self.radius, float(self.max_records))

    @property
    def largest_norm(self) -> float:
        """Return a bound on the norm of an agent's vector, rounding included; the agent-level sensitivity."""
        return self.reach + ball_rounding(self.reach, self.numbers)

    @property
    def sensitivity(self) -> float:
        """Return a bound on the distance of an agent's vectors on neighboring sets, one record, rounding included."""
        one = (2 if self.may_replace else 1) * (1 + (self.axes + 4) * 2.0**-52)
        return min(one + 2 * ball_rounding(self.reach, self.numbers), 2 * self.largest_norm)


def ballots(task: Task, batch: QueryBatch, records: Records, context: RunnerContext) -> NDArray[np.int64]:
    """Return the agent's weights on the grid, in units of their sensitivity, shape (rows asked about, num_classes).

    Trained once per batch and version of the records.
    """

    def train() -> NDArray[np.int64]:
        terms, axes = model_terms(task), axes_of(task, batch.features)
        if not isinstance(terms, MeanTerms):
            weights = context.learner.weights(records.trainable(most_trained(task)), terms=terms, axes=axes)
        elif axes is None:
            raise InvalidSetting("class means are along public axes, and the task has none")
        else:
            # All records: without a kept bound none are cut, since a cut would let one record replace another.
            weights = context.learner.class_sums(records.trainable(kept_bound(task)), terms=terms, axes=axes)
        return weight_sum(task).quantize(weights / terms.sensitivity)

    answer = context.models.once(records.version, f"blind-average {task.digest} {batch.digest}", train)
    return answer.reshape(len(batch), task.num_classes)


def check_dimension(task: Task, dimension: int) -> None:
    """Refuse a model whose rows do not match the number of values of a feature.

    Raises:
        PrivacyRefusal: they do not match.
    """
    axes = training_of(task).axes
    if axes is not None and axes > dimension:
        raise PrivacyRefusal(
            f"the task looks along {axes} axes (training.axes) at features that have {dimension} numbers"
        )
    if axes is None and task.rows != dimension + 1:
        raise PrivacyRefusal(
            f"a {task.method} task over features of dimension {dimension} has one row more than that, found "
            f"{task.rows}; make a task with max_queries = {(dimension + 1) * task.steps}"
        )


def one_model(task: Task) -> str:
    """Return what one record changes in its agent's model, in words: the smaller of two bounds if sites keep one."""
    most = kept_bound(task)
    if most is not None:
        return (
            "one record moves a model by at most L / (n lambda): it comes or goes and replaces none, since every site "
            f"keeps at most {most} records, as it declared when it embedded them"
        )
    why = (
        "records_per_person may let one record replace another"
        if training_of(task).max_records is not None
        else "no bound on records is kept; where every site keeps one (training.max_records), half the noise would do"
    )
    return f"one record moves a model by at most 2 L / (n lambda), as if it replaced another: {why}"


def one_record(task: Task) -> str:
    """Return what one record changes, in words."""
    if training_of(task).learner != "means":
        return one_model(task)
    if task.a_record_may_be_replaced:
        return "one record moves an agent's sums by at most 2: records_per_person may let it replace another"
    return "one record moves an agent's sums by at most 1: it comes or goes and replaces none"


METHOD: Final = Method(
    "DP-Helmet",
    "the weights of a linear model trained on its records",
    sums="weights",
    ballots=ballots,
    stated=BoundedNumbers.of_vectors(
        weight_sum,
        "the weights of an agent are longer than its learner can make them, which this task's price does not cover",
    ),
    takes=frozenset({"training.axes"}),
    learners=(*get_args(Learner), "means"),
    single_round=True,
    labels="images",
    check_room=check_dimension,
    is_attacked=True,
    one_record=one_record,
)
