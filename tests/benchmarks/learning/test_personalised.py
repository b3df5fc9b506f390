"""PriFedSync: the noise is what the accountant was told, coins are fair, helper models follow equation 2.1."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import binom, chi2

from benchmarks.learning.personalised import NO_RECORD, LinearClients, PriFedSync, sample, train
from labeler.accounting.gaussian import epsilon_of_delta, mu_of_epsilon
from labeler.errors import InvalidSetting
from labeler.randomness import ByteSource, seeded_source

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


def test_coins_are_independent_and_show_the_batch_rate() -> None:
    """Counts over 400 samples of 20 rows, each row and the whole within binomial quantiles; false alarm below 1e-6."""
    settings = replace(SMALL, batch=3)
    source = seeded_source(b"coins")
    drawn = np.array([sample(settings, source) for _ in range(400)])
    low, high = binom.ppf([1e-8, 1 - 1e-8], 400, 3 / 20)
    assert ((drawn.sum(0) >= low) & (drawn.sum(0) <= high)).all()
    low, high = binom.ppf([1e-8, 1 - 1e-8], 8000, 3 / 20)
    assert low <= drawn.sum() <= high
    assert len(set(drawn.sum(1).tolist())) > 3  # Poisson sampling: no fixed size
    assert sample(SMALL, source).all()


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


def test_many_clients_learn_and_their_own_models_are_better_than_the_common_one() -> None:
    """Clients whose classes carry different names: personal models fit, a common one cannot."""
    settings = replace(SMALL, clients=6, records=60, batch=60, rounds=10, noise_multiplier=3.0, learning_rate=8.0)
    data = _clients(settings, seed=1)
    labels = (data.labels + torch.arange(6)[:, None]) % 3
    personal = LinearClients(data.inputs, labels, 3)
    trained = train(settings, personal, sources=_sources(settings), schedule=settings.schedule(seed=0))
    own = personal.correct(trained.models, data.inputs, labels).double().mean()
    shared = personal.correct(trained.global_model.repeat(6, 1), data.inputs, labels).double().mean()
    assert float(own) > 0.8 > float(shared) + 0.2


def test_what_does_not_fit_is_refused() -> None:
    data, schedule = _clients(SMALL), SMALL.schedule(seed=0)
    with pytest.raises(InvalidSetting, match="4 clients of 20 rows"):
        train(SMALL, data, sources=_sources(SMALL)[:3], schedule=schedule)
    with pytest.raises(InvalidSetting, match="schedule"):
        train(SMALL, data, sources=_sources(SMALL), schedule=schedule[:, :3])
    for wrong in ({"interpolation": 1.5}, {"batch": 21}, {"learning_rate": 0.0}, {"clients": 0}):
        with pytest.raises(InvalidSetting):
            replace(SMALL, **wrong)
