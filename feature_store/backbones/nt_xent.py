"""The NT-Xent loss of SimCLR: two views of one image attract, all other images of the batch repel."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from labeler.errors import InvalidSetting


def nt_xent(first: Tensor, second: Tensor, *, temperature: float) -> Tensor:
    """Normalised, temperature-scaled cross entropy over a batch of pairs.

    With z the 2n L2-normalised rows of both views, s(i, j) = z_i . z_j / temperature and p(i) the other view of
    row i, the loss is the mean over all 2n rows of -log( exp s(i, p(i)) / sum over j != i of exp s(i, j) ).

    Args:
        first: projections of the first views, shape (n, d), n at least 2, any finite length.
        second: projections of the second views of the same images in the same order, shape (n, d).
        temperature: positive; small values weigh the hardest negatives most.

    Returns:
        A scalar tensor.

    Raises:
        InvalidSetting: the shapes differ, fewer than two pairs, or a temperature that is not positive.

    References:
        Chen, Kornblith, Norouzi, Hinton (2020), A simple framework for contrastive learning of visual
        representations, equation 1.
    """
    if first.shape != second.shape or first.ndim != 2 or len(first) < 2:
        raise InvalidSetting(
            "NT-Xent needs two arrays of one shape (n, d) with n at least 2; "
            f"found {tuple(first.shape)} and {tuple(second.shape)}"
        )
    if not temperature > 0:
        raise InvalidSetting(f"temperature must be above 0, found {temperature}")
    count = len(first)
    rows = functional.normalize(torch.cat([first, second]).float(), dim=1)
    similarity = rows @ rows.T / temperature
    similarity.fill_diagonal_(float("-inf"))
    partner = torch.arange(2 * count, device=rows.device).roll(count)
    return functional.cross_entropy(similarity, partner)
