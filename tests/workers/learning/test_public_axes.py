"""Public axes in front of class sums and of a linear model: exact, of each record by itself, priced for what moves."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from feature_store.query_selection import axis_rows, select_queries
from feature_store.results.models import LINEAR, model_file, read_model
from feature_store.rows import quantize
from feature_store.shard import Shard
from labeler.errors import BadData, InvalidSetting, InvalidTask, PrivacyRefusal
from labeler.linear_model import LinearModel, read_means, released_model
from labeler.methods.blind_average import (
    ALONG,
    COUNTED,
    FINE,
    LinearTerms,
    MeanTerms,
    linear_terms,
    model_terms,
    weight_sum,
)
from labeler.planning import price
from labeler.privacy_card import card_in_words, privacy_card
from labeler.records import FEATURE_ONE, PublicAxes, Records, Rows, axes_of
from labeler.release import Release
from labeler.tally import QueryBatch
from labeler.task import Task, parse_task
from tests.answering import AnsweringAgent
from tests.labeler.tasks import make_task
from tests.workers.answer import answer as answer_of
from tests.workers.builders import agent_of, shard_of_rows
from workers.learning.linear import class_sums, whole_rows, whole_sums

DIMENSION, AXES, CLASSES = 12, 5, ("a", "b", "c")
MEANS = {"learner": "means", "axes": AXES}
PUBLIC = quantize(np.random.default_rng(2).normal(size=(80, DIMENSION)) + 3)
Features = NDArray[np.int16]


def task(training: dict[str, Any] | None = None, **fields: Any) -> Task:
    given_fields = {"classes": CLASSES, "method": "blind-average", "sigma_votes": 3.0, "agents": 1}
    given_fields |= {"max_queries": AXES + 1, "backbone_fingerprint": "f", "training": MEANS | (training or {})}
    return make_task(**given_fields | fields)


def records(features: Features, labels: NDArray[np.int16], version: str = "v") -> Records:
    return Records(features, np.arange(len(labels)), labels, version)


def draw(
    seed: int, count: int, *, largest: int = 2048, dimension: int = DIMENSION, axes: int = AXES
) -> tuple[PublicAxes, Features, NDArray[np.int16]]:
    rng = np.random.default_rng(seed)
    seen = PublicAxes(rng.integers(-largest, largest + 1, (axes + 1, dimension)).astype(np.int16))
    features = rng.integers(-2048, 2049, (count, dimension)).astype(np.int16)
    return seen, features, rng.integers(0, 3, count).astype(np.int16)


def exact_row(axes: PublicAxes, row: NDArray[np.int16]) -> tuple[list[float], list[int]]:
    """A row by integers of any length: at length one, and as class sums count it, in whole FINE-ths."""
    along = [
        sum(int(a) * (int(x) - int(m)) for a, x, m in zip(axis, row, axes.rows[-1], strict=True))
        for axis in axes.rows[:-1]
    ]
    squares = sum(one * one for one in along) or 1
    whole = [int(math.copysign(math.isqrt(15 * one * one * FINE * FINE // (16 * squares)), one)) for one in along]
    return [one / squares**0.5 for one in along], [*whole, FINE // 4]


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    dimension=st.integers(1, 40),
    count=st.integers(1, 9),
    largest=st.sampled_from([1, 3, 2048, 32767]),
    block=st.integers(1, 25),
)
def test_a_record_is_mapped_by_itself_and_to_what_exact_arithmetic_says(
    seed: int, dimension: int, count: int, largest: int, block: int
) -> None:
    """To length one, and in class sums to the same whole numbers alone and among others; also at the edge of int16."""
    axes, features, labels = draw(seed, 25, largest=largest, dimension=dimension, axes=count)
    features[3] = np.clip(axes.rows[-1], -2048, 2048)
    rows = features / np.float32(FEATURE_ONE)
    together, whole = axes(rows), whole_rows(axes, rows)
    lengths = np.linalg.norm(together, axis=1)
    assert np.all((np.abs(lengths - 1) < 1e-12) | (lengths == 0))
    for at in range(0, 25, block):
        assert np.abs(axes(rows[at : at + block]) - together[at : at + block]).max() < 2.0**-48
        assert np.array_equal(whole_rows(axes, rows[at : at + block]), whole[at : at + block])
    for number, row in enumerate(features):
        exact, exact_whole = exact_row(axes, row)
        assert np.allclose(together[number], exact, rtol=0, atol=1e-14)
        assert np.abs(whole[number] - exact_whole).max() <= 1
    terms = MeanTerms(3, count, 1e6)
    found = whole_sums(Rows.of(rows, labels), terms=terms, axes=axes)
    assert np.array_equal(found, [whole[labels == one].sum(axis=0) for one in range(3)])
    order = np.random.default_rng(seed).permutation(25)
    assert np.array_equal(found, whole_sums(Rows.of(rows[order], labels[order]), terms=terms, axes=axes))


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    count=st.integers(1, 60),
    radius=st.sampled_from([0.3, 1.0, 2.5, 20.0, 1e9]),
    kept=st.sampled_from([None, 1, 100]),
    alike=st.booleans(),
)
def test_a_record_that_comes_or_goes_moves_what_an_agent_sends_by_at_most_what_is_charged(
    seed: int, count: int, radius: float, kept: int | None, alike: bool
) -> None:
    axes, features, labels = draw(seed, count)
    if alike:  # all the same but the last, which lies opposite: the ball binds, and the last turns the sum most
        features[:-1], labels[:] = features[0], labels[0]
    count = count if kept is None else min(count, kept)
    asked = task({"radius": radius} | ({} if kept is None else {"max_records": kept}))
    terms, spec, batch = model_terms(asked), weight_sum(asked), QueryBatch(axes.rows)
    assert isinstance(terms, MeanTerms)
    sent = [answer_of(asked, batch, records(features[:n], labels[:n], str(n))) for n in (count, count - 1)]
    moved = sent[0] - sent[1]
    assert int((moved * moved).sum()) <= spec.event("instance").squared_sensitivity
    assert np.abs(moved).max() <= spec.event("instance").largest_change
    assert all(int((one * one).sum()) <= spec.event("agent").squared_sensitivity for one in sent)
    exact = [
        class_sums(Rows.of(features[:n] / FEATURE_ONE, labels[:n]), terms=terms, axes=axes) for n in (count, count - 1)
    ]
    assert np.linalg.norm(exact[0] - exact[1]) <= terms.sensitivity
    if radius == 1e9 and kept is None:
        assert np.linalg.norm(exact[0] - exact[1]) > 1 - 1e-6


def test_a_cap_per_person_may_replace_a_record_which_moves_twice_as_much_and_is_charged_so() -> None:
    seen = PublicAxes(np.vstack([2048 * np.eye(AXES, DIMENSION), np.zeros(DIMENSION)]).astype(np.int16))
    up, down = np.zeros((1, DIMENSION), np.int16), np.zeros((1, DIMENSION), np.int16)
    up[0, 0], down[0, 0] = 2000, -7
    capped, free = task(records_per_person=1), task()
    sent = {}
    for asked, row in itertools.product((capped, free), (up, down)):
        answer = answer_of(asked, QueryBatch(seen.rows), records(row, np.zeros(1, np.int16)))
        sent[asked.digest, row[0, 0]] = answer / weight_sum(asked).scale * model_terms(asked).sensitivity
    for asked in (capped, free):  # the constant that counts them stays
        assert np.linalg.norm(sent[asked.digest, 2000] - sent[asked.digest, -7]) == pytest.approx(2 * ALONG, abs=1e-3)
    assert (model_terms(free).sensitivity, model_terms(capped).sensitivity) == pytest.approx((1, 2), abs=1e-6)
    # Equal multipliers: of the capped one twice the noise is added, in records.
    noise = [weight_sum(one).sigma * model_terms(one).sensitivity for one in (free, capped)]
    assert noise[1] == pytest.approx(2 * noise[0], rel=1e-6)
    assert price(capped).person is not None
    words = [one.traits.one_record(one) or "" for one in (free, capped)]
    assert "at most 1" in words[0]
    assert "at most 2" in words[1]


def test_the_price_is_that_of_any_model_of_this_multiplier_and_of_an_agent_that_of_its_ball() -> None:
    means = price(task())
    softmax = price(task({"learner": "softmax", "min_records": 20, "regularisation": 0.5}))
    assert means.instance.epsilon == pytest.approx(softmax.instance.epsilon, rel=1e-3)
    prices = [price(task({"radius": radius})).agent.epsilon for radius in (1.0, 4.0)]
    assert prices[0] == pytest.approx(means.instance.epsilon, rel=0.01)
    assert prices[1] > 3 * prices[0]
    kept = price(task({"radius": 1e6, "max_records": 4}))
    assert kept.agent.epsilon == pytest.approx(prices[1], rel=1e-6)
    assert model_terms(task({"max_records": 4}, records_per_person=2)).largest_norm == pytest.approx(2**20)
    # Far beyond what noise for one record could hide: nothing is promised for an agent, and nothing is None.
    assert price(task()).agent.epsilon > 1e3


def test_all_records_are_summed_where_no_bound_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A learner takes the first million and pays for replacing; here none is cut off, so none is let in."""
    monkeypatch.setattr("labeler.methods.sensitivity.MOST_RECORDS", 10)
    axes, features, _ = draw(3, 30)
    answers = [answer_of(task(), QueryBatch(axes.rows), records(features[:n], np.zeros(n, np.int16))) for n in (30, 29)]
    moved = (answers[0] - answers[1]) / weight_sum(task()).scale
    expected = np.array(exact_row(axes, features[29])[1]) / FINE
    assert np.allclose(moved[:, 0], expected, atol=2 / weight_sum(task()).scale)
    assert not moved[:, 1:].any()


