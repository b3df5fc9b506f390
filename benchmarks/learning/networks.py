"""Small networks that an agent trains on its own records, and fixed features of digits.

They are ordinary modules without batch norm or dropout. So they mean the same when many of them run at once
(`torch.func.functional_call` under `vmap`) and when gradients are taken per record. With batch norm, one record would
change the network's output for another in its batch.

**Edge features** of gray digits are fixed: the directions of edges, and their places. Nothing is fitted, so nothing is
learned from data.

    image --blur--> gradient --> its length, dealt to the two nearest of 8 directions --> summed over 7 x 7 overlapping
    cells --> square roots --> divided by the row's own norm.

A linear layer on such features learns digits from few records and much noise (Tramer, Boneh 2021 make the point for
scattering features). Every number is a function of the one image.

References:
    Dalal, Triggs 2005, "Histograms of oriented gradients for human detection".

**Domain-adversarial training** (DANN) fits agents' models to the requester's images, all agents at once. Agents'
records and the public images may look different (digits of one post office and of another). A second head tries to tell
from a model's features which of the two an image is from, and the features are trained to make that impossible. The
gradient of the second head's loss reaches them with its sign turned, times a strength that grows from 0 to 1. The
remaining features tell digits apart and not their origin.

*Privacy.* Public images cost nothing to read. An agent's model is still a function of its records, its seed and
public data. So what one record or one agent can change of the votes is as without adaptation, and so is the price.

References:
    Ganin, Ustinova, Ajakan, Germain, Larochelle, Laviolette, Marchand, Lempitsky 2016, "Domain-adversarial training of
    neural networks", equations 9 to 18 and section 5.2.2 (schedule of the strength).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter1d
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional

from benchmarks.learning.together import (
    Parameters,
    Training,
    batches,
    initial_parameters,
    moved,
    optimize,
    predict_together,
    stream,
    train_together,
)
from workers.progress import ProgressCallback, silent

SIDE = 28
"""Height and width of a digit in pixels."""

_MEAN, _DEVIATION = 0.1307, 0.3081
"""Mean and standard deviation of MNIST's training pixels in [0, 1], as published with the set: public constants."""


def small_convnet(num_classes: int = 10) -> nn.Module:
    """Return a network of 55,594 parameters (for ten classes) for gray images of 28 x 28.

    The first convolution moves in steps of two: at full size it would cost more than everything after it.

    Args:
        num_classes: C, at least 2.

    Returns:
        A module from float images of shape (n, 1, 28, 28) to logits of shape (n, num_classes). Its starting weights
        come from torch's global generator.
    """
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=5, stride=2, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 32),
        nn.ReLU(),
        nn.Linear(32, num_classes),
    )


def image_tensor(images: NDArray[np.uint8]) -> Tensor:
    """Return images as `small_convnet` takes them: shifted and scaled by MNIST's published mean and deviation.

    The constants are public and the same for every set, so normalizing reads nothing off private images.

    Args:
        images: uint8, shape (n, 28, 28).

    Returns:
        float32, shape (n, 1, 28, 28).
    """
    pixels = torch.from_numpy(np.array(images)).to(torch.float32).div_(255)
    return pixels.sub_(_MEAN).div_(_DEVIATION).unsqueeze(1)


DIRECTIONS, CELLS = 8, 7
DIMENSION = DIRECTIONS * CELLS * CELLS

_BLUR = 0.7
_ROWS_AT_ONCE = 2_000


