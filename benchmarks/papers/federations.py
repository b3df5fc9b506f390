"""What the tables of federated training share: a federation as tensors, its accuracy, and rows with their price."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import BenchRow
from benchmarks.learning.federated import SourceOf
from benchmarks.learning.together import Parameters
from benchmarks.papers.partitions import Rows
from benchmarks.sums import SampledSum
from labeler.randomness import seeded_source

ACCURACY: Final = "test accuracy, %"
AGENT_DELTA, INSTANCE_DELTA = 1e-3, 1e-4


@dataclass(frozen=True, eq=False)
class Federation:
    """Agents' records, padded to one length, the images that the model is tested on, and unlabelled public ones."""

    inputs: Tensor
    labels: Tensor
    sizes: list[int]
    test: Tensor
    test_labels: Tensor
    public: Tensor | None = None

    @staticmethod
    def of(inputs: Tensor, labels: Tensor, parts: Sequence[Rows], test: Tensor, test_labels: Tensor) -> Federation:
        longest = max(map(len, parts))
        rows = torch.from_numpy(np.stack([np.resize(part, longest) for part in parts]))
        return Federation(inputs[rows], labels[rows], [len(part) for part in parts], test, test_labels)


def sources_of(prefix: str) -> SourceOf:
    """Seeded sources for a simulation; rows made with them can be repeated."""
    return lambda purpose: seeded_source(f"{prefix}: {purpose}".encode())


def accuracy_of(module: nn.Module, model: Parameters, data: Federation) -> float:
    """Share of the test images that a model labels right, in percent."""
    with torch.no_grad():
        logits = torch.cat([torch.func.functional_call(module, model, (part,)) for part in torch.split(data.test, 500)])
    return 100 * float((logits.argmax(1) == data.test_labels).double().mean())


def accuracy_row(
    case: str,
    method: str,
    accuracies: Mapping[int, float],
    started: float,
    reference: str | None,
    settings: Mapping[str, Any],
) -> BenchRow:
    """Mean and deviation of a method's accuracies, by seed; no guarantee."""
    values = list(accuracies.values())
    return BenchRow(
        case=case,
        method=method,
        metric=ACCURACY,
        value=statistics.fmean(values),
        sd=statistics.stdev(values) if len(values) > 1 else None,
        reference=reference,
        seconds=time.perf_counter() - started,
        settings={**settings, "seeds": list(accuracies)},
    )


def priced(row: BenchRow, plan: SampledSum, delta: float) -> BenchRow:
    """The row with the certified price of the rounds it was trained in."""
    told = {
        "noise_multiplier": plan.accounted.noise_multiplier,
        "as_in_paper_epsilon": plan.as_in_paper_epsilon(delta),
    }
    return replace(row, epsilon=plan.epsilon(delta), delta=delta, level=plan.level, settings={**row.settings, **told})
