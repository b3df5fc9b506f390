"""The durable budget of every account: what `labeler.budget.Account` allows, for many accounts and across crashes.

    open_account -> reserve(id, charges)  ->  reserved  --post(id)-------------------->  posted
                                                   \\-----void(id, NothingLeft(...))--->  void

A reservation charges all its accounts or none. It counts from the moment it is durable. It stops counting only when
somebody proves that nothing left its owner (`NothingLeft`). Running a step twice has the effect of running it once.
A reservation may hold further charges without an entry for each. They count as much, and become entries when somebody
makes them final.

Entries never change, and the hash of the last entry covers all earlier ones (`chain`). A separate file (`anchor`)
remembers the last entry, so a journal that was cut, edited or replaced by an older copy is refused. Ledger time never
runs backwards: no entry is earlier than the one before it.

More than 600 lines: one class is the whole interface of a ledger, and its methods' docstrings fill most of the lines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, cast

from sqlalchemy import (
    ColumnElement,
    Connection,
    bindparam,
    case,
    func,
    insert,
    literal,
    literal_column,
    or_,
    select,
    update,
)
from sqlalchemy.exc import IntegrityError

from labeler.budget import UNBOUNDED_NANO, NothingLeft
from labeler.errors import (
    BudgetExceeded,
    InvalidSetting,
    JournalBehind,
    JournalBroken,
    NotFound,
    PrivacyRefusal,
    ProtocolViolation,
)
from labeler.ledger.chain import (
    EMPTY,
    SALT_BYTES,
    SALTED,
    WHAT_TO_DO,
    Anchor,
    Entry,
    Head,
    Kind,
    detail_text,
    entry_hash,
    entry_of,
    salted,
    time_text,
)
from labeler.ledger.database import MAX_PAGE, Database, insert_rows, select_rows, update_rows
from labeler.ledger.schema import (
    ledger_accounts,
    ledger_entries,
    ledger_reservations,
    ledger_sums,
    requester_sums,
    taken_by,
)
from labeler.ledger.verification import verify_ledger, verify_recent
from labeler.setting import LEVELS
from labeler.system.clock import Clock
from labeler.task import Level

__all__ = ["Balance", "Charge", "Entry", "Head", "Ledger", "State"]

State = Literal["reserved", "posted", "void"]

Row = tuple[str, str, int]
"""Account, level and amount of one entry."""

WRITTEN_OFF: Final = "written-off-"
"""Prefix of the reservations that spend everything left in an account."""

MAX_AMOUNT = 2**63 - 1
"""The largest whole number that both databases can hold, in nano-units of mu^2: nine billion units."""

MAX_NAME_LENGTH = 256

MAX_CHARGES = 10_000
"""The most charges of one reservation."""

SUMS_EVERY: Final = 2048
"""Entries after which every account's sums are kept (`ledger_sums`)."""

LOOKED_THROUGH: Final = 20_000
"""Most entries that one page of a search looks through."""


