"""Votes for several attributes of a record: what they are, what one record changes, what is refused."""

from __future__ import annotations

from functools import partial
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from labeler.errors import InvalidSetting, PrivacyRefusal
from labeler.methods.knn import attribute_ballots
from labeler.methods.sensitivity import squared_sensitivity
from labeler.planning import price
from labeler.release import check_ballots
from tests.labeler.tasks import check_change, make_task

NAMES = ("Bald", "Smiling", "Young", "Male")


task = partial(
    make_task,
    name="faces",
    classes=NAMES,
    method="knn",
    k=3,
    sigma_votes=40.0,
    max_queries=5,
    agents=4,
    colluding_agents=1,
    attributes_per_record=2,
)


def brute(has: NDArray[Any], similar: NDArray[Any], ids: NDArray[Any], *, k: int, most: int) -> NDArray[np.int64]:
    """The definition in words, one vote at a time: of each query's first k records the first `most` attributes."""
    votes = np.zeros((len(similar), has.shape[1]), dtype=np.int64)
    for query, row in enumerate(similar.tolist()):
        ranked = sorted(range(len(row)), key=lambda record: (-row[record], int(ids[record])))
        for record in ranked[:k]:
            for attribute in [place for place, it_has in enumerate(has[record].tolist()) if it_has][:most]:
                votes[query, attribute] += 1
    return votes


def nearest(has: NDArray[Any], similar: NDArray[Any], ids: NDArray[Any], k: int) -> NDArray[Any]:
    order = np.lexsort((np.broadcast_to(ids, similar.shape), -similar), axis=1)[:, : min(k, len(has))]
    return has[order]


worlds = st.integers(0, 2**32 - 1).map(np.random.default_rng)


@given(worlds, st.integers(1, 5), st.integers(1, 4), st.integers(2, 5))
def test_a_record_that_comes_goes_or_is_replaced_moves_the_votes_within_the_bound(
    rng: np.random.Generator, k: int, most: int, attributes: int
) -> None:
    queries, records = 4, int(rng.integers(1, 9))
    has = rng.integers(0, 2, (records, attributes))
    similar, ids = rng.integers(0, 4, (queries, records)), rng.permutation(records)
    setting = task(
        classes=[f"a{place}" for place in range(attributes)], k=k, attributes_per_record=most, max_queries=queries
    )
    before = attribute_ballots(nearest(has, similar, ids, k), most=most)
    assert np.array_equal(before, brute(has, similar, ids, k=k, most=most))
    gone = np.arange(records) != rng.integers(records)
    less = (
        attribute_ballots(nearest(has[gone], similar[:, gone], ids[gone], k), most=most)
        if gone.any()
        else np.zeros_like(before)
    )
    other = has.copy()
    other[~gone] = rng.integers(0, 2, attributes)
    swapped_similar = similar.copy()
    swapped_similar[:, ~gone] = rng.integers(0, 4, (queries, 1))
    replaced = attribute_ballots(nearest(other, swapped_similar, ids, k), most=most)
    for after in (less, replaced):
        check_change(setting, "instance", queries, after - before)
    assert (before**2).sum() <= squared_sensitivity(setting, "agent", queries)
    check_ballots(before, setting)


@pytest.mark.parametrize(("attributes", "most"), [(2, 1), (3, 1), (3, 2), (4, 2), (4, 3), (4, 9)])
def test_every_pair_of_records_stays_within_the_bound_and_one_attains_it(attributes: int, most: int) -> None:
    setting = task(classes=[f"a{place}" for place in range(attributes)], attributes_per_record=most)
    rows = attribute_ballots(np.array(list(product((0, 1), repeat=attributes)))[:, None, :], most=most)
    furthest = max(int(((one - other) ** 2).sum()) for one, other in combinations(rows, 2))
    assert furthest == squared_sensitivity(setting, "instance", 1)
    together = np.array([3 * row for row in rows])  # three neighbors that all vote alike
    assert max(int((row**2).sum()) for row in together) == squared_sensitivity(setting, "agent", 1)


@given(worlds, st.integers(1, 4), st.integers(1, 5), st.integers(1, 3))
def test_a_person_moves_no_more_than_its_records_each(rng: np.random.Generator, m: int, k: int, most: int) -> None:
    setting = task(k=k, attributes_per_record=most, records_per_person=m)
    leaving, entering = (rng.integers(0, 2, (1, min(m, k), len(NAMES))) for _ in range(2))
    change = attribute_ballots(leaving, most=most) - attribute_ballots(entering, most=most)
    assert (change**2).sum() <= squared_sensitivity(setting, "person", 1)


def test_one_class_per_record_is_the_case_of_one_attribute() -> None:
    one, classes = task(attributes_per_record=1), task(attributes_per_record=None)
    for level in ("instance", "agent"):
        assert squared_sensitivity(one, level, 5) == squared_sensitivity(classes, level, 5)
    assert squared_sensitivity(task(), "instance", 5) == 5 * 4
    assert squared_sensitivity(task(), "agent", 5) == 5 * 2 * 9
    assert squared_sensitivity(task(attributes_per_record=3), "instance", 5) == 5 * 4  # never more than attributes
    assert price(task()).instance.epsilon > price(one).instance.epsilon


def test_what_has_no_proof_or_no_reading_is_refused() -> None:
    with pytest.raises(InvalidSetting):
        attribute_ballots(np.array([[[2, 0]]]), most=1)
    with pytest.raises(InvalidSetting):
        attribute_ballots(np.array([[[1, 0]]]), most=0)


def test_a_ballot_with_more_votes_than_its_records_may_cast_is_refused() -> None:
    check_ballots(np.array([[3, 3, 0, 0]]), task())
    with pytest.raises(PrivacyRefusal, match="more than 6 votes at one query"):
        check_ballots(np.array([[3, 3, 1, 0]]), task())
    with pytest.raises(PrivacyRefusal, match="outside 0 to 3"):
        check_ballots(np.array([[4, 0, 0, 0]]), task())
