"""Adversarial local training inside federated averaging: each agent's update is its own, and it can be averaged."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.learning.gradients import flatten
from benchmarks.learning.networks import AdversarialUpdates, with_domain_head
from benchmarks.learning.together import Training

AGENTS, RECORDS, WIDTH, CLASSES = 6, 40, 8, 4


def _data(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    centres = 3 * torch.eye(CLASSES, WIDTH)
    labels = torch.randint(0, CLASSES, (AGENTS, RECORDS), generator=generator)
    inputs = centres[labels] + torch.randn(AGENTS, RECORDS, WIDTH, generator=generator)
    public = centres[torch.arange(60) % CLASSES] + torch.randn(60, WIDTH, generator=generator) + 0.5
    return inputs, labels, public


def _local(public: torch.Tensor) -> tuple[AdversarialUpdates, dict[str, torch.Tensor]]:
    torch.manual_seed(2)
    module = with_domain_head(nn.Sequential(nn.Linear(WIDTH, 12), nn.ReLU(), nn.Linear(12, CLASSES)))
    params = {name: value.detach().clone() for name, value in module.named_parameters()}
    return AdversarialUpdates(module, public, Training(epochs=2, batch_size=10, learning_rate=1e-2)), params


def test_an_agent_whose_records_change_changes_its_own_update_alone() -> None:
    inputs, labels, public = _data()
    local, params = _local(public)
    options = {"sizes": [RECORDS] * AGENTS, "done": 0.5, "seeds": list(range(AGENTS))}
    before = local(params, inputs, labels, **options)
    inputs[2] *= -5
    after = local(params, inputs, labels, **options)
    moved = (before != after).any(1)
    assert moved.tolist() == [False, False, True, False, False, False]
    assert before.shape == (AGENTS, len(flatten(params)))
