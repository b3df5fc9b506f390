"""Local training that also fits the public images: the papers' FedAvg+DA and DP-FedAvg+DA.

A sampled agent starts from the global model and runs domain-adversarial training
(`benchmarks.learning.adaptation`) on its own records and the requester's unlabelled images, in place of plain SGD.
Features, classifier and domain head are one vector: all of it is averaged, and in DP-FedAvg all of it is clipped and
covered by noise. The papers find that averaging such updates hurts: every agent's features move towards the public
images by a way of their own.

References: Zhu et al. 2021, section 5.1 (the variants); Ganin et al. 2016.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.learning.adaptation import DomainAdversarial, adapt_together, strength_at
from benchmarks.learning.gradients import flatten
from benchmarks.learning.together import Parameters, Training
from labeler.errors import InvalidSetting

_GROUP = 25


@dataclass(frozen=True, eq=False)
class AdversarialUpdates:
    """`LocalUpdates` by domain-adversarial training.

    Attributes:
        module: the network with its domain head.
        public: the requester's images, float32.
        training: of one round.
    """

    module: DomainAdversarial
    public: Tensor
    training: Training

    def __call__(
        self,
        params: Parameters,
        inputs: Tensor,
        labels: Tensor,
        *,
        sizes: Sequence[int],
        done: float,
        seeds: Sequence[int],
    ) -> Tensor:
        """theta_i - theta, float64, shape (agents, D); the reversed gradient grows over the rounds."""
        updates = []
        for first in range(0, len(inputs), _GROUP):
            part = slice(first, first + _GROUP)
            start = {name: value.expand(len(inputs[part]), *value.shape) for name, value in params.items()}
            trained = adapt_together(
                self.module, start, inputs[part], labels[part], self.public, training=self.training,
                seeds=seeds[part], sizes=sizes[part], largest_strength=strength_at(done),
            )  # fmt: skip
            updates.append(flatten(trained, leading=1).double() - flatten(params).double())
        return torch.cat(updates)


def with_domain_head(network: nn.Sequential, *, hidden: int = 8) -> DomainAdversarial:
    """A network whose last layer is linear, with a small domain head on what that layer sees."""
    *features, classifier = network
    if not isinstance(classifier, nn.Linear):
        raise InvalidSetting("a domain head needs a network whose last layer is linear")
    return DomainAdversarial(nn.Sequential(*features), classifier, width=classifier.in_features, hidden=hidden)
