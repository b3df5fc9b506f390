"""An agent's public clock: what is computed from records leaves at moments that follow from public facts alone."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import fisher_exact, ks_2samp

from feature_store.index.engine_faiss import FaissBlock
from feature_store.index.exact_index import NumpyBlock, are_all_tied
from feature_store.rows import quantize
from feature_store.shard import Shard, declare_most
from labeler.errors import InvalidSetting, PrivacyRefusal
from labeler.ledger.database import open_database
from labeler.ledger.ledger import Ledger
from labeler.messages.bodies import Ask, Settled, TallierKey
from labeler.records import block_rows
from labeler.system.keys import PartyKeys
from labeler.system.site_key import SiteKey
from labeler.tally import QueryBatch
from labeler.task import Task
from tests.labeler.tasks import make_task
from tests.processes import wait_until
from tests.workers.agent_site import Site
from tests.workers.builders import shard_of_rows
from tests.workers.public_clock import NOW, Office, Time, make_office, shares_of
from workers.agent.agent import Agent, Answer, as_it_is
from workers.agent.driver import AgentDriver
from workers.agent.public_clock import (
    FIXED_S,
    LONG_S,
    PROBE_S,
    ROOM,
    TICK_S,
    DrawnProbe,
    PublicClock,
    _NothingSpent,
)
from workers.learning import linear, network

CLASSES = ("a", "b")

MakeShard = Callable[..., Shard]
ANSWER = ("input-share", "input-share", "input-share", "answered")


@pytest.fixture
def office(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_shard: MakeShard) -> Office:
    return make_office(tmp_path / "agent", monkeypatch, make_shard)


def spent(office: Office) -> int:
    with open_database(office.home / "journal.db", read_only=True) as database:
        return sum(balance.spent for balance in Ledger(database, clock=lambda: NOW).balances())


def test_all_letters_of_a_turn_and_the_next_poll_leave_together_at_the_tick_in_the_order_of_the_asks(
    office: Office,
) -> None:
    first, second = office.ask(1), office.ask(2)
    office.work_s = lambda rows: 0.0002 * rows
    answered, waited_s = office.after(first, second)
    assert answered.kinds == (*ANSWER, *ANSWER, "poll")
    assert answered.rounds[:8] == (first.round.digest,) * 4 + (second.round.digest,) * 4
    assert waited_s == pytest.approx(TICK_S, abs=1e-9)


def test_the_number_of_ticks_is_planned_for_the_declared_records_before_the_work_begins(office: Office) -> None:
    office.work_s = lambda rows: 0.002 * rows
    _, waited_s = office.after(office.ask())
    planned_s = FIXED_S + ROOM * 0.002 * 100  # declared, where there are 60
    assert waited_s == pytest.approx(TICK_S * np.ceil(planned_s / TICK_S), abs=1e-9)
    assert waited_s > 2 * 0.002 * 60


def test_a_turn_that_computes_nothing_from_records_leaves_at_once(office: Office) -> None:
    refused = office.ask(classes=("another", "list", "of classes"))
    office.coordinator.ask(refused)
    office.coordinator.mails.append(
        [office.coordinator.message("answered", Settled().encode(), task=refused.task.digest, round="0" * 64)]
    )
    begun = office.time.now_s
    sent = office.run()
    assert [one.kinds for one in sent] == [("poll",), ("refused", "poll"), ("poll",)]
    assert {one.at_s for one in sent} == {begun}


def test_a_refusal_waits_for_the_answers_of_its_turn(office: Office) -> None:
    together, waited_s = office.after(office.ask(classes=("another", "list", "of classes")), office.ask(1))
    assert together.kinds == ("refused", *ANSWER, "poll")
    assert waited_s == pytest.approx(TICK_S)


def test_a_failed_attempt_delays_the_next_poll_as_an_answer_would(office: Office) -> None:
    office.fails = True
    office.work_s = lambda rows: 0.0007 * rows
    after, waited_s = office.after(office.ask())
    assert after.kinds == ("poll",)
    assert waited_s == pytest.approx(2 * TICK_S)


def test_answers_that_are_trained_take_one_turn_each_and_each_turn_has_the_clock(office: Office) -> None:
    asks = [office.ask(number, method="ensemble", k=1) for number in range(2)]
    office.work_s = lambda _: 0.03
    office.coordinator.ask(*asks)
    begun = office.time.now_s
    office.coordinator.mails += [[], []]
    _, first, second, *_ = office.run()
    assert [shares_of(first, one) for one in asks] == [3, 0]
    assert [shares_of(second, one) for one in asks] == [0, 3]
    assert [one.at_s - begun for one in (first, second)] == [pytest.approx(TICK_S), pytest.approx(2 * TICK_S)]


def test_asked_again_after_its_moment_a_stored_answer_leaves_at_once(office: Office) -> None:
    ask = office.ask()
    office.coordinator.ask(ask)
    office.coordinator.ask(ask)
    _, first, again = office.run()
    assert (first.kinds, again.kinds) == ((*ANSWER, "poll"), (*ANSWER, "poll"))
    assert again.at_s == first.at_s
    assert office.computed == 1


def test_stopped_while_an_answer_waits_it_is_stored_and_asked_again_it_leaves_at_its_own_moment(
    office: Office,
) -> None:
    ask = office.ask()
    begun = office.time.now_s
    office.work_s = lambda rows: 0.0001 * rows
    office.coordinator.ask(ask)
    office.time.stop_at_s = begun + 0.03
    assert [one.kinds for one in office.run()] == [("poll",)]
    assert office.time.now_s == begun + 0.03
    paid = spent(office)
    office.time.stop_at_s = float("inf")
    office.coordinator.ask(ask)
    _, answered = office.run()
    assert (answered.kinds, office.computed, spent(office)) == ((*ANSWER, "poll"), 1, paid)
    assert answered.at_s == pytest.approx(begun + TICK_S, abs=1e-5)


def test_a_system_clock_that_was_set_back_does_not_make_the_wait_long(office: Office) -> None:
    ask = office.ask()
    office.coordinator.ask(ask)
    office.time.stop_at_s = office.time.now_s + 0.03
    office.run()
    office.time.stop_at_s = float("inf")
    office.time.set_back = timedelta(days=1)
    answered, waited_s = office.after(ask)
    assert answered.kinds == (*ANSWER, "poll")
    assert waited_s <= TICK_S + 1e-9


def test_what_would_leave_after_its_deadline_is_refused_before_the_charge(office: Office) -> None:
    office.work_s = lambda rows: 0.1 * rows
    refused, waited_s = office.after(office.ask(expires_in_s=15.0))
    assert (refused.kinds, waited_s, office.computed) == (("refused", "poll"), 0.0, 0)
    assert spent(office) == 0


def test_the_deadline_counts_what_is_computed_before(office: Office) -> None:
    office.work_s = lambda rows: 0.01 * rows  # a plan of 1.52 s each
    asks = [office.ask(number, expires_in_s=4.5) for number in range(3)]
    sent, _ = office.after(*asks)
    assert [shares_of(sent, one) for one in asks] == [3, 3, 0]
    assert sent.kinds.count("refused") == 1


def task_of(shard: Shard, **changes: Any) -> Task:
    return make_task(classes=shard.classes, backbone_fingerprint=shard.fingerprint, delta=1e-5, **changes)


def test_rows_are_drawn_by_public_facts_alone(make_shard: MakeShard) -> None:
    one, other = (make_shard(f"own-{number}", records=60 + number, seed=number) for number in range(2))
    drawn, again = one.drawn(30), other.drawn(30)
    for name in ("features", "labels", "record_ids"):
        np.testing.assert_array_equal(getattr(drawn, name), getattr(again, name))
    assert (drawn.max_records, len(drawn), drawn.dimension) == (1000, 30, one.dimension)


@pytest.mark.parametrize("written", ["false", "true"])
def test_a_home_of_an_earlier_version_is_served_and_one_that_asked_for_padding_is_told_that_it_is_gone(
    office: Office, written: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings = office.home / "agent.toml"
    assert "pad" not in settings.read_text()
    settings.write_text(f"pad = {written}\n{settings.read_text()}")
    ask = office.ask()
    answered, _ = office.after(ask)
    assert (shares_of(answered, ask), office.computed) == (3, 1)
    assert ["pad = true does nothing" in one for one in caplog.messages].count(True) == (written == "true")


def test_work_that_is_late_tells_how_late_it_was_to_a_factor_of_two_alone() -> None:
    at = [0.0]
    clock = PublicClock(tick_s=0.1, estimate_s=lambda _: 0.0, started=lambda: 0.0, ticks=lambda: at[0])
    turn = clock.begin(0.0)
    turn.planned_s = 0.05
    left = []
    for passed in (0.0, 0.09, 0.11, 0.19, 0.21, 0.39, 0.41, 3.0):
        at[0] = passed
        left.append(round(passed + clock.left_s(turn), 9))
    assert left == [0.1, 0.1, 0.2, 0.2, 0.4, 0.4, 0.8, 3.2]


@pytest.mark.parametrize("longer", [True, False])
def test_a_plan_is_no_shorter_than_its_longest_rows_say_where_runs_are_short(longer: bool) -> None:
    """With ties or without, whichever takes longer."""
    ask: Any = SimpleNamespace(task=make_task(method="knn"))
    probe = DrawnProbe(lambda: None)  # type: ignore[arg-type, return-value]  # nothing is drawn
    probe._agents = dict.fromkeys((16, 1024, 4096))  # type: ignore[assignment]  # their runs are given
    for few, many in ((0.004, 0.004), (0.005, 0.004), (0.001, 0.004)):
        took = {16: 0.001, 1024: few, 4096: many}
        probe._once = lambda _, rows, is_tied, took=took: took[rows] / (1 + (is_tied != longer))  # type: ignore[assignment, misc]
        assert probe._timed(ask, 40_960) >= 0.04


# What is timed, and for how long.


@dataclass
class Bench:
    """A probe in a time that only its work moves.

    Attributes:
        work_s: how long an answer takes, by its questions and its rows.
        computes: whether answers are computed besides.
        runs: the rows of every run, and the key that it had.
    """

    shard: Shard
    work_s: Callable[[QueryBatch, int], float] = lambda _, __: 0.0
    computes: bool = True
    time: Time = field(default_factory=Time)
    runs: list[tuple[int, bytes]] = field(default_factory=list)

    def probe(self) -> DrawnProbe:
        return DrawnProbe(lambda: self.shard, engine="numpy", clock=self.time, now=self.time)

    def ask(self, task: Task, batch: QueryBatch, *, expires_in_s: float = 1e6) -> Ask:
        named = tuple(
            TallierKey(f"tallier-{number}", keys.seal_key, keys.verify_key) for number, keys in enumerate(TALLIERS)
        )
        return Ask(task, batch, named, self.time() + expires_in_s)


TALLIERS = [PartyKeys.generate().public for _ in range(3)]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, make_shard: MakeShard) -> Bench:
    bench = Bench(make_shard("own", records=60, max_records=10_000))
    computed = Agent.computed

    def takes_time(self: Agent, task: Task, batch: QueryBatch, *, key: bytes, **named: Any) -> Any:
        bench.runs.append((len(self._shard), key))
        bench.time.now_s += bench.work_s(batch, len(self._shard))
        return computed(self, task, batch, key=key, **named) if bench.computes else Answer(())

    monkeypatch.setattr(Agent, "computed", takes_time)
    return bench


def questions(shard: Shard, number: int, count: int = 8) -> QueryBatch:
    rng = np.random.default_rng(number)
    return QueryBatch(quantize(rng.normal(size=(count, shard.dimension))))


@pytest.mark.parametrize("method", ["knn", "reverse-knn", "ensemble"])
@pytest.mark.parametrize("cheap_first", [True, False])
def test_a_plan_belongs_to_its_questions_and_is_no_other_askers_of_the_same_kind(
    bench: Bench, method: str, cheap_first: bool
) -> None:
    """A cheap question set 0.26 s for one that takes 0.42 to 0.62 s."""
    task = task_of(bench.shard, method=method, k=3 if method != "ensemble" else 1, sigma_votes=4e3, max_queries=8)
    cheap, dear = (questions(bench.shard, number) for number in range(2))
    bench.work_s = lambda batch, rows: rows * (3e-4 if batch.digest == dear.digest else 1e-4)
    probe = bench.probe()
    asked = [cheap, dear] if cheap_first else [dear, cheap]
    found = {batch.digest: probe.seconds(bench.ask(task, batch)) for batch in asked}
    assert found[cheap.digest] == pytest.approx(1.0, rel=0.01)
    assert found[dear.digest] == pytest.approx(3.0, rel=0.01)


def test_a_plan_belongs_to_the_model_that_a_step_begins_from(bench: Bench) -> None:
    rows, classes = bench.shard.dimension + 1, len(bench.shard.classes)
    task = task_of(
        bench.shard, method="federated", k=1, sigma_votes=30.0, max_queries=5 * rows,
        training={"min_records": 20, "regularisation": 0.1, "iterations": 5, "sampled": {"rate": 0.3}},
    )  # fmt: skip
    zero, other = np.zeros((rows, classes)), np.ones((rows, classes))
    bench.work_s = lambda batch, rows: rows * (1e-4 + 2e-4 * float(np.asarray(batch.model).any()))
    probe = bench.probe()
    features = questions(bench.shard, 0, rows).features
    seconds = [probe.seconds(bench.ask(task, QueryBatch(features, model=model))) for model in (zero, other, zero)]
    assert seconds == [pytest.approx(1.0, rel=0.01), pytest.approx(3.0, rel=0.01), seconds[0]]


def test_what_is_asked_again_is_planned_alike_and_timed_once(bench: Bench) -> None:
    task, batch, probe = task_of(bench.shard, k=3, sigma_votes=4e3), questions(bench.shard, 0), bench.probe()
    chance = random.Random(0)
    bench.work_s = lambda _, rows: rows * 1e-4 * chance.uniform(1, 2)
    once = probe.seconds(bench.ask(task, batch))
    runs = len(bench.runs)
    again = task.model_copy(update={"name": "another", "nonce": "of the same kind"})
    assert [probe.seconds(bench.ask(one, batch, expires_in_s=99.0)) for one in (task, again)] == [once, once]
    assert len(bench.runs) == runs


def test_an_ask_that_is_admitted_is_not_timed_again_for_its_plan(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[Any] = []
    whole = DrawnProbe._timed

    def counted(self: DrawnProbe, ask: Ask, most: int, **named: Any) -> float:
        timed.append(ask)
        return whole(self, ask, most, **named)

    monkeypatch.setattr(DrawnProbe, "_timed", counted)
    ask = office.ask()
    answered, _ = office.after(ask)
    assert (shares_of(answered, ask), len(timed)) == (3, 1)


@pytest.mark.parametrize("fixed_s", [1e-6, 0.001, 0.1, 3.0, 9.0, 100.0])
@pytest.mark.parametrize("row_s", [0.0, 1e-6, 1e-3, 0.1, 2.0, 60.0])
@pytest.mark.parametrize("left_s", [0.5, 7.0, 1e6])
def test_an_ask_is_timed_no_longer_than_a_public_number_of_seconds_and_its_deadline(
    bench: Bench, fixed_s: float, row_s: float, left_s: float
) -> None:
    """Uncharged asks held an agent's only thread for 115 to 550 s each. The first run, of the fewest rows, is bounded
    by the size of a message alone."""
    bench.work_s = lambda _, rows: fixed_s + row_s * rows
    ask = bench.ask(task_of(bench.shard, k=3, sigma_votes=4e3), questions(bench.shard, 0), expires_in_s=left_s)
    begun, bench.computes = bench.time(), False
    try:
        found = bench.probe().seconds(ask)
    except PrivacyRefusal:
        found = None
    passed_s = bench.time() - begun
    assert passed_s <= max(min(PROBE_S, left_s), fixed_s + 16 * row_s) + 1e-9
    whole_s = fixed_s + 10_000 * row_s
    if found is not None:
        assert found >= 0.999 * whole_s
        assert left_s < PROBE_S or whole_s > LONG_S or found < 3 * whole_s + 0.01
    else:
        assert 7 * (fixed_s + 16 * row_s) > min(PROBE_S, left_s), "refused though there was time"


@pytest.mark.parametrize("iterations", [3, 200, 100_000])
@pytest.mark.parametrize("step_s", [1e-3, 1e-2, 1.0])
def test_a_training_of_any_number_of_steps_is_timed_within_the_bound(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, iterations: int, step_s: float
) -> None:
    slopes = linear.SLOPES["softmax"]

    def takes_time(scores: Any, truth: Any) -> Any:
        bench.time.now_s += step_s * (1 + scores.shape[-2] / 1000)
        return slopes(scores, truth)

    monkeypatch.setitem(linear.SLOPES, "softmax", takes_time)
    rows = bench.shard.dimension + 1
    training = {"min_records": 20, "regularisation": 0.1, "iterations": iterations}
    task = task_of(bench.shard, method="blind-average", k=1, sigma_votes=30.0, max_queries=rows, training=training)
    begun = bench.time()
    found = bench.probe().seconds(bench.ask(task, questions(bench.shard, 0, rows)))
    assert bench.time() - begun <= PROBE_S
    # 10,000 rows lie in blocks, each of which counts a step.
    blocks = -(-10_000 // block_rows(bench.shard.dimension + rows + len(bench.shard.classes)))
    whole_s = iterations * step_s * (blocks + 10)
    assert found == pytest.approx(whole_s, rel=0.3, abs=0.02)


@pytest.mark.parametrize("learner", ["network", "adapted"])
@pytest.mark.parametrize("step_s", [2e-3, 1e-2, 1.0])
def test_all_steps_of_a_network_are_in_its_plan(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, learner: str, step_s: float
) -> None:
    slopes = network.softmax_slopes

    def takes_time(scores: Any, truth: Any) -> Any:
        bench.time.now_s += step_s
        return slopes(scores, truth)

    monkeypatch.setattr(network, "softmax_slopes", takes_time)
    training = {"learner": learner}
    task = task_of(bench.shard, method="ensemble", k=1, sigma_votes=30.0, max_queries=8, training=training)
    begun = bench.time()
    found = bench.probe().seconds(bench.ask(task, questions(bench.shard, 0)))
    assert bench.time() - begun <= PROBE_S
    assert found == pytest.approx(network.STEPS * step_s, rel=0.1, abs=0.02)


@pytest.mark.parametrize("question_s", [1e-5, 1e-3, 0.1, 1.0])
@pytest.mark.parametrize("count", [1, 3, 2_000])
def test_any_number_of_dear_questions_is_timed_within_the_bound(bench: Bench, question_s: float, count: int) -> None:
    """With many neighbors even few rows take long: an agent's table holds k of them for each question."""
    bench.work_s = lambda batch, rows: 1e-3 + len(batch) * question_s * (1 + rows / 10_000)
    bench.computes = False
    task = task_of(bench.shard, k=3, sigma_votes=4e3, max_queries=count)
    begun = bench.time()
    found = bench.probe().seconds(bench.ask(task, questions(bench.shard, 0, count)))
    assert bench.time() - begun <= PROBE_S
    whole_s = 2 * count * question_s
    assert whole_s < 1.01 * found < 1.4 * whole_s + 0.4


