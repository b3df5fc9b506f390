"""Gradient descent with a fixed number of steps: a bound on how far one record moves the result, converged or not.

Convergence of an optimizer depends on the records, so a learner that is refused without convergence reveals them. Here
the number of steps follows from public numbers, every step is a contraction, and the bound holds after each.

**The mechanism.** Losses of a record z at weights w have gradients of norm at most L and are smooth with constant b.

    F_D(w) = (1/N) sum_{z in D} loss(w; z) + (lambda/2) |w|^2,        N = max(|D|, n).

Here n is public, "the least number of records". A smaller set is still divided by n, so that no agent is refused, or
seen to be refused, for the size of a private set. Public examples, the same for everybody, may be added to the records,
in D and in n. From w = 0, `iterations` times, on all records at once,

    w <- project(w - a grad F_D(w)),        a = 2 / (b + 2 lambda).

Here project cuts to a ball, or to a product of balls, of radius min(R, L/lambda). No record has a place in an order:
only D and the public terms decide the weights. If a public bound on |D| is kept the denominator is public, which halves
the sensitivity: see "With a public denominator".

**Sensitivity: 2L / (n lambda)**, one record added, removed or *replaced*, for every number of steps. By facts 1 and 2
of `labeler.methods.blind_average`, one record moves a gradient by at most 2L/n, and a step multiplies the distance of
two points by at most 1 - a lambda. A projection onto a convex set moves no two points apart. Let w, w' be the weights
on neighboring sets after t steps and d_t their distance, d_0 = 0. Then

    d_{t+1} <= |T(w) - T(w')| + |T(w') - T'(w')| <= (1 - a lambda) d_t + a 2L/n,   hence   d_t <= 2L / (n lambda).

It is the bound of the exact minimizers; without convergence it only gets looser.

**How many records.** Of more than MOST_RECORDS an agent takes those of the smallest record ids. Ids are random and
permanent, so the cut looks at no record. But if it binds, a record that leaves lets the next one in, and so is
replaced. The bound is the one for replacing, so it holds whether the cut binds or not, and a person's m records move
the weights by at most m times as much.

**With a public denominator: L / (n lambda)**, one record added or removed. Here it is a **public fact** that
|D| <= n_max (`most`): the site declares it, and its import refuses any excess. So no set in question is larger, no cut
ever binds, and no record takes the place of another. Then N = n whatever |D| is. With r = n_max / n,

    F_D(w) = (1/n) sum_{z in D} loss(w; z) + (lambda/2) |w|^2,        a = 2 / (r b + 2 lambda).

Radii to project onto are min(R, r L/lambda). Neighbors' gradients differ by one summand, (1/n) grad loss(w; z), of norm
at most L/n at every w. lambda is not divided, and the whole w is regularized, with the weight that carries the
intercept, so that the rest cancels. F without its quadratic part is convex and smooth with constant b |D| / n <= r b.
So by fact 2 every step contracts by 1 - a lambda on every possible set. With a step for b alone, a set larger than n
could be thrown apart. Hence d_{t+1} <= (1 - a lambda) d_t + a L/n and d_t <= L / (n lambda), converged or not. A record
that is *replaced* is one removed and one added: twice that. So if a cut may bind (a cap on a person's records), the
mechanism with N = max(|D|, n) and its price are used instead.

**Norm.** |w| <= L / lambda, by |w_{t+1}| <= (1 - a lambda) |w_t| + a L; and at most the projection's radius. With a
public denominator gradients of the sum divided by n have norm at most r L: |w| <= r L / lambda.

**Rounding.** Weights are computed in double precision, u = 2^-53. The order of summation is not ours to choose, with
one exception. Records are read in blocks of at most BLOCK_ROWS, whose sums are added up. So no number is the sum
of more than DEPTH rounded ones, however many records there are. One step is off by at most a e,
e <= u DEPTH sqrt(K) L (2 + 1.5 b'/lambda), b' = b + 2 lambda. The reason: scores of K columns are off by u DEPTH c |w|
each, with |w| <= L/lambda and c the longest row. That moves slopes by at most b/c^2 of that and the gradient by c times
as much. Sums over records are off by u DEPTH L; update and projection by u DEPTH |w|/a. As in the proof, the distance
grows by 2 e / lambda, a share of n e / L of the bound. Features may be computed again, and round differently if another
record is gone. They count the same way: twice as much, if no row is off by more than 2 DEPTH u c = 2^-34 c. Four times
the share, one of them to spare, is included. If rows may be off by more, by rho c, that is `feature_rounding`. A
gradient moves by at most rho L (1 + b/lambda), a share of n rho (1 + b/lambda) / 2 of the bound; n rho (1 + b/lambda)
is included. With a public denominator all this holds with r L for L and r b for b, of a bound that is half: twice the
shares, with n_max for n. Public terms for which all this would be more than a hundredth of the bound are refused before
anybody pays.

References:
    Hardt, Recht, Singer 2016, "Train faster, generalize better"; Wu et al. 2017, "Bolt-on differential privacy", Lemma
    8.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from labeler.errors import InvalidSetting, PrivacyRefusal

DEPTH = 2**18
"""Most rounded numbers in any sum of a training; the margin for rounding is proved for it."""

MOST_WEIGHTS = 2**17
"""Most weights of one training; with as many again for rows in a block and for blocks."""

MOST_RECORDS = 2**20
"""Most records of one training; of more, those of the smallest ids are taken."""

MOST_PUBLIC_ROWS = 2**20
"""Most public examples in addition."""

BLOCK_ROWS, LEAST_BLOCK_ROWS = 2**13, 2**5
"""Rows that are read at once. All records and public rows are at most (2^20 + 2^20) / 2^5 = 2^16 blocks, and
2^13 + 2^16 + MOST_WEIGHTS is below DEPTH."""

MOST_MARGIN = 0.01
_LEAST, _LARGEST = 1e-100, 1e100


@dataclass(frozen=True)
class Descent:
    """A training's public numbers; the module is the mechanism, with the proof.

    Attributes:
        lipschitz: L, the longest gradient of one record's loss at every reachable point.
        smoothness: b, of one record's loss without the regularizer.
        regularisation: lambda.
        least: n, the least denominator of a mean, public examples included; with `most`, always the denominator.
        columns: K, scores per row.
        iterations: number of steps.
        radius: R of each ball that is projected onto; infinite leaves only |w| <= L/lambda.
        balls: number of balls whose product the model lies in.
        feature_rounding: rho, the fraction of c by which rows computed together may affect a row; 0 for at most 2^-34.
        most: n_max, public examples included, if it is a public fact that there are no more, and no cut can bind.
            None if there is no such fact, and a record may be replaced.

    Raises:
        InvalidSetting: numbers for which double precision proves nothing, or a maximum of records below the minimum.
    """

    lipschitz: float
    smoothness: float
    regularisation: float
    least: int
    columns: int
    iterations: int
    radius: float = math.inf
    balls: int = 1
    feature_rounding: float = 0.0
    most: int | None = None

    def __post_init__(self) -> None:
        radius = min(self.radius, _LARGEST)
        if self.most is not None and not self.least <= self.most <= MOST_RECORDS + MOST_PUBLIC_ROWS:
            raise InvalidSetting(
                f"a bound on records is at least the {self.least} that a mean is taken over, and at most "
                f"{MOST_RECORDS + MOST_PUBLIC_ROWS}, for which rounding is bounded; found {self.most}"
            )
        for number in (self.lipschitz, self.regularisation, radius, self.lipschitz / self.regularisation):
            if not _LEAST <= number <= _LARGEST:
                raise InvalidSetting(
                    f"norms and regularisation of a training, and their ratio, lie between {_LEAST:g} and "
                    f"{_LARGEST:g}; found {number:g}"
                )
        if min(self.least, self.columns, self.iterations, self.balls) < 1:
            raise InvalidSetting("a training has at least one record in its mean, one column, one step and one ball")
        if not self.rounding_margin <= MOST_MARGIN:
            raise InvalidSetting(
                f"regularisation {self.regularisation:g} is too weak for {self.least} records in double precision: "
                f"rounding alone could move the weights by {self.rounding_margin:.2g} of what a record can"
            )

    @property
    def learning_rate(self) -> float:
        """Return a, the longest step that is a contraction."""
        return 2 / (self.crowding * self.smoothness + 2 * self.regularisation)

    @property
    def reach(self) -> float:
        """Return the radius that is projected onto."""
        return min(self.radius, self.crowding * self.lipschitz / self.regularisation)

    @property
    def crowding(self) -> float:
        """Return r = n_max / n, by which the sum of losses may exceed a mean; 1 if it always is a mean."""
        return 1.0 if self.most is None else self.most / self.least

    @property
    def changes(self) -> int:
        """Return how many records' gradients one neighbor changes: 1 if a record comes or goes, 2 if it is replaced."""
        return 2 if self.most is None else 1

    def denominator(self, rows: int) -> int:
        """Return the denominator of the sum of losses of `rows` rows, public ones included.

        Raises:
            PrivacyRefusal: there are more than the public bound, of which nothing is proved. A party that answers after
                a charge must check this before; the message does not tell their number.
        """
        if self.most is None:
            return max(rows, self.least)
        if rows > self.most:
            raise PrivacyRefusal(
                f"there are more records than the {self.most} that were declared to be the most; nothing is proved of "
                "such a set, so nothing is trained on it"
            )
        return self.least

    @property
    def rounding_margin(self) -> float:
        """Return the share of the bound that covers double precision."""
        condition = self.crowding * self.smoothness / self.regularisation
        rows = 2 / self.changes * (self.least if self.most is None else self.most)
        sums = 4 * rows * 2.0**-53 * DEPTH * math.sqrt(self.columns) * (2 + 1.5 * (condition + 2))
        return sums + rows * self.feature_rounding * (1 + condition)

    @property
    def largest_norm(self) -> float:
        """Return a bound on the norm of all weights, rounding included."""
        whole = min(math.sqrt(self.balls) * self.radius, self.crowding * self.lipschitz / self.regularisation)
        return whole * (1 + self.rounding_margin)

    @property
    def sensitivity(self) -> float:
        """Return a bound on the distance of weights on neighboring sets, rounding included, for any number of records.

        With `most`, for every number up to it, one record added or removed; else also for one replaced.
        """
        exact = self.changes * self.lipschitz / (self.least * self.regularisation)
        return min(exact * (1 + self.rounding_margin), 2 * self.largest_norm)


def steps_to_converge(smoothness: float, regularisation: float, *, most: int) -> int:
    """Return the number of steps after which w is within a millionth of |w*| of the minimizer w*, at most `most`.

    Each leaves at most 1 - a lambda <= exp(-a lambda) of the distance, a lambda = 2 / (b/lambda + 2). The remaining
    distance costs accuracy and no privacy.
    """
    steps = math.log(1e6) * (smoothness / regularisation + 2) / 2
    return math.ceil(steps) if steps < most else most
