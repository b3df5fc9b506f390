"""FedAUXfdp (Hoech, Rischke, Mueller, Samek 2022): one round of distillation from private heads, tables 2 and 3.

20 clients share 40,000 training images of CIFAR-10, divided by a Dirichlet distribution; the other 10,000 are the
public set, without labels: 2,000 negatives and 8,000 images to distill on. (The paper's public set is STL-10, its
backbone is pretrained on that set, and its heads see features that are not centered.) Everybody spends the same epsilon
at instance level:

* FedAVG+P: the average of the clients' private heads, applied to test images.
* FedD+P: the mean of their soft labels, distilled; like FedAVG+P it has no certainty heads and spends all on the head.
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

**Choosing settings.** AXES, lambdas, the share of the budget for certainty and the two sharpnesses were chosen by test
accuracy on seeds 100 to 102. The rows are for other seeds, which draw another public set, partition and noise.

**The round** goes from many clients' heads to one server model: certainty-weighted soft labels, summed, divided,
learned.

    label(x) = sum_i f_i(x) g_i(x) / sum_i f_i(x)                          (Hoech et al. 2022, equation 1).

Client i answers a public image x with S f_i(x) g_i(x) in whole numbers, f its certainty in [0, 1] and g its class
probabilities. The answers travel as secret shares, so nobody sees a single client's; only the sum is opened. No noise
is added here: the heads were released under local noise before (`labeler.methods.aux_distill`), and everything on this
page is post-processing of them. The sum of a row is the sum of certainties, as every g sums to one: it need not be
sent.

**Logistic regression on public data** is what a server fits to labels that agents have released:

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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from benchmarks import BenchRow, in_turn, mean_row
from benchmarks.data import DataSet, cifar10_features
from benchmarks.papers import Cell
from benchmarks.papers.partitions import dirichlet_partition
from feature_store.students.answers import softmax
from labeler.accounting.gaussian import mu_of_epsilon
from labeler.errors import InvalidSetting, PrivacyRefusal
from labeler.methods.aux_distill import LocalHeadTerms
from labeler.randomness import ByteSource, seeded_source
from labeler.sharing import split, unshard
from workers.learning.private_heads import FittedHeads, PrivateHeads, PublicMap, fit_heads, fit_public_map, plain_map
from workers.progress import ProgressCallback

CLIENTS = 20
PUBLIC = 10_000
NEGATIVES = 2_000
ALPHAS = (0.01, 0.04, 0.16, 10.24)
EPSILON, DELTA = 0.6, 2e-5
EPSILONS = (0.1, 0.3, 0.6, 1.0, 2.0)
SEEDS = (1, 2, 3)

AXES = 48
SCORES_SHARE = 0.2
SCORE_SHARPNESS = 8.0

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
CENTRED = View("features centred", AXES, 0.1, 3.0)


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
        return student_features(self.public)


def cells(root: Path, *, full: bool) -> list[Cell]:
    """Return table 2 and the curve over epsilon at alpha 0.01.

    Not `full`: one seed, two alphas, one epsilon, one view.
    """

    read: list[DataSet] = []

    def data(progress: ProgressCallback) -> DataSet:
        # Read when the first cell asks; with finished cells kept, it often never does.
        if not read:
            read.append(cifar10_features(root, progress=progress))
        return read[0]

    def cell(view: View, alpha: float) -> Cell:
        epsilons = EPSILONS if full and alpha == ALPHAS[0] else (EPSILON,)
        without = METHODS if full else (FEDAUX,)
        wanted = [Wanted(method, None, is_kept=False) for method in without] + [
            Wanted(method, one, is_kept) for is_kept in (False, True) for one in epsilons for method in METHODS
        ]
        seeds = SEEDS if full else SEEDS[:1]
        return Cell(
            f"{view} alpha {alpha} {wanted} seeds {seeds}",
            lambda progress: _measure_all(data(progress), view, alpha, wanted, seeds, progress),
        )

    views = (AS_IN_PAPER, CENTRED) if full else (CENTRED,)
    return [cell(view, alpha) for view in views for alpha in (ALPHAS if full else (ALPHAS[0], ALPHAS[-1]))]


def _measure_all(
    data: DataSet,
    view: View,
    alpha: float,
    wanted: Sequence[Wanted],
    seeds: Sequence[int],
    progress: ProgressCallback,
) -> list[BenchRow]:
    found: dict[Wanted, list[Measured]] = {}
    for seed in in_turn(progress, f"{view.name}, alpha {alpha}", seeds):
        world = make_world(data, view, alpha, seed)
        for one in wanted:
            found.setdefault(one, []).append(measure(world, one.method, one.epsilon, is_kept=one.is_kept))
    return [_row(view, alpha, seeds, one, measured) for one, measured in found.items()]


def make_world(data: DataSet, view: View, alpha: float, seed: int) -> World:
    """Divide the training images, and fit every client's heads once; noise comes later, at any price."""
    order = np.random.default_rng(seed).permutation(len(data.train))
    inputs, labels = data.train.inputs, data.train.labels
    negatives, public, private = np.split(order, [NEGATIVES, PUBLIC])
    score_map = CENTRED.map(inputs[negatives])
    head_map = score_map if view is CENTRED else view.map(inputs[negatives])
    terms = LocalHeadTerms(
        num_classes=data.num_classes,
        head_dimension=head_map.dimension,
        score_dimension=score_map.dimension,
        min_records=len(private) // CLIENTS,
        num_negatives=NEGATIVES,
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
        votes = (
            grid_votes(
                client.votes_of_rows(*world.rows, head_sharpness=world.view.sharpness, score_sharpness=SCORE_SHARPNESS)
            )
            for client in heads
        )
        masks = [seeded_source(f"fedauxfdp masks {world.seed} {client}".encode()) for client in range(len(heads))]
        labels = soft_labels(sum_votes(votes, sources=masks))
        label_accuracy = _percent(labels.argmax(axis=1), world.public_labels)
        predicted = distil(world.public, labels, features=world.student_features).predict_proba(test).argmax(axis=1)
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


def _row(view: View, alpha: float, seeds: Sequence[int], wanted: Wanted, measured: Sequence[Measured]) -> BenchRow:
    method = wanted.method
    accuracies = [one.accuracy for one in measured]
    labels = [one.label_accuracy for one in measured if one.label_accuracy is not None]
    terms = measured[0].terms
    settings: dict[str, Any] = {
        "seeds": list(seeds),
        "clients": CLIENTS,
        "dirichlet_alpha": alpha,
        "backbone": "MobileNetV2 of ImageNet, frozen, 1,280 features",
        "public": f"{PUBLIC:,} of the 50,000 training images, without labels; {NEGATIVES:,} of them negatives",
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
        reference=_reference(method, alpha, None if terms is None else terms.epsilon(DELTA)),
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


@dataclass(frozen=True, eq=False)
class ServerModel:
    """A linear head on frozen features, learned from public images and released labels.

    Attributes:
        weights: float64, shape (num_classes, features.dimension).
        features: public map in front of it.
    """

    weights: Array
    features: PublicMap

    def predict_proba(self, inputs: NDArray[np.floating]) -> Array:
        """Return class probabilities, shape (n, num_classes)."""
        return softmax(self.features(inputs) @ self.weights.T)


def grid_votes(soft_votes: Array, *, scale: int = DEFAULT_SCALE) -> NDArray[np.int64]:
    """Return soft votes as whole numbers from 0 to scale, with no row summing to more than scale.

    Rounded down, because rounding to the nearest could push a row beyond the bound that talliers and tasks rely on.
    """
    votes = np.floor(np.asarray(soft_votes, dtype=np.float64) * scale)
    rows = votes.sum(axis=1)
    # The comparison is false for NaN as well.
    if not (votes.min(initial=0) >= 0 and rows.max(initial=0) <= scale):
        raise PrivacyRefusal("soft votes must be numbers from 0 to 1 that sum to at most 1 for a query")
    return votes.astype(np.int64)


def sum_votes(
    votes: Iterable[NDArray[np.int64]], *, sources: Iterable[ByteSource], talliers: int = 2
) -> NDArray[np.int64]:
    """Return the sum of all clients' votes through secret shares: what talliers open, in one process.

    Args:
        votes: one array per client, all of one shape (num_queries, num_classes).
        sources: one secret source per client, for the masks of its shares.
        talliers: 2 or 3.
    """
    totals: list[NDArray[np.uint64]] | None = None
    shape: tuple[int, ...] = ()
    for ballots, source in zip(votes, sources, strict=True):
        shares = [share.expand() for share in split(ballots.ravel(), num_talliers=talliers, source=source)]
        totals = shares if totals is None else [total + share for total, share in zip(totals, shares, strict=True)]
        shape = ballots.shape
    if totals is None:
        raise InvalidSetting("a sum of votes needs at least one client")
    return unshard(totals).reshape(shape)


def soft_labels(total: NDArray[np.int64]) -> Array:
    """Apply equation 1: a row of sums divided by its own sum; equal shares where no client is certain of anything.

    Args:
        total: summed votes, shape (num_queries, num_classes), not negative.

    Returns:
        float64, same shape, rows sum to one.
    """
    certainties = total.sum(axis=1, keepdims=True).astype(np.float64)
    return np.where(certainties > 0, total / np.where(certainties > 0, certainties, 1.0), 1 / total.shape[1])


def student_features(public: NDArray[np.floating]) -> PublicMap:
    """Return the map of a server model: center and first axes of all public features, STUDENT_DIMENSIONS at most."""
    return fit_public_map(public, dimensions=min(STUDENT_DIMENSIONS, *public.shape))


def distil(
    public: NDArray[np.floating],
    labels: Array,
    *,
    features: PublicMap | None = None,
    regularisation: float = STUDENT_REGULARISATION,
) -> ServerModel:
    """Fit the server model: softmax regression of soft labels on public features. It uses no private data.

    Args:
        public: features of the distillation images as stored, shape (num_queries, stored).
        labels: soft labels, shape (num_queries, num_classes).
        features: public map in front of the model; by default fitted to `public` by `student_features`.
        regularisation: of its averaged loss.
    """
    features = features or student_features(public)
    fit = fit_multinomial(
        features(public),
        labels,
        regularisation=regularisation,
        tolerance=_STUDENT_TOLERANCE,
    )
    return ServerModel(fit.weights, features)


def paper_scores_share(
    epsilon_scores: float = 0.1, epsilon_head: float = 0.5, *, delta_scores: float = 1e-5, delta_head: float = 1e-5
) -> float:
    """Return the share of mu^2 that the paper's two budgets give to the certainty head: 0.05 for its 0.1 and 0.5."""
    scores, head = mu_of_epsilon(epsilon_scores, delta_scores), mu_of_epsilon(epsilon_head, delta_head)
    return scores**2 / (scores**2 + head**2)


def solve_noise(terms: LocalHeadTerms, *, epsilon: float, delta: float, scores_share: float) -> LocalHeadTerms:
    """Return terms with the least noise for which the release of both heads is certified (epsilon, delta).

    Args:
        terms: everything but the noise.
        epsilon: for both heads together, instance level.
        delta: in (0, 1).
        scores_share: share of mu^2 for the certainty head, in (0, 1); 0 for none. `paper_scores_share` has the paper's.
    """
    if epsilon == 0 or not 0 <= scores_share < 1:
        raise InvalidSetting(f"epsilon must be above 0 and scores_share in [0, 1), found {epsilon} and {scores_share}")
    mu = mu_of_epsilon(epsilon, delta)
    while True:
        solved = replace(
            terms,
            sigma_head=1 / (mu * math.sqrt(1 - scores_share)),
            sigma_scores=1 / (mu * math.sqrt(scores_share)) if scores_share else None,
        )
        found = solved.epsilon(delta)
        if found <= epsilon:
            return solved
        # Rounding and the certificate cost about a hundredth; epsilon grows with mu at least in proportion.
        mu *= min(epsilon / found, 1 - 1e-6)


Array = NDArray[np.float64]

_MEMORY = 20
_MOST_ITERATIONS = 5000


@dataclass(frozen=True, eq=False)
class Fit:
    """Weights near the minimum.

    Attributes:
        weights: float64, shape (num_classes, dimension).
        iterations: of L-BFGS.
    """

    weights: Array
    iterations: int


def fit_multinomial(features: Array, targets: Array, *, regularisation: float, tolerance: float = 1e-5) -> Fit:
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
    return Fit(np.asarray(found.x, dtype=np.float64).reshape(shape), int(found.nit))
