"""Distributed DP-Helmet (Kirschte et al. 2022): blind averaging on CIFAR-10; figures 3, 4, 5 and 8, table 2.

1,000 users hold 50 training images each, as features of a frozen MobileNetV2 (the paper: a SimCLR network of 795
million weights). Everybody trains alone and sends one message; half of the users may pool their noise. Two comparisons
are at the same epsilon. One trains the same learner on all 50,000 records at one trusted place. The other is the
strongly non-iid division, in which every user knows a single class. Rows at "instance" level protect one record, those
at "agent" level a whole user (corollary 10; the user's model becomes zero).

**Features.** 2,000 test images, without labels, are public: their mean and principal axes map features to `AXES`
numbers of norm 1. The other 8,000 are what accuracy is measured on.

**Choosing settings.** AXES, WHITENING and all terms were chosen with seed 7, on 40,000 training images of 800 users,
scored on the other 10,000. No test label was used. The rows are for other seeds, which draw another division, other
public images and other noise. As in the paper, this choice is not paid for.

**Terms.** lambda is so large that every margin stays below 1 - h (|w x| <= c^2 / lambda < 0.9). There a hinge is a
line, and the svm of a user is the mean of its signed records. So the average of all users' is the svm of all records,
however they are divided: the condition of the paper's theorem 14, as a number. "a bound is kept": every user has at
most RECORDS, as a public fact. So no other record replaces one that leaves, and a record moves a model half as far
(`labeler.descent`): the same learner, the same models, half the noise. The softmax is cut to a short norm, which
shortens its gradients (fact 4 of `labeler.methods.blind_average`). "large models" has the lambda that serves one
trusted place best at an epsilon of 1 and above.

**Blind averaging.** Everybody trains alone; after one private sum there is one model:

    records --train_linear--> weights --VectorSum: grid, noise share, secret shares--> talliers: sum, opened / users.

One message per user, no second round. The sum is a `labeler.noise.VectorSum` with the norm and the sensitivity of
`LinearTerms`. Dividing by the number of contributors, which is public, divides sensitivity and noise alike (lemma 6).
With an honest fraction t and d dropouts that the plan allows for, h = floor(t U) - d shares of noise are certainly
unknown. So a share has variance sigma^2 / h: what nobody can subtract is sigma in the sum, even when everybody else
pools what they know and the d are honest. (The paper sizes shares by t U alone.) Only the sum is noised enough: one
user's share of noise alone protects too little, so weights leave a user as secret shares.

**Groups** (corollary 9, figure 5): epsilon is that of any `group` records of all users together, from the exact event
(`IntegerSum.of_group`).

**Many more users** (figure 5; 67 in table 2 is how many times as large a data set the paper thinks of): as in the
paper, models are those of 1,000 users, and their mean gets the noise of a mean over `times` as many users.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks import BenchRow, mean_row
from benchmarks.data import DataSet, cifar10_features, cifar10_few
from benchmarks.learning.federated import ServerStep, dp_fed_sgd, plan_fed_sgd
from benchmarks.learning.linear_users import linear_scores, train_users
from benchmarks.papers import Cell
from benchmarks.papers.federated import Federation, NoisySteps, accuracy_of, blank_head, priced, sources_of
from benchmarks.sums import least_noise, private_sum
from feature_store.students.answers import Projection, unit_rows
from labeler.accounting.gaussian import mu_of_epsilon
from labeler.accounting.integer import epsilon_bound
from labeler.errors import InvalidSetting
from labeler.methods.blind_average import Learner, LinearTerms
from labeler.noise import VectorSum
from labeler.randomness import ByteSource, seeded_source
from labeler.task import Level
from workers.progress import ProgressCallback

USERS, RECORDS, HONEST = 1_000, 50, 0.5
FEW_USERS, DP_FL_USERS = 100, (100, 300, 1_000)
DELTA = 1e-5
EPSILONS = (0.1, 0.36, 0.59, 1.0, 2.0)
NON_IID_EPSILON = 1.172
MANY = (0.001, 0.01, 0.1)
"""Epsilons of 200,000 users."""
SEEDS = (1, 2, 3)
PUBLIC, AXES, WHITENING = 2_000, 128, 0.7

TERMS: Final[dict[Learner, LinearTerms]] = {
    "softmax": LinearTerms(
        "softmax", 10, regularisation=1, clip_norm=1, radius=0.15, iterations=30, min_records=RECORDS
    ),
    "svm": LinearTerms("svm", 10, regularisation=1.2, clip_norm=1, radius=1, iterations=60, min_records=RECORDS),
    "logistic": LinearTerms(
        "logistic", 10, regularisation=1.2, clip_norm=1, radius=0.1, iterations=40, min_records=RECORDS
    ),
}
LARGE_MODELS = replace(TERMS["softmax"], regularisation=0.005, radius=100.0, iterations=100)
KEPT = "a bound is kept"
"""Marks rows whose users, or whose one place, keep a public bound on their records, here exactly their number."""

USER_LEVEL: Final[dict[Learner, LinearTerms]] = {
    learner: replace(terms, radius=0.05) for learner, terms in TERMS.items()
}
"""Short radii, which nearly every user's model reaches: its norm is what a user pays for."""