@dataclass(frozen=True)
class Charge:
    """The price that one account pays for a reservation.

    Attributes:
        level: "instance" or "agent", the unit whose presence the price protects.
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
    """The limit of an account and what it has spent, in nano-units of mu^2.

    Attributes:
        cap: None if the account is not limited, only recorded.
        reserved: charged or held for work that is not finished.
        posted: charged permanently.
    """

    account: str
    level: Level
    cap: int | None
    reserved: int
    posted: int

    @property
    def spent(self) -> int:
        """Return posted plus reserved."""
        return self.reserved + self.posted

    @property
    def left(self) -> int | None:
        """Return what can still be reserved; None if the account is not limited."""
        return None if self.cap is None else self.cap - self.spent


def check_account(account: str, level: str) -> None:
    """Refuse an invalid account name or level."""
    check_name("the name of an account", account)
    if level not in ("instance", "agent"):
        raise InvalidSetting(f"a level is 'instance' or 'agent', found {level!r}")


def check_name(what: str, name: str) -> None:
    """Refuse a name that is empty, too long, or would not print."""
    if type(name) is not str or not name:
        raise InvalidSetting(f"{what} is a text of at least one character")
    if len(name) > MAX_NAME_LENGTH or not name.isprintable():
        raise InvalidSetting(f"{what} is a printable text of at most {MAX_NAME_LENGTH} characters")


def distinct_charges(charges: Sequence[Charge]) -> dict[tuple[str, str], int]:
    """Return amounts by account and level. Refuse no charge, too many, and two for one account at one level."""
    if isinstance(charges, Charge) or not 1 <= len(charges) <= MAX_CHARGES:
        raise InvalidSetting(f"a reservation has a list of 1 to {MAX_CHARGES} charges")
    if not all(isinstance(charge, Charge) for charge in charges):
        raise InvalidSetting("a reservation is made of Charge values")
    asked: dict[tuple[str, str], int] = {(charge.account, charge.level): charge.amount for charge in charges}
    if len(asked) != len(charges):
        raise InvalidSetting("a reservation charges an account at most once at each level; add the amounts up")
    return asked


_NAMED = 3


@dataclass(frozen=True)
class _Known:
    """The progress of a reservation and the position of its entries.

    Attributes:
        first_seq: sequence number of its first "reserve" entry; the others follow it.
        charges: number of its entries.
        settled_seq: sequence number of its first "post" or "void" entry.
        held: its charges without an entry.
    """

    state: State
    first_seq: int
    charges: int
    settled_seq: int | None
    held: tuple[Row, ...]

    @property
    def settled_at(self) -> int:
        """Return the sequence number of its first "post" or "void" entry."""
        return cast(int, self.settled_seq)  # a CHECK of the table: a settled reservation has one


_entry, _account, _reservation, _sums = ledger_entries.c, ledger_accounts.c, ledger_reservations.c, ledger_sums.c
_BALANCES = select(_account.account, _account.level, _account.cap, _account.spent, _account.posted, _account.held)
_LAST = select(_entry.seq, _entry.at, _entry.hash).order_by(_entry.seq.desc()).limit(1)
_CHARGED = (
    select(_entry.account, _entry.level, _entry.amount)
    .where(_entry.seq.between(bindparam("first"), bindparam("last")))
    .order_by(_entry.seq)
)
_MOVED: Final = ("spent", "posted", "held", "alone", "written_off")
_MOVE = (
    update(ledger_accounts)
    .where(_account.account == bindparam("of_account"), _account.level == bindparam("of_level"))
    .values({name: _account[name] + bindparam(f"more_{name}") for name in _MOVED})
)


_has_price = taken_by.c.agent_nano < UNBOUNDED_NANO
_GIVE_BACK = (
    update(requester_sums)
    .where(requester_sums.c.requester == taken_by.c.requester, taken_by.c.reservation_id == bindparam("of_reservation"))
    .values(
        instance_nano=requester_sums.c.instance_nano - taken_by.c.instance_nano,
        agent_nano=requester_sums.c.agent_nano - case((_has_price, taken_by.c.agent_nano), else_=0),
        unbounded=requester_sums.c.unbounded - case((_has_price, 0), else_=1),
        life_nano=requester_sums.c.life_nano - taken_by.c.life_nano,
    )
)
"""What a requester had taken (`labeler.ledger.promises.RequesterShares`) counts for nobody once it is given back."""


class Ledger:
    """The ledger of one journal; shared by all threads of a process.

    A method that is given a `connection` works inside the write transaction of that connection (`Database.write`). Its
    changes become durable, or are undone, together with that transaction.

    Args:
        anchored: if False, the journal's anchor is neither read nor written. This serves to read an older copy, and
            `labeler.ledger.backup.accept_restored`.
        elsewhere: a second anchor, in a place that no copy of the journal's folder includes. So it also detects that
            the whole folder was restored.

    Raises:
        JournalBehind: the ledger ends before the entry that an anchor remembers, or an anchor is missing.
    """

    def __init__(
        self, database: Database, *, clock: Clock, anchored: bool = True, elsewhere: Path | None = None
    ) -> None:
        self._database = database
        self._clock = clock
        paths = (database.anchor, elsewhere) if anchored else ()
        self._anchors = tuple(Anchor(path) for path in paths if path is not None)
        self._check_anchors()
        self._untold: Head | None = None
        if elsewhere is not None and anchored and not database.is_read_only:
            # The anchor may have been out of reach at the last write.
            self._untold = self.head()
            self.remember()

    @property
    def database(self) -> Database:
        """Return the journal of this ledger."""
        return self._database

    # Queries.

    def head(self, *, connection: Connection | None = None) -> Head:
        """Return the last entry's number and hash, which other parties keep as witnesses."""
        with self._database.reading(connection) as held:
            return _tail(held)[0]

    def journal_id(self) -> str:
        """Return the permanent id of this journal, the hash of its salted first entry.

        Raises:
            NotFound: it has no entry yet.
        """
        with self._database.read() as held:
            found = hash_at(held, 1)
        if not found:
            raise NotFound(f"{self._database.what} has no entry yet, so nothing names it")
        return found

    def state(self, reservation_id: str, *, connection: Connection | None = None) -> State | None:
        """Return the state of a reservation; None if there is none."""
        check_name("a reservation id", reservation_id)
        with self._database.reading(connection) as held:
            known = _reservation_of(held, reservation_id)
        return None if known is None else known.state

    def balance(self, account: str, level: Level, *, connection: Connection | None = None) -> Balance:
        """Return the cap and the spending of one account.

        Raises:
            NotFound: it was never opened.
        """
        check_account(account, level)
        with self._database.reading(connection) as held:
            return self._balance(held, account, level)

    def balances_of(
        self, accounts: Collection[str], *, connection: Connection | None = None
    ) -> dict[tuple[str, Level], Balance]:
        """Return caps and spending of some accounts, by name and level; those never opened are left out."""
        with self._database.reading(connection) as held:
            found = select_rows(held, ledger_accounts, account=sorted(accounts))
            return {
                (row.account, row.level): _balance(row.account, row.level, row.cap, row.spent, row.posted, row.held)
                for row in found
            }

    def balances(self, *, connection: Connection | None = None) -> list[Balance]:
        """Return every account, by name and level."""
        with self._database.reading(connection) as held:
            rows = held.execute(_BALANCES.order_by(_account.account, _account.level)).all()
        return [_balance(*row) for row in rows]

    def charged_without(self, *, connection: Connection | None = None) -> dict[Level, frozenset[str]]:
        """Return, for each level, the accounts that have a standing reservation without a charge at this level.

        A reservation stands unless it was voided. It normally charges both levels. All write-offs of an account count
        as one. So if charges may have been forgotten, and this level was not written off because it is not limited,
        then nobody knows what was spent at it. The facts are kept with the accounts.
        """
        query = select(_account.account, _account.level, _account.alone, _account.written_off)
        with self._database.reading(connection) as held:
            rows = {(row.account, row.level): row for row in held.execute(query)}
        off = {key for key, row in rows.items() if row.written_off}
        return {
            level: frozenset(
                account
                for (account, other), row in rows.items()
                if other != level and (row.alone or (row.written_off and (account, level) not in off))
            )
            for level in LEVELS
        }

    def written_off(self, *, connection: Connection | None = None) -> frozenset[str]:
        """Return the accounts that were written off, at any level: charges of theirs may have been forgotten."""
        query = select(_account.account, _account.written_off)
        with self._database.reading(connection) as held:
            return frozenset(row.account for row in held.execute(query) if row.written_off)

    def entries(
        self,
        *,
        after: int = 0,
        limit: int = 100,
        account: str | None = None,
        search: str | None = None,
    ) -> list[Entry]:
        """Return a page of the ledger in order of sequence numbers.

        Args:
            after: the last sequence number already seen.
            limit: 1 to MAX_PAGE.
            account: only its entries.
            search: only entries with this text in the account, the reservation, the kind or the detail, among the
                next LOOKED_THROUGH.
        """
        if type(limit) is not int or not 1 <= limit <= MAX_PAGE:
            raise InvalidSetting(f"a page has 1 to {MAX_PAGE} entries, found {limit!r}")
        if type(after) is not int or not 0 <= after <= MAX_AMOUNT:
            raise InvalidSetting(f"a page begins after a sequence number of at least 0, found {after!r}")
        if search is not None and not (type(search) is str and search.isprintable() and len(search) <= 256):
            raise InvalidSetting("a search is a printable text of at most 256 characters")
        query = select(ledger_entries).where(_entry.seq > after).order_by(_entry.seq).limit(limit)
        if search:
            # Skip the salt: its digits would match any short number.
            said = func.substr(_entry.detail, len(SALTED) + 2 * SALT_BYTES + 1)
            detail = case((_entry.detail.startswith(SALTED), said), else_=_entry.detail)
            columns = (_entry.account, _entry.reservation_id, _entry.kind, detail)
            query = query.where(or_(*(column.icontains(search, autoescape=True) for column in columns)))
            query = query.where(_entry.seq <= min(after + LOOKED_THROUGH, MAX_AMOUNT))
        with self._database.read() as held:
            rows = [row for of in _of_account(account) for row in held.execute(query.where(*of)).mappings()]
        rows = sorted(rows, key=lambda row: int(row["seq"]))[:limit]
        try:
            return [entry_of(dict(row)) for row in rows]
        except (ValueError, TypeError):
            raise JournalBroken("an entry cannot be read; verify the journal to learn which") from None

    def spent_at(self, seq: int, *, account: str | None = None) -> dict[tuple[str, str], int]:
        """Return the amount that each account had reserved or posted right after entry `seq`, by account and level."""
        change = case((_entry.kind == "reserve", _entry.amount), (_entry.kind == "void", -_entry.amount), else_=0)
        return self._sums_at(seq, account, change, _sums.spent)

    def posted_at(self, seq: int, *, account: str | None = None) -> dict[tuple[str, str], int]:
        """Return the amount that each account had posted right after entry `seq`, by account and level."""
        return self._sums_at(seq, account, case((_entry.kind == "post", _entry.amount), else_=0), _sums.posted)

    def _sums_at(
        self, seq: int, account: str | None, change: ColumnElement[int], kept_sum: ColumnElement[int]
    ) -> dict[tuple[str, str], int]:
        query = select(_entry.account, _entry.level, func.sum(change))
        kept = select(_sums.account, _sums.level, kept_sum)
        if account is not None:
            kept = kept.where(_sums.account == account)
        found: Counter[tuple[str, str]] = Counter()
        with self._database.read() as held:
            since = held.execute(select(func.max(_sums.seq)).where(_sums.seq <= seq)).scalar() or 0
            query = query.where(_entry.seq > since, _entry.seq <= seq).group_by(_entry.account, _entry.level)
            for one in (kept.where(_sums.seq == since), *(query.where(*of) for of in _of_account(account))):
                found.update({(name, level): int(spent) for name, level, spent in held.execute(one)})
        return dict(found)

    # Changes.

    def open_account(
        self, account: str, level: Level, cap: int | None, *, connection: Connection | None = None
    ) -> None:
        """Open an account, or change the cap of a known one.

        Args:
            cap: nano-units of mu^2; None records charges without limiting them.

        Raises:
            BudgetExceeded: the cap is below the amount already spent.
        """
        check_account(account, level)
        if cap is not None and (type(cap) is not int or not 0 <= cap <= MAX_AMOUNT):
            raise InvalidSetting(
                f"a cap is a whole number of nano-units from 0 to {MAX_AMOUNT}, or none at all, found {cap!r}"
            )
        detail = detail_text({"cap": cap})
        with self._writing(connection) as held:
            known = _balance_of(held, account, level)
            if known is not None and known.cap == cap:
                return
            if known is not None and cap is not None and known.spent > cap:
                raise BudgetExceeded(
                    f"account {account!r}, {level} level: {known.spent} nano-units of mu^2 are spent, and a cap of "
                    f"{cap} is below that; what is spent stays spent",
                    account=account,
                    level=level,
                    asked=known.spent,
                    left=0,
                    cap=cap,
                    last_spenders=_last_spenders(held, account, level),
                )
            self._append(held, "open" if known is None else "cap", "", [(account, level, cap or 0)], detail)
            if known is None:
                row = {"account": account, "level": level, "cap": cap, "spent": 0, "posted": 0}
                insert_rows(held, ledger_accounts, row)
            else:
                update_rows(held, ledger_accounts, {"cap": cap}, account=account, level=level)

    def reserve(
        self,
        reservation_id: str,
        charges: Sequence[Charge],
        *,
        held_back: Sequence[Charge] = (),
        detail: Mapping[str, Any] | None = None,
        connection: Connection | None = None,
    ) -> int:
        """Reserve the worst case in all accounts, or in none, before anybody is asked.

        Args:
            reservation_id: chosen by the caller; repeating it with the same charges changes nothing.
            charges: at most one per account and level.
            held_back: further charges of the same kind, without an entry: what is voided again then leaves little.
            detail: JSON that is kept in each entry; must hold nothing private.

        Returns:
            The sequence number of its first entry.

        Raises:
            InvalidSetting: the id, a charge or the detail is malformed.
            NotFound: an account was never opened.
            ProtocolViolation: the id was used with other charges.
            PrivacyRefusal: the id was voided; the work needs a new id.
            BudgetExceeded: an account has less left than its charge.
        """
        check_name("a reservation id", reservation_id)
        asked = distinct_charges(charges)
        if held_back:
            asked = distinct_charges([*charges, *held_back])
        written = detail_text(detail or {})
        with self._writing(connection) as held:
            known = _reservation_of(held, reservation_id)
            if known is not None:
                # What was held is forgotten once the reservation is settled.
                still = asked if known.state == "reserved" else distinct_charges(charges)
                self._check_repeated(held, reservation_id, known, still)
                return known.first_seq
            balances = self.balances_of({account for account, _ in asked}, connection=held)
            for charge in (*charges, *held_back):
                balance = balances.get((charge.account, charge.level))
                if balance is None:
                    raise _never_opened(charge.account, charge.level)
                if charge.amount > _room(balance):
                    raise self.overdrawn(charge, connection=held)
            rows, without = _rows_of(charges), _rows_of(held_back)
            seq = self._append(held, "reserve", reservation_id, rows, written)
            row = {"reservation_id": reservation_id, "state": "reserved", "first_seq": seq, "charges": len(rows)}
            insert_rows(held, ledger_reservations, row | {"held": without or None})
            _move(held, reservation_id, rows, spent=1, stands=1)
            _move(held, reservation_id, without, held_back=1)
            return seq

    def post(
        self,
        reservation_id: str,
        *,
        detail: Mapping[str, Any] | None = None,
        connection: Connection | None = None,
    ) -> int:
        """Make a reservation final: the answer is about to be released.

        What it holds without an entry becomes a final reservation, ID/held.

        Returns:
            The sequence number of its first "post" entry.

        Raises:
            ProtocolViolation: there is no such reservation.
            PrivacyRefusal: it was voided, so an answer left that nobody paid for.
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
            seq = self._settle(held, reservation_id, known, "posted", written)
            if known.held:
                rest = f"{reservation_id}/held"
                charges = [Charge(account, cast(Level, level), amount) for account, level, amount in known.held]
                self.reserve(rest, charges, detail=detail, connection=held)
                self.post(rest, detail=detail, connection=held)
            return seq

    def answer(self, reservation_id: str, detail: Mapping[str, Any], *, connection: Connection) -> int:
        """Note that the result of a final charge was stored, in the transaction that stores it. It costs nothing.

        Suppose a copy of the journal, made between the charge and this note, is put back later. A party that has seen a
        head after this note refuses the copy.

        Returns:
            The sequence number of its entry.

        Raises:
            ProtocolViolation: there is no such reservation, or it is not final.
        """
        with self._writing(connection) as held:
            known = self._known(held, reservation_id)
            if known.state != "posted":
                raise ProtocolViolation(f"reservation {reservation_id!r} is {known.state}, and pays for no answer yet")
            account, level, _ = _charged(held, known)[0]
            return self._append(held, "answer", reservation_id, [(account, level, 0)], detail_text(detail))

    def void(self, reservation_id: str, proof: NothingLeft, *, connection: Connection | None = None) -> int:
        """Give a reservation back, with the proof that nothing left.

        Returns:
            The sequence number of its first "void" entry.

        Raises:
            ProtocolViolation: there is no such reservation.
            PrivacyRefusal: the proof is missing or concerns another reservation, or the charge is final.
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
        """Treat everything left as spent: the safe choice if charges may have been forgotten.

        Returns:
            The amount written off, nano-units of mu^2; 0 if nothing was left.

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
            reservation_id = f"{WRITTEN_OFF}{_tail(held)[0].seq + 1}"
            detail = {"written_off": reason}
            self.reserve(reservation_id, [Charge(account, level, left)], detail=detail, connection=held)
            self.post(reservation_id, detail=detail, connection=held)
            return left

    # Checks.

    def verify(self, *, is_whole: bool = True) -> Head:
        """Read the whole ledger again: the chain from the first entry, every transition, every balance.

        Args:
            is_whole: if False, read the last entries and every balance (`labeler.ledger.verification.verify_recent`),
                as a start does; so it takes as long however old the ledger is.

        Returns:
            The head that was reached.

        Raises:
            JournalBroken: an entry was changed, is missing or breaks the rules, or a balance is not the sum of entries.
            JournalBehind: the ledger ends before the entry that its anchor remembers.
        """
        with self._database.read() as held:
            head = verify_ledger(held) if is_whole else verify_recent(held)
            _check_held(held)
            if is_whole and self.charged_without(connection=held) != _charged_without(held):
                raise JournalBroken(
                    "the accounts that paid for something without a charge at one level are stored otherwise than the "
                    "entries say. Keep the file as evidence and restore the newest backup"
                )
        self._check_anchors()
        return head

    def check_not_behind(self, head: Head, *, witness: str = "another party") -> None:
        """Refuse to continue if somebody else has seen more of this ledger, or a different one.

        Args:
            head: the head that was seen.
            witness: the party that saw it, for the message.

        Raises:
            JournalBehind: this journal ends before that head, or has another history.
        """
        with self._database.read() as held:
            end = _tail(held)[0]
            found = hash_at(held, head.seq)
        what = self._database.what
        if end.seq < head.seq:
            raise JournalBehind(
                f"{what} ends at entry {end.seq}, and {witness} has seen entry {head.seq}: this is an older copy, and "
                f"what was charged since is missing from it. {WHAT_TO_DO}"
            )
        if found != head.hash:
            raise JournalBehind(
                f"{what} has another entry {head.seq} than {witness} has seen: it was restored from an older copy and "
                f"went on from there, or is another journal. {WHAT_TO_DO}"
            )

    def remember(self) -> None:
        """Write the head to every anchor that could not be written at the last change.

        A repeated step finds its work done, and would continue although a witness does not know of that work. So it
        calls this method. Two copies of a home may run at once and share a witness. A copy that finds the other's head
        there takes no part.

        Raises:
            Unavailable: an anchor cannot be read or written.
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
        remembered = anchor.read()  # read it before the journal: its owner may be writing both
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

    # Implementation.

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

    def _append(self, held: Connection, kind: Kind, reservation_id: str, rows: Sequence[Row], detail: str) -> int:
        head, last_at = _tail(held)
        detail = salted(detail)
        first = head.seq + 1
        at = max(time_text(self._clock()), last_at)  # a clock that was set back must not break the order
        entries = []
        for account, level, amount in rows:
            entry: dict[str, Any] = {
                "seq": head.seq + 1, "at": at, "kind": kind, "account": account, "level": level,
                "reservation_id": reservation_id, "amount": amount, "detail": detail, "previous_hash": head.hash,
            }  # fmt: skip
            head = Head(head.seq + 1, entry_hash(entry))
            entries.append(entry | {"hash": head.hash})
        if (first - 1) // SUMS_EVERY < head.seq // SUMS_EVERY:
            # The accounts are still as the entry before left them.
            kept = select(literal(first - 1), *(_account[column.name] for column in list(_sums)[1:]))
            held.execute(insert(ledger_sums).from_select([column.name for column in _sums], kept))
        insert_rows(held, ledger_entries, *entries)

        def remember() -> None:
            self._untold = head
            self.remember()

        # The last head of a transaction covers the earlier ones, so only the last is remembered.
        self._database.after_commit(remember, last_of=("head", id(self)))
        return first

    def _settle(self, held: Connection, reservation_id: str, known: _Known, state: State, detail: str) -> int:
        rows = _charged(held, known)
        seq = self._append(held, "post" if state == "posted" else "void", reservation_id, rows, detail)
        settled = {"state": state, "settled_seq": seq, "held": None}
        update_rows(held, ledger_reservations, settled, reservation_id=reservation_id)
        if state == "posted":
            _move(held, reservation_id, rows, posted=1)
        else:
            _move(held, reservation_id, rows, spent=-1, stands=-1)
            held.execute(_GIVE_BACK, {"of_reservation": reservation_id})
        _move(held, reservation_id, known.held, held_back=-1)
        return seq

    def _known(self, held: Connection, reservation_id: str) -> _Known:
        check_name("a reservation id", reservation_id)
        known = _reservation_of(held, reservation_id)
        if known is None:
            raise ProtocolViolation(f"there is no reservation {reservation_id!r}; reserve it first")
        return known

    def _balance(self, held: Connection, account: str, level: str) -> Balance:
        balance = _balance_of(held, account, level)
        if balance is None:
            raise _never_opened(account, level)
        return balance

    def _check_repeated(
        self, held: Connection, reservation_id: str, known: _Known, asked: Mapping[tuple[str, str], int]
    ) -> None:
        before = {(account, level): amount for account, level, amount in (*_charged(held, known), *known.held)}
        if before != asked:
            named = [f"{account} ({level}) {amount}" for (account, level), amount in list(before.items())[:_NAMED]]
            more = len(before) - len(named)
            charges = ", ".join(named) + (f" and {more} more" if more else "")
            raise ProtocolViolation(
                f"reservation {reservation_id!r} charges {charges} and was asked for again with other "
                "charges; a different request needs a different id"
            )
        if known.state == "void":
            # A delayed repeat must not succeed: it would start work that nothing pays for.
            raise PrivacyRefusal(f"reservation {reservation_id!r} was voided and pays for nothing; use a new id")

    def overdrawn(self, charge: Charge, *, connection: Connection) -> BudgetExceeded:
        """Return the error for a charge above what its account has left, with the amounts and the last spenders."""
        balance = self._balance(connection, charge.account, charge.level)
        spenders = _last_spenders(connection, charge.account, charge.level)
        cap = MAX_AMOUNT if balance.cap is None else balance.cap
        named = ", ".join(f"{name} ({amount})" for name, amount in spenders) or "nobody yet"
        return BudgetExceeded(
            f"account {charge.account!r}, {charge.level} level: {charge.amount} nano-units of mu^2 were asked for and "
            f"{_room(balance)} of {cap} are left. Last spenders: {named}. "
            "Ask for a smaller epsilon or for fewer queries; only the owner of the account can raise its budget.",
            account=charge.account,
            level=charge.level,
            asked=charge.amount,
            left=_room(balance),
            cap=cap,
            last_spenders=spenders,
        )


