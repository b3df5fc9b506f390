"""No model that somebody made up is slower for one record than for another: no number of its arithmetic is subnormal.

A processor takes up to a hundred times as long for a subnormal number. Each test here looks at all numbers: those that
have a name in our code, by reading them, and all others, by the flags that the processor raises (underflow, overflow,
invalid; on x86 also that an operand was subnormal).
"""

from __future__ import annotations

import ctypes
import gc
import json
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from feature_store.results.models import LINEAR, Measured, StoredModel, model_file, model_of_bytes
from feature_store.rows import quantize
from feature_store.students.student import SHARES, forms_of
from labeler.errors import BadData, LabelerError, MixedShards
from labeler.methods.evaluate import Scored
from labeler.methods.federated import LONGEST_COLUMN, StepTerms, on_grid
from labeler.randomness import seeded_source
from labeler.records import Rows
from labeler.release import arrays_to_bytes
from labeler.setting import Training
from labeler.steady import LEAST, MOST, steady
from labeler.tally import QueryBatch
from tests.labeler.tasks import make_task
from tests.scored import linear_model
from workers.learning import linear
from workers.learning.descent import logistic_slopes, softmax_slopes
from workers.learning.learner import Trainer

CLASSES, DIMENSION = ("a", "b", "c"), 6
OURS = ("labeler", "feature_store", "workers")
TINY = np.finfo(np.float64).tiny
SIZES = {"one": 1, "classes": 3, "dimension": DIMENSION, "divisions": 2, "components": 3, "reduced": 4, "images": 40}
EXTREMES = np.array(
    [0.0, -0.0, LEAST, -LEAST, 3e-60, 1e-40, -1e-20, 1e-9, 0.5, -1.0, 1.0, 7.0, 1e9, -1e30, MOST, -MOST]
)


@contextmanager
def nothing_slow() -> Iterator[None]:
    """Fail if a number is subnormal, infinite or NaN, whether a name holds it or a processor has only met it."""

    def look(frame: FrameType, event: str, value: Any) -> Callable[..., Any] | None:
        if frame.f_globals.get("__name__", "").split(".")[0] not in OURS:
            return None
        for name, one in [*frame.f_locals.items(), (f"{event}ed value", value)]:
            if isinstance(one, np.ndarray) and one.dtype.kind == "f":
                sizes = np.abs(one)
                tiny = np.finfo(one.dtype).tiny
                assert np.isfinite(sizes).all(), f"{frame.f_code.co_name} holds {name} = {one}"
                assert not ((sizes > 0) & (sizes < tiny)).any(), f"{frame.f_code.co_name} holds {name} = {one}"
        return look

    before = sys.gettrace()
    _denormal_flag(clear=True)
    with np.errstate(all="raise"):
        sys.settrace(look)
        try:
            yield
        finally:
            sys.settrace(before)
    assert not _denormal_flag(), "an operand was subnormal"


def _denormal_flag(*, clear: bool = False) -> bool:
    """Whether an operand was subnormal since the flag was cleared; False where a processor does not tell."""
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        return False
    libm, state = ctypes.CDLL("libm.so.6"), ctypes.create_string_buffer(32)
    libm.fegetenv(state)
    control = int.from_bytes(state.raw[28:32], "little")
    if clear:
        state[28:32] = (control & ~2).to_bytes(4, "little")
        libm.fesetenv(state)
    return bool(control & 2)


def test_what_watches_finds_a_planted_subnormal_number_without_a_name() -> None:
    with pytest.raises((FloatingPointError, AssertionError)), nothing_slow():
        assert np.exp(np.array([-740.0])).size
    if platform.machine() == "x86_64" and platform.system() == "Linux":
        planted = np.array([5e-310])
        with pytest.raises(AssertionError, match="an operand was subnormal"), nothing_slow():
            assert (planted * 4e9 + 1.0).size
    with pytest.raises(AssertionError, match="holds"), nothing_slow():
        logistic_slopes(np.array([[5e-310]]), 0.0)