PAPER: Final[dict[tuple[Learner, float], str]] = {
    ("softmax", 0.36): "86 % at 0.36 (paper, as printed; its SimCLR features)",
    ("svm", NON_IID_EPSILON): "85 % with one class per user, 87 % without, at 1.172 (paper, as printed)",
    ("softmax", NON_IID_EPSILON): "42 % with one class per user, 91 % without, at 1.172 (paper, as printed)",
}
PAPER_CENTRAL: Final[dict[tuple[Learner, float], str]] = {
    ("softmax", 0.59): "90.2 % at 0.59; DP-SGD 93.6 % (paper, as printed)",
    ("svm", 0.59): "87.4 % at 0.59; DP-SGD 93.6 % (paper, as printed)",
}


@dataclass(frozen=True)
class Setting:
    """The division of the records, and what is protected.

    Attributes:
        method: for the table.
        terms: how everybody trains.
        users: 1 is one trusted place.
        records: how many each holds.
        honest_fraction: t.
        dropouts: how many users are planned to drop out, and do.
        one_class: every user holds records of a single class.
        level: whose epsilon it is.
        group: g, if it is the epsilon of any g records.
        times: as many users as there are, by this factor; their noise is drawn for all together.
    """

    method: str
    terms: LinearTerms
    users: int = USERS
    records: int = RECORDS
    honest_fraction: float = HONEST
    dropouts: int = 0
    one_class: bool = False
    level: Level = "instance"
    group: int = 1
    times: int = 1

    @property
    def case(self) -> str:
        return f"CIFAR-10 features, {self.users * self.times * self.records:,} records"


@dataclass(frozen=True, eq=False)
class World:
    """The records that are dealt, in random order, and the images that are not public, all after the public map."""

    train: NDArray[np.float64]
    train_labels: NDArray[np.int64]
    test: NDArray[np.float64]
    test_labels: NDArray[np.int64]

    def deal(self, setting: Setting) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return users' records, shapes (users, records, AXES) and (users, records)."""
        rows = np.arange(len(self.train))
        if setting.one_class:
            rows = np.argsort(self.train_labels, kind="stable")
        shape = (setting.users, setting.records)
        return self.train[rows].reshape(*shape, -1), self.train_labels[rows].reshape(shape)

    def accuracy(self, weights: NDArray[np.float64], terms: LinearTerms) -> float:
        """Return the percentage of the non-public test images labeled right."""
        found = linear_scores(self.test, weights, terms=terms).argmax(axis=1)
        return 100 * float((found == self.test_labels).mean())


