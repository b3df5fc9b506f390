"""What evidence says of votes for life: the promise, however little a round was charged."""

from __future__ import annotations

from labeler.accounting.lifetime import ROUND_NANO
from labeler.budget import epsilon_spent
from labeler.evidence.derive import bound, derive, software
from labeler.planning import FOR_LIFE, price
from labeler.privacy_card import card_in_words, privacy_card
from labeler.task import Task, parse_task
from tests.labeler.evidence.conftest import facts_of, round_of

BUDGET = 71_779_539


def for_life(task: Task) -> Task:
    fields = task.model_dump(mode="json") | {
        "method": "reverse-knn",
        "k": 1,
        "sigma_votes": 20.0,
        "release": "histogram",
        "lifetime_budget": {"budget_nano": BUDGET, "least_similarity": 0.5},
    }
    return parse_task({name: value for name, value in fields.items() if value is not None})


def test_evidence_of_votes_for_life_states_what_was_promised_and_not_what_a_round_was_charged(task: Task) -> None:
    asked = for_life(task)
    one = round_of(asked)
    assert {charge.nano for charge in one.charges if charge.level == "instance"} == {ROUND_NANO}
    (found,) = derive(facts_of(asked, one), software("0.1.0")).tasks
    stated = bound(epsilon_spent(BUDGET, asked.delta))
    assert found.spent[0].epsilon == stated
    (nothing,) = derive(facts_of(asked), software("0.1.0")).tasks
    assert nothing.spent[0].epsilon == "0"
    assert found.mechanism is not None
    assert FOR_LIFE in found.mechanism.holds_against


def test_the_card_says_what_the_number_is_of(task: Task) -> None:
    asked = for_life(task)
    card = privacy_card(asked, price(asked), is_seeded=False)
    assert FOR_LIFE.removesuffix(".") in card_in_words(card)
    assert card["lifetime_budget"] == asked.lifetime_budget.model_dump(mode="json") if asked.lifetime_budget else None
