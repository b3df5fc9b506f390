"""A round in one process: in the winner's field, with its row check, and with any engine that finds winners."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks import one_round as benches
from labeler.budget import Account
from labeler.errors import ProtocolViolation, QuorumNotReached
from labeler.randomness import os_source, seeded_source
from labeler.rounds.agent import IN_PROCESS, Recipients
from labeler.sharing import WinnerTerms, split
from labeler.tally import BallotShare, InputShare, QueryBatch
from labeler.task import Task, parse_task
from tests.answering import AnsweringAgent
from tests.one_round import run_round
from tests.oracles.winner_reference import reference_winners
from workers.agent.agent import Agent, InMemoryLedger

QUERIES = 9


def task_for(classes: Sequence[str], fingerprint: str, **changes: object) -> Task:
    fields: dict[str, object] = {
        "name": "t", "classes": tuple(classes), "k": 5, "sigma_votes": 1.0, "delta": 1e-4, "max_queries": QUERIES,
        "agents": 3, "max_dropouts": 1, "backbone_fingerprint": fingerprint, "release": "winner",
    }  # fmt: skip
    return parse_task(fields | changes)


class Cheater(AnsweringAgent):
    """Adds a million votes for class 0 to its ballots, after its own program has checked them."""

    def answer(self, task: Task, batch: QueryBatch, *, recipients: Recipients = IN_PROCESS) -> tuple[InputShare, ...]:
        sent, terms = super().answer(task, batch, recipients=recipients), task.winner_terms
        assert terms is not None
        more = np.zeros((len(batch), task.num_classes + 1), dtype=np.int64)
        more[3, 0] = 10**6
        changed = []
        for own, extra in zip(sent, split(more, num_talliers=3, source=os_source(), field=terms.field), strict=True):
            assert isinstance(own.share, BallotShare)
            words = terms.field.add(own.share.ballots.expand(), extra.expand())
            ballots = replace(own.share.ballots, seed=None, words=words)
            changed.append(replace(own, share=BallotShare(ballots, own.share.noise)))
        return tuple(changed)


@pytest.fixture
def batch(make_shard) -> QueryBatch:
    return QueryBatch(make_shard("public", records=QUERIES, seed=99, public=True).features[:])


@pytest.fixture
def make_agents(make_shard):
    shards = [make_shard(f"own-{number}", seed=number) for number in range(3)]

    def make(kinds: Sequence[type[AnsweringAgent]]) -> list[AnsweringAgent]:
        return [
            kind(
                f"agent-{number}",
                shards[number],
                noise_secret=seeded_source(number).bytes(32),
                ledger=InMemoryLedger({"instance": Account(f"agent-{number}", "instance", 10**15)}),
                is_seeded=True,
                engine="numpy",
            )
            for number, kind in enumerate(kinds)
        ]

    return make


@pytest.fixture
def task(make_shard) -> Task:
    shard = make_shard("for its classes")
    return task_for(shard.classes, shard.fingerprint)


@pytest.mark.parametrize("method", ["knn", "reverse-knn"])
def test_an_engine_that_computes_on_shares_gives_what_the_round_gives_without_one(
    make_agents, batch, task, method
) -> None:
    """At a threshold where some abstain; the engines of workers.winner take exactly these shares and terms."""
    asked = task.model_copy(update={"method": method, "abstain_below": 15})
    seen: list[WinnerTerms] = []

    class Engine:
        def winners(self, shares: Sequence[NDArray[np.uint64]], terms: WinnerTerms) -> NDArray[np.int16]:
            seen.append(terms)
            return reference_winners(shares, field=terms.field, threshold=terms.threshold)

    def run(**options):
        return run_round(asked, batch, make_agents([AnsweringAgent] * 3), post_charge=lambda _: None, **options)

    plain, engine = run(), run(winner_engine=Engine())
    assert seen == [asked.winner_terms]
    np.testing.assert_array_equal(plain.labels, engine.labels)
    assert plain.noisy_votes is None
    assert plain.labels.min() >= -1


def test_a_threshold_that_nobody_reaches_leaves_every_query_without_an_answer(make_agents, batch, task) -> None:
    asked = task.model_copy(update={"abstain_below": 10**6})
    release = run_round(asked, batch, make_agents([AnsweringAgent] * 3), post_charge=lambda _: None)
    assert release.labels.tolist() == [-1] * QUERIES


def test_a_ballot_that_is_too_large_voids_the_round_after_the_charge(make_agents, batch, task) -> None:
    posted: list[frozenset[str]] = []
    with pytest.raises(ProtocolViolation, match="'agent-1'; nothing is opened and the round is void"):
        run_round(task, batch, make_agents([AnsweringAgent, Cheater, AnsweringAgent]), post_charge=posted.append)
    assert posted == [frozenset({"agent-0", "agent-1", "agent-2"})]


def test_below_the_quorum_nothing_is_charged_or_opened(make_agents, batch, task) -> None:
    posted: list[frozenset[str]] = []
    with pytest.raises(QuorumNotReached):
        run_round(task, batch, make_agents([AnsweringAgent]), post_charge=posted.append)
    assert posted == []
    two = run_round(task, batch, make_agents([AnsweringAgent, AnsweringAgent]), post_charge=posted.append)
    assert len(two.labels) == QUERIES


def test_a_round_of_the_benches_is_the_round_of_answering_agents(make_shard) -> None:
    shards = [make_shard(f"s{number}", seed=number) for number in range(3)]
    batch = QueryBatch(make_shard("public", records=QUERIES, seed=99, public=True).features[:])
    secrets = [bytes([number]) * 32 for number in range(3)]
    task = task_for(shards[0].classes, shards[0].fingerprint, release="histogram", max_dropouts=0)
    ours = [(Agent(f"a{n}", shard), secret) for n, (shard, secret) in enumerate(zip(shards, secrets, strict=True))]
    theirs = [
        AnsweringAgent(
            f"a{n}", shard, ledger=InMemoryLedger({"instance": Account("own", "instance", 10**18)}), noise_secret=secret
        )
        for n, (shard, secret) in enumerate(zip(shards, secrets, strict=True))
    ]
    found, expected = benches.run_round(task, batch, ours), run_round(task, batch, theirs)
    assert np.array_equal(np.asarray(found.noisy_votes), np.asarray(expected.noisy_votes))
