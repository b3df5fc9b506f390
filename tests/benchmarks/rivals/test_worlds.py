"""Worlds are what their descriptions say: halves share no labelled image, a trouble changes one thing."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.data_sets import DataSet, Split
from benchmarks.rivals.cifar10_worlds import cifar10_world
from benchmarks.rivals.contest import ENTRANTS, Choice, Scores
from benchmarks.rivals.harder import TROUBLES, imbalanced
from benchmarks.rivals.reading import READINGS
from benchmarks.rivals.voting import votes
from benchmarks.rivals.world import World


def numbered(count: int, start: int) -> Split:
    """Features that hold their own number, so that each can be told again."""
    numbers = np.arange(start, start + count)
    return Split(np.stack([numbers, np.ones(count)], axis=1).astype(np.float32), numbers % 10)


@pytest.fixture(scope="module")
def features() -> DataSet:
    return DataSet(numbered(50_000, 0), numbered(10_000, 100_000))


def numbers(*splits: Split) -> set[int]:
    return {int(number) for split in splits for number in split.inputs[:, 0]}


def test_settings_are_chosen_on_images_that_are_not_reported(features: DataSet) -> None:
    tuning = cifar10_world(features, 100, records=400, tuning=True)
    reported = cifar10_world(features, 0, records=4_000)
    assert numbers(*tuning.holdings).isdisjoint(numbers(*reported.holdings))
    assert numbers(tuning.test).isdisjoint(numbers(reported.test))
    assert np.array_equal(tuning.public, reported.public)
    public = {int(number) for number in reported.public[:, 0]}
    assert public.isdisjoint(numbers(tuning.test, reported.test))
    assert len(numbers(*reported.holdings)) == 40_000


def troubled(features: DataSet, name: str) -> tuple[World, World]:
    plain = cifar10_world(features, 0, records=400)
    return plain, TROUBLES[name](plain, np.random.default_rng(0))


def test_disjoint_agents_add_up_to_the_same_sum(features: DataSet) -> None:
    plain, changed = troubled(features, "disjoint classes")
    assert [set(one.labels) for one in changed.holdings] == [{label} for label in range(10)]
    centres = np.array([[2048, 0], [0, 2048]], dtype=np.int16)
    sums = [sum(votes(one, centres, 10) for one in world.holdings) for world in (plain, changed)]
    assert np.array_equal(sums[0], sums[1])


def test_each_trouble_does_what_it_is_called(features: DataSet) -> None:
    _, changed = troubled(features, "a class nobody holds")
    assert set(np.concatenate([one.labels for one in changed.holdings])) == set(range(9))
    plain, changed = troubled(features, "10 % wrong labels")
    wrong = np.mean(
        np.concatenate([a.labels != b.labels for a, b in zip(plain.holdings, changed.holdings, strict=True)])
    )
    # 4,000 labels: within 2 points of a tenth but for once in ten thousand.
    assert wrong == pytest.approx(0.1, abs=0.02)
    plain, changed = troubled(features, "one agent poisons its data")
    assert not (plain.holdings[0].labels == changed.holdings[0].labels).any()
    assert changed.holdings[1] is plain.holdings[1]
    counts = np.bincount(np.concatenate([one.labels for one in imbalanced(plain, np.random.default_rng(1)).holdings]))
    assert counts[0] > 300
    assert counts[-1] < 30
    assert (np.bincount(plain.test.labels) > 400).all()


def test_a_setting_is_chosen_for_each_epsilon_and_reading_by_the_mean_over_servers() -> None:
    name = "DPPL-Mean"
    first, second = ENTRANTS[name]
    one: Scores = {(setting, 0.1, reading): [50.0] for setting in (first, second) for reading in READINGS}
    other = dict(one)
    one[second, 0.1, "plain"], other[second, 0.1, "plain"] = [90.0], [20.0]
    one[second, 0.1, "refined"], other[second, 0.1, "refined"] = [10.0, 10.0, 10.0], [95.0]
    choice = Choice.best([one, other], (0.1,), (name,))
    assert choice.taken[name, 0.1, "plain"] is second
    assert choice.taken[name, 0.1, "refined"] is second
    assert choice.wanted == {second: {0.1}}
    assert Choice.best([other], (0.1,), (name,)).taken[name, 0.1, "plain"] is first
