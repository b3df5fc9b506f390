"""What the benches of AE-DPFL share: digits divided among agents, their models, and rounds of votes on public images.

Every vote takes the real way: a task, ballots checked and scaled by each agent, discrete noise, secret shares,
talliers, and the release that the task allows. Noise is seeded, so that a table can be repeated; a real job draws it
from the operating system. Public images are a part of what the requester holds; the rest of it is seen only to score
the student.

How a trained model votes on questions that stand for groups of public images.

A question may be one image, or a whole group of similar ones: then the agent votes for the class its model finds most
probable over the group, and the mean over many images is right far more often than one answer. It is one vote all the
same.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks import BenchRow
from benchmarks.data import Split
from benchmarks.learning.networks import image_tensor
from benchmarks.learning.together import Parameters, predict_together
from benchmarks.one_round import open_sum
from benchmarks.papers.partitions import Rows
from feature_store.backbones.simclr import DIGITS_CONFIG, pretrain
from feature_store.query_selection import QuerySet, select_queries
from feature_store.rows import quantize
from feature_store.sources import open_source
from feature_store.students import NoisyAnswers, fit_student, soft_labels
from labeler.contribution import input_shares
from labeler.errors import BadData, InvalidSetting
from labeler.methods import MethodName, ReleaseKind
from labeler.methods.ensemble import one_hot_ballots
from labeler.planning import price
from labeler.randomness import seeded_source
from labeler.release import Release
from labeler.solving import solve_sigma
from labeler.tally import QueryBatch, round_of
from labeler.task import Task, parse_task
from workers.progress import ProgressCallback, silent

METHOD: MethodName = "ensemble"
DELTA = 1e-3
ACCURACY = "test accuracy, %"
LABELS = "labels of public images right, %"
TALLIERS = 2


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
        images: all that the requester holds.
        public: how many are public.
        test: how many score the student; None for all others.
        epochs: of pretraining.
        seed: of the draw and of the pretraining.
        progress: told how many epochs are done.
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
    return Requester(
        Split(images.inputs[known], images.labels[known]),
        Split(images.inputs[rest], images.labels[rest]),
        features[:public],
        features[public:],
    )


def svhn(root: Path) -> Split | None:
    """House numbers (Netzer et al. 2011), grey, 28 x 28, through torchvision; None where the set is not there.

    The extra images belong to it where they are there: 140 agents of 3,000 need more than its training set.
    """
    folder = root / "torchvision"
    splits = [split for split in ("train", "extra") if (folder / f"{split}_32x32.mat").is_file()]
    if not splits:
        return None
    sources = [open_source(f"torchvision:SVHN?root={folder}&split={split}") for split in splits]
    images = [
        np.asarray(source.read(row).convert("L").resize((28, 28)))
        for source in sources
        for row in range(len(source.names))
    ]
    return Split(np.stack(images), np.concatenate([np.array(source.labels, dtype=np.int64) for source in sources]))


def stacked(images: Split, partition: Sequence[Rows]) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Agents' images and labels, padded to the largest agent, and how many of them count."""
    longest = max(map(len, partition))
    rows = torch.from_numpy(np.stack([np.resize(own, longest) for own in partition]))
    return image_tensor(images.inputs)[rows], torch.from_numpy(images.labels)[rows], [len(own) for own in partition]


def probabilities_of(module: torch.nn.Module, parameters: Parameters, images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """What each agent's model says of each image, shape (agents, n, num_classes)."""
    logits = predict_together(module, parameters, image_tensor(images))
    probabilities: NDArray[np.float32] = logits.softmax(dim=2).numpy()
    return probabilities


def task_for(
    epsilon: float, *, agents: int, queries: int, release: ReleaseKind = "histogram", num_classes: int = 10
) -> Task:
    """A task whose agent-level price is at most epsilon, with the least noise that gives this."""
    task = parse_task(
        {
            "name": "ae-dpfl",
            "classes": [str(number) for number in range(num_classes)],
            "method": METHOD,
            "sigma_votes": 1.0,
            "delta": DELTA,
            "max_queries": queries,
            "release": release,
            "agents": agents,
            # As the paper counts: nobody who takes part reads the release. Its price says so (labeler.planning).
            "colluding_agents": 0,
            "talliers": TALLIERS if release == "histogram" else 3,
        }
    )
    return task.model_copy(update={"sigma_votes": solve_sigma(task, epsilon, level="agent")})


def vote(task: Task, questions: QuerySet, ballots: Sequence[NDArray[np.int64]], *, seed: str) -> Release:
    """One round: what an agent sends, what talliers add up, and what is opened.

    Args:
        task: the task.
        questions: what is asked.
        ballots: per agent, int64, shape (num_queries, num_classes).
        seed: of the noise and of the shares; each agent has a stream of its own.
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
    """What one round was worth.

    Attributes:
        labels_right: share of public images whose label, as far as the release tells, is right.
        student_right: share of unseen images that the student labels rightly.
        task: what was asked.
    """

    labels_right: float
    student_right: float
    task: Task


@dataclass(frozen=True, eq=False)
class Votes:
    """Trained agents, ready to be asked.

    Attributes:
        asker: who asks.
        probabilities: what each agent's model says of each public image, shape (agents, num_public, num_classes).
        seed: of questions, noise and student.
    """

    asker: Requester
    probabilities: NDArray[np.float32]
    seed: int

    @property
    def mean_agent(self) -> float:
        """Share of public images that an agent labels rightly by itself; no privacy."""
        return float((self.probabilities.argmax(axis=2) == self.asker.public.labels).mean())

    @property
    def plurality(self) -> float:
        """Share of public images that most agents label rightly; no privacy."""
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

    def on_images(self, epsilon: float, count: int) -> Outcome:
        """Ask about random public images, release the winners: the paper's way."""
        questions = select_queries(self.asker.public_features, strategy="random", count=count, seed=self.seed)
        predicted = self.probabilities[:, questions.rows].argmax(axis=2)
        num_classes = self.probabilities.shape[2]
        ballots = [one_hot_ballots(own, num_classes=num_classes) for own in predicted]
        return self._outcome(epsilon, questions, ballots, "winner")

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
        )


