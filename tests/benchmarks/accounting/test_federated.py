"""Federated f-DP: what local training costs, and what a theorem of the paper leaves out."""

from __future__ import annotations

import itertools
import math

import pytest

from benchmarks.accounting.federated import LocalTraining, strong_mu_as_printed
from labeler.accounting.gaussian import delta_of_epsilon
from labeler.errors import InvalidSetting


def test_two_rounds_are_less_private_than_theorem_1_prints() -> None:
    """What client 0 sends in round 1 reaches client 1 in round 2 through client 2.

    Client 0 sends its record as it is; whoever takes part in a round gets a helper model that passes on what its
    senders knew. Theorem 1 leaves 1 - (1 - p^2)^2 for the probability that client 1 comes to know the record.
    """
    p, knows_it = 0.5, 0.0
    for rounds in itertools.product(itertools.product([False, True], repeat=3), repeat=2):
        known, chance = {0}, 1.0
        for taking_part in rounds:
            chance *= math.prod(p if one else 1 - p for one in taking_part)
            senders = {client for client, one in enumerate(taking_part) if one}
            known |= senders if senders & known else set()
        knows_it += chance * (1 in known)
    assert knows_it == pytest.approx(1 - (1 - p**2) ** 2 + p**4 * (1 - p) ** 2)


def test_theorem_2_is_what_the_exact_composition_tends_to() -> None:
    """With B/n sqrt(KR) fixed and more and more steps, the mu of the exact composition approaches the printed limit."""
    gaps = []
    for steps in (100, 2_500, 40_000):
        training = LocalTraining(
            records=int(8 * math.sqrt(steps)), batch=8, noise_multiplier=1.0, iterations=steps, rounds=1
        )
        exact = training.as_printed(interval=5e-4).mu_at(1e-2)
        gaps.append(abs(training.clt_mu / exact - 1))
    assert gaps[0] > gaps[1] > gaps[2]
    assert gaps[2] < 0.015


def test_the_limit_is_no_bound() -> None:
    """One round of the first row of table 1: 38 steps are too few, and the limit promises too much."""
    one_round = LocalTraining(records=600, batch=16, noise_multiplier=1.0, iterations=38, rounds=1)
    assert one_round.clt_mu == pytest.approx(0.281, abs=1e-3)
    assert one_round.as_printed().mu_at(1e-5) == pytest.approx(0.374, abs=1e-3)
    assert one_round.exact().mu_at(1e-5) > 1.2 * one_round.clt_mu


def test_whole_batches_compose_to_a_gaussian() -> None:
    training = LocalTraining(records=100, batch=100, noise_multiplier=5.0, iterations=5, rounds=5)
    for composition in (training.exact(), training.as_printed()):
        assert composition.delta(1.0) == pytest.approx(delta_of_epsilon(1.0, 1.0), rel=1e-4)
    assert training.replaced().mu_at(1e-5) == pytest.approx(2.0, rel=1e-4)


def test_the_strong_mu_as_printed_grows_with_the_clients() -> None:
    assert strong_mu_as_printed(2.71, 100) == pytest.approx(2.71 * math.sqrt(99))


def test_numbers_out_of_bounds_are_refused() -> None:
    with pytest.raises(InvalidSetting, match="batches within n"):
        LocalTraining(records=10, batch=11, noise_multiplier=1.0, iterations=1, rounds=1)
    with pytest.raises(InvalidSetting, match="noise multiplier"):
        LocalTraining(records=10, batch=1, noise_multiplier=0.0, iterations=1, rounds=1)


@pytest.mark.parametrize("field", ["records", "batch", "iterations", "rounds"])
def test_training_of_nothing_is_refused(field: str) -> None:
    fields = {"records": 10, "batch": 2, "iterations": 3, "rounds": 4}
    LocalTraining(noise_multiplier=1.0, **fields | {"batch": 10})
    with pytest.raises(InvalidSetting) as refusal:
        LocalTraining(noise_multiplier=1.0, **fields | {field: 0})
    assert str(refusal.value) == ("local training needs at least one record, iteration and round, and batches within n")
    for bad in (math.inf, 0.0):
        with pytest.raises(InvalidSetting, match="must be positive and finite"):
            LocalTraining(noise_multiplier=bad, **fields)


def test_wider_cells_of_loss_cost_more_in_every_account_of_local_training() -> None:
    training = LocalTraining(records=100, batch=10, noise_multiplier=2.0, iterations=2, rounds=2)
    for account in (training.as_printed, training.exact, training.replaced):
        narrow, wide = account(interval=1e-3).epsilon(1e-3), account(interval=0.05).epsilon(1e-3)
        assert narrow < wide < narrow + 0.2
    whole = LocalTraining(records=10, batch=10, noise_multiplier=2.0, iterations=2, rounds=2)
    assert training.replaced(interval=1e-3).epsilon(1e-3) < 0.6 * whole.replaced(interval=1e-3).epsilon(1e-3)
