"""`labeler bench scale`: many agents answer as each would alone, bit for bit; a search in parts finds the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import sums
from benchmarks.scale.bench import (
    Stored,
    bench_scale,
    ids_by_definition,
    merged_ids,
    record_ids,
    search_together,
    write_features,
)
from benchmarks.scale.rounds import (
    NOBODY,
    SIMULATED,
    Federation,
    Simulation,
    ballots_of,
    name_of,
    simulate,
    sum_group,
    total_of,
    traffic_of,
)
from checks.audit.run import digits_pool
from feature_store.index.definition import check_features
from feature_store.query_selection import model_rows
from feature_store.rows import quantize
from feature_store.shard import Shard
from labeler.errors import InvalidSetting, LabelerError
from labeler.methods import METHODS
from labeler.randomness import ByteSource, derive_key, keyed_source
from labeler.records import ModelStore, Records, RunnerContext
from labeler.release import open_histogram
from labeler.tally import QueryBatch, round_of
from labeler.task import Task, parse_task
from tests.answering import AnsweringAgent
from tests.one_round import run_round, tallied
from workers.agent.agent import Agent
from workers.learning.learner import Trainer
from workers.voting import NeighborIndexes

CLASSES = ("cat", "dog", "eel")
SIZES = (60, 31, 2, 47, 9, 1, 18)
"""Records of the agents; some have fewer than k."""

MakeShard = Callable[..., Shard]


def task_of(method: str, agents: int, *, queries: int, **fields: Any) -> Task:
    given: dict[str, Any] = {
        "name": "t", "classes": CLASSES, "method": method, "sigma_votes": 4.0, "delta": 1e-5, "agents": agents,
        "max_queries": queries, "colluding_agents": 1, "backbone_fingerprint": "backbone",
    }  # fmt: skip
    if method == "reverse-knn":
        given["max_agent_records"] = 20
    if method in ("knn", "reverse-knn"):
        given["k"] = 4
    if method == "blind-average":
        given["training"] = {"min_records": 8, "regularisation": 0.1}
    return parse_task(given | fields)


def federation_of(shards: list[Shard]) -> Federation:
    places = np.full((len(shards), max(map(len, shards))), NOBODY, dtype=np.int32)
    start = 0
    for row, shard in zip(places, shards, strict=True):
        row[: len(shard)] = start + np.argsort(shard.record_ids)
        start += len(shard)
    return Federation(
        np.concatenate([shard.features for shard in shards]), np.concatenate([shard.labels for shard in shards]), places
    )


@pytest.mark.parametrize(
    ("method", "talliers", "fields"),
    [
        *((method, talliers, {}) for method in SIMULATED for talliers in (2, 3)),
        ("reverse-knn", 2, {"max_agent_records": None, "ballot_radius": 6}),
    ],
)
def test_sums_are_bit_for_bit_those_of_agents_and_talliers_of_the_product(
    method: str, talliers: int, fields: dict[str, Any], make_shard: MakeShard
) -> None:
    """Real agents over real shards, real talliers, the release; beside it groups of three, with the agents' secrets."""
    shards = [make_shard(f"s{number}", records=size, seed=number) for number, size in enumerate(SIZES)]
    dimension = shards[0].dimension
    public = np.asarray(make_shard("public", records=40, seed=99, public=True).features)
    batch = QueryBatch(model_rows(dimension) if method == "blind-average" else public)
    task = task_of(method, len(shards), queries=len(batch), talliers=talliers, **fields)
    secrets = [bytes([number]) * 32 for number in range(len(shards))]
    agents = [
        AnsweringAgent(name_of(number), shard, noise_secret=secret, is_seeded=True)
        for number, (shard, secret) in enumerate(zip(shards, secrets, strict=True))
    ]
    expected = tallied(round_of(task, batch), [agent.answer(task, batch) for agent in agents])

    def source_of(number: int) -> ByteSource:
        context = (task.digest.encode(), batch.digest.encode(), shards[number].version.encode())
        return keyed_source(derive_key(secrets[number], b"noise and masks", *context), is_seeded=True)

    everybody, groups = federation_of(shards), []
    for start in range(0, len(shards), 3):
        some = everybody.part(slice(start, start + 3))
        ballots = ballots_of(task, batch, some)
        for own, agent in zip(ballots, agents[start : start + 3], strict=True):
            alone = agent.ballots(task, batch)
            if method == "blind-average":
                # The last bits of a weight hang on how many agents are multiplied at once: one grid unit at most.
                assert np.abs(own - alone).max() <= 1
                own[:] = alone
            assert np.array_equal(own, alone)
        groups.append(sum_group(task, batch, ballots, first=start, source_of=source_of).shares)
    found = total_of(groups)
    for one, other in zip(found, expected, strict=True):
        assert np.array_equal(one.words, other.words)
        assert one.contributors == other.contributors
    release, real_release = open_histogram(found, task), open_histogram(expected, task)
    assert release.noisy_votes is not None
    assert np.array_equal(release.noisy_votes, real_release.noisy_votes)  # type: ignore[arg-type]
    assert release.is_seeded


def test_a_round_of_the_benches_is_the_round_of_answering_agents(make_shard: MakeShard) -> None:
    shards = [make_shard(f"s{number}", seed=number) for number in range(3)]
    batch = QueryBatch(np.asarray(make_shard("public", records=9, seed=99, public=True).features))
    task = task_of("knn", 3, queries=9)
    ours, theirs = [], []
    for number, shard in enumerate(shards):
        name, secret = name_of(number), bytes([number]) * 32
        ours.append((Agent(name, shard), secret))
        theirs.append(AnsweringAgent(name, shard, noise_secret=secret))
    found, expected = sums.run_round(task, batch, ours), run_round(task, batch, theirs)
    assert np.array_equal(np.asarray(found.noisy_votes), np.asarray(expected.noisy_votes))


