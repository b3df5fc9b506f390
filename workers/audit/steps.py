"""Training in steps over secret samples, attacked by one clipped gradient.

The adversary knows the public model that each step begins from, so the canary's clipped gradient d at it; whether the
canary was drawn it does not know. What a step opens is, along d, noise alone, or with chance q noise around d: where
the others' gradients are orthogonal to it (`workers.audit.poison`), the likelihood ratio of the step is
1 - q + q exp(<v, d>/sigma^2 - |d|^2/(2 sigma^2)), whoever else was drawn. Steps follow from what was opened before, so
their ratios multiply: no test of all steps is better.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from fractions import Fraction

import numpy as np

from feature_store.quantize import FEATURE_SCALE
from labeler.batch import QueryBatch
from labeler.linear_model import axes_of, model_before
from labeler.methods.federated import step_terms
from labeler.randomness import seeded_source
from labeler.task import Task
from workers.audit.pipeline import Seen
from workers.audit.worlds import Records
from workers.learning.blocks import Rows
from workers.learning.sampled_steps import rows_on_grid, sampled_gradients


@dataclass(frozen=True, eq=False)
class StepVotes:
    """See the module.

    Attributes:
        task: of method federated, with records as the unit.
        batch: the rows of each step.
    """

    task: Task
    canary: Records = field(repr=False)
    batch: QueryBatch
    moved_mu: None = None

    def score(self, seen: Seen) -> float:
        """Logarithm of the likelihood ratio of all steps."""
        terms, total = step_terms(self.task), 0.0
        rows = Rows.of(self.canary.features.astype(np.float32) / np.float32(FEATURE_SCALE), self.canary.labels)
        axes, certain = axes_of(self.task, self.batch.features), replace(terms, rate=Fraction(1))
        nobody = seeded_source(b"no coin is tossed where everybody takes part")
        for step, (release, known) in enumerate(zip(seen.releases, seen.known_noise, strict=True)):
            if release.noisy_votes is None:
                continue
            model = model_before(self.task, seen.releases[:step])
            gradient = (
                sampled_gradients(
                    rows_on_grid(rows, axes, num_classes=terms.num_classes),
                    rows.count,
                    model,
                    terms=certain,
                    source=nobody,
                )
                / terms.sensitivity
            )
            ratio = float(((release.noisy_votes - known - gradient / 2) * gradient).sum()) / self.task.sigma_votes**2
            rate = float(terms.rate)
            total += ratio if rate == 1 else float(np.logaddexp(math.log1p(-rate), math.log(rate) + ratio))
        return total
