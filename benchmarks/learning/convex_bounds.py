"""Bounds on how far records, users and groups move linear models: the papers', and closed forms to compare with.

What is charged is `labeler.methods.blind_average.LinearTerms.sensitivity`, which is proved about the steps that are
really made.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

from labeler.errors import InvalidSetting
from labeler.methods.blind_average import LinearTerms, check_count, check_positive

NeighboringUsers = Literal["replace", "zero-out"]


def logistic_regression_sensitivity(
    *, clip_norm: float, regularisation: float, num_records: int, gradient_norm: float = 0.0
) -> float:
    """How far one record moves the minimiser of regularised multinomial logistic regression, L2 norm of all weights.

    2 sqrt(2) c / (lambda n) + 2 |gradient| / lambda. Proof: let w and w' be the minimisers on neighbouring D and D'.
    F_D' is lambda-strongly convex, so lambda |w - w'| <= |grad F_D'(w) - grad F_D'(w')| = |grad F_D'(w)| = |grad
    F_D'(w) - grad F_D(w)| <= 2L/n by fact 1, with L = sqrt(2) c by fact 3. Weights at which the gradient has norm g
    lie, by the same inequality, within g/lambda of the minimiser, on either side.

    Holds for every number of classes, binary with two columns of weights included, and for one column of weights with
    labels +-1, whose gradient is even shorter. For replacing one of n records, and for adding or removing one if n is
    the larger size or less.

    Args:
        clip_norm: c, bound on the norm of a record's features with the constant that carries the intercept, if any.
        regularisation: lambda, of the **averaged** loss: mean loss + lambda/2 |w|^2. scikit-learn's C is 1/(lambda n).
        num_records: n, or a public lower bound of it.
        gradient_norm: what the optimiser guarantees of |grad F| where it stops, on every data set; 0 for the
            minimiser itself.

    Raises:
        InvalidSetting: an argument is out of bounds.

    References:
        Chaudhuri, Monteleoni, Sarwate 2011, Corollary 8, for one column; Hoech et al. 2022 prove 2 sqrt(C) / (lambda
        n) for c = 1, which is looser for more than two classes.
    """
    check_positive(clip_norm=clip_norm, regularisation=regularisation)
    check_count(num_records=num_records)
    if not 0 <= gradient_norm < math.inf:
        raise InvalidSetting(f"gradient_norm must be a finite number of at least 0, found {gradient_norm!r}")
    return 2 * (math.sqrt(2) * clip_norm / num_records + gradient_norm) / regularisation


def svm_sensitivity_as_in_paper(*, clip_norm: float, radius: float, regularisation: float, num_records: int) -> float:
    """2 (c + R lambda) / (n lambda), for the model of one class (Kirschte et al., Lemma 2; Wu et al. 2017, Lemma 8).

    Looser than `LinearTerms.sensitivity`: it counts the regulariser into what a record can change, while at one and
    the same w the regularisers of two records cancel.
    """
    check_positive(clip_norm=clip_norm, radius=radius, regularisation=regularisation)
    check_count(num_records=num_records)
    return 2 * (clip_norm + radius * regularisation) / (num_records * regularisation)


def softmax_sensitivity_as_in_paper(
    *, clip_norm: float, radius: float, regularisation: float, num_records: int
) -> float:
    """2 (lambda R + sqrt(2) c) / (n lambda), for the whole model (Kirschte et al., Theorem 11)."""
    return svm_sensitivity_as_in_paper(
        clip_norm=math.sqrt(2) * clip_norm, radius=radius, regularisation=regularisation, num_records=num_records
    )


def one_vs_rest_sensitivity(of_one_class: float, num_classes: int) -> float:
    """Of the models of K classes as one vector: sqrt(K) s, since squared norms add; the paper's proofs pay K s."""
    check_positive(of_one_class=of_one_class)
    check_count(num_classes=num_classes)
    return math.sqrt(num_classes) * of_one_class


def average_sensitivity(of_one_user: float, users: int) -> float:
    """Of the mean of the models of U users, one of whom moves by s: s / U (Kirschte et al., Lemma 6)."""
    check_positive(of_one_user=of_one_user)
    check_count(users=users)
    return of_one_user / users


def user_sensitivity(largest_norm: float, neighboring_relation: NeighboringUsers = "replace") -> float:
    """Of one user's model when all its records may change: 2R, the diameter of a ball (Kirschte et al., Corollary 10).

    Zero-out: the model becomes zero while its noise share stays: R. Holds for every learner whose models have norm at
    most R.
    """
    check_positive(largest_norm=largest_norm)
    if neighboring_relation not in get_args(NeighboringUsers):
        raise InvalidSetting(f"users are replaced or zeroed out, found {neighboring_relation!r}")
    return 2 * largest_norm if neighboring_relation == "replace" else largest_norm


def group_sensitivity(of_one_record: float, records: int, *, largest_norm: float | None = None) -> float:
    """Of models when a group of records changes: their number times s (Kirschte et al., Corollary 9).

    One record after the other, by the triangle inequality; the records may lie with different users. Noise of the
    same sigma then is mu-GDP with a mu that many times as large, at the same delta.

    Args:
        of_one_record: s.
        records: how many change.
        largest_norm: where all of them are **one user's**: the bound R on its model, which never moves further than 2R.
    """
    check_positive(of_one_record=of_one_record)
    check_count(records=records)
    together = records * of_one_record
    return together if largest_norm is None else min(together, user_sensitivity(largest_norm))


def sensitivity_as_in_paper(terms: LinearTerms) -> float:
    """What Kirschte et al. prove for the same model, K classes by sqrt(K)."""
    bound = {"clip_norm": terms.clip_norm, "radius": terms.radius, "regularisation": terms.regularisation}
    if terms.learner == "softmax":
        return softmax_sensitivity_as_in_paper(**bound, num_records=terms.min_records)
    of_one = svm_sensitivity_as_in_paper(**bound, num_records=terms.min_records)
    return one_vs_rest_sensitivity(of_one, terms.num_classes)
