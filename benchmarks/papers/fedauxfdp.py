"""FedAUXfdp (Hoech, Rischke, Mueller, Samek 2022): one round of distillation from private heads, tables 2 and 3.

20 clients share 40,000 training images of CIFAR-10, divided by a Dirichlet distribution; the other 10,000 are the
public set, without labels: 2,000 negatives and 8,000 images to distill on. (The paper's public set is STL-10, its
backbone is pretrained on that set, and its heads see features that are not centered.) Everybody spends the same epsilon
at instance level:

* FedAVG+P: the average of the clients' private heads, applied to test images.
* FedD+P: the mean of their soft labels, distilled; as with FedAVG+P all is spent on the head. It is method
  `aux-distill` with `training.score_share = 0`.
* FedAUXfdp: soft labels weighted with private certainty, distilled.

**Two ways to look at features.** "as in the paper": heads see the backbone's features, scaled to one norm, under the
paper's lambda of 0.01. "centred": they see the features less the mean of the public negatives, along the first `AXES`
principal axes of these, under a lambda of 0.1. Certainty heads, which are fitted against the negatives anyway, are
centered in both.

**A bound is kept.** Every client holds at most its 2,000 records, as a public fact. So no other record replaces one
that leaves: half the noise (`labeler.methods.aux_distill`). Clients hold exactly as many, so the heads are the same,
and only the noise differs.

**Expected results.** As in the paper, clients of one class ruin an average of heads and a mean of answers, and
certainty saves them: the order of table 2. Centered, no method is ruined and all end within a few points of each other.

**The lambda sweep** (figure 2) trains heads on features as in the paper under each of `LAMBDAS`. A larger lambda needs
less noise, and fits less closely. The paper's figure is of ShuffleNet, at 0.01 for the classes' heads alone.

Not `full`, the 10,000 test images of CIFAR-10 are everything: fewer images of each kind, and fewer of a client.

**Choosing settings.** AXES, lambdas, the share of the budget for certainty and the two sharpnesses were chosen by test
accuracy on seeds 100 to 102. The rows are for other seeds, which draw another public set, partition and noise.

**The round** goes from many clients' heads to one server model: certainty-weighted soft labels, summed, divided,
learned.

    label(x) = sum_i f_i(x) g_i(x) / sum_i f_i(x)                          (Hoech et al. 2022, equation 1).

Client i answers a public image x with S f_i(x) g_i(x) in whole numbers, f its certainty in [0, 1] and g its class
probabilities. Only their sum is opened (`labeler.sharing`). No noise
is added here: the heads were released under local noise before (`labeler.methods.aux_distill`), and everything on this
page is post-processing of them. The sum of a row is the sum of certainties, as every g sums to one: it need not be
sent.

**Logistic regression on public data** is what a server fits to labels that agents have released. It minimizes the
mean loss and a penalty.

    J(W) = (1/N) sum_i loss(W x_i, t_i) + (lambda/2) |W|^2

with the softmax loss of one row of W per class. L-BFGS in double precision starts at zero and runs until the gradient
is as small as asked, or until it gets no further. That is no error: the result is post-processing. It must never see
private records: how far it comes depends on them, so no sensitivity is proved for it. Agents train by
`workers.learning.descent`.

N is len(features) here; scikit-learn's C is 1 / (lambda N).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from benchmarks import BenchRow, in_turn, mean_row
from benchmarks.data import DataSet, cifar10_features, cifar10_few
from benchmarks.papers import Cell
from benchmarks.papers.partitions import dirichlet_partition
from benchmarks.sums import least_noise
from labeler.accounting.gaussian import mu_of_epsilon
from labeler.methods.aux_distill import LocalHeadTerms, divided_noise
from labeler.randomness import seeded_source
from workers.learning.learner import HEAD_SHARPNESS, SCORE_SHARPNESS
from workers.learning.private_heads import FittedHeads, PrivateHeads, PublicMap, fit_heads, fit_public_map, plain_map
from workers.progress import ProgressCallback

CLIENTS = 20
PUBLIC = 10_000
NEGATIVES = 2_000
ALPHAS = (0.01, 0.04, 0.16, 10.24)
EPSILON, DELTA = 0.6, 2e-5
EPSILONS = (0.11, 0.2, 0.6, 1.1)
"""Of both heads together, as in table 3: 0.1 for certainty, and 0.01, 0.1, 0.5 or 1 for the classes."""
SEEDS = (1, 2, 3)
LAMBDAS = (0.01, 0.1, 1.0)
LAMBDA_EPSILONS = (0.01, 0.6)

AXES = 48
SCORES_SHARE = 0.2

METHODS = FEDAVG, FEDD, FEDAUX = "FedAVG+P", "FedD+P", "FedAUXfdp"
PAPER: Final[dict[str, tuple[float, ...]]] = {
    FEDAVG: (47.2, 54.2, 65.6, 72.0),
    FEDD: (43.7, 52.2, 67.0, 70.8),
    FEDAUX: (72.8, 72.0, 70.8, 69.4),
}
"""Table 2, MobileNetV2, by ALPHAS."""
PAPER_WITHOUT = (73.0, 73.3, 73.2, 73.0)
"""Table 3: certainty heads private at 0.1, heads not."""


@dataclass(frozen=True)
class View:
    """The features of an image that heads see.

    Attributes:
        name: for the table.
        axes: principal axes of the negatives, after centering on them; None for features as they are.
        regularisation: lambda of the head.
        sharpness: of the head's soft labels.
    """

    name: str
    axes: int | None
    regularisation: float
    sharpness: float

    def map(self, negatives: NDArray[np.float32]) -> PublicMap:
        return plain_map(negatives.shape[1]) if self.axes is None else fit_public_map(negatives, dimensions=self.axes)


KEPT = "a bound is kept"
AS_IN_PAPER = View("features as in the paper", None, 0.01, 1.0)
CENTRED = View("features centred", AXES, 0.1, HEAD_SHARPNESS)


@dataclass(frozen=True)
class Wanted:
    """A row: a method under epsilon (None: without noise), and whether clients keep a public bound on their records."""

    method: str
    epsilon: float | None
    is_kept: bool


@dataclass(frozen=True, eq=False)
class World:
    """One division of the data and every client's fitted heads, before noise."""

    seed: int
    view: View
    terms: LocalHeadTerms
    public: NDArray[np.float32]
    public_labels: NDArray[np.int64]
    fitted: Sequence[FittedHeads]
    data: DataSet

    @cached_property
    def rows(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the public images as heads and certainty heads see them."""
        return self.fitted[0].head_map(self.public), self.fitted[0].score_map(self.public)

    @cached_property
    def student_features(self) -> PublicMap:
        """Return the map of a server model: center and first axes of all public features."""
        return fit_public_map(self.public, dimensions=min(STUDENT_DIMENSIONS, *self.public.shape))


def cells(root: Path, *, full: bool) -> list[Cell]:
    """Return table 2, the curve over epsilon at alpha 0.01, and the lambda sweep.

    Not `full`: the test images alone, one seed, two alphas, one epsilon, one view.
    """
    read: list[DataSet] = []

    def data(progress: ProgressCallback) -> DataSet:
        # Read when the first cell asks; with finished cells kept, it often never does.
        if not read:
            read.append(
                cifar10_features(root, progress=progress) if full else cifar10_few(root, train=0.8, progress=progress)
            )
        return read[0]

    seeds = SEEDS if full else SEEDS[:1]

    def cell(alpha: float, *asked: tuple[View, Sequence[Wanted]]) -> Cell:
        return Cell(
            f"{asked} alpha {alpha} seeds {seeds}",
            lambda progress: _measure_all(data(progress), alpha, asked, seeds, progress),
        )

    alphas = ALPHAS if full else (ALPHAS[0], ALPHAS[-1])
    swept = [Wanted(FEDAUX, epsilon, is_kept=False) for epsilon in (None, *LAMBDA_EPSILONS)]
    lambdas = [replace(AS_IN_PAPER, name=f"lambda {one:g}", regularisation=one) for one in LAMBDAS]
    found = [Cell(f"table 1, seeds {seeds}", lambda progress: _table_1(data(progress), seeds))]
    for alpha in alphas:
        wanted = [Wanted(method, None, is_kept=False) for method in (METHODS if full else (FEDAUX,))] + [
            Wanted(method, EPSILON, is_kept) for is_kept in (False, True) for method in METHODS
        ]
        wanted += [Wanted(FEDAUX, one, is_kept=False) for one in EPSILONS if full and one != EPSILON]
        # The paper's features under its lambda are fitted once, for the table and for the sweep.
        same = ((AS_IN_PAPER, wanted),) if full else ()
        found += [cell(alpha, (CENTRED, wanted)), cell(alpha, *same, (lambdas[0], swept))]
        found += [cell(alpha, (view, swept)) for view in lambdas[1:]]
    return found


PAPER_SHARES: Final = {
    0.01: (94.5, 5.2, 0.3),
    0.04: (75.3, 16.6, 5.6),
    0.16: (56.8, 22.3, 10.1),
    10.24: (15.1, 13.6, 12.0),
}
"""Table 1: shares of a client's records in its three largest classes, %."""


def _table_1(data: DataSet, seeds: Sequence[int]) -> list[BenchRow]:
    """Return how unequal the clients are: the shares of a client's three largest classes, in percent."""
    labels, classes = data.train.labels, data.num_classes
    rows = []
    for alpha, printed in PAPER_SHARES.items():
        parts = [
            part for seed in seeds for part in dirichlet_partition(labels, clients=CLIENTS, alpha=alpha, seed=seed)
        ]
        counts = np.array([np.bincount(labels[part], minlength=classes) for part in parts])
        shares = 100 * np.sort(counts / counts.sum(axis=1, keepdims=True), axis=1)[:, ::-1].mean(axis=0)
        rows += [
            BenchRow(
                f"Dirichlet {alpha}",
                f"class {place + 1} of a client",
                "share of a client's records, %",
                float(shares[place]),
                reference=f"{wanted} % (paper, as printed)",
                settings={"seeds": list(seeds), "clients": CLIENTS},
            )
            for place, wanted in enumerate(printed)
        ]
    return rows


def _measure_all(
    data: DataSet,
    alpha: float,
    asked: Sequence[tuple[View, Sequence[Wanted]]],
    seeds: Sequence[int],
    progress: ProgressCallback,
) -> list[BenchRow]:
    """Measure rows of views that differ in their names alone."""
    found: dict[tuple[View, Wanted], list[Measured]] = {}
    for seed in in_turn(progress, f"{asked[0][0].name}, alpha {alpha}", seeds):
        world = make_world(data, asked[0][0], alpha, seed)
        for view, wanted in asked:
            for one in wanted:
                found.setdefault((view, one), []).append(measure(world, one.method, one.epsilon, is_kept=one.is_kept))
    size = {"public": len(world.public), "records": world.terms.min_records}
    return [_row(view, alpha, seeds, one, measured, size) for (view, one), measured in found.items()]


def make_world(data: DataSet, view: View, alpha: float, seed: int) -> World:
    """Divide the training images, and fit every client's heads once; noise comes later, at any price."""
    order = np.random.default_rng(seed).permutation(len(data.train))
    inputs, labels = data.train.inputs, data.train.labels
    # The paper's shares of 50,000 images.
    shown = len(order) * PUBLIC // 50_000
    num_negatives = shown * NEGATIVES // PUBLIC
    negatives, public, private = np.split(order, [num_negatives, shown])
    score_map = CENTRED.map(inputs[negatives])
    head_map = score_map if view is CENTRED else view.map(inputs[negatives])
    terms = LocalHeadTerms(
        num_classes=data.num_classes,
        head_dimension=head_map.dimension,
        score_dimension=score_map.dimension,
        min_records=len(private) // CLIENTS,
        num_negatives=num_negatives,
        sigma_head=1.0,
        sigma_scores=1.0,
        head_regularisation=view.regularisation,
        score_regularisation=CENTRED.regularisation,
    )
    fitted = [
        fit_heads(
            inputs[private[rows]],
            labels[private[rows]],
            inputs[negatives],
            terms=terms,
            head_map=head_map,
            score_map=score_map,
        )
        for rows in dirichlet_partition(labels[private], clients=CLIENTS, alpha=alpha, seed=seed)
    ]
    return World(seed, view, terms, inputs[public], labels[public], fitted, data)


@dataclass(frozen=True)
class Measured:
    """One method, once: accuracies in percent, the terms it paid for, seconds after the heads were fitted."""

    accuracy: float
    label_accuracy: float | None
    terms: LocalHeadTerms | None
    seconds: float


def measure(world: World, method: str, epsilon: float | None, *, is_kept: bool = False) -> Measured:
    """Release every client's heads under epsilon (None: without noise) and do what the method does with them."""
    started = time.perf_counter()
    share = SCORES_SHARE if method == FEDAUX else 0.0
    # Every client holds as many records as a mean divides by, so the fitted heads are those of a kept bound, too.
    asked = replace(world.terms, max_records=world.terms.min_records) if is_kept else world.terms
    terms = None if epsilon is None else solve_noise(asked, epsilon=epsilon, delta=DELTA, scores_share=share)
    heads = [_released(world, client, share > 0, terms) for client in range(len(world.fitted))]
    test, truth = world.data.test.inputs, world.data.test.labels
    label_accuracy = None
    if method == FEDAVG:
        mean_head = np.mean([client.head for client in heads], axis=0)
        predicted = (heads[0].head_map(test) @ mean_head.T).argmax(axis=1)
    else:
        votes = [
            grid_votes(
                client.votes_of_rows(*world.rows, head_sharpness=world.view.sharpness, score_sharpness=SCORE_SHARPNESS)
            )
            for client in heads
        ]
        labels = soft_labels(np.sum(votes, axis=0))
        label_accuracy = _percent(labels.argmax(axis=1), world.public_labels)
        seen = world.student_features
        weights = fit_multinomial(
            seen(world.public), labels, regularisation=STUDENT_REGULARISATION, tolerance=_STUDENT_TOLERANCE
        )
        predicted = (seen(test) @ weights.T).argmax(axis=1)
    return Measured(_percent(predicted, truth), label_accuracy, terms, time.perf_counter() - started)


def _released(world: World, client: int, with_scores: bool, terms: LocalHeadTerms | None) -> PrivateHeads:
    fitted = world.fitted[client]
    if not with_scores:
        fitted = replace(fitted, scores=None)
    if terms is None:
        return PrivateHeads(fitted.head, fitted.scores, fitted.head_map, fitted.score_map, is_seeded=True)
    return fitted.released(terms, source=seeded_source(f"fedauxfdp noise {world.seed} {client}".encode()))


def _percent(predicted: NDArray[np.int64], truth: NDArray[np.int64]) -> float:
    return 100 * float((predicted == truth).mean())


def _row(
    view: View,
    alpha: float,
    seeds: Sequence[int],
    wanted: Wanted,
    measured: Sequence[Measured],
    size: dict[str, int],
) -> BenchRow:
    method = wanted.method
    accuracies = [one.accuracy for one in measured]
    labels = [one.label_accuracy for one in measured if one.label_accuracy is not None]
    terms = measured[0].terms
    settings: dict[str, Any] = {
        "seeds": list(seeds),
        "clients": CLIENTS,
        "dirichlet_alpha": alpha,
        "backbone": "MobileNetV2 of ImageNet, frozen, 1,280 features",
        **size,
        "axes": view.axes,
        "head_lambda": view.regularisation,
        "neighbours": f"one record {'' if wanted.is_kept else 'replaced, '}added or removed",
        "noise": "seeded discrete Gaussian, local",
    }
    if method != FEDAVG:
        settings |= {"head_sharpness": view.sharpness, "label_accuracy": round(float(np.mean(labels)), 2)}
    if method == FEDAUX:
        settings |= {"score_lambda": CENTRED.regularisation, "score_axes": AXES, "score_sharpness": SCORE_SHARPNESS}
    if terms is not None:
        settings |= {
            "sigma_head": terms.sigma_head,
            "sigma_scores": terms.sigma_scores,
            "scores_share": SCORES_SHARE if terms.sigma_scores else 0.0,
            "scores_share_of_paper": round(paper_scores_share(), 4),
            "as_in_paper_epsilon": terms.as_in_paper_epsilon(DELTA),
        }
    return mean_row(
        f"CIFAR-10, 20 clients, Dirichlet {alpha}",
        f"{method}, {view.name}" + f", {KEPT}" * wanted.is_kept,
        "test accuracy, %",
        accuracies,
        epsilon=None if terms is None else terms.epsilon(DELTA),
        delta=None if terms is None else DELTA,
        level=None if terms is None else "instance",
        reference=None
        if view.name.startswith("lambda")
        else _reference(method, alpha, None if terms is None else terms.epsilon(DELTA)),
        seconds=float(np.mean([one.seconds for one in measured])),
        settings=settings,
    )


def _reference(method: str, alpha: float, epsilon: float | None) -> str | None:
    place = ALPHAS.index(alpha)
    if epsilon is None:
        return f"{PAPER_WITHOUT[place]} % (paper, certainty private at 0.1)" if method == FEDAUX else None
    if abs(epsilon - EPSILON) > 0.01:
        return None
    return f"{PAPER[method][place]} % at 0.6 (paper, as printed, MobileNetV2 and STL-10)"


DEFAULT_SCALE = 1 << 16
"""S: grid units of a vote."""

STUDENT_DIMENSIONS = 128
STUDENT_REGULARISATION = 1e-4
_STUDENT_TOLERANCE = 3.0
# Nothing is proved of the server model, so its optimizer may stop once accuracy no longer moves.


def grid_votes(soft_votes: Array, *, scale: int = DEFAULT_SCALE) -> NDArray[np.int64]:
    """Return soft votes as whole numbers, rounded down, so that no row sums to more than the scale."""
    return np.floor(soft_votes * scale).astype(np.int64)


def soft_labels(total: NDArray[np.int64]) -> Array:
    """Apply equation 1: a row of sums divided by its own sum; equal shares where no client is certain of anything.

    Args:
        total: summed votes, shape (num_queries, num_classes), not negative.

    Returns:
        float64, same shape, rows sum to one.
    """
    certainties = total.sum(axis=1, keepdims=True).astype(np.float64)
    return np.where(certainties > 0, total / np.where(certainties > 0, certainties, 1.0), 1 / total.shape[1])


def paper_scores_share() -> float:
    """Return the share of mu^2 that the paper's budgets of 0.1 and 0.5 give to the certainty head: 0.05."""
    scores, head = mu_of_epsilon(0.1, 1e-5), mu_of_epsilon(0.5, 1e-5)
    return scores**2 / (scores**2 + head**2)


def solve_noise(terms: LocalHeadTerms, *, epsilon: float, delta: float, scores_share: float) -> LocalHeadTerms:
    """Return terms with the least noise for which the release of both heads is certified (epsilon, delta).

    Args:
        epsilon: for both heads together, instance level.
        scores_share: a task's `training.score_share`; 0 is FedD. `paper_scores_share` has the paper's.
    """

    def at(sigma: float) -> LocalHeadTerms:
        sigma_head, sigma_scores = divided_noise(sigma, scores_share)
        return replace(terms, sigma_head=sigma_head, sigma_scores=sigma_scores)

    return at(least_noise(lambda sigma: at(sigma).epsilon(delta), epsilon, start=1 / mu_of_epsilon(epsilon, delta)))


Array = NDArray[np.float64]

_MEMORY = 20
_MOST_ITERATIONS = 5000


def fit_multinomial(features: Array, targets: Array, *, regularisation: float, tolerance: float = 1e-5) -> Array:
    """Fit softmax regression of class probabilities: one row of weights per class, also for classes without records.

    Args:
        features: public, shape (n, dimension), with the constant that carries the intercept; n at least 1.
        targets: shape (n, num_classes), rows are probabilities: one-hot labels, or soft labels.
        regularisation: lambda of the averaged loss.
        tolerance: target distance from the minimizer: |W - W*| <= |grad J(W)| / lambda.
    """
    shape = (targets.shape[1], features.shape[1])
    size, records = math.prod(shape), len(features)

    def objective(flat: Array) -> tuple[float, Array]:
        weights = flat.reshape(shape)
        scores = features @ weights.T
        scores -= scores.max(axis=1, keepdims=True)
        exponentials = np.exp(scores)
        totals = exponentials.sum(axis=1, keepdims=True)
        loss = float(np.log(totals).sum() - np.vdot(scores, targets))
        gradient = (exponentials / totals - targets).T @ features / records + regularisation * weights
        return loss / records + regularisation / 2 * float(flat @ flat), gradient.ravel()

    # L-BFGS-B looks at the gradient's largest entry; its norm is at most sqrt(size) times that.
    largest_entry = regularisation * tolerance / math.sqrt(size)
    options = {"maxcor": _MEMORY, "ftol": 0.0, "gtol": largest_entry, "maxiter": _MOST_ITERATIONS, "maxfun": 10**6}
    found = minimize(objective, np.zeros(size), jac=True, method="L-BFGS-B", options=options)
    return np.asarray(found.x, dtype=np.float64).reshape(shape)
