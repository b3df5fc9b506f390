"""The budget of every account, durable: what `labeler.budget.Account` allows, for many accounts and across crashes.

    open_account -> reserve(id, charges)  ->  reserved  --post(id)-------------------->  posted
                                                   \\-----void(id, NothingLeft(...))--->  void

A reservation charges all its accounts or none. It counts from the moment it is durable and until somebody proves that
nothing left. Each step may run twice and twice equals once. Entries are never changed; the last one stands for all
before it (`chain`), and a file beside the journal remembers it (`anchor`), so that a journal that was cut, edited or
replaced by an older copy is refused. Time never runs backwards in it: an entry is at least as late as the one before.

More than 400 lines, most of them words: one class is the whole interface of a ledger; its rules stand at its methods.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import IntegrityError

from feature_store.clock import Clock
from feature_store.journal.anchor import WHAT_TO_DO, Anchor, check_not_behind
from feature_store.journal.book import Book, KnownReservation, Row, State
from feature_store.journal.chain import EMPTY, Entry, Head, Kind, detail_text, entry_of
from feature_store.journal.charges import (
    MAX_AMOUNT,
    Balance,
    Charge,
    check_account,
    check_cap,
    check_name,
    distinct_charges,
)
from feature_store.journal.database import READER_FRESH_S, Database
from feature_store.journal.known_balances import KnownBalances
from feature_store.journal.ledger_statements import entries_query
from feature_store.journal.ledger_tables import LEDGER_TABLES
from feature_store.journal.overdrafts import cap_too_low, overdrawn, room
from feature_store.journal.unpriced import accounts_charged_without
from feature_store.journal.verification import verify_ledger
from labeler.budget import NothingLeft
from labeler.errors import (
    BudgetExceeded,
    InvalidSetting,
    JournalBehind,
    JournalBroken,
    NotFound,
    PrivacyRefusal,
    ProtocolViolation,
)
from labeler.setting import LEVELS
from labeler.task import Level

__all__ = ["Balance", "Charge", "Entry", "Head", "Ledger", "State"]

MAX_PAGE = 1000

_NAMED = 3


class Ledger:
    """The ledger of one journal; shared by all threads of a process.

    Where a method takes `connection`, it becomes part of that write transaction (`Database.write`): it is durable when
    that one is, and undone with it.

    Args:
        anchored: False neither reads nor writes the journal's anchor. For looking at an older copy, and for
            `feature_store.journal.recovery`.
        elsewhere: a second anchor, where no copy of the journal's folder takes it along: then a whole folder that is
            put back as it was is found out, too.

    Raises:
        JournalBehind: the ledger ends before what an anchor remembers, or an anchor is missing.
    """

    def __init__(
        self, database: Database, *, clock: Clock, anchored: bool = True, elsewhere: Path | None = None
    ) -> None:
        database.create(*LEDGER_TABLES)
        self._database = database
        self._book = Book(clock=clock)
        paths = (database.anchor, elsewhere) if anchored else ()
        self._anchors = tuple(Anchor(path) for path in paths if path is not None)
        self._known_head: Head | None = None
        fresh_s = READER_FRESH_S if database.is_read_only else None
        self.known_balances = KnownBalances(self._numbered_balances, fresh_s=fresh_s)
        self._charged_without: dict[Level, frozenset[str]] | None = None
        """`balances`, without a look into the database. For the one writer of a journal."""
        self._check_anchors()
        self._untold: Head | None = None
        if elsewhere is not None and anchored and not database.is_read_only:
            # It may have been out of reach when this was written last.
            self._untold = self.head()
            self.remember()

    @property
    def database(self) -> Database:
        """The journal that it is the ledger of."""
        return self._database

    # What is known.

    def head(self, *, connection: Connection | None = None) -> Head:
        """The end of the ledger, to be kept by others as a witness."""
        with self._reading(connection) as held:
            return self._book.tail(held)[0]

    def journal_id(self) -> str:
        """What names this journal for ever: the hash of its first entry, which is salted.

        Raises:
            NotFound: it has no entry yet.
        """
        with self._reading(None) as held:
            found = self._book.hash_at(held, 1)
        if not found:
            raise NotFound(f"{self._database.what} has no entry yet, so nothing names it")
        return found

    def last_at(self, *, connection: Connection | None = None) -> str:
        """The stored time of the last entry; empty before the first."""
        with self._reading(connection) as held:
            return self._book.tail(held)[1]

    def known_head(self) -> Head:
        """`head`, without a look into the database: as this ledger has written it. For the one writer of a journal."""
        known = None if self._database.is_read_only else self._known_head
        if known is None:
            known = self._known_head = self.head()
        return known

    def state(self, reservation_id: str, *, connection: Connection | None = None) -> State | None:
        """How far a reservation has come; None where there is none."""
        check_name("a reservation id", reservation_id)
        with self._reading(connection) as held:
            known = self._book.reservation(held, reservation_id)
        return None if known is None else known.state

    def balance(self, account: str, level: Level, *, connection: Connection | None = None) -> Balance:
        """What one account may spend and has spent.

        Raises:
            NotFound: it was never opened.
        """
        check_account(account, level)
        with self._reading(connection) as held:
            return self._balance(held, account, level)

    def balances(self) -> list[Balance]:
        """Every account, by name and level."""
        with self._reading(None) as held:
            found = self._book.balances(held)
        return sorted(found, key=lambda balance: (balance.account, balance.level))

    def charged_without(self) -> dict[Level, frozenset[str]]:
        """For each level, the accounts whose sum there is no bound: `feature_store.journal.unpriced`.

        Read once: a charge of this version names both levels, so what is opened later adds none.
        """
        if self._charged_without is None:
            with self._reading(None) as held:
                self._charged_without = {level: frozenset(accounts_charged_without(level, held)) for level in LEVELS}
        return self._charged_without

    def _numbered_balances(self) -> tuple[int, list[Balance]]:
        with self._reading(None) as held:
            head, found = self._book.tail(held)[0], self._book.balances(held)
        return head.seq, sorted(found, key=lambda balance: (balance.account, balance.level))

    def entries(
        self,
        *,
        after: int = 0,
        limit: int = 100,
        account: str | None = None,
        level: Level | None = None,
        search: str | None = None,
    ) -> list[Entry]:
        """A page of the ledger in order of sequence numbers.

        Args:
            after: the last sequence number already seen.
            limit: 1 to MAX_PAGE.
            account, level: only theirs.
            search: only entries with this text in the account, the reservation, the kind or the detail.
        """
        if type(limit) is not int or not 1 <= limit <= MAX_PAGE:
            raise InvalidSetting(f"a page has 1 to {MAX_PAGE} entries, found {limit!r}")
        if type(after) is not int or not 0 <= after <= MAX_AMOUNT:
            raise InvalidSetting(f"a page begins after a sequence number of at least 0, found {after!r}")
        if search is not None and not (type(search) is str and search.isprintable() and len(search) <= 256):
            raise InvalidSetting("a search is a printable text of at most 256 characters")
        query = entries_query(after=after, limit=limit, account=account, level=level, search=search)
        with self._reading(None) as held:
            rows = held.execute(query).mappings().all()
        try:
            return [entry_of(dict(row)) for row in rows]
        except (ValueError, TypeError):
            raise JournalBroken("an entry cannot be read; verify the journal to learn which") from None

    # What can be done.

    def open_account(
        self, account: str, level: Level, cap: int | None, *, connection: Connection | None = None
    ) -> None:
        """Open an account, or give a known one another cap.

        Args:
            cap: nano-units of mu^2; None records charges without limiting them.

        Raises:
            BudgetExceeded: the cap is below what is spent.
        """
        check_account(account, level)
        check_cap(cap)
        detail = detail_text({"cap": cap})
        with self._writing(connection) as held:
            known = self._book.balance(held, account, level)
            if known is not None and known.cap == cap:
                return
            if known is not None and cap is not None and known.spent > cap:
                raise cap_too_low(known, cap, self._book.last_spenders(held, account, level))
            self._book.set_cap(held, account, level, cap, is_new=known is None)
            self._append(held, "open" if known is None else "cap", "", [(account, level, cap or 0)], detail)

    def reserve(
        self,
        reservation_id: str,
        charges: Sequence[Charge],
        *,
        detail: Mapping[str, Any] | None = None,
        connection: Connection | None = None,
    ) -> int:
        """Set the worst case aside in all accounts, or in none, before anybody is asked.

        Args:
            reservation_id: of the caller's choosing; the same id and charges again change nothing.
            charges: at most one per account and level.
            detail: JSON that is kept in each entry, and nothing private.

        Returns:
            The sequence number of its first entry.

        Raises:
            InvalidSetting: the id, a charge or the detail is malformed.
            NotFound: an account was never opened.
            ProtocolViolation: the id was used with other charges.
            PrivacyRefusal: the id was voided; the work needs a new id.
            BudgetExceeded: an account has less left than is asked.
        """
        check_name("a reservation id", reservation_id)
        asked = distinct_charges(charges)
        written = detail_text(detail or {})
        with self._writing(connection) as held:
            known = self._book.reservation(held, reservation_id)
            if known is not None:
                self._check_repeated(held, reservation_id, known, asked)
                return known.first_seq
            for charge in charges:
                self._check_left(held, charge)
            rows = [(charge.account, charge.level, charge.amount) for charge in charges]
            seq = self._append(held, "reserve", reservation_id, rows, written)
            self._book.add_reservation(held, reservation_id, first_seq=seq, rows=rows)
            return seq

    def post(
        self,
        reservation_id: str,
        *,
        detail: Mapping[str, Any] | None = None,
        connection: Connection | None = None,
    ) -> int:
        """Make a reservation final: the answer is about to be released.

        Returns:
            The sequence number of its first "post" entry.

        Raises:
            ProtocolViolation: there is no such reservation.
            PrivacyRefusal: it was voided, so something left that nobody paid for.
        """
        written = detail_text(detail or {})
        with self._writing(connection) as held:
            known = self._known(held, reservation_id)
            if known.state == "void":
                raise PrivacyRefusal(
                    f"reservation {reservation_id!r} was voided with a proof that nothing left, and is now reported "
                    "as released; do not release, and find out which of the two is true"
                )
            if known.state == "posted":
                return known.settled_at
            return self._settle(held, reservation_id, known, "posted", written)

    def answer(self, reservation_id: str, detail: Mapping[str, Any], *, connection: Connection) -> int:
        """Note that what a final charge paid for was stored, in the transaction that stores it. It costs nothing.

        Whoever has seen a head from then on refuses a copy of the journal from between the charge and the answer.

        Returns:
            The sequence number of its entry.

        Raises:
            ProtocolViolation: there is no such reservation, or it is not final.
        """
        with self._writing(connection) as held:
            known = self._known(held, reservation_id)
            if known.state != "posted":
                raise ProtocolViolation(f"reservation {reservation_id!r} is {known.state}, and pays for no answer yet")
            account, level, _ = self._book.charged(held, known)[0]
            return self._append(held, "answer", reservation_id, [(account, level, 0)], detail_text(detail))

    def void(self, reservation_id: str, proof: NothingLeft, *, connection: Connection | None = None) -> int:
        """Give a reservation back, with the proof that nothing left.

        Returns:
            The sequence number of its first "void" entry.

        Raises:
            ProtocolViolation: there is no such reservation.
            PrivacyRefusal: the proof is missing or about another reservation, or the charge is final.
        """
        with self._writing(connection) as held:
            known = self._known(held, reservation_id)
            if not isinstance(proof, NothingLeft) or proof.reservation_id != reservation_id:
                raise PrivacyRefusal(f"voiding reservation {reservation_id!r} needs a NothingLeft about it")
            if known.state == "posted":
                raise PrivacyRefusal(f"reservation {reservation_id!r} was released and stays charged for ever")
            if known.state == "void":
                return known.settled_at
            return self._settle(held, reservation_id, known, "void", detail_text({"because": proof.because}))

    def write_off(self, account: str, level: Level, reason: str) -> int:
        """Treat all that is left as spent: the safe answer where charges may have been forgotten.

        Returns:
            How much was written off, nano-units of mu^2; 0 where nothing was left.

        Raises:
            NotFound: the account was never opened.
            InvalidSetting: the account is not limited; give it a cap first.
        """
        check_account(account, level)
        check_name("a reason", reason)
        with self._database.write() as held:
            left = self._balance(held, account, level).left
            if left is None:
                raise InvalidSetting(f"account {account!r}, {level} level, is not limited; give it a cap first")
            if left == 0:
                return 0
            reservation_id = f"written-off-{self._book.tail(held)[0].seq + 1}"
            detail = {"written_off": reason}
            self.reserve(reservation_id, [Charge(account, level, left)], detail=detail, connection=held)
            self.post(reservation_id, detail=detail, connection=held)
            return left

    # What can be checked.

    def verify(self) -> Head:
        """Read the whole ledger again: the chain from the first entry, every transition, every balance.

        Returns:
            The head that was reached.

        Raises:
            JournalBroken: an entry was changed, is missing or breaks the rules, or a balance is not their sum.
            JournalBehind: the ledger ends before what its anchor remembers.
        """
        with self._reading(None) as held:
            head = verify_ledger(held)
        self._check_anchors()
        return head

    def check_not_behind(self, head: Head, *, witness: str = "another party") -> None:
        """Refuse to go on where somebody else has seen more of this ledger, or another one.

        Args:
            head: what was seen.
            witness: who saw it, for the message.

        Raises:
            JournalBehind: this journal is older than that, or has another history.
        """
        with self._reading(None) as held:
            end = self._book.tail(held)[0]
            found = self._book.hash_at(held, head.seq)
        check_not_behind(head, end=end, found=found, what=self._database.what, witness=witness)

    def remember(self) -> None:
        """Tell every anchor how far this ledger has come, where one of them could not be told when it did.

        Whoever repeats a step finds it done, and would go on though a witness knows nothing of it: so it asks here.
        Two copies of a home may run at once and share a witness: the one that finds another's head there takes no part.

        Raises:
            Unavailable: one cannot be read or written.
            JournalBehind: another process wrote a head that is not in this ledger.
        """
        for anchor in self._anchors:
            if anchor.is_another():
                self._check_anchor(anchor)
        if self._untold is None:
            return
        for anchor in self._anchors:
            anchor.remember(self._untold)
        self._untold = None

    def _check_anchors(self) -> None:
        for anchor in self._anchors:
            self._check_anchor(anchor)

    def _check_anchor(self, anchor: Anchor) -> None:
        remembered = anchor.read()  # before the journal is: its owner may be writing both
        if remembered is not None:
            self.check_not_behind(remembered, witness=anchor.path.name)
            anchor.accept(remembered)
            return
        head = self.head()
        if head.seq > 0:
            raise JournalBehind(
                f"{anchor.path.name} is missing beside {self._database.what}, which has {head.seq} entries, so "
                "nobody can tell whether it is the newest copy. Put the file back from where the journal came from. "
                f"{WHAT_TO_DO}"
            )
        if not self._database.is_read_only:
            anchor.remember(EMPTY)

    # How it is done.

    @contextmanager
    def _writing(self, connection: Connection | None) -> Iterator[Connection]:
        try:
            if connection is not None:
                yield connection
                return
            with self._database.write() as held:
                yield held
        except IntegrityError as error:
            raise JournalBroken(
                f"{self._database.what}: the database refused a step that its own balances allow. Verify the journal"
            ) from error

    @contextmanager
    def _reading(self, connection: Connection | None) -> Iterator[Connection]:
        if connection is not None:
            yield connection
            return
        with self._database.read() as held:
            yield held

    def _append(self, held: Connection, kind: Kind, reservation_id: str, rows: Sequence[Row], detail: str) -> int:
        first, head = self._book.append(held, kind, reservation_id, rows, detail)

        def remember() -> None:
            self._known_head = self._untold = head
            self.remember()

        # The last head of a transaction stands for those before it.
        self._database.after_commit(remember, last_of=("head", id(self)))
        self._database.after_commit(partial(self.known_balances.appended, kind, tuple(rows), first))
        return first

    def _settle(self, held: Connection, reservation_id: str, known: KnownReservation, state: State, detail: str) -> int:
        rows = self._book.charged(held, known)
        seq = self._append(held, "post" if state == "posted" else "void", reservation_id, rows, detail)
        self._book.settle(held, reservation_id, state, seq=seq, rows=rows)
        return seq

    def _known(self, held: Connection, reservation_id: str) -> KnownReservation:
        check_name("a reservation id", reservation_id)
        known = self._book.reservation(held, reservation_id)
        if known is None:
            raise ProtocolViolation(f"there is no reservation {reservation_id!r}; reserve it first")
        return known

    def _balance(self, held: Connection, account: str, level: str) -> Balance:
        balance = self._book.balance(held, account, level)
        if balance is None:
            raise NotFound(f"there is no account {account!r} at the {level} level; open it first")
        return balance

    def _check_repeated(
        self, held: Connection, reservation_id: str, known: KnownReservation, asked: Mapping[tuple[str, str], int]
    ) -> None:
        before = {(account, level): amount for account, level, amount in self._book.charged(held, known)}
        if before != asked:
            raise ProtocolViolation(
                f"reservation {reservation_id!r} charges {_in_words(before)} and was asked for again with other "
                "charges; a different request needs a different id"
            )
        if known.state == "void":
            # Answering "reserved" to a delayed repeat would let work start that nothing pays for.
            raise PrivacyRefusal(f"reservation {reservation_id!r} was voided and pays for nothing; use a new id")

    def _check_left(self, held: Connection, charge: Charge) -> None:
        if charge.amount > room(self._balance(held, charge.account, charge.level)):
            raise self.overdrawn(charge, connection=held)

    def overdrawn(self, charge: Charge, *, connection: Connection) -> BudgetExceeded:
        """Return the refusal of a charge that an account does not cover."""
        spenders = self._book.last_spenders(connection, charge.account, charge.level)
        return overdrawn(charge, self._balance(connection, charge.account, charge.level), spenders)


def _in_words(charges: Mapping[tuple[str, str], int]) -> str:
    named = [f"{account} ({level}) {amount}" for (account, level), amount in list(charges.items())[:_NAMED]]
    more = len(charges) - len(named)
    return ", ".join(named) + (f" and {more} more" if more else "")
