"""Questions are searched in a secret order of the round: whoever asks chooses them, and not when a search meets them.

An order toward one record made a search of it take long: in an answer that was late, that record was told apart from
none in 10 of 10 rounds, at an epsilon of 0.0053. With votes for life the same cost a nano-unit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from feature_store.index import build, nearest_by_definition
from feature_store.index.engine_faiss import FaissBlock
from feature_store.index.exact_index import NumpyBlock, NumpyEngine
from feature_store.rows import GatheredRows, quantize
from feature_store.shard import Shard
from labeler.ledger.lifetimes import Spent
from labeler.methods.reverse_knn import reverse_knn_ballots
from labeler.randomness import keyed_source, permutation, seeded_source
from labeler.system.site_key import SiteKey
from labeler.tally import QueryBatch
from labeler.task import Task
from tests.feature_store.index.fake_devices import fakes_have_names
from tests.labeler.tasks import make_task
from tests.workers.builders import shard_of_rows
from workers.agent.agent import LOCAL_NOISE, NOISE, ORDER, Agent
from workers.voting import NeighborIndexes

DIMENSION, QUESTIONS, RECORDS, K = 32, 3_000, 40, 5
CLASSES = ("a", "b")
SITE_KEY = SiteKey(bytes(32))
ENGINES = ("auto", "numpy", "torch in parts", "faiss in parts", "ray")


@pytest.fixture(autouse=True)
def _engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`auto` takes what it takes on a service's processor, and searches in one thread, so that operations count."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with fakes_have_names():
        monkeypatch.setattr("workers.voting.load_engine", build.load_engine)
        yield


def records() -> NDArray[np.int16]:
    """Records that share a direction; the first one is the target."""
    rng = np.random.default_rng(5)
    return quantize(rng.normal(size=(RECORDS, DIMENSION)) + 0.5)


def _sorted_along(direction: NDArray[np.floating]) -> NDArray[np.int16]:
    rng = np.random.default_rng(6)
    rising = np.linspace(-1, 1, QUESTIONS)[:, None] * direction / np.linalg.norm(direction)
    found = quantize(8 * rising + 0.5 * rng.normal(size=(QUESTIONS, DIMENSION)))
    return found[np.argsort(found @ direction, kind="stable")]


def _toward() -> NDArray[np.int16]:
    return _sorted_along(records()[0].astype(float))


def _shared() -> NDArray[np.int16]:
    return _sorted_along(records().astype(float).sum(axis=0))


ARRANGED: dict[str, Callable[[], NDArray[np.int16]]] = {
    "toward one record": _toward,
    "away from it": lambda: _toward()[::-1].copy(),
    "along what all share": _shared,
    "away from all": lambda: _shared()[::-1].copy(),
    "away from both": lambda: _sorted_along(-records()[0] - records().astype(float).sum(axis=0)),
    "duplicates": lambda: np.repeat(_toward()[::50], 50, axis=0),
    "duplicates, in turns": lambda: np.tile(_toward()[::50], (50, 1)),
    "all equal": lambda: np.repeat(_toward()[-1:], QUESTIONS, axis=0),
}
WORLDS = {"with the record": slice(None), "without it": slice(1, None), "it alone": slice(1)}


def task_of(**changes: Any) -> Task:
    fields = {"method": "reverse-knn", "k": K, "sigma_votes": 400.0, "max_queries": QUESTIONS, "delta": 1e-5}
    return make_task(classes=CLASSES, backbone_fingerprint="backbone", **(fields | changes))


LIFE = {"lifetime_budget": {"budget_nano": 10**10, "least_similarity": -1.0}}


def agent_of(path: Path, features: NDArray[np.int16], *, engine: str = "auto") -> Agent:
    shard_of_rows(
        path, features, (np.arange(len(features)) % 2).astype(np.int16), classes=CLASSES, fingerprint="backbone",
        max_records=1_000, random_bytes=seeded_source(b"ids").bytes,
        image_digests=SITE_KEY.digests("image", [row.tobytes() for row in features]), site_key=SITE_KEY.name,
    )  # fmt: skip
    spends: Any = NothingSpent()
    return Agent("a", Shard.open(path), engine=engine, spends=spends)


class NothingSpent:
    def spent(self, digests: NDArray[np.int64]) -> Spent:
        return Spent(0, np.zeros(len(digests), dtype=np.int64))


def answer(agent: Agent, task: Task, questions: NDArray[np.int16], key: bytes) -> tuple[bytes, ...]:
    return agent.computed(task, QueryBatch(questions), key=key, seal=lambda _, body: body).bodies


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("arranged", ARRANGED)
def test_every_engine_finds_the_definition_in_whatever_order_questions_were_asked_and_are_searched(
    arranged: str, engine: str
) -> None:
    if engine == "ray" and find_spec("ray") is None:
        pytest.skip("ray is not installed; an agent whose records lie in a cluster searches questions as auto does")
    questions, own = ARRANGED[arranged](), records()
    expected = nearest_by_definition(questions, np.arange(len(questions)), own, K)
    limits = (None, 1 << 20) if engine in ("numpy", "auto") else (None,)
    for seed, limit in enumerate(limits):
        indexes = NeighborIndexes(dimension=DIMENSION, engine=engine, memory_limit_bytes=limit)
        index = indexes.of_questions(questions, order=seeded_source(seed))
        for rows in WORLDS.values():
            found = index.search(own[rows], K)
            np.testing.assert_array_equal(found.record_ids, expected.record_ids[rows])
            np.testing.assert_array_equal(found.similarities, expected.similarities[rows])


@pytest.mark.parametrize("count", [1, 2, 33, 500, 2_999, 3_000])
@pytest.mark.parametrize("engine", ENGINES[:-1])
def test_ties_at_the_last_place_go_to_the_smallest_numbers_for_any_count(engine: str, count: int) -> None:
    questions, own = np.repeat(_toward()[::300], 300, axis=0), records()
    index = NeighborIndexes(dimension=DIMENSION, engine=engine).of_questions(questions, order=seeded_source(count))
    expected = nearest_by_definition(questions, np.arange(len(questions)), own, count)
    np.testing.assert_array_equal(index.search(own, count).record_ids, expected.record_ids)


@pytest.mark.parametrize("life", [False, True])
def test_ballots_are_those_of_the_definition(tmp_path: Path, life: bool) -> None:
    questions, own = ARRANGED["duplicates"](), records()
    task = task_of(**(LIFE if life else {}))
    agent = agent_of(tmp_path / "own", own)
    seen = []
    patched = pytest.MonkeyPatch()
    with patched.context() as patch:
        patch.setattr("workers.agent.agent.input_shares", lambda ballots, *_, **__: seen.append(ballots) or ())
        answer(agent, task, questions, bytes(32))
    nearest = nearest_by_definition(questions, np.arange(QUESTIONS), own, K).record_ids
    labels = np.arange(RECORDS) % 2
    np.testing.assert_array_equal(seen[0], reverse_knn_ballots(nearest, labels, num_queries=QUESTIONS, num_classes=2))


# What reaches an engine.


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> list[NDArray[np.int16]]:
    """The rows that engines were given to search among, in their order."""
    given: list[NDArray[np.int16]] = []
    load = NumpyEngine.load

    def loads(self: NumpyEngine, rows: GatheredRows) -> Any:
        given.append(rows.features[rows.rows])
        return load(self, rows)

    monkeypatch.setattr(NumpyEngine, "load", loads)
    return given


@pytest.mark.parametrize("life", [False, True])
def test_the_order_is_the_rounds_alone_the_same_when_it_is_answered_again_and_whatever_the_records_are(
    tmp_path: Path, reached: list[NDArray[np.int16]], life: bool
) -> None:
    questions, task = _toward(), task_of(**(LIFE if life else {}))
    other = task_of(**(LIFE if life else {}), nonce="another")
    agents = {name: agent_of(tmp_path / name, records()[rows], engine="numpy") for name, rows in WORLDS.items()}
    orders = []
    for asked, key in ((task, bytes(32)), (task, bytes([1] * 32)), (other, bytes(32))):
        reached.clear()
        for agent in agents.values():
            once, twice = (answer(agent, asked, questions, key) for _ in range(2))
            assert once == twice
        for one in reached[1:]:
            np.testing.assert_array_equal(one, reached[0])
        orders.append(reached[0])
    for one in orders:
        assert not np.array_equal(one, questions)
        np.testing.assert_array_equal(np.unique(one, axis=0), np.unique(questions, axis=0))
        # The chance that two orders of thousands agree in a tenth of their places is far below 1e-100.
        assert sum((one == earlier).all(axis=1).mean() < 0.1 for earlier in orders if earlier is not one) == 2


def test_what_orders_questions_is_no_source_of_noise(tmp_path: Path) -> None:
    agent, task, batch = agent_of(tmp_path / "own", records()), task_of(), QueryBatch(_toward())
    key = bytes(range(32))
    drawn = {agent._source(key, purpose, task, batch, "").bytes(64) for purpose in (ORDER, NOISE, LOCAL_NOISE)}
    assert len(drawn) == 3
    assert agent._order(key, task, batch).bytes(64) in drawn


def test_a_permutation_is_whole_and_its_keys_own() -> None:
    one, again, other = (permutation(keyed_source(bytes([key] * 32), is_seeded=True), 1_000) for key in (1, 1, 2))
    np.testing.assert_array_equal(one, again)
    np.testing.assert_array_equal(np.sort(other), np.arange(1_000))
    assert (one == other).mean() < 0.05
    assert permutation(seeded_source(0), 0).tolist() == []


# What a search does.


@pytest.mark.parametrize("arranged", ARRANGED)
@pytest.mark.parametrize("life", [False, True])
def test_faiss_is_asked_the_same_however_questions_were_sorted_and_settles_what_ties_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arranged: str, life: bool
) -> None:
    """It meets the questions in a secret order, so a sorted batch is an unsorted one, and its heap fills as for any."""
    asked: list[tuple[int, int]] = []
    settled: list[int] = []
    searched, first_keys = FaissBlock._searched, NumpyBlock.first_keys

    def asks(self: FaissBlock, some: NDArray[np.int16], count: int) -> Any:
        asked.append((len(some), count))
        return searched(self, some, count)

    def settles(self: NumpyBlock, some: NDArray[np.int16], count: int) -> NDArray[np.int64]:
        settled.append(len(some))
        return first_keys(self, some, count)

    monkeypatch.setattr(FaissBlock, "_searched", asks)
    monkeypatch.setattr(NumpyBlock, "first_keys", settles)
    questions, task = ARRANGED[arranged](), task_of(**(LIFE if life else {}))
    for number, rows in enumerate(WORLDS.values()):
        agent = agent_of(tmp_path / str(number), records()[rows])
        own = len(records()[rows])
        for key in range(3):
            asked.clear()
            settled.clear()
            answer(agent, task, questions, bytes([key] * 32))
            # Four queries of the check when the index of questions is loaded; then the records, in one piece.
            assert [queries for queries, _ in asked] == [4, own]
            assert settled[-1] == (own if arranged.startswith(("duplicates", "all")) else 0)
