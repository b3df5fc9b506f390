"""All steps of a task are one price: whichever is asked first costs all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from feature_store.query_selection import model_rows
from labeler.batching import round_charges, round_sizes, total_charges
from labeler.budget import epsilon_left
from labeler.driver.sending import batch_of
from labeler.errors import (
    BadData,
    BudgetExceeded,
    InvalidTask,
    PolicyRefusal,
    PrivacyRefusal,
    ProtocolViolation,
    StorageFull,
)
from labeler.ledger.database import Connection, Database, open_database
from labeler.ledger.evidence import EvidenceScope, agent_facts
from labeler.linear_model import model_before
from labeler.messages.bodies import Ask, Proposal, TallierKey
from labeler.methods.federated import check_model
from labeler.release import Release
from labeler.rounds.effects import JobRun, Patience, RoundRun
from labeler.sharing import ShareVector, unshard
from labeler.tally import QueryBatch, round_of
from labeler.task import Level, Task, parse_task
from tests.answering import AnsweringAgent, Charges, RoundsInMemory
from tests.labeler.tasks import make_task
from tests.workers.builders import policy_of
from tests.workers.journal_store import ChargingLedger, DurableSite
from workers.agent.agent import as_it_is, shares_of
from workers.agent.policy import Policy

ROWS, STEPS = 5, 4
NOW = datetime(2026, 11, 22, 12, tzinfo=UTC)


def task(nonce: str = "") -> Task:
    training = {"min_records": 5, "regularisation": 0.1, "iterations": STEPS, "sampled": {"rate": 0.3}}
    fields = {"classes": ["a", "b"], "sigma_votes": 30.0, "delta": 1e-5, "max_queries": STEPS * ROWS}
    return make_task(**fields, method="federated", training=training, nonce=nonce)


def batch(step: int, model: np.ndarray | None = None) -> QueryBatch:
    return QueryBatch(model_rows(ROWS - 1), step * ROWS, np.zeros((ROWS, 2)) if model is None else model)


POLICY = policy_of(methods=["federated"])
KEYS = tuple(TallierKey(f"t{n}", f"{n}" * 64, f"{n + 3}" * 64) for n in range(3))


def charge_of(asked: Task, step: int) -> dict[str, Any]:
    """Return what an agent says of a step when it pays for the answer to it."""
    return {
        "round_digest": round_of(asked, batch(step)).digest, "shard_version": "v", "task": asked, "num_queries": ROWS,
        "charges": round_charges(asked, ROWS), "recipients": (("t", "k"),),
    }  # fmt: skip


@dataclass
class Paid:
    """A site's ledger, and what it has spent."""

    ledger: Charges
    spent: Callable[[], int]
    promise: Callable[[Task, tuple[int, ...]], object]

    def charge(self, asked: Task, step: int) -> None:
        """Pay for the answer to one step, as an agent does."""
        self.ledger.charge(**charge_of(asked, step))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Paid]:
    with closing(open_database(tmp_path / "agent.db", anchor=None, allow_unsynced=True)) as database:
        yield durable_site(database)


def with_delta(delta: float) -> Policy:
    return Policy.model_validate(POLICY.model_dump() | {"budget": POLICY.budget.model_dump() | {"delta": delta}})


def durable_site(database: Database, policy: Policy = POLICY) -> Paid:
    """As a process begins over its journal."""
    site = DurableSite(database, policy)

    def promise(asked: Task, sizes: tuple[int, ...]) -> None:
        until = site.clock.now.timestamp() + 3600
        with database.write() as connection:
            site.durable.promise_in(connection, POLICY, Proposal("job-1", asked, sizes, KEYS, until))

    return Paid(site.ledger, site.spent, promise)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2)])
