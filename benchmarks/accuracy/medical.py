"""Chest X-rays: five hospitals of unequal size label the images of patients whom none of them has seen.

1,481 X-rays of children (Kermany et al. 2018), normal or pneumonia. A file's name says whose image it is; a `normal`
file counts as its own patient. In each draw `PUBLIC_SHARE` of the patients are the requester's: all their images are
public, and their truth only scores. The other patients are dealt to five sites in the shares of `SHARES`.

**The unit is a patient**, for every method alike. A site answers with one image of each patient, drawn at random, which
is what `records_per_person = 1` does. So a patient that comes or goes moves a sum by one record, and an epsilon of a
record is one of a patient (`tests/benchmarks/test_medical.py` compares it with the product's price). "per image" and
"per patient" in the table only say what is scored: each public image, or the mean score of each patient's.

**Scores.** AUROC and balanced accuracy, and the recall of each class. A method labels by its largest score, whatever
the shares of the classes are.

**Choosing settings.** No setting was chosen on an X-ray, neither for a rival nor for ours. At each epsilon a method
takes the setting of `ENTRANTS` that is best on Office-Caltech10, by the mean of AUROC and balanced accuracy. There,
three of the ten classes are the first class in each tuning draw, seven the second. As many photos, the same sites, the
same noise.

**Who is trusted.** The sums hold against any one site as well. Two rivals are given one trusted place that sees all
records, and add noise once: DPPL-Public, and DP-SGD (Abadi et al. 2016; Opacus, full batches, on the leading axes of
the public images). "no privacy" sees all images of all sites, and chooses its setting on these very patients.

**The evaluation** is the product's, over real shards: a job at epsilon 0.5 of a patient, then `labeler evaluate` of its
student at 0.5 of a patient. Both are paid: 1.0 in all.
"""

from __future__ import annotations

import math
import re
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks import BenchRow, in_turn, mean_row
from benchmarks.accuracy.office_caltech import data_folder, embed_domains
from benchmarks.accuracy.rivals.methods import (
    ClassMeans,
    ProductMeans,
    ProductVotes,
    PublicPrototypes,
    public_axes,
)
from benchmarks.accuracy.rivals.world import Predict, Rival, World, noisy_sum
from benchmarks.data import Split, cache_folder, embedded, split_of
from benchmarks.learning.linear_users import linear_scores, train_linear
from feature_store.results.models import read_model
from feature_store.results.scores import Preference, auroc, prefer
from feature_store.rows import quantize
from feature_store.shard import Shard
from feature_store.shard_writer import ShardWriter
from labeler.accounting.gaussian import mu_of_epsilon
from labeler.errors import InvalidSetting
from labeler.methods.blind_average import Learner, LinearTerms
from labeler.randomness import seeded_source
from labeler.solving import solve_sigma
from labeler.system.site_key import KEY_BYTES, SiteKey
from labeler.task import parse_task
from workers.progress import ProgressCallback, silent
from workers.run.labeling import run_job
from workers.run.preparation import LabelingJob, evaluation_job
from workers.run.task_file import TaskFile
from workers.voting import select_records

CLASSES: Final = ("normal", "pneumonia")
BACKBONE: Final = "efficientnet-lite0"
SHARES: Final = (0.4, 0.25, 0.15, 0.12, 0.08)
PUBLIC_SHARE: Final = 0.3
DELTA: Final = 1e-5
COLLUDING: Final = 1
EPSILONS: Final = (0.1, 0.5, 1.0, 2.0)
ASKED: Final = 0.5
DRAWS, TUNING_DRAWS, FIRST_TUNING = 10, 4, 100
PATIENT, IMAGE = "per patient", "per image"
AUROC, BALANCED = "AUROC, %", "balanced accuracy, %"
RECALLS: Final = tuple(f"recall of {name}, %" for name in CLASSES)
RECALL: Final = Fraction(9, 10)
LIKE: Final = 20

OURS, MEANS = "ours: reverse-knn, planned student", "ours: class means (blind-average)"
CENTRAL: Final = "no privacy, one trusted place"


@dataclass(frozen=True, eq=False)
class Images:
    """Images with their truth.

    Attributes:
        inputs: features of L2 norm 1 up to rounding, shape (n, dimension).
        labels: 0 or 1, shape (n,).
        patients: whose they are, shape (n,).
    """

    inputs: NDArray[np.float32]
    labels: NDArray[np.int64]
    patients: NDArray[np.int64]

    def __getitem__(self, rows: NDArray[np.int64]) -> Images:
        return Images(self.inputs[rows], self.labels[rows], self.patients[rows])


