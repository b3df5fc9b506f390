"""Scores class by class, against scikit-learn; thresholds for a recall, against brute force and on real digits."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics
from sklearn.datasets import load_digits

import labeler
from feature_store.results.scores import Preference, auroc, prefer, score, score_probabilities
from feature_store.shard import Shard
from labeler.errors import BadData, InvalidSetting
from tests.command_line import labeler as command

__all__ = ["command"]


@given(st.integers(0, 2**32 - 1), st.integers(2, 5))
def test_scores_are_those_of_scikit_learn(seed: int, classes: int) -> None:
    rng = np.random.default_rng(seed)
    # Few different probabilities, so that many are equal; unequal classes; some of unknown truth.
    probabilities = rng.integers(1, 6, (60, classes)).astype(float)
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    truth = rng.choice(classes, size=60, p=(weights := rng.dirichlet(np.full(classes, 0.5))) / weights.sum())
    truth[rng.random(60) < 0.2] = -1
    found = score_probabilities(truth, probabilities, [f"class {number}" for number in range(classes)])
    known, labels = truth >= 0, probabilities.argmax(axis=1)
    assert found is not None
    assert found.accuracy == pytest.approx(metrics.accuracy_score(truth[known], labels[known]))
    occurring = sorted(set(truth[known].tolist()))
    recalls = metrics.recall_score(truth[known], labels[known], labels=occurring, average=None)
    assert [one for one in found.recalls if one is not None] == pytest.approx(recalls.tolist())
    assert [place for place, one in enumerate(found.recalls) if one is not None] == occurring
    assert found.balanced == pytest.approx(np.mean(recalls))
    if classes == 2 and len(occurring) == 2:
        assert found.auroc == pytest.approx(metrics.roc_auc_score(truth[known], probabilities[known, 1]))
    else:
        assert found.auroc is None


def test_nothing_is_scored_without_truth() -> None:
    assert score(np.array([-1, -1]), np.array([0, 1]), np.array([0.1, 0.9]), ("a", "b")) is None
    assert auroc(np.array([True, True]), np.array([0.1, 0.9])) is None


@pytest.mark.parametrize(("recall", "count"), [("0.9", 9), ("0.9", 25), ("0.5", 1), ("0.75", 40), ("1/3", 10)])
def test_a_new_image_is_found_with_the_chance_that_was_asked_for(recall: str, count: int) -> None:
    """Each of n + 1 images is as likely to be the new one: count for how many the threshold of the others finds it."""
    wanted = Preference(Fraction(recall), "ill")
    values = np.random.default_rng(4).permutation(count + 1) / (count + 1)
    found = sum(values[new] >= wanted.threshold(np.delete(values, new)) for new in range(count + 1))
    assert found / (count + 1) >= Fraction(recall)
    assert (found - 1) / (count + 1) < Fraction(recall)  # and no more than needed
    least = -(-Fraction(recall) // (1 - Fraction(recall)))
    wanted.threshold(np.linspace(0, 1, int(least)))
    with pytest.raises(BadData, match=f"needs at least {least} labeled images of the class, and there are {least - 1}"):
        wanted.threshold(np.linspace(0, 1, int(least) - 1))


@given(st.lists(st.floats(0.001, 1), min_size=1, max_size=30), st.sampled_from(["0.1", "0.5", "0.9", "0.99"]))
def test_a_stated_threshold_is_the_largest_that_reaches_the_recall(values: list[float], recall: str) -> None:
    p = np.array(values)
    wanted = Preference(Fraction(recall))
    reached = [t for t in p if p[p >= t].sum() >= float(recall) * p.sum() - 1e-12]
    assert wanted.stated_threshold(p, p) == pytest.approx(max(reached), abs=1e-12)
    # Where an evaluation states half of it, the recall is that of the same images.
    assert wanted.stated_threshold(p, p / 2) == wanted.stated_threshold(p, p)


def test_a_preferred_class_takes_what_is_above_its_threshold_and_gives_back_the_rest() -> None:
    p = np.array([[0.7, 0.2, 0.1], [0.5, 0.3, 0.2], [0.1, 0.8, 0.1], [0.3, 0.3, 0.4]])
    assert prefer(p, 1, 0.3).tolist() == [0, 1, 1, 1]
    assert prefer(p, 1, 0.9).tolist() == [0, 0, 2, 2] or prefer(p, 1, 0.9).tolist() == [0, 0, 0, 2]
    assert Preference.parse("recall=0.9").place(p, ("a", "b", "c")) == 2  # the least probable over all images
    assert Preference.parse("b:x:recall=.25") == Preference(Fraction(1, 4), "b:x")
    for wrong in ("0.9", "recall=1", "recall=0", "recall=1.5", "precision=0.9", "recall=-1"):
        with pytest.raises(InvalidSetting, match="--prefer takes"):
            Preference.parse(wrong)
    with pytest.raises(InvalidSetting, match="names the class 'ill'"):
        Preference.parse("ill:recall=0.9").place(p, ("a", "b", "c"))


@pytest.fixture(scope="module")
def eights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job on real digits, of which one in ten is an eight; labeled digits `like` and `unseen` beside it."""
    folder = tmp_path_factory.mktemp("eights")
    digits = load_digits()
    order = np.random.default_rng(5).permutation(len(digits.data))
    names = ["eight" if digit == 8 else "another" for digit in digits.target]
    declared: dict[str, Any] = {"backbone_name": "ink", "fitted_on": "public", "probe": np.eye(64)[:4]}
    made = {}
    parts = np.split(order, [450, 900, 1100, 1450])
    for name, rows in zip(("a", "b", "public", "like", "unseen"), parts, strict=True):
        made[name] = labeler.embed(
            features=digits.data[rows] - 5.0,
            labels=[names[row] for row in rows],
            classes=["another", "eight"],
            public=name not in "ab",
            out=folder / f"{name}.shard",
            **declared,
        )
    labeler.run(
        [made["a"], made["b"]], made["public"], folder / "job",
        epsilon=3, colluding_agents=0, test=made["unseen"], queries=40, seed=3, quiet=True,
    )  # fmt: skip
    return folder