def test_the_released_model_names_the_class_of_the_largest_posterior_and_so_does_its_file(tmp_path: Path) -> None:
    rng, rows, asked = np.random.default_rng(1), axis_rows(PUBLIC, AXES), task(sigma_votes=0.5)
    labels = np.repeat(np.arange(3), (60, 20, 5)).astype(np.int16)
    features = quantize(rng.normal(size=(85, DIMENSION)) + 3 + 4 * np.eye(3, DIMENSION)[labels])
    answer = answer_of(asked, QueryBatch(rows), records(features, labels))
    noisy = weight_sum(asked).open(answer)
    noisy += rng.normal(scale=0.5, size=noisy.shape)
    release = Release("histogram", noisy.argmax(axis=1).astype(np.int16), noisy, frozenset("a"), True)
    model = released_model(asked, [release], rows)
    terms = model_terms(asked)
    z = (PUBLIC.astype(float) - rows[-1]) @ rows[:-1].T
    z /= np.linalg.norm(z, axis=1, keepdims=True)
    read = read_means(noisy * terms.sensitivity, asked.sum_sigma_votes(1) * terms.sensitivity)
    assert np.allclose(model.scores(PUBLIC), np.hstack([z, np.ones((len(z), 1))]) @ read, atol=1e-12)
    # The class of few records is named, too.
    assert (model.predict(features) == labels).mean() > 0.7
    assert (model.predict(features)[labels == 2] == 2).any()
    card = privacy_card(asked, price(asked), is_seeded=False)
    assert "at most 1" in card["one_record"]
    assert "sums of its records by class" in card["contribution"]
    assert card["one_record"] in card_in_words(card)
    path = tmp_path / "model.safetensors"
    path.write_bytes(model_file(model.arrays, kind=LINEAR, classes=CLASSES, card=card))
    read = read_model(path).predict_proba(PUBLIC)
    assert np.array_equal(read.argmax(axis=1), model.predict(PUBLIC))
    again = LinearModel.of(model.arrays, model_terms(asked))
    assert np.array_equal(again.scores(PUBLIC), model.scores(PUBLIC))
    silent = Release("histogram", release.labels, np.zeros_like(noisy), frozenset("a"), True)
    nothing = released_model(asked, [silent], rows).scores(PUBLIC)
    assert np.array_equal(nothing, np.broadcast_to(nothing[:1, :1], nothing.shape))


