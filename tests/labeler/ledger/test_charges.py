"""What the ledger may be asked for: every bound at its edge, and every refusal word for word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from labeler.errors import InvalidSetting
from labeler.ledger.ledger import (
    MAX_AMOUNT,
    MAX_CHARGES,
    MAX_NAME_LENGTH,
    Balance,
    Charge,
    check_account,
    check_cap,
    check_name,
    distinct_charges,
)

AMOUNT = "an amount is a positive whole number of nano-units of mu^2 of at most 9223372036854775807, found "
CAP = "a cap is a whole number of nano-units from 0 to 9223372036854775807, or none at all, found "


def charges(count: int) -> list[Charge]:
    return [Charge(f"agent-{number}", "agent", 1) for number in range(count)]


@pytest.mark.parametrize(
    ("refused", "said"),
    [
        (lambda: Charge("a", "instance", 0), AMOUNT + "0 (int)"),
        (lambda: Charge("a", "instance", MAX_AMOUNT + 1), AMOUNT + "9223372036854775808 (int)"),
        (lambda: Charge("a", "instance", 1.0), AMOUNT + "1.0 (float)"),  # type: ignore[arg-type]  # the point
        (lambda: Charge("a", "instance", True), AMOUNT + "True (bool)"),
        (lambda: Charge("", "instance", 1), "the name of an account is a text of at least one character"),
        (lambda: Charge("a", "person", 1), "a level is 'instance' or 'agent', found 'person'"),  # type: ignore[arg-type]
        (lambda: check_account("a", "Agent"), "a level is 'instance' or 'agent', found 'Agent'"),
        (lambda: check_name("a thing", ""), "a thing is a text of at least one character"),
        (lambda: check_name("a thing", 7), "a thing is a text of at least one character"),  # type: ignore[arg-type]
        (lambda: check_name("a thing", "x" * 257), "a thing is a printable text of at most 256 characters"),
        (lambda: check_name("a thing", "x\n"), "a thing is a printable text of at most 256 characters"),
        (lambda: check_cap(-1), CAP + "-1"),
        (lambda: check_cap(MAX_AMOUNT + 1), CAP + "9223372036854775808"),
        (lambda: check_cap(False), CAP + "False"),
        (lambda: check_cap(1.5), CAP + "1.5"),  # type: ignore[arg-type]  # the point of the test
        (lambda: distinct_charges([]), "a reservation has a list of 1 to 10000 charges"),
        (lambda: distinct_charges(charges(10_001)), "a reservation has a list of 1 to 10000 charges"),
        (lambda: distinct_charges(charges(1)[0]), "a reservation has a list of 1 to 10000 charges"),  # type: ignore[arg-type]
        (lambda: distinct_charges([*charges(1), 7]), "a reservation is made of Charge values"),  # type: ignore[list-item]
        (
            lambda: distinct_charges(charges(1) * 2),
            "a reservation charges an account at most once at each level; add the amounts up",
        ),
    ],
)
def test_what_cannot_be_asked_is_refused_word_for_word(refused: Callable[[], Any], said: str) -> None:
    with pytest.raises(InvalidSetting) as refusal:
        refused()
    assert str(refusal.value) == said


def test_every_bound_itself_is_allowed() -> None:
    assert (MAX_AMOUNT, MAX_NAME_LENGTH, MAX_CHARGES) == (2**63 - 1, 256, 10_000)
    for amount in (1, MAX_AMOUNT):
        assert Charge("x" * 256, "agent", amount).amount == amount
    for cap in (None, 0, 1, MAX_AMOUNT):
        check_cap(cap)
    for name in ("a", "x" * 256):
        check_name("a thing", name)
    for level in ("instance", "agent"):
        check_account("a", level)
    assert len(distinct_charges(charges(MAX_CHARGES))) == MAX_CHARGES


def test_charges_are_known_by_account_and_level() -> None:
    both = [Charge("a", "instance", 3), Charge("a", "agent", 4), Charge("b", "agent", 5)]
    assert distinct_charges(both) == {("a", "instance"): 3, ("a", "agent"): 4, ("b", "agent"): 5}


def test_what_is_left_is_the_cap_less_all_that_is_reserved_or_posted() -> None:
    balance = Balance("a", "instance", 100, 30, 25)
    assert (balance.spent, balance.left) == (55, 45)
    recorded = Balance("a", "instance", None, 30, 25)
    assert (recorded.spent, recorded.left) == (55, None)