def test_a_report_says_how_well_a_rare_class_is_found(eights: Path) -> None:
    job = labeler.open_job(eights / "job")
    images, unseen = job.scores["images"], job.scores["student"]
    assert set(images) == set(unseen) == {"accuracy", "balanced_accuracy", "recall", "auroc"}
    for said in (images, unseen):
        assert set(said["recall"]) == {"another", "eight"}
        assert said["balanced_accuracy"] == pytest.approx(np.mean(list(said["recall"].values())))
    # Whoever always says "another" is right nine times in ten, and finds no eight.
    assert unseen["accuracy"] > 0.85
    assert unseen["auroc"] > 0.8
    page = (eights / "job" / "report.html").read_text()
    assert "How well each class is found" in page
    assert f"AUROC {images['auroc']:.3f}" in page
    student = labeler.load_student(eights / "job" / "student.safetensors")
    again = student.scores(eights / "unseen.shard")
    assert again.pop("checked") == 347
    assert again.pop("recall") == pytest.approx(unseen.pop("recall"))
    assert again == pytest.approx(unseen)


def test_a_preferred_recall_is_reached_on_unseen_digits(eights: Path) -> None:
    """Over draws of 43 of 76 eights to find the threshold on; the mean of 400 is 4 deviations low once in 30,000."""
    student = labeler.load_student(eights / "job" / "student.safetensors")
    found = []
    for name in ("like", "unseen"):
        shard = Shard.open(eights / f"{name}.shard")
        is_eight = np.asarray(shard.labels) == 1
        found.append(student.predict_proba(np.asarray(shard.features)[is_eight])[:, 1])
    pool, wanted, rng = np.concatenate(found), Preference.parse("eight:recall=0.9"), np.random.default_rng(0)
    recalls = []
    for _ in range(400):
        drawn = rng.permutation(pool)
        recalls.append(float((drawn[43:] >= wanted.threshold(drawn[:43])).mean()))
    slack = 4 * np.std(recalls) / np.sqrt(len(recalls))
    assert 0.9 - slack < np.mean(recalls) < 0.9 + 1 / 44 + slack


def test_the_command_prefers_a_class_and_says_from_where_on(eights: Path, command) -> None:
    model, unseen = eights / "job" / "student.safetensors", eights / "unseen.shard"
    plain = command("predict", model, unseen, "--json").document
    out = eights / "found.parquet"
    asked = ("--prefer", "eight:recall=0.95", "--like", eights / "like.shard")
    preferred = command("predict", model, unseen, *asked, "--out", out, "--json").document
    assert preferred["preferred"]["class"] == "eight"
    assert preferred["recall"]["eight"] > plain["recall"]["eight"]
    assert preferred["auroc"] == plain["auroc"]
    told = command("predict", model, unseen, *asked)
    assert f"an image is eight from a probability of {preferred['preferred']['threshold']:.3g} on" in told.out
    assert "balanced accuracy" in told.out
    table = labeler.load_student(model).label(
        unseen, "arrow", prefer="eight:recall=0.95", like=eights / "like.shard", quiet=True
    )
    assert table["label_name"].to_pylist().count("eight") == preferred["counts"]["eight"]
    # The confidence is that of the label which is given, not of the most probable one.
    given = np.array(table["confidence"].to_pylist())
    is_eight = np.array(table["label_name"].to_pylist()) == "eight"
    threshold = preferred["preferred"]["threshold"]
    assert given[is_eight].min() >= threshold - 1e-6
    assert (1 - given[~is_eight]).max() < threshold + 1e-6
    assert json.loads(command("predict", model, unseen, "--prefer", "recall=0.5", "--json").out)["preferred"]["class"]
    assert "goes with --prefer" in command("predict", model, unseen, "--like", eights / "like.shard").err
    assert (
        "truth that may be read off an accuracy must be public"
        in command("predict", model, unseen, "--prefer", "recall=0.9", "--like", eights / "a.shard").err
    )
