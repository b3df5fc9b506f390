"""A trained model serves the rounds of a task, lives in memory only, and stays with its agent."""

from __future__ import annotations

import numpy as np
import pytest

from labeler.records import ModelStore

MODEL = np.array([[3, -4], [5, 2**60]], dtype=np.int64)


def never() -> np.ndarray:
    raise AssertionError("trained again")


def test_a_model_is_made_once_until_it_is_forgotten() -> None:
    store = ModelStore()
    assert np.array_equal(store.once("v1", "m", lambda: MODEL), MODEL)
    assert np.array_equal(store.once("v1", "m", never), MODEL)
    store.clear()
    with pytest.raises(AssertionError):
        store.once("v1", "m", never)


def test_two_names_are_two_models() -> None:
    store = ModelStore()
    store.once("v1", "m", lambda: MODEL)
    assert np.array_equal(store.once("v1", "other", lambda: MODEL + 1), MODEL + 1)
    assert np.array_equal(store.once("v1", "m", never), MODEL)


def test_a_deleted_record_does_not_live_on_in_a_model() -> None:
    store = ModelStore()
    store.once("v1", "m", lambda: MODEL)
    store.once("v2", "m", lambda: MODEL + 1)
    with pytest.raises(AssertionError):
        store.once("v1", "m", never)


def test_a_store_does_not_print_what_it_keeps() -> None:
    store = ModelStore()
    store.once("v1", "m", lambda: MODEL)
    assert str(2**60) not in repr(store)
