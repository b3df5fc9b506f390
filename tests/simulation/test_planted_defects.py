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
from labeler.driver.settlement import Settlement
from labeler.errors import BadData, StorageFull
from labeler.ledger.agent_memory import JournalRounds
from labeler.ledger.jobs import JobStore
from labeler.ledger.ledger import Ledger
from labeler.ledger.lifetimes import LifetimeSpends
from labeler.ledger.promises import PromiseStore
from labeler.ledger.tallier_memory import TallierMemory
from labeler.ledger.tasks import TaskStore
from labeler.linear_model import model_before
from labeler.messages.bodies import RefusalBody
from labeler.methods import METHODS, knn
from labeler.methods.knn import attribute_ballots
from labeler.randomness import os_source
from labeler.rounds import effects
from labeler.rounds.agent import ChargeRefused, RoundCharged
from labeler.rounds.effects import FixContributors, Post
from tests.simulation.campaign import Stage
from tests.simulation.case import Case
from tests.simulation.seeds import Wanted, comes_late, comes_through, is_left_to_a_tallier, of, seeds_where
from workers import voting
from workers.agent import ledger
from workers.agent.agent import Agent
from workers.agent.driver import AgentDriver
from workers.learning import learner, linear
from workers.learning.private_heads import FittedHeads, PrivateHeads
from workers.tallier.rounds import TallierRounds
from workers.tallier.service import TallierDriver, TallierJournal

Patch = pytest.MonkeyPatch

MOST = 24
"""Schedules in which a defect is looked for."""


def _loses(case: Case) -> bool:
    """Some party is asked again."""
    rates = case.rates
    return rates.arm > 0 and (rates.lose > 0.1 or rates.lose_answer > 0.1 or rates.empty > 0)


def _dies(case: Case) -> bool:
    return bool(case.rates.kill and case.rates.arm)


def _fills_up_and_dies(case: Case) -> bool:
    """A disk is full, and what ran ahead of the journal meanwhile is lost with a crash."""
    return bool(case.rates.full and case.rates.kill) and case.way in ("neighbours", "attributes", "records")


def _ends_early(case: Case) -> bool:
    return any(job.cancel_after is not None or job.deadline_s < 500 for job in case.jobs)


def _noise_of_talliers(case: Case) -> bool:
    return case.dishonest_talliers is not None and case.release == "histogram" and comes_through(case)


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
    among: Wanted


DEFECTS: list[Defect] = []
VOTES = of("neighbours", "attributes", "records")


