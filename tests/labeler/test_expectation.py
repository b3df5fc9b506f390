"""What a job can be expected to get right: closed form against simulation, public facts alone, advice that holds."""

from __future__ import annotations

import math
import re
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labeler.expectation import (
    ALIKE,
    FEWEST_AXES,
    RECORDS_EACH,
    UNLIKE,
    USUAL_AXES,
    axes_for,
    expect,
    questions_for,
    say_expected,
    winning_chance,
)
from labeler.solving import WantedTask, solve_sigma
from labeler.task import Task, parse_task
from tests.labeler.tasks import make_task

task = partial(
    make_task,
    classes=[f"c{number}" for number in range(10)],
    method="reverse-knn",
    k=1,
    sigma_votes=1.0,
    max_queries=20,
    colluding_agents=1,
)


def at(epsilon: float, **changes: Any) -> Task:
    return parse_task((draft := task(**changes)).model_dump() | {"sigma_votes": solve_sigma(draft, epsilon)})


@pytest.mark.parametrize(("distance", "classes"), [(0.0, 10), (1.0, 2), (2.0, 10), (3.5, 100)])
def test_the_chance_that_a_class_stands_out_is_what_simulation_finds(distance: float, classes: int) -> None:
    """Six standard errors, so that chance alone fails it once in half a billion runs."""
    rng = np.random.default_rng(7)
    draws = 50_000
    lead = rng.normal(size=draws) + distance
    others = rng.normal(size=(draws, classes - 1)).max(axis=1)
    assert abs(winning_chance(distance, classes) - (lead > others).mean()) < 6 * np.sqrt(0.25 / draws)


@pytest.mark.parametrize("classes", [4, 6, 10, 20, 100])
def test_of_pure_noise_the_range_holds_what_guessing_finds_and_hardly_more(classes: int) -> None:
    """Noise alone matches groups of images to classes at random: half of four classes are right in one job of four."""
    found = expect(at(1e-4, classes=[f"c{number}" for number in range(classes)], max_queries=classes), records=1)
    rng = np.random.default_rng(7)
    guessed = np.array([(rng.permutation(classes) == np.arange(classes)).mean() for _ in range(20_000)])
    assert found.low is not None
    assert found.high is not None
    unlike, alike = (guessed * p + (1 - guessed) * (1 - p) / (classes - 1) for p in (UNLIKE, ALIKE))
    rounding = 1e-3
    assert ((found.low <= unlike + rounding) & (alike <= found.high + rounding)).mean() > 0.9
    assert found.high < np.quantile(alike, 0.9) + 1 / classes


def test_more_privacy_and_fewer_records_never_promise_more() -> None:
    by_price = [expect(at(epsilon)) for epsilon in (0.001, 0.01, 0.05, 0.2, 1.0)]
    by_records = [expect(at(0.05), records=records) for records in (10, 300, 3000, 100_000)]
    for found in (by_price, by_records):
        for less, more in pairwise(found):
            assert (less.low or 0) <= (more.low or 0)
            assert (less.high or 0) <= (more.high or 0)
        assert all((one.low or 0) <= (one.high or 0) for one in found)


def test_an_epsilon_of_a_thousandth_does_not_pass_silently_and_what_is_advised_does() -> None:
    """What was measured: 5 % of the labels right at epsilon 0.001, with no word said."""
    found = expect(at(0.001))
    assert (found.high or 1) < 0.5
    assert "the noise drowns the votes" in found.warning
    named = re.search(r"epsilon ([\d.e-]+) per private image or ([\d,]+) private images", found.warning)
    assert named is not None, found.warning
    assert expect(at(float(named[1]))).warning == ""
    assert expect(at(0.9 * float(named[1]))).warning != ""
    assert expect(at(0.001), records=int(named[2].replace(",", ""))).warning == ""
    assert expect(at(0.5)).warning == ""


@pytest.mark.parametrize("fields", [{"method": "knn", "k": 60}, {}])
def test_a_delta_that_promises_little_does_not_pass_silently(fields: dict[str, Any]) -> None:
    """Price and labels look excellent at delta 0.3, since nearly nothing is promised."""
    loose = expect(task(delta=0.3, sigma_votes=25.0, **fields)).warning
    assert loose.startswith("delta 0.3 promises little: ")
    assert "such as 1e-5" in loose
    assert "delta 0.3" in expect(task(delta=0.3, sigma_votes=1e5, **fields)).warning
    assert "the noise drowns the votes" in expect(task(delta=0.3, sigma_votes=1e5, **fields)).warning
    for delta in (1e-3, 1e-5):
        assert expect(task(delta=delta, sigma_votes=25.0, **fields)).warning == ""


