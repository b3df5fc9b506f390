"""AE-DPFL (Zhu et al. 2020, 2021, table 1): agents train their own models and vote on public images; agent level.

* MNIST, 100 agents with 600 records of 6 digits; 3,000 public images of the test set, 7,000 to score the student.
* MNIST -> USPS, 60 agents with 1,000 records; 3,000 public USPS digits, the rest scores. With and without adaptation to
  the public images (DANN), with and without moving the agents' images about, which is a kind of adaptation itself.
* Figure 2: i.i.d. MNIST at epsilon 5, 100 agents of 50 to 600 records and 50 to 800 agents of 600; 1,000 public images.
  AE-DPFL in the paper's way of asking, and DP-FedAvg, both of linear models on the same edge features: an agent trains
  the linear head of the product.

In our way of asking, a backbone is pretrained on the public images (SimCLR). Agents vote once per cluster of them, on
the mean of what their models say, and abstain where that is less certain than `LEAST_CERTAINTY`. The noisy histogram is
released and spread over the public images. The paper's way, 500 random images and winners, is measured with the same
models.

**Choosing settings.** Numbers of clusters, epochs, rates and the certainty were chosen with seed 1000, which draws
other agents, other public images and other noise than the seeds reported. All images come from the same 10,000 (USPS:
9,298), so a test image of one seed is a public image of another. Nothing but these few numbers carries over.

Every vote takes the real path: a task, ballots checked and scaled by each agent, discrete noise, secret shares,
talliers, and the release that the task allows. Noise is seeded, so that a table can be repeated; a real job draws it
from the operating system. Public images are a part of what the requester holds; the rest of it only scores the student.

A question may be one image, or a whole group of similar ones. Then the agent votes for the class its model finds most
probable over the group, and the mean over many images is right far more often than one answer. It is still one vote.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from benchmarks import BenchRow, mean_row
from benchmarks.data import DataSet, Split, mnist, usps
from benchmarks.learning.federated import LocalTraining, ServerStep
from benchmarks.learning.networks import (
    DIMENSION,
    DomainAdversarial,
    answers_of,
    edge_features,
    image_tensor,
    small_convnet,
)
from benchmarks.learning.together import Jitter, Training
from benchmarks.papers import Cell
from benchmarks.papers.federated import ACCURACY, Averaging, Federation, accuracy_row, padded, priced, train_digits
from benchmarks.papers.partitions import MNIST_CASE, USPS_CASE, Rows, iid_partition, mnist_partition
from benchmarks.papers.theorem_7 import margins_of, theorem_7_rows
from benchmarks.sums import open_sum, task_at
from feature_store.backbones.simclr import DIGITS_CONFIG, pretrain
from feature_store.query_selection import QuerySet, select_queries
from feature_store.rows import quantize
from feature_store.students import NoisyAnswers, fit_student, soft_labels
from labeler import records as stored
from labeler.methods import ReleaseKind
from labeler.methods.ensemble import one_hot_ballots
from labeler.planning import price
from labeler.randomness import seeded_source
from labeler.release import Release, input_shares
from labeler.tally import QueryBatch, round_of
from labeler.task import Task
from workers.learning.linear import predict, train_head
from workers.progress import ProgressCallback, silent

LEAST_CERTAINTY = 0.6
USPS_EPSILON = 2.8
PAPER_EPSILONS = (1.0, 2.0, 2.7, 4.3)
QUESTIONS = 500
SMALL_BATCH = 8
PAPER_MNIST = {4.3: "95.1 % at 4.3 (paper, as printed; 86.1 % in its other version)"}
PAPER_USPS = {
    False: "83.8 % at 3.6 (paper, as printed; SVHN and MNIST, 200 agents)",
    True: "92.5 % at 2.8 (paper, as printed; SVHN and MNIST, 200 agents)",
}


@dataclass(frozen=True)
class Size:
    """The size of a run; as the paper has it unless given otherwise.

    Attributes:
        seeds: of agents, public images, models and noise; one repetition each.
        agents, records: of MNIST's federation.
        usps_agents, usps_records: of the one whose requester holds USPS digits.
        public, test: images of the requester; None takes all others for the test.
        epochs, usps_epochs: of agents. pretraining: of the public images' backbone.
        asked: epsilons, and how many clusters are asked about at each: as many as its noise allows.
        usps_clusters: asked about at USPS_EPSILON.
        queries: random images asked about in the paper's way.
    """

    seeds: tuple[int, ...] = (1, 2, 3)
    agents: int = 100
    records: int = 600
    usps_agents: int = 60
    usps_records: int = 1000
    public: int = 3000
    test: int | None = None
    epochs: int = 8
    usps_epochs: int = 10
    pretraining: int = 50
    asked: tuple[tuple[float, int], ...] = ((0.5, 10), (1.0, 20), (2.0, 40), (2.7, 60), (4.3, 60))
    usps_clusters: int = 60
    queries: int = QUESTIONS


FULL = Size()
QUICK = Size(
    seeds=(1,),
    agents=10,
    records=60,
    usps_agents=4,
    usps_records=60,
    public=200,
    test=500,
    epochs=6,
    usps_epochs=10,
    pretraining=2,
    asked=((4.3, 10),),
    usps_clusters=10,
    queries=50,
)


def cells(root: Path, *, full: bool) -> list[Cell]:
    """Return all tables; not `full`: few agents, few epochs, one seed."""
    size = FULL if full else QUICK
    adaptations = [
        Cell(
            f"MNIST -> USPS, adaptation {adapted}, {size}",
            lambda progress, adapted=adapted: usps_rows(root, size, adapted=adapted, progress=progress),  # type: ignore[misc]
        )
        for adapted in (False, True)
    ]
    return [
        Cell(f"MNIST, {size}", lambda progress: mnist_rows(root, size, progress)),
        *adaptations,
        *figure_cells(root, full=full),
    ]


def mnist_rows(root: Path, size: Size, progress: ProgressCallback) -> list[BenchRow]:
    """Measure MNIST at every epsilon, with the paper's way of asking and with ours, and the agents without privacy."""
    data, table = mnist(root), Table(MNIST_CASE, PAPER_MNIST)
    asked: dict[float, list[Outcome]] = {}
    for seed in size.seeds:
        partition = mnist_partition(data.train.labels, agents=size.agents, records=size.records, seed=seed)
        asker = requester(
            data.test, public=size.public, test=size.test, epochs=size.pretraining, seed=seed, progress=progress
        )
        training = Training(epochs=size.epochs, batch_size=SMALL_BATCH, jitter=Jitter())
        votes = Votes(asker, _train(data.train, partition, asker, training, False, seed, progress), seed)
        table.note_labels("AE-DPFL, plurality of the agents", votes.plurality)
        for epsilon, count in size.asked:
            ours = votes.on_clusters(epsilon, count, least_certainty=LEAST_CERTAINTY)
            table.note("AE-DPFL, cluster centres, histogram", epsilon, ours)
            if epsilon in PAPER_EPSILONS:
                asked.setdefault(epsilon, []).append(votes.on_images(epsilon, size.queries))
                table.note("AE-DPFL, random images, winner", epsilon, asked[epsilon][-1])
    settings = {"agents": size.agents, "records": size.records, "public": size.public, "seeds": list(size.seeds)}
    rows = table.rows(settings)
    for epsilon, outcomes in asked.items():
        case = f"{MNIST_CASE}, certified {epsilon:g}"
        rows += theorem_7_rows(case, outcomes[0].task, [one.margins for one in outcomes], settings)
    return rows


