"""How far one record can move a regularised linear model, with proofs: the sensitivities of model release.

Throughout, features have norm at most c, the loss of a record z at weights w has a gradient of norm at most L, is
smooth with constant b, and

    F_D(w) = (1/m) sum_{z in D} loss(w; z) + (lambda/2) |w|^2,        m = max(|D|, n),

with a public n, "the least number of records": dividing by n where there are fewer makes F total, so that nobody has
to be refused, or be seen to be refused, for the size of a private set.

**Fact 1, one record moves the gradient of F by at most 2L/n**, at every w. Replacing a record: 2L/m <= 2L/n. Adding
one to k >= n records: sum(gradients) (1/k - 1/(k+1)) + gradient/(k+1), at most L/(k+1) + L/(k+1) < 2L/n. To k < n
records: L/n. So one bound serves both neighbouring relations, at every size. (Where the sum is always divided by n, one
record added or removed changes it by L/n; which needs a public bound on |D|: `labeler.descent`, "With a public
denominator".)

**Fact 2, a gradient step is a contraction.** For 0 < a <= 2/(b + 2 lambda) the step T(w) = w - a grad F(w) satisfies
|T(w) - T(v)| <= (1 - a lambda) |w - v|. Proof: F - (lambda/2)|.|^2 is convex and b-smooth, so its gradient g is
co-coercive: <g(w) - g(v), w - v> >= |g(w) - g(v)|^2 / b. With T(w) - T(v) = (1 - a lambda)(w - v) - a (g(w) - g(v)),
the squared norm is at most (1 - a lambda)^2 |w - v|^2 - a (2 (1 - a lambda)/b - a) |g(w) - g(v)|^2, whose last term
is not positive when a (b + 2 lambda) <= 2.

**Fact 3, the losses.** Softmax: the gradient is (p - e_y) x^T, and |p - e_y|^2 = (1 - p_y)^2 + sum_{j != y} p_j^2 <=
2 (1 - p_y)^2, so L = sqrt(2) c for every number of classes; its Hessian in the scores, diag(p) - p p^T, has no
eigenvalue above 1/2 (Gershgorin: p_i (1 - p_i) + p_i (1 - p_i) <= 1/2), so b = c^2/2. Huberised hinge of one class: a
slope in [-1, 0] that changes at a rate of at most 1/(2h), so L = c, b = c^2/(2h). Logistic, one column of weights: a
slope in [-1, 1] that changes at a rate of at most 1/4, so L = c, b = c^2/4. All K classes at once, as one
vector of squared norm sum |w_k|^2: L = sqrt(K) c, attained where every margin is violated, and the same b, as the
classes do not meet.

**Fact 4, a short softmax model has short gradients.** If |w| <= R, two scores of a row differ by at most
g = sqrt(2) R c, as |w_i - w_j| <= sqrt(2) R. So 1 - p_y <= q = (K-1)/(K-1 + e^-g), every p_j <= m = 1/(1 + (K-1) e^-g),
and with sum_{j != y} p_j^2 <= (1 - p_y) min(1 - p_y, m) the gradient has norm at most L = c sqrt(q^2 + q min(q, m)):
sqrt(1 - 1/K) c at R = 0, which is exact, and never more than sqrt(2) c.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from labeler.descent import Descent
from labeler.errors import InvalidSetting

Learner = Literal["softmax", "svm"]

HUBER_WIDTH = 0.1
"""h: the hinge is rounded for margins in (1 - h, 1 + h). The value of Kirschte et al."""


def softmax_lipschitz(*, clip_norm: float, radius: float, num_classes: int) -> float:
    """L of fact 4: the longest gradient of a softmax loss at weights of norm at most R; sqrt(2) c for large R.

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

    (with `max_records`, F_D always divided by n, and a = 2 / (b max_records/n + 2 lambda)) on all records at once,
    where project cuts the whole model (softmax) or the model of each class (svm) to norm R.
    This is the projected SGD of Kirschte et al. with the whole local set as its batch: no record has a place in an
    order, so nothing but D and these terms decides the weights, and how many steps are made does not depend on D.
    (Their line "R f / |f|" would lengthen short models, which is no projection, and no contraction: short ones stay
    here.)

    **Sensitivity, instance level: 2L / (n lambda)**, L from fact 4 (softmax, at most sqrt(2) c) or sqrt(K) c (all K
    classes of the svm), converged or not, one record added, removed or replaced: `labeler.descent` has the proof, and
    says what rounding adds. It is the bound of the exact minimiser, and never larger than the paper's
    2 (L + R lambda)/(n lambda), whose second summand bounds a change of the regulariser that does not happen. It is
    attained up to a few percent by the svm (`tests/workers/learning/test_linear.py`).

    **With `max_records`, a public bound that every site keeps: L / (n lambda)**, one record added or removed, by the
    same module's proof; for tasks in which no cap makes one record replace another.

    **User level**: |w| <= min(R, r L/lambda) for softmax, min(sqrt(K) R, r L/lambda) for the svm; r = max_records / n,
    1 without that bound.

    Attributes:
        learner: "softmax", multinomial logistic regression; "svm", a huberised hinge, one class against the rest.
        num_classes: K, from the task, never from labels.
        regularisation: lambda.
        clip_norm: c.
        radius: R, of the whole softmax model, or of each class of the svm.
        iterations: how many steps.
        min_records: n; a user with fewer records takes part as above, with a smaller model.
        max_records: n_max, the most records a user may have, as a public fact; None where there is none.

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
        """s: the constant that carries the intercept; the last feature, and so the last row of weights."""
        return self.clip_norm / 10

    @property
    def feature_norm(self) -> float:
        """r: what the norm of a record's own features is cut to."""
        return math.sqrt(self.clip_norm**2 - self.bias_feature**2)

    @property
    def lipschitz(self) -> float:
        """L of the whole model at every point that descent can reach, facts 3 and 4."""
        if self.learner == "svm":
            return math.sqrt(self.num_classes) * self.clip_norm
        # Descent with gradients of norm sqrt(2) c stays within r sqrt(2) c / lambda, wherever R is.
        crowding = 1.0 if self.max_records is None else self.max_records / self.min_records
        reached = min(self.radius, crowding * math.sqrt(2) * self.clip_norm / self.regularisation)
        return softmax_lipschitz(clip_norm=self.clip_norm, radius=reached, num_classes=self.num_classes)

    @property
    def smoothness(self) -> float:
        """b, of the loss without the regulariser, fact 3."""
        return self.clip_norm**2 / (2 if self.learner == "softmax" else 2 * HUBER_WIDTH)

    @property
    def descent(self) -> Descent:
        """The training as a mechanism."""
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
        """a, the longest step that fact 2 allows."""
        return self.descent.learning_rate

    @property
    def largest_norm(self) -> float:
        """Bound on the norm of the whole model, rounding included; the agent-level sensitivity."""
        return self.descent.largest_norm

    @property
    def sensitivity(self) -> float:
        """Bound on the distance of the weights of one user on neighbouring sets, instance level, rounding included.

        One record added, removed or, without `max_records`, replaced; for every number, also below `min_records`.
        """
        return self.descent.sensitivity

    @property
    def rounding_margin(self) -> float:
        """Share of the bound that covers double precision."""
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
