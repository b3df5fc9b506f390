"""What the released votes themselves say about the private classes: one that hardly shows, one that drowns others.

The sum of a class's released counts over all questions is its votes plus noise of a known size. Only released numbers
and public settings are read, so it costs nothing and tells nothing that the release does not: agents' records are
never looked at. Who mislabelled, and who lied, no release shows.

Ballots on a ball (`labeler.methods.reverse_knn`) are centred: each agent leaves out what its questions have in common
over all classes, and shortens the rest. A class that nobody holds then has less than nothing, as has every class below
the mean, and classes asked about equally often add up to nothing whatever was answered. So of such sums no class's
total is told apart from another's; what is said is whether all numbers together are longer than noise alone makes them.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from workers.report.model import JobReport

STANDS_OUT: Final = 3.0
"""Deviations of the noise; a class without votes seems to have some once in 740 times.

A class is called silent only where one with its share of all votes would have twice as much: that one is below with the
same chance. Of fewer votes, a few questions at a small price, no class by itself is seen, though all together may be.
"""

LOPSIDED: Final = 20.0

ALL_NOISE: Final = (
    "No class's released votes stand out of the noise: what is labelled is guessed. Spend more, or ask less."
)


def class_totals(report: JobReport) -> tuple[str, ...]:
    """Sentences about classes whose released votes are no more than noise, or many times another's."""
    rows = [query.noisy_votes for query in report.queries if query.noisy_votes is not None]
    if not rows or not report.task.traits.counts or report.attributes is not None:
        return ()
    if _is_noise(np.array(rows), report.task.total_sigma_votes):
        return (ALL_NOISE,)
    if report.task.ballot_radius is not None:
        return ()
    totals = np.sum(rows, axis=0)
    noise = report.task.total_sigma_votes * math.sqrt(len(rows))
    if totals.mean() < 2 * STANDS_OUT * noise:
        return ()
    found: list[str] = []
    silent = [report.class_name(int(label)) for label in np.flatnonzero(totals < STANDS_OUT * noise)]
    if silent:
        found.append(
            f"The released votes for {', '.join(silent)} add up to no more than noise: agents may hold none of "
            f"{'these' if len(silent) > 1 else 'it'}, or too few records for this price. "
            f"{'Their images' if len(silent) > 1 else 'Images of it'} are probably called something else."
        )
    heard = np.flatnonzero(totals >= STANDS_OUT * noise)
    most, least = heard[np.argmax(totals[heard])], heard[np.argmin(totals[heard])]
    if totals[most] >= LOPSIDED * totals[least]:
        found.append(
            f"{report.class_name(int(most))} got about {totals[most] / totals[least]:.0f} times the votes of "
            f"{report.class_name(int(least))}: labels of the rarer class are less sure than they look."
        )
    return tuple(found)


def _is_noise(votes: NDArray[np.float64], sigma: float) -> bool:
    """Whether the sum of squares is what noise alone has: chi-squared, of mean n and variance 2 n for n numbers."""
    numbers = votes.size
    return float(np.square(votes / sigma).sum()) < numbers + STANDS_OUT * math.sqrt(2 * numbers)
