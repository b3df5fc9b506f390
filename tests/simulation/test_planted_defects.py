"""Defects planted on purpose, one at a time: each is found within the schedules of the ordinary test, by its rule.

Each is what somebody could write by mistake: two lines in the wrong order, a step that is forgotten after a restart.
The table in docs/simulation.md is this list.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from api.coordinator import settlement
from feature_store.driving import storing
from feature_store.driving.coordinator import CoordinatorDriver
from feature_store.driving.loading import Loader
from feature_store.journal.agent_rounds import JournalRounds
from feature_store.journal.jobs import JobStore
from feature_store.journal.ledger import Ledger
from feature_store.journal.promises import PromiseStore
from feature_store.journal.tallier_memory import TallierMemory
from feature_store.journal.tasks import TaskStore
from labeler import batching, tally
from labeler.ballots import attribute_ballots
from labeler.errors import BadData, StorageFull
from labeler.federated import model_before
from labeler.messages.rounds import Refusal
from labeler.randomness import os_source
from labeler.rounds import job_state
from labeler.rounds.agent import Charged, ChargeRefused
from labeler.rounds.effects import FixContributors, Post
from tests.simulation.test_schedules import LATE, MODELS, QUICK, UNNAMED, WEIGHTS
from workers.agent import durable_ledger
from workers.agent import ledger as agent_ledger
from workers.agent.agent import Agent
from workers.agent.desk_charges import DeskCharges
from workers.studies.simulation.campaign import Stage
from workers.tallier.desk import TallierDesk
from workers.tallier.journal import TallierJournal
from workers.voting import blind_average, ensemble, neighbors
from workers.voting.neighbors import NeighborVotes

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Defect:
    """A mistake, who makes it, and the rules of which one finds it.

    Attributes:
        first: of the schedules of the ordinary test, where to begin to look: those before it do not find it, and cost.
        seeds: other schedules, of what the ordinary ones hold too little of to be sure.
    """

    who: str
    what: str
    rules: tuple[str, ...]
    plant: Callable[[Patch], None]
    first: int = 0
    seeds: tuple[int, ...] = ()


def _reserve_twice(patch: Patch) -> None:
    reserve = Ledger.reserve

    def twice(self: Ledger, name: str, charges: Any, **more: Any) -> Any:
        found = reserve(self, name, charges, **more)
        if re.fullmatch(r"job-\d+/\d+", name):
            reserve(self, f"{name}/again", charges, **more)
            self.post(f"{name}/again", connection=more.get("connection"))
        return found

    patch.setattr(Ledger, "reserve", twice)


def _open_without_posting(patch: Patch) -> None:
    store = storing.Storer._store

    def skipping(self: Any, job: Any, one: Any, connection: Any, prices: Any) -> bool:
        if isinstance(one, Post):
            head = self._ledger.head(connection=connection)
            return storing.steps.set_posted(connection, job.record.job_id, one.number, head.seq)
        return store(self, job, one, connection, prices)

    patch.setattr(storing.Storer, "_store", skipping)


def _send_before_committing(patch: Patch) -> None:
    commit = CoordinatorDriver._commit

    def sending(self: Any, plan: Any) -> None:
        self._send(plan)
        commit(self, plan)

    patch.setattr(CoordinatorDriver, "_commit", sending)


def _contributors_in_memory_only(patch: Patch) -> None:
    store = storing.Storer._store

    def skipping(self: Any, job: Any, one: Any, connection: Any, prices: Any) -> bool:
        return False if isinstance(one, FixContributors) else store(self, job, one, connection, prices)

    patch.setattr(storing.Storer, "_store", skipping)


class _Forgetful:
    """Rounds that were asked look as if they had not been."""

    def __init__(self, jobs: JobStore) -> None:
        self._jobs = jobs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._jobs, name)

    def rounds(self, *arguments: Any, **more: Any) -> Any:
        return [
            replace(one, state="waiting") if one.state == "asked" else one
            for one in self._jobs.rounds(*arguments, **more)
        ]


def _give_back_asked(patch: Patch) -> None:
    end = settlement.JournalSettlement.end

    def forgetting(self: Any, *arguments: Any, **more: Any) -> Any:
        return end(replace(self, jobs=_Forgetful(self.jobs)), *arguments, **more)

    patch.setattr(settlement.JournalSettlement, "end", forgetting)


def _lose_returned_queries(patch: Patch) -> None:
    patch.setattr(TaskStore, "give_back", lambda *_, **__: None)


def _forget_at_a_restart(patch: Patch) -> None:
    patch.setattr(Loader, "unfinished", lambda _: [])


def _send_before_storing(patch: Patch) -> None:
    patch.setattr(JournalRounds, "store_new", lambda *_, **__: True)


def _split_again(patch: Patch) -> None:
    kept = JournalRounds.kept

    def forgetting(self: JournalRounds, digest: str, **more: Any) -> Any:
        found = kept(self, digest, **more)
        return None if found is None else replace(found, bodies=None)

    patch.setattr(JournalRounds, "kept", forgetting)


def _never_erase(patch: Patch) -> None:
    patch.setattr(JournalRounds, "erase_in", lambda *_, **__: None)


def _refuse_after_the_charge(patch: Patch) -> None:
    paid = DeskCharges.paid

    def refusing(self: DeskCharges, *arguments: Any) -> Any:
        return [
            (kind, about, ChargeRefused(Refusal.of(BadData("no")))) if isinstance(event, Charged) else one
            for one in paid(self, *arguments)
            for kind, about, event in [one]
        ]

    patch.setattr(DeskCharges, "paid", refusing)


def _keep_promises_for_ever(patch: Patch) -> None:
    patch.setattr(PromiseStore, "release", lambda *_, **__: 0)
    patch.setattr(PromiseStore, "withdraw", lambda *_, **__: 0)


def _other_neighbours(patch: Patch) -> None:
    knn = NeighborVotes.knn

    def more(self: NeighborVotes, task: Any, batch: Any, records: Any) -> Any:
        votes = knn(self, task, batch, records)
        return np.roll(votes, 1, axis=1)

    patch.setattr(NeighborVotes, "knn", more)


def _report_before_storing(patch: Patch) -> None:
    keep = TallierMemory.keep_open

    def dropping(self: TallierMemory, opened: Any, held: Any, *, connection: Any) -> None:
        keep(self, opened, {}, connection=connection)

    patch.setattr(TallierMemory, "keep_open", dropping)


def _sum_before_fixing(patch: Patch) -> None:
    patch.setattr(TallierJournal, "fix", lambda *_, **__: None)


def _sum_one_less(patch: Patch) -> None:
    add = TallierDesk._add

    def less(self: Any, turn: Any, state: Any, contributors: Any) -> Any:
        return add(self, turn, state, frozenset(sorted(contributors)[:-1]))

    patch.setattr(TallierDesk, "_add", less)


def _add_one_share_twice(patch: Patch) -> None:
    add = tally._sum

    def twice(one: Any, other: Any, field: Any) -> Any:
        return add(add(one, other, field), other, field)

    patch.setattr(tally, "_sum", twice)


def _tell_nobody(patch: Patch) -> None:
    patch.setattr(TallierDesk, "_decline", lambda *_, **__: None)


def _forget_the_noise(patch: Patch) -> None:
    drawn: dict[tuple[int, str], bytes] = {}

    def of_this_process(self: TallierMemory, digest: str) -> bytes:
        return drawn.setdefault((id(self), digest), os.urandom(32))

    patch.setattr(TallierMemory, "noise_key", of_this_process)


def _add_no_noise(patch: Patch) -> None:
    class Silent:
        """A sampler of zeros."""

        def __init__(self, sigma: float) -> None:
            del sigma

        def sample(self, source: Any, shape: Any) -> Any:
            del source
            return np.zeros(shape, np.int64)

    patch.setattr(tally, "DiscreteGaussian", Silent)


def _start_every_step_anew(patch: Patch) -> None:
    def first(task: Any, releases: Any) -> Any:
        return model_before(task, [])

    patch.setattr(job_state, "model_before", first)


def _charge_no_step_in_full(patch: Patch) -> None:
    due = batching.due

    def least(task: Any, charges: Any, *, answered: int) -> Any:
        return due(task, charges, answered=max(1, answered))

    for module in (batching, durable_ledger, agent_ledger):
        patch.setattr(module, "due", least)


def _coordinator_charges_no_step_in_full(patch: Patch) -> None:
    amounts = settlement.round_amounts

    def least(*asked: Any, answered: int, **more: Any) -> Any:
        return amounts(*asked, answered=max(1, answered), **more)

    patch.setattr(settlement, "round_amounts", least)


def _pay_for_a_step_by_its_number(patch: Patch) -> None:
    """As the coordinator prices them, whose first step is step 0."""
    charge = DeskCharges._charge

    def by_number(self: Any, connection: Any, policy: Any, digest: str, ask: Any) -> bool:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(
                durable_ledger,
                "due",
                lambda task, charges, **_: batching.due(task, charges, answered=ask.batch.first_query),
            )
            return charge(self, connection, policy, digest, ask)

    patch.setattr(DeskCharges, "_charge", by_number)


def _pay_in_full_for_every_step(patch: Patch) -> None:
    patch.setattr(durable_ledger, "due", lambda _, charges, **__: dict(charges))


def _noise_of_no_key(patch: Patch) -> None:
    def anew(self: Agent, key: Any, purpose: Any, *more: Any) -> Any:
        del self, key, purpose, more
        return os_source()

    patch.setattr(Agent, "_source", anew)


def _one_attribute_less(patch: Patch) -> None:
    def fewer(neighbours: Any, *, most: int) -> Any:
        return attribute_ballots(neighbours, most=most - 1)

    patch.setattr(neighbors, "attribute_ballots", fewer)


def _likeliest_turned_round(patch: Patch) -> None:
    predict = ensemble.predict

    def smallest(head: Any, queries: Any) -> Any:
        return predict(-head, queries)

    patch.setattr(ensemble, "predict", smallest)


def _one_step_down_less(patch: Patch) -> None:
    train = blind_average.train_rows

    def shorter(records: Any, *, terms: Any, **more: Any) -> Any:
        return train(records, terms=replace(terms, iterations=terms.iterations - 1), **more)

    patch.setattr(blind_average, "train_rows", shorter)


def _go_on_with_a_full_disk(patch: Patch) -> None:
    commit = CoordinatorDriver._commit

    def hoping(self: Any, plan: Any) -> None:
        with contextlib.suppress(StorageFull):
            commit(self, plan)

    patch.setattr(CoordinatorDriver, "_commit", hoping)


DEFECTS = (
    Defect("coordinator", "charges a round twice", ("charged once",), _reserve_twice),
    Defect(
        "coordinator",
        "sends a turn's messages before its commit",
        ("reserved before asked", "posted before opened", "stored before sent", "contributors"),
        _send_before_committing,
    ),
    Defect(
        "coordinator",
        "opens sums without posting the charge",
        ("posted before opened", "completion"),
        _open_without_posting,
    ),
    Defect(
        "coordinator",
        "keeps the contributors in memory only",
        ("contributors", "completion"),
        _contributors_in_memory_only,
    ),
    Defect("coordinator", "gives a charge back that was asked", ("paid for what left",), _give_back_asked, 20),
    Defect("coordinator", "loses queries that came back", ("no query is lost",), _lose_returned_queries),
    Defect("coordinator", "forgets its jobs after a restart", ("liveness", "completion"), _forget_at_a_restart, 22),
    Defect("agent", "sends its shares before they are stored", ("stored before sent",), _send_before_storing),
    Defect("agent", "splits its answer anew when it is asked again", ("stored before sent", "one split"), _split_again),
    Defect("agent", "erases nothing when a round is settled", ("erased at the end",), _never_erase),
    Defect("agent", "refuses after it was charged", ("charged, so answered",), _refuse_after_the_charge),
    Defect("agent", "never gives back what it promised", ("nothing hangs",), _keep_promises_for_ever),
    Defect(
        "coordinator",
        "goes on with what a full disk has not kept",
        ("stored before told", "settled last", "reserved before asked", "posted before opened", "contributors"),
        _go_on_with_a_full_disk,
    ),
    Defect("coordinator", "begins each step of training from nothing", ("exact votes",), _start_every_step_anew),
    Defect("all", "charge no step of training in full", ("the price", "paid before answered"), _charge_no_step_in_full),
    Defect(
        "coordinator",
        "charges no step of training in full",
        ("the price", "paid before answered"),
        _coordinator_charges_no_step_in_full,
    ),
    Defect(
        "agent",
        "pays for a step of training by its number",
        ("paid before answered",),
        _pay_for_a_step_by_its_number,
        QUICK,
    ),
    Defect("agent", "pays in full for every step of training", ("the price",), _pay_in_full_for_every_step),
    Defect("agent", "draws its noise from no key of the round", ("exact votes",), _noise_of_no_key),
    Defect("agent", "votes for fewer attributes than a record has", ("exact votes",), _one_attribute_less),
    Defect("agent", "votes with other records than the nearest", ("exact votes",), _other_neighbours),
    Defect(
        "agent",
        "votes for what its model holds least likely",
        ("exact votes",),
        _likeliest_turned_round,
        seeds=MODELS,
    ),
    Defect(
        "agent",
        "gives the weights of a step before the last",
        ("exact votes",),
        _one_step_down_less,
        seeds=WEIGHTS,
    ),
    Defect("tallier", "reports shares before they are stored", ("stored before sent",), _report_before_storing),
    Defect("tallier", "sends its sum before it is fixed", ("stored before sent",), _sum_before_fixing),
    Defect("tallier", "sums one agent less than agreed on", ("contributors",), _sum_one_less),
    Defect("tallier", "adds one share twice", ("the same answer",), _add_one_share_twice),
    Defect("tallier", "tells nobody that it opens no round", ("liveness",), _tell_nobody, seeds=(UNNAMED,)),
    Defect("tallier", "draws its noise from what a restart forgets", ("the same answer",), _forget_the_noise, 34),
    Defect("tallier", "adds no noise where it must", ("the same answer",), _add_no_noise, 34),
)


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda one: f"{one.who} {one.what}")
def test_a_planted_defect_is_found_by_its_rule(stage: Stage, defect: Defect, monkeypatch: Patch) -> None:
    defect.plant(monkeypatch)
    for seed in defect.seeds or (*range(defect.first, QUICK), *LATE):
        found = stage.run(seed).violation
        if found:
            assert found.startswith(tuple(f"{rule}:" for rule in defect.rules)), f"seed {seed}: {found}"
            return
    pytest.fail(f"{QUICK} schedules did not find that the {defect.who} {defect.what}")


def test_the_table_in_the_documentation_names_every_defect() -> None:
    text = (Path(__file__).parents[2] / "docs" / "simulation.md").read_text()
    written = text.split("<!-- defects -->")[1].strip().splitlines()[2:]
    assert written == [f"| {one.who} | {one.what} | {' or '.join(one.rules)} |" for one in DEFECTS]
