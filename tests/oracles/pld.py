"""The same epsilon by an accountant of independent origin: dp-accounting's privacy loss distributions.

It discretises the privacy loss and convolves, so it needs no closed form and shares no code with
`labeler.accounting.gaussian`; it is the cross-check of every price in the tests.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import reduce

from dp_accounting.pld import privacy_loss_distribution

from labeler.accounting.events import GaussianSum
from labeler.errors import InvalidSetting, PrivacyRefusal


def epsilon_by_pld(events: Iterable[object], delta: float, *, value_discretization_interval: float = 1e-4) -> float:
    """Epsilon of a composition of Gaussian sums, never below the exact one.

    Args:
        events: GaussianSum events of one level.
        delta: in (0, 1).
        value_discretization_interval: width of a bin of privacy loss; the excess over the exact value
            shrinks with it, time and memory grow.

    Raises:
        InvalidSetting: there is no event, or delta is outside its range.
        PrivacyRefusal: an event is not a GaussianSum, or levels are mixed.
    """
    if not 0 < delta < 1:
        raise InvalidSetting(f"delta must be strictly between 0 and 1, found {delta}")
    losses = []
    levels = set()
    for event in events:
        if not isinstance(event, GaussianSum):
            raise PrivacyRefusal(f"the PLD accountant does not know the event {type(event).__name__}")
        levels.add(event.level)
        losses.append(
            privacy_loss_distribution.from_gaussian_mechanism(
                standard_deviation=event.sigma_votes,
                sensitivity=math.sqrt(event.squared_sensitivity),
                value_discretization_interval=value_discretization_interval,
            )
        )
    if not losses:
        raise InvalidSetting("there is no event to account for")
    if len(levels) > 1:
        raise PrivacyRefusal("instance-level and agent-level events do not compose; account for each level by itself")
    composed = reduce(lambda total, loss: total.compose(loss), losses)
    return float(composed.get_epsilon_for_delta(delta))
