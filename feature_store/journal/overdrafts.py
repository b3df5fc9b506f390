"""The refusal for budget: it names the account, the level, what is left, what was asked, and the last spenders."""

from __future__ import annotations

from feature_store.journal.charges import MAX_AMOUNT, Balance, Charge
from labeler.errors import BudgetExceeded

Spenders = tuple[tuple[str, int], ...]
"""Reservation and nano-units of the last charges, oldest first."""


def room(balance: Balance) -> int:
    """How much more an account can hold: an unlimited one is still limited by the largest number."""
    return MAX_AMOUNT - balance.spent if balance.left is None else balance.left


def overdrawn(charge: Charge, balance: Balance, spenders: Spenders) -> BudgetExceeded:
    """The refusal of a charge that is larger than what is left."""
    cap = MAX_AMOUNT if balance.cap is None else balance.cap
    named = ", ".join(f"{name} ({amount})" for name, amount in spenders) or "nobody yet"
    return BudgetExceeded(
        f"account {charge.account!r}, {charge.level} level: {charge.amount} nano-units of mu^2 were asked for and "
        f"{room(balance)} of {cap} are left. Last spenders: {named}. "
        "Ask fewer queries, raise sigma_votes, or raise the budget.",
        account=charge.account,
        level=charge.level,
        asked=charge.amount,
        left=room(balance),
        cap=cap,
        last_spenders=spenders,
    )


def cap_too_low(balance: Balance, cap: int, spenders: Spenders) -> BudgetExceeded:
    """The refusal of a cap below what is spent."""
    return BudgetExceeded(
        f"account {balance.account!r}, {balance.level} level: {balance.spent} nano-units of mu^2 are spent, and a cap "
        f"of {cap} is below that; what is spent stays spent",
        account=balance.account,
        level=balance.level,
        asked=balance.spent,
        left=0,
        cap=cap,
        last_spenders=spenders,
    )