def drawn_sums(
    rng: np.random.Generator, sizes: list[int], *, shift: float = 0.0, noise: float = 0.0
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
    """Sums of records of three classes at corners of eight axes, moved by a shift, and rows to label; of length one."""
    labels = np.repeat(np.arange(3), sizes)
    rows = 0.45 * rng.normal(size=(len(labels), 8)) + np.eye(3, 8)[labels]
    seen = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    rows = rows + shift * np.eye(8)[7]
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    counted = np.hstack([ALONG * rows, np.full((len(rows), 1), COUNTED)])
    sums = counted.T @ np.eye(3)[labels]
    return sums + noise * rng.normal(size=sums.shape), np.hstack([seen, np.ones((len(seen), 1))]), labels


def test_sums_without_noise_are_read_as_means_and_shares() -> None:
    """Against linear discriminant analysis by hand: equal variances, means of rows, shares of records."""
    sums, rows, labels = drawn_sums(np.random.default_rng(1), [900, 300, 40])
    weights = read_means(sums, 0.0)
    assert np.exp(weights[-1] + weights[:-1].T @ np.zeros(8)).shape == (3,)
    means = np.stack([rows[labels == one, :-1].mean(axis=0) for one in range(3)], axis=1)
    apart = means - rows[:, :-1].mean(axis=0)[:, None]
    within = (1 - (np.array([900, 300, 40]) / 1240) @ np.square(means).sum(axis=0)) / 8
    expected = np.log(np.array([900, 300, 40]) / 1240) - np.square(apart).sum(axis=0) / (2 * within)
    assert np.allclose(weights[:-1], apart / within, atol=1e-9)
    assert np.allclose(weights[-1], expected, atol=1e-9)


@pytest.mark.parametrize(
    ("sizes", "shift", "noise", "gain"),
    [
        ([900, 300, 40], 0.0, 0.0, 0.005),
        ([900, 300, 40], 0.0, 5.0, 0.005),
        ([1000, 30, 30], 0.0, 3.0, 0.02),
        ([400, 400, 400], 0.0, 5.0, -0.005),
        ([400, 400, 400], 1.5, 5.0, -0.005),
    ],
)
def test_unequal_classes_and_records_that_all_lie_off_are_labeled_as_well_as_the_best_cosine_or_better(
    sizes: list[int], shift: float, noise: float, gain: float
) -> None:
    better = []
    for seed in range(20):
        sums, rows, labels = drawn_sums(np.random.default_rng(seed), sizes, shift=shift, noise=noise)
        found = (rows @ read_means(sums, noise)).argmax(axis=1)
        directions = sums[:-1] / np.linalg.norm(sums[:-1], axis=0)
        cosine = (rows[:, :-1] @ directions).argmax(axis=1)
        better.append((found == labels).mean() - (cosine == labels).mean())
    assert np.mean(better) > gain


@given(
    sums=arrays(np.float64, (5, 3), elements=st.floats(-1e6, 1e6)),
    sigma=st.sampled_from([0.0, 1e-3, 1.0, 50.0, 1e6]),
)
def test_whatever_noise_makes_of_the_sums_they_are_read_as_finite_numbers(
    sums: NDArray[np.float64], sigma: float
) -> None:
    read = read_means(sums, sigma)
    assert np.isfinite(read).all()
    assert np.isfinite(read_means(0 * sums, sigma)).all()


def test_a_task_of_means_says_nothing_of_training_and_older_tasks_are_written_as_they_were() -> None:
    asked = task()
    assert parse_task(json.loads(asked.model_dump_json())).digest == asked.digest
    assert parse_task(asked.model_dump()).digest == asked.digest
    assert task({"min_records": 1, "regularisation": 1.0}).digest == asked.digest
    older = task({"learner": "softmax", "min_records": 20, "regularisation": 0.5})
    assert older.digest == "49570f8a8f6af6e5c8c48510f2d973f453ee9eef6ad5bdc945d45179110c8a3a"
    assert isinstance(model_terms(older), LinearTerms)
    for field, value in {"min_records": 5, "regularisation": 0.1, "clip_norm": 2.0, "iterations": 9}.items():
        with pytest.raises(InvalidTask, match=f"{field} means nothing for learner means"):
            task({field: value})
    assert task({"axes": None}).digest == asked.digest
    with pytest.raises(InvalidTask, match="min_records"):
        task({"learner": "softmax", "regularisation": 0.5})
    with pytest.raises(InvalidTask, match="learner must be softmax for method aux-distill, found means"):
        task(method="aux-distill", max_queries=400)
    with pytest.raises(InvalidSetting, match="max_queries = 6, found 7"):
        price(task(max_queries=7))
    with pytest.raises(InvalidSetting, match="trains no linear model"):
        linear_terms(asked)
    for wrong in ({"num_classes": 1}, {"axes": 0}, {"radius": 0.0}, {"radius": math.inf}, {"max_records": 0}):
        with pytest.raises(InvalidSetting):
            MeanTerms(**({"num_classes": 3, "axes": 2, "radius": 1.0} | wrong))  # type: ignore[arg-type]


# A linear model along axes.


def linear_task(axes: int | None = AXES, **fields: Any) -> Task:
    training = {"learner": "softmax", "min_records": 20, "max_records": 40, "regularisation": 0.5, "axes": axes}
    return task(training, **fields)


def _agent(path: Path, count: int) -> AnsweringAgent:
    random = np.random.default_rng(1)
    labels = (np.arange(40) % 3).astype(np.int16)
    features = quantize(random.normal(size=(40, DIMENSION)) + 3 + 2 * np.eye(3, DIMENSION)[labels])
    shard = shard_of_rows(path, features[:count], labels[:count], classes=CLASSES, max_records=40)
    return agent_of(shard)


def test_axes_are_the_principal_ones_of_public_images_and_the_last_row_is_their_mean() -> None:
    rows = select_queries(PUBLIC, strategy="weights", count=AXES).features
    assert np.array_equal(rows, axis_rows(PUBLIC, AXES))
    assert np.abs(rows[-1] - PUBLIC.mean(axis=0)).max() <= 0.5
    centred = PUBLIC - PUBLIC.mean(axis=0)
    _, _, leading = np.linalg.svd(centred, full_matrices=False)
    found = rows[:-1] / np.linalg.norm(rows[:-1], axis=1, keepdims=True)
    assert np.abs(np.abs((found * leading[:AXES]).sum(axis=1)) - 1).max() < 1e-4
    # Shorter along longer axes: partly whitened; the longest row is as long as a feature.
    assert np.all(np.diff(np.linalg.norm(rows[:-1], axis=1)) > -2)
    assert np.linalg.norm(rows[:-1], axis=1).max() == pytest.approx(2048, abs=3)
    with pytest.raises(InvalidSetting, match="asks for 13 axes"):
        axis_rows(PUBLIC, DIMENSION + 1)
    with pytest.raises(InvalidSetting, match="which have 3"):
        axis_rows(PUBLIC[:4], 4)


def test_another_map_is_another_question_and_is_answered_anew(tmp_path: Path) -> None:
    agent, task = _agent(tmp_path / "a", 40), linear_task()
    rows = axis_rows(PUBLIC, AXES)
    turned = rows.copy()
    turned[0] = -turned[0]
    one, other = (agent.ballots(task, QueryBatch(asked)) for asked in (rows, turned))
    assert np.abs(one[0] + other[0]).max() <= 1
    assert np.abs(one[1:] - other[1:]).max() <= 1


def test_the_released_model_and_its_arrays_look_along_the_same_axes(tmp_path: Path) -> None:
    agent, task, rows = _agent(tmp_path / "a", 40), linear_task(sigma_votes=1e-3), axis_rows(PUBLIC, AXES)
    opened = weight_sum(task).open(agent.ballots(task, QueryBatch(rows)))
    release = Release("histogram", opened.argmax(axis=1).astype(np.int16), opened, frozenset("a"), True)
    model = released_model(task, [release], rows)
    shard = Shard.open(tmp_path / "a")
    assert (model.predict(np.asarray(shard.features)) == shard.labels).mean() > 0.6
    again = LinearModel.of(model.arrays, linear_terms(task))
    assert np.array_equal(again.scores(PUBLIC), model.scores(PUBLIC))
    # A reader of the file computes the same by hand.
    z = (PUBLIC.astype(float) - rows[-1]) @ rows[:-1].T
    z *= np.sqrt(0.99) / np.linalg.norm(z, axis=1, keepdims=True)
    assert np.allclose(model.scores(PUBLIC), np.hstack([z, np.full((80, 1), 0.1)]) @ model.weights)
    for missing in (None, rows[1:]):
        with pytest.raises(BadData, match="rows of them are missing"):
            released_model(task, [release], missing)
    assert axes_of(linear_task(None, max_queries=13), None) is None


def test_the_price_is_that_of_any_model() -> None:
    plain = price(linear_task(None))
    assert price(linear_task()).instance.epsilon == plain.instance.epsilon


def test_axes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="max_queries = 6, found 7"):
        price(linear_task(max_queries=7))
    with pytest.raises(InvalidTask, match="only means something for method blind-average"):
        linear_task(method="aux-distill", max_queries=400)
    wide = linear_task(13, max_queries=14)
    with pytest.raises(PrivacyRefusal, match="looks along 13 axes"):
        _agent(tmp_path / "a", 30).check_task(wide, (14,))
    with pytest.raises(BadData, match="axes and a centre"):
        PublicAxes(np.zeros((1, 3), dtype=np.int16))
