"""The account against a tiny model of itself, and against everything that must never be an amount."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import hypothesis.stateful as stateful
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpmath import mp, mpf

from labeler.accounting.events import NANO, nano_units
from labeler.budget import (
    LEAST_DELTA,
    MOST_DELTA,
    MOST_EPSILON,
    Account,
    NothingLeft,
    Reservation,
    budget_for,
    short_epsilon,
)
from labeler.errors import BudgetExceeded, InvalidSetting, PrivacyRefusal, ProtocolViolation

IDS = st.sampled_from(["a", "b", "c", "d", "e"])


class AccountModel(stateful.RuleBasedStateMachine):
    """The oracle: who is charged what, in two dictionaries, with the rules written out a second time."""

    @stateful.initialize(cap=st.integers(0, 60))
    def open(self, cap: int) -> None:
        self.account = Account("model", "instance", cap)
        self.amounts: dict[str, int] = {}
        self.states: dict[str, str] = {}

    def _spent(self) -> int:
        return sum(amount for name, amount in self.amounts.items() if self.states[name] != "void")

    @stateful.rule(name=IDS, amount=st.integers(1, 30))
    def reserve(self, name: str, amount: int) -> None:
        refusal: type[Exception] | None = None
        if name in self.amounts:
            if self.amounts[name] != amount:
                refusal = ProtocolViolation
            elif self.states[name] == "void":
                refusal = PrivacyRefusal
        elif self._spent() + amount > self.account.cap:
            refusal = BudgetExceeded
        if refusal is not None:
            with pytest.raises(refusal):
                self.account.reserve(name, amount)
            return
        self.account = self.account.reserve(name, amount)
        self.amounts[name] = amount
        self.states.setdefault(name, "reserved")

    @stateful.rule(name=IDS)
    def reserve_again(self, name: str) -> None:
        if self.states.get(name) in ("reserved", "posted"):
            assert self.account.reserve(name, self.amounts[name]) is self.account

    @stateful.rule(name=IDS)
    def post(self, name: str) -> None:
        if self.states.get(name) in (None, "void"):
            with pytest.raises(ProtocolViolation if name not in self.states else PrivacyRefusal):
                self.account.post(name)
            return
        self.account = self.account.post(name)
        self.states[name] = "posted"

    @stateful.rule(name=IDS)
    def void(self, name: str) -> None:
        proof = NothingLeft(name, "below-quorum")
        if self.states.get(name) in (None, "posted"):
            with pytest.raises(ProtocolViolation if name not in self.states else PrivacyRefusal):
                self.account.void(name, proof)
            return
        self.account = self.account.void(name, proof)
        self.states[name] = "void"

    @stateful.invariant()
    def agrees_with_the_model(self) -> None:
        assert self.account.spent == self._spent() <= self.account.cap
        assert self.account.left == self.account.cap - self._spent() >= 0
        assert {name: entry.state for name, entry in self.account.reservations.items()} == self.states
        assert self.account.posted <= self.account.spent


TestAccountModel = AccountModel.TestCase
TestAccountModel.settings = settings(max_examples=60, stateful_step_count=25)


def test_a_refusal_names_account_level_what_is_left_what_was_asked_and_the_last_spenders() -> None:
    account = Account("hospital-1", "agent", 100)
    for name in ("monday", "tuesday", "wednesday", "thursday"):
        account = account.reserve(name, 20)
    account = account.void("tuesday", NothingLeft("tuesday", "never-asked"))
    with pytest.raises(BudgetExceeded) as refusal:
        account.reserve("friday", 41)
    message = str(refusal.value)
    for part in (
        "'hospital-1'",
        "agent level",
        "41 nano-units",
        "40 of 100",
        "monday (20), wednesday (20), thursday (20)",
    ):
        assert part in message
    assert "tuesday" not in message
    found = refusal.value
    assert (found.account, found.level, found.asked, found.left, found.cap) == ("hospital-1", "agent", 41, 40, 100)
    assert found.last_spenders == (("monday", 20), ("wednesday", 20), ("thursday", 20))
    assert account.reserve("friday", 40).left == 0


def test_a_transition_leaves_the_account_it_started_from_alone() -> None:
    before = Account("a", "instance", 10)
    after = before.reserve("job", 3)
    assert (before.left, after.left) == (10, 7)
    with pytest.raises(TypeError):
        after.reservations["job"] = Reservation(1)  # type: ignore[index]  # the point of the test


@pytest.mark.parametrize("bad", [0, -1, 1.0, math.nan, math.inf, -math.inf, True, None, "5", Fraction(1), np.int64(5)])
def test_nothing_but_a_positive_int_is_an_amount(bad: Any) -> None:
    with pytest.raises(InvalidSetting, match="positive whole number"):
        Account("a", "instance", 10).reserve("job", bad)
    with pytest.raises(InvalidSetting, match="positive whole number"):
        Reservation(bad)


@pytest.mark.parametrize("bad", [-1, 1.0, math.nan, math.inf, True, None])
def test_nothing_but_an_int_is_a_cap(bad: Any) -> None:
    with pytest.raises(InvalidSetting, match="cap"):
        Account("a", "instance", bad)


def test_an_account_that_is_overdrawn_from_the_start_is_refused() -> None:
    with pytest.raises(BudgetExceeded) as refusal:
        Account("a", "instance", 10, {"job": Reservation(11)})
    assert (refusal.value.asked, refusal.value.left, refusal.value.last_spenders) == (11, 0, (("job", 11),))
    assert Account("a", "instance", 10, {"job": Reservation(11, "void")}).left == 10


def test_budget_comes_back_only_with_a_proof_about_the_same_reservation() -> None:
    account = Account("a", "instance", 10).reserve("job", 3)
    for proof in (None, True, "never-asked", NothingLeft("other", "never-asked")):
        with pytest.raises(PrivacyRefusal, match="needs a NothingLeft about it"):
            account.void("job", proof)  # type: ignore[arg-type]  # the point of the test
    with pytest.raises(InvalidSetting, match="one of never-asked, below-quorum, refused"):
        NothingLeft("job", "probably")  # type: ignore[arg-type]  # the point of the test


@pytest.mark.parametrize("bad", ["", None, 7])
def test_a_reservation_needs_a_name(bad: Any) -> None:
    with pytest.raises(InvalidSetting, match="reservation id"):
        Account("a", "instance", 10).reserve(bad, 1)


def test_an_unknown_level_or_state_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="level"):
        Account("a", "person", 10)  # type: ignore[arg-type]  # the point of the test
    with pytest.raises(InvalidSetting, match="reserved, posted or void"):
        Reservation(1, "spent")  # type: ignore[arg-type]  # the point of the test


def exact_delta(epsilon: float, mu_squared: mpf) -> mpf:
    """Phi(-epsilon/mu + mu/2) - exp(epsilon) Phi(-epsilon/mu - mu/2), Balle and Wang 2018, as written, in 60 digits
    beyond what cancels."""
    with mp.workdps(60 + 120 + int(epsilon)):
        mu, eps = mp.sqrt(mu_squared), mpf(epsilon)
        upper = mp.erfc((eps / mu - mu / 2) / mp.sqrt(2)) / 2
        return upper - mp.exp(eps) * mp.erfc((eps / mu + mu / 2) / mp.sqrt(2)) / 2


@settings(max_examples=100)
@given(
    epsilon=st.one_of(
        st.floats(0, MOST_EPSILON),
        st.floats(-9, 3).map(lambda exponent: 10.0**exponent),
        st.sampled_from([0.0, 5e-324, 1e-300, 1.0, 599.9, MOST_EPSILON]),
    ),
    delta=st.one_of(
        st.floats(-100, -1).map(lambda exponent: max(LEAST_DELTA, 10.0**exponent)),
        st.floats(0.05, MOST_DELTA),
        st.sampled_from([LEAST_DELTA, 1e-12, 1e-5, 0.5, MOST_DELTA]),
    ),
)
def test_a_cap_is_worth_no_more_than_its_epsilon_and_delta_in_sixty_digits(epsilon: float, delta: float) -> None:
    """Over the whole accepted range, against an oracle that shares no code with the one that makes caps."""
    cap = budget_for(epsilon, delta)
    if cap:
        assert exact_delta(epsilon, mpf(cap) / NANO) <= mpf(delta)
    # A cap too large by three parts in a million would not pass, so the test can see what it is about.
    if cap > 10**7 and epsilon > 1e-3:
        assert exact_delta(epsilon, mpf(cap) * (1 + mpf(3) / 10**6) / NANO) > mpf(delta) * (1 - mpf(10) ** -3)


@given(more=st.floats(1.001, 3))
def test_a_larger_budget_is_never_a_smaller_cap(more: float) -> None:
    assert budget_for(1.0, 1e-5) <= budget_for(1.0 * more, 1e-5)
    assert budget_for(1.0, 1e-5) <= budget_for(1.0, 1e-5 * more)


@given(sigmas=st.lists(st.floats(1, 1e4), min_size=1, max_size=30))
def test_charges_add_up_to_at_least_the_exact_sum_and_at_most_one_unit_more_each(sigmas: list[float]) -> None:
    exact = [2 / Fraction(sigma) ** 2 for sigma in sigmas]
    charged = sum(nano_units(part) for part in exact)
    assert 0 <= charged - sum(exact) * NANO < len(sigmas)


@pytest.mark.parametrize(
    ("epsilon", "delta"),
    [
        (math.nan, 1e-4),
        (math.inf, 1e-4),
        (-1.0, 1e-4),
        (True, 1e-4),
        (1.0, 0.0),
        (1.0, 1.0),
        (1.0, math.nan),
        (1.0, True),
    ],
)
def test_a_malformed_budget_is_refused(epsilon: float, delta: float) -> None:
    with pytest.raises(InvalidSetting):
        budget_for(epsilon, delta)


def test_budgets_at_the_ends_of_their_range_are_made() -> None:
    assert budget_for(MOST_EPSILON, 1e-5) > budget_for(999.0, 1e-5) > 10**12
    assert budget_for(0.0, MOST_DELTA) > budget_for(0.0, 0.5) > budget_for(0, LEAST_DELTA) == 0


@given(st.floats(1e-20, 1e20), st.sampled_from([3, 4, 6]))
def test_an_epsilon_on_a_card_is_never_below_its_value_and_else_written_as_ever(epsilon: float, digits: int) -> None:
    nearest, text = f"{epsilon:.{digits}g}", short_epsilon(epsilon, digits=digits)
    assert Decimal(text) >= Decimal(repr(epsilon))
    if Decimal(nearest) >= Decimal(repr(epsilon)):
        assert text == nearest
    assert float(text) <= epsilon * (1 + 10.0 ** (1 - digits) * 1.001)
    assert short_epsilon(1.9942, digits=4) == "1.995"
