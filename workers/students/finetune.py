"""Fine-tuning of a backbone on the pseudo-labeled public images.

The last step for users who want their own network. It learns the soft labels of a fitted student (or of the release),
so it inherits what denoising and refinement found. It may then beat both by changing the features themselves. torch is
imported on first use.

Several processes train one network (`workers.students.ranks`). Each takes its share of every batch, batch normalization
sees the whole batch, and gradients are averaged. So the same seed gives the same network as one process, up to
rounding. Like one process, they save at the end or not at all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from labeler.errors import BadData
from workers.students.ranks import ALONE, Ranks

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
    ranks: Ranks = ALONE,
) -> FineTunedStudent:
    """Minimise the cross-entropy to soft labels. Changes the backbone that is passed in.

    Args:
        backbone: maps images to features (n, dimension); runs on the device its parameters are on.
        images: float tensor, shape (n, channels, height, width), preprocessed as the backbone wants.
        soft_labels: shape (n, num_classes), rows sum to one.
        seed: of the order of images and the head. Repeatable on a CPU.
        on_epoch: called with the number and the mean loss of each finished epoch, for a progress bar.
        ranks: the processes that train it together, all of them with the same arguments.
    """
    import torch

    count = len(images)
    device = _device_of(backbone)
    whole = _attach_head(backbone, images, num_classes=soft_labels.shape[1], seed=seed)
    network = whole if ranks.count == 1 else _shared(whole)
    head = network[1]
    targets = torch.as_tensor(soft_labels, dtype=torch.float32)
    body = [parameter for parameter in network[0].parameters() if parameter.requires_grad]
    groups = [
        {"params": list(head.parameters()), "lr": settings.learning_rate},
        {"params": body, "lr": settings.learning_rate / 10},
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=settings.weight_decay)
    order = torch.Generator().manual_seed(seed)
    scores_of: Callable[[torch.Tensor], torch.Tensor] = network
    for epoch in range(settings.epochs + settings.warmup_epochs):
        warming = epoch < settings.warmup_epochs
        network.train(not warming)
        for parameter in body:
            parameter.requires_grad_(not warming)
        if ranks.count > 1 and epoch in (0, settings.warmup_epochs):
            # New for each set of trained parameters: it averages the gradients of those it has seen.
            scores_of = torch.nn.parallel.DistributedDataParallel(network, forward_sync_buffers=False)
        total = 0.0
        shuffled = torch.randperm(count, generator=order)
        for start in range(0, count, settings.batch_size):
            batch = shuffled[start : start + settings.batch_size]
            if len(batch) == 1 and count > 1:
                continue  # batch normalization cannot train on a single image
            # A batch too small to share is trained on by all of them, which is the same step.
            mine = batch[ranks.rank :: ranks.count] if len(batch) >= ranks.count else batch
            together = len(batch) if len(batch) >= ranks.count else len(batch) * ranks.count
            scores = scores_of(images[mine].to(device))
            losses = torch.nn.functional.cross_entropy(scores, targets[mine].to(device), reduction="none")
            # Averaged over processes, this is the mean over the batch.
            loss = losses.sum() * (ranks.count / together)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            total += float(loss.detach()) * len(batch)
        if on_epoch is not None:
            on_epoch(epoch, _over_ranks(total, device, ranks) / count)
    if ranks.count > 1:
        whole.load_state_dict(network.state_dict())
    whole.eval()
    return FineTunedStudent(whole, device)


def _shared(network: torch.nn.Sequential) -> torch.nn.Sequential:
    from workers.students.shared_batch_norm import share_batch_norms

    shared = copy.deepcopy(network)
    share_batch_norms(shared)
    return shared


def _over_ranks(value: float, device: str, ranks: Ranks) -> float:
    """Return the mean over the processes."""
    if ranks.count == 1:
        return value
    import torch

    told = torch.tensor([value], dtype=torch.float64, device=device)
    torch.distributed.all_reduce(told)
    return float(told) / ranks.count


def _device_of(module: torch.nn.Module) -> str:
    for parameter in module.parameters():
        return str(parameter.device)
    return "cpu"