def usps_rows(root: Path, size: Size, *, adapted: bool, progress: ProgressCallback) -> list[BenchRow]:
    """Measure MNIST -> USPS with one way of training."""
    data = mnist(root)
    table = Table(USPS_CASE, {USPS_EPSILON: PAPER_USPS[adapted]})
    words = f"AE-DPFL{' + DANN' if adapted else ''}"
    training = Training(epochs=size.usps_epochs, learning_rate=5e-3)
    for seed in size.seeds:
        asker = _post_office(root, size, seed)
        partition = iid_partition(data.train.labels, clients=size.usps_agents, records=size.usps_records, seed=seed)
        votes = Votes(asker, _train(data.train, partition, asker, training, adapted, seed, progress), seed)
        table.note_labels(f"{words}, mean of single agents", votes.mean_agent)
        table.note_labels(f"{words}, plurality of the agents", votes.plurality)
        ours = votes.on_clusters(USPS_EPSILON, size.usps_clusters, least_certainty=LEAST_CERTAINTY)
        table.note(f"{words}, cluster centres, histogram", USPS_EPSILON, ours)
        table.note(f"{words}, random images, winner", USPS_EPSILON, votes.on_images(USPS_EPSILON, size.queries))
    return table.rows(
        {
            "agents": len(votes.probabilities),
            "records": size.usps_records,
            "public": size.public,
            "seeds": list(size.seeds),
            "left_out": "140 agents with SVHN, which is not there",
        }
    )


