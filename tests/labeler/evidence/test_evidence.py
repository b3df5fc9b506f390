"""A document of evidence says what its facts give, rounded up; whatever else it says is found and named."""

from __future__ import annotations

import copy
import importlib
import json
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feature_store.results.evidence import render_page
from labeler.accounting.lifetime import ROUND_NANO
from labeler.auditing import Attempt, AuditFacts
from labeler.batching import round_charges
from labeler.budget import UNBOUNDED_NANO, epsilon_spent
from labeler.errors import ProtocolViolation
from labeler.evidence.derive import (
    bound,
    contradictions,
    decimal,
    derive,
    differences,
    rebuilt,
    software,
)
from labeler.evidence.document import Evidence, canonical_bytes, parse_evidence
from labeler.methods import METHODS, proof_of
from labeler.planning import FOR_LIFE, price
from labeler.privacy_card import card_in_words, privacy_card
from labeler.task import Task
from labeler.untrusted import canonical_json
from tests.labeler.evidence.conftest import AGENTS, charging, facts_of, round_of, task_with, with_first_round


@given(st.floats(min_value=1e-300, max_value=1e9))
def test_a_bound_is_never_below_its_number_and_hardly_above(value: float) -> None:
    text = bound(value)
    assert text is not None
    assert Decimal(value) <= Decimal(text) <= Decimal(value) * (1 + Decimal("1e-5"))


@given(st.floats(min_value=1e-90, max_value=0.5))
def test_a_delta_is_the_decimal_that_all_parties_wrote(delta: float) -> None:
    assert float(decimal(delta)) == delta
    assert "e" not in decimal(delta)


def test_the_guarantee_is_the_price_of_the_task(evidence: Evidence, task: Task) -> None:
    [found] = evidence.tasks
    stated = price(task)
    by_unit = {one.unit: one for one in found.promised}
    assert by_unit["image"].epsilon == bound(stated.instance.epsilon)
    assert by_unit["agent"].epsilon == bound(stated.agent.epsilon)
    assert {one.delta for one in found.promised} == {"0.00001"}


def test_what_was_spent_is_the_sum_of_the_rounds(evidence: Evidence, task: Task) -> None:
    [found] = evidence.tasks
    nano = 2 * round_charges(task, 20)["instance"]
    assert found.spent[0].epsilon == bound(epsilon_spent(nano, task.delta))
    assert (found.cadence.questions_charged, found.cadence.rounds_charged, found.cadence.days) == (40, 2, 2)
    assert (found.cohort.fewest_contributors, found.cohort.fewest_asked) == (3, 3)
    assert found.refused == (("north", 1),)


def test_a_person_has_a_guarantee_where_the_task_bounds_its_records() -> None:
    task = task_with(records_per_person=3)
    [found] = derive(facts_of(task, round_of(task)), software("1")).tasks
    assert [one.unit for one in found.promised] == ["image", "person", "agent"]