GROUPS: Final[list[tuple[Setting, Sequence[float]]]] = [
    *(
        (Setting(f"DP-Helmet softmax, any {group} records", TERMS["softmax"], group=group), EPSILONS)
        for group in (2, 10, RECORDS)
    ),
    *(
        (Setting(f"DP-Helmet softmax, any {group}, 200,000 users", TERMS["softmax"], group=group, times=200), MANY)
        for group in (1, 2, 10, RECORDS)
    ),
    *(
        (Setting(f"DP-Helmet {learner}, {how}67,000 users", terms, one_class=bool(how), times=67), (NON_IID_EPSILON,))
        for learner, terms in TERMS.items()
        for how in ("", "one class per user, ")
    ),
]
"""Figure 5, and 67 times the users of table 2."""


def cells(root: Path, *, full: bool) -> list[Cell]:
    """Return every cell; for a first look every learner at two epsilons, one seed and a tenth of the users."""
    seeds = SEEDS if full else SEEDS[:1]
    epsilons = EPSILONS if full else (0.59, 2.0)
    settings: list[tuple[Setting, Sequence[float]]] = []
    for learner, terms in TERMS.items():
        name = "SVM" if learner == "svm" else learner
        for suffix, own in (("", terms), (f", {KEPT}", replace(terms, max_records=RECORDS))):
            sorted_out = epsilons if suffix else (*epsilons, NON_IID_EPSILON)
            settings += [
                (Setting(f"DP-Helmet {name}{suffix}", own), epsilons),
                (_central(f"{name}, one trusted place{suffix}", own), epsilons),
                (Setting(f"DP-Helmet {name}, one class per user{suffix}", own, one_class=True), sorted_out),
            ]
            if full:
                settings += [
                    (Setting(f"DP-Helmet {name}, {users} users{suffix}", own, users=users), epsilons)
                    for users in (100, 300)
                ]
        if full:
            twice = replace(terms, max_records=2 * RECORDS)
            settings += [(Setting(f"DP-Helmet {name}, {KEPT} with twice the room", twice), epsilons[:1])]
            settings += [
                (Setting(f"DP-Helmet {name}, t = {t:g}", terms, honest_fraction=t), (0.36,)) for t in (0.25, 1.0)
            ]
            settings += [
                (Setting(f"DP-Helmet {name}, 100 dropouts", terms, dropouts=100), (0.36,)),
                (Setting(f"DP-Helmet {name}, a whole user", USER_LEVEL[learner], level="agent"), epsilons[1:]),
            ]
    if full:
        settings += GROUPS
        settings += [
            (Setting("DP-Helmet softmax, large models", LARGE_MODELS), epsilons),
            (_central("softmax, one trusted place, large models", LARGE_MODELS), epsilons),
        ]
    else:
        settings = [(_smaller(setting), wanted) for setting, wanted in settings]
    found = [_cell(root, setting, wanted, seeds) for setting, wanted in settings]
    if not full:
        return found
    return [*found, sgd_cell(root, EPSILONS, SEEDS), *(sgd_cell(root, (0.59,), SEEDS, users) for users in DP_FL_USERS)]


def _central(method: str, terms: LinearTerms) -> Setting:
    records = USERS * RECORDS
    return Setting(method, _all_in_one(terms, records), users=1, records=records, honest_fraction=1.0)


def _all_in_one(terms: LinearTerms, records: int) -> LinearTerms:
    return replace(terms, min_records=records, max_records=None if terms.max_records is None else records)


def _smaller(setting: Setting) -> Setting:
    if setting.users > 1:
        return replace(setting, users=FEW_USERS)
    records = FEW_USERS * RECORDS
    return replace(setting, records=records, terms=_all_in_one(setting.terms, records))


