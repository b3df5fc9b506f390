"""Neighboring worlds run the same operations, whatever is asked and whatever searches: time is an answer, too.

The worlds differ by one record, one class, one tie or one deletion. What is compared is every instruction of an answer
(`tests.operations`), index and training included. The engines' own kernels take their time by the lengths of arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from feature_store.index import build, build_index
from feature_store.index.engine_faiss import FaissBlock, faiss
from feature_store.index.exact_index import NumpyBlock
from feature_store.rows import quantize
from feature_store.shard import Shard
from labeler.ledger.lifetimes import Spent
from labeler.randomness import seeded_source
from labeler.records import ModelStore
from labeler.system.site_key import SiteKey
from labeler.tally import QueryBatch
from labeler.task import Task
from tests.feature_store.index.fake_devices import fakes_have_names
from tests.operations import Operation, difference, operations
from tests.workers.builders import shard_of_rows
from tests.workers.voting.test_answers_of_neighbours import (
    CLASSES,
    DIMENSION,
    LIMIT,
    PUBLIC,
    SETTINGS,
    _tables_of_noise_are_kept,  # noqa: F401  # a fixture
    batch_of,
    labels_for,
    records_of,
    task_of,
)
from workers.agent.agent import Agent
from workers.voting import lifetime_ballots

SITE_KEY = SiteKey(bytes(32))
ENGINES = ("auto", "numpy", "torch in parts", "faiss in parts")
MOST = 3_000


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever else a thread does is not seen."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("labeler.methods.aux_distill.MOST_STEPS", 20)
    monkeypatch.setattr("workers.learning.network.STEPS", 20)
    # Noise is drawn by rejection, from a key that only the agent knows: here the same in all worlds.
    monkeypatch.setattr(Agent, "_source", lambda *_: seeded_source(b"noise"))
    with fakes_have_names():
        monkeypatch.setattr("workers.voting.load_engine", build.load_engine)
        yield


Arrays = tuple[NDArray[np.int16], NDArray[np.int16]]


def _one_class_more(count: int) -> tuple[Arrays, Arrays]:
    features, labels = records_of("one class", count)
    more = labels.copy()
    more[count // 2] = 2
    return (features, labels), (features, more)


def _one_tie_more(count: int) -> tuple[Arrays, Arrays]:
    features, labels = records_of("any", count)
    tied, more = features.copy(), features.copy()
    tied[count // 2 : -1] = tied[0]
    more[count // 2 :] = more[0]
    return (tied, labels), (more, labels)


def _one_record_more(count: int) -> tuple[Arrays, Arrays]:
    features, labels = records_of("any", count)
    return (features[:-1], labels[:-1]), (features, labels)


WORLDS: dict[str, Callable[[int], tuple[Arrays, Arrays]]] = {
    "one record more": _one_record_more,
    "one class more": _one_class_more,
    "one tie more": _one_tie_more,
}
COUNTS = (5, 21)
"""k, and one more than a cap."""


def shard_of(path: Path, arrays: Arrays, task: Task, *, declared: int | None, deleted: int = 0) -> Shard:
    features, labels = arrays[0], labels_for(task, arrays[1])
    persons = np.stack([np.arange(len(labels)) // 2] * 2, axis=1)
    shard = shard_of_rows(
        path, features, labels, classes=CLASSES, fingerprint="backbone", max_records=declared,
        random_bytes=seeded_source(b"ids").bytes, attributes=task.attributes_per_record is not None,
        image_digests=SITE_KEY.digests("image", [b"%d.png" % number for number in range(len(labels))]),
        site_key=SITE_KEY.name,
    )  # fmt: skip
    if deleted:
        shard.delete(shard.record_ids[:deleted])
    opened = Shard.open(path)
    opened.persons = persons
    return opened


def answering(shard: Shard, task: Task, *, engine: str = "numpy", limit: int | None = None) -> list[Operation]:
    """The operations of an answer, from an agent that was asked something else before: libraries are loaded then."""

    def answer() -> object:
        agent = Agent("a", shard, is_seeded=True, engine=engine, memory_limit_bytes=limit)
        return agent.computed(task, batch_of(task), key=bytes(32), seal=lambda _, body: body)

    answer()
    return operations(answer)


def compare(
    folder: Path, worlds: tuple[Arrays, Arrays], task: Task, *, declared: int | None = MOST, **more: Any
) -> None:
    """Both worlds, and the first of them after a deletion, run the same."""
    shards = [shard_of(folder / str(number), world, task, declared=declared) for number, world in enumerate(worlds)]
    shards.append(shard_of(folder / "deleted", worlds[1], task, declared=declared, deleted=1))
    first, *others = [answering(shard, task, **more) for shard in shards]
    assert len(first) > 100
    for other in others:
        if task.traits.labels is None:  # a record is one tile
            assert set(first) == set(other)
        else:
            assert not difference(first, other)


@pytest.mark.parametrize(
    ("world", "count"),
    [
        pytest.param(world, count, marks=[] if (world, count) == ("one class more", 21) else pytest.mark.long)
        for world in WORLDS
        for count in COUNTS
    ],
)
@pytest.mark.parametrize("way", SETTINGS)
def test_every_way_to_answer_runs_the_same_operations(tmp_path: Path, way: str, world: str, count: int) -> None:
    task = task_of(**SETTINGS[way])
    compare(tmp_path, WORLDS[world](count), task, declared=declared_of(task))


def declared_of(task: Task) -> int | None:
    """Return the bound that a site has to declare for a task, else None."""
    return MOST if task.training is not None and task.training.max_records is not None else None


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("way", "declared"),
    [
        ("knn", None),
        pytest.param("knn", MOST, marks=pytest.mark.long),
        pytest.param("reverse-knn", None, marks=pytest.mark.long),
        pytest.param("reverse-knn", MOST, marks=pytest.mark.long),
    ],
)
def test_every_engine_runs_the_same_operations(
    tmp_path: Path, engine: str, world: str, way: str, declared: int | None
) -> None:
    task = task_of(**SETTINGS[way])
    # Of three devices each shall have a record: none is another number of tiles.
    for count in (7, 21) if engine.endswith("in parts") else COUNTS:
        compare(tmp_path / str(count), WORLDS[world](count), task, engine=engine, declared=declared)


@pytest.mark.parametrize(
    "engine", [*ENGINES[:2], *(pytest.param(name, marks=pytest.mark.long) for name in ENGINES[2:])]
)
@pytest.mark.parametrize("world", WORLDS)
def test_a_memory_limit_changes_nothing_about_it(tmp_path: Path, engine: str, world: str) -> None:
    task = task_of(**SETTINGS["knn"])
    for declared in (None, 2_000):
        compare(tmp_path / str(declared), WORLDS[world](21), task, engine=engine, declared=declared, limit=2 * LIMIT)


@pytest.mark.parametrize("world", WORLDS)
def test_records_of_a_person_are_cut_by_the_same_operations(tmp_path: Path, world: str) -> None:
    for way in ("knn", "reverse-knn", "ensemble"):
        task = task_of(**SETTINGS[way], records_per_person=1)
        compare(tmp_path / way, WORLDS[world](21), task)


@pytest.mark.parametrize("world", WORLDS)
def test_votes_for_life_run_the_same_operations_whoever_can_still_pay(tmp_path: Path, world: str) -> None:
    life = {"budget_nano": 10**10, "least_similarity": 0.0}
    task = task_of(method="reverse-knn", k=5, lifetime_budget=life)
    paths = []
    for number, arrays in enumerate(WORLDS[world](21)):
        shard = shard_of(tmp_path / str(number), arrays, task, declared=None)
        for spent in (0, 10**10):
            spends = partial(_spent, spent)
            ask = partial(lifetime_ballots, task, batch_of(task), shard, spends)
            ask()
            paths.append(operations(ask))
    for path in paths[1:]:
        assert not difference(paths[0], path)


def _spent(first: int, digests: NDArray[np.int64]) -> Spent:
    """Return spends of zero, but for the first image."""
    return Spent(0, np.where(np.arange(len(digests)) == 0, first, 0))


@pytest.mark.parametrize("method", ["knn", "reverse-knn"])
@pytest.mark.parametrize("limit", [None, 2 * LIMIT])
def test_faiss_is_called_for_as_many_queries_and_places_whoever_has_how_many_records(
    tmp_path: Path, method: str, limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its threads are those of the machine: nothing sets them by what is searched."""
    calls: list[tuple[int, int]] = []
    search = FaissBlock._searched

    def counting(self: FaissBlock, queries: NDArray[np.int16], count: int) -> Any:
        calls.append((len(queries), count))
        return search(self, queries, count)

    monkeypatch.setattr(FaissBlock, "_searched", counting)
    monkeypatch.setattr(faiss, "omp_set_num_threads", None)
    task = task_of(method=method, k=5, sigma_votes=30.0)
    found = set()
    for count in (5, 20, 21, 200):
        shard = shard_of(tmp_path / str(count), records_of("any", count), task, declared=MOST)
        agent = Agent("a", shard, is_seeded=True, memory_limit_bytes=limit)
        agent.build_index()
        calls.clear()
        agent.ballots(task, batch_of(task), bytes(32))
        asked = sum(queries for queries, _ in calls)
        found.add((tuple(calls), asked) if method == "knn" else (tuple(k for _, k in calls), asked - count))
    assert len(found) == 1
    assert faiss.cvar.distance_compute_blas_threshold == 0


