"""Personal models of the product (`training.personal`) next to the shared and the site's own, at one price.

A federated job runs here as its agents and its coordinator compute it. Every step is the method's own answer, with
discrete noise from seeds, and the model is the one that is released. Each site then makes its models with the function
that `labeler agent predict` calls, and is tested on its own images.

    federated job, one price  -->  shared model  -->  each site: personal models of every helper and alpha

References:
    Zheng, Chen, Long, Su 2021.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from benchmarks import BenchRow, mean_row
from labeler.linear_model import LinearModel, model_before, released_model
from labeler.methods.federated import ballots, step_sum
from labeler.noise import DiscreteGaussian
from labeler.randomness import ByteSource, seeded_source
from labeler.records import FEATURE_ONE, ModelStore, Records, RunnerContext
from labeler.release import Release
from labeler.setting import Personal
from labeler.solving import solve_sigma
from labeler.tally import QueryBatch
from labeler.task import Task, parse_task
from workers.learning.learner import Trainer
from workers.learning.personal import personal_model
from workers.progress import ProgressCallback, silent
from workers.voting import NeighborIndexes

DELTA = 1e-5

SHARED, OWN, CHOSEN = "shared model", "own model", "chosen alpha"
METHODS: dict[str, Personal] = {
    SHARED: Personal(alpha=1.0),
    OWN: Personal(alpha=0.0),
    **{
        f"{helper}, alpha {alpha:g}": Personal(helper=helper, alpha=alpha)
        for helper in ("interpolation", "proximal")
        for alpha in (0.25, 0.5, 0.75)
    },
    **{f"{helper}, {CHOSEN}": Personal(helper=helper) for helper in ("interpolation", "proximal")},
    "identity": Personal(helper="identity"),
}
"""What a site may use, by its name in the tables."""


@dataclass(frozen=True, eq=False)
class Site:
    """One site's records, and images of the same kind that it has not seen: int16 features, and classes."""

    records: Records = field(repr=False)
    features: NDArray[np.int16] = field(repr=False)
    labels: NDArray[np.integer] = field(repr=False)

    @classmethod
    def of(cls, features: NDArray[np.int16], labels: NDArray[np.integer], held: NDArray[np.bool_]) -> Site:
        """Divide the images of a site: those `held` are tested on."""
        seen = ~held
        ids = np.random.default_rng(0).permutation(int(seen.sum()))
        return cls(Records(features[seen], ids, labels[seen].astype(np.int16), "v"), features[held], labels[held])


def task_at(epsilon: float, *, classes: int, agents: int, steps: int, rows: int, **training: object) -> Task:
    """Return a federated task whose price for one record is epsilon at DELTA."""
    task = parse_task(
        {
            "name": "personal", "method": "federated", "classes": [str(one) for one in range(classes)],
            "sigma_votes": 10.0, "delta": DELTA, "agents": agents, "max_queries": steps * rows,
            "backbone_fingerprint": "", "training": {"iterations": steps, **training},
        }
    )  # fmt: skip
    return task.model_copy(update={"sigma_votes": solve_sigma(task, epsilon), "grid_scale": None})


def run_federated(
    task: Task, sites: Sequence[Site], asked: NDArray[np.int16], *, seed: int, progress: ProgressCallback = silent
) -> LinearModel:
    """Return the released model of a job; see the module.

    Args:
        asked: the rows of each step, axes and center or unit vectors, shape (task.rows, dimension).
    """
    releases: list[Release] = []
    names, spec = [f"site-{number}" for number in range(len(sites))], step_sum(task)
    for step in range(task.steps):
        progress("steps of training", step, task.steps)
        batch = QueryBatch(asked, step * task.rows, model_before(task, releases))
        total = np.zeros((task.rows, task.num_classes), dtype=np.int64)
        for name, site in zip(names, sites, strict=True):
            source = partial(seeded_source, f"{seed} {step} {name}".encode())
            total += ballots(task, batch, site.records, _context(source))
            noise = DiscreteGaussian(spec.share_sigma_grid).sample(
                seeded_source(f"noise {seed} {step} {name}".encode()), spec.dimension
            )
            total += noise.reshape(total.shape)
        opened = spec.open(total)
        releases.append(Release("histogram", opened.argmax(1).astype(np.int16), opened, frozenset(names), True))
    model = released_model(task, releases, asked)
    assert model is not None  # noqa: S101  # a federated task has one
    return model


def _context(coins: Callable[[], ByteSource]) -> RunnerContext:
    nothing = NeighborIndexes(dimension=1, engine="numpy")
    return RunnerContext(nothing, ModelStore(), coins, Trainer())


def accuracies(model: LinearModel, site: Site) -> dict[str, float]:
    """Return the percentage of a site's unseen images that each of METHODS labels right."""
    found = {}
    for name, personal in METHODS.items():
        made = personal_model(site.records, model.weights, axes=model.axes, personal=personal)
        predicted = LinearModel(made.weights, model.terms, model.axes).predict(site.features)
        found[name] = 100 * float((predicted == site.labels).mean())
    return found


def rows_of_sites(
    cases: Sequence[str], task: Task, found: Sequence[Sequence[dict[str, float]]], epsilon: float, **told: object
) -> list[BenchRow]:
    """Return a row for each case and method.

    Args:
        cases: what each site is called; the sites of one name are averaged.
        found: of each seed, the accuracies of each site.
    """
    rows = []
    for case in dict.fromkeys(cases):
        for method in METHODS:
            each = [
                statistics.fmean(one[method] for name, one in zip(cases, of_seed, strict=True) if name == case)
                for of_seed in found
            ]
            settings = {"sigma": task.sigma_votes, "training": task.training, "seeds": len(found)} | told
            settings["training"] = None if task.training is None else task.training.model_dump(mode="json")
            metric = "right on a site's own unseen images, %"
            rows.append(
                mean_row(case, method, metric, each, epsilon=epsilon, delta=DELTA, level="instance", settings=settings)
            )
    return rows


def quantized(features: NDArray[np.floating]) -> NDArray[np.int16]:
    """Return features of norm 1 as shards hold them."""
    return np.asarray(np.rint(features * FEATURE_ONE), dtype=np.int16)
