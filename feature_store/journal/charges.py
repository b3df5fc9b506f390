"""What the ledger is asked for and what it answers: a charge, a balance, and the bounds of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from labeler.errors import InvalidSetting
from labeler.task import Level

MAX_AMOUNT = 2**63 - 1
"""The largest whole number both databases hold, in nano-units of mu^2: nine billion units."""

MAX_NAME_LENGTH = 256

MAX_CHARGES = 10_000
"""Of one reservation."""


@dataclass(frozen=True)
class Charge:
    """What one account pays for a reservation.

    Attributes:
        level: whose presence it protects.
        amount: nano-units of mu^2, 1 to MAX_AMOUNT.
    """

    account: str
    level: Level
    amount: int

    def __post_init__(self) -> None:
        check_account(self.account, self.level)
        # `type(...) is int` on purpose: True is an int to isinstance, and a float compares without complaint.
        if type(self.amount) is not int or not 1 <= self.amount <= MAX_AMOUNT:
            raise InvalidSetting(
                f"an amount is a positive whole number of nano-units of mu^2 of at most {MAX_AMOUNT}, found "
                f"{self.amount!r} ({type(self.amount).__name__})"
            )


@dataclass(frozen=True)
class Balance:
    """What an account may spend and has spent, in nano-units of mu^2.

    Attributes:
        cap: None where the account is not limited and only recorded.
        reserved: charged for work that is not finished.
        posted: charged for ever.
    """

    account: str
    level: Level
    cap: int | None
    reserved: int
    posted: int

    @property
    def spent(self) -> int:
        """Posted and still reserved."""
        return self.reserved + self.posted

    @property
    def left(self) -> int | None:
        """What can still be reserved; None where the account is not limited."""
        return None if self.cap is None else self.cap - self.spent


def check_account(account: str, level: str) -> None:
    """Refuse what cannot be the name or the level of an account."""
    check_name("the name of an account", account)
    if level not in ("instance", "agent"):
        raise InvalidSetting(f"a level is 'instance' or 'agent', found {level!r}")


def check_name(what: str, name: str) -> None:
    """Refuse a name that is empty, too long, or would not print."""
    if type(name) is not str or not name:
        raise InvalidSetting(f"{what} is a text of at least one character")
    if len(name) > MAX_NAME_LENGTH or not name.isprintable():
        raise InvalidSetting(f"{what} is a printable text of at most {MAX_NAME_LENGTH} characters")


def check_cap(cap: int | None) -> None:
    """Refuse what cannot be a cap."""
    if cap is not None and (type(cap) is not int or not 0 <= cap <= MAX_AMOUNT):
        raise InvalidSetting(
            f"a cap is a whole number of nano-units from 0 to {MAX_AMOUNT}, or none at all, found {cap!r}"
        )


def distinct_charges(charges: Sequence[Charge]) -> dict[tuple[str, str], int]:
    """Amounts by account and level; refuses none, too many, and two for one account at one level."""
    if isinstance(charges, Charge) or not 1 <= len(charges) <= MAX_CHARGES:
        raise InvalidSetting(f"a reservation has a list of 1 to {MAX_CHARGES} charges")
    if not all(isinstance(charge, Charge) for charge in charges):
        raise InvalidSetting("a reservation is made of Charge values")
    asked: dict[tuple[str, str], int] = {(charge.account, charge.level): charge.amount for charge in charges}
    if len(asked) != len(charges):
        raise InvalidSetting("a reservation charges an account at most once at each level; add the amounts up")
    return asked
