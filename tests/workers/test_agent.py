"""Agents: what leaves them, what they refuse, and what they charge."""

from __future__ import annotations

import numpy as np
import pytest

from feature_store.shard import Shard
from labeler.batch import QueryBatch
from labeler.budget import Account
from labeler.errors import BudgetExceeded, InvalidSetting, MixedShards, PrivacyRefusal
from labeler.planning import price
from labeler.randomness import seeded_source
from labeler.sharing import unshard
from labeler.tally import InputShare
from labeler.task import Task, parse_task
from workers.agent import Agent

SECRET = seeded_source(b"agent under test").bytes(32)


def task_for(shard: Shard, **changes: object) -> Task:
    fields: dict[str, object] = {
        "name": "t",
        "classes": shard.classes,
        "k": 5,
        "sigma_votes": 4.0,
        "delta": 1e-4,
        "max_queries": 9,
        "agents": 1,
        "backbone_fingerprint": shard.fingerprint,
    }
    return parse_task(fields | changes)


def agent_for(shard: Shard, *, cap: int = 10**15, engine: str = "numpy") -> Agent:
    return Agent(
        "a",
        shard,
        noise_secret=SECRET,
        accounts={"instance": Account("a", "instance", cap)},
        is_seeded=True,
        engine=engine,
    )


def opened(shares: tuple[InputShare, ...]) -> np.ndarray:
    return unshard([message.share.expand() for message in shares])


@pytest.fixture
def batch(make_shard) -> QueryBatch:
    return QueryBatch(make_shard("public", records=9, seed=99, public=True).features[:])


def test_shares_add_up_to_votes_plus_noise(make_shard, batch) -> None:
    shard = make_shard("own")
    task = task_for(shard)
    agent = agent_for(shard)
    noise = opened(agent.answer(task, batch)) - task.scale * agent.ballots(task, batch)
    assert 0.4 < noise.std() / task.share_sigma_grid < 1.8


def test_asked_twice_it_sends_the_same_bytes_and_charges_once(make_shard, batch) -> None:
    shard = make_shard("own")
    task = task_for(shard)
    agent = agent_for(shard)
    first, second = agent.answer(task, batch), agent.answer(task, batch)
    assert [m.share.fingerprint() for m in first] == [m.share.fingerprint() for m in second]
    assert agent.accounts["instance"].spent == price(task).instance.charge_nano


def test_after_a_deletion_a_batch_is_answered_in_a_new_task_only(make_shard, batch) -> None:
    """The other agents would replay their noise, so two releases of one batch would differ by this agent alone."""
    shard = make_shard("own")
    task = task_for(shard)
    agent = agent_for(shard)
    noise_before = opened(agent.answer(task, batch)) - task.scale * agent.ballots(task, batch)
    shard.delete(shard.record_ids[:1])
    with pytest.raises(PrivacyRefusal, match="Ask in a new task"):
        agent.answer(task, batch)
    again = task.model_copy(update={"nonce": "after the deletion"})
    noise_after = opened(agent.answer(again, batch)) - task.scale * agent.ballots(again, batch)
    assert (noise_before != noise_after).mean() > 0.9
    assert agent.accounts["instance"].spent == 2 * price(task).instance.charge_nano


def test_a_living_agent_forgets_a_deleted_record_at_once(make_shard, batch) -> None:
    shard = make_shard("own", records=6)
    task = task_for(shard, k=6)
    agent = agent_for(shard)
    agent.answer(task, batch)
    shard.delete(shard.record_ids[:2])
    assert agent.ballots(task, batch).sum(axis=1).tolist() == [4] * len(batch)


def test_a_batch_beyond_the_queries_paid_for_is_refused_uncharged(make_shard, batch) -> None:
    shard = make_shard("own")
    agent = agent_for(shard)
    with pytest.raises(PrivacyRefusal, match="would reach query 10"):
        agent.answer(task_for(shard), QueryBatch(batch.features, first_query=1))
    with pytest.raises(MixedShards, match="dimension 15"):
        agent.answer(task_for(shard), QueryBatch(batch.features[:, :-1]))
    assert agent.accounts["instance"].spent == 0