class Table:
    """Outcomes of all seeds, as rows with mean and deviation."""

    def __init__(self, case: str, paper: Mapping[float, str]) -> None:
        self._case, self._paper = case, paper
        self._labels: dict[str, list[float]] = {}
        self._outcomes: dict[tuple[str, float], list[Outcome]] = {}
        self._started = time.perf_counter()

    def note_labels(self, method: str, right: float) -> None:
        """A share of right labels that nothing private was paid for."""
        self._labels.setdefault(method, []).append(100 * right)

    def note(self, method: str, epsilon: float, outcome: Outcome) -> None:
        """One round."""
        self._outcomes.setdefault((method, epsilon), []).append(outcome)

    def rows(self, settings: dict[str, Any]) -> list[BenchRow]:
        """One row per method and epsilon, for what the student reaches and for the labels it learnt from."""
        seconds = (time.perf_counter() - self._started) / max(1, len(self._labels) + len(self._outcomes))
        found = [
            BenchRow(self._case, method, LABELS, *_mean(values), seconds=seconds, settings=settings)
            for method, values in self._labels.items()
        ]
        for (method, epsilon), outcomes in self._outcomes.items():
            task = outcomes[0].task
            paid = price(task)
            values = {
                ACCURACY: [100 * outcome.student_right for outcome in outcomes],
                LABELS: [100 * outcome.labels_right for outcome in outcomes],
            }
            found += [
                BenchRow(
                    self._case,
                    method,
                    metric,
                    *_mean(each),
                    epsilon=paid.agent.epsilon,
                    delta=DELTA,
                    level="agent",
                    reference=self._paper.get(epsilon),
                    seconds=seconds,
                    settings=settings
                    | {
                        "queries": task.max_queries,
                        "sigma_votes": task.sigma_votes,
                        "as_in_paper_epsilon": paid.agent.as_in_paper_epsilon,
                        "instance_epsilon": paid.instance.epsilon,
                        "release": task.release,
                    },
                )
                for metric, each in values.items()
            ]
        return found


def _mean(values: Sequence[float]) -> tuple[float, float | None]:
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def group_ballots(
    probabilities: NDArray[np.floating], groups: NDArray[np.integer], *, num_groups: int, least_certainty: float = 0.0
) -> NDArray[np.int64]:
    """One vote per group, for the class of the largest mean probability; none where that is not large enough.

    An agent that knows six of ten digits is sure of nothing when it sees a seventh; its vote would only be noise with
    a direction. Abstaining is a row of zeros.

    What it costs: a row is one vote or none, so leaving an agent out moves at most one vote per group (squared L2 at
    most 1), and one record, which may change the whole model, at most one vote here and one there (at most 2).
    Groups are public; `least_certainty` may be public or the agent's own.

    Args:
        probabilities: of one agent's model, shape (num_images, num_classes), finite.
        groups: the question that stands for each public image, shape (num_images,), from 0.
        num_groups: how many questions there are; one that stands for no image gets no vote.
        least_certainty: mean probability below which the agent abstains.

    Returns:
        Votes, int64, shape (num_groups, num_classes), what `labeler.contribution` takes for method ensemble.

    Raises:
        BadData: probabilities that are no finite matrix.
        InvalidSetting: groups of another length or beyond num_groups.
    """
    if probabilities.ndim != 2 or not probabilities.size or not np.isfinite(probabilities).all():
        raise BadData("probabilities must be a finite matrix, one row per public image, one column per class")
    if groups.shape != probabilities.shape[:1] or groups.min() < 0 or groups.max() >= num_groups:
        raise InvalidSetting(f"every public image belongs to one of the {num_groups} questions")
    sums = np.zeros((num_groups, probabilities.shape[1]))
    np.add.at(sums, groups, probabilities)
    sizes = np.bincount(groups, minlength=num_groups)
    means = sums / np.maximum(sizes, 1)[:, None]
    ballots = one_hot_ballots(means.argmax(axis=1), num_classes=means.shape[1])
    ballots[(sizes == 0) | (means.max(axis=1) < least_certainty)] = 0
    return ballots
