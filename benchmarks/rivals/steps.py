"""Training in steps against one noisy sum at the same certified price: `labeler bench steps`.

Everything is the product's own: tasks, prices, sensitivities, coins, grid, noise shares, released models. Only messages
are left out. CIFAR-10 (EfficientNet-Lite2, ten agents, one colluding): settings are chosen on the tuning half, by test
accuracy there, and reported on the other half, on other images. The digits of scikit-learn (raw pixels, five agents of
240) take the settings that were chosen on CIFAR-10 with 400 records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.data_sets import Split, cifar10_features, data_root
from benchmarks.private_sum import private_sum
from benchmarks.rivals.cifar10_worlds import AGENTS, DELTA, cifar10_world
from benchmarks.rivals.voting import ProductVotes
from benchmarks.rivals.world import Predict, Rival, World
from benchmarks.rows import BenchRow
from feature_store.quantize import quantize
from feature_store.query_selection import axis_rows
from labeler.errors import InvalidSetting
from labeler.linear_model import PublicAxes, model_before, released_model
from labeler.methods.blind_average import model_terms, weight_sum
from labeler.methods.federated import step_sum, step_terms
from labeler.noise import VectorSum
from labeler.randomness import seeded_source
from labeler.release import Release
from labeler.solving import solve_sigma
from labeler.task import Task, parse_task
from workers.learning.blocks import Rows
from workers.learning.class_means import class_sums
from workers.learning.linear import train_rows
from workers.learning.sampled_steps import rows_on_grid, sampled_gradients
from workers.progress import ProgressCallback, silent

EPSILONS: Final = (0.5, 1.0, 2.0)
SEEDS, TUNING_SEED, DRAWS = (0, 1, 2), 100, 2


@dataclass(frozen=True)
class Trained:
    """A linear model of the product along public axes.

    Attributes:
        learner: "softmax" or "means" of blind-average; "steps" of federated.
        axes: public.
        regularisation: lambda; of steps their own.
        steps, rate, learning_rate: of "steps".
    """

    learner: str
    axes: int
    regularisation: float = 1e-4
    steps: int = 1
    rate: float = 1.0
    learning_rate: float = 1.0

    @property
    def name(self) -> str:
        return {
            "steps": "federated (DP-FedSGD)",
            "softmax": "blind-average, softmax",
            "means": "blind-average, class means",
        }[self.learner]

    def task(self, world: World, epsilon: float) -> Task:
        """The task of least noise that costs at most epsilon."""
        least = min(len(one) for one in world.holdings)
        return _task(self, epsilon, len(world.holdings), world.colluding_agents, least, world.num_classes, world.delta)

    def fit(self, world: World) -> Predict:
        """The public map, and each agent's records along it."""
        asked = axis_rows(quantize(world.public), self.axes)
        axes = PublicAxes(asked)
        held = [_rows(one) for one in world.holdings]
        blocks = (
            [list(rows_on_grid(one, axes, num_classes=world.num_classes)) for one in held]
            if self.learner == "steps"
            else []
        )
        seen = quantize(world.asked)

        def opened(task: Task, spec: VectorSum, vectors: list[NDArray[np.float64]], seed: str) -> Release:
            sources = [seeded_source(f"{seed} {agent}".encode()) for agent in range(len(vectors))]
            numbers = private_sum(spec, vectors, sources=sources).reshape(-1, task.num_classes)
            everybody = frozenset(f"agent-{agent}" for agent in range(len(vectors)))
            return Release("histogram", numbers.argmax(axis=1).astype(np.int16), numbers, everybody, is_seeded=True)

        def steps(task: Task, seed: str) -> list[Release]:
            terms, spec, releases = step_terms(task), step_sum(task), list[Release]()
            for step in range(task.steps):
                theta = model_before(task, releases)
                vectors = [
                    sampled_gradients(
                        mine,
                        one.count,
                        theta,
                        terms=terms,
                        source=seeded_source(f"coins {seed} {step} {agent}".encode()),
                    )
                    / terms.sensitivity
                    for agent, (mine, one) in enumerate(zip(blocks, held, strict=True))
                ]
                releases.append(opened(task, spec, vectors, f"{seed} {step}"))
            return releases

        @lru_cache(maxsize=1)
        def weights(task: Task) -> list[NDArray[np.float64]]:
            terms: Any = model_terms(task)
            if self.learner == "means":
                return [class_sums(one, terms=terms, axes=axes) / terms.sensitivity for one in held]
            return [train_rows(one, terms=terms, axes=axes) / terms.sensitivity for one in held]

        def predict(epsilon: float | None, draw: int) -> NDArray[np.int64]:
            if epsilon is None:
                raise InvalidSetting("trained models are compared at a price; name an epsilon")
            task, seed = self.task(world, epsilon), f"steps {world.name} {self!r} {epsilon} {draw}"
            if self.learner == "steps":
                releases = steps(task, seed)
            else:
                releases = [opened(task, weight_sum(task), weights(task), seed)]
            return released_model(task, releases, asked).predict(seen).astype(np.int64)

        return predict