def _room(balance: Balance) -> int:
    """Return how much more an account can be charged; an unlimited account still ends at MAX_AMOUNT."""
    return MAX_AMOUNT - balance.spent if balance.left is None else balance.left


def _balance(account: str, level: Level, cap: int | None, spent: int, posted: int, held_back: int) -> Balance:
    return Balance(account, level, cap, spent - posted + held_back, posted)


def _never_opened(account: str, level: str) -> NotFound:
    return NotFound(f"there is no account {account!r} at the {level} level; open it first")


def _balance_of(held: Connection, account: str, level: str) -> Balance | None:
    row = select_rows(held, ledger_accounts, account=account, level=level).first()
    return None if row is None else _balance(row.account, row.level, row.cap, row.spent, row.posted, row.held)


def _tail(held: Connection) -> tuple[Head, str]:
    """Return the head, and the stored time of the last entry."""
    last = held.execute(_LAST).first()
    return (EMPTY, "") if last is None else (Head(last.seq, last.hash), last.at)


def hash_at(held: Connection, seq: int) -> str:
    """Return the hash of an entry: empty if there is none, all zeros for entry 0."""
    if seq == 0:
        return EMPTY.hash
    found = select_rows(held, ledger_entries, seq=seq).first()
    return "" if found is None else str(found.hash)


