"""Training on a device is the training whose sensitivity is proved: double precision, equal steps, and a way back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from feature_store.index import build
from labeler.methods.aux_distill import LocalHeadTerms
from labeler.methods.blind_average import LinearTerms
from labeler.records import Rows
from workers.learning import descent
from workers.learning.linear import train_rows
from workers.learning.private_heads import fit_rows, public_maps

SVM = LinearTerms("svm", 5, regularisation=1.2, clip_norm=1.0, radius=1.0, iterations=60, min_records=20)
SOFTMAX = LinearTerms("softmax", 5, regularisation=0.3, clip_norm=1.0, radius=0.5, iterations=60, min_records=20)
BOTH = pytest.mark.parametrize("terms", [SVM, SOFTMAX], ids=["svm", "softmax"])
HEADS = LocalHeadTerms(
    num_classes=5,
    head_dimension=6,
    score_dimension=5,
    min_records=30,
    num_negatives=40,
    sigma_head=3.0,
    sigma_scores=8.0,
    head_regularisation=0.05,
    score_regularisation=0.05,
)


def records(count: int = 300) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    rng = np.random.default_rng(7)
    return rng.standard_normal((count, 8)).astype(np.float32), rng.integers(0, 5, count)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """torch on the processor in the place of a device; notes what was trained there."""
    devices: list[str] = []
    real = descent.descend_on

    def descend_on(device: str, *given: object, **more: object) -> object:
        devices.append(device)
        return real(device, *given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(descent, "training_device", lambda engine, **_: "cpu" if engine == "device" else None)
    monkeypatch.setattr(descent, "descend_on", descend_on)
    return devices


@BOTH
@pytest.mark.parametrize("at_once", [7, 8192])
def test_a_model_of_a_device_is_that_of_the_processor_within_the_margin_for_rounding(
    terms: LinearTerms, at_once: int, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.learning.linear.block_rows", lambda _: at_once)
    rows = Rows.of(*records())
    here, there = train_rows(rows, terms=terms), train_rows(rows, terms=terms, engine="device")
    assert asked == ["cpu"]
    assert here.any()
    assert np.linalg.norm(here - there) <= terms.descent.rounding_margin * terms.sensitivity
    assert np.allclose(here, there, rtol=0, atol=1e-12)


@BOTH
def test_one_record_moves_a_model_of_a_device_at_most_by_the_sensitivity(terms: LinearTerms, asked: list[str]) -> None:
    terms = replace(terms, min_records=20)
    features, labels = records(40)
    whole = train_rows(Rows.of(features, labels), terms=terms, engine="device")
    for gone in range(40):
        rest = np.delete(np.arange(40), gone)
        for engine in ("device", "numpy"):  # neighbouring sets may be trained one here and one there
            part = train_rows(Rows.of(features[rest], labels[rest]), terms=terms, engine=engine)
            assert np.linalg.norm(whole - part) <= terms.sensitivity


def test_both_private_heads_are_fitted_on_the_device(asked: list[str]) -> None:
    features, labels = records()
    negatives = np.random.default_rng(8).standard_normal((40, 8)).astype(np.float32)
    maps = public_maps(negatives, terms=HEADS)
    rows = Rows.of(features / 4, labels)
    here = fit_rows(rows, negatives, terms=HEADS, maps=maps)
    there = fit_rows(rows, negatives, terms=HEADS, maps=maps, engine="device")
    assert asked == ["cpu", "cpu"]
    assert np.allclose(here.head, there.head, rtol=0, atol=1e-12)
    assert here.scores is not None
    assert there.scores is not None
    assert np.allclose(here.scores, there.scores, rtol=0, atol=1e-12)


@BOTH
def test_what_does_not_fit_goes_over_at_every_step(terms: LinearTerms, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []

    def blocks() -> Iterator[descent.Block]:
        reads.append(1)
        yield np.ones((1, 9, 3)), np.ones((1, 9, 5), dtype=bool)

    def never_kept(blocks: descent.Blocks, device: object) -> object:
        return lambda: [(descent._moved(rows, device), descent._moved(truth, device)) for rows, truth in blocks()]

    monkeypatch.setattr(descent, "_there", never_kept)
    from workers.learning.linear import SLOPES

    given = {"counts": 20.0, "shape": (1, 3, 5), "ball_axes": (1, 2)}
    streamed = descent.descend_on("cpu", terms.descent, blocks, SLOPES[terms.learner], **given)  # type: ignore[arg-type]
    assert len(reads) == terms.iterations
    monkeypatch.undo()
    kept = descent.descend_on("cpu", terms.descent, blocks, SLOPES[terms.learner], **given)  # type: ignore[arg-type]
    assert len(reads) == terms.iterations + 1
    assert np.array_equal(kept, streamed)


@pytest.mark.parametrize("how", ["fails", "emulates"])
def test_a_device_that_fails_or_emulates_double_precision_is_left_for_the_processor(
    how: str, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = Rows.of(*records())
    expected = train_rows(rows, terms=SOFTMAX)
    if how == "fails":

        def broken(*_: object, **__: object) -> None:
            raise RuntimeError("CUDA error: unspecified launch failure")

        monkeypatch.setattr(torch, "zeros_like", broken)
    else:
        monkeypatch.setenv("CUBLAS_EMULATE_DOUBLE_PRECISION", "1")
    assert np.array_equal(train_rows(rows, terms=SOFTMAX, engine="device"), expected)
    assert asked == ["cpu"]


def test_an_agents_engine_says_where_it_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "has_driver", lambda: True)
    monkeypatch.setattr(build, "found_or_none", lambda: 2)
    much, little = build.WORTH_A_DEVICE, build.WORTH_A_DEVICE - 1
    assert build.training_device("auto", products=much) == "cuda:0"
    assert build.training_device("auto", products=little) is None
    assert build.training_device("torch-gpu", products=1) == "cuda:0"
    for engine in ("numpy", "int16", "torch"):
        assert build.training_device(engine, products=much) is None
    monkeypatch.setattr(build, "found_or_none", lambda: None)
    assert build.training_device("torch-gpu", products=much) is None
    monkeypatch.setattr(build, "has_driver", lambda: False)
    assert build.training_device("auto", products=much) is None


@pytest.mark.gpu
@BOTH
def test_a_model_of_a_real_gpu_is_that_of_the_processor(terms: LinearTerms) -> None:
    rows = Rows.of(*records(5000))
    here, there = train_rows(rows, terms=terms), train_rows(rows, terms=terms, engine="torch-gpu")
    assert np.linalg.norm(here - there) <= terms.descent.rounding_margin * terms.sensitivity