def test_the_step_that_is_charged_first_pays_for_all_whichever_it_is(site: Paid, order: tuple[int, ...]) -> None:
    whole = round_charges(task(), ROWS)["instance"]
    assert whole > 10**5
    for count, step in enumerate(order):
        site.charge(task(), step)
        assert site.spent() == whole + count
        site.charge(task(), step)  # asked again: nothing more
        assert site.spent() == whole + count
    assert site.spent() == total_charges(task(), round_sizes(task(), STEPS * ROWS))["instance"]
    with pytest.raises(PrivacyRefusal, match="of it would be answered"):
        site.charge(task(), STEPS)
    site.charge(task("another"), 2)
    assert site.spent() == 2 * whole + STEPS - 1


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 3, 0, 1)], ids=["in order", "without the first step"])
def test_what_was_promised_to_a_job_pays_for_its_steps_once_whichever_comes_first(
    site: Paid, order: tuple[int, ...]
) -> None:
    asked = task()
    sizes = round_sizes(asked, STEPS * ROWS)
    site.promise(asked, sizes)
    set_aside = total_charges(asked, sizes)["instance"]
    # Each takes what was set aside for one step, the first of them the whole price, and nothing is charged besides.
    for step in order:
        site.charge(asked, step)
        assert site.spent() == set_aside
    with pytest.raises(PrivacyRefusal, match="of it would be answered"):
        site.charge(asked, STEPS)


@pytest.mark.parametrize("kept", ["none of the transaction", "the rest of the transaction"])
def test_a_step_whose_charge_was_not_kept_pays_for_no_other_one(tmp_path: Path, kept: str) -> None:
    """A full disk takes the whole transaction with it; a refusal one charge of it (`Database.attempt`)."""
    asked, whole = task(), round_charges(task(), ROWS)["instance"]
    with closing(open_database(tmp_path / "agent.db", anchor=None, allow_unsynced=True)) as database:
        site = durable_site(database)
        assert isinstance(site.ledger, ChargingLedger)
        durable = site.ledger.ledger

        def lost(connection: Connection, step: int) -> None:
            durable.charge_in(connection, POLICY, **charge_of(asked, step))
            raise StorageFull("no room")

        if kept.startswith("none"):
            with pytest.raises(StorageFull), database.write() as connection:
                lost(connection, 0)
        else:
            with database.write() as connection, pytest.raises(StorageFull), database.attempt(connection):
                lost(connection, 0)
        assert site.spent() == 0
        site.charge(asked, 1)
        assert site.spent() == whole
        # The next process over the same journal knows that all is paid for.
        again = durable_site(database)
        again.charge(asked, 2)
        assert again.spent() == whole + 1


def opened_of(value: float) -> Release:
    """Return an opened step whose sums are all this."""
    sums, agents = np.full((ROWS, 2), value), frozenset({"a", "b", "c"})
    return Release("histogram", np.zeros(ROWS, np.int16), sums, agents, is_seeded=True)


def job_of(rounds: tuple[RoundRun, ...]) -> JobRun:
    return JobRun("job-1", task(), ("a", "b", "c"), STEPS * ROWS, 1e9, Patience(1.0, 1.0), "collecting", rounds)


counting = partial(make_task, classes=["a", "b"], sigma_votes=30.0, delta=1e-5)
winners = partial(counting, max_queries=2 * ROWS, release="winner")


@pytest.mark.parametrize("asked", [task(), winners()], ids=["steps", "winners"])
def test_what_holds_at_a_delta_and_above_is_never_restated_below_it(tmp_path: Path, asked: Task) -> None:
    """Their charges are pairs, of which the account keeps the Gaussian part: at 1e-20 it says too little."""
    with closing(open_database(tmp_path / "agent.db", anchor=None, allow_unsynced=True)) as database:
        durable_site(database, with_delta(1e-20))  # nothing was answered yet
        site = durable_site(database)
        site.charge(asked, 0)
        spent = site.spent()
        for delta in (1e-20, 9.9e-17):
            with pytest.raises(PolicyRefusal, match="holds at delta 1e-16 and above, and the policy says") as refusal:
                durable_site(database, with_delta(delta))
            assert "Name a delta of at least 1e-16" in str(refusal.value)
            with database.read() as connection, pytest.raises(PolicyRefusal):
                agent_facts(connection, EvidenceScope(), agent_id="a", delta=delta, read_at=NOW)
        for delta in (1e-16, 1e-9):
            assert durable_site(database, with_delta(delta)).spent() == spent


