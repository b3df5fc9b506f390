"""FedAUXfdp (Hoech et al. 2022): an agent answers with soft labels of two heads that carry its own noise.

The unit of `Task.sigma_votes` is what one record can change. Each agent adds all the noise to its own two heads
(labeler.local_heads), so that sigma^-2 is the sum of both heads' mu^2. What it answers afterwards is a function of the
noisy heads and of public queries; it is shared and summed without noise, which is post-processing.

How the heads are fitted and asked: `workers.voting.aux_distill`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from labeler.errors import PrivacyRefusal
from labeler.methods.sensitivity import kept_bound, training_of
from labeler.methods.terms import BoundedNumbers, MethodTraits
from labeler.setting import Setting

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from labeler.local_heads import LocalHeadTerms
    from labeler.noise import VectorSum


def head_terms(setting: Setting) -> LocalHeadTerms:
    """The two heads: sigma^-2 is their mu^2 together, of which the scores take `score_share`.

    Every fifth query is a public negative.
    """
    from labeler.local_heads import LocalHeadTerms

    training = training_of(setting)
    return LocalHeadTerms(
        num_classes=setting.num_classes,
        head_dimension=training.dimension + 1,
        score_dimension=training.dimension + 1,
        min_records=training.min_records,
        num_negatives=setting.num_negatives,
        sigma_head=setting.sigma_votes / math.sqrt(1 - training.score_share),
        sigma_scores=setting.sigma_votes / math.sqrt(training.score_share),
        head_regularisation=training.regularisation,
        score_regularisation=training.regularisation,
        clip_norm=training.clip_norm,
        max_records=kept_bound(setting),
    )


def both_heads(setting: Setting) -> VectorSum:
    """The noisy vector that is priced: one agent's two heads, as `labeler.local_heads` proves."""
    return head_terms(setting).mechanism


def one_vote(setting: Setting) -> int:
    """A soft vote of one, grid units: all of a row that an agent is certain of."""
    return setting.scale


def check_soft_votes(numbers: NDArray[np.int64], setting: Setting) -> None:
    """Refuse what is no soft label; the numbers themselves are not told."""
    # Entries first: only bounded entries can be summed without wrapping around.
    if numbers.min() < 0 or numbers.max() > setting.scale or numbers.sum(axis=1).max() > setting.scale:
        raise PrivacyRefusal("soft votes of one agent lie between 0 and 1, and add up to at most 1 per query")


TRAITS: Final = MethodTraits(
    "FedAUXfdp",
    "soft labels of a model with noise of its own, weighted by how certain it may be",
    sums="soft labels",
    asked_at_once=True,
    counts=False,
    has_local_noise=True,
    learns_from_queries=True,
    stated=BoundedNumbers(both_heads, one_vote, check_soft_votes),
)