@pytest.mark.parametrize("expires_in_s", [15.0, 1e6])
def test_what_takes_too_long_to_be_timed_is_refused_before_the_charge(office: Office, expires_in_s: float) -> None:
    office.work_s = lambda rows: rows * 1.0
    ask = office.ask(expires_in_s=expires_in_s)
    refused, waited_s = office.after(ask)
    assert (refused.kinds, waited_s, office.computed, spent(office)) == (("refused", "poll"), 0.0, 0, 0)


def test_what_is_late_anyway_is_not_timed(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> float:
        raise AssertionError("it was timed")

    monkeypatch.setattr(DrawnProbe, "seconds", never)
    refused, _ = office.after(office.ask(expires_in_s=0.05))
    assert refused.kinds == ("refused", "poll")


def test_drawn_rows_are_worked_on_under_a_fresh_key_that_nobody_can_search_an_order_for(bench: Bench) -> None:
    task, probe = task_of(bench.shard, method="reverse-knn", k=3, sigma_votes=4e3, max_queries=8), bench.probe()
    for number in range(3):
        probe.seconds(bench.ask(task, questions(bench.shard, number)))
    keys = [key for _, key in bench.runs]
    assert len(set(keys)) == len(keys) >= 3
    assert bytes(32) not in keys


def test_a_probe_remembers_a_bounded_number_of_plans_and_forgets_the_one_longest_unused(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.agent.public_clock._MOST_TIMED", 3)
    task, probe = task_of(bench.shard, k=3, sigma_votes=4e3), bench.probe()
    asks = [bench.ask(task, questions(bench.shard, number)) for number in range(5)]
    for number in (0, 1, 2, 0, 3, 0, 4):
        probe.seconds(asks[number])
    assert [digest for _, digest in probe._known] == [asks[number].batch.digest for number in (3, 0, 4)]
    assert all(len(kind) == 32 for kind, _ in probe._known)


def test_a_shard_that_declares_no_bound_is_not_served_and_can_declare_one_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_shard: MakeShard
) -> None:
    office = make_office(
        tmp_path / "agent", monkeypatch, lambda *args, **named: make_shard(*args, **named | {"max_records": None})
    )
    with pytest.raises(InvalidSetting, match=r"labeler declare .* --max-records"):
        office.run()
    with pytest.raises(InvalidSetting, match="holds more records"):
        declare_most(office.shard.path, 59)
    assert declare_most(office.shard.path, 60)
    assert not declare_most(office.shard.path, 60)
    with pytest.raises(InvalidSetting, match="declares at most 60"):
        declare_most(office.shard.path, 1000)
    declared = Shard.open(office.shard.path)
    assert (declared.max_records, declared.version) == (60, office.shard.version)
    office.coordinator.ask(office.ask())
    assert office.run()[1].kinds == (*ANSWER, "poll")


# Two neighboring worlds, and what a coordinator that asks so that work ends near a tick reads off the answers.

FALSE_ALARM = 1e-6


def waits(
    tmp_path: Path,
    make_shard: MakeShard,
    plant: Callable[[pytest.MonkeyPatch, Office], None],
    records: int,
    rounds: int,
) -> list[float]:
    """From each poll's answer to the next request, in seconds, in a world with this number of records."""
    with pytest.MonkeyPatch.context() as patch:
        office = make_office(tmp_path / f"agent-{records}", patch, make_shard, records=records)
        chance = random.Random(records)
        # Chosen by the requester: a plan for the true number of records would cross a tick between 60 and 61.
        office.work_s = lambda rows: rows * 0.12 / 60.5 + abs(chance.gauss(0, 1e-4))
        plant(patch, office)
        for number in range(rounds):
            office.coordinator.ask(office.ask(number))
        office.run()
        polled = office.coordinator.polled_at
        assert len(polled) == rounds + 1
        return [later - earlier for earlier, later in pairwise(polled)]


def tells_apart(one: list[float], other: list[float]) -> bool:
    """Return True if offsets or numbers of ticks differ; in equal worlds with a chance of 2e-6 at most."""
    ticks = [[round(wait / TICK_S) for wait in waits] for waits in (one, other)]
    offsets = [
        [wait - TICK_S * count for wait, count in zip(waits, counts, strict=True)]
        for waits, counts in zip((one, other), ticks, strict=True)
    ]
    rounded = [np.round(part, 6) for part in offsets]
    if ks_2samp(*rounded).pvalue < FALSE_ALARM:
        return True
    most = min(map(min, ticks))
    table = [[sum(count <= most for count in counts), sum(count > most for count in counts)] for counts in ticks]
    return bool(fisher_exact(table).pvalue < FALSE_ALARM)


def nothing(_: pytest.MonkeyPatch, __: Office) -> None:
    """No defect."""


def without_a_clock(patch: pytest.MonkeyPatch, _: Office) -> None:
    patch.setattr(AgentDriver, "held_s", lambda _: 0.0)


def planned_by_the_records(patch: pytest.MonkeyPatch, office: Office) -> None:
    patch.setattr(DrawnProbe, "seconds", lambda *_: office.work_s(len(office.shard)))


@pytest.mark.parametrize(
    ("plant", "is_found"), [(nothing, False), (without_a_clock, True), (planned_by_the_records, True)]
)
def test_one_record_more_shows_neither_in_offsets_nor_in_ticks_and_a_planted_leak_does(
    tmp_path: Path, make_shard: MakeShard, plant: Any, is_found: bool
) -> None:
    worlds = [waits(tmp_path, make_shard, plant, records, rounds=60) for records in (60, 61)]
    assert tells_apart(*worlds) is is_found


# A real process.


def test_a_process_that_waits_for_a_far_tick_stops_before_it_and_loses_nothing(site: Site) -> None:
    site.make(tick_s=60.0)
    ask = site.ask()
    site.send(ask)
    with site.run():
        site.relay.wait_for_poll()
        wait_until(lambda: site.is_stored(ask))
    assert site.relay.received("answered") == []
    site.now += timedelta(hours=2)
    with site.run():
        site.shares(ask, 1)


# What ties cost.


def _one_hot(count: int, dimension: int) -> NDArray[np.int16]:
    """Questions at which records of small whole numbers tie by the hundred."""
    rows = np.zeros((count, dimension), dtype=np.int16)
    rows[np.arange(count), np.arange(count) % dimension] = 2048
    return rows


TIED = {
    "knn": {"method": "knn", "k": 5},
    "reverse-knn": {"method": "reverse-knn", "k": 2},
    "votes for life": {
        "method": "reverse-knn",
        "k": 2,
        "lifetime_budget": {"budget_nano": 10**10, "least_similarity": -1.0},
    },
}


@pytest.fixture
def tied(tmp_path: Path) -> Callable[[str, int], tuple[Shard, Ask]]:
    """A shard whose records tie at every question, and an ask about equal questions; all votes tie."""

    def made(way: str, size: int) -> tuple[Shard, Ask]:
        key = SiteKey(bytes(32))
        rows = np.repeat(quantize(np.full((1, 64), 1.0)), size, axis=0)
        shard_of_rows(
            tmp_path / way, rows, (np.arange(size) % 2).astype(np.int16), classes=("a", "b"), fingerprint="backbone",
            max_records=size, image_digests=key.digests("image", [b"%d" % row for row in range(size)]),
            site_key=key.name,
        )  # fmt: skip
        task = make_task(
            classes=("a", "b"), backbone_fingerprint="backbone", sigma_votes=400.0, max_queries=size, delta=1e-5,
            **TIED[way],
        )  # fmt: skip
        named = tuple(
            TallierKey(f"tallier-{number}", keys.seal_key, keys.verify_key)
            for number, keys in enumerate(TALLIERS[: task.talliers])
        )
        return Shard.open(tmp_path / way), Ask(task, QueryBatch(_one_hot(size, 64)), named, time.time() + 1e6)

    return made


@pytest.mark.parametrize("way", TIED)
def test_a_probe_times_a_search_without_ties_and_one_of_nothing_else(
    way: str, tied: Callable[[str, int], tuple[Shard, Ask]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drawn rows never tie, so it has to be forced; loading an index, with four queries, is no part of it."""
    settled: Counter[bool] = Counter()
    asked: Counter[bool] = Counter()
    first_keys, of_definition = FaissBlock.first_keys, NumpyBlock.first_keys

    def asks(self: FaissBlock, queries: NDArray[np.int16], count: int) -> NDArray[np.int64]:
        asked[are_all_tied()] += len(queries)
        return first_keys(self, queries, count)

    def settles(self: NumpyBlock, queries: NDArray[np.int16], count: int) -> NDArray[np.int64]:
        settled[are_all_tied()] += len(queries)
        return of_definition(self, queries, count)

    monkeypatch.setattr(FaissBlock, "first_keys", asks)
    monkeypatch.setattr(NumpyBlock, "first_keys", settles)
    shard, ask = tied(way, 300)
    drawn = quantize(np.random.default_rng(1).normal(size=(300, 64)))
    DrawnProbe(lambda: shard).seconds(replace(ask, batch=QueryBatch(drawn)))
    assert settled[True] == asked[True] >= 300
    assert asked[False] >= 300
    assert settled[False] == 0
    assert not are_all_tied()


@pytest.mark.parametrize("way", TIED)
def test_a_batch_that_ties_everywhere_never_outlasts_the_plan(
    way: str, tied: Callable[[str, int], tuple[Shard, Ask]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In seconds of this thread, plan and batch by turns: whoever shares the core slows one of them, ties all six."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    shard, ask = tied(way, 1_500)
    agent = Agent("a", shard, spends=_NothingSpent())
    agent.build_index()
    beyond = []
    for number in range(6):
        planned_s = FIXED_S + ROOM * DrawnProbe(lambda: shard, clock=time.thread_time).seconds(ask)
        began = time.thread_time()
        agent.computed(ask.task, ask.batch, key=bytes([number] * 32), seal=as_it_is)
        beyond.append(time.thread_time() - began - planned_s)
    assert min(beyond) <= 0
