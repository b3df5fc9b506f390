"""Budgets as people read them: accounts in epsilon, the ledger in pages, refusals in words, and signed evidence.

The ledger counts nano-units of mu^2, which add up in any order of tasks. Here they are converted into the joint epsilon
of everything charged so far, at the coordinator's delta. Evidence is made from the coordinator's own journal while it
runs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib.metadata import version

from api.coordinator.config import CoordinatorConfig
from api.schema import BalanceView, BudgetView, LedgerEntryView, LedgerPage, PersonView
from feature_store.results.evidence import SignedEvidence, sign_evidence
from labeler.batching import person_spent
from labeler.budget import (
    LEAST_DELTA_OF_WINNERS,
    budget_for,
    epsilon_left,
    epsilon_spent,
    say_epsilon_left,
    short_epsilon,
    spent_in_words,
)
from labeler.errors import BudgetExceeded, InvalidSetting, NotFound
from labeler.evidence.derive import derive, software
from labeler.ledger.chain import Head
from labeler.ledger.database import Connection, Database
from labeler.ledger.evidence import EvidenceScope, coordinator_facts
from labeler.ledger.ledger import LOOKED_THROUGH, Balance, Ledger
from labeler.ledger.lifetimes import all_set_aside, set_aside
from labeler.ledger.rounds import FEDERATION, PostedRounds, agent_account
from labeler.ledger.tasks import TaskStore
from labeler.methods import least_delta
from labeler.setting import LEVELS
from labeler.solving import ways_to_fit
from labeler.system.clock import Clock
from labeler.system.keys import PartyKeys
from labeler.task import Level, Task


def open_accounts(ledger: Ledger, config: CoordinatorConfig, agent_ids: Iterable[str] = ()) -> None:
    """Open the federation's account and those of agents, or update their caps from the configuration.

    The promise for votes for life is set aside in each account once.

    Raises:
        BudgetExceeded: a cap is below what is spent.
    """
    accounts = [(FEDERATION, config.federation), *((agent_account(one), config.agents) for one in agent_ids)]
    for account, caps in accounts:
        for level in LEVELS:
            ledger.open_account(account, level, caps.cap_nano(level, config.delta))
        if (for_life := caps.set_aside_nano(config.delta)) is not None:
            set_aside(ledger, account, for_life)


def check_delta(tasks: TaskStore, delta: float) -> None:
    """Refuse to keep accounts at a delta so small that something already paid for has no bound there.

    Raises:
        InvalidSetting: the message names the task and its least delta.
    """
    if delta >= LEAST_DELTA_OF_WINNERS:
        return
    for task in tasks.given_out():
        if delta < least_delta(task):
            raise InvalidSetting(
                f"delta: the price charged for task {task.name!r} holds at delta {least_delta(task):g} and above, but "
                f"the configuration says {delta:g}, where the spending of accounts has no bound. "
                f"Name a delta of at least {least_delta(task):g}"
            )


@lru_cache(maxsize=4096)
def cap_as_written(cap: int, delta: float) -> float | None:
    """Return the shortest epsilon with this cap: the operator's number before it was rounded down to whole units."""
    epsilon = epsilon_spent(cap, delta)
    if epsilon is None:
        return None
    shorter = (float(f"{epsilon:.{digits}g}") for digits in range(1, 10))
    return next((one for one in shorter if budget_for(one, delta) == cap), epsilon)


def epsilon_text(nano: int, delta: float) -> str:
    """Return a charge in words: "epsilon 0.41"."""
    epsilon = epsilon_spent(nano, delta)
    return "no finite epsilon" if epsilon is None else f"epsilon {short_epsilon(epsilon, digits=4)}"


def balance_view(balance: Balance, delta: float, *, is_bounded: bool = True, for_life: int = 0) -> BalanceView:
    """Return one account at one level.

    Args:
        is_bounded: False if something without a finite price at this level was paid from it.
        for_life: the part set aside for votes for life.
    """
    posted, spent = (epsilon_spent(nano, delta) if is_bounded else None for nano in (balance.posted, balance.spent))
    left = None if balance.left is None else epsilon_left(balance.left, delta)
    return BalanceView(
        account=balance.account,
        level=balance.level,
        cap_nano=balance.cap,
        posted_nano=balance.posted,
        reserved_nano=balance.reserved,
        left_nano=balance.left,
        delta=delta,
        cap_epsilon=None if balance.cap is None else cap_as_written(balance.cap, delta),
        spent_epsilon=spent,
        posted_epsilon=posted,
        left_epsilon=left,
        words=spent_in_words(posted, spent, left),
        left_fraction=balance.left / balance.cap if balance.cap and balance.left is not None else None,
        life_nano=for_life,
        life_epsilon=epsilon_spent(for_life, delta) if for_life else None,
    )