@lru_cache(maxsize=256)
def _task(how: Trained, epsilon: float, agents: int, colluding: int, least: int, classes: int, delta: float) -> Task:
    training: dict[str, Any] = {"axes": how.axes}
    if how.learner == "means":
        training["learner"] = "means"
    else:
        training |= {"min_records": least, "regularisation": how.regularisation}
    if how.learner == "steps":
        sampled = {"rate": how.rate, "learning_rate": how.learning_rate, "momentum": 0.5}
        training |= {"iterations": how.steps, "radius": float(least), "sampled": sampled}
    fields = {
        "name": "steps",
        "classes": [str(one) for one in range(classes)],
        "method": "federated" if how.learner == "steps" else "blind-average",
        "sigma_votes": 1.0,
        "delta": delta,
        "max_queries": how.steps * (how.axes + 1),
        "agents": agents,
        "colluding_agents": colluding,
        "training": training,
    }
    draft = parse_task(fields)
    return parse_task(fields | {"sigma_votes": solve_sigma(draft, epsilon)})


def _rows(split: Split) -> Rows:
    return Rows.of(quantize(split.inputs).astype(np.float32) / np.float32(2048), split.labels.astype(np.int16))


ENTRANTS: Final[dict[str, tuple[Rival, ...]]] = {
    one[0].name: one
    for one in (
        tuple(
            Trained("steps", 16, 1e-4, steps, rate, learning_rate)
            for steps, rate in ((15, 0.3), (40, 0.15))
            for learning_rate in (2.0, 8.0)
        ),
        tuple(Trained("softmax", 16, regularisation) for regularisation in (0.01, 0.03, 0.1)),
        tuple(Trained("means", axes) for axes in (10, 16)),
        tuple(ProductVotes(clusters, "planned") for clusters in (15, 20, 50)),
    )
}
"""Every method by its name, with the settings it may take."""


def bench_steps(*, data: Path | None = None, full: bool = False, progress: ProgressCallback = silent) -> list[BenchRow]:
    """Test accuracy of each method at each epsilon.

    Args:
        data: folder of the real data sets.
        full: all epsilons, cases and seeds; else one of each.

    Raises:
        InvalidSetting: the data are not there.
    """
    features = cifar10_features(data_root(data), backbone="efficientnet-lite2", progress=progress)
    epsilons = EPSILONS if full else EPSILONS[1:2]
    rows: list[BenchRow] = []
    for records in (400, 4_000) if full else (400,):
        chosen = _chosen(cifar10_world(features, TUNING_SEED, records=records, tuning=True), epsilons, progress)
        worlds = [cifar10_world(features, seed, records=records) for seed in (SEEDS if full else SEEDS[:1])]
        rows += _reported(f"CIFAR-10, {AGENTS} agents x {records:,}", worlds, chosen, progress)
        if records == 400:
            rows += _reported("digits, 5 agents x 240", [digits_world(s) for s in SEEDS], chosen, progress)
    return rows


def digits_world(seed: int) -> World:
    """Five agents hold 240 digits each; 300 are public, the rest are scored."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    rows = (pixels / np.linalg.norm(pixels, axis=1, keepdims=True)).astype(np.float32)
    order = np.random.default_rng(seed).permutation(len(labels))
    held, public, test = np.split(order, [1200, 1500])
    parts = [Split(rows[part], labels[part].astype(np.int64)) for part in np.split(held, 5)]
    scored = Split(rows[test], labels[test].astype(np.int64))
    return World(f"digits {seed}", parts, rows[public], scored, 10, delta=DELTA)


def _accuracy(world: World, labels: NDArray[np.int64]) -> float:
    return 100 * float((labels[: len(world.test)] == world.test.labels).mean())


def _chosen(world: World, epsilons: Sequence[float], progress: ProgressCallback) -> dict[tuple[str, float], Rival]:
    """The best setting of each method at each epsilon, by one draw."""
    found = {}
    for number, (name, settings) in enumerate(ENTRANTS.items()):
        progress("Choosing settings", number, len(ENTRANTS))
        fitted = {one: one.fit(world) for one in settings}
        for epsilon in epsilons:
            found[name, epsilon] = max(settings, key=lambda one: _accuracy(world, fitted[one](epsilon, 0)))
    return found


def _reported(
    case: str, worlds: Sequence[World], chosen: dict[tuple[str, float], Rival], progress: ProgressCallback
) -> list[BenchRow]:
    rows = []
    for number, ((name, epsilon), setting) in enumerate(chosen.items()):
        progress(case, number, len(chosen))
        values = []
        for world in worlds:
            predict = setting.fit(world)
            values += [_accuracy(world, predict(epsilon, draw)) for draw in range(DRAWS)]
        rows.append(
            BenchRow(
                case=case,
                method=name,
                metric="test accuracy, %",
                value=float(np.mean(values)),
                sd=float(np.std(values, ddof=1)),
                epsilon=epsilon,
                delta=DELTA,
                level="instance",
                settings={"setting": repr(setting), "colluding_agents": 1, "runs": len(values)},
            )
        )
    return rows
