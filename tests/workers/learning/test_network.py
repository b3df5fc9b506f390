"""Networks that vote: against a twin by automatic differentiation, on records of every kind, and in fixed work."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from feature_store.rows import quantize
from labeler.methods.ensemble import VoterTerms, check_head
from labeler.records import FEATURE_ONE, ModelStore, Records
from labeler.tally import QueryBatch
from labeler.task import Task
from tests.labeler.tasks import make_task
from tests.workers.answer import answer
from workers.learning import network
from workers.learning.learner import Trainer
from workers.learning.network import BATCH, GRID, HIDDEN, SEED, scores, strength_at, train

DIMENSION, CLASSES, QUERIES = 6, 3, 40
CENTRES = np.random.default_rng(3).normal(size=(CLASSES, DIMENSION))
LEARNERS = ("linear", "network", "adapted")


def task_of(learner: str, **fields: Any) -> Task:
    return make_task(method="ensemble", max_queries=QUERIES, agents=2, training={"learner": learner}, **fields)


def drawn(count: int, seed: int, *, moved: float = 0.0) -> tuple[NDArray[np.int16], NDArray[np.int16]]:
    """Features of three classes, and their labels; moved from one class to another where another camera made them."""
    rng = np.random.default_rng(seed)
    labels = (np.arange(count) % CLASSES).astype(np.int16)
    features = CENTRES[labels] + 0.5 * rng.normal(size=(count, DIMENSION)) + moved * (CENTRES[0] - CENTRES[1])
    return quantize(features), labels


BATCH_ASKED = QueryBatch(drawn(QUERIES, 9)[0])


def records_of(features: NDArray[np.int16], labels: NDArray[Any]) -> Records:
    return Records(features, np.arange(len(labels)), labels.astype(np.int16), f"{len(labels)} {labels.sum()}")


def attributes(labels: NDArray[np.int16]) -> NDArray[np.int16]:
    """A class has its own attribute and the next; no record has a fourth."""
    return np.isin((np.arange(4) - labels[:, None]) % 3, (0, 1)).astype(np.int16) * (np.arange(4) < 3)


def twin(
    records: Records, questions: NDArray[np.int16] | None, *, steps: int, is_several: bool, classes: int
) -> NDArray[np.float64]:
    """The definition in words, its gradient by automatic differentiation and its steps by torch; scores of a batch."""
    rng = np.random.default_rng(SEED)
    rows = torch.tensor(records.features / FEATURE_ONE)
    asked = rows if questions is None else torch.tensor(questions / FEATURE_ONE)
    scale, labels = DIMENSION**0.5, torch.tensor(records.labels.astype(np.int64))
    first = torch.tensor(rng.normal(size=(DIMENSION, HIDDEN)) * (2 / DIMENSION) ** 0.5)
    last = torch.tensor(rng.normal(size=(HIDDEN, classes)) * HIDDEN**-0.5)
    weights = [first, torch.zeros(HIDDEN, dtype=torch.float64), last, torch.zeros(classes, dtype=torch.float64)]
    for one in weights:
        one.requires_grad_(True)
    adam = torch.optim.Adam(weights, lr=network.RATE, betas=(0.9, 0.99), eps=1e-8)

    def hidden(inputs: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        return torch.relu((inputs - mean) * scale @ weights[0] + weights[1])

    for step in range(steps):
        places = (rng.random((2, BATCH)) * [[len(rows)], [1 if questions is None else len(asked)]]).astype(int)
        own = hidden(rows[places[0]], rows.mean(dim=0))
        said, wanted = own @ weights[2] + weights[3], labels[places[0]]
        if is_several:
            present = labels.any(dim=0)
            losses = torch.nn.functional.binary_cross_entropy_with_logits(said, wanted.double(), reduction="none")
            loss = (losses * present).sum() / BATCH
        else:
            absent = torch.tensor([not bool((labels == name).any()) for name in range(classes)])
            loss = torch.nn.functional.cross_entropy(said.masked_fill(absent, -torch.inf), wanted)
        if questions is not None:
            theirs = hidden(asked[places[1]], asked.mean(dim=0))
            length = (1e-6 + torch.cat([own, theirs]).square().sum(dim=1).mean()).detach()
            apart = (own.mean(dim=0) - theirs.mean(dim=0)).square().sum()
            spread = (torch.cov(own.T, correction=0) - torch.cov(theirs.T, correction=0)).square().sum()
            loss = loss + strength_at(step / network.STEPS) * (apart / (2 * length) + spread / (2 * length**2))
        adam.param_groups[0]["lr"] = network.RATE / 2 * (1 + np.cos(np.pi * step / network.STEPS))
        adam.zero_grad()
        loss.backward()
        adam.step()
    shown = torch.tensor(BATCH_ASKED.features / FEATURE_ONE)
    return np.asarray((hidden(shown, asked.mean(dim=0)) @ weights[2] + weights[3]).detach().numpy())


@pytest.mark.parametrize("is_several", [False, True])
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("count", [1, 5, 90])
def test_training_is_what_the_module_defines(
    adapted: bool, is_several: bool, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "STEPS", 12)
    features, labels = drawn(count, 1, moved=0.3)
    records = records_of(features, attributes(labels) if is_several else labels)
    classes = 4
    questions = BATCH_ASKED.features if adapted else None
    found = train(records.trainable(None), questions, num_classes=classes, is_several=is_several)
    expected = twin(records, questions, steps=12, is_several=is_several, classes=classes)
    said = scores(found, BATCH_ASKED.features.astype(np.float64))
    present = records.labels.any(axis=0) if is_several else np.isin(np.arange(classes), labels)
    assert said[:, present] == pytest.approx(expected[:, present], abs=1e-4)
    assert (said[:, ~present] < -(2.0**30)).all()


KINDS: dict[str, tuple[NDArray[np.int16], NDArray[np.int16]]] = {
    "any": drawn(30, 2),
    "one class": (drawn(30, 2)[0], np.full(30, 2, dtype=np.int16)),
    "one record": drawn(1, 2),
    "no record": drawn(0, 2),
    "equal records": (np.repeat(drawn(1, 2)[0], 9, axis=0), np.zeros(9, dtype=np.int16)),
    "equal records of two classes": (np.repeat(drawn(1, 2)[0], 9, axis=0), (np.arange(9) % 2).astype(np.int16)),
    "features of zero": (np.zeros((12, DIMENSION), np.int16), (np.arange(12) % 3).astype(np.int16)),
    "the largest features": (np.full((4, DIMENSION), 32_767, np.int16), np.array([0, 1, 1, 0], np.int16)),
}
QUESTIONS = {
    "any": BATCH_ASKED.features,
    "zero": np.zeros((QUERIES, DIMENSION), np.int16),
    "one": BATCH_ASKED.features[:1],
    "the largest": np.repeat(np.array([[32_767], [-32_768]], np.int16), DIMENSION, axis=1),
}


@pytest.mark.parametrize("asked", QUESTIONS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("learner", LEARNERS)
def test_records_of_every_kind_cast_one_vote_per_question_for_a_class_that_there_is(
    learner: str, kind: str, asked: str
) -> None:
    """Warnings are errors here: no number overflows, and none is lost."""
    records, batch = records_of(*KINDS[kind]), QueryBatch(QUESTIONS[asked])
    votes = answer(task_of(learner), batch, records)
    assert (votes.sum(axis=1) == 1).all()
    assert not len(records) or set(votes.argmax(axis=1).tolist()) <= set(records.labels.tolist())
    assert np.array_equal(votes, answer(task_of(learner), batch, records))


@pytest.mark.parametrize("asked", QUESTIONS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("learner", LEARNERS)
@pytest.mark.parametrize("most", [1, 2, 9])
def test_attributes_get_at_most_tau_votes_and_none_that_no_record_has(
    learner: str, kind: str, asked: str, most: int
) -> None:
    features, labels = KINDS[kind]
    records, batch = records_of(features, attributes(labels)), QueryBatch(QUESTIONS[asked])
    task = task_of(learner, classes=["a", "b", "c", "d"], attributes_per_record=most)
    votes = answer(task, batch, records)
    assert votes.max(initial=0) <= 1
    assert (votes.sum(axis=1) <= most).all()
    assert not votes[:, ~records.labels.any(axis=0)].any()
    # A smaller cap keeps the first of those that a larger one keeps.
    if most == 9:
        capped = answer(task.model_copy(update={"attributes_per_record": 1}), batch, records)
        assert np.array_equal(capped, votes * (np.cumsum(votes, axis=1) <= 1))


@pytest.mark.parametrize("learner", LEARNERS)
def test_learners_learn_classes_and_attributes(learner: str) -> None:
    features, labels = drawn(90, 4)
    shown, truth = drawn(QUERIES, 9)
    said = answer(task_of(learner), QueryBatch(shown), records_of(features, labels)).argmax(axis=1)
    assert (said == truth).mean() > 0.8
    task = task_of(learner, classes=["a", "b", "c", "d"], attributes_per_record=4)
    several = answer(task, QueryBatch(shown), records_of(features, attributes(labels)))
    assert (several == attributes(truth)).mean() > 0.8


def test_fitted_to_questions_of_another_camera_a_network_labels_more_of_them_right() -> None:
    features, labels = drawn(90, 4)
    shown, truth = drawn(QUERIES, 9, moved=0.7)
    right = {
        learner: (answer(task_of(learner), QueryBatch(shown), records_of(features, labels)).argmax(axis=1) == truth)
        for learner in ("network", "adapted")
    }
    assert right["adapted"].mean() > right["network"].mean() + 0.2


@pytest.mark.parametrize(("learner", "trainings"), [("network", 1), ("adapted", 2)])
def test_a_model_that_reads_the_questions_is_kept_for_its_batch_and_another_for_its_task(
    learner: str, trainings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []
    monkeypatch.setattr(network, "train", lambda *given, **named: (made.append(given), train(*given, **named))[1])
    models, records, task = ModelStore(), records_of(*drawn(30, 2)), task_of(learner)
    parts = [QueryBatch(BATCH_ASKED.features[:20]), QueryBatch(BATCH_ASKED.features[20:], 20)]
    for _ in range(2):
        for batch in parts:
            answer(task, batch, records, models=models)
    assert len(made) == trainings
    # After a deletion the next round's model is there already, or belongs to questions that are not there yet.
    assert models.tasks() == ((task,) if learner == "network" else ())


@settings(max_examples=60, deadline=None)
@given(
    learner=st.sampled_from(LEARNERS),
    most=st.none() | st.integers(1, 5),
    classes=st.integers(2, 4),
    seed=st.integers(0, 2**32 - 1),
    change=st.sampled_from(["gone", "replaced"]),
)
def test_a_record_that_goes_or_is_replaced_moves_the_votes_within_the_bound(
    learner: str, most: int | None, classes: int, seed: int, change: str
) -> None:
    from tests.labeler.tasks import check_change

    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 6))
    task = task_of(learner, classes=[f"c{number}" for number in range(classes)], attributes_per_record=most)
    features = quantize(rng.normal(size=(count + 1, DIMENSION)))
    labels = rng.integers(0, classes, count + 1) if most is None else rng.integers(0, 2, (count + 1, classes))
    other = slice(1, count) if change == "gone" else slice(1, count + 1)
    with pytest.MonkeyPatch.context() as hurried:
        hurried.setattr(network, "STEPS", 8)
        one, two = (
            answer(task, BATCH_ASKED, records_of(features[part], labels[part])) for part in (slice(count), other)
        )
    check_change(task, "instance", QUERIES, one - two)
    check_change(task, "agent", QUERIES, one)


@pytest.mark.parametrize("is_several", [False, True])
@pytest.mark.parametrize("questions", [None, BATCH_ASKED.features])
def test_each_step_works_on_as_many_rows_whatever_there_are(
    is_several: bool, questions: NDArray[np.int16] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, ...]] = []
    for name in ("softmax_slopes", "logistic_slopes"):
        slopes = getattr(network, name)
        monkeypatch.setattr(
            network, name, lambda said, truth, slopes=slopes: seen.append(said.shape) or slopes(said, truth)
        )
    for count in (0, 1, 7, 2_000):
        features, labels = drawn(count, 5)
        records = records_of(features, attributes(labels) if is_several else labels)
        train(records.trainable(None), questions, num_classes=4, is_several=is_several)
        assert seen == [(BATCH, 4)] * network.STEPS
        seen.clear()


def test_no_task_that_has_room_for_a_head_lacks_it_for_a_network() -> None:
    """Of at most 32,000 classes; `check_head` refuses by the weights of a head alone."""
    from labeler.methods.ensemble import MOST_HEAD, MOST_SQUARE

    dimensions = np.arange(1, int(MOST_SQUARE**0.5))
    classes = np.minimum(32_000, MOST_HEAD // (dimensions + 1))
    weights = HIDDEN * (dimensions + 1) + (HIDDEN + 1) * classes
    assert weights.max() <= MOST_HEAD
    check_head(task_of("network"), int(dimensions[-1]))


def test_numbers_of_a_model_lie_on_its_grid() -> None:
    records = records_of(*drawn(30, 2))
    terms = VoterTerms("adapted", CLASSES, False)
    found = Trainer().voter(records.trainable(None), BATCH_ASKED.features, terms=terms)
    assert found.shape == (DIMENSION + 1 + CLASSES, HIDDEN + 1)
    assert found.dtype == np.int64
    assert 1 < np.abs(found).max() / GRID < 2**20