def _cell(root: Path, setting: Setting, epsilons: Sequence[float], seeds: Sequence[int]) -> Cell:
    def run(progress: ProgressCallback) -> list[BenchRow]:
        plans = [
            blind_sum_for(
                setting.terms,
                dimension=AXES,
                users=setting.users * setting.times,
                epsilon=epsilon,
                delta=DELTA,
                level=setting.level,
                group=setting.group,
                honest_fraction=setting.honest_fraction,
                max_dropouts=setting.dropouts,
            )
            for epsilon in epsilons
        ]
        exact: list[float] = []
        noisy: list[list[float]] = [[] for _ in plans]
        for seed in seeds:
            world = cifar10_world(root, seed, setting.users * setting.records)
            features, labels = world.deal(setting)
            models = train_users(features, labels, terms=setting.terms, progress=progress)
            exact.append(world.accuracy(models.mean(axis=0), setting.terms))
            present = models[: setting.users - setting.dropouts]
            for plan, accuracies in zip(plans, noisy, strict=True):
                context = f"dp-helmet {setting.method} {plan.sigma!r} {seed}"
                if setting.times == 1:
                    sources = (seeded_source(f"{context} {user}".encode()) for user in range(len(present)))
                    released = blind_average(plan, present, sources=sources)
                else:
                    deviation = plan.sigma * math.sqrt(plan.agents / plan.noise_contributors) / plan.agents
                    noise = np.random.default_rng([seed, setting.times]).standard_normal(present.shape[1:])
                    released = present.mean(axis=0) + deviation * noise
                accuracies.append(world.accuracy(released, setting.terms))
        rows = [_row(setting, None, None, exact, seeds)]
        return rows + [_row(setting, e, p, a, seeds) for e, p, a in zip(epsilons, plans, noisy, strict=True)]

    return Cell(f"{setting!r} epsilons {tuple(epsilons)} seeds {tuple(seeds)}", run)


def sgd_cell(root: Path, epsilons: Sequence[float], seeds: Sequence[int], users: int | None = None) -> Cell:
    """Return DP-SGD of a linear model at one trusted place, the rival of figure 8; a record comes or goes.

    With `users` it is DP-FL, the rival of figures 3 and 4: the same steps, in which each user adds the
    noise that its own records need. Their noise adds up, and the price is that of one user's.
    """
    steps, records = NoisySteps(0.1, 40, 0.5, 10.0, 0.5, 0.3), (users or USERS) * RECORDS
    method = "DP-SGD, one trusted place" if users is None else f"DP-FL, {users:,} users, each with its own noise"

    def run(progress: ProgressCallback) -> list[BenchRow]:
        rows = []
        for epsilon in epsilons:
            accuracies = []
            for seed in seeds:
                world = cifar10_world(root, seed, records)
                arrays = (world.train.astype(np.float32), world.train_labels, world.test.astype(np.float32))
                inputs, labels, test = map(torch.from_numpy, arrays)
                data = Federation(inputs[None], labels[None], [records], test, torch.from_numpy(world.test_labels))
                module, start = blank_head(data)
                plan = plan_fed_sgd(
                    epsilon=epsilon, delta=DELTA, dimension=(AXES + 1) * 10, agents=1, most_records=records,
                    clip_norm=steps.clip_norm, probability=steps.probability, rounds=steps.rounds,
                )  # fmt: skip
                noise = replace(plan, spec=replace(plan.spec, sigma=plan.spec.sigma * math.sqrt(users or 1)))
                model = dp_fed_sgd(
                    start, data.inputs, data.labels, sizes=data.sizes, plan=noise, clip_norm=steps.clip_norm,
                    expected_batch=steps.probability * records,
                    server=ServerStep(steps.learning_rate, steps.momentum, steps.averaged),
                    source_of=sources_of(f"{method} {seed} {epsilon}"), progress=progress,
                )  # fmt: skip
                accuracies.append(accuracy_of(module, model, data))
            reference = "93.6 % at 0.59 (paper, as printed)" if epsilon == 0.59 and users is None else None
            row = mean_row(
                f"CIFAR-10 features, {records:,} records",
                method,
                "accuracy of the released model, %",
                accuracies,
                reference=reference,
                settings={"seeds": list(seeds), "axes": AXES, "whitening": WHITENING} | asdict(steps),
            )
            rows.append(priced(row, plan, DELTA))
        return rows

    return Cell(f"{method} {steps} epsilons {tuple(epsilons)} seeds {tuple(seeds)}", run)