def planted(
    who: str,
    what: str,
    *rules: str,
    at: tuple[Any, str] | None = None,
    among: Wanted = VOTES,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add a defect to the list: the function is called in place of the one at `at`, which it gets before its arguments.

    Without `at` the function plants the defect itself.
    """

    def add(wrong: Callable[..., Any]) -> Callable[..., Any]:
        def plant(patch: Patch) -> None:
            if at is None:
                wrong(patch)
                return
            right = getattr(*at)
            patch.setattr(*at, lambda *asked, **more: wrong(right, *asked, **more))

        DEFECTS.append(Defect(who, what, rules, plant, among))
        return wrong

    return add


@planted("coordinator", "charges a round twice", "charged once", at=(Ledger, "reserve"))
def _reserve_twice(reserve: Any, self: Ledger, name: str, charges: Any, **more: Any) -> Any:
    found = reserve(self, name, charges, **more)
    if re.fullmatch(r"job-\d+/\d+", name):
        reserve(self, f"{name}/again", charges, **more)
        self.post(f"{name}/again", connection=more.get("connection"))
    return found


@planted(
    "coordinator",
    "sends a turn's messages before its commit",
    *("reserved before asked", "posted before opened", "stored before sent", "contributors"),
    at=(CoordinatorDriver, "_commit"),
)
def _send_before_committing(commit: Any, self: Any, plan: Any) -> None:
    send_off(plan, self._sender, self._ledger, self._mailbox)
    commit(self, plan)


@planted(
    "coordinator",
    "opens sums without posting the charge",
    *("posted before opened", "completion"),
    at=(storing.Storer, "_store"),
)
def _open_without_posting(store: Any, self: Any, job: Any, one: Any, connection: Any, prices: Any) -> bool:
    if isinstance(one, Post):
        head = self._ledger.head(connection=connection)
        return storing.steps.set_posted(connection, job.record.job_id, one.number, head.seq)
    return store(self, job, one, connection, prices)


@planted("coordinator", "keeps the contributors in memory only", "contributors", "completion")
def _contributors_in_memory_only(patch: Patch) -> None:
    store = storing.Storer._store

    def skipping(self: Any, job: Any, one: Any, *more: Any) -> bool:
        return False if isinstance(one, FixContributors) else store(self, job, one, *more)

    patch.setattr(storing.Storer, "_store", skipping)
    patch.setattr(reading, "_remembering", lambda _, known: known)  # else the journal says that nothing is fixed


class _Forgetful:
    """Rounds that were asked look as if they had not been."""

    def __init__(self, jobs: JobStore) -> None:
        self._jobs = jobs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._jobs, name)

    def rounds(self, *asked: Any, **more: Any) -> Any:
        found = self._jobs.rounds(*asked, **more)
        return [replace(one, state="waiting") if one.state == "asked" else one for one in found]


@planted(
    "coordinator",
    "gives a charge back that was asked",
    "paid for what left",
    at=(Settlement, "end"),
    among=_ends_early,
)
def _give_back_asked(end: Any, self: Any, *asked: Any, **more: Any) -> Any:
    return end(replace(self, jobs=_Forgetful(self.jobs)), *asked, **more)


@planted(
    "coordinator", "loses queries that came back", "no query is lost", at=(TaskStore, "give_back"), among=_ends_early
)
def _lose_returned_queries(*_: Any, **__: Any) -> None:
    """Nothing comes back."""


@planted(
    "coordinator",
    "forgets its jobs after a restart",
    *("liveness", "completion"),
    at=(JobStore, "unfinished_ids"),
    among=_dies,
)
def _forget_at_a_restart(*_: Any) -> list[Any]:
    return []


@planted("agent", "sends its shares before they are stored", "stored before sent", at=(JournalRounds, "store_new"))
def _send_before_storing(*_: Any, **__: Any) -> bool:
    return True


@planted(
    "agent",
    "splits its answer a second time when it is asked again",
    *("stored before sent", "one split"),
    at=(JournalRounds, "kept"),
    among=_loses,
)
def _split_again(kept: Any, self: JournalRounds, digest: str, **more: Any) -> Any:
    found = kept(self, digest, **more)
    return None if found is None else replace(found, bodies=None)


@planted("agent", "erases nothing when a round is settled", "erased at the end", at=(JournalRounds, "erase_in"))
def _never_erase(*_: Any, **__: Any) -> None:
    """Everything is kept."""


@planted("agent", "refuses after it was charged", "charged, so answered", at=(AgentDriver, "_paid"))
def _refuse_after_the_charge(paid: Any, self: AgentDriver, *asked: Any) -> Any:
    refused = ChargeRefused(RefusalBody.of(BadData("no")))
    return [(about, refused if isinstance(event, RoundCharged) else event) for about, event in paid(self, *asked)]


@planted("agent", "never gives back what it promised", "nothing hangs", among=_ends_early)
def _keep_promises_for_ever(patch: Patch) -> None:
    patch.setattr(PromiseStore, "release", lambda *_, **__: 0)
    patch.setattr(PromiseStore, "withdraw", lambda *_, **__: 0)


@planted(
    "coordinator",
    "goes on with what a full disk has not kept",
    *("stored before told", "settled last", "reserved before asked", "posted before opened", "contributors"),
    at=(CoordinatorDriver, "_commit"),
    among=_fills_up_and_dies,
)
def _go_on_with_a_full_disk(commit: Any, self: Any, plan: Any) -> None:
    with contextlib.suppress(StorageFull):
        commit(self, plan)


@planted(
    "coordinator",
    "begins each step of training from nothing",
    "exact votes",
    at=(effects, "model_before"),
    among=of("steps"),
)
def _start_every_step_anew(_: Any, task: Any, releases: Any) -> Any:
    return model_before(task, [])


@planted("all", "charge no step of training in full", "the price", "paid before answered", among=of("steps"))
def _charge_no_step_in_full(patch: Patch) -> None:
    due = batching.due
    for module in (batching, ledger):
        patch.setattr(module, "due", lambda task, charges, *, answered: due(task, charges, answered=max(1, answered)))


@planted(
    "coordinator",
    "charges no step of training in full",
    *("the price", "paid before answered"),
    at=(pricing, "round_amounts"),
    among=of("steps"),
)
def _coordinator_charges_no_step_in_full(amounts: Any, *asked: Any, answered: int, **more: Any) -> Any:
    return amounts(*asked, answered=max(1, answered), **more)


@planted(
    "agent",
    "pays for a step of training by its number",
    "paid before answered",
    at=(AgentDriver, "_charge"),
    among=comes_late,
)
def _pay_for_a_step_by_its_number(charge: Any, self: Any, connection: Any, policy: Any, digest: str, ask: Any) -> bool:
    """As the coordinator prices them, whose first step is step 0."""

    def by_number(task: Any, charges: Any, **_: Any) -> Any:
        return batching.due(task, charges, answered=ask.batch.first_query)

    with pytest.MonkeyPatch.context() as inner:
        inner.setattr(ledger, "due", by_number)
        return charge(self, connection, policy, digest, ask)


@planted("agent", "pays in full for every step of training", "the price", at=(ledger, "due"), among=of("steps"))
def _pay_in_full_for_every_step(_: Any, task: Any, charges: Any, **__: Any) -> Any:
    return dict(charges)


@planted("agent", "draws its noise from no key of the round", "exact votes", at=(Agent, "_source"))
def _noise_of_no_key(*_: Any) -> Any:
    return os_source()


@planted(
    "agent",
    "votes for fewer attributes than a record has",
    "exact votes",
    at=(knn, "attribute_ballots"),
    among=of("attributes"),
)
def _one_attribute_less(_: Any, neighbours: Any, *, most: int) -> Any:
    return attribute_ballots(neighbours, most=most - 1)


@planted("agent", "votes with other records than the nearest", "exact votes", among=of("neighbours"))
def _other_neighbours(patch: Patch) -> None:
    def rolled(*asked: Any) -> Any:
        return np.roll(knn.ballots(*asked), 1, axis=1)

    patch.setitem(METHODS, "knn", replace(METHODS["knn"], ballots=rolled))


@planted("agent", "votes for what its model holds least likely", "exact votes", at=(linear, "said"), among=of("models"))
def _likeliest_turned_round(said: Any, model: Any, queries: Any, **how: Any) -> Any:
    return said(-model, queries, **how)


@planted(
    "agent",
    "gives the weights of a step before the last",
    "exact votes",
    at=(linear, "train_rows"),
    among=of("weights"),
)
def _one_step_down_less(train: Any, records: Any, *, terms: Any, **more: Any) -> Any:
    return train(records, terms=replace(terms, iterations=terms.iterations - 1), **more)


@planted("agent", "adds no noise to its heads", "exact votes", at=(FittedHeads, "released"), among=of("heads"))
def _no_noise_on_heads(_: Any, self: FittedHeads, terms: Any, *, source: Any) -> Any:
    return PrivateHeads(self.head, self.scores, self.head_map, self.score_map, source.is_seeded)


@planted("agent", "takes other questions for public negatives", "exact votes", among=of("heads"))
def _learn_from_other_negatives(patch: Patch) -> None:
    patch.setattr(learner, "NEGATIVES_EVERY", 4)


@planted(
    "agent",
    "forgets what its images have spent for life",
    "votes for life",
    at=(LifetimeSpends, "add"),
    among=of("lives"),
)
def _forget_what_was_spent(add: Any, self: LifetimeSpends, digest: str, cast: Any, *, connection: Any) -> None:
    add(self, digest, replace(cast, nano=np.zeros_like(cast.nano)), connection=connection)


@planted("agent", "lets images vote that cannot pay", "votes for life", at=(voting, "may_vote"), among=of("lives"))
def _vote_beyond_the_budget(_: Any, spent: Any, votes: Any, **__: Any) -> Any:
    return votes > 0


@planted(
    "agent",
    "gives each copy of an image an account",
    "votes for life",
    at=(voting, "one_row_of_each_image"),
    among=of("lives"),
)
def _an_account_for_every_row(rows: Any, shard: Any) -> Any:
    rows(shard)
    return np.flatnonzero(shard.alive)


@planted(
    "agent",
    "sends votes for life before they are paid",
    "spent before sent",
    at=(AgentDriver, "_spend"),
    among=of("lives"),
)
def _spend_after_sending(*_: Any) -> None:
    """Nothing is written down."""


@planted("tallier", "reports shares before they are stored", "stored before sent", at=(TallierMemory, "keep_open"))
def _report_before_storing(keep: Any, self: TallierMemory, opened: Any, held: Any, *, connection: Any) -> None:
    keep(self, opened, {}, connection=connection)


@planted("tallier", "sends its sum before it is fixed", "stored before sent", at=(TallierJournal, "fix"))
def _sum_before_fixing(*_: Any, **__: Any) -> None:
    """Nothing is fixed."""


@planted("tallier", "sums one agent less than agreed on", "contributors", at=(TallierRounds, "_add"))
def _sum_one_less(add: Any, self: Any, state: Any, contributors: Any) -> Any:
    return add(self, state, frozenset(sorted(contributors)[:-1]))


@planted("tallier", "adds one share twice", "the same answer", at=(tally, "_sum"))
def _add_one_share_twice(add: Any, one: Any, other: Any, field: Any) -> Any:
    return add(add(one, other, field), other, field)


@planted(
    "tallier",
    "tells nobody that it opens no round",
    "liveness",
    at=(TallierDriver, "_decline"),
    among=is_left_to_a_tallier,
)
def _tell_nobody(*_: Any, **__: Any) -> None:
    """Nobody hears of it."""


@planted("tallier", "draws its noise from what a restart forgets", "the same answer", among=_noise_of_talliers)
def _forget_the_noise(patch: Patch) -> None:
    drawn: dict[tuple[int, str], bytes] = {}

    def of_this_process(self: TallierMemory, digest: str) -> bytes:
        return drawn.setdefault((id(self), digest), os.urandom(32))

    patch.setattr(TallierMemory, "noise_key", of_this_process)


@planted("tallier", "adds no noise where it must", "the same answer", among=_noise_of_talliers)
def _add_no_noise(patch: Patch) -> None:
    class Silent:
        """A sampler of zeros."""

        def __init__(self, _: float) -> None:
            self.sample = lambda _, shape: np.zeros(shape, np.int64)

    patch.setattr(tally, "DiscreteGaussian", Silent)


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda one: f"{one.who} {one.what}")
def test_a_planted_defect_is_found_by_its_rule(stage: Stage, defect: Defect, monkeypatch: Patch) -> None:
    defect.plant(monkeypatch)
    for seed in seeds_where(defect.among, MOST):
        found = stage.run(seed).violation
        if found:
            assert found.startswith(tuple(f"{rule}:" for rule in defect.rules)), f"seed {seed}: {found}"
            return
    pytest.fail(f"{MOST} schedules did not find that the {defect.who} {defect.what}")


def test_the_table_in_the_documentation_names_every_defect() -> None:
    text = (Path(__file__).parents[2] / "docs" / "simulation.md").read_text()
    written = text.split("<!-- defects -->")[1].strip().splitlines()[2:]
    assert written == [f"| {one.who} | {one.what} | {' or '.join(one.rules)} |" for one in DEFECTS]