@dataclass(frozen=True, eq=False)
class Division:
    """One draw of sites.

    Attributes:
        world: what methods get: one image of each patient at the sites, and public images without truth.
        public: the requester's images, with the truth that scores.
        sites: all images of each site.
    """

    world: World
    public: Images
    sites: tuple[Images, ...]


@dataclass(frozen=True)
class Helmet:
    """DP-Helmet: each site trains a linear model along public axes; the mean of the models is released.

    Attributes:
        learner, regularisation: of `LinearTerms`; the least number of records is that of the smallest site, public.
        axes: public principal axes, half whitened.
    """

    learner: Learner = "softmax"
    regularisation: float = 0.1
    axes: int = 32

    @property
    def name(self) -> str:
        return "DP-Helmet"

    def fit(self, world: World) -> Predict:
        """Train every site's model; one record moves it by at most the terms' sensitivity."""
        map_ = public_axes(world, axes=self.axes, whiten=0.5)
        terms = self.terms(world)
        models = [train_linear(map_(one.inputs), one.labels, terms=terms) / terms.sensitivity for one in world.holdings]
        seen = map_(world.asked)

        def predict(epsilon: float | None, draw: int) -> NDArray[np.float64]:
            return linear_scores(seen, noisy_sum(world, models, epsilon, draw=draw), terms=terms)

        return predict

    def terms(self, world: World) -> LinearTerms:
        """Return how a site trains."""
        return LinearTerms(
            self.learner,
            world.num_classes,
            regularisation=self.regularisation,
            clip_norm=1.0,
            radius=1.0,
            iterations=100,
            min_records=min(len(one) for one in world.holdings),
        )


@dataclass(frozen=True)
class GradientSteps:
    """DP-SGD at one trusted place, by Opacus: a linear model along public axes, whole batches, clipped to norm 1.

    Whole batches need no sampling: T steps of noise z are one Gaussian mechanism of mu = sqrt(T) / z, priced exactly.

    Attributes:
        axes: public principal axes, half whitened.
        steps: over all records.
        rate: learning rate.
        intercept: whether the model has one.
    """

    axes: int = 32
    steps: int = 30
    rate: float = 1.0
    intercept: bool = False

    @property
    def name(self) -> str:
        return "DP-SGD (Opacus), one trusted place"

    def fit(self, world: World) -> Predict:
        """Map records; training depends on the noise."""
        import torch

        map_ = public_axes(world, axes=self.axes, whiten=0.5)
        rows = torch.from_numpy(np.concatenate([map_(one.inputs) for one in world.holdings])).float()
        labels = torch.from_numpy(np.concatenate([one.labels for one in world.holdings]))
        seen = torch.from_numpy(map_(world.asked)).float()

        def predict(epsilon: float | None, draw: int) -> NDArray[np.float64]:
            torch.manual_seed(draw)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                linear = torch.nn.Linear(rows.shape[1], world.num_classes, bias=self.intercept)
                torch.nn.init.zeros_(linear.weight)
                if self.intercept:
                    torch.nn.init.zeros_(linear.bias)
                module = import_module("opacus.grad_sample").GradSampleModule(linear)
                optimizer = import_module("opacus.optimizers").DPOptimizer(
                    torch.optim.SGD(module.parameters(), lr=self.rate),
                    noise_multiplier=0.0
                    if epsilon is None
                    else math.sqrt(self.steps) / mu_of_epsilon(epsilon, world.delta),
                    max_grad_norm=1.0,
                    expected_batch_size=len(rows),
                )
                for _ in range(self.steps):
                    optimizer.zero_grad()
                    loss: Any = torch.nn.functional.cross_entropy(module(rows), labels)
                    loss.backward()
                    optimizer.step()
            with torch.no_grad():
                return np.asarray(linear(seen).numpy(), dtype=np.float64)

        return predict


LEARNERS: Final[tuple[Learner, ...]] = ("softmax", "svm")
ENTRANTS: Final[Mapping[str, tuple[Rival, ...]]] = {
    OURS: tuple(ProductVotes(clusters) for clusters in (2, 4, 10, 20)),
    MEANS: tuple(ProductMeans(axes) for axes in (4, 8, 16, 32)),
    "DPPL-Mean": tuple(ClassMeans(pool) for pool in (1, 16)),
    "DPPL-Public, one trusted place": (
        PublicPrototypes(),
        *(PublicPrototypes(low, high, are_quantiles=True) for low in (0.05, 0.25, 0.5) for high in (0.95, 1.0)),
    ),
    "DP-Helmet": tuple(
        Helmet(learner, regularisation, axes)
        for learner in LEARNERS
        for regularisation in (0.1, 1.2)
        for axes in (8, 32)
    ),
    "DP-SGD (Opacus), one trusted place": tuple(
        GradientSteps(axes, steps, rate, intercept)
        for axes in (8, 32)
        for steps in (10, 50)
        for rate in (0.3, 3.0)
        for intercept in (False, True)
    ),
}
"""Every method by its name, with the settings it may take."""


