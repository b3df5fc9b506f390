"""Many agents at once answer as each would alone: the same ballots, the same shares, the same sums, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.answering import AnsweringAgent
from benchmarks.plain_tallier import Tallier, agree_on_contributors
from feature_store.quantize import quantize
from feature_store.query_selection import model_rows
from feature_store.shard import Shard
from labeler.budget import Account
from labeler.methods import METHODS
from labeler.methods.terms import RunnerContext
from labeler.randomness import ByteSource, derive_key, keyed_source
from labeler.records import ModelStore, Records
from labeler.release import open_histogram
from labeler.tally import QueryBatch, round_of
from labeler.task import Task, parse_task
from workers.agent.ledger import InMemoryLedger
from workers.learning.learner import Trainer
from workers.simulated.ballots import SIMULATED, ballots_of, group_size
from workers.simulated.federation import NOBODY, Federation
from workers.simulated.sums import name_of, sum_group, total_of, traffic_of
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


def unlimited() -> InMemoryLedger:
    return InMemoryLedger({"instance": Account("own", "instance", 10**18)})


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
        AnsweringAgent(name_of(number), shard, ledger=unlimited(), noise_secret=secret, is_seeded=True)
        for number, (shard, secret) in enumerate(zip(shards, secrets, strict=True))
    ]
    round = round_of(task, batch)
    real = [Tallier(index, round) for index in range(talliers)]
    for agent in agents:
        for tallier, share in zip(real, agent.answer(task, batch), strict=True):
            tallier.receive(share)
    contributors = agree_on_contributors(real)
    expected = [tallier.aggregate_share(contributors) for tallier in real]

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


def test_a_group_keeps_within_its_memory_and_has_an_agent_at_least() -> None:
    rng = np.random.default_rng(0)
    features = quantize(rng.normal(size=(50, 8)))
    agents = Federation(features, np.zeros(50, np.int16), np.tile(np.arange(50, dtype=np.int32), (3, 1)))
    for method in SIMULATED:
        batch = QueryBatch(model_rows(8) if method == "blind-average" else features[:40])
        task = task_of(method, 3, queries=len(batch))
        size = group_size(task, batch, agents)
        assert 1 < size <= 2**22 // (len(batch) * 3)
    huge = Federation(features, np.zeros(50, np.int16), np.zeros((1, 2**21), dtype=np.int32))
    assert group_size(task, batch, huge) == 1


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