def edge_features(images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return features of norm 1 (0 for an empty image).

    Args:
        images: uint8, shape (n, 28, 28).

    Returns:
        float32, shape (n, 392).
    """
    features = np.empty((len(images), DIMENSION), dtype=np.float32)
    for start in range(0, len(images), _ROWS_AT_ONCE):
        features[start : start + _ROWS_AT_ONCE] = _features(images[start : start + _ROWS_AT_ONCE])
    return features


def _features(images: NDArray[np.uint8]) -> NDArray[np.float32]:
    grey = images.astype(np.float32) / 255
    for axis in (1, 2):
        grey = gaussian_filter1d(grey, _BLUR, axis=axis)
    down, right = np.zeros_like(grey), np.zeros_like(grey)
    down[:, 1:-1] = (grey[:, 2:] - grey[:, :-2]) / 2
    right[:, :, 1:-1] = (grey[:, :, 2:] - grey[:, :, :-2]) / 2
    length = np.hypot(down, right)
    place = np.arctan2(down, right) * np.float32(DIRECTIONS / (2 * np.pi))
    width = SIDE / CELLS
    centres = (np.arange(CELLS) + 0.5) * width - 0.5
    cells = np.maximum(0, 1 - np.abs(np.arange(SIDE) - centres[:, None]) / width).astype(np.float32)
    parts = []
    for direction in range(DIRECTIONS):
        away = np.abs((place - direction + DIRECTIONS / 2) % DIRECTIONS - DIRECTIONS / 2)
        parts.append(cells @ (length * np.maximum(0, 1 - away)) @ cells.T)
    rooted = np.sqrt(np.stack(parts, axis=1).reshape(len(images), -1))
    norms = np.linalg.norm(rooted, axis=1, keepdims=True)
    scaled: NDArray[np.float32] = (rooted / np.maximum(norms, 1e-9) * (1 - 1e-6)).astype(np.float32)
    return scaled


class DomainAdversarial(nn.Module):
    """A classifier with a second head that guesses the origin of an image.

    Args:
        network: sequential, with a linear last layer; the second head sees what that layer sees.
        hidden: width of the second head's hidden layer.
    """

    def __init__(self, network: nn.Module, *, hidden: int = 64) -> None:
        super().__init__()
        *features, classifier = cast(nn.Sequential, network)
        self.features, self.classifier = nn.Sequential(*features), cast(nn.Linear, classifier)
        width = self.classifier.in_features
        self.domain = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, inputs: Tensor, strength: float | None = None) -> Any:
        """Return logits of the classes; with a strength, also of being public, behind the reversal of gradients."""
        features = self.features(inputs)
        logits = self.classifier(features)
        return logits if strength is None else (logits, self.domain(reversed_gradient(features, strength)).squeeze(-1))


def reversed_gradient(values: Tensor, strength: float) -> Tensor:
    """Return the same values; gradients pass them multiplied by -strength (Ganin et al. 2016, equation 17)."""
    return (1 + strength) * values.detach() - strength * values


def strength_at(progress: float) -> float:
    """Return lambda_p = 2 / (1 + exp(-10 p)) - 1 at the finished share p of training: 0 at first, as features form."""
    return 2 / (1 + math.exp(-10 * progress)) - 1


def adapt_together(
    module: DomainAdversarial,
    parameters: Parameters,
    inputs: Tensor,
    labels: Tensor,
    public: Tensor,
    *,
    training: Training,
    seeds: Sequence[int],
    sizes: Sequence[int] | None = None,
    progress: ProgressCallback = silent,
) -> Parameters:
    """Train N models, each on its own records and, without their labels, on the same public images.

    Every step shows each agent as many public images as records, in a separate order. The loss of an agent is its
    cross-entropy on its records plus the domain head's logistic loss, on both halves.

    Args:
        public: float, shape (m, ...): the requester's images. The other arguments are those of `train_together`.
    """
    count = len(labels)
    shown = batches(training, [stream(seed, 1) for seed in seeds], [len(public)] * count, inputs.shape[1])

    def loss(weights: Parameters, own: Tensor, wanted: Tensor, done: float) -> Tensor:
        rows, numbers = next(shown)
        others = public[rows]
        if training.jitter is not None:
            others = moved(others.flatten(0, 1), numbers.flatten(0, 1), training.jitter).reshape(others.shape)
        strength = strength_at(done)
        both = torch.cat([own, others], dim=1)
        logits, domain = vmap(lambda weight, batch: functional_call(module, weight, (batch, strength)))(weights, both)
        half = own.shape[1]
        is_public = torch.zeros_like(domain)
        is_public[:, half:] = 1.0
        classes = functional.cross_entropy(logits[:, :half].flatten(0, 1), wanted.flatten(0, 1), reduction="sum")
        origin = functional.binary_cross_entropy_with_logits(domain, is_public, reduction="sum")
        total: Tensor = classes / half + origin / domain.shape[1]
        return total

    return optimize(
        parameters, inputs, labels, loss=loss, training=training, seeds=seeds, sizes=sizes, progress=progress
    )


def answers_of(
    factory: Callable[[], nn.Module],
    inputs: Tensor,
    labels: Tensor,
    public: Tensor,
    *,
    training: Training,
    sizes: Sequence[int],
    seed: int,
    progress: ProgressCallback = silent,
) -> NDArray[np.float32]:
    """Train a model of each agent; return what each says of every public image.

    A network with a domain head is fitted to the public images too. The arguments are those of `train_together`.

    Returns:
        Probabilities, shape (agents, images, classes).
    """
    module, start = initial_parameters(factory, len(labels), seed=seed)
    seeds = [1000 * seed + agent for agent in range(len(labels))]
    if isinstance(module, DomainAdversarial):
        trained = adapt_together(
            module, start, inputs, labels, public, training=training, seeds=seeds, sizes=sizes, progress=progress
        )
    else:
        trained = train_together(
            module, start, inputs, labels, training=training, seeds=seeds, sizes=sizes, progress=progress
        )
    said: NDArray[np.float32] = predict_together(module, trained, public).softmax(dim=2).numpy()
    return said