def bench_medical(
    *, data: Path | None = None, full: bool = False, progress: ProgressCallback = silent
) -> list[BenchRow]:
    """Return how well five sites' X-rays label those of other patients; see the module."""
    images, photos = xrays(data, progress), office_photos(data, progress)
    draws, tuning = (DRAWS, TUNING_DRAWS) if full else (2, 1)
    epsilons = EPSILONS if full else (ASKED,)
    tried: dict[tuple[Rival, float], list[float]] = {}
    for seed in in_turn(progress, "Choosing settings", range(FIRST_TUNING, FIRST_TUNING + tuning)):
        found = divide(two_classes(photos, seed, count=len(images.labels)), seed)
        for setting in (setting for several in ENTRANTS.values() for setting in several):
            predict = setting.fit(found.world)
            for epsilon in epsilons:
                right = scores_of(found.public, predict(epsilon, seed))[PATIENT]
                tried.setdefault((setting, epsilon), []).append(right[AUROC] + right[BALANCED])

    def mean(setting: Rival, epsilon: float) -> float:
        return float(np.mean(tried[setting, epsilon]))

    choice = {
        (name, epsilon): max(several, key=partial(mean, epsilon=epsilon))
        for name, several in ENTRANTS.items()
        for epsilon in epsilons
    }
    rows = measured(images, choice, progress, draws=draws)
    questions = choice[OURS, ASKED]
    if not isinstance(questions, ProductVotes):
        raise InvalidSetting("our method asks clusters")
    progress("Evaluation at the sites", 0, 1)
    with tempfile.TemporaryDirectory() as folder:
        rows += evaluated(divide(images, 0), Path(folder), clusters=questions.clusters)
    return rows


def measured(
    images: Images, choice: Mapping[tuple[str, float], Rival], progress: ProgressCallback, *, draws: int
) -> list[BenchRow]:
    """Return a row for each chosen setting and score, over draws of sites, and the rows of a preferred recall."""
    found: dict[tuple[str, float | None, str, str], list[float]] = {}
    preferred: dict[tuple[str, str], list[float]] = {}

    def keep(name: str, epsilon: float | None, public: Images, scores: NDArray[np.float64]) -> None:
        for case, numbers in scores_of(public, scores).items():
            for metric, value in numbers.items():
                found.setdefault((name, epsilon, case, metric), []).append(value)

    for draw in in_turn(progress, "Draws of sites", range(draws)):
        division = divide(images, draw)
        keep(CENTRAL, None, division.public, without_privacy(division))
        fitted: dict[Rival, Predict] = {}
        for (name, epsilon), setting in choice.items():
            if setting not in fitted:
                fitted[setting] = setting.fit(division.world)
            scores = fitted[setting](epsilon, draw)
            keep(name, epsilon, division.public, scores)
            if (name, epsilon) == (OURS, ASKED):
                for key, value in with_a_preference(division.public, scores, draw).items():
                    preferred.setdefault(key, []).append(value)
    rows = [
        mean_row(
            case,
            name,
            metric,
            values,
            epsilon=epsilon,
            delta=None if epsilon is None else DELTA,
            level=None if epsilon is None else "person",
            settings={"draws": draws, "colluding_agents": COLLUDING}
            | ({} if epsilon is None else {"setting": repr(choice[name, epsilon])}),
        )
        for (name, epsilon, case, metric), values in found.items()
    ]
    told: dict[str, Any] = {"epsilon": ASKED, "delta": DELTA, "level": "person", "settings": {"draws": draws}}
    return rows + [
        mean_row("preferred recall", method, metric, values, **told) for (method, metric), values in preferred.items()
    ]


def scores_of(public: Images, scores: NDArray[np.float64]) -> dict[str, dict[str, float]]:
    """Return AUROC, balanced accuracy and recalls in percent, per image and per patient.

    Args:
        scores: of each public image and class. A patient's margin is the mean of those of its images.
    """
    margins = scores[:, 1] - scores[:, 0]
    _, first, whose = np.unique(public.patients, return_index=True, return_inverse=True)
    of_patients = np.bincount(whose, weights=margins) / np.bincount(whose)
    return {IMAGE: _numbers(public.labels, margins), PATIENT: _numbers(public.labels[first], of_patients)}