def _reservation_of(held: Connection, reservation_id: str) -> _Known | None:
    row = select_rows(held, ledger_reservations, reservation_id=reservation_id).first()
    return None if row is None else _Known(row.state, row.first_seq, row.charges, row.settled_seq, _held(row))


def _charged(held: Connection, known: _Known) -> list[Row]:
    """Return a reservation's charges, read from its entries."""
    last = known.first_seq + known.charges - 1
    found = held.execute(_CHARGED, {"first": known.first_seq, "last": last})
    return [(row.account, row.level, row.amount) for row in found]


def _held(row: Any) -> tuple[Row, ...]:
    """Return a reservation's charges without an entry."""
    return tuple((str(account), str(level), int(amount)) for account, level, amount in row.held or ())


def _of_account(account: str | None) -> list[tuple[ColumnElement[bool], ...]]:
    """Return the conditions of the queries for an account's entries: one a level, as their index has them."""
    return [()] if account is None else [(_entry.account == account, _entry.level == level) for level in LEVELS]


def _rows_of(charges: Sequence[Charge]) -> list[Row]:
    return [(charge.account, charge.level, charge.amount) for charge in charges]


def _last_spenders(held: Connection, account: str, level: str) -> tuple[tuple[str, int], ...]:
    """Return reservation and amount of an account's last few charges that were not voided, oldest first."""
    last = (
        select(_entry.seq, _entry.kind, _entry.reservation_id, _entry.amount)
        .where(_entry.account == account, _entry.level == level)
        .order_by(_entry.seq.desc())
        .limit(MAX_PAGE)
        .subquery()
    )
    query = (
        select(last.c.seq, last.c.reservation_id, last.c.amount)
        .join(ledger_reservations, _reservation.reservation_id == last.c.reservation_id)
        .where(last.c.kind == "reserve", _reservation.state != "void")
        .order_by(last.c.seq.desc())
        .limit(_NAMED)
    )
    found = [(row.seq, row.reservation_id, row.amount) for row in held.execute(query)]
    for row in held.execute(_HOLDING):
        found += [(row.first_seq, row.reservation_id, amount) for *key, amount in _held(row) if key == [account, level]]
    return tuple((name, amount) for _, name, amount in sorted(found)[-_NAMED:])