def test_votes_of_neighbours_are_public_and_nothing_is_assumed_of_records() -> None:
    drowned = expect(task(method="knn", k=5, sigma_votes=25.0, max_queries=206))
    assert drowned.records is None
    assert "epsilon" in drowned.warning
    assert "private images" not in drowned.warning
    assert expect(task(method="knn", k=5, sigma_votes=25.0, max_queries=206), records=10**6) == drowned
    assert expect(task(method="knn", k=60, sigma_votes=25.0, max_queries=206)).warning == ""


def test_records_are_assumed_per_agent_within_the_task_s_bound() -> None:
    assert expect(task()).records == 3 * RECORDS_EACH
    assert expect(task(max_agent_records=50)).records == 150
    assert expect(task(), records=77).records == 77


def test_of_models_nothing_is_said_beforehand() -> None:
    training = {"min_records": 150, "regularisation": 0.01}
    found = expect(task(method="blind-average", max_queries=65, training=training, sigma_votes=4.0))
    assert (found.low, found.high, found.warning) == (None, None, "")
    assert "nothing can be said beforehand" in say_expected(found.to_json())


def test_ballots_on_a_ball_bring_no_more_votes_to_a_question_than_their_radius_allows() -> None:
    """Three agents, length 9, 20 pure questions of 10 classes: 3 * 9 / sqrt(20 * 0.9) votes each, of 3,000 records."""
    ball = task(ballot_radius=9)
    assert ball.traits.votes(ball, 20, 3000) == pytest.approx(3 * 9 / math.sqrt(18))
    assert ball.traits.votes(ball, 20, 60) == task().traits.votes(task(), 20, 60) == 3
    assert task().traits.votes(task(), 20, 3000) == 150


def test_of_an_evaluation_it_is_said_how_far_noise_leaves_its_accuracy_open() -> None:
    """Three bands of two classes, 6 cells right, 6 wrong: 1.96 * 40 sqrt(6 (0.01 + 0.81)) / 4,800 at accuracy 0.9."""
    asked = task(method="evaluate", classes=["a", "b"], sigma_votes=40.0, colluding_agents=0, max_queries=20)
    found = expect(asked, records=4800)
    assert "within about 3.6 points, assuming 4,800" in say_expected(found.to_json())
    assert found.warning == ""
    assert "drowns the evaluation" in expect(asked, records=300).warning


@pytest.mark.parametrize(("epsilon", "advised"), [(0.05, 10), (0.1, 14), (1.0, 36)])
def test_hardly_more_clusters_than_classes_where_noise_is_large_and_more_where_it_is_not(
    epsilon: float, advised: int
) -> None:
    assert questions_for(at(epsilon, delta=1e-5, max_queries=50, colluding_agents=0)) == advised


@given(st.floats(0.5, 1e4), st.integers(2, 60), st.integers(1, 5000), st.integers(1, 10**7))
@settings(max_examples=100)
def test_never_fewer_questions_than_classes_nor_more_than_images_carry(
    sigma: float, classes: int, images: int, records: int
) -> None:
    asked = task(sigma_votes=sigma, classes=[f"c{number}" for number in range(classes)])
    found = questions_for(asked, public_images=images, records=records)
    assert classes <= found <= max(classes, images // 5)
    assert found <= questions_for(asked, public_images=images, records=2 * records)


def test_methods_whose_price_grows_with_questions_are_advised_two_for_each_class() -> None:
    assert {questions_for(task(sigma_votes=sigma, method="ensemble")) for sigma in (1.0, 100.0)} == {20}


def means(epsilon: float, *, classes: int = 10, agents: int = 5) -> Task:
    wanted = WantedTask.model_validate(
        {"name": "m", "method": "blind-average", "epsilon": epsilon, "training": {"learner": "means"}}
    )
    return wanted.settled({"classes": [str(one) for one in range(classes)], "max_queries": 9}, agents=agents)


def test_class_means_look_along_more_axes_where_noise_is_smaller_and_never_along_more_than_images_have() -> None:
    chosen = [axes_for(means(epsilon), known=500) for epsilon in (0.05, 0.1, 0.3, 0.5, 1.0, 8.0)]
    assert chosen == sorted(chosen)
    assert chosen[0] == 10  # one for each class
    assert chosen[3] > 2 * chosen[1]
    assert chosen[-1] == USUAL_AXES
    assert axes_for(means(0.1, classes=2), known=500, records=20) == FEWEST_AXES
    assert axes_for(means(8.0), known=12) == 12


def test_a_task_of_means_without_axes_looks_along_one_less_than_it_has_rows() -> None:
    assert (asked := means(1.0)).training is not None
    assert asked.training.axes == asked.max_queries - 1 == 8