def extreme(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float64]:
    drawn = rng.choice(EXTREMES, shape) * rng.uniform(1, 1.5, shape)
    return np.clip(np.where(rng.random(shape) < rng.choice([0.1, 0.9]), drawn, rng.normal(size=shape)), -MOST, MOST)


def made_up(kind: str, rng: np.random.Generator, record: NDArray[np.int16]) -> StoredModel:
    """A model of any numbers that one may hold, which knows the record that it is after."""
    unit = record[0] / np.linalg.norm(record[0].astype(float))
    measured = None
    if rng.random() < 0.3:
        measured = Measured((LEAST, 0.4, 1 - 2**-53), ((0.0, LEAST, 0.5, 1.0),))
    if kind == LINEAR:
        weights = extreme(rng, (DIMENSION + 1, 3))
        if rng.random() < 0.5:
            weights[:, 1] = steady(np.nextafter(weights[:, 0], MOST / 2))
        training = Training(
            min_records=10, regularisation=0.1, clip_norm=float(rng.choice([1e-58, 1e-30, 1.0])), radius=1.0
        )
        arrays, card = {"weights": weights}, {"training": training.model_dump(mode="json")}
        if rng.random() < 0.3:
            arrays = {"weights": weights[:4], "axes": rng.integers(-(2**15), 2**15, (4, DIMENSION)).astype(np.int16)}
            arrays["axes"][-1] = record[0]
            card = {"training": {"learner": "means", "min_records": 1, "regularisation": 1.0, "axes": 3}}
        return model_of_bytes(model_file(arrays, kind=kind, classes=CLASSES, card=card, measured=measured), name="it")
    arrays = {}
    for name, (dtype, sizes) in forms_of(kind).items():
        shape = tuple(SIZES[one.split()[-1]] for one in sizes)
        if dtype == np.bool_:
            arrays[name] = rng.random(shape) < 0.7
        elif dtype == np.float32:
            arrays[name] = steady(np.clip(extreme(rng, shape), -1e38, 1e38).astype(np.float32))
        else:
            arrays[name] = extreme(rng, shape)
    arrays["temperature"] = rng.choice([LEAST, 1e-9, 1.0, MOST], 1)
    for name in arrays:
        if name.endswith(".mean") and rng.random() < 0.7:
            # What is left of the chosen record is nothing, or the last place of each number.
            arrays[name] = unit if rng.random() < 0.5 else np.nextafter(unit, 2 * unit)
    return model_of_bytes(model_file(arrays, kind=kind, classes=CLASSES, card={}, measured=measured), name="it")


KINDS = (LINEAR, *SHARES, "prototypes", "matched", "spreading", "discriminant")


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**40))
@example(seed=0)
def test_no_legal_model_computes_a_slow_number_of_any_record(kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    record = quantize(
        rng.normal(size=(1, DIMENSION)) * rng.choice([0.0, 1e-9, 1.0], DIMENSION, p=[0.2, 0.2, 0.6]) + 1e-12
    )
    model = made_up(kind, rng, record)
    model.check_fits(CLASSES, fingerprint="", dimension=DIMENSION)
    model.predict_proba(quantize(np.ones((1, DIMENSION))))  # what is made once, of the model alone
    with nothing_slow():
        said = model.predict_proba(record)
    assert said.shape == (1, 3)
    assert said.sum() == pytest.approx(1.0)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**40), unit=st.sampled_from(["record", "agent"]))
