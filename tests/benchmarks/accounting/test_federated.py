"""Federated f-DP: the two definitions, what follows from one another, and what a theorem of the paper leaves out."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.accounting.federated import (
    LocalTraining,
    one_round_with_client_sampling,
    strong_mu_as_printed,
    strong_trade_off,
    theorem_1_as_printed,
    weak_trade_off,
)
from benchmarks.accounting.tradeoff import Curve, distance, epsilon_delta, identity, lower_hull, of_pair, product
from labeler.accounting.gaussian import delta_of_epsilon
from labeler.errors import InvalidSetting

GRID = np.linspace(0, 1, 501)
NO_PRIVACY = of_pair([1.0, 0.0], [0.0, 1.0])


@st.composite
def views(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Joint laws of what three clients see, on two neighbouring inputs."""
    weights = st.lists(st.integers(0, 9), min_size=12, max_size=12).filter(lambda values: sum(values) > 0)
    first, second = (np.array(draw(weights), dtype=float).reshape(2, 2, 3) for _ in range(2))
    return first / first.sum(), second / second.sum()


@given(pair=views(), victim=st.integers(0, 2))
@settings(max_examples=150, deadline=None)
def test_strong_implies_weak(pair: tuple[np.ndarray, np.ndarray], victim: int) -> None:
    weak, strong = weak_trade_off(*pair, victim), strong_trade_off(*pair, victim)
    assert (strong(GRID) <= weak(GRID) + 1e-9).all()


@given(pair=views())
@settings(max_examples=60, deadline=None)
def test_with_two_clients_weak_and_strong_are_the_same(pair: tuple[np.ndarray, np.ndarray]) -> None:
    first, second = (part.sum(axis=2) for part in pair)
    assert distance(weak_trade_off(first, second, 0), strong_trade_off(first, second, 0)) < 1e-9


def test_weak_does_not_imply_strong() -> None:
    """One client sees x + z, another z, with z uniform: each alone learns nothing, together they learn x."""
    on_zero, on_one = np.zeros((1, 4, 4)), np.zeros((1, 4, 4))
    for z in range(4):
        on_zero[0, z, z] = on_one[0, (z + 1) % 4, z] = 1 / 4
    assert distance(weak_trade_off(on_zero, on_one, 0), identity()) < 1e-12
    assert distance(strong_trade_off(on_zero, on_one, 0), NO_PRIVACY) < 1e-12


def _global_model_views(
    f: Curve, sync_probability: float, rounds: int, *, clients: int
) -> tuple[np.ndarray, np.ndarray]:
    """PriFedSync with f-DP local training of client 0, whose others' models pass on what they have seen.

    What client 0 sends is an outcome of f's canonical pair; a client that gets a helper model learns whatever the
    senders of that round knew. Views are tuples of what was learned of each round, -1 for nothing.
    """
    p_law, q_law = f.pair()
    seen: list[dict[tuple[tuple[int, ...], ...], float]] = []
    for law in (p_law, q_law):
        joint: dict[tuple[tuple[int, ...], ...], float] = {}
        for sent in itertools.product(range(len(law)), repeat=rounds):
            chance_sent = math.prod(float(law[outcome]) for outcome in sent)
            for sampled in itertools.product(itertools.product([0, 1], repeat=clients), repeat=rounds):
                chance = chance_sent
                knows = [[-1] * rounds for _ in range(clients)]
                for now, omega in enumerate(sampled):
                    for in_round in omega:
                        chance *= sync_probability if in_round else 1 - sync_probability
                    senders = [client for client in range(clients) if omega[client]]
                    helper = [max([knows[c][past] for c in senders if c != 0] or [-1]) for past in range(rounds)]
                    if omega[0]:
                        helper[now] = sent[now]
                    for client in senders:
                        knows[client] = [max(old, new) for old, new in zip(knows[client], helper, strict=True)]
                key = tuple(tuple(part) for part in knows)
                joint[key] = joint.get(key, 0.0) + chance
        seen.append(joint)
    outcomes = sorted(set(seen[0]) | set(seen[1]))
    names = [sorted({outcome[client] for outcome in outcomes}) for client in range(clients)]
    laws = []
    for joint in seen:
        law = np.zeros([len(part) for part in names])
        for outcome, chance in joint.items():
            law[tuple(names[client].index(outcome[client]) for client in range(clients))] += chance
        laws.append(law)
    return laws[0], laws[1]


