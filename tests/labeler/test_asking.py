"""How many questions are advised: from public facts alone, between one for each class and what images can carry."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labeler.expectation import questions_for
from labeler.solving import solve_sigma
from labeler.task import Task, parse_task


def _task(sigma: float, *, classes: int = 10, method: str = "reverse-knn", agents: int = 3) -> Task:
    return parse_task(
        {
            "name": "asking",
            "classes": [f"class {number}" for number in range(classes)],
            "method": method,
            "k": 1,
            "sigma_votes": sigma,
            "delta": 1e-5,
            "max_queries": 50,
            "release": "histogram",
            "agents": agents,
            "colluding_agents": 0,
        }
    )


@pytest.mark.parametrize(("epsilon", "advised"), [(0.05, 10), (0.1, 20), (1.0, 57)])
def test_as_many_clusters_as_classes_where_noise_is_large_and_more_where_it_is_not(
    epsilon: float, advised: int
) -> None:
    draft = _task(1.0)
    task = draft.model_copy(update={"sigma_votes": solve_sigma(draft, epsilon)})
    assert questions_for(task) == advised


@given(st.floats(0.5, 1e4), st.integers(2, 60), st.integers(1, 5000), st.integers(1, 10**7))
@settings(max_examples=100, deadline=None)
def test_never_fewer_than_classes_nor_more_than_images_carry(
    sigma: float, classes: int, images: int, records: int
) -> None:
    task = _task(sigma, classes=classes)
    found = questions_for(task, public_images=images, records=records)
    assert classes <= found <= max(classes, images // 5)
    assert found <= questions_for(task, public_images=images, records=2 * records)


def test_methods_whose_price_grows_with_questions_are_advised_two_for_each_class() -> None:
    assert {questions_for(_task(sigma, method="ensemble")) for sigma in (1.0, 100.0)} == {20}