def _numbers(truth: NDArray[np.int64], margins: NDArray[np.float64]) -> dict[str, float]:
    area = auroc(truth == 1, margins)
    if area is None:
        raise InvalidSetting("one class has no public image; take more images")
    recalls = _recalls(truth, (margins > 0).astype(np.int64))
    return {AUROC: 100 * area, BALANCED: float(np.mean(recalls)), **dict(zip(RECALLS, recalls, strict=True))}


def _recalls(truth: NDArray[np.int64], labels: NDArray[np.int64]) -> list[float]:
    return [100 * float((labels[truth == one] == one).mean()) for one in range(len(CLASSES))]


def with_a_preference(public: Images, probabilities: NDArray[np.float64], seed: int) -> dict[tuple[str, str], float]:
    """Return each class's recall per image where `RECALL` of it is wanted.

    Once by the stated probabilities, as `--prefer` alone has it, and once by `LIKE` labeled public images of the class,
    which are not scored (`--like`).

    """
    found: dict[tuple[str, str], float] = {}
    everything = np.ones(len(public.labels), dtype=np.bool_)
    for place, name in enumerate(CLASSES):
        wanted, own = Preference(RECALL, name), probabilities[:, place]
        like = np.random.default_rng(seed).choice(np.flatnonzero(public.labels == place), LIKE, replace=False)
        unseen = everything.copy()
        unseen[like] = False
        ways = (
            (f"{name}:recall=0.9", wanted.stated_threshold(own, own), everything),
            (f"{name}:recall=0.9, {LIKE} labeled images", wanted.threshold(own[like]), unseen),
        )
        for method, threshold, scored in ways:
            labels = prefer(probabilities, place, threshold)[scored]
            recalls = _recalls(public.labels[scored], labels)
            found |= {(method, metric): value for metric, value in zip(RECALLS, recalls, strict=True)}
    return found


def without_privacy(division: Division) -> NDArray[np.float64]:
    """Return log-odds of a logistic regression on all images of all sites; no bound on anything."""
    from sklearn.linear_model import LogisticRegressionCV
    from sklearn.model_selection import GroupKFold
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    rows = np.concatenate([one.inputs for one in division.sites])
    labels = np.concatenate([one.labels for one in division.sites])
    folds = list(GroupKFold(3).split(rows, groups=np.concatenate([one.patients for one in division.sites])))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = make_pipeline(
            StandardScaler(),
            LogisticRegressionCV(Cs=[1e-4, 1e-3, 1e-2], cv=folds, class_weight="balanced", scoring="roc_auc"),
        ).fit(rows, labels)
        odds = model.decision_function(division.public.inputs)
    return np.stack([np.zeros_like(odds), odds], axis=1).astype(np.float64)


def evaluated(division: Division, folder: Path, *, clusters: int) -> list[BenchRow]:
    """Return what a private evaluation of a real job's student says, and what is so; see the module."""
    shards = [_shard(folder / f"site-{number}.shard", site, number) for number, site in enumerate(division.sites)]
    public = _shard(folder / "public.shard", division.public, None)
    terms = {"delta": DELTA, "colluding_agents": COLLUDING, "records_per_person": 1}
    of_all = {"name": "medical", "classes": CLASSES, "agents": len(shards), "max_queries": clusters, "sigma_votes": 1.0}
    asked = parse_task({**of_all, **terms, "method": "reverse-knn"})
    terms |= {"sigma_votes": solve_sigma(asked, ASKED, level="person")}
    file = TaskFile.model_validate(
        {"task": terms | {"name": "X-rays"}, "queries": {"strategy": "clustered", "count": clusters}}
    )
    run_job(LabelingJob(file, tuple(shards), public, folder / "job", seed=1))
    student = folder / "job" / "student.safetensors"
    found = run_job(evaluation_job(student, shards, folder / "evaluation", task=terms, evaluation={}, seed=2))
    model, right, truth = read_model(student), [], []
    for shard in map(Shard.open, shards):
        for features, labels in select_records(shard, records_per_person=1).blocks(4096):
            right.append(model.predict_proba(features).argmax(axis=1) == labels)
            truth.append(labels)
    is_right, of_class = np.concatenate(right), np.concatenate(truth)
    price = found["privacy"]["guarantees"]["person"]["epsilon"]
    rows: list[BenchRow] = []
    for place, (metric, stated) in enumerate(zip(RECALLS, found["recall"], strict=True)):
        so = 100 * float(is_right[of_class == place].mean())
        cells = {
            "stated": "drowned by noise" if stated["drowned"] else f"{100 * stated['value']:.1f}",
            "of these patients": _span(stated["noise"]),
            "of patients like them": _span(stated["sampling"]),
            "really, which nobody sees": f"{so:.1f}",
        }
        rows += [
            BenchRow(
                "private evaluation", method, metric,
                value=so if stated["drowned"] else 100 * stated["value"],
                epsilon=price, delta=DELTA, level="person", settings={"printed": cell, "clusters": clusters},
            )
            for method, cell in cells.items()
        ]  # fmt: skip
    return rows


