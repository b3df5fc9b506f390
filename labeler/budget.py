r"""A budget in whole numbers.

Gaussian differential privacy composes by adding mu^2. A budget is therefore a cap on the sum of mu^2, kept in
nano-units (1e9 per unit). Charges are rounded up, caps are rounded down, and no floating point number takes part in a
decision. Charges may be chosen after seeing earlier answers; a cap fixed beforehand still holds (Smith, Thakurta 2022:
fully adaptive Gaussian composition, where stopping at the cap loses nothing).

What is charged against a cap, and when it may be given back, the ledger of a journal decides (labeler.ledger.ledger).
`NothingLeft` is the proof that it asks for.

`say_epsilon` prints an epsilon for people: a bound is rounded up, so that the printed number still holds. What is left
is the other way round (`epsilon_left`, `say_epsilon_left`): rounded down, so that a job of the printed number still
fits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_EVEN, Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Literal, get_args

from labeler.accounting.events import NANO
from labeler.errors import InvalidSetting

NothingLeftBecause = Literal["never-asked", "below-quorum", "refused", "lapsed", "divided"]

UNBOUNDED_NANO = 10**13
"""Charge at a level without a finite price, if the level is not limited. It exceeds any cap, so a cap that is set later
does not count it as if something had been promised."""

MOST_EPSILON = 1000.0
LEAST_DELTA, MOST_DELTA = 1e-100, 1 - 1e-6
"""The range in which a budget is proved (`budget_for`)."""

LEAST_DELTA_OF_WINNERS = 1e-16
"""Below this delta an account pays for no winners. Their charges hold `SPILL` mu^2 outside a Gaussian (below
UNBOUNDED_NANO at most 1e-24), which might exceed the part of delta that is held back."""

_MARGIN = 1e-7


def budget_for(epsilon: float, delta: float) -> int:
    """Return the cap that (epsilon, delta) buys, in nano-units of mu^2, rounded down.

    **Claim.** mu-GDP with mu^2 = cap/1e9 implies (epsilon, delta), for every argument that is accepted. Proof:
    `labeler.accounting.gaussian` computes delta with a relative error below 1e-11 on this range, and returns a mu whose
    computed delta is at most the one asked for. It is asked with one part in 1e7 less of epsilon and of delta, and
    delta falls in epsilon and grows in mu. So the true delta at mu is below delta (1 - 1e-7) (1 + 1e-11) < delta. The
    square is taken exactly and rounded down. (Tested against 60 digits over the whole range; outside it nothing is
    tested, and refused. An epsilon above MOST_EPSILON promises nothing that anybody could tell from "unlimited".)

    **The sampler.** The charge is the mu^2 of integer noise. Its sampler is within M 2^-100 of it in total
    variation, M noise samples in all (`labeler.accounting.integer`, step 3). The part of delta held back pays for that
    while (1 + e^epsilon) M 2^-100 <= 1e-7 delta: 3e13 samples at epsilon 10 and delta 1e-5, 1e12 at 14. For more
    samples or a larger epsilon the statement is weaker by exactly this: everything that was released is within
    M 2^-100 of releases for which (epsilon, delta) holds. That is below 1e-17 for 1e13 samples.

    **Winners.** Their charges hold at most SPILL mu^2 of delta outside the Gaussian, all together below 1e-24. That is
    a hundred-millionth of any delta for which an account pays for them (`LEAST_DELTA_OF_WINNERS`): held back, too.

    A task whose own price is epsilon fits a budget of the same epsilon if it is asked as it was priced: at once.

    Args:
        epsilon: at least 0, at most MOST_EPSILON.
        delta: from LEAST_DELTA to MOST_DELTA.

    Raises:
        InvalidSetting: an argument is outside its range.
    """
    if isinstance(epsilon, bool) or isinstance(delta, bool):
        raise InvalidSetting("epsilon and delta must be numbers, found a truth value")
    if not 0 <= epsilon <= MOST_EPSILON:
        raise InvalidSetting(
            f"epsilon of a budget must be from 0 to {MOST_EPSILON:g}, found {epsilon}; no larger one is proved, nor "
            'would it promise anything: write "unlimited" where there is to be no limit'
        )
    if not LEAST_DELTA <= delta <= MOST_DELTA:
        raise InvalidSetting(
            f"delta must be strictly between 0 and 1, for a budget at least {LEAST_DELTA:g} and at most "
            f"{MOST_DELTA:.6f}; found {delta}"
        )
    # Imported here: it loads scipy, which takes a second or two, and a tallier's ledger keeps counts and no prices.
    from labeler.accounting.gaussian import mu_of_epsilon

    mu = mu_of_epsilon(epsilon * (1 - _MARGIN), delta * (1 - _MARGIN))
    return math.floor(Fraction(mu) ** 2 * NANO)


@lru_cache(maxsize=65_536)
def epsilon_spent(nano: int, delta: float) -> float | None:
    """Return an epsilon such that all charges together are (epsilon, delta)-DP: the inverse of `budget_for`, rounded
    up.

    Charges are mu^2 rounded up, so all of them together are mu-GDP with mu^2 = nano / 1e9, except for the imperfection
    of the noise sampler. As in `budget_for`, one part in 1e7 of epsilon and of delta is held back for that and for
    floating-point error. So `budget_for(epsilon_spent(n, delta), delta) >= n`: a cap is never shown as overdrawn.

    Args:
        nano: sum of the charges, nano-units of mu^2, at least 0.
        delta: in (0, 1).

    Returns:
        The bound; None if something without a finite price was charged.
    """
    if nano <= 0:
        return 0.0
    if nano >= UNBOUNDED_NANO:
        return None
    from labeler.accounting.gaussian import epsilon_of_delta

    mu = math.nextafter(math.sqrt(nano / NANO), math.inf)
    epsilon = epsilon_of_delta(delta * (1 - _MARGIN), mu) / (1 - _MARGIN)
    # Beyond the largest budget there is no cap to agree with.
    while epsilon <= MOST_EPSILON and budget_for(epsilon, delta) < nano:
        epsilon = epsilon * (1 + 1e-12) + 1e-15
    return epsilon


@lru_cache(maxsize=65_536)
def epsilon_left(nano: int, delta: float) -> float:
    """Return the epsilon of the largest further job that what is left of a cap still pays for, rounded down.

    Epsilons do not add up, so this is not the difference of two epsilons: of a cap of 1 of which 0.5 is spent, a job
    of 0.834 is left. mu^2 adds up: `nano` is the cap less all charges, in mu^2, and the answer is an epsilon with
    `budget_for(epsilon, delta) <= nano`. A task whose own price at this delta is epsilon or less fits if it is asked at
    once (see `budget_for`).

    Every place that says what is left takes it from here.

    Args:
        nano: cap less charges, nano-units of mu^2; a negative number leaves nothing.
        delta: of the account.

    Returns:
        At least 0, at most MOST_EPSILON.
    """
    if nano <= 0:
        return 0.0
    if nano >= budget_for(MOST_EPSILON, delta):
        return MOST_EPSILON
    # `budget_for` rounds down, so the largest epsilon that still buys `nano` lies just below what buys one unit more.
    above = epsilon_spent(nano + 1, delta)
    epsilon, step = MOST_EPSILON if above is None else min(above, MOST_EPSILON), 1e-12
    while epsilon > 0 and budget_for(epsilon, delta) > nano:
        # The steps double, so an epsilon that no rounding explains (one near 0 at a large delta) ends at 0.
        epsilon, step = max(0.0, epsilon * (1 - step) - 1e-15), min(2 * step, 1.0)
    return epsilon


@dataclass(frozen=True)
class NothingLeft:
    """The statement that nothing computed from private data under a reservation has left its owner.

    The code that makes one vouches for it: giving budget back on a guess overspends silently.

    Attributes:
        because: how it is known. "never-asked": no agent was sent the queries. "below-quorum": too few
            agents answered and the talliers opened nothing. "refused": every agent refused before answering.
            "lapsed": an agent's own promise has ended, and it never answered under it. "divided": nothing was asked
            under it, and smaller reservations made in the same transaction replace it.
    """

    reservation_id: str
    because: NothingLeftBecause

    def __post_init__(self) -> None:
        if self.because not in get_args(NothingLeftBecause):
            known = ", ".join(get_args(NothingLeftBecause))
            raise InvalidSetting(f"a reservation is voided because it was one of {known}; found {self.because!r}")


_HUGE = 1_000_000


def say_epsilon(epsilon: float | None, *, digits: int = 3) -> str:
    """Return an epsilon as an upper bound: rounded up to `digits` significant digits, never below its value."""
    return _say(epsilon, digits, ROUND_CEILING)


def say_epsilon_left(epsilon: float, *, digits: int = 3) -> str:
    """Return an epsilon that is left: rounded down to `digits` significant digits, never above its value."""
    return _say(epsilon, digits, ROUND_FLOOR)


def spent_in_words(posted: float | None, spent: float | None, left: float | None) -> str:
    """Return in words what an account has spent and what is left, for every place that says either.

    Args:
        posted: the epsilon of what was answered; None without a bound.
        spent: the epsilon of that and of all that is set aside for jobs that wait; None without a bound.
        left: `epsilon_left`; None where the account has no limit.
    """
    so_far = "no bound on what was answered" if posted is None else f"at most {say_epsilon(posted)} so far"
    waits = ""
    if spent != posted:
        waits = f"; {'no bound' if spent is None else say_epsilon(spent)} if all that waits is answered"
    more = "" if left is None else f"; one more job of up to {say_epsilon_left(left)}" if left else "; nothing is left"
    return so_far + waits + more


def short_epsilon(epsilon: float, *, digits: int) -> str:
    """Return an epsilon as the format `.{digits}g` writes it, but never below its value: for cards and tables."""
    exact = Decimal(repr(float(epsilon)))
    if not exact.is_finite() or not exact:
        return f"{epsilon:.{digits}g}"
    step = Decimal(1).scaleb(exact.adjusted() - digits + 1)
    return f"{float(exact.quantize(step, rounding=ROUND_CEILING)):.{digits}g}"


def say_estimate(epsilon: float | None, *, digits: int = 5) -> str:
    """Return an epsilon that nobody relies on, rounded to nearest, for comparison with printed tables."""
    return _say(epsilon, digits, ROUND_HALF_EVEN)


def _say(epsilon: float | None, digits: int, rounding: str) -> str:
    if epsilon is None:
        return "none"
    if epsilon > _HUGE:
        return "over a million"
    exact = Decimal(repr(float(epsilon)))
    if not exact:
        return "0"
    places = max(0, digits - 1 - exact.adjusted())
    if exact.adjusted() < -6:
        return f"{exact.quantize(Decimal(1).scaleb(exact.adjusted() - 1), rounding=rounding):.1e}"
    text = f"{exact.quantize(Decimal(1).scaleb(-places), rounding=rounding):,f}"
    return text.rstrip("0").rstrip(".") if places > digits else text