class Budgets:
    """Every account as of one head of the ledger: read once, for all who ask until an entry is written.

    Accounts change only together with an entry.
    """

    def __init__(self, ledger: Ledger, delta: float) -> None:
        self._ledger, self._delta = ledger, delta
        self._lock = threading.Lock()
        self._posted = PostedRounds()
        self._known: tuple[BudgetView, Mapping[tuple[str, Level], Balance]] | None = None

    def balances(self) -> Mapping[tuple[str, Level], Balance]:
        """Return the balance of every account, by name and level. For estimates; a charge reads the journal itself."""
        return self._read()[1]

    def view(self, *, account: str | None = None) -> BudgetView:
        """Return every account, or both levels of one.

        Raises:
            NotFound: there is no such account.
        """
        view = self._read()[0]
        if account is None:
            return view
        found = tuple(one for one in view.accounts if one.account == account)
        if not found:
            raise NotFound(f"there is no account {account[:100]!r}; agents have one from the moment they are enrolled")
        persons = tuple(one for one in view.persons if one.account == account)
        return view.model_copy(update={"accounts": found, "persons": persons})

    def _read(self) -> tuple[BudgetView, Mapping[tuple[str, Level], Balance]]:
        with self._lock, self._ledger.database.read() as connection:
            head = self._ledger.head(connection=connection)
            if self._known is None or self._known[0].head_hash != head.hash:
                self._known = self._as_of(head, connection)
            return self._known

    def _as_of(self, head: Head, connection: Connection) -> tuple[BudgetView, Mapping[tuple[str, Level], Balance]]:
        balances = self._ledger.balances(connection=connection)
        unpriced = self._ledger.charged_without(connection=connection)
        aside = all_set_aside(self._ledger.database, connection=connection)
        views = tuple(
            balance_view(
                one,
                self._delta,
                is_bounded=one.account not in unpriced[one.level],
                for_life=aside.get(one.account, 0) if one.level == "instance" else 0,
            )
            for one in balances
        )
        view = BudgetView(
            accounts=views,
            persons=self._persons(balances, connection),
            head_seq=head.seq,
            head_hash=head.hash,
            delta=self._delta,
        )
        return view, {(one.account, one.level): one for one in balances}

    def _persons(self, balances: Iterable[Balance], connection: Connection) -> tuple[PersonView, ...]:
        rounds, forgotten = self._posted.read(connection), self._ledger.written_off(connection=connection)
        return tuple(
            PersonView.model_validate(
                person_spent(rounds.get(account, ()), is_complete=account not in forgotten).to_json(self._delta)
                | {"account": account}
            )
            for account in dict.fromkeys(one.account for one in balances)
        )


def budget_view(ledger: Ledger, delta: float, *, account: str | None = None) -> BudgetView:
    """Return `Budgets.view` of this moment."""
    return Budgets(ledger, delta).view(account=account)


def refusal(error: BudgetExceeded, task: Task, *, queries: int, delta: float) -> BudgetExceeded:
    """Word the ledger's refusal in epsilons for a requester.

    Args:
        error: names account, level, asked (0 if no finite charge exists), left, cap and last spenders.
        task: of the refused job.
        queries: of the refused job.
        delta: of the stated epsilons.
    """
    asked = error.asked
    what = f"a job of {queries} {'query' if queries == 1 else 'queries'}"
    spenders = ", ".join(f"{name} ({epsilon_text(amount, delta)})" for name, amount in error.last_spenders)
    costs = epsilon_text(asked, delta) if asked else "no finite epsilon"
    level = next(one for one in LEVELS if one == error.level)
    ways = ways_to_fit(task, queries, level=level, asked_nano=asked, left_nano=error.left)
    operator = "ask the operator about the budget" if asked else "ask the operator to leave this account unlimited"
    way_out = ", or ".join((*ways, operator))
    return BudgetExceeded(
        f"account {error.account!r}, {error.level} level: {what} costs {costs} ({asked or 'unbounded'} "
        f"nano-units of mu^2, delta {delta:g}); {error.left} of {error.cap} nano-units are left of "
        f"{epsilon_text(error.cap, delta)}: one more job of up to epsilon "
        f"{say_epsilon_left(epsilon_left(error.left, delta))}. Nobody was asked. "
        + (f"Last spenders: {spenders}. " if spenders else "")
        + f"{way_out[0].upper()}{way_out[1:]}.",
        account=error.account,
        level=error.level,
        asked=asked,
        left=error.left,
        cap=error.cap,
        last_spenders=error.last_spenders,
    )


def ledger_page(
    ledger: Ledger, after: int, limit: int, *, account: str | None = None, search: str | None = None
) -> LedgerPage:
    """Return entries in order of sequence number, with each account's spending after each.

    Args:
        after: the last sequence number already seen, 0 at first.
        limit: most entries.
        account: only of this account.
        search: only with this text, among the next LOOKED_THROUGH; running sums are left out, because entries in
            between are missing.
    """
    found = ledger.entries(after=after, limit=limit, account=account, search=search)
    spent = {} if search else ledger.spent_at(after, account=account)
    items = []
    for entry in found:
        running = spent.get((entry.account, entry.level), 0)
        running += {"reserve": entry.amount, "void": -entry.amount}.get(entry.kind, 0)
        spent[entry.account, entry.level] = running
        items.append(
            LedgerEntryView(
                seq=entry.seq,
                at=entry.at,
                kind=entry.kind,
                account=entry.account,
                level=entry.level,
                reservation_id=entry.reservation_id,
                amount_nano=entry.amount,
                spent_after_nano=None if search else running,
                detail=dict(entry.detail),
                hash=entry.hash,
            )
        )
    if len(found) == limit:
        return LedgerPage(items=tuple(items), next=str(found[-1].seq))
    # A search looks through a part of the ledger, whose end may come before the ledger's.
    through = after + LOOKED_THROUGH
    return LedgerPage(items=tuple(items), next=str(through) if search and through < ledger.head().seq else None)


def signed_evidence(
    wanted: EvidenceScope, *, database: Database, keys: PartyKeys, delta: float, clock: Clock
) -> SignedEvidence:
    """Verify one snapshot of the journal from its first entry, and sign what it says about a task or a period.

    Args:
        delta: from the coordinator's settings.

    Raises:
        JournalBroken: the journal fails verification, so it proves nothing.
        NotFound: there is no such task.
        TooLarge: too many jobs for one document.
    """
    with database.read() as connection:
        facts = coordinator_facts(connection, wanted, delta=delta, read_at=clock())
    return sign_evidence(derive(facts, software(version("private-labeler"))), keys)
