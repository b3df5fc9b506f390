"""Defects planted on purpose, one at a time: each is found by its rule, within a few schedules of the kind it is about.

Each is what somebody could write by mistake: two lines in the wrong order, a step that is forgotten after a restart.
The table in docs/simulation.md is this list. Schedules are named by what they are and not by their seeds, and at most
three times as many are looked at as are needed in the mean, so that a change that moves them loses no defect.
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

from api.coordinator import pricing
from labeler import batching, tally
from labeler.driver import reading, storing
from labeler.driver.coordinator import CoordinatorDriver
from labeler.driver.sending import send_off
from labeler.errors import BadData, StorageFull
from labeler.ledger.agent_memory import JournalRounds
from labeler.ledger.jobs import JobStore
from labeler.ledger.ledger import Ledger
from labeler.ledger.lifetimes import LifetimeSpends
from labeler.ledger.promises import PromiseStore
from labeler.ledger.tallier_memory import TallierMemory
from labeler.ledger.tasks import TaskStore
from labeler.linear_model import model_before
from labeler.messages.bodies import Refusal
from labeler.methods import METHODS, knn
from labeler.methods.knn import attribute_ballots
from labeler.randomness import os_source
from labeler.rounds import effects
from labeler.rounds.agent import Charged, ChargeRefused
from labeler.rounds.effects import FixContributors, Post
from tests.simulation.campaign import Stage
from tests.simulation.case import Case
from tests.simulation.seeds import Wanted, comes_late, comes_through, is_left_to_a_tallier, of, seeds_where
from workers import voting
from workers.agent import agent, ledger
from workers.agent.agent import Agent
from workers.agent.driver import AgentDriver
from workers.learning import learner, linear
from workers.learning.private_heads import FittedHeads, PrivateHeads
from workers.tallier.rounds import TallierRounds
from workers.tallier.service import TallierDriver, TallierJournal

Patch = pytest.MonkeyPatch

MOST = 24
"""Schedules in which a defect is looked for."""

VOTES = of("neighbours", "attributes", "records")


@dataclass(frozen=True)
class Defect:
    """A mistake, who makes it, and the rules of which one finds it.

    Attributes:
        among: of which schedules; in others it cannot show, or hardly ever does.
    """

    who: str
    what: str
    rules: tuple[str, ...]
    plant: Callable[[Patch], None]
    among: Wanted = VOTES

    def seeds(self, *, first: int = 0) -> tuple[int, ...]:
        """Return those that are looked at, until it is found."""
        return seeds_where(self.among, MOST, first=first)


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
        send_off(plan, self._sender, self._ledger, self._mailbox)
        commit(self, plan)

    patch.setattr(CoordinatorDriver, "_commit", sending)


def _contributors_in_memory_only(patch: Patch) -> None:
    store = storing.Storer._store

    def skipping(self: Any, job: Any, one: Any, connection: Any, prices: Any) -> bool:
        return False if isinstance(one, FixContributors) else store(self, job, one, connection, prices)

    patch.setattr(storing.Storer, "_store", skipping)
    patch.setattr(reading, "_remembering", lambda _, known: known)  # else the journal says that nothing is fixed


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
    end = pricing.JournalSettlement.end

    def forgetting(self: Any, *arguments: Any, **more: Any) -> Any:
        return end(replace(self, jobs=_Forgetful(self.jobs)), *arguments, **more)

    patch.setattr(pricing.JournalSettlement, "end", forgetting)


def _lose_returned_queries(patch: Patch) -> None:
    patch.setattr(TaskStore, "give_back", lambda *_, **__: None)


def _forget_at_a_restart(patch: Patch) -> None:
    patch.setattr(JobStore, "unfinished_ids", lambda _: [])


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
    paid = AgentDriver._paid

    def refusing(self: AgentDriver, *arguments: Any) -> Any:
        return [
            (about, ChargeRefused(Refusal.of(BadData("no")))) if isinstance(event, Charged) else (about, event)
            for about, event in paid(self, *arguments)
        ]

    patch.setattr(AgentDriver, "_paid", refusing)


def _keep_promises_for_ever(patch: Patch) -> None:
    patch.setattr(PromiseStore, "release", lambda *_, **__: 0)
    patch.setattr(PromiseStore, "withdraw", lambda *_, **__: 0)


def _other_neighbours(patch: Patch) -> None:
    def rolled(task: Any, batch: Any, records: Any, context: Any) -> Any:
        return np.roll(knn.ballots(task, batch, records, context), 1, axis=1)

    patch.setitem(METHODS, "knn", replace(METHODS["knn"], ballots=rolled))


def _report_before_storing(patch: Patch) -> None:
    keep = TallierMemory.keep_open

    def dropping(self: TallierMemory, opened: Any, held: Any, *, connection: Any) -> None:
        keep(self, opened, {}, connection=connection)

    patch.setattr(TallierMemory, "keep_open", dropping)


def _sum_before_fixing(patch: Patch) -> None:
    patch.setattr(TallierJournal, "fix", lambda *_, **__: None)


def _sum_one_less(patch: Patch) -> None:
    add = TallierRounds._add

    def less(self: Any, state: Any, contributors: Any) -> Any:
        return add(self, state, frozenset(sorted(contributors)[:-1]))

    patch.setattr(TallierRounds, "_add", less)


def _add_one_share_twice(patch: Patch) -> None:
    add = tally._sum

    def twice(one: Any, other: Any, field: Any) -> Any:
        return add(add(one, other, field), other, field)

    patch.setattr(tally, "_sum", twice)


def _tell_nobody(patch: Patch) -> None:
    patch.setattr(TallierDriver, "_decline", lambda *_, **__: None)


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

    patch.setattr(effects, "model_before", first)


def _charge_no_step_in_full(patch: Patch) -> None:
    due = batching.due

    def least(task: Any, charges: Any, *, answered: int) -> Any:
        return due(task, charges, answered=max(1, answered))

    for module in (batching, agent, ledger):
        patch.setattr(module, "due", least)


def _coordinator_charges_no_step_in_full(patch: Patch) -> None:
    amounts = pricing.round_amounts

    def least(*asked: Any, answered: int, **more: Any) -> Any:
        return amounts(*asked, answered=max(1, answered), **more)

    patch.setattr(pricing, "round_amounts", least)


def _pay_for_a_step_by_its_number(patch: Patch) -> None:
    """As the coordinator prices them, whose first step is step 0."""
    charge = AgentDriver._charge

    def by_number(self: Any, connection: Any, policy: Any, digest: str, ask: Any) -> bool:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(
                ledger,
                "due",
                lambda task, charges, **_: batching.due(task, charges, answered=ask.batch.first_query),
            )
            return charge(self, connection, policy, digest, ask)

    patch.setattr(AgentDriver, "_charge", by_number)


def _pay_in_full_for_every_step(patch: Patch) -> None:
    patch.setattr(ledger, "due", lambda _, charges, **__: dict(charges))


def _noise_of_no_key(patch: Patch) -> None:
    def anew(self: Agent, key: Any, purpose: Any, *more: Any) -> Any:
        del self, key, purpose, more
        return os_source()

    patch.setattr(Agent, "_source", anew)


def _one_attribute_less(patch: Patch) -> None:
    def fewer(neighbours: Any, *, most: int) -> Any:
        return attribute_ballots(neighbours, most=most - 1)

    patch.setattr(knn, "attribute_ballots", fewer)


def _likeliest_turned_round(patch: Patch) -> None:
    predict = linear.predict

    def smallest(head: Any, queries: Any) -> Any:
        return predict(-head, queries)

    patch.setattr(linear, "predict", smallest)


def _one_step_down_less(patch: Patch) -> None:
    train = linear.train_rows

    def shorter(records: Any, *, terms: Any, **more: Any) -> Any:
        return train(records, terms=replace(terms, iterations=terms.iterations - 1), **more)

    patch.setattr(linear, "train_rows", shorter)


def _forget_what_was_spent(patch: Patch) -> None:
    add = LifetimeSpends.add

    def nothing(self: LifetimeSpends, digest: str, cast: Any, *, connection: Any) -> None:
        add(self, digest, replace(cast, nano=np.zeros_like(cast.nano)), connection=connection)

    patch.setattr(LifetimeSpends, "add", nothing)


def _vote_beyond_the_budget(patch: Patch) -> None:
    patch.setattr(voting, "may_vote", lambda _, votes, **__: votes > 0)


def _an_account_for_every_row(patch: Patch) -> None:
    rows = voting.one_row_of_each_image

    def each(shard: Any) -> Any:
        rows(shard)
        return np.flatnonzero(shard.alive)

    patch.setattr(voting, "one_row_of_each_image", each)


def _spend_after_sending(patch: Patch) -> None:
    patch.setattr(AgentDriver, "_spend", lambda *_: None)


def _no_noise_on_heads(patch: Patch) -> None:
    def bare(self: FittedHeads, terms: Any, *, source: Any) -> Any:
        del terms
        return PrivateHeads(self.head, self.scores, self.head_map, self.score_map, source.is_seeded)

    patch.setattr(FittedHeads, "released", bare)


def _learn_from_other_negatives(patch: Patch) -> None:
    patch.setattr(learner, "NEGATIVES_EVERY", 4)


def _go_on_with_a_full_disk(patch: Patch) -> None:
    commit = CoordinatorDriver._commit

    def hoping(self: Any, plan: Any) -> None:
        with contextlib.suppress(StorageFull):
            commit(self, plan)

    patch.setattr(CoordinatorDriver, "_commit", hoping)


def _loses(case: Case) -> bool:
    """Some party is asked again."""
    rates = case.rates
    return rates.arm > 0 and (rates.lose > 0.1 or rates.lose_answer > 0.1 or rates.empty > 0)


def _dies(case: Case) -> bool:
    return bool(case.rates.kill and case.rates.arm)


def _fills_up(case: Case) -> bool:
    return bool(case.rates.full)


def _ends_early(case: Case) -> bool:
    return any(job.cancel_after is not None or job.deadline_s < 500 for job in case.jobs)


def _noise_of_talliers(case: Case) -> bool:
    return case.dishonest_talliers is not None and case.release == "histogram" and comes_through(case)


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
    Defect("coordinator", "gives a charge back that was asked", ("paid for what left",), _give_back_asked, _ends_early),
    Defect("coordinator", "loses queries that came back", ("no query is lost",), _lose_returned_queries, _ends_early),
    Defect("coordinator", "forgets its jobs after a restart", ("liveness", "completion"), _forget_at_a_restart, _dies),
    Defect("agent", "sends its shares before they are stored", ("stored before sent",), _send_before_storing),
    Defect(
        "agent",
        "splits its answer a second time when it is asked again",
        ("stored before sent", "one split"),
        _split_again,
        _loses,
    ),
    Defect("agent", "erases nothing when a round is settled", ("erased at the end",), _never_erase),
    Defect("agent", "refuses after it was charged", ("charged, so answered",), _refuse_after_the_charge),
    Defect("agent", "never gives back what it promised", ("nothing hangs",), _keep_promises_for_ever, _ends_early),
    Defect(
        "coordinator",
        "goes on with what a full disk has not kept",
        ("stored before told", "settled last", "reserved before asked", "posted before opened", "contributors"),
        _go_on_with_a_full_disk,
        _fills_up,
    ),
    Defect(
        "coordinator",
        "begins each step of training from nothing",
        ("exact votes",),
        _start_every_step_anew,
        of("steps"),
    ),
    Defect(
        "all",
        "charge no step of training in full",
        ("the price", "paid before answered"),
        _charge_no_step_in_full,
        of("steps"),
    ),
    Defect(
        "coordinator",
        "charges no step of training in full",
        ("the price", "paid before answered"),
        _coordinator_charges_no_step_in_full,
        of("steps"),
    ),
    Defect(
        "agent",
        "pays for a step of training by its number",
        ("paid before answered",),
        _pay_for_a_step_by_its_number,
        comes_late,
    ),
    Defect(
        "agent",
        "pays in full for every step of training",
        ("the price",),
        _pay_in_full_for_every_step,
        of("steps"),
    ),
    Defect("agent", "draws its noise from no key of the round", ("exact votes",), _noise_of_no_key),
    Defect(
        "agent",
        "votes for fewer attributes than a record has",
        ("exact votes",),
        _one_attribute_less,
        of("attributes"),
    ),
    Defect("agent", "votes with other records than the nearest", ("exact votes",), _other_neighbours, of("neighbours")),
    Defect(
        "agent", "votes for what its model holds least likely", ("exact votes",), _likeliest_turned_round, of("models")
    ),
    Defect(
        "agent", "gives the weights of a step before the last", ("exact votes",), _one_step_down_less, of("weights")
    ),
    Defect("agent", "adds no noise to its heads", ("exact votes",), _no_noise_on_heads, of("heads")),
    Defect(
        "agent",
        "takes other questions for public negatives",
        ("exact votes",),
        _learn_from_other_negatives,
        of("heads"),
    ),
    Defect(
        "agent",
        "forgets what its images have spent for life",
        ("votes for life",),
        _forget_what_was_spent,
        of("lives"),
    ),
    Defect("agent", "lets images vote that cannot pay", ("votes for life",), _vote_beyond_the_budget, of("lives")),
    Defect(
        "agent", "gives each copy of an image an account", ("votes for life",), _an_account_for_every_row, of("lives")
    ),
    Defect(
        "agent", "sends votes for life before they are paid", ("spent before sent",), _spend_after_sending, of("lives")
    ),
    Defect("tallier", "reports shares before they are stored", ("stored before sent",), _report_before_storing),
    Defect("tallier", "sends its sum before it is fixed", ("stored before sent",), _sum_before_fixing),
    Defect("tallier", "sums one agent less than agreed on", ("contributors",), _sum_one_less),
    Defect("tallier", "adds one share twice", ("the same answer",), _add_one_share_twice),
    Defect("tallier", "tells nobody that it opens no round", ("liveness",), _tell_nobody, is_left_to_a_tallier),
    Defect(
        "tallier",
        "draws its noise from what a restart forgets",
        ("the same answer",),
        _forget_the_noise,
        _noise_of_talliers,
    ),
    Defect("tallier", "adds no noise where it must", ("the same answer",), _add_no_noise, _noise_of_talliers),
)


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda one: f"{one.who} {one.what}")
def test_a_planted_defect_is_found_by_its_rule(stage: Stage, defect: Defect, monkeypatch: Patch) -> None:
    defect.plant(monkeypatch)
    for seed in defect.seeds():
        found = stage.run(seed).violation
        if found:
            assert found.startswith(tuple(f"{rule}:" for rule in defect.rules)), f"seed {seed}: {found}"
            return
    pytest.fail(f"{MOST} schedules did not find that the {defect.who} {defect.what}")


def test_the_table_in_the_documentation_names_every_defect() -> None:
    text = (Path(__file__).parents[2] / "docs" / "simulation.md").read_text()
    written = text.split("<!-- defects -->")[1].strip().splitlines()[2:]
    assert written == [f"| {one.who} | {one.what} | {' or '.join(one.rules)} |" for one in DEFECTS]
