"""Budgets: spent epsilon is an upper bound that agrees with the caps, and ledger pages add up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from api.coordinator.budgets import (
    budget_view,
    cap_as_written,
    check_delta,
    ledger_page,
    open_accounts,
)
from api.problems import PROBLEMS
from labeler.accounting.gaussian import epsilon_of_delta
from labeler.budget import UNBOUNDED_NANO, NothingLeft, budget_for, epsilon_spent
from labeler.errors import BudgetExceeded, InvalidSetting, LabelerError, NotFound
from labeler.ledger.ledger import Charge
from labeler.ledger.rounds import FEDERATION, agent_account
from labeler.setting import LEVELS
from tests.api.conftest import House


@pytest.mark.parametrize("delta", [1e-9, 1e-5, 0.01])
@pytest.mark.parametrize("nano", [1, 12_345, 10**8, 3 * 10**9, 7 * 10**11])
def test_spent_epsilon_is_the_inverse_of_a_cap_rounded_up(nano: int, delta: float) -> None:
    epsilon = epsilon_spent(nano, delta)
    assert epsilon is not None
    assert budget_for(epsilon, delta) >= nano
    exact = epsilon_of_delta(delta, (nano / 1e9) ** 0.5)
    assert exact <= epsilon <= exact * (1 + 1e-5) + 1e-6


@pytest.mark.parametrize("epsilon", [0.01, 0.5, 10.0, 1000.0])
def test_an_account_spent_to_its_cap_shows_no_more_than_its_cap(epsilon: float) -> None:
    spent = epsilon_spent(budget_for(epsilon, 1e-5), 1e-5)
    assert spent is not None
    assert epsilon * (1 - 1e-5) < spent <= epsilon
    assert cap_as_written(budget_for(epsilon, 1e-5), 1e-5) == epsilon


def test_the_budget_shows_caps_as_written_and_what_is_left(house: House) -> None:
    house = house.with_caps(federation=(10.0, "unlimited"), agents=(4.0, 100.0))
    both = [Charge(FEDERATION, level, 10**9) for level in LEVELS]
    house.ledger.reserve("job-1/0", [*both, Charge("agent:east", "instance", 1), Charge("agent:east", "agent", 10**9)])
    house.ledger.post("job-1/0")
    view = budget_view(house.ledger, house.config.delta)
    by_account = {(one.account, one.level): one for one in view.accounts}
    federation = by_account["federation", "instance"]
    assert federation.cap_epsilon == 10.0
    assert federation.posted_nano == 10**9
    assert federation.left_nano == budget_for(10.0, 1e-5) - 10**9
    assert federation.left_fraction == pytest.approx(federation.left_nano / budget_for(10.0, 1e-5))
    assert by_account["federation", "agent"].cap_epsilon is None
    assert by_account["federation", "agent"].left_fraction is None
    assert by_account["agent:east", "agent"].spent_epsilon == epsilon_spent(10**9, 1e-5)
    assert view.head_seq == house.ledger.head().seq
    assert {one.account for one in budget_view(house.ledger, 1e-5, account=agent_account("east")).accounts} == {
        "agent:east"
    }
    with pytest.raises(NotFound, match="no account 'agent:nobody'"):
        budget_view(house.ledger, 1e-5, account="agent:nobody")


def test_an_account_that_paid_for_something_without_a_price_at_a_level_shows_no_epsilon_there(house: House) -> None:
    """As earlier versions wrote it, and as a restored journal is whose unlimited accounts were not written off."""
    house = house.with_caps(federation=(10.0, "unlimited"), agents=(4.0, 100.0))
    house.ledger.write_off(FEDERATION, "instance", "the disk was lost")
    shown = {one.level: one.spent_epsilon for one in budget_view(house.ledger, 1e-5, account=FEDERATION).accounts}
    assert shown == {"instance": pytest.approx(10.0), "agent": None}


def test_an_account_that_took_an_unbounded_round_cannot_be_given_a_cap(house: House) -> None:
    house.ledger.reserve("job-1/0", [Charge(FEDERATION, "agent", UNBOUNDED_NANO)])
    assert budget_view(house.ledger, 1e-5, account=FEDERATION).accounts[0].spent_epsilon is None
    with pytest.raises(BudgetExceeded, match="below that"):
        house.with_caps(federation=("unlimited", 1000.0))


def test_opening_accounts_again_changes_nothing(house: House) -> None:
    head = house.ledger.head()
    open_accounts(house.ledger, house.config, ["east", "north", "west"])
    assert house.ledger.head() == head


def test_ledger_pages_show_what_each_account_had_spent_after_each_entry(house: House) -> None:
    begin = house.ledger.head().seq
    for number in range(5):
        house.ledger.reserve(
            f"job-{number}/0", [Charge(FEDERATION, "instance", 10), Charge("agent:east", "instance", 3)]
        )
    house.ledger.void("job-1/0", NothingLeft("job-1/0", "never-asked"))
    house.ledger.post("job-2/0")
    page = ledger_page(house.ledger, begin, 4)
    assert [(one.account, one.spent_after_nano) for one in page.items] == [
        ("federation", 10),
        ("agent:east", 3),
        ("federation", 20),
        ("agent:east", 6),
    ]
    assert page.next == str(begin + 4)
    following = ledger_page(house.ledger, begin + 4, 100)
    assert following.next is None
    assert [(one.kind, one.account, one.spent_after_nano) for one in following.items][-4:] == [
        ("void", "federation", 40),
        ("void", "agent:east", 12),
        ("post", "federation", 40),
        ("post", "agent:east", 12),
    ]
    assert ledger_page(house.ledger, begin + 4, 100) == following
    only = ledger_page(house.ledger, begin + 4, 2, account="agent:east")
    assert [one.spent_after_nano for one in only.items] == [9, 12]
    assert ledger_page(house.ledger, 0, 10, search="job-3").items[0].spent_after_nano is None


def every_error(root: type[LabelerError] = LabelerError) -> list[type[LabelerError]]:
    below = [error for child in root.__subclasses__() for error in every_error(child)]
    return [error for error in (root, *below) if error.__module__ == "labeler.errors"]


def test_every_error_has_a_status_and_a_title_of_its_own() -> None:
    assert set(every_error()) == set(PROBLEMS)
    titles = [title for _, title in PROBLEMS.values()]
    assert len(set(titles)) == len(titles)
    assert all(400 <= status < 600 for status, _ in PROBLEMS.values())


@pytest.mark.parametrize("fields", [{"release": "winner"}, {}], ids=["winners", "histogram"])
def test_accounts_that_paid_for_winners_are_stated_at_no_smaller_delta(house: House, fields: dict[str, str]) -> None:
    record = house.tasks.add(replace(one := house.task(), task=one.task.model_copy(update=fields | {"nonce": "n"})))
    check_delta(house.tasks, 1e-20)  # nothing was asked of it
    house.tasks.claim_queries(record.digest, 10)
    check_delta(house.tasks, 1e-16)
    if fields:
        with pytest.raises(InvalidSetting, match="holds at delta 1e-16 and above, but the configuration says 1e-20"):
            check_delta(house.tasks, 1e-20)
    else:
        check_delta(house.tasks, 1e-90)