def test_a_charge_below_todays_price_is_remarked_and_not_believed(task: Task) -> None:
    document = derive(charging(task, lambda nano: nano // 2), software("1"))
    assert document.tasks[0].spent == derive(facts_of(task, round_of(task)), software("1")).tasks[0].spent
    assert any("charged less" in line for line in document.remarks)


def test_a_charge_above_the_price_counts_as_it_is(task: Task) -> None:
    [found] = derive(charging(task, lambda _: UNBOUNDED_NANO), software("1")).tasks
    assert [one.epsilon for one in found.spent] == [None, None]


def test_questions_asked_twice_are_counted(task: Task) -> None:
    twice = derive(facts_of(task, round_of(task), round_of(task, number=1, first=15, entry=40)), software("1"))
    assert twice.tasks[0].cadence.questions_asked_again == 5
    assert any("more than once" in line for line in twice.remarks)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_names_a_proof_that_is_there(method: str) -> None:
    proof, paper = proof_of(method)
    module, _, name = proof.rpartition(".")
    words = getattr(importlib.import_module(module), name).__doc__
    assert len(words) > 60
    assert "(" in paper, "a paper, or that it is ours"


def test_a_document_comes_back_from_its_bytes_as_it_was(evidence: Evidence) -> None:
    data = canonical_bytes(evidence)
    assert parse_evidence(data) == evidence
    assert canonical_bytes(parse_evidence(data)) == data
    assert not contradictions(evidence.facts)
    assert not differences(evidence, rebuilt(evidence))


ROUNDS = st.tuples(st.integers(1, 30), st.sampled_from(["posted", "void", "none"]))


@settings(max_examples=40)
@given(st.lists(ROUNDS, max_size=4), st.integers(1, 9))
def test_any_facts_round_trip_and_agree_with_themselves(rounds: list[tuple[int, str]], k: int) -> None:
    task = task_with(k=k, max_queries=1000)
    made, first = [], 0
    for number, (questions, charge) in enumerate(rounds):
        one = round_of(task, number=number, first=first, questions=questions, entry=10 + number)
        if charge != "posted":
            unpaid = {"posted_entry": None, "posted_at": "", "contributors": (), "release_digest": "", "charge": charge}
            one = one.model_copy(update=unpaid | ({"charges": ()} if charge == "none" else {}))
        made.append(one)
        first += questions
    document = derive(facts_of(task, *made), software("1"))
    assert parse_evidence(canonical_bytes(document)) == document
    assert not differences(document, rebuilt(document))


def leaves(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict):
        for name, one in value.items():
            yield from leaves(one, (*place, name))
    elif isinstance(value, list):
        for number, one in enumerate(value):
            yield from leaves(one, (*place, number))
    else:
        yield place


def told_of(data: bytes) -> list[str]:
    """What is said of a document: that it is none, or which field does not follow from its facts."""
    try:
        document = parse_evidence(data)
    except ProtocolViolation as refused:
        return [str(refused)]
    return differences(document, rebuilt(document))


def changed(value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return 1
    if isinstance(value, int | float):
        return value + 1
    return {"posted": "reserved", "completed": "failed"}.get(value, value[:-1] + ("1" if value[-1:] != "1" else "2"))


def test_every_derived_field_that_is_changed_is_named(evidence: Evidence) -> None:
    content = json.loads(canonical_bytes(evidence))
    derived = [place for place in leaves(content) if place[0] in ("tasks", "accounts", "remarks", "meaning")]
    assert len(derived) > 60
    for place in derived:
        other = copy.deepcopy(content)
        node = other
        for step in place[:-1]:
            node = node[step]
        before = node[place[-1]]
        # A bound may differ in its last digit: the first is changed.
        is_bound = place[-1] in ("epsilon", "participant_epsilon", "spent_epsilon", "cap_epsilon") and isinstance(
            before, str
        )
        node[place[-1]] = "9" + before if is_bound else changed(before)
        told = told_of(canonical_json(other))
        named = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in place).lstrip(".")
        assert any(line.startswith(named) or f".{place[-1]}:" in line for line in told), (place, told)


def test_a_task_whose_fields_are_not_those_of_its_digest_is_a_contradiction(evidence: Evidence) -> None:
    content = json.loads(canonical_bytes(evidence))
    content["facts"]["tasks"][0]["task"]["sigma_votes"] = 4000.0
    document = parse_evidence(canonical_json(content))
    assert "its fields do not have its digest" in contradictions(document.facts)[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"contributors": (*AGENTS, "south")}, "an agent was summed that was not charged"),
        ({"charge": "void"}, "a charge is final by an entry"),
        ({"charge": "void", "posted_entry": None, "posted_at": ""}, "released that nobody had paid for"),
        ({"posted_entry": 61}, "none of the chain's 60"),
        ({"questions": 21}, "do not hold its 40 questions"),
        ({"charges": ()}, "a charge has amounts"),
    ],
)
def test_facts_that_cannot_all_be_true_are_named(task: Task, change: dict[str, Any], words: str) -> None:
    facts = facts_of(task, round_of(task), round_of(task, number=1, first=20, entry=40))
    told = contradictions(with_first_round(facts, **change))
    assert any(words in line for line in told), told


def test_nothing_bounds_what_was_charged_without_an_entry_of_its_level(task: Task) -> None:
    facts = facts_of(task, round_of(task))
    accounts = tuple(one.model_copy(update={"is_unpriced": one.level == "agent"}) for one in facts.accounts)
    charges = tuple(one for one in facts.tasks[0].jobs[0].rounds[0].charges if one.level == "instance")
    [old] = with_first_round(facts, charges=charges).tasks
    unknown = old.model_copy(update={"task": None, "participants": ()})
    document = derive(facts.model_copy(update={"accounts": accounts, "tasks": (unknown,)}), software("0"))
    assert {one.level: one.spent_epsilon is None for one in document.accounts} == {"instance": False, "agent": True}
    assert {one.unit: one.epsilon is None for one in document.tasks[0].spent} == {"image": False, "agent": True}


def test_the_page_shows_the_document_and_obeys_nothing_in_it(task: Task) -> None:
    hostile = task_with(name="<script>alert(1)</script>")
    facts = facts_of(hostile, round_of(hostile))
    document = derive(facts, software("0.1.0<b>"))
    page = render_page(document, verify_key="ab" * 32, signature="cd" * 64)
    assert "<script" not in page
    assert "<b>" not in page
    named = document.model_copy(
        update={
            "facts": facts.model_copy(
                update={"scope": facts.scope.model_copy(update={"party": "agent", "party_id": "<i>"})}
            )
        }
    )
    assert "<i>" not in render_page(named)
    assert "&lt;script&gt;" in page
    stated = document.tasks[0].promised[0].epsilon
    assert stated is not None
    assert stated in page
    for words in ("labeler.methods.knn.squared", "north declined: our policy allows k up to 3", "ab" * 32):
        assert words in page
    assert "http" not in page.replace("http-equiv", ""), "the page loads nothing"


