"""The table of PriFedSync: its quick version on real digits and its rows of accounting.

The noise is what the accountant was told, helper models follow equation 2.1; one record moves a client's sum by at most
the bound.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from benchmarks.accounting.composition import LocalTraining
from benchmarks.papers.prifedsync import NO_RECORD, PRINTED, LinearClients, PriFedSync, cells, train
from labeler.accounting.gaussian import epsilon_of_delta, mu_of_epsilon
from labeler.randomness import ByteSource, seeded_source
from workers.progress import silent


def test_the_table_holds_the_eighteen_different_mu_that_are_printed() -> None:
    assert len(PRINTED) == 18
    for printed in PRINTED:
        assert f"{printed.training.clt_mu:.2f}" == printed.mu


def test_keys_of_cells_are_unique_and_every_printed_mu_has_one() -> None:
    keys = [cell.key for cell in cells(Path("nowhere"), full=True)]
    assert len(set(keys)) == len(keys)
    assert sum(key.startswith("mu ") for key in keys) == 18


def test_a_row_of_accounting_states_the_limit_and_every_exact_price_beside_the_printed_mu() -> None:
    """Fourth row of table 1, p = 0.5. Weaker batches, fewer rounds and the true neighbors order the prices."""
    cell = next(cell for cell in cells(Path("nowhere"), full=True) if "p 0.5, sigma 1, B 16, R 194" in cell.key)
    rows = cell.run(silent)
    values = {row.method: row.value for row in rows}
    assert values["theorem 2, the limit"] == pytest.approx(3.9156, abs=1e-3)
    exact = values["exact composition of C_p(G)"]
    assert values["exact, Poisson batches, p R rounds taken part in"] < values["exact, Poisson batches"] < exact
    assert exact < values["theorem 2, the limit"] < values["exact, fixed batches, noise sigma * C"]
    assert all(row.reference == "3.92 (paper, as printed)" for row in rows)
    assert all(row.level == "instance" for row in rows)


def test_the_quick_table_trains_on_real_digits(data_root: Path) -> None:
    rows = cells(data_root, full=False)[-1].run(silent)
    personal, shared, _ = (row.value for row in rows)
    assert personal > 90
    assert personal > shared
    for row in rows:
        assert row.epsilon is not None
        assert row.settings["exact_mu"] <= row.settings["as_in_paper_mu"] <= 2.71
        assert row.settings["seeds"] == [0]


def test_the_headline_setting_stays_within_the_printed_mu_by_the_papers_formula_too() -> None:
    cell = LocalTraining(600, 600, 2.74, 1, 40)
    assert cell.clt_mu <= 2.71


SMALL = PriFedSync(
    clients=4, records=20, batch=20, iterations=2, rounds=3, noise_multiplier=1.5, clip_norm=0.4,
    learning_rate=0.5, momentum=0.0,
)  # fmt: skip


def _clients(settings: PriFedSync, *, dimension: int = 6, classes: int = 3, seed: int = 0) -> LinearClients:
    """Classes apart by their mean, so that there is something to learn."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, size=(settings.clients, settings.records))
    inputs = 0.3 * rng.normal(size=(*labels.shape, dimension)) + np.eye(classes, dimension)[labels]
    inputs /= np.linalg.norm(inputs, axis=2, keepdims=True) * (1 + 1e-6)
    return LinearClients(torch.from_numpy(inputs).float(), torch.from_numpy(labels), classes)


def _sources(settings: PriFedSync, name: str = "test") -> list[ByteSource]:
    return [seeded_source(f"{name} {client}".encode()) for client in range(settings.clients)]


def test_the_noise_of_the_real_pipeline_is_what_the_accountant_was_told() -> None:
    """No records at all, plain SGD with rate 1, B = 20: models hold nothing but noise / 20. False alarm below 1e-6."""
    settings = replace(SMALL, clients=10, iterations=1, rounds=4, interpolation=0.0, learning_rate=1.0)
    data = _clients(settings, dimension=400)
    empty = LinearClients(data.inputs, torch.full_like(data.labels, NO_RECORD), 3)
    trained = train(settings, empty, sources=_sources(settings), schedule=settings.schedule(seed=0))
    told = settings.noisy_sum(empty.dimension)
    assert told.sigma == settings.noise_multiplier * settings.clip_norm
    each = trained.models.numpy() * settings.batch / (told.sigma * math.sqrt(settings.rounds))
    statistic = float(np.square(each).sum())
    low, high = chi2.ppf([2.5e-7, 1 - 2.5e-7], each.size)
    assert low < statistic < high
    # And independent among clients: correlations of 45 pairs, each normal with variance 1 / D.
    correlations = np.asarray(np.corrcoef(each))[np.triu_indices(10, 1)]
    assert np.abs(correlations).max() < 6.5 / math.sqrt(empty.dimension)