@settings(max_examples=60, deadline=None)
@given(
    method=st.sampled_from(["knn", "reverse-knn"]),
    sizes=st.lists(st.integers(0, 12), min_size=1, max_size=6).filter(any),
    k=st.integers(1, 8),
    cap=st.integers(1, 12),
    seed=st.integers(0, 2**32 - 1),
)
def test_neighbours_among_equals_are_those_of_the_smallest_ids(
    method: str, sizes: list[int], k: int, cap: int, seed: int
) -> None:
    """Features of a handful of directions, so that nearly every k-th place is tied; agents without any record, too."""
    rng = np.random.default_rng(seed)
    directions = quantize(rng.choice([-1.0, 1.0], size=(3, 4)))
    batch = QueryBatch(directions[rng.integers(0, 3, 7)])
    fields = {"max_agent_records": cap} if method == "reverse-knn" else {}
    task = task_of(method, len(sizes) + 1, queries=7, k=k, **fields)
    pool = directions[rng.integers(0, 3, sum(sizes))]
    labels = rng.integers(0, 3, len(pool)).astype(np.int16)
    places = np.full((len(sizes), max(sizes)), NOBODY, dtype=np.int32)
    expected = []
    for row, size in zip(places, sizes, strict=True):
        row[:size] = rng.permutation(len(pool))[:size]
        shuffled = rng.permutation(size)
        own = row[:size][shuffled]
        ids = np.sort(rng.choice(10**6, size, replace=False)).astype(np.int64)[shuffled]
        means = RunnerContext(
            NeighborIndexes(dimension=4), ModelStore(), lambda: pytest.fail("no noise of its own"), Trainer()
        )
        expected.append(METHODS[task.method].ballots(task, batch, Records(pool[own], ids, labels[own], "v"), means))
    found = ballots_of(task, batch, Federation(pool, labels, places))
    assert np.array_equal(found, np.stack(expected))


def test_messages_are_as_long_as_what_they_carry() -> None:
    batch = QueryBatch(quantize(np.random.default_rng(0).normal(size=(100, 64))))
    task = task_of("knn", 1000, queries=100)
    traffic = traffic_of(task, batch)
    assert 2 * 100 * 64 < traffic.asked < 2 * 100 * 64 + 3000
    *seeds, words = traffic.shares
    assert 8 * 100 * 3 < words < 8 * 100 * 3 + 1200
    assert all(32 < seed < 1200 for seed in seeds)
    told = traffic.of(1000)
    assert told["agent_sends"] == sum(traffic.shares)
    assert told["tallier_receives"] == 1000 * words
    assert told["coordinator_sends"] == 1000 * (traffic.asked + sum(traffic.shares))


@pytest.mark.parametrize("method", SIMULATED)
def test_two_hundred_agents_label_digits_at_the_price_that_was_asked_for(method: str) -> None:
    pool = digits_pool(seed=0)
    found = simulate(Simulation(200, method, epsilon=20.0, queries=40), pool)  # type: ignore[arg-type]
    assert 19.0 < found["epsilon"]["agent"] <= 20.0
    assert found["labels_right"] > 0.5
    assert found["copies_of_a_record"] == pytest.approx(200 * 20 / len(pool.labels))


@pytest.mark.parametrize(
    ("agents", "method", "said"),
    [
        ("many", None, "--agents takes whole numbers"),
        ("0", None, "at least one agent"),
        ("10", "aux-distill", "--method must be one of knn"),
    ],
)
def test_what_cannot_be_asked_of_many_agents_is_said(agents: str, method: str | None, said: str) -> None:
    with pytest.raises(InvalidSetting, match=said):
        bench_scale(agents=agents, method=method)
    with pytest.raises(InvalidSetting, match="719 public images"):
        simulate(Simulation(10, queries=5000), digits_pool(seed=0))


@pytest.mark.long
@pytest.mark.process
def test_a_shard_searched_in_parts_has_the_neighbours_of_the_definition(tmp_path: Path) -> None:
    """Few numbers per feature, so that many similarities are equal and ids decide."""
    stored = Stored(str(tmp_path / "f.npy"), records=3000, dimension=3, queries=12, k=40)
    write_features(Path(stored.path), records=3000, dimension=3)
    features = np.load(stored.path, mmap_mode="r")
    check_features(np.array(features))
    assert 2040 < np.linalg.norm(features[17].astype(float)) < 2056
    one, two = (search_together(stored, processes=count, folder=tmp_path) for count in (1, 2))
    assert np.array_equal(merged_ids(one), ids_by_definition(stored, queries=12))
    assert np.array_equal(merged_ids(two), merged_ids(one))
    assert all(0 < part.peak_bytes < 2**30 and part.cpu_s > 0 for part in one + two)
    assert len(np.unique(record_ids(3000))) == 3000
    with pytest.raises(LabelerError, match=r"process of benchmarks\.scale\.bench failed"):
        search_together(replace(stored, path=str(tmp_path / "none.npy")), processes=1, folder=tmp_path)


@pytest.mark.long
@pytest.mark.timeout(1800)  # minutes of a core, which six processes may share
@pytest.mark.process
def test_the_scale_bench_measures_every_dimension(tmp_path: Path) -> None:
    rows = bench_scale(data=tmp_path)
    assert {"records searched", "agents", "queries of a job"} <= {row.case.split(",")[0] for row in rows}
    differ = [row.value for row in rows if row.metric == "neighbours that differ"]
    assert len(differ) == 2
    assert not any(differ)