@cache
def _post_office(root: Path, size: Size, seed: int) -> Requester:
    """Return the requester with USPS digits, the same in every cell."""
    return requester(usps(root).whole, public=size.public, test=size.test, epochs=size.pretraining, seed=seed)


def linear_answers(agents: Sequence[Split], public: NDArray[np.float32], num_classes: int) -> NDArray[np.float32]:
    """Return what the product's linear heads say, certain of one class each: shape (agents, images, classes)."""
    asked = quantize(public)
    heads = (train_head(stored.Rows.of(own.inputs, own.labels), num_classes=num_classes) for own in agents)
    return np.stack([np.eye(num_classes, dtype=np.float32)[predict(head, asked)] for head in heads])


def _train(
    source: Split,
    partition: Sequence[Rows],
    asker: Requester,
    training: Training,
    adapted: bool,
    seed: int,
    progress: ProgressCallback,
) -> NDArray[np.float32]:
    """Train all agents together; return what each then says of each public image."""
    inputs, labels, sizes = padded(image_tensor(source.inputs), torch.from_numpy(source.labels), partition)
    factory = (lambda: DomainAdversarial(small_convnet())) if adapted else small_convnet
    public = image_tensor(asker.public.inputs)
    return answers_of(factory, inputs, labels, public, training=training, sizes=sizes, seed=seed, progress=progress)


FIGURE_EPSILON = 5.0
FIGURE_RECORDS = (50, 100, 200, 400, 600)
FIGURE_AGENTS = (50, 100, 200, 400, 800)
FIGURE_PUBLIC = 1000
MOST_OF_WINNERS = 400
AVERAGING = Averaging(
    partial(nn.Linear, DIMENSION, 10), 0.5, 20, LocalTraining(20, 30, 8.0, 4.0), ServerStep(1.0, 0.5, 0.5), 1.0
)


def figure_cells(root: Path, *, full: bool) -> list[Cell]:
    """Return figure 2: 100 agents of 50 to 600 records, and 50 to 800 agents of 600; see the module.

    Not `full`, its ends: 50 agents, and 100 with the fewest records.
    """
    sizes = [(100, records) for records in FIGURE_RECORDS] + [
        (agents, 600) for agents in FIGURE_AGENTS if agents != 100
    ]
    if not full:
        sizes = [(100, FIGURE_RECORDS[0]), (FIGURE_AGENTS[0], 600)]
    return [
        Cell(f"figure 2, {agents} agents, {records} records, {AVERAGING}", partial(figure_rows, root, agents, records))
        for agents, records in sizes
    ]


