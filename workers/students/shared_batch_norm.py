"""Batch normalization over the batch of all processes, so that several train what one would.

torch's own SyncBatchNorm takes GPUs only, and timm's normalization with an activation needs a third kind. This one
takes both, and any device. Mean and variance are sums, and the gradient of a sum over processes is the sum of their
gradients. Every process has the whole batch's statistics, and gradients are averaged, so a step is the step of one
process up to rounding.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm


def share_batch_norms(network: nn.Module) -> None:
    """Replace every batch normalization in a network by one over all processes, with the same parameters and names."""
    for name, child in network.named_children():
        if isinstance(child, _BatchNorm):
            setattr(network, name, SharedBatchNorm(child))
        else:
            share_batch_norms(child)


class SharedBatchNorm(nn.Module):
    """A batch normalization whose statistics in training are those of all processes' images together.

    Args:
        norm: what it replaces; its parameters and buffers stay in use, and so does the activation that timm puts into
            it.
    """

    def __init__(self, norm: _BatchNorm) -> None:
        super().__init__()
        self.weight, self.bias = norm.weight, norm.bias
        self.running_mean: Tensor
        self.running_var: Tensor
        self.num_batches_tracked: Tensor
        for name, buffer in norm.named_buffers(recurse=False):
            self.register_buffer(name, buffer)
        self._eps, self._momentum = norm.eps, norm.momentum
        self._after = nn.Sequential(*(getattr(norm, name) for name in ("drop", "act") if hasattr(norm, name)))
        self.train(norm.training)

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            mean, variance = self._shared_statistics(images)
            shape = (1, -1, *(1 for _ in images.shape[2:]))
            normal = (images - mean.view(shape)) * torch.rsqrt(variance.view(shape) + self._eps)
            normal = normal * self.weight.view(shape) + self.bias.view(shape)
        else:
            normal = batch_norm(
                images, self.running_mean, self.running_var, self.weight, self.bias, training=False, eps=self._eps
            )  # fmt: skip
        after: Tensor = self._after(normal)
        return after

    def _shared_statistics(self, images: Tensor) -> tuple[Tensor, Tensor]:
        axes = [0, *range(2, images.ndim)]
        count = images.new_tensor([images.numel() // images.shape[1]])
        # Two sums, the second around the mean: one pass over squares would lose the digits that variances consist of.
        sums = _over_ranks(torch.cat([images.sum(axes), count]))
        total = sums[-1]
        mean = sums[:-1] / total
        around = images - mean.view(1, -1, *(1 for _ in images.shape[2:]))
        variance = _over_ranks(around.square().sum(axes)) / total
        with torch.no_grad():
            self.num_batches_tracked += 1
            share = self._momentum if self._momentum is not None else 1 / float(self.num_batches_tracked)
            self.running_mean.lerp_(mean, share)
            self.running_var.lerp_(variance * total / (total - 1), share)
        return mean, variance


class _Sum(torch.autograd.Function):
    """The sum over processes; its gradient is the sum of all processes' gradients."""

    @staticmethod
    def forward(_: Any, values: Tensor) -> Tensor:
        summed = values.clone()
        torch.distributed.all_reduce(summed)
        return summed

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        summed = gradient.clone()
        torch.distributed.all_reduce(summed)
        return summed


def _over_ranks(values: Tensor) -> Tensor:
    summed: Tensor = _Sum.apply(values)
    return summed
