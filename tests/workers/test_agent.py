"""Agents: what leaves them, what they refuse, and what they charge."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from datetime import timedelta
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

import labeler.methods.knn
from api.coordinator.pricing import finite_levels
from feature_store.shard import Shard
from labeler.batching import round_charges
from labeler.budget import MOST_EPSILON, UNBOUNDED_NANO, budget_for
from labeler.errors import BudgetExceeded, MixedShards, PolicyRefusal, PrivacyRefusal
from labeler.ledger.database import open_database
from labeler.planning import integer_event, price
from labeler.randomness import seeded_source
from labeler.rounds.agent import Recipients
from labeler.tally import QueryBatch
from labeler.task import Level, Task
from tests.answering import AnsweringAgent, Charges
from tests.labeler.tasks import make_task
from tests.workers.builders import policy_of
from tests.workers.journal_store import DurableSite
from workers.agent.policy import Policy

SECRET = seeded_source(b"agent under test").bytes(32)


def task_for(shard: Shard, **changes: object) -> Task:
    fields = {"classes": shard.classes, "backbone_fingerprint": shard.fingerprint, "agents": 1}
    return make_task(**(fields | {"k": 5, "sigma_votes": 4.0, "max_queries": 9} | changes))


def agent_for(shard: Shard, *, ledger: Charges | None = None) -> AnsweringAgent:
    return AnsweringAgent("a", shard, noise_secret=SECRET, ledger=ledger, is_seeded=True, engine="numpy")


@pytest.fixture
def batch(make_shard) -> QueryBatch:
    return QueryBatch(make_shard("public", records=9, seed=99, public=True).features[:])


def test_a_batch_beyond_the_queries_paid_for_is_refused_uncharged(make_shard, batch) -> None:
    shard = make_shard("own")
    agent = agent_for(shard)
    with pytest.raises(PrivacyRefusal, match="would reach query 10"):
        agent.answer(task_for(shard), QueryBatch(batch.features, first_query=1))
    with pytest.raises(MixedShards, match="dimension 15"):
        agent.answer(task_for(shard), QueryBatch(batch.features[:, :-1]))
    assert not agent.charged


@pytest.mark.parametrize("method", ["knn", "reverse-knn"])
def test_ballots_found_in_many_blocks_are_those_found_in_one(make_shard, batch, monkeypatch, method) -> None:
    shard = make_shard("own")
    task = task_for(shard, method=method, k=7)
    expected = agent_for(shard).ballots(task, batch)
    assert len(shard.labels) * 7 > 2 * expected.size
    monkeypatch.setattr(labeler.methods.knn, "NEIGHBORS_AT_ONCE", 20)
    assert np.array_equal(agent_for(shard).ballots(task, batch), expected)
    monkeypatch.setattr(labeler.methods.knn, "NEIGHBORS_AT_ONCE", 1)
    assert np.array_equal(agent_for(shard).ballots(task, batch), expected)


def test_nothing_private_prints(make_shard, batch) -> None:
    shard = make_shard("own")
    agent = agent_for(shard)
    agent.answer(task_for(shard), batch)
    shown = f"{agent!r} {agent}"
    assert "60" not in repr(agent)
    assert SECRET.hex() not in shown
    assert repr(SECRET) not in shown


# The ledger.


def policy_with(*, max_queries_per_day: int = 100, **budget: object) -> Policy:
    return policy_of(
        budget={"instance_epsilon": 2.0} | budget,
        max_queries_per_day=max_queries_per_day,
        releases=["histogram", "winner"],
        max_noise_contributors=1,
    )


@pytest.fixture
def durable(tmp_path: Path) -> Iterator[DurableSite]:
    path = tmp_path / "journal.db"
    with open_database(path, anchor=path.with_suffix(".head"), allow_unsynced=True) as database:
        yield DurableSite(database, policy_with())


TALLIERS: Recipients = (("tallier-0", "a" * 64), ("tallier-1", "b" * 64))


def charge(
    ledger: Charges,
    amount: int | None,
    *,
    name: str = "r",
    version: str = "v",
    queries: int = 9,
    nonce: str = "",
    recipients: Recipients = TALLIERS,
) -> None:
    charges: dict[Level, int] = {} if amount is None else {"instance": amount}
    task = make_task(classes=["a", "b"], max_queries=900, agents=1, nonce=nonce)
    ledger.charge(
        round_digest=sha256(name.encode()).hexdigest(),
        shard_version=version,
        charges=charges,
        task=task,
        num_queries=queries,
        recipients=recipients,
    )


def test_the_cap_can_be_spent_to_the_last_unit_and_not_beyond(durable: DurableSite) -> None:
    cap = budget_for(2.0, 1e-5)
    charge(durable.ledger, cap - 1)
    with pytest.raises(BudgetExceeded):
        charge(durable.ledger, 2, name="two")
    charge(durable.ledger, 1, name="two")  # what was refused is not remembered as answered
    with pytest.raises(BudgetExceeded):
        charge(durable.ledger, 1, name="another")
    assert durable.spent() == cap


OUT_OF_REACH = {
    "instance": {"sigma_votes": 1e-3},
    "agent": {"sigma_votes": 1.0, "k": 1000},
}
"""Tasks with a finite mu^2 at a level, of which nothing is proved: a change is far beyond the noise sampler's reach."""


