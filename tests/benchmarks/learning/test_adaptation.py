"""Domain-adversarial training: the turned gradient, against a plain loop, and that it does what it is for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from benchmarks.learning.networks import (
    DomainAdversarial,
    adapt_together,
    strength_at,
)
from benchmarks.learning.together import (
    Training,
    batches,
    initial_parameters,
    stream,
)

AGENTS, RECORDS, PUBLIC = 2, 12, 20


class _Turned(torch.autograd.Function):
    """Gradient reversal as Ganin et al. define it, the usual way."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return -ctx.strength * gradients[0], None


def _small() -> DomainAdversarial:
    return DomainAdversarial(nn.Sequential(nn.Linear(6, 5), nn.Tanh()), nn.Linear(5, 3), width=5, hidden=4)


def _data() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return (
        torch.randn((AGENTS, RECORDS, 6), generator=generator),
        torch.randint(0, 3, (AGENTS, RECORDS), generator=generator),
        torch.randn((PUBLIC, 6), generator=generator) + 1,
    )


def test_adapting_together_equals_a_plain_loop_for_each_agent() -> None:
    inputs, labels, public = _data()
    module, start = initial_parameters(_small, AGENTS, seed=1)
    plan, seeds, sizes = Training(epochs=3, batch_size=4, learning_rate=0.01), [7, 8], [12, 5]
    together = adapt_together(module, start, inputs, labels, public, training=plan, seeds=seeds, sizes=sizes)
    for agent in range(AGENTS):
        weights = {name: value[agent].clone().requires_grad_() for name, value in start.items()}
        optimizer = torch.optim.AdamW(weights.values(), lr=plan.learning_rate, weight_decay=plan.weight_decay)
        own = list(batches(plan, [seeds[agent]], [sizes[agent]], RECORDS))
        shown = list(batches(plan, [stream(seeds[agent], 1)], [PUBLIC], RECORDS))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=len(own))
        for step, ((rows, _), (others, _)) in enumerate(zip(own, shown, strict=True)):
            batch = torch.cat([inputs[agent, rows[0]], public[others[0]]])
            parts = {part: {n.removeprefix(part): w for n, w in weights.items() if n.startswith(part)} for part in
                     ("features.", "classifier.", "domain.")}  # fmt: skip
            features = functional_call(module.features, parts["features."], (batch,))
            logits = functional_call(module.classifier, parts["classifier."], (features,))[: rows.shape[1]]
            turned = _Turned.apply(features, strength_at(step / len(own)))
            origin = functional_call(module.domain, parts["domain."], (turned,)).squeeze(-1)
            truth = torch.cat([torch.zeros(rows.shape[1]), torch.ones(rows.shape[1])])
            loss = functional.cross_entropy(logits, labels[agent, rows[0]])
            loss = loss + functional.binary_cross_entropy_with_logits(origin, truth)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch does not type it
            optimizer.step()
            schedule.step()
        for name, value in weights.items():
            torch.testing.assert_close(together[name][agent], value.detach(), atol=1e-5, rtol=1e-3)


def test_an_agents_adapted_model_depends_on_its_own_records_alone() -> None:
    inputs, labels, public = _data()
    module, start = initial_parameters(_small, AGENTS, seed=1)
    plan = Training(epochs=2, batch_size=4)
    together = adapt_together(module, start, inputs, labels, public, training=plan, seeds=[7, 8])
    others = inputs.clone()
    others[0] = 3.0
    changed = adapt_together(module, start, others, labels, public, training=plan, seeds=[7, 8])
    for name, value in together.items():
        torch.testing.assert_close(changed[name][1], value[1])
        assert not torch.equal(changed[name][0], value[0])