def _move(
    held: Connection,
    reservation_id: str,
    rows: Sequence[Row],
    *,
    spent: int = 0,
    posted: int = 0,
    held_back: int = 0,
    stands: int = 0,
) -> None:
    """Add a reservation's amounts to the sums of its accounts, or subtract them; `stands` changes when it begins or
    ends to stand.
    """
    levels = Counter(account for account, _, _ in rows)
    is_written_off = reservation_id.startswith(WRITTEN_OFF)
    moves = []
    for account, level, amount in rows:
        more = (spent * amount, posted * amount, held_back * amount)
        alone = stands * (levels[account] == 1)
        facts = (0, alone) if is_written_off else (alone, 0)
        named = {f"more_{name}": value for name, value in zip(_MOVED, (*more, *facts), strict=True)}
        moves.append({"of_account": account, "of_level": level, **named})
    if moves:
        held.execute(_MOVE, moves)


# Few reservations are open at any time, and an index has those.
_HOLDING = select(_reservation.reservation_id, _reservation.first_seq, _reservation.held).where(
    _reservation.state == literal_column("'reserved'"), _reservation.held.is_not(None)
)


def _check_held(held: Connection) -> None:
    """Refuse accounts that hold another amount than their open reservations do."""
    sums: Counter[tuple[str, str]] = Counter()
    for row in held.execute(_HOLDING):
        for account, level, amount in _held(row):
            sums[account, level] += amount
    stored = held.execute(select(_account.account, _account.level, _account.held).where(_account.held != 0))
    if {(account, level): amount for account, level, amount in stored} != dict(sums):
        raise JournalBroken(
            "the accounts hold another amount than their open reservations do. Keep the file as evidence and restore "
            "the newest backup"
        )


def _charged_without(held: Connection) -> dict[Level, frozenset[str]]:
    """Return `Ledger.charged_without` as the entries say, which reads all of them."""
    is_write_off = func.substr(_entry.reservation_id, 1, len(WRITTEN_OFF)) == WRITTEN_OFF
    together = case((is_write_off, WRITTEN_OFF), else_=_entry.reservation_id)
    query = (
        select(_entry.account)
        .join(ledger_reservations, _reservation.reservation_id == _entry.reservation_id)
        .where(_entry.kind == "reserve", _reservation.state != "void")
        .group_by(_entry.account, together)
    )
    return {
        level: frozenset(held.execute(query.having(func.sum(case((_entry.level == level, 1), else_=0)) == 0)).scalars())
        for level in LEVELS
    }