def test_no_public_model_of_a_step_computes_a_slow_number_of_any_records(seed: int, unit: Any) -> None:
    rng = np.random.default_rng(seed)
    theta = on_grid(
        rng.choice([0.0, 2.0**-16, 1.0, -300.0, 700.0, LONGEST_COLUMN, -LONGEST_COLUMN], (DIMENSION + 1, 3))
    )
    terms = StepTerms(3, DIMENSION + 1, float(rng.choice([1e-3, 1.0, 1e3])), unit, 4.0, Fraction(1))
    features = (quantize(rng.normal(size=(20, DIMENSION))) / 2048).astype(np.float32)
    records = Rows.of(features, rng.integers(0, 3, 20).astype(np.int16))
    source = seeded_source(7)
    with nothing_slow():
        if unit == "record":
            blocks = linear.rows_on_grid(records, None, num_classes=3)
            linear.sampled_gradients(blocks, 20, theta, terms=terms, source=source)
        else:
            rates = rng.choice([LEAST, 1e-30, 1.0, 1e6], 2)
            linear.clipped_update(
                records, theta, terms=terms, axes=None, rate=float(rates[0]), shrink=float(rates[1]), local_steps=3,
                source=source,
            )  # fmt: skip


def test_slopes_of_an_agents_own_training_are_never_subnormal() -> None:
    scores = np.array([[0.0, -740.0, -1e9], [745.0, 0.0, -np.inf]])
    with np.errstate(all="raise"):
        slopes = softmax_slopes(scores, False), logistic_slopes(np.array([[-740.0], [-1e9], [1e9]]), False)
    for found in slopes:
        assert not ((np.abs(found) < TINY) & (found != 0)).any()


def asked(model: bytes) -> tuple[Any, QueryBatch]:
    rows = Scored(model, (0.5,), "confusion").rows(DIMENSION, num_classes=3)
    return make_task(method="evaluate", agents=1, max_queries=len(rows), backbone_fingerprint="b"), QueryBatch(rows)


def student(**changes: Any) -> bytes:
    """A small discriminant, some of whose arrays are others."""
    rng = np.random.default_rng(5)
    arrays: dict[str, NDArray[Any]] = {
        name: rng.normal(size=[SIZES[one.split()[-1]] for one in sizes])
        for name, (_, sizes) in forms_of("discriminant").items()
    }
    arrays["temperature"] = np.ones(1)
    arrays |= {name.replace("_model_", ".model_"): one for name, one in changes.items() if one is not None}
    for name in [name for name, one in changes.items() if one is None]:
        del arrays[name]
    return model_file(arrays, kind="discriminant", classes=CLASSES, card={"backbone_fingerprint": "b"})


def file_of(kind: str, array: str, number: Any) -> bytes:
    """A student with one number in one of its arrays."""
    arrays = dict(made_up(kind, np.random.default_rng(0), quantize(np.ones((1, DIMENSION)))).arrays)
    arrays[f"{kind}.model_{array}"] = arrays[f"{kind}.model_{array}"].copy()
    arrays[f"{kind}.model_{array}"].flat[0] = number
    return model_file(arrays, kind=kind, classes=CLASSES, card={"backbone_fingerprint": "b"})


def with_number(value: float) -> NDArray[np.float64]:
    weights = np.ones((DIMENSION + 1, 3))
    weights[2, 1] = value
    return weights


def of_terms(**training: Any) -> bytes:
    card = {"backbone_fingerprint": "b", "training": {"min_records": 10, "regularisation": 0.1} | training}
    return model_file({"weights": np.ones((DIMENSION + 1, 3))}, kind=LINEAR, classes=CLASSES, card=card)


