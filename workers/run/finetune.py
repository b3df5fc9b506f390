"""Fine-tuning of a backbone on the pseudo-labeled public images.

The last step for users who want their own network. It learns the soft labels of a fitted student (or of the release),
so it inherits what denoising and refinement found. It may then beat both by changing the features themselves. torch is
imported on first use.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from labeler.errors import BadData

if TYPE_CHECKING:
    import torch

    from feature_store.backbones.network import PreparedImages


@dataclass(frozen=True)
class FineTuning:
    """The settings of fine-tuning.

    Attributes:
        epochs: passes over the public images.
        batch_size: images per step.
        learning_rate: of the new head; the backbone moves ten times more slowly.
        warmup_epochs: passes that train the head alone, so that its first random steps do not damage the backbone.
    """

    epochs: int = 10
    batch_size: int = 64
    learning_rate: float = 1e-3
    weight_decay: float = 1e-4
    warmup_epochs: int = 2

    @property
    def all_epochs(self) -> int:
        """The number of passes, warm-up included."""
        return self.epochs + self.warmup_epochs

    def steps(self, images: int) -> int:
        """Return the number of steps of one pass."""
        return math.ceil(images / self.batch_size)


@dataclass(frozen=True, eq=False)
class FineTunedStudent:
    """A backbone with a linear head. Attributes: network (images -> class scores), device."""

    network: torch.nn.Module
    device: str = "cpu"

    def predict_proba(self, images: torch.Tensor | PreparedImages, *, batch_size: int = 256) -> NDArray[np.float64]:
        """Return class probabilities of a batch of image tensors, shape (n, num_classes)."""
        import torch

        self.network.eval()
        with torch.inference_mode():
            parts = [
                torch.softmax(self.network(images[start : start + batch_size].to(self.device)).float(), dim=1)
                .cpu()
                .numpy()
                for start in range(0, len(images), batch_size)
            ]
        return np.concatenate(parts).astype(np.float64)

    def predict(self, images: torch.Tensor | PreparedImages) -> NDArray[np.int64]:
        """Return the most probable class, shape (n,)."""
        return np.asarray(self.predict_proba(images).argmax(axis=1), dtype=np.int64)

    def save(self, path: Path | str) -> None:
        """Write the weights as safetensors, whole or not at all."""
        from safetensors.torch import save_file

        target = Path(path)
        partial = target.with_name(target.name + ".partial")
        save_file({name: tensor.contiguous() for name, tensor in self.network.state_dict().items()}, partial)
        partial.replace(target)


def _attach_head(
    backbone: torch.nn.Module, example: torch.Tensor | PreparedImages, *, num_classes: int, seed: int
) -> torch.nn.Sequential:
    """Return a backbone that maps images to features (n, dimension), followed by a linear layer.

    Raises:
        BadData: the backbone's output for the example is not a matrix.
    """
    import torch

    backbone.eval()
    with torch.inference_mode():
        shape = backbone(example[:1].to(_device_of(backbone))).shape
    if len(shape) != 2:
        raise BadData(f"the backbone must return features of shape (n, dimension), found {tuple(shape)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = torch.nn.Linear(shape[1], num_classes)
    return torch.nn.Sequential(backbone, head).to(_device_of(backbone))


def fine_tune(
    backbone: torch.nn.Module,
    images: torch.Tensor | PreparedImages,
    soft_labels: NDArray[np.float64],
    *,
    settings: FineTuning,
    seed: int = 0,
    on_epoch: Callable[[int, float], None] | None = None,
    on_step: Callable[[int], None] | None = None,
) -> FineTunedStudent:
    """Minimise the cross-entropy to soft labels. Changes the backbone that is passed in.

    Args:
        backbone: maps images to features (n, dimension); runs on the device its parameters are on.
        images: float tensor, shape (n, channels, height, width), preprocessed as the backbone wants.
        soft_labels: shape (n, num_classes), rows sum to one.
        seed: of the order of images and the head. Repeatable on a CPU.
        on_epoch: called with the number and the mean loss of each finished epoch, counted from 0.
        on_step: called with the number of finished steps, for a progress bar.
    """
    import torch

    count = len(images)
    device = _device_of(backbone)
    network = _attach_head(backbone, images, num_classes=soft_labels.shape[1], seed=seed)
    targets = torch.as_tensor(soft_labels, dtype=torch.float32)
    body = [parameter for parameter in network[0].parameters() if parameter.requires_grad]
    groups = [
        {"params": list(network[1].parameters()), "lr": settings.learning_rate},
        {"params": body, "lr": settings.learning_rate / 10},
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=settings.weight_decay)
    order = torch.Generator().manual_seed(seed)
    steps = 0
    for epoch in range(settings.all_epochs):
        warming = epoch < settings.warmup_epochs
        network.train(not warming)
        for parameter in body:
            parameter.requires_grad_(not warming)
        total = 0.0
        shuffled = torch.randperm(count, generator=order)
        for start in range(0, count, settings.batch_size):
            steps += 1
            if on_step is not None:
                on_step(steps - 1)
            batch = shuffled[start : start + settings.batch_size]
            if len(batch) == 1 and count > 1:
                continue  # batch normalization cannot train on a single image
            scores = network(images[batch].to(device))
            loss = torch.nn.functional.cross_entropy(scores, targets[batch].to(device))
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            total += float(loss.detach()) * len(batch)
        if on_epoch is not None:
            on_epoch(epoch, total / count)
    network.eval()
    return FineTunedStudent(network, device)


def estimate_seconds(
    backbone: torch.nn.Module, images: torch.Tensor | PreparedImages, *, num_classes: int, settings: FineTuning
) -> float:
    """Return about how long `fine_tune` will take: one step of warm-up and one of the whole network, on a copy.

    The first step of a network is slower than the next ones, so it is not counted.
    """
    import torch

    count = min(len(images), settings.batch_size)
    device = _device_of(backbone)
    seconds = []
    with torch.random.fork_rng():  # the copy's dropout takes no chance from the training
        network = _attach_head(copy.deepcopy(backbone), images, num_classes=num_classes, seed=0)
        for is_whole in (False, False, True, True):
            network.train(is_whole and count > 1)
            network[0].requires_grad_(is_whole)
            started = time.perf_counter()
            scores = network(images[:count].to(device))
            torch.autograd.backward(scores.square().mean())
            float(scores.detach()[0, 0])  # a device answers when it is done
            seconds.append(time.perf_counter() - started)
    steps = settings.steps(len(images))
    return steps * (settings.warmup_epochs * seconds[1] + settings.epochs * seconds[3])


def _device_of(module: torch.nn.Module) -> str:
    for parameter in module.parameters():
        return str(parameter.device)
    return "cpu"
