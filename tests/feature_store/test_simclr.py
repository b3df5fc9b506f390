"""SimCLR: the loss against a slow reference, views that stay in bounds, and runs that can be stopped and continued."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from feature_store.backbones import Transform, load_backbone, load_network
from feature_store.backbones.simclr import DIGITS, Augmentation, SimCLRConfig, nt_xent, pretrain, random_views
from labeler.errors import BadData, InvalidSetting

TINY = SimCLRConfig(
    options={"widths": [4, 8], "grid": 1},
    transform=Transform(resize=8, crop=8, mean=(0.5,), std=(0.5,)),
    augmentation=DIGITS,
    hidden=8,
    projection=4,
    epochs=4,
    batch_size=16,
    checkpoint_every=2,
)


class Stop(Exception):
    """What a test raises to stop a run."""


@pytest.fixture(scope="module")
def images() -> list[NDArray[np.uint8]]:
    return list(np.random.default_rng(5).integers(0, 256, (40, 8, 8), dtype=np.uint8))


def slow_nt_xent(first: NDArray[np.float64], second: NDArray[np.float64], temperature: float) -> float:
    rows = [row / np.linalg.norm(row) for row in [*first, *second]]
    count = len(first)
    total = 0.0
    for i, row in enumerate(rows):
        exponentials = [math.exp(float(row @ other) / temperature) for other in rows]
        total -= math.log(exponentials[(i + count) % (2 * count)] / (sum(exponentials) - exponentials[i]))
    return total / (2 * count)


@pytest.mark.parametrize("temperature", [0.1, 0.5, 2.0])
@pytest.mark.parametrize("count", [2, 7])
def test_the_loss_equals_its_definition(rng: np.random.Generator, count: int, temperature: float) -> None:
    first, second = rng.normal(size=(2, count, 5))
    fast = nt_xent(torch.from_numpy(first), torch.from_numpy(second), temperature=temperature)
    assert float(fast) == pytest.approx(slow_nt_xent(first, second, temperature), rel=1e-5)


@pytest.mark.parametrize(("channels", "augmentation"), [(1, DIGITS), (3, Augmentation())])
def test_views_stay_in_bounds_and_follow_the_generator(channels: int, augmentation: Augmentation) -> None:
    images = torch.rand(6, channels, 16, 16)
    first, again, other = (
        random_views(images, augmentation, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert first.shape == images.shape
    assert first.min() >= 0
    assert first.max() <= 1
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_stopped_run_ends_like_one_that_never_stopped_and_its_checkpoint_is_a_backbone(
    images: list[NDArray[np.uint8]], tmp_path: Path
) -> None:
    whole = pretrain(images, config=TINY, seed=7, device="cpu")

    def stop(done: int, total: int, loss: float) -> None:
        if done == 3:
            raise Stop

    checkpoint = tmp_path / "digits.safetensors"
    with pytest.raises(Stop):
        pretrain(images, config=TINY, seed=7, checkpoint=checkpoint, progress=stop, device="cpu")
    with pytest.raises(BadData, match="stopped after 2 epochs"):
        load_backbone(checkpoint)
    epochs: list[int] = []
    continued, again = (
        pretrain(
            images,
            config=TINY,
            seed=7,
            checkpoint=checkpoint,
            device="cpu",
            progress=lambda done, *_: epochs.append(done),
        )
        for _ in range(2)
    )
    assert epochs[:2] == [3, 4]
    for backbone in (continued, again, load_network(checkpoint, device="cpu")):
        assert (backbone.fingerprint, backbone.dimension) == (whole.fingerprint, 8)
        assert np.array_equal(backbone.embed(images), whole.embed(images))
    converted = load_backbone(checkpoint, device="cpu")
    assert (converted.fingerprint, converted.spec["runtime"]) == (whole.fingerprint, "onnxruntime")
    assert np.allclose(converted.embed(images), whole.embed(images), atol=1e-5)


def test_no_more_than_a_batch_of_images_becomes_float32_or_goes_to_a_device(
    images: list[NDArray[np.uint8]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole set did: 602 GB for a million photos."""
    from feature_store.backbones import simclr

    counts: list[int] = []
    convert = simclr.to_unit_range
    monkeypatch.setattr(simclr, "to_unit_range", lambda pixels: (counts.append(len(pixels)), convert(pixels))[1])
    pretrain(images, config=TINY, seed=7, device="cpu")
    assert len(counts) == TINY.epochs * (len(images) // TINY.batch_size)
    assert max(counts) == TINY.batch_size


def test_the_seed_decides_and_other_draws_do_not(images: list[NDArray[np.uint8]]) -> None:
    config = TINY.model_copy(update={"epochs": 1})
    first = pretrain(images, config=config, seed=1, device="cpu")
    torch.rand(100)
    np.random.default_rng(1).random(3)
    state = torch.get_rng_state()
    assert pretrain(images, config=config, seed=1, device="cpu").fingerprint == first.fingerprint
    assert torch.equal(torch.get_rng_state(), state)
    assert pretrain(images, config=config, seed=2, device="cpu").fingerprint != first.fingerprint


def test_the_checkpoint_of_another_run_is_refused(images: list[NDArray[np.uint8]], tmp_path: Path) -> None:
    config = TINY.model_copy(update={"epochs": 1})
    checkpoint = tmp_path / "digits.safetensors"
    pretrain(images, config=config, seed=1, checkpoint=checkpoint, device="cpu")
    with pytest.raises(InvalidSetting, match="another run"):
        pretrain(images, config=config, seed=2, checkpoint=checkpoint, device="cpu")
    with pytest.raises(InvalidSetting, match="another run"):
        pretrain(images[::-1], config=config, seed=1, checkpoint=checkpoint, device="cpu")
    checkpoint.write_bytes(checkpoint.read_bytes()[:-9])
    with pytest.raises(BadData, match="damaged"):
        load_backbone(checkpoint)


def test_any_timm_architecture_can_be_pretrained(images: list[NDArray[np.uint8]]) -> None:
    config = SimCLRConfig(
        architecture="test_efficientnet",
        transform=Transform(resize=32, crop=32, mean=(0.5,) * 3, std=(0.5,) * 3),
        hidden=8,
        projection=4,
        epochs=1,
        batch_size=8,
    )
    backbone = pretrain(images[:8], config=config, seed=0, device="cpu")
    assert backbone.embed(images[:2]).shape == (2, backbone.dimension)
    assert "timm" in backbone.spec["libraries"]


def test_too_few_images_and_wrong_options_are_refused(images: list[NDArray[np.uint8]]) -> None:
    with pytest.raises(InvalidSetting, match="at least 8 images"):
        pretrain(images[:7], config=TINY, seed=0)
    with pytest.raises(InvalidSetting, match="widths and grid"):
        pretrain(images, config=TINY.model_copy(update={"options": {"depth": 3}}), seed=0)
