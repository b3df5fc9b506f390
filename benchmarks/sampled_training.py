"""What sampled training is charged, against the limit theorem and the exact profile: `labeler bench sampled-training`.

For usual settings (sampling rate q, noise multiplier sigma, rounds T): mu'^2 of the certified pair over
q^2 T (e^(1/sigma^2) - 1), what the central limit theorem of Gaussian differential privacy says of it; the certified
epsilon of these rounds alone over that of dp-accounting's privacy loss distributions; and the epsilon that a ledger
states of the pair, over the same. With `--full` also what a ledger is charged for the rounds of the papers' baselines,
whose noise was chosen for the epsilon of these rounds alone. Nothing is random.
"""

from __future__ import annotations

import math
import time
from fractions import Fraction
from typing import Final

from benchmarks.accounting.composition import poisson
from benchmarks.accounting.sampled import noise_multiplier_of
from benchmarks.rows import BenchRow
from labeler.accounting.gaussian import epsilon_of_delta
from labeler.accounting.sampled import sampled_epsilon, sampled_pair
from workers.progress import ProgressCallback, silent

QUICK: Final = ((Fraction(1, 100), 2.0, 1_000), (Fraction(1, 5), 3.0, 50))
FULL: Final = (
    *QUICK,
    (Fraction(1, 100), 1.0, 1_000),
    (Fraction(1, 100), 4.0, 10_000),
    (Fraction(256, 60_000), 1.1, 14_063),
    (Fraction(1, 50), 1.1, 3_000),
    (Fraction(1, 10), 5.0, 100),
    (Fraction(1, 4), 2.0, 30),
    (Fraction(1, 2), 4.0, 100),
    (Fraction(1, 1_000), 0.8, 10_000),
)
"""q, sigma, T: noisy SGD (60,000 records, batches of 256, 60 epochs), rounds of agents, little noise, rare samples."""

STUDIES: Final = (
    ("DP-FedAvg on MNIST", 1e-3, {0.5: (0.5, 8), 1.0: (0.5, 12), 2.0: (0.4, 30), 2.7: (0.4, 30), 4.3: (0.4, 40)}),
    ("DP-FedSGD on Office-Caltech10", 1e-4, dict.fromkeys((0.5, 1.0, 2.0, 4.0), (0.2, 30))),
)
"""The tables of `labeler bench papers federated`: name, delta, and q and T at each epsilon."""

DELTAS: Final = (1e-5, 1e-6)
ROOMY: Final = 1e-12
CHARGED: Final = "the pair a ledger is charged"
_FINENESS = 0.05


def bench_sampled_training(*, full: bool = False, progress: ProgressCallback = silent) -> list[BenchRow]:
    """Ratios and seconds, several a setting.

    Args:
        full: all settings; else two.
        progress: told what is done.
    """
    rows = []
    settings = FULL if full else QUICK
    for done, (rate, sigma, rounds) in enumerate(settings):
        progress("settings", done, len(settings))
        rows += _rows(rate, sigma, rounds)
    for name, delta, table in STUDIES if full else ():
        for epsilon, (probability, rounds) in table.items():
            rows.append(_study(name, epsilon, delta, probability, rounds))
    return rows


def _study(name: str, epsilon: float, delta: float, probability: float, rounds: int) -> BenchRow:
    """What a ledger is charged for rounds whose noise a study chose for their own epsilon."""
    sigma = noise_multiplier_of(epsilon, delta, sampling_probability=probability, rounds=rounds)
    charged = sampled_pair(1 / sigma, Fraction(probability).limit_denominator(1000), rounds)
    return BenchRow(
        name,
        CHARGED,
        "epsilon",
        epsilon_of_delta(delta, math.sqrt(charged.mu_squared)),
        epsilon=epsilon,
        delta=delta,
        reference=f"{epsilon:g}, certified of these rounds alone",
        settings={"sigma": sigma, "sampling_rate": probability, "rounds": rounds},
    )


def _rows(rate: Fraction, sigma: float, rounds: int) -> list[BenchRow]:
    case = f"q {rate}, sigma {sigma:g}, T {rounds:,}"
    limit = float(rate) ** 2 * rounds * math.expm1(1 / sigma**2)
    mu = 1 / sigma
    started = time.perf_counter()
    charged = sampled_pair.__wrapped__(mu, rate, rounds)
    seconds = time.perf_counter() - started
    roomy = sampled_pair(mu, rate, rounds, delta_0=ROOMY)
    oracle = poisson(sigma, float(rate), rounds, interval=min(5e-4, _FINENESS * float(rate) / sigma))

    over = "mu^2 over the limit theorem's"
    rows = [
        BenchRow(case, CHARGED, "mu^2", float(charged.mu_squared), seconds=seconds),
        BenchRow(case, CHARGED, over, float(charged.mu_squared) / limit),
        BenchRow(case, f"a pair with delta_0 {ROOMY:g}", over, float(roomy.mu_squared) / limit),
    ]
    for delta in DELTAS:
        exact = oracle.epsilon(delta)
        for method, epsilon in (
            ("certified profile", sampled_epsilon(mu, rate, rounds, delta)),
            (CHARGED, epsilon_of_delta(delta, math.sqrt(charged.mu_squared))),
        ):
            rows.append(
                BenchRow(
                    case,
                    method,
                    "epsilon over dp-accounting's",
                    epsilon / exact,
                    epsilon=epsilon,
                    delta=delta,
                    reference=f"{exact:.4f} by dp-accounting",
                )
            )
    return rows