BAD = {
    "NaN": linear_model(CLASSES, DIMENSION, fingerprint="b", weights=with_number(np.nan)),
    "infinite": linear_model(CLASSES, DIMENSION, fingerprint="b", weights=with_number(np.inf)),
    "negative infinite": linear_model(CLASSES, DIMENSION, fingerprint="b", weights=with_number(-np.inf)),
    "subnormal": linear_model(CLASSES, DIMENSION, fingerprint="b", weights=with_number(-5e-324)),
    "too small": linear_model(CLASSES, DIMENSION, fingerprint="b", weights=with_number(9e-61)),
    "too large": linear_model(CLASSES, DIMENSION, fingerprint="b", weights=with_number(1.1e60)),
    "float32": linear_model(CLASSES, DIMENSION, fingerprint="b", weights=np.ones((7, 3), np.float32)),
    "float16": linear_model(CLASSES, DIMENSION, fingerprint="b", weights=np.ones((7, 3), np.float16)),
    "integers": linear_model(CLASSES, DIMENSION, fingerprint="b", weights=np.ones((7, 3), np.int64)),
    "no dimension": linear_model(CLASSES, DIMENSION, fingerprint="b", weights=np.float64(1)),
    "no rows": linear_model(CLASSES, DIMENSION, fingerprint="b", weights=np.ones((0, 3))),
    "another array": linear_model(CLASSES, DIMENSION, fingerprint="b", more=np.ones(3)),
    "axes in floats": linear_model(CLASSES, DIMENSION, fingerprint="b", axes=np.ones((7, DIMENSION))),
    "another shape": linear_model(CLASSES, DIMENSION, fingerprint="b", weights=np.ones((7, 3, 1))),
    "clip": of_terms(clip_norm=1e-300),
    "regularisation": of_terms(regularisation=1e-300),
    "no terms": of_terms(learner="magic"),
    "terms of a vote": of_terms(learner="network", min_records=1, regularisation=1.0),
    "unknown kind": model_file({"weights": np.ones((7, 3))}, kind="oracle", classes=CLASSES, card={}),
    "temperature of zero": student(temperature=np.zeros(1)),
    "negative temperature": student(temperature=-np.ones(1)),
    "temperature of NaN": student(temperature=np.full(1, np.nan)),
    "two temperatures": student(temperature=np.ones(2)),
    "class ruled out by infinity": student(discriminant_model_biases=np.array([1.0, -np.inf, 1.0])),
    "another number of classes": student(
        discriminant_model_biases=np.ones(4), discriminant_model_weights=np.ones((4, 4))
    ),
    "a subnormal mean": student(**{"discriminant.mean": np.full(DIMENSION, 1e-310)}),
    "no mean": student(**{"discriminant.mean": None}),
    "subnormal in single precision": file_of("spreading", "references", np.float32(1e-40)),
    "more": student(more=np.ones(3)),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_model_of_other_numbers_is_refused_before_the_charge_by_an_agent_that_trusts_nobody(name: str) -> None:
    task, batch = asked(BAD[name])
    with pytest.raises((BadData, MixedShards)):
        task.traits.check_questions(task, batch, Trainer())


NO_MODELS = {
    "a temperature that is 0 once it is steady": student(temperature=np.full(1, 1e-300)),
    # Ten megabytes took seconds for each record, in a run that no uncharged ask may make longer than the others.
    "divisions without number": model_file(
        {
            name: np.ones([{"divisions": 101}.get(one.split()[-1]) or SIZES[one.split()[-1]] for one in sizes])
            for name, (_, sizes) in forms_of("matched").items()
        },
        kind="matched",
        classes=CLASSES,
        card={},
    ),
    "a name too few": student(discriminant_model_biases=np.ones(4), discriminant_model_weights=np.ones((4, 4))),
    "a card of many levels": arrays_to_bytes(
        {"weights": np.ones((7, 3))},
        {
            "labeler": json.dumps(
                {"kind": LINEAR, "classes": CLASSES, "privacy_card": {"a": json.loads("[" * 60 + "]" * 60)}}
            )
        },
    ),
    "half a character": arrays_to_bytes(
        {"weights": np.ones((7, 3))},
        {"labeler": json.dumps({"kind": LINEAR, "classes": CLASSES, "privacy_card": {}, "job_id": "\ud800"})},
    ),
    **{
        f"metadata {text}": arrays_to_bytes({"weights": np.ones((7, 3))}, {"labeler": text})
        for text in ("null", "[]", "1", '"a"', "[" * 10**5)
    },
}


@pytest.mark.parametrize("name", NO_MODELS)
def test_a_file_that_cannot_label_is_no_model_at_any_door(name: str) -> None:
    """`labeler predict` has only this check: it stated NaN, or ended with an error of Python."""
    with pytest.raises(BadData, match="no model of a job"):
        model_of_bytes(NO_MODELS[name], name="it")


def test_a_measured_share_that_is_subnormal_is_refused() -> None:
    for stated in (1e-310, float("nan"), 2.0, -0.1):
        with pytest.raises(ValueError, match="share"):
            Measured((0.5,), ((stated, 0.9),))
        with pytest.raises(ValueError, match="share"):
            Measured((stated,), ((0.5, 0.9),))


def test_zero_of_either_sign_and_the_smallest_numbers_are_no_reason_to_refuse() -> None:
    for weights in (with_number(-0.0), with_number(LEAST), with_number(-MOST)):
        task, batch = asked(linear_model(CLASSES, DIMENSION, fingerprint="b", weights=weights))
        task.traits.check_questions(task, batch, Trainer())
    task, batch = asked(student())
    task.traits.check_questions(task, batch, Trainer())


@pytest.mark.parametrize("name", ["linear", *SHARES, "matched"])
def test_every_record_takes_the_same_operations_and_one_more_takes_as_many_again(name: str) -> None:
    """Neighboring worlds: a record that the model is after, another one in its place, one more."""
    rng = np.random.default_rng(8)
    record = quantize(rng.normal(size=(1, DIMENSION)))
    others = quantize(rng.normal(size=(5, DIMENSION)))
    model = made_up(name, np.random.default_rng(3), record)
    file = model_file(model.arrays, kind=model.kind, classes=CLASSES, card=model.card, measured=model.measured)

    def operations(features: NDArray[np.int16]) -> list[str]:
        found: list[str] = []

        def note(frame: FrameType, event: str, called: Any) -> None:
            found.append(f"{event} {frame.f_code.co_name}:{frame.f_lineno} {getattr(called, '__name__', '')}")

        trainer = Trainer()
        trainer.opinions(file, features)
        gc.disable()  # what it calls is no operation of ours
        sys.setprofile(note)
        try:
            trainer.opinions(file, features)
        finally:
            sys.setprofile(None)
            gc.enable()
        return found

    worlds = [np.concatenate([others, *more]) for more in ((record,), (others[:1],), (record, record))]
    of_record, of_another, of_one_more = map(operations, worlds)
    assert of_record == of_another
    each = len(of_one_more) - len(of_record)
    assert each > 10
    assert len(operations(worlds[0][:3])) == len(of_record) - 3 * each


def test_a_student_of_a_job_is_as_steady_as_an_evaluation_asks(tmp_path: Path) -> None:
    """Votes far above the noise leave chances far below 1e-60; the file holds zeros in their place."""
    from feature_store.students import NoisyAnswers, fit_student

    rng = np.random.default_rng(1)
    centers = rng.normal(size=(3, DIMENSION))
    truth = rng.integers(0, 3, 90)
    public = quantize(centers[truth] + 0.1 * rng.normal(size=(90, DIMENSION)))
    votes = np.eye(3)[truth[:30]] * 5000
    for noisy, labels in ((votes, truth[:30]), (None, np.where(truth[:30] == 2, 0, truth[:30]))):
        answers = NoisyAnswers(public[:30], labels, 4.0, 3, noisy)
        for kind in (*SHARES, "matched", "prototypes", "planned"):
            fitted = fit_student(kind, answers, public, num_classes=3)
            data = model_file(fitted.arrays, kind=fitted.kind, classes=CLASSES, card={"backbone_fingerprint": "b"})
            stored = model_of_bytes(data, name="it")
            stored.check_fits(CLASSES, fingerprint="b", dimension=DIMENSION)
            assert np.array_equal(stored.predict_proba(public), fitted.predict_proba(public))


def test_of_a_model_that_was_never_checked_every_record_falls_into_the_first_cell_or_is_scored() -> None:
    features = quantize(np.random.default_rng(2).normal(size=(4, DIMENSION)))
    for name, model in BAD.items():
        try:
            predicted, stated = Trainer().opinions(model, features)
        except LabelerError:
            continue  # no model at all, whatever the records are
        assert np.isfinite(stated).all() or (np.isnan(stated).all() and not predicted.any()), name
