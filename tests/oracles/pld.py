"""The same epsilon by an accountant of independent origin: dp-accounting's privacy loss distributions.

It discretises the privacy loss and convolves, so it needs no closed form and shares no code with
`labeler.accounting.gaussian`; it is the cross-check of every price in the tests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce

from dp_accounting.pld import privacy_loss_distribution

from labeler.accounting.events import GaussianSum


def epsilon_by_pld(events: Sequence[GaussianSum], delta: float, *, interval: float = 1e-4) -> float:
    """Return epsilon of a composition of Gaussian sums, never below the exact one.

    Args:
        events: of one level.
        delta: in (0, 1).
        interval: width of a bin of privacy loss; the excess over the exact value shrinks with it.
    """
    losses = [
        privacy_loss_distribution.from_gaussian_mechanism(
            one.sigma_votes, sensitivity=math.sqrt(one.squared_sensitivity), value_discretization_interval=interval
        )
        for one in events
    ]
    return float(reduce(lambda total, loss: total.compose(loss), losses).get_epsilon_for_delta(delta))
