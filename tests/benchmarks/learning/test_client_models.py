"""Clipped gradient sums of many clients: two implementations agree, and one record moves a sum by at most the bound."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.learning.gradients import sum_sensitivity
from benchmarks.learning.personalised import NO_RECORD, LinearClients
from labeler.errors import BadData, InvalidSetting, PrivacyRefusal


def _records(
    rng: np.random.Generator, clients: int, rows: int, dimension: int, classes: int
) -> tuple[torch.Tensor, ...]:
    inputs = torch.nn.functional.normalize(torch.from_numpy(rng.normal(size=(clients, rows, dimension))), dim=2)
    return inputs.float() * (1 - 1e-6), torch.from_numpy(rng.integers(0, classes, size=(clients, rows)))


def test_the_linear_sums_are_those_of_gradients_per_record(rng: np.random.Generator) -> None:
    """Oracle: autograd of each record's own loss, clipped by hand."""
    inputs, labels = _records(rng, 3, 7, 5, 4)
    data = LinearClients(inputs, labels, 4)
    models = torch.from_numpy(rng.normal(size=(3, data.dimension)))
    sampled = torch.from_numpy(rng.random((3, 7)) < 0.6)
    for clip_norm in (0.2, 5.0):
        sums = data.gradient_sums(torch.arange(3), models, sampled, clip_norm=clip_norm)
        for client in range(3):
            expected = torch.zeros(5, 4, dtype=torch.float64)
            for row in np.flatnonzero(sampled[client].numpy()).tolist():
                weights = models[client].reshape(5, 4).clone().requires_grad_()
                loss = torch.nn.functional.cross_entropy(inputs[client, row].double() @ weights, labels[client, row])
                (gradient,) = torch.autograd.grad(loss, weights)
                expected += gradient * min(1.0, clip_norm / float(gradient.norm()))
            assert sums[client].reshape(5, 4).numpy() == pytest.approx(expected.numpy(), abs=1e-5 * clip_norm)


@given(
    seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 40), clip=st.sampled_from([0.05, 0.3, 2.0]),
    size=st.sampled_from([0.0, 1.0, 30.0]), everybody=st.booleans(),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_one_record_moves_a_clients_sum_by_at_most_the_bound_and_nobody_elses_at_all(
    seed: int, rows: int, clip: float, size: float, everybody: bool
) -> None:
    """Neighbouring sets: client 1 has a record, or not. The packed places of its other records change with it."""
    rng = np.random.default_rng(seed)
    inputs, labels = _records(rng, 3, rows, 8, 5)
    models = torch.from_numpy(size * rng.normal(size=(3, 40)))
    sampled = torch.from_numpy(rng.random((3, rows)) < (1.0 if everybody else 0.4))
    without = sampled.clone()
    without[1, int(rng.integers(rows))] = False
    data = LinearClients(inputs, labels, 5)
    one = data.gradient_sums(torch.arange(3), models, sampled, clip_norm=clip)
    other = data.gradient_sums(torch.arange(3), models, without, clip_norm=clip)
    assert float((one - other)[1].norm()) <= sum_sensitivity(clip)
    assert float((one - other)[[0, 2]].norm()) <= 1e-9
    assert float(one.norm(dim=1).max()) <= int(sampled.sum(1).max()) * clip + 1e-9


def test_a_client_without_a_sampled_record_adds_nothing(rng: np.random.Generator) -> None:
    inputs, labels = _records(rng, 2, 4, 3, 2)
    data = LinearClients(inputs, labels, 2)
    nobody = torch.zeros(2, 4, dtype=torch.bool)
    sums = data.gradient_sums(torch.arange(2), torch.zeros(2, 6).double(), nobody, clip_norm=1.0)
    assert (sums == 0).all()


def test_what_the_proof_does_not_cover_is_refused(rng: np.random.Generator) -> None:
    inputs, labels = _records(rng, 2, 4, 3, 2)
    with pytest.raises(BadData, match="longer than 1"):
        LinearClients(inputs * 2, labels, 2)
    with pytest.raises(BadData, match="not finite"):
        LinearClients(inputs * torch.nan, labels, 2)
    with pytest.raises(InvalidSetting, match="labels must lie"):
        LinearClients(inputs, labels + 2, 2)
    with pytest.raises(InvalidSetting, match="shape"):
        LinearClients(inputs[0], labels, 2)
    LinearClients(inputs, torch.full_like(labels, NO_RECORD), 2)
    data = LinearClients(inputs, labels, 2)
    for length in (1e12, torch.nan):
        with pytest.raises(PrivacyRefusal, match="left the range"):
            data.gradient_sums(torch.arange(2), torch.full((2, 6), length).double(), labels >= 0, clip_norm=1.0)
