"""Per-record clipped gradient sums: against Opacus, against plain autograd, and against records that leave."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from benchmarks.learning.gradients import (
    BLOCK,
    SENSITIVITY_MARGIN,
    clipped_gradient_sums,
    flatten,
    sum_sensitivity,
)
from labeler.errors import InvalidSetting

ROWS = 40


def _network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(), nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 16, 10)
    )


def _params(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in module.named_parameters()}


def _data(seed: int = 0, rows: int = ROWS, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    images = scale * torch.randn(rows, 1, 13, 13, generator=generator)
    return images, torch.randint(0, 10, (rows,), generator=generator)


def _one_by_one(module: nn.Module, inputs, labels, weights, clip_norm: float) -> torch.Tensor:
    total = torch.zeros(sum(value.numel() for value in module.parameters()), dtype=torch.float64)
    for row in range(len(labels)):
        loss = functional.cross_entropy(module(inputs[row : row + 1]), labels[row : row + 1])
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))]).double()
        total += weights[row] * gradient * min(1.0, clip_norm / float(gradient.norm()))
    return total


@pytest.mark.parametrize("clip_norm", [0.05, 1.0, 1e6])
def test_the_sum_is_that_of_records_clipped_one_by_one(clip_norm: float) -> None:
    module, (inputs, labels) = _network(), _data()
    weights = (torch.arange(ROWS) % 3 != 0).long()
    sums = clipped_gradient_sums(module, _params(module), inputs, labels, weights, clip_norm=clip_norm)
    expected = _one_by_one(module, inputs, labels, weights, clip_norm)
    assert float((flatten(sums) - expected).norm()) <= 1e-4 * float(expected.norm())


@pytest.mark.filterwarnings("ignore")
def test_opacus_finds_the_same_clipped_sum() -> None:
    grad_sample = pytest.importorskip("opacus.grad_sample", reason="Opacus is not installed")
    module, (inputs, labels) = _network(), _data(3)
    sums = clipped_gradient_sums(module, _params(module), inputs, labels, torch.ones(ROWS), clip_norm=0.7)
    wrapped = grad_sample.GradSampleModule(module, loss_reduction="sum")
    functional.cross_entropy(wrapped(inputs), labels, reduction="sum").backward()
    samples = [value.grad_sample for value in module.parameters()]
    norms = torch.cat([sample.flatten(1) for sample in samples], dim=1).norm(dim=1)
    factors = (0.7 / norms).clamp_max(1.0)
    assert int((factors < 1).sum()) > 0
    for (name, ours), sample in zip(sums.items(), samples, strict=True):
        theirs = torch.einsum("b,b...->...", factors, sample)
        torch.testing.assert_close(ours.float(), theirs, rtol=1e-4, atol=1e-5, msg=name)


@settings(max_examples=60, deadline=None)
@given(
    leaving=st.integers(0, ROWS - 1),
    seed=st.integers(0, 2**16),
    scale=st.sampled_from([1e-3, 1.0, 30.0, 1e4]),
    clip_norm=st.sampled_from([1e-3, 0.3, 10.0]),
)
def test_a_record_that_leaves_moves_the_sum_by_at_most_the_sensitivity(leaving, seed, scale, clip_norm) -> None:
    module, (inputs, labels) = _network(), _data(seed, scale=scale)
    params = _params(module)
    everyone = torch.ones(ROWS, dtype=torch.long)
    without = everyone.clone()
    without[leaving] = 0
    emptied = inputs.clone()
    emptied[leaving] = 0.0
    full = flatten(clipped_gradient_sums(module, params, inputs, labels, everyone, clip_norm=clip_norm))
    less = flatten(clipped_gradient_sums(module, params, emptied, labels, without, clip_norm=clip_norm))
    assert float((full - less).norm()) <= sum_sensitivity(clip_norm)


def test_the_bound_is_reached_so_that_the_noise_is_not_too_much_either() -> None:
    module, (inputs, labels) = _network(), _data(scale=100.0)
    weights = torch.zeros(ROWS)
    weights[7] = 1
    sums = clipped_gradient_sums(module, _params(module), inputs, labels, weights, clip_norm=0.5)
    assert 0.5 * (1 - 2.0**-13) < float(flatten(sums).norm()) < 0.5


def test_a_row_keeps_every_bit_whatever_the_other_rows_hold() -> None:
    """The claim that the proof for floats rests on: only shapes and places decide how a row is rounded."""
    module, (inputs, labels) = _network(), _data(5)
    params = _params(module)
    for row in (0, 1, BLOCK - 1, BLOCK, ROWS - 1):
        alone = torch.zeros(ROWS)
        alone[row] = 1
        found = set()
        for seed in range(4):
            others, other_labels = _data(100 + seed, scale=10.0**seed)
            others[row], other_labels[row] = inputs[row], labels[row]
            sums = clipped_gradient_sums(module, params, others, other_labels, alone, clip_norm=0.3)
            found.add(flatten(sums).numpy().tobytes())
        assert len(found) == 1


def test_the_float_error_of_a_sum_is_far_below_the_margin_that_is_charged() -> None:
    module, (inputs, labels) = _network(), _data(6, rows=BLOCK)
    params = _params(module)
    total = torch.zeros(sum(value.numel() for value in params.values()), dtype=torch.float64)
    for row in range(BLOCK):
        alone = torch.zeros(BLOCK)
        alone[row] = 1
        total += flatten(clipped_gradient_sums(module, params, inputs, labels, alone, clip_norm=0.3))
    together = flatten(clipped_gradient_sums(module, params, inputs, labels, torch.ones(BLOCK), clip_norm=0.3))
    assert 0 < 2 * float((together - total).norm()) < 0.3 * SENSITIVITY_MARGIN / 2


@pytest.mark.parametrize("chunk_floats", [1, 1 << 13, 1 << 24])
def test_many_models_together_give_what_each_gives_alone(chunk_floats: int) -> None:
    module = _network()
    inputs, labels = _data(8, rows=3 * ROWS)
    inputs, labels = inputs.reshape(3, ROWS, 1, 13, 13), labels.reshape(3, ROWS)
    params = {name: torch.stack([value, 2 * value, -value]) for name, value in _params(module).items()}
    weights = (torch.rand(3, ROWS, generator=torch.Generator().manual_seed(2)) < 0.5).long()
    sums = clipped_gradient_sums(module, params, inputs, labels, weights, clip_norm=0.2, chunk_floats=chunk_floats)
    for model in range(3):
        own = {name: value[model] for name, value in params.items()}
        alone = clipped_gradient_sums(module, own, inputs[model], labels[model], weights[model], clip_norm=0.2)
        for name, value in alone.items():
            torch.testing.assert_close(sums[name][model], value, rtol=1e-5, atol=1e-6)


def _linear(*, quick: bool) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(4)
    layer = nn.Linear(169, 10)
    module = layer if quick else nn.Sequential(layer)
    return module, _params(module)


@pytest.mark.parametrize("clip_norm", [0.05, 1.0, 1e6])
def test_the_quick_way_for_a_linear_layer_gives_what_the_general_way_gives(clip_norm: float) -> None:
    inputs, labels = _data(11)
    inputs = inputs.flatten(1)
    inputs[5, 5] = math.nan
    weights = (torch.arange(ROWS) % 4 != 0).long()
    found = []
    for quick in (True, False):
        module, params = _linear(quick=quick)
        found.append(flatten(clipped_gradient_sums(module, params, inputs, labels, weights, clip_norm=clip_norm)))
    assert float((found[0] - found[1]).norm()) <= 1e-4 * float(found[1].norm())


@settings(max_examples=40, deadline=None)
@given(leaving=st.integers(0, ROWS - 1), seed=st.integers(0, 99), scale=st.sampled_from([1e-3, 1.0, 1e4]))
def test_a_record_that_leaves_a_linear_layer_moves_the_sum_by_at_most_the_sensitivity(leaving, seed, scale) -> None:
    inputs, labels = _data(seed, scale=scale)
    inputs = inputs.flatten(1)
    module, params = _linear(quick=True)
    without = torch.ones(ROWS)
    without[leaving] = 0
    emptied = inputs.clone()
    emptied[leaving] = 0.0
    full = flatten(clipped_gradient_sums(module, params, inputs, labels, torch.ones(ROWS), clip_norm=0.3))
    less = flatten(clipped_gradient_sums(module, params, emptied, labels, without, clip_norm=0.3))
    assert float((full - less).norm()) <= 0.3


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_record_that_is_not_finite_contributes_zero_and_spoils_nobody(poison: float) -> None:
    module, (inputs, labels) = _network(), _data(9)
    params = _params(module)
    weights = torch.ones(ROWS)
    spoilt = inputs.clone()
    spoilt[4, 0, 3, 3] = poison
    absent = weights.clone()
    absent[4] = 0
    with_it = flatten(clipped_gradient_sums(module, params, spoilt, labels, weights, clip_norm=1.0))
    without = flatten(clipped_gradient_sums(module, params, inputs, labels, absent, clip_norm=1.0))
    assert torch.equal(with_it, without)


@pytest.mark.parametrize("clip_norm", [0.0, -1.0, math.nan, math.inf])
def test_a_clipping_norm_that_bounds_nothing_is_refused(clip_norm: float) -> None:
    with pytest.raises(InvalidSetting, match="clip_norm"):
        sum_sensitivity(clip_norm)
