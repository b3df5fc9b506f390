"""Golden values of PriFedSync, with their source.

Zheng, Chen, Long, Su 2021, "Federated f-Differential Privacy", tables 1 to 3: eighteen printed mu, by theorem 2.
MNIST clients hold 600 records (60,000 among 100), CIFAR-10 clients 500 (section 4.2). Exact values beside them:
measured here, agreeing with an accountant written in `test_composition.py`, and printed in BENCHMARKS.md.
"""

from __future__ import annotations

import math

import pytest

from benchmarks.accounting.composition import LocalTraining

# records, batch, sigma, iterations, rounds, printed mu
TABLE_1 = [
    (600, 16, 1.0, 38, 93, "2.71"),
    (600, 16, 0.9, 38, 83, "3.10"),
    (600, 16, 0.75, 38, 64, "3.96"),
    (600, 16, 1.0, 38, 194, "3.92"),
    (600, 16, 0.9, 38, 176, "4.51"),
    (600, 16, 0.75, 38, 127, "5.58"),
    (600, 16, 1.0, 38, 386, "5.52"),
    (600, 16, 0.9, 38, 325, "6.13"),
    (600, 16, 0.75, 38, 245, "7.75"),
]
TABLE_2 = [
    # The rows of B = 16 are those of table 1 at p = 0.5.
    (600, 8, 1.0, 76, 266, "3.24"),
    (600, 8, 0.9, 76, 229, "3.64"),
    (600, 8, 0.75, 76, 191, "4.84"),
]
TABLE_3 = [
    (500, 16, 1.0, 32, 468, "6.70"),
    (500, 16, 0.75, 32, 321, "9.77"),
    (500, 16, 0.5, 32, 207, "26.81"),
    (500, 16, 1.0, 32, 904, "9.31"),
    (500, 16, 0.75, 32, 671, "14.13"),
    (500, 16, 0.5, 32, 405, "37.51"),
]


def test_there_are_eighteen() -> None:
    assert len(TABLE_1 + TABLE_2 + TABLE_3) == 18


@pytest.mark.parametrize(
    ("records", "batch", "sigma", "iterations", "rounds", "printed"), [*TABLE_1, *TABLE_2, *TABLE_3]
)
def test_theorem_2_gives_every_printed_mu(
    records: int, batch: int, sigma: float, iterations: int, rounds: int, printed: str
) -> None:
    training = LocalTraining(records, batch, sigma, iterations, rounds)
    assert f"{training.clt_mu:.2f}" == printed


EXACT = [
    (TABLE_1[0], 2.600, 2.133),
    (TABLE_1[8], 6.861, 5.524),
    (TABLE_3[5], 20.206, 16.842),
]


@pytest.mark.parametrize(("row", "operator", "poisson"), EXACT)
def test_the_exact_composition_is_below_the_limit(
    row: tuple[int, int, float, int, int, str], operator: float, poisson: float
) -> None:
    """The mu whose Gaussian mechanism has the same epsilon at delta 1e-5."""
    training = LocalTraining(*row[:5])
    assert training.as_printed(interval=1e-3).mu_at(1e-5) == pytest.approx(operator, abs=1e-3)
    assert training.exact(interval=1e-3).mu_at(1e-5) == pytest.approx(poisson, abs=1e-3)


CHARGED = [(TABLE_1[0], 2.367), (TABLE_1[8], 6.086), (TABLE_2[0], 2.628), (TABLE_3[1], 7.432)]


@pytest.mark.parametrize(("row", "charged"), CHARGED)
def test_what_a_ledger_is_charged_is_above_the_exact_mu_and_below_the_limit(
    row: tuple[int, int, float, int, int, str], charged: float
) -> None:
    """Of add-or-remove neighbors with Poisson batches, as `exact`; the limit is of neighbors that replace."""
    training = LocalTraining(*row[:5])
    found = math.sqrt(training.charged.mu_squared)
    assert found == pytest.approx(charged, abs=2e-3)
    assert training.exact(interval=1e-3).mu_at(1e-5) < found < training.clt_mu


def test_beyond_a_mu_of_ten_a_ledger_is_charged_as_if_nobody_were_sampled() -> None:
    training = LocalTraining(*TABLE_3[5][:5])
    assert training.charged.mu_squared == pytest.approx(training.steps / training.noise_multiplier**2)
