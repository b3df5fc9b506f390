"""Steps over secret samples: what one record, one agent and a coin can change, and what comes of it without noise."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feature_store.query_selection import axis_rows, model_rows
from labeler.errors import BadData, InvalidSetting, PrivacyRefusal
from labeler.linear_model import model_before
from labeler.methods.federated import StepTerms, check_model, on_grid, step_sum, step_terms
from labeler.randomness import keyed_source
from labeler.records import PublicAxes, Records, Rows
from labeler.release import Release, check_ballots
from labeler.tally import QueryBatch
from labeler.task import Task
from tests.labeler.tasks import make_task
from tests.workers.answer import answer as answer_of
from workers.learning.linear import clipped_slopes, coins, probabilities, rows_on_grid, sampled_gradients

DIMENSION, CLASSES = 12, 3
RNG = np.random.default_rng(5)
CENTRES = RNG.normal(size=(CLASSES, DIMENSION))


def images(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Features as a shard holds them, and their labels."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, count)
    raw = CENTRES[labels] + rng.normal(size=(count, DIMENSION))
    raw /= np.linalg.norm(raw, axis=1, keepdims=True)
    return np.rint(2048 * raw).astype(np.int16), labels.astype(np.int16)


PUBLIC = images(60, 1)[0]


def task(axes: int | None = None, **sampled: object) -> Task:
    training = {
        "min_records": 40,
        "regularisation": 1e-3,
        "iterations": 5,
        "radius": 25.0,
        "clip_norm": sampled.pop("clip_norm", 1.0),
        "sampled": {"rate": 0.5, "learning_rate": 2.0, "momentum": 0.5} | sampled,
    } | ({} if axes is None else {"axes": axes})
    rows = (DIMENSION if axes is None else axes) + 1
    fields = {"method": "federated", "sigma_votes": 3.0, "delta": 1e-5, "agents": 2, "max_queries": 5 * rows}
    return make_task(**fields, training=training)


def records(count: int, seed: int = 2) -> Records:
    features, labels = images(count, seed)
    return Records(features, np.arange(count, dtype=np.int64), labels, "v")


def batch_of(asked: Task, model: np.ndarray, step: int = 0) -> QueryBatch:
    axes = asked.training.axes
    rows = model_rows(DIMENSION) if axes is None else axis_rows(PUBLIC, axes)
    return QueryBatch(rows, step * asked.rows, model)


def some_model(asked: Task, seed: int = 3, size: float = 3.0) -> np.ndarray:
    return on_grid(np.random.default_rng(seed).normal(size=(asked.rows, CLASSES)) * size)


class Drawn:
    """A source of given coins."""

    is_seeded = True

    def __init__(self, says_yes: np.ndarray) -> None:
        self._yes = says_yes

    def uint64(self, count: int) -> np.ndarray:
        assert count == len(self._yes)
        return np.where(self._yes, np.uint64(0), np.uint64(2**64 - 1))

    def bytes(self, count: int) -> bytes:
        raise AssertionError(count)


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 60),
    seed=st.integers(0, 10**6),
    axes=st.sampled_from([None, 4]),
    clip=st.sampled_from([0.05, 1.0, 3.0]),
    size=st.sampled_from([0.0, 1.0, 30.0, 1e4]),
)
def test_one_record_moves_an_agents_numbers_on_the_grid_by_at_most_the_clip(count, seed, axes, clip, size) -> None:
    asked = task(axes, clip_norm=clip)
    whole, model = records(count, seed), some_model(asked, seed, size)
    yes = np.random.default_rng(seed).random(count) < 0.7
    gone = int(np.random.default_rng(seed + 1).integers(count))
    kept = np.arange(count) != gone
    less = Records(whole.all_features[kept], whole.all_record_ids[kept], whole.all_labels[kept], "w")
    with_it = answer_of(asked, batch_of(asked, model), whole, source=Drawn(yes))
    without = answer_of(asked, batch_of(asked, model), less, source=Drawn(yes[kept]))
    spec = step_sum(asked)
    moved = float(np.linalg.norm((with_it - without).astype(float)))
    # Rounding to the grid is in the price, and is all that is added to the clip.
    assert moved <= spec.scale * (1 + 1e-9) + np.sqrt(spec.dimension)
    if not yes[gone]:
        assert moved == 0
    check_ballots(with_it, asked)


def test_the_gradient_of_a_record_is_the_same_bits_whoever_stands_beside_it() -> None:
    terms = step_terms(task())
    rng = np.random.default_rng(8)
    rows = np.trunc(rng.normal(size=(701, terms.rows)) * 2**18)
    labels, model = rng.integers(0, CLASSES, 701), on_grid(rng.normal(size=(terms.rows, CLASSES)) * 9)
    together = clipped_slopes(rows, labels, model, terms)
    for alone in (0, 1, 350, 699, 700):
        one = clipped_slopes(rows[alone : alone + 1], labels[alone : alone + 1], model, terms)
        assert np.array_equal(one[0], together[alone])
    shuffled = rng.permutation(701)
    assert np.array_equal(clipped_slopes(rows[shuffled], labels[shuffled], model, terms), together[shuffled])


@pytest.mark.parametrize("axes", [None, 4])
def test_without_noise_steps_are_those_of_plain_dp_fedsgd(axes) -> None:
    asked = task(axes, clip_norm=0.7)
    agents = [records(50, 20), records(35, 21)]
    spec, terms, releases, plain = step_sum(asked), step_terms(asked), [], np.zeros((asked.rows, CLASSES))
    speed = np.zeros_like(plain)
    rng = np.random.default_rng(3)
    for step in range(asked.steps):
        model = model_before(asked, releases)
        drawn = [rng.random(len(one)) < 0.5 for one in agents]
        answers = [
            answer_of(asked, batch_of(asked, model, step), one, source=Drawn(yes))
            for one, yes in zip(agents, drawn, strict=True)
        ]
        opened = sum(answers) / spec.scale
        releases.append(
            Release(
                kind="histogram",
                labels=opened.argmax(axis=1).astype(np.int16),
                noisy_votes=opened,
                contributors=frozenset({"a", "b"}),
                is_seeded=True,
            )
        )
        assert np.abs(model - plain).max() < 1e-3
        # The oracle: nothing of this project's arithmetic, double precision and an exponential.
        gradient = np.zeros_like(plain)
        for one, yes in zip(agents, drawn, strict=True):
            z = one.all_features / 2048
            if axes is not None:
                rows = axis_rows(PUBLIC, axes).astype(float)
                z = (one.all_features - rows[-1]) @ rows[:-1].T
                z /= np.linalg.norm(z, axis=1, keepdims=True)
            z = np.column_stack([z / np.maximum(1, np.linalg.norm(z, axis=1, keepdims=True)), np.ones(len(z))])
            scores = z @ plain
            p = np.exp(scores - scores.max(axis=1, keepdims=True))
            p = p / p.sum(axis=1, keepdims=True) - np.eye(CLASSES)[one.all_labels]
            for row, slope in zip(z[yes], p[yes], strict=True):
                g = np.outer(row, slope)
                gradient += g * min(1, 0.7 / np.linalg.norm(g))
        mean = gradient / (0.5 * 2 * 40) + 1e-3 * plain
        speed = 0.5 * speed - 2.0 * mean
        plain = plain + speed
    assert np.abs(model_before(asked, releases) - plain).max() < 1e-3
    assert terms.rate == Fraction(1, 2)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), says_yes=st.booleans(), learning_rate=st.sampled_from([0.1, 50.0, 1e5]))
def test_an_agent_as_the_unit_answers_with_at_most_one_clip_or_with_zero(seed, says_yes, learning_rate) -> None:
    asked = task(unit="agent", local_steps=3, learning_rate=learning_rate, clip_norm=0.2)
    yes = Drawn(np.array([says_yes]))
    answer = answer_of(asked, batch_of(asked, some_model(asked, seed)), records(30, seed), source=yes)
    spec = step_sum(asked)
    length = float(np.linalg.norm(answer.astype(float)))
    assert length <= spec.scale * spec.largest_norm + np.sqrt(spec.dimension) / 2
    assert (length > 0) == says_yes


def test_an_agent_without_records_answers_with_zeros() -> None:
    none = Records(np.zeros((0, DIMENSION), np.int16), np.zeros(0, np.int64), np.zeros(0, np.int16), "v")
    for asked in (task(), task(unit="agent")):
        source = keyed_source(bytes(32), is_seeded=True)
        answer = answer_of(asked, batch_of(asked, np.zeros((asked.rows, CLASSES))), none, source=source)
        assert not answer.any()


def test_coins_come_up_with_the_stated_chance_and_the_same_key_tosses_the_same() -> None:
    terms = StepTerms(3, 4, 1.0, "record", 10.0, Fraction(0.1))
    first, again = (coins(keyed_source(b"k" * 32, is_seeded=True), 200_000, terms) for _ in range(2))
    assert np.array_equal(first, again)
    # Seven standard deviations: one false alarm in 10^11.
    assert abs(first.mean() - 0.1) < 7 * np.sqrt(0.09 / 200_000)
    assert Fraction(terms.threshold, 2**64) <= terms.rate
    assert coins(keyed_source(b"k" * 32, is_seeded=True), 5, StepTerms(3, 4, 1.0, "record", 1.0, Fraction(1))).all()


def test_probabilities_are_a_softmax() -> None:
    scores = np.random.default_rng(0).normal(size=(50, 7)) * np.array([[1e-9], [1], [30], [1e4], [1e9]]).repeat(10, 0)
    exact = np.exp(scores - scores.max(axis=1, keepdims=True))
    exact /= exact.sum(axis=1, keepdims=True)
    assert np.allclose(probabilities(scores), exact, atol=1e-12)


def test_the_ball_holds_an_agents_sum_however_many_records_it_has() -> None:
    asked = task()
    terms = step_terms(asked)
    features = np.tile(images(1, 4)[0], (500, 1))
    rows = Rows.of(features.astype(np.float32) / 2048, np.zeros(500, np.int16))
    drawn = Drawn(np.ones(500, bool))
    vector = sampled_gradients(
        rows_on_grid(rows, None, num_classes=CLASSES), 500, some_model(asked), terms=terms, source=drawn
    )
    assert np.linalg.norm(vector) == pytest.approx(25.0)


def test_a_model_that_was_shortened_is_one_that_may_be_asked_about() -> None:
    asked = task()
    for seed, size in itertools.product(range(50), (1.0, 1e5, 1e9)):
        model = on_grid(np.random.default_rng(seed).normal(size=(asked.rows, CLASSES)) * size)
        assert np.array_equal(on_grid(model), model)
        check_model(model, asked)
        assert np.linalg.norm(model, axis=0).max() <= 2.0**15


@pytest.mark.parametrize("number", [np.nan, np.inf, 1e300, 2.0**20, 1e-9])
def test_after_the_charge_a_model_beyond_its_grid_gets_silence_whatever_the_records_are(number: float) -> None:
    asked = task()
    model = np.zeros((asked.rows, CLASSES))
    model[0, 0] = number
    for count in (0, 1, 30):
        with pytest.raises(BadData, match="the public model of a step"):
            answer_of(asked, batch_of(asked, model), records(count), source=keyed_source(bytes(32), is_seeded=True))


def test_numbers_beyond_the_clip_and_steps_without_a_model_are_refused() -> None:
    asked = task()
    spec = step_sum(asked)
    beyond = np.zeros((asked.rows, CLASSES), np.int64)
    beyond[0, 0] = int(26 * spec.scale)
    with pytest.raises(PrivacyRefusal, match="longer than a clipped sum"):
        check_ballots(beyond, asked)
    bare = QueryBatch(model_rows(DIMENSION))
    with pytest.raises(InvalidSetting, match="asked with the public model"):
        answer_of(asked, bare, records(5), source=keyed_source(bytes(32), is_seeded=True))
    assert PublicAxes(axis_rows(PUBLIC, 4)).count == 4