def figure_rows(root: Path, agents: int, records: int, progress: ProgressCallback = silent) -> list[BenchRow]:
    """Measure one point of figure 2 by votes and by DP-FedAvg."""
    edges, seed = _edges(root), FULL.seeds[0]
    case, started = f"{agents} agents x {records}", time.perf_counter()
    table = Table(case, {})
    random = np.random.default_rng([seed, agents, records])
    public, test = np.split(random.permutation(len(edges.test)), [FIGURE_PUBLIC])
    # Where MNIST has too few records some are at several agents, none twice at one.
    parts = [random.choice(len(edges.train), records, replace=False) for _ in range(agents)]
    if agents * records <= len(edges.train):
        parts = iid_partition(edges.train.labels, clients=agents, records=records, seed=seed)
    known, unseen = edges.test[public], edges.test[test]
    asker = Requester(known, unseen, quantize(known.inputs), quantize(unseen.inputs))
    votes = Votes(asker, linear_answers([edges.train[rows] for rows in parts], known.inputs, 10), seed)
    table.note_labels("mean of single agents", votes.mean_agent)
    # The sums of more agents leave the range in which three talliers compare winners.
    release: ReleaseKind = "winner" if agents <= MOST_OF_WINNERS else "histogram"
    images = votes.on_images(FIGURE_EPSILON, QUESTIONS, release=release)
    table.note(f"AE-DPFL, random images, {release}", FIGURE_EPSILON, images)
    federation = Federation.of(
        torch.from_numpy(edges.train.inputs),
        torch.from_numpy(edges.train.labels),
        parts,
        torch.from_numpy(asker.test.inputs),
        torch.from_numpy(asker.test.labels),
    )
    averaged, plan = train_digits(case, federation, AVERAGING, FIGURE_EPSILON, seed, progress)
    settings = {"agents": agents, "records": records, "public": FIGURE_PUBLIC, "seeds": [seed]}
    row = accuracy_row(case, "DP-FedAvg, linear model", {seed: averaged}, started, None, settings)
    return [*table.rows(settings), row if plan is None else priced(row, plan, DELTA)]


@cache
def _edges(root: Path) -> DataSet:
    """Return MNIST as edge features."""
    data = mnist(root)
    train, test = (Split(edge_features(one.inputs), one.labels) for one in (data.train, data.test))
    return DataSet(train, test)


DELTA = 1e-3
LABELS = "labels of public images right, %"


@dataclass(frozen=True, eq=False)
class Requester:
    """The party that asks: public images, and images that only score what it gets.

    Attributes:
        public: images whose labels nobody reads before scoring.
        test: the rest.
        public_features: int16, shape (num_public, dimension), of a backbone pretrained on the public images.
        test_features: int16, of the same backbone.
    """

    public: Split
    test: Split
    public_features: NDArray[np.int16]
    test_features: NDArray[np.int16]


def requester(
    images: Split, *, public: int, test: int | None, epochs: int, seed: int, progress: ProgressCallback = silent
) -> Requester:
    """Draw public and test images and pretrain a backbone on the public ones, without labels (SimCLR).

    Args:
        public, test: how many are public, and how many score the student; None for all others.
        epochs: of pretraining.
    """
    order = np.random.default_rng([seed, 1]).permutation(len(images))
    known, rest = order[:public], order[public : None if test is None else public + test]
    config = DIGITS_CONFIG.model_copy(update={"epochs": epochs, "batch_size": min(256, public)})
    backbone = pretrain(
        list(images.inputs[known]),
        config=config,
        seed=seed,
        device="cpu",
        threads=1,
        progress=lambda done, total, _loss: progress("Public images are pretrained on", done, total),
    )
    features = quantize(backbone.embed(list(images.inputs[np.concatenate([known, rest])])))
    return Requester(images[known], images[rest], features[:public], features[public:])