def _row(
    setting: Setting, epsilon: float | None, plan: VectorSum | None, accuracies: list[float], seeds: Sequence[int]
) -> BenchRow:
    terms = setting.terms
    printed = PAPER_CENTRAL if setting.users == 1 else PAPER
    wanted: dict[str, Any] = {"seeds": list(seeds), "terms": repr(terms), "axes": AXES, "whitening": WHITENING}
    wanted |= {"honest_fraction": setting.honest_fraction, "dropouts": setting.dropouts, "users": setting.users}
    wanted |= {"group": setting.group, "times": setting.times} if setting.group * setting.times > 1 else {}
    if plan is not None:
        wanted |= {
            "sigma": plan.sigma,
            "seeded_noise": True,
            "as_in_paper_epsilon": setting.group * epsilon_as_in_paper(terms, plan.sigma, setting.level),
            "sensitivity": terms.sensitivity,
            "sensitivity_as_in_paper": sensitivity_as_in_paper(terms),
        }
    same_users = setting.dropouts == 0 and setting.users in (1, USERS) and setting.level == "instance"
    same_users &= setting.group == setting.times == 1
    return mean_row(
        setting.case,
        setting.method if plan is not None else f"{setting.method}, without noise",
        "accuracy of the released model, %",
        accuracies,
        epsilon=None if plan is None else epsilon_bound(plan.event(setting.level).of_group(setting.group), DELTA),
        delta=None if plan is None else DELTA,
        level=None if plan is None else setting.level,
        reference=printed.get((terms.learner, epsilon)) if epsilon is not None and same_users else None,
        settings=wanted,
    )


def sensitivity_as_in_paper(terms: LinearTerms) -> float:
    """Return what Kirschte et al. prove of a whole model; the charge is `LinearTerms.sensitivity`, which is less.

    Softmax: 2 (lambda R + sqrt(2) c) / (n lambda) (theorem 11). Svm: 2 (c + lambda R) / (n lambda) for one class (lemma
    2; Wu et al. 2017, lemma 8), and sqrt(K) times that for K classes as one vector. Both count the regularizer into
    what a record can change, while at one and the same w the regularizers of two records cancel.
    """
    stretch, classes = (math.sqrt(2), 1) if terms.learner == "softmax" else (1.0, terms.num_classes)
    moved = 2 * (stretch * terms.clip_norm + terms.radius * terms.regularisation)
    return math.sqrt(classes) * moved / (terms.min_records * terms.regularisation)


def epsilon_as_in_paper(terms: LinearTerms, sigma: float, level: Level) -> float:
    """Return theorem 8 and corollary 12, with the paper's s: sqrt(2 ln(1.25 / delta)) s / sigma; svm: K times that at
    delta/K.

    A whole user: s = 2R (corollary 10). Shown only next to the exact value: it is loose, and not valid above 1.
    """
    models = 1 if terms.learner == "softmax" else terms.num_classes
    of_one = sensitivity_as_in_paper(terms) / math.sqrt(models) if level == "instance" else 2 * terms.radius
    return models * math.sqrt(2 * math.log(1.25 * models / DELTA)) * of_one / sigma


@lru_cache(maxsize=1)
def _features(root: Path, *, few: bool) -> DataSet:
    return cifar10_few(root, train=0.6) if few else cifar10_features(root)


