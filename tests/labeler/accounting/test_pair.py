"""The least Gaussian above a profile is the one that halving over all of its points finds."""

from __future__ import annotations

import numpy as np
import pytest

from labeler.accounting import losses
from labeler.accounting.gaussian import deltas_of_epsilons
from labeler.accounting.losses import OF_FORMULA, Floats, least_gaussian


def over_all_points(epsilons: Floats, deltas: Floats, delta_0: float, low: float, high: float) -> float:
    """The definition, every point looked at in every step."""
    points = np.arange(len(epsilons))
    every = np.interp(np.linspace(0, points[-1], 8 * points[-1] + 1), points, epsilons)
    left = np.interp(np.exp(every), np.exp(epsilons), deltas)[:-1] - delta_0
    right, left = every[1:][left > 0], left[left > 0] * (1 + OF_FORMULA)
    while high - low > 1e-7 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if np.all(deltas_of_epsilons(right, middle) >= left) else (middle, high)
    return high


@pytest.mark.parametrize("mus", [(0.3,), (0.1, 0.9), (0.2, 1.5, 3.0)])
def test_the_least_gaussian_is_found_with_few_looks_at_the_whole_profile(
    mus: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mixtures of Gaussians, whose binding point lies at either end or between."""
    epsilons = np.linspace(0, 60, 400)
    deltas = np.mean([deltas_of_epsilons(epsilons, mu) for mu in mus], axis=0)
    sizes = []

    def counted(at: Floats, mu: float) -> Floats:
        sizes.append(len(at))
        return deltas_of_epsilons(at, mu)

    monkeypatch.setattr(losses, "deltas_of_epsilons", counted)
    found = least_gaussian(epsilons, deltas, 1e-28, 0.01, 8.0)
    assert found == over_all_points(epsilons, deltas, 1e-28, 0.01, 8.0)
    assert sum(size > 100 for size in sizes) <= 15


def test_nothing_is_found_where_the_largest_is_too_little() -> None:
    epsilons = np.linspace(0, 60, 400)
    assert least_gaussian(epsilons, deltas_of_epsilons(epsilons, 1.0), 1e-28, 0.01, 0.9) is None


def test_a_search_ends_where_a_point_is_rounded_otherwise_beside_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    epsilons = np.linspace(0, 60, 400)
    deltas = deltas_of_epsilons(epsilons, 0.9)
    looks = []

    def rounded(at: Floats, mu: float) -> Floats:
        looks.append(len(at))
        assert len(looks) < 1000, "it does not end"
        return deltas_of_epsilons(at, mu) * (1 - 1e-3 * (len(at) == max(looks)))

    monkeypatch.setattr(losses, "deltas_of_epsilons", rounded)
    found = least_gaussian(epsilons, deltas, 1e-28, 0.01, 8.0)
    assert found is not None
    assert found > over_all_points(epsilons, deltas, 1e-28, 0.01, 8.0)