def test_the_price_is_that_of_the_event_and_barely_above_continuous_noise() -> None:
    epsilon, mu = SMALL.price(18, SMALL.rounds, 1e-5)
    continuous = math.sqrt(6) / 1.5
    assert continuous <= mu <= continuous * 1.005
    assert epsilon >= epsilon_of_delta(1e-5, continuous)
    assert mu_of_epsilon(epsilon, 1e-5) == pytest.approx(mu)
    sampled = replace(SMALL, batch=2)
    assert sampled.price(18, 3, 1e-5)[1] >= sampled.local_training(3).exact().mu_at(1e-5)
    assert sampled.price(18, 3, 1e-5)[1] == pytest.approx(sampled.local_training(3).exact().mu_at(1e-5), rel=0.01)


def test_rounds_follow_algorithm_1_and_equation_2_1() -> None:
    """A twin in numpy, with gradients by autograd and the same noise taken from the same streams."""
    settings = replace(SMALL, interpolation=0.3, server_rate=0.7, momentum=0.9, sync_probability=0.6, rounds=5)
    data, schedule = _clients(settings), settings.schedule(seed=4)
    assert 0 < schedule.sum() < schedule.size
    trained = train(settings, data, sources=_sources(settings), schedule=schedule)
    sources, noisy_sum = _sources(settings), settings.noisy_sum(18)
    models, velocity, shared = np.zeros((4, 18)), np.zeros((4, 18)), np.zeros(18)
    for members in schedule:
        for client in np.flatnonzero(members).tolist():
            own = 0.7 * models[client] + 0.3 * shared
            for _ in range(settings.iterations):
                total = np.zeros(18)
                for x, y in zip(data.inputs[client].double(), data.labels[client], strict=True):
                    weights = torch.from_numpy(own).reshape(6, 3).requires_grad_()
                    (gradient,) = torch.autograd.grad(torch.nn.functional.cross_entropy(x @ weights, y), weights)
                    total += (gradient * min(1.0, 0.4 / float(gradient.norm()))).flatten().numpy()
                noisy = noisy_sum.open(noisy_sum.contribution(total, source=sources[client]))
                velocity[client] = 0.9 * velocity[client] + noisy / 20
                own = own - 0.5 * velocity[client]
            models[client] = own
        if members.any():
            shared = 0.3 * shared + 0.7 * models[members].mean(0)
    assert trained.models.numpy() == pytest.approx(models, abs=1e-4)
    assert trained.global_model.numpy() == pytest.approx(shared, abs=1e-4)
    assert trained.rounds_taken.tolist() == schedule.sum(0).tolist()


def test_a_record_of_one_client_reaches_others_only_through_its_noisy_model() -> None:
    """With alpha = 0 nobody learns from anybody: all other models stay, bit for bit, when a record is removed."""
    settings = replace(SMALL, interpolation=0.0, batch=7)
    data = _clients(settings)
    labels = data.labels.clone()
    labels[1, 5] = NO_RECORD
    one = train(settings, data, sources=_sources(settings), schedule=settings.schedule(seed=0))
    other = train(
        settings, LinearClients(data.inputs, labels, 3), sources=_sources(settings), schedule=settings.schedule(seed=0)
    )
    assert (one.models[[0, 2, 3]] == other.models[[0, 2, 3]]).all()
    assert (one.models[1] != other.models[1]).any()


def test_training_on_neighbouring_sets_differs_by_the_sensitivity_before_noise() -> None:
    """One whole step with equal noise streams: what was added to the noise moves by at most C, seen in the models."""
    settings = replace(SMALL, iterations=1, rounds=1, learning_rate=1.0, interpolation=0.0)
    data = _clients(settings)
    base = train(settings, data, sources=_sources(settings), schedule=settings.schedule(seed=0)).models
    spec = settings.noisy_sum(18)
    for row in range(settings.records):
        labels = data.labels.clone()
        labels[0, row] = NO_RECORD
        neighbour = LinearClients(data.inputs, labels, 3)
        models = train(settings, neighbour, sources=_sources(settings), schedule=settings.schedule(seed=0)).models
        moved = float((models - base)[0].norm()) * settings.batch
        assert 0 < moved <= spec.sensitivity + math.sqrt(18) / spec.scale