@lru_cache(maxsize=len(SEEDS))
def cifar10_world(root: Path, seed: int, records: int) -> World:
    """Return `records` training images and the test images of a seed, after the map of its public images."""
    data, rng = _features(root, few=records <= FEW_USERS * RECORDS), np.random.default_rng(seed)
    order, shown = rng.permutation(len(data.train))[:records], rng.permutation(len(data.test))
    along = public_map(data.test.inputs[shown[:PUBLIC]])
    train, test = along(data.train.inputs[order]), along(data.test.inputs[shown[PUBLIC:]])
    return World(train, data.train.labels[order], test, data.test.labels[shown[PUBLIC:]])


def public_map(public: NDArray[np.float32]) -> Projection:
    """Return the first AXES principal axes of the public images, each divided by its standard deviation to the
    WHITENING.
    """
    rows = unit_rows(public)
    centred = rows - rows.mean(axis=0)
    variances, axes = np.linalg.eigh(centred.T @ centred / len(rows))
    kept = slice(None, -AXES - 1, -1)
    return Projection(rows.mean(axis=0), axes[:, kept] * variances[kept] ** (-WHITENING / 2))


def blind_sum(
    terms: LinearTerms,
    *,
    dimension: int,
    users: int,
    sigma: float,
    honest_fraction: float = 1.0,
    max_dropouts: int = 0,
) -> VectorSum:
    """Return the private sum of U users' weights.

    Args:
        terms: how each of them trains.
        dimension: features of a record, without the constant.
        users: U.
        sigma: noise on one coordinate of the **sum** that nobody can subtract, in the unit of weights.
        honest_fraction: t in (0, 1]; floor(t U) users keep their noise to themselves.
        max_dropouts: how many of those may fail to contribute.
    """
    if not 0 < honest_fraction <= 1:
        raise InvalidSetting(f"the honest fraction lies above 0 and at most at 1, found {honest_fraction!r}")
    return VectorSum(
        dimension=(dimension + 1) * terms.num_classes,
        largest_norm=terms.largest_norm,
        sensitivity=terms.sensitivity,
        sigma=sigma,
        agents=users,
        # A product like 0.3 * 10 must not lose or gain an honest user by its last bit.
        colluding_agents=users - math.floor(honest_fraction * users + 1e-9),
        max_dropouts=max_dropouts,
    )


def blind_sum_for(
    terms: LinearTerms, *, epsilon: float, delta: float, level: Level = "instance", group: int = 1, **of_sum: Any
) -> VectorSum:
    """Return the sum with the least noise, within a hundredth of a percent, whose certified price is at most epsilon,
    for any `group` records together.

    It starts at what the continuous mechanism needs (Balle and Wang 2018). `of_sum` are the other arguments of
    `blind_sum`.
    """
    norm = group * (terms.sensitivity if level == "instance" else terms.largest_norm)

    def cost(sigma: float) -> float:
        return epsilon_bound(blind_sum(terms, sigma=sigma, **of_sum).event(level).of_group(group), delta)

    sigma = least_noise(cost, epsilon, start=norm / mu_of_epsilon(epsilon, delta))
    return blind_sum(terms, sigma=sigma, **of_sum)


def blind_average(
    spec: VectorSum,
    models: Sequence[NDArray[np.float64]] | NDArray[np.float64],
    *,
    sources: Iterable[ByteSource],
) -> NDArray[np.float64]:
    """Return the noisy mean of the models of those who contribute, by the steps that run in the service.

    Args:
        spec: the sum, from `blind_sum`.
        models: per contributing user, shape (dimension + 1, num_classes); a dropout is left out, with its noise.
        sources: one secret source per contributing user.

    Returns:
        float64, shape (dimension + 1, num_classes): public.
    """
    if not len(models):
        raise InvalidSetting("nobody contributes a model")
    total = private_sum(spec, models, sources=sources)
    return total.reshape(models[0].shape) / len(models)