@cache
def task_for(
    epsilon: float, *, agents: int, queries: int, release: ReleaseKind = "histogram", num_classes: int = 10
) -> Task:
    """Return a task whose agent-level price is at most epsilon, with the least noise that gives this."""
    fields = {
        "name": "ae-dpfl",
        "classes": [str(number) for number in range(num_classes)],
        "method": "ensemble",
        "delta": DELTA,
        "max_queries": queries,
        "release": release,
        "agents": agents,
        # As the paper counts: no participant reads the release. Its price says so (labeler.planning).
        "colluding_agents": 0,
        "talliers": 2 if release == "histogram" else 3,
    }
    return task_at(epsilon, fields, level="agent")


def vote(task: Task, questions: QuerySet, ballots: Sequence[NDArray[np.int64]], *, seed: str) -> Release:
    """Run one round: an agent's messages, the talliers' sums, and what is opened.

    Args:
        ballots: per agent, int64, shape (num_queries, num_classes).
        seed: of the noise and of the shares; each agent has its own stream.
    """
    round = round_of(task, QueryBatch(questions.features))
    answers = [
        input_shares(
            own, task, round, agent_id=f"agent-{number}", source=seeded_source(f"{seed}, agent {number}".encode())
        )
        for number, own in enumerate(ballots)
    ]
    return open_sum(task, round, answers)


@dataclass(frozen=True)
class Outcome:
    """The scores of one round.

    Attributes:
        labels_right: share of public images whose label, as far as the release tells, is right.
        student_right: share of unseen images that the student labels rightly.
        task: what was asked.
        margins: by how many votes each question's winner led, without noise: private in a real job.
    """

    labels_right: float
    student_right: float
    task: Task
    margins: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Votes:
    """Trained agents, ready to be asked.

    Attributes:
        asker: the requester.
        probabilities: what each agent's model says of each public image, shape (agents, num_public, num_classes).
        seed: of questions, noise and student.
    """

    asker: Requester
    probabilities: NDArray[np.float32]
    seed: int

    @property
    def mean_agent(self) -> float:
        """The share of public images that an agent labels rightly by itself; no privacy."""
        return float((self.probabilities.argmax(axis=2) == self.asker.public.labels).mean())

    @property
    def plurality(self) -> float:
        """The share of public images that most agents label rightly; no privacy."""
        counts = np.eye(self.probabilities.shape[2])[self.probabilities.argmax(axis=2)].sum(axis=0)
        return float((counts.argmax(axis=1) == self.asker.public.labels).mean())

    def on_clusters(self, epsilon: float, count: int, *, least_certainty: float) -> Outcome:
        """Ask once per cluster of public images, release the histogram."""
        questions = select_queries(self.asker.public_features, strategy="clustered", count=count, seed=self.seed)
        ballots = [
            group_ballots(own, questions.assignment, num_groups=count, least_certainty=least_certainty)
            for own in self.probabilities
        ]
        return self._outcome(epsilon, questions, ballots, "histogram")

    def on_images(self, epsilon: float, count: int, *, release: ReleaseKind = "winner") -> Outcome:
        """Ask about random public images; the paper's way releases the winners."""
        questions = select_queries(self.asker.public_features, strategy="random", count=count, seed=self.seed)
        predicted = self.probabilities[:, questions.rows].argmax(axis=2)
        num_classes = self.probabilities.shape[2]
        ballots = [one_hot_ballots(own, num_classes=num_classes) for own in predicted]
        return self._outcome(epsilon, questions, ballots, release)

    def _outcome(
        self, epsilon: float, questions: QuerySet, ballots: Sequence[NDArray[np.int64]], release: ReleaseKind
    ) -> Outcome:
        """Label the public images with a release, train a student by spreading, and score both."""
        agents, _, num_classes = self.probabilities.shape
        task = task_for(epsilon, agents=agents, queries=len(questions), release=release, num_classes=num_classes)
        opened = vote(task, questions, ballots, seed=f"ae-dpfl {self.seed} {epsilon} {release}")
        answers = NoisyAnswers.of(
            task,
            features=questions.features,
            labels=opened.labels,
            noisy_votes=opened.noisy_votes,
            assignment=questions.assignment,
        )
        asker = self.asker
        labels = soft_labels(answers)[questions.assignment].argmax(axis=1)
        student = fit_student("spreading", answers, asker.public_features, num_classes=num_classes, seed=self.seed)
        return Outcome(
            labels_right=float((labels == asker.public.labels).mean()),
            student_right=float((student.predict(asker.test_features) == asker.test.labels).mean()),
            task=task,
            margins=margins_of(ballots),
        )