@pytest.mark.parametrize("level", OUT_OF_REACH)
def test_an_agent_charges_nothing_for_a_level_of_which_nothing_is_proved(level: Level) -> None:
    """A finite mu^2 was charged, and the agent answered what its coordinator would have refused."""
    task = make_task(classes=["a", "b"], delta=1e-5, max_queries=4, agents=1, **OUT_OF_REACH[level])
    assert integer_event(task, level, 4) is not None
    assert not math.isfinite(price(task).statement(level).epsilon)
    assert level not in round_charges(task, 1)
    assert finite_levels(task, 4) == tuple(round_charges(task, 4))


@pytest.mark.parametrize("level", OUT_OF_REACH)
def test_an_agent_refuses_a_task_without_a_finite_price_where_that_level_is_limited(
    make_shard: Callable[..., Shard], durable: DurableSite, level: Level
) -> None:
    shard = make_shard("own")
    task = task_for(shard, delta=1e-5, max_queries=4, **OUT_OF_REACH[level])
    batch = QueryBatch(np.asarray(shard.features[:4]))
    durable.policy = policy_with(agent_epsilon=100.0)
    with pytest.raises(PrivacyRefusal, match=f"no finite {level}-level price"):
        agent_for(shard, ledger=durable.ledger).answer(task, batch)
    assert durable.spent() == 0


def test_even_without_any_limit_nothing_is_answered_that_promises_nothing_to_a_record(durable: DurableSite) -> None:
    durable.policy = policy_with(instance_epsilon="unlimited")
    with pytest.raises(PrivacyRefusal, match="no finite instance-level price"):
        charge(durable.ledger, None)
    assert durable.journal.balance("agent:a", "agent").spent == 0


def test_a_level_without_a_price_is_written_down_so_that_no_later_cap_counts_it(durable: DurableSite) -> None:
    charge(durable.ledger, 5)
    assert durable.spent() == 5
    assert durable.journal.balance("agent:a", "agent").spent == UNBOUNDED_NANO
    durable.policy = policy_with(agent_epsilon=MOST_EPSILON)
    with pytest.raises(BudgetExceeded):
        charge(durable.ledger, 5, name="next")


def test_a_limited_level_without_a_price_is_refused(durable: DurableSite) -> None:
    with pytest.raises(PrivacyRefusal, match="no finite instance-level price"):
        charge(durable.ledger, None)
    assert durable.spent() == 0


def test_the_days_queries_are_limited_and_a_repetition_is_not_counted(durable: DurableSite) -> None:
    charge(durable.ledger, 1, name="morning", queries=60)
    with pytest.raises(
        PolicyRefusal, match=r"allow\.max_queries_per_day: .* 100 queries in 24 hours, 60 were answered"
    ):
        charge(durable.ledger, 1, name="noon", queries=41)
    charge(durable.ledger, 1, name="morning", queries=60)
    charge(durable.ledger, 1, name="noon", queries=40)
    durable.clock.now += timedelta(hours=25)
    charge(durable.ledger, 1, name="next day", queries=100)


def test_a_policy_tightened_while_the_agent_runs_holds_at_once(durable: DurableSite) -> None:
    charge(durable.ledger, 10)
    durable.policy = policy_with(instance_epsilon=1e-6)
    with pytest.raises(BudgetExceeded, match="below that"):
        charge(durable.ledger, 1, name="next")
    durable.policy = policy_with()
    charge(durable.ledger, 1, name="next")
    assert durable.spent() == 11