def test_a_deleted_record_no_longer_votes(make_shard, batch) -> None:
    shard = make_shard("own", records=6)
    task = task_for(shard, k=6)
    assert agent_for(shard).ballots(task, batch).sum(axis=1).tolist() == [6] * len(batch)
    shard.delete(shard.record_ids[:2])
    assert agent_for(shard).ballots(task, batch).sum(axis=1).tolist() == [4] * len(batch)


@pytest.mark.parametrize("engine", ["numpy", "faiss", "torch"])
def test_every_engine_casts_the_same_ballots(make_shard, batch, engine) -> None:
    shard = make_shard("own")
    for method, k in (("knn", 7), ("reverse-knn", 2)):
        task = task_for(shard, method=method, k=k)
        expected = agent_for(shard).ballots(task, batch)
        assert np.array_equal(agent_for(shard, engine=engine).ballots(task, batch), expected)


def test_each_record_votes_k_times_in_a_reverse_knn_batch(make_shard, batch) -> None:
    shard = make_shard("own", records=20)
    votes = agent_for(shard).ballots(task_for(shard, method="reverse-knn", k=2), batch)
    assert votes.sum() == 40
    assert votes.sum(axis=0).tolist() == [14, 14, 12]


def test_a_cap_on_records_holds(make_shard, batch) -> None:
    shard = make_shard("own", records=20)
    task = task_for(shard, method="reverse-knn", k=1, max_agent_records=8)
    assert agent_for(shard).ballots(task, batch).sum() == 8


def test_an_exhausted_account_refuses_and_nothing_is_charged(make_shard, batch) -> None:
    shard = make_shard("own")
    task = task_for(shard)
    agent = agent_for(shard, cap=(price(task).instance.charge_nano or 0) - 1)
    with pytest.raises(BudgetExceeded, match="'a'"):
        agent.answer(task, batch)
    assert agent.accounts["instance"].spent == 0


def test_an_agent_needs_an_instance_level_account(make_shard) -> None:
    with pytest.raises(InvalidSetting, match="no instance-level account"):
        Agent("a", make_shard("own"), noise_secret=SECRET, accounts={})


def test_a_level_without_a_finite_price_is_refused_where_it_is_budgeted(make_shard, batch) -> None:
    shard = make_shard("own")
    task = task_for(shard, method="reverse-knn", k=1)
    accounts = {"instance": Account("a", "instance", 10**15), "agent": Account("a", "agent", 10**15)}
    agent = Agent("a", shard, noise_secret=SECRET, accounts=accounts, engine="numpy")
    with pytest.raises(PrivacyRefusal, match="no finite agent-level price"):
        agent.answer(task, batch)


def test_a_reverse_knn_task_is_answered_in_one_batch_only(make_shard, batch) -> None:
    shard = make_shard("own")
    task = task_for(shard, method="reverse-knn", k=1, max_queries=10)
    with pytest.raises(PrivacyRefusal, match="one batch of all its 10 queries"):
        agent_for(shard).answer(task, batch)


@pytest.mark.parametrize("changes", [{"classes": ("dog", "cat", "eel")}, {"backbone_fingerprint": "another"}])
def test_a_task_for_other_classes_or_another_backbone_is_refused(make_shard, batch, changes) -> None:
    shard = make_shard("own")
    with pytest.raises(MixedShards):
        agent_for(shard).answer(task_for(shard, **changes), batch)


def test_nothing_private_prints(make_shard, batch) -> None:
    shard = make_shard("own")
    agent = agent_for(shard)
    agent.answer(task_for(shard), batch)
    shown = f"{agent!r} {agent} {agent.accounts!r}"
    assert "60" not in repr(agent)
    assert SECRET.hex() not in shown
    assert repr(SECRET) not in shown