@pytest.mark.parametrize("f", [epsilon_delta(0.8, 0.05), NO_PRIVACY])
def test_one_round_is_as_the_lemma_says(f: Curve) -> None:
    for p in (0.3, 0.7, 1.0):
        first, second = _global_model_views(f, p, 1, clients=3)
        bound = one_round_with_client_sampling(f, p)
        assert (weak_trade_off(first, second, 0)(GRID) >= bound(GRID) - 1e-9).all()
        assert float(bound(0.0)) == pytest.approx(max(float(f(0.0)), 1 - p * p))


def test_two_rounds_are_less_private_than_theorem_1_prints() -> None:
    """What client 0 sends in round 1 reaches client 1 in round 2 through client 2."""
    p = 0.5
    first, second = _global_model_views(NO_PRIVACY, p, 2, clients=3)
    weak, printed = weak_trade_off(first, second, 0), theorem_1_as_printed(NO_PRIVACY, p, 2)
    known = 1 - (1 - p**2) ** 2
    assert float(printed.delta(0.0)) == pytest.approx(known)
    assert float(weak.delta(0.0)) == pytest.approx(known + p**4 * (1 - p) ** 2)
    assert float(weak(0.0)) < float(printed(0.0)) - 0.01


@pytest.mark.parametrize("p", [0.3, 0.5, 1.0])
def test_what_is_guaranteed_holds_in_both_senses(p: float) -> None:
    f = epsilon_delta(0.8, 0.05)
    twice = product(f, f)
    for clients in (2, 3):
        first, second = _global_model_views(f, p, 2, clients=clients)
        assert (strong_trade_off(first, second, 0)(GRID) >= twice(GRID) - 1e-9).all()
        assert (weak_trade_off(first, second, 0)(GRID) >= twice(GRID) - 1e-9).all()
    if p == 1.0:
        assert distance(weak_trade_off(first, second, 0), twice) < 1e-9


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
    with pytest.raises(InvalidSetting, match="client's sampling"):
        one_round_with_client_sampling(NO_PRIVACY, 1.5)
    with pytest.raises(InvalidSetting, match="victim"):
        weak_trade_off(np.ones((1, 1)), np.ones((1, 1)), 2)


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


@pytest.mark.parametrize("p", [0.0, 0.3, 0.55, 0.9, 1.0])
def test_a_round_of_sampled_clients_is_the_higher_of_two_curves_everywhere(p: float) -> None:
    """Also between the corners of both, where they cross."""
    f = lower_hull(np.array([0.0, 0.2, 0.6, 1.0]), np.array([0.7, 0.35, 0.1, 0.0]))
    alphas = np.linspace(0, 1, 2001)
    found = one_round_with_client_sampling(f, p)
    expected = np.maximum(f(alphas), np.maximum(0.0, 1 - p**2 - alphas))
    assert np.abs(found(alphas) - expected).max() < 1e-12


def test_views_without_a_client_or_of_two_shapes_are_refused() -> None:
    good = np.full((2, 2), 0.25)
    for first, second, victim in ((good, np.full((2, 3), 1 / 6), 0), (good, good, 2), (good, good, -1),
                                  (np.array([0.5, 0.5]), np.array([0.5, 0.5]), 0)):  # fmt: skip
        with pytest.raises(InvalidSetting, match=r"^views need one axis per client, the same on both inputs"):
            weak_trade_off(first, second, victim)