def test_what_holds_at_every_delta_may_be_restated_at_every_one(tmp_path: Path) -> None:
    with closing(open_database(tmp_path / "agent.db", anchor=None, allow_unsynced=True)) as database:
        durable_site(database).charge(counting(max_queries=2 * ROWS), 0)
        assert durable_site(database, with_delta(1e-90)).spent() > 0


def test_a_policy_that_was_narrowed_while_a_task_was_admitted_pays_for_none_of_it(tmp_path: Path) -> None:
    with closing(open_database(tmp_path / "agent.db", anchor=None, allow_unsynced=True)) as database:
        site = durable_site(database, with_delta(1e-20))
        for asked in (task(), winners()):
            with pytest.raises(PolicyRefusal, match=r"budget\.delta"):
                site.charge(asked, 0)
        assert site.spent() == 0


def test_an_account_that_covers_no_whole_task_answers_no_step_of_it(tmp_path: Path) -> None:
    less = epsilon_left(round_charges(task(), ROWS)["instance"] - 1, POLICY.budget.delta)
    policy = policy_of(methods=["federated"], budget={"instance_epsilon": less})
    with closing(open_database(tmp_path / "agent.db", anchor=None, allow_unsynced=True)) as database:
        site = durable_site(database, policy)
        for step in range(STEPS):
            with pytest.raises(BudgetExceeded):
                site.charge(task(), step)
        assert site.spent() == 0


def test_a_step_is_asked_with_its_public_model_and_nothing_else_is() -> None:
    model = np.arange(2.0 * ROWS).reshape(ROWS, 2) / 4
    ask = Ask(task(), batch(2, model), KEYS, 1e9)
    again = Ask.decode(ask.encode())
    assert again.batch.model is not None
    assert np.array_equal(again.batch.model, model)
    # The digest names place, rows and model: noise and coins are of the round, and so of one ballot alone.
    assert again.round == Ask(task(), batch(2, model.copy()), KEYS, 1e9).round
    for other in (batch(1, model), batch(2), batch(2, model + 2.0**-16), QueryBatch(model_rows(ROWS - 1), 2 * ROWS)):
        assert again.round.digest != round_of(task(), other).digest
    with pytest.raises(ProtocolViolation, match="carries a public model where its task trains one in steps"):
        Ask(task(), QueryBatch(model_rows(ROWS - 1), 0), KEYS, 1e9)
    with pytest.raises(ProtocolViolation, match="and nowhere else"):
        Ask(counting(max_queries=40), batch(0, model), KEYS, 1e9)


def test_the_key_of_a_round_never_serves_two_models(make_shard: Any) -> None:
    """Charged and not stored, a step is asked again with another model: what both open must not share their noise."""
    shard, kept = make_shard("own"), RoundsInMemory()
    rows = shard.dimension + 1
    fields = task().model_dump(mode="json") | {
        "classes": shard.classes, "max_queries": STEPS * rows, "backbone_fingerprint": shard.fingerprint, "agents": 1,
    }  # fmt: skip
    sampled = {"rate": 1.0, "unit": "agent", "learning_rate": 1e3}
    asked = parse_task(fields | {"training": task().training.model_dump() | {"sampled": sampled}})
    agent = AnsweringAgent("a", shard, rounds=kept, engine="numpy")
    sums, bare = [], []
    for size in (0.0, 2.0):
        one = QueryBatch(model_rows(shard.dimension), 0, np.full((rows, len(shard.classes)), size))
        agent.charge(asked, one)
        key = kept.key(round_of(asked, one).digest)
        bodies = agent.computed(asked, one, key=key, seal=as_it_is).bodies
        shares = [share.share for share in shares_of("a", round_of(asked, one), bodies)]
        sums.append(unshard([share.expand() for share in shares if isinstance(share, ShareVector)]))
        bare.append(agent.ballots(asked, one, key))
    assert (bare[0] != bare[1]).any()
    apart = (sums[0] - sums[1]) - (bare[0] - bare[1])
    # Two draws of noise, in all numbers: one that comes out the same twice is one in a thousand.
    assert np.count_nonzero(apart) > 0.9 * apart.size


