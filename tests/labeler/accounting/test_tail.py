"""Mills' ratio and its falls against 60 digits, against both ends of the continued fraction, and against scipy."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labeler.accounting import gaussian
from labeler.accounting.gaussian import TERMS, fallen, mills

PLACE = st.one_of(st.floats(-0.25, 4), st.floats(4, 5), st.floats(4, 40))


def _in_sixty_digits(t: float, by: float = 0.0) -> mpmath.mpf:
    """R(t + by)."""
    with mpmath.workdps(60):
        at = mpmath.mpf(t) + mpmath.mpf(by)
        return mpmath.sqrt(mpmath.pi / 2) * mpmath.exp(at * at / 2) * mpmath.erfc(at / mpmath.sqrt(2))


@settings(max_examples=300, deadline=None)
@given(t=PLACE)
def test_the_ratio_agrees_with_sixty_digits(t: float) -> None:
    assert mills(t) == pytest.approx(float(_in_sixty_digits(t)), rel=1e-14, abs=0)


@settings(max_examples=300, deadline=None)
@given(t=PLACE, exponent=st.floats(-18, 4))
def test_what_it_falls_by_agrees_with_sixty_digits_however_little_that_is(t: float, exponent: float) -> None:
    by = math.exp(exponent)
    if by >= 0.5:
        t = abs(t)
    with mpmath.workdps(60):
        expected = float(_in_sixty_digits(t) - _in_sixty_digits(t, by))
    assert fallen(t, by) == pytest.approx(expected, rel=1e-12, abs=0)


@pytest.mark.parametrize("t", [4.0, 4.5, 6.0, 12.0, 40.0, 1e4])
def test_the_two_ends_of_the_continued_fraction_enclose_what_is_returned(t: float) -> None:
    """The proof of the module: ends 0 and N/t lie on both sides of K_N, and every step keeps it between."""
    ends = []
    for term in (0.0, TERMS / t):
        for n in range(TERMS - 1, 0, -1):
            term = n / (t + term)
        ends.append(term)
    low, high = sorted(ends)
    assert high - low <= 1e-14 * low
    assert low * (1 - 4e-16) <= gaussian._terms(t, 1)[0] <= high * (1 + 4e-16)
    assert 1 / (t + high) * (1 - 4e-16) <= mills(t) <= 1 / (t + low) * (1 + 4e-16)


def test_far_out_the_ratio_is_one_over_its_place_and_ends_at_nothing() -> None:
    assert mills(1e200) == 1e-200
    assert mills(math.inf) == 0.0
    assert fallen(1e10, 0.25) == pytest.approx(0.25e-20, rel=1e-9)
    assert math.isnan(mills(math.nan))


def test_the_rule_is_that_of_gauss_and_legendre() -> None:
    nodes, _ = np.polynomial.legendre.leggauss(8)
    with mpmath.workdps(40):
        for start, (node, weight) in zip(nodes[4:].tolist(), gaussian._RULE, strict=True):
            zero = mpmath.findroot(lambda x: mpmath.legendre(8, x), start)
            slope = mpmath.diff(lambda x: mpmath.legendre(8, x), zero)
            assert node == pytest.approx(float(zero), rel=1e-15, abs=0)
            assert weight == pytest.approx(float(2 / ((1 - zero**2) * slope**2)), rel=1e-15, abs=0)