def audited(task: Task, *, wrong: int = 4_400) -> AuditFacts:
    attempt = Attempt(
        adversary="poisoned-chosen", sentence="all its own", absent=10_000, present=10_000,
        false_positives=wrong, false_negatives=wrong,
    )  # fmt: skip
    return AuditFacts(
        task=task.model_dump(mode="json"), task_digest=task.digest, level="instance", view="release", confidence=0.99,
        seed=0, noise="seeded with 0", attempts=(attempt,),
    )  # fmt: skip


def test_an_audit_stands_in_the_document_and_its_bounds_are_computed_again(task: Task) -> None:
    facts = facts_of(task, round_of(task)).model_copy(update={"audits": (audited(task),)})
    document = derive(facts, software("1"))
    [one] = document.audits
    assert one.runs == 20_000
    assert 0.3 * float(one.promised_epsilon) < float(one.proved_epsilon) <= float(one.promised_epsilon)
    assert not one.is_above
    assert parse_evidence(canonical_bytes(document)) == document
    assert "poisoned-chosen" in render_page(document)
    better = document.model_copy(update={"audits": (one.model_copy(update={"proved_epsilon": "0.01"}),)})
    assert differences(better, rebuilt(better)) == [
        f"audits[0].proved_epsilon is '0.01', and should be {one.proved_epsilon!r}"
    ]
    foreign = facts.model_copy(update={"audits": (audited(task_with(name="another")),)})
    assert any("was audited" in line for line in contradictions(foreign))


def test_an_audit_that_refutes_the_promise_is_what_is_read_first(task: Task) -> None:
    document = derive(
        facts_of(task, round_of(task)).model_copy(update={"audits": (audited(task, wrong=0),)}), software("1")
    )
    assert document.audits[0].is_above
    assert "proved more than is promised" in document.remarks[0]


def test_a_document_without_audits_is_signed_over_the_bytes_of_before_there_were_any(evidence: Evidence) -> None:
    assert b"audits" not in canonical_bytes(evidence)


# Votes for life: the promise, however little a round was charged.

BUDGET = 71_779_539


def for_life() -> Task:
    life = {"budget_nano": BUDGET, "least_similarity": 0.5}
    return task_with(method="reverse-knn", k=1, sigma_votes=20.0, lifetime_budget=life)


def test_evidence_of_votes_for_life_states_what_was_promised_and_not_what_a_round_was_charged() -> None:
    asked = for_life()
    one = round_of(asked)
    assert {charge.nano for charge in one.charges if charge.level == "instance"} == {ROUND_NANO}
    (found,) = derive(facts_of(asked, one), software("0.1.0")).tasks
    stated = bound(epsilon_spent(BUDGET, asked.delta))
    assert found.spent[0].epsilon == stated
    (nothing,) = derive(facts_of(asked), software("0.1.0")).tasks
    assert nothing.spent[0].epsilon == "0"
    assert found.mechanism is not None
    assert FOR_LIFE in found.mechanism.holds_against


def test_the_card_says_what_the_number_is_of() -> None:
    asked = for_life()
    card = privacy_card(asked, price(asked), is_seeded=False)
    assert FOR_LIFE.removesuffix(".") in card_in_words(card)
    assert card["lifetime_budget"] == asked.lifetime_budget.model_dump(mode="json") if asked.lifetime_budget else None


# Noise by the talliers: by whom, and how many of them may be dishonest.


def test_evidence_says_whose_noise_it_was_and_against_whom_it_holds() -> None:
    task = task_with(dishonest_talliers=1)
    document = derive(facts_of(task, round_of(task)), software("0.1.0"))
    (found,) = document.tasks
    assert found.mechanism is not None
    assert "a share of each of the three talliers', of whom 1 may be dishonest" in found.mechanism.noise
    assert "all other participants and one of the three talliers" in found.mechanism.holds_against
    assert contradictions(document.facts) == []
    assert differences(document, rebuilt(document)) == []


def test_a_card_says_that_the_talliers_added_the_noise_and_another_says_nothing_of_it() -> None:
    task, plain = task_with(dishonest_talliers=1), task_with()
    card, other = (privacy_card(one, price(one), is_seeded=False) for one in (task, plain))
    assert card["dishonest_talliers"] == 1
    assert "the 3 talliers added the noise, of whom 1 may be dishonest" in card_in_words(card)
    assert "dishonest_talliers" not in other
    assert "added the noise" not in card_in_words(other)


def test_evidence_of_training_in_steps_names_its_accountant_and_whose_change_the_noise_is_a_multiple_of() -> None:
    for unit in ("record", "agent"):
        sampled = {"rate": 0.2, "unit": unit}
        training = {"min_records": 5, "regularisation": 0.1, "iterations": 4, "sampled": sampled}
        task = task_with(method="federated", k=1, training=training, max_queries=20)
        (found,) = derive(facts_of(task, round_of(task)), software("0.1.0")).tasks
        assert found.mechanism is not None
        assert f"times what one {unit} can change per number" in found.mechanism.noise
        assert "labeler.accounting.sampled" in found.mechanism.accounting