@pytest.mark.parametrize("engine", ENGINES)
def test_queries_that_tie_take_no_operation_more_but_that_faiss_settles_them(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The price of a query that ties is a second product: 0.16 and 0.44 s for 2,000 chosen ones. Plans cover it."""
    settled: list[int] = []
    first_keys = NumpyBlock.first_keys

    def counts(self: NumpyBlock, queries: NDArray[np.int16], count: int) -> NDArray[np.int64]:
        settled.append(len(queries))
        return first_keys(self, queries, count)

    monkeypatch.setattr(NumpyBlock, "first_keys", counts)
    rng = np.random.default_rng(0)
    features = quantize(rng.normal(size=(300, 8)))
    ids = rng.permutation(300).astype(np.int64)
    queries, paths = features[:40], {}
    for copies in (0, 1, 8, 40, 300):
        tied = features.copy()
        tied[:copies] = features[-1]
        index = build_index(tied, ids, engine=engine)
        index.search(queries, 5)
        settled.clear()
        paths[copies] = operations(partial(index.search, queries, 5)), sum(settled)
    if engine == "auto":
        assert [paths[copies][1] for copies in (0, 1, 8)] == [0, 0, 0]
        assert paths[300][1] == len(queries)
    none = [copies for copies in paths if engine != "auto" or not paths[copies][1]]
    for copies in none[1:]:
        if engine != "faiss in parts":  # each of its parts settles what ties there
            assert not difference(paths[none[0]][0], paths[copies][0])
    for copies in set(paths) - set(none):
        assert set(paths[0][0]) <= set(paths[copies][0])


def test_a_planted_branch_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one expression, of one method, for one class that is missing."""
    from workers.learning import linear

    whole = linear._fit

    def planted(records: Any, **terms: Any) -> Any:
        weights, is_present = whole(records, **terms)
        return weights * 2 if is_present.sum() > 1 else weights, is_present

    monkeypatch.setattr(linear, "_fit", planted)
    monkeypatch.setattr("tests.operations._TRACED", (*_traced(), __file__))
    with pytest.raises(AssertionError, match="behind"):
        compare(tmp_path, _one_class_more(21), task_of(**SETTINGS["ensemble"]))


def _traced() -> tuple[str, ...]:
    from tests.operations import _TRACED

    return _TRACED


def test_models_of_deleted_records_are_not_taken_over(tmp_path: Path) -> None:
    task = task_of(**SETTINGS["ensemble"])
    shard = shard_of(tmp_path / "one", _one_class_more(21)[1], task, declared=MOST)
    before = Agent("a", shard, is_seeded=True, engine="numpy", models=ModelStore())
    before.ballots(task, QueryBatch(PUBLIC), bytes(32))
    shard.delete(shard.record_ids[shard.labels == 2])
    after = Agent("a", Shard.open(shard.path), is_seeded=True, engine="numpy")
    after.take_over(before)
    assert after.ballots(task, QueryBatch(PUBLIC), bytes(32)).sum(axis=0).tolist() == [0, len(PUBLIC), 0]


@pytest.mark.long
@pytest.mark.parametrize("engine", ENGINES)
def test_another_number_of_tiles_runs_the_same_instructions(tmp_path: Path, engine: str) -> None:
    """One record more begins another tile, part or block: as often as that, and nothing else."""
    task = replace_k(task_of(**SETTINGS["knn"]))
    found = []
    for count in (8_193, 16_385):
        rng = np.random.default_rng(1)
        arrays = quantize(rng.normal(size=(count, DIMENSION))), (np.arange(count) % 3).astype(np.int16)
        shard = shard_of(tmp_path / f"{count}", arrays, task, declared=100_000)
        found.append(set(answering(shard, task, engine=engine)))
    assert found[0] == found[1]


def replace_k(task: Task) -> Task:
    return task.model_copy(update={"k": 50})