@pytest.mark.parametrize(
    "model",
    [np.full((ROWS, 2), np.nan), np.zeros((ROWS - 1, 2)), np.full((ROWS, 2), 2.0**20), np.full((ROWS, 2), 1e-9)],
)
def test_what_is_no_public_model_of_the_task_is_refused(model: np.ndarray) -> None:
    with pytest.raises(BadData, match="the public model of a step"):
        check_model(model, task())


def test_a_step_is_not_asked_before_those_it_follows_from_are_opened() -> None:
    rounds = tuple(RoundRun(n, n * ROWS, ROWS, opened=opened_of(1.0) if n == 0 else None) for n in range(STEPS))
    job = job_of(rounds)
    assert not np.any(job.model_asked(rounds[0]))
    assert np.all(job.model_asked(rounds[1]) < 0)
    with pytest.raises(BadData, match="before those that it follows from are opened"):
        job.model_asked(rounds[2])


def test_a_step_is_tied_to_what_it_asks_once_its_model_is_known_and_to_nothing_else() -> None:
    job = job_of(tuple(RoundRun(n, n * ROWS, ROWS) for n in range(STEPS)))
    digests = set()
    for step in range(STEPS):
        assert job.untied == (step,)
        tied = batch_of(model_rows(ROWS - 1), job, job.rounds[step])
        assert tied.model is not None
        digests.add(tied.digest)
        for state, more in (("asked", {}), ("opened", {"opened": opened_of(1.0)})):
            ended = replace(job.rounds[step], state=state, batch_digest=tied.digest, round_digest="r" + tied.digest)
            done = replace(ended, **more)
            job = replace(job, rounds=(*job.rounds[:step], done, *job.rounds[step + 1 :]))
            assert job.untied == (() if state == "asked" or step + 1 == STEPS else (step + 1,))
    assert len(digests) == STEPS


@pytest.mark.parametrize(
    ("unit", "sampled", "words"),
    [
        ("record", {"instance"}, "comes or goes, and not at the other level"),
        ("agent", {"instance", "agent"}, "comes or goes, and twice where one of its records changes what it adds"),
    ],
)
def test_what_is_said_of_the_coin_is_what_is_charged(unit: str, sampled: set[Level], words: str) -> None:
    fields = task().model_dump(mode="json") | {"sigma_votes": 60.0}
    training = fields["training"] | {"radius": 1.0}
    of_rate = {
        rate: parse_task(fields | {"training": training | {"sampled": {"rate": rate, "unit": unit}}})
        for rate in (0.1, 1.0)
    }
    drawn, everybody = (round_charges(one, ROWS) for one in of_rate.values())
    assert {level for level in drawn if drawn[level] < everybody[level]} == sampled
    assert words in (of_rate[0.1].traits.one_record(of_rate[0.1]) or "")


@pytest.mark.parametrize(
    ("unit", "changes"),
    [
        ("record", {"rate": 1e-6}),
        ("record", {"rate": 1e-6, "learning_rate": 1e6, "momentum": 0.999999}),
        ("agent", {"rate": 1e-6, "momentum": 0.999999}),
    ],
)
def test_no_task_that_is_taken_makes_a_model_that_its_agents_refuse(unit: str, changes: dict[str, float]) -> None:
    """Its first step has paid for all."""
    fields = task().model_dump(mode="json")
    training = fields["training"] | {"clip_norm": 1e3, "min_records": 1, "sampled": {"unit": unit} | changes}
    asked = parse_task(fields | {"training": training})
    for steps in range(STEPS):
        check_model(model_before(asked, [opened_of(3e12)] * steps), asked)
    with pytest.raises(InvalidTask, match=r"training\.sampled\.rate"):
        parse_task(fields | {"training": training | {"sampled": {"unit": unit, "rate": 1e-300}}})
