"""What evidence and cards say where the talliers add the noise: by whom, and how many of them may be dishonest."""

from __future__ import annotations

from labeler.evidence.derive import contradictions, derive, differences, rebuilt, software
from labeler.planning import price
from labeler.privacy_card import card_in_words, privacy_card
from labeler.task import Task
from tests.labeler.evidence.conftest import facts_of, round_of, task_with


def by_talliers(**changes: object) -> Task:
    return task_with(dishonest_talliers=1, **changes)


def test_evidence_says_whose_noise_it_was_and_against_whom_it_holds() -> None:
    task = by_talliers()
    document = derive(facts_of(task, round_of(task)), software("0.1.0"))
    (found,) = document.tasks
    assert found.mechanism is not None
    assert "a share of each of the three talliers', of whom 1 may be dishonest" in found.mechanism.noise
    assert "all other participants and one of the three talliers" in found.mechanism.holds_against
    assert contradictions(document.facts) == []
    assert differences(document, rebuilt(document)) == []


def test_a_card_says_that_the_talliers_added_the_noise_and_another_says_nothing_of_it() -> None:
    task, plain = by_talliers(), task_with()
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