def _span(bounds: Sequence[float]) -> str:
    return f"{100 * bounds[0]:.1f} to {100 * bounds[1]:.1f}"


def _shard(path: Path, images: Images, site: int | None) -> Path:
    """Write the shard of a site, which knows whose images it holds, or of the requester."""
    key = SiteKey(seeded_source(f"site key medical {site}".encode()).bytes(KEY_BYTES))
    names = [f"{number}.png" for number in range(len(images.labels))]
    whose = [str(patient).encode() for patient in images.patients]
    private = site is not None
    with ShardWriter(
        path,
        classes=CLASSES,
        fingerprint=BACKBONE,
        dimension=images.inputs.shape[1],
        public=not private,
        backbone={"kind": "pixels"},
        site_key=key.name if private else None,
        random_bytes=seeded_source(f"medical ids {site}".encode()).bytes,
    ) as writer:
        writer.append(
            quantize(images.inputs),
            images.labels,
            names,
            persons=key.digests("person", whose) if private else None,
            image_digests=key.digests("image", [f"{site} {name}".encode() for name in names]) if private else None,
        )
        writer.finish()
    return path


def divide(images: Images, seed: int) -> Division:
    """Deal the patients of a draw: see the module."""
    random = np.random.default_rng([seed, 27])
    patients = random.permutation(np.unique(images.patients))
    asked, private = np.split(patients, [int(PUBLIC_SHARE * len(patients))])
    cuts = np.rint(np.cumsum(SHARES)[:-1] * len(private)).astype(int)
    sites = tuple(_of(images, whose) for whose in np.split(private, cuts))
    public = _of(images, asked)
    return Division(
        World(
            name=f"medical {seed}",
            holdings=[_one_each(site, random) for site in sites],
            public=public.inputs,
            test=Split(public.inputs[:0], public.labels[:0]),
            num_classes=len(CLASSES),
            colluding_agents=COLLUDING,
            delta=DELTA,
        ),
        public,
        sites,
    )


def _of(images: Images, patients: NDArray[np.int64]) -> Images:
    return images[np.flatnonzero(np.isin(images.patients, patients))]


def _one_each(site: Images, random: np.random.Generator) -> Split:
    order = random.permutation(len(site.labels))
    one_each = site[order[np.unique(site.patients[order], return_index=True)[1]]]
    return Split(one_each.inputs, one_each.labels)


def two_classes(photos: Split, seed: int, *, count: int) -> Images:
    """Return photos as if they were X-rays: three classes of ten against the others, each photo its own patient."""
    random = np.random.default_rng([seed, 10])
    rows = random.permutation(len(photos))[:count]
    rare = random.permutation(int(photos.labels.max()) + 1)[:3]
    labels = (~np.isin(photos.labels[rows], rare)).astype(np.int64)
    return Images(photos.inputs[rows], labels, np.arange(len(rows)))


def patient_of(name: str) -> str:
    """Return the patient of a file: personN, or its own name."""
    found = re.match(r"person\d+", Path(name).name)
    return found[0] if found else name


def xrays(data: Path | None, progress: ProgressCallback) -> Images:
    """Return the X-rays as features of the packaged backbone, embedded once and kept in the user's cache folder."""
    folder = data_folder(data) / "chest-xray"
    if not folder.is_dir():
        raise InvalidSetting(f"{folder.parent} holds no chest-xray; name the folder with --data or LABELER_DATA")
    from feature_store.backbones import load_backbone

    backbone = load_backbone(BACKBONE)
    out = cache_folder() / backbone.fingerprint[:16] / "chest-xray"
    shard = embedded(folder, backbone, out, classes=CLASSES, seed="chest-xray", progress=progress)
    found = split_of(shard)
    _, patients = np.unique([patient_of(name) for name in sorted(shard.sources)], return_inverse=True)
    return Images(found.inputs, found.labels, patients.astype(np.int64))


def office_photos(data: Path | None, progress: ProgressCallback) -> Split:
    """Return the photos on which settings are chosen, as features of the same backbone."""
    found = [split_of(shard) for shard in embed_domains(data_folder(data), progress, BACKBONE).values()]
    return Split(np.concatenate([one.inputs for one in found]), np.concatenate([one.labels for one in found]))