class Table:
    """Outcomes of all seeds, as rows with mean and deviation."""

    def __init__(self, case: str, paper: Mapping[float, str]) -> None:
        self._case, self._paper = case, paper
        self._labels: dict[str, list[float]] = {}
        self._outcomes: dict[tuple[str, float], list[Outcome]] = {}
        self._started = time.perf_counter()

    def note_labels(self, method: str, right: float) -> None:
        """Add a share of right labels for which nothing private was paid."""
        self._labels.setdefault(method, []).append(100 * right)

    def note(self, method: str, epsilon: float, outcome: Outcome) -> None:
        """Add one round."""
        self._outcomes.setdefault((method, epsilon), []).append(outcome)

    def rows(self, settings: dict[str, Any]) -> list[BenchRow]:
        """Return one row per method and epsilon, for the student's accuracy and for the labels it learned from."""
        seconds = (time.perf_counter() - self._started) / max(1, len(self._labels) + len(self._outcomes))
        found = [
            mean_row(self._case, method, LABELS, values, seconds=seconds, settings=settings)
            for method, values in self._labels.items()
        ]
        for (method, epsilon), outcomes in self._outcomes.items():
            task = outcomes[0].task
            paid = price(task)
            told: dict[str, Any] = {
                "epsilon": paid.agent.epsilon,
                "delta": DELTA,
                "level": "agent",
                "reference": self._paper.get(epsilon),
                "seconds": seconds,
                "settings": settings
                | {
                    "queries": task.max_queries,
                    "sigma_votes": task.sigma_votes,
                    "as_in_paper_epsilon": paid.agent.as_in_paper_epsilon,
                    "instance_epsilon": paid.instance.epsilon,
                    "release": task.release,
                },
            }
            found += [
                mean_row(self._case, method, ACCURACY, [100 * one.student_right for one in outcomes], **told),
                mean_row(self._case, method, LABELS, [100 * one.labels_right for one in outcomes], **told),
            ]
        return found


def group_ballots(
    probabilities: NDArray[np.floating], groups: NDArray[np.integer], *, num_groups: int, least_certainty: float = 0.0
) -> NDArray[np.int64]:
    """Cast one vote per group, for the class of the largest mean probability; none where that is not large enough.

    An agent that knows six of ten digits is sure of nothing when it sees a seventh; its vote would only be noise with a
    direction. Abstaining is a row of zeros.

    A row is one vote or none. So leaving an agent out moves at most one vote per group (squared L2 at most 1). One
    record, which may change the whole model, moves at most one vote here and one there (at most 2). Groups are public;
    `least_certainty` may be public or the agent's own.

    Args:
        probabilities: of one agent's model, shape (num_images, num_classes), finite.
        groups: the question of each public image, shape (num_images,), from 0.
        num_groups: how many questions there are; one without images gets no vote.
        least_certainty: mean probability below which the agent abstains.

    Returns:
        Votes, int64, shape (num_groups, num_classes), what `labeler.release` takes for method ensemble.
    """
    sums = np.zeros((num_groups, probabilities.shape[1]))
    np.add.at(sums, groups, probabilities)
    sizes = np.bincount(groups, minlength=num_groups)
    means = sums / np.maximum(sizes, 1)[:, None]
    ballots = one_hot_ballots(means.argmax(axis=1), num_classes=means.shape[1])
    ballots[(sizes == 0) | (means.max(axis=1) < least_certainty)] = 0
    return ballots
