"""Fine-tuning works with any module and image tensors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from workers.run.finetune import FineTuning, estimate_seconds, fine_tune


def small_backbone() -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return torch.nn.Sequential(
            torch.nn.Conv2d(1, 8, 3, padding=1),
            torch.nn.BatchNorm2d(8),
            torch.nn.ReLU(),
            torch.nn.AdaptiveAvgPool2d(4),
            torch.nn.Flatten(),
        )


def bars(rng: np.random.Generator, count: int = 120) -> tuple[torch.Tensor, NDArray[np.int64]]:
    """Images with a bright bar at one of three heights."""
    truth = rng.integers(0, 3, count)
    images = rng.normal(0, 0.3, (count, 1, 12, 12)).astype(np.float32)
    images[np.arange(count), 0, 4 * truth + 1] += 2
    return torch.from_numpy(images), truth


def soft(truth: NDArray[np.int64]) -> NDArray[np.float64]:
    return 0.7 * np.eye(3)[truth] + 0.1


QUICK = FineTuning(epochs=8, batch_size=32, learning_rate=0.03, warmup_epochs=1)


def test_a_network_learns_soft_labels(rng: np.random.Generator) -> None:
    images, truth = bars(rng)
    losses: list[float] = []
    student = fine_tune(
        small_backbone(), images, soft(truth), settings=QUICK, on_epoch=lambda _epoch, loss: losses.append(loss)
    )
    fresh, fresh_truth = bars(rng)
    assert (student.predict(fresh) == fresh_truth).mean() > 0.9
    assert len(losses) == 9
    assert losses[-1] < losses[0]


def test_same_seed_same_network(rng: np.random.Generator) -> None:
    images, truth = bars(rng, 40)
    first, again = (
        fine_tune(small_backbone(), images, soft(truth), settings=FineTuning(epochs=1), seed=3).predict_proba(images)
        for _ in range(2)
    )
    np.testing.assert_array_equal(first, again)


def test_saved_weights_come_back(rng: np.random.Generator, tmp_path: Path) -> None:
    images, truth = bars(rng, 40)
    student = fine_tune(small_backbone(), images, soft(truth), settings=FineTuning(epochs=1))
    student.save(tmp_path / "network.safetensors")
    found = load_file(tmp_path / "network.safetensors")
    assert found.keys() == student.network.state_dict().keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in student.network.state_dict().items())


def test_a_frozen_backbone_stays_as_it_is(rng: np.random.Generator) -> None:
    images, truth = bars(rng, 40)
    backbone = small_backbone()
    for parameter in backbone.parameters():
        parameter.requires_grad_(False)
    before = [parameter.clone() for parameter in backbone.parameters()]
    fine_tune(backbone, images, soft(truth), settings=FineTuning(epochs=1))
    assert all(torch.equal(old, new) for old, new in zip(before, backbone.parameters(), strict=True))


def test_a_network_is_tuned_on_bytes_of_which_no_more_than_a_batch_becomes_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All of them did, on the device: 602 GB for a million photos."""
    from feature_store.backbones import network
    from feature_store.backbones.network import PreparedImages

    counts: list[int] = []
    convert = network.to_unit_range
    monkeypatch.setattr(network, "to_unit_range", lambda pixels: (counts.append(len(pixels)), convert(pixels))[1])
    pixels = np.random.default_rng(2).integers(0, 256, (50, 8, 8, 3), dtype=np.uint8)
    prepared = PreparedImages(pixels, torch.full((1, 3, 1, 1), 0.5), torch.full((1, 3, 1, 1), 0.25))
    whole = (convert(torch.from_numpy(pixels)) - 0.5) / 0.25
    soft = np.eye(2)[np.arange(50) % 2]
    settings = FineTuning(epochs=2, batch_size=16, warmup_epochs=1)
    made = []
    for images in (prepared, whole):
        torch.manual_seed(0)
        body = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
        tuned = fine_tune(body, images, soft, settings=settings, seed=3)
        made.append(tuned.predict_proba(images, batch_size=20))
    assert np.array_equal(made[0], made[1])
    assert max(counts) == 20


def test_every_step_is_counted_from_the_first_on_and_an_estimate_changes_no_network(rng: np.random.Generator) -> None:
    images, truth = bars(rng, 70)
    settings, steps = FineTuning(epochs=2, batch_size=32, warmup_epochs=1), list[int]()
    body = small_backbone()
    plain = fine_tune(small_backbone(), images, soft(truth), settings=settings, seed=3).predict_proba(images)
    state = torch.get_rng_state()
    seconds = estimate_seconds(body, images, num_classes=3, settings=settings)
    assert torch.equal(torch.get_rng_state(), state)
    tuned = fine_tune(body, images, soft(truth), settings=settings, seed=3, on_step=steps.append)
    assert steps == list(range(settings.all_epochs * settings.steps(70))) == list(range(9))
    assert np.array_equal(tuned.predict_proba(images), plain)
    assert seconds > 0
