"""Every table of a journal, what its columns hold, and the rules that the database itself enforces.

    ledger_entries      append-only and chained; ledger_accounts and ledger_reservations are sums over them
    coordinator         tasks, jobs, rounds and what was released; parties, invitations, tokens; what was forgotten
    agent               rounds that it has answered, what people approved, what it promised; votes for life
    tallier             rounds and shares
    all                 numbers of messages; which erasable keys belong here; a probe that writing works

A new journal gets all of them in one transaction, at REVISION; Alembic upgrades to later ones
(`labeler.ledger.migrations`). Both databases hold the same bytes: a time is a text that sorts as time does, JSON
is a text with sorted keys. So an equality in SQL is an equality in Python.

Permanent values (the contributors of a round, a release, a tallier's sum) are checked in Python, where the error can
say what to do next. A trigger checks them again, so that no defect of a caller can change them.

More than 600 lines: tables refer to each other and rules look into several, so all of them stand here and nowhere else.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from datetime import datetime
from typing import Any, Final, Literal, get_args

from sqlalchemy import (
    DDL,
    BigInteger,
    CheckConstraint,
    Column,
    Dialect,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    event,
    text,
)
from sqlalchemy.schema import SchemaItem
from sqlalchemy.types import TypeDecorator, TypeEngine

from labeler.errors import InvalidSetting
from labeler.ledger.chain import KINDS, canonical, time_of, time_text
from labeler.rounds.effects import FINISHED as FINISHED
from labeler.rounds.effects import JobState, RoundState
from labeler.tally import MAX_TALLIERS

REVISION: Final = "0003"
"""Revision of these tables: the last one of `labeler.ledger.migrations`."""

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

JOB_STATES = get_args(JobState)
ROUND_STATES = get_args(RoundState)
ROLES = ("admin", "requester", "viewer")
"""Roles of access tokens."""

WHOLE = BigInteger().with_variant(Integer, "sqlite")
"""64 bits in both databases; STRICT tables of SQLite call this INTEGER."""


class Moment(TypeDecorator[datetime]):
    """A time with a zone, stored as UTC with microseconds."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> str | None:  # noqa: ARG002  # SQLAlchemy's signature
        """Return the time's text."""
        return None if value is None else time_text(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> datetime | None:  # noqa: ARG002  # as above
        """Return the text's time."""
        return None if value is None else time_of(value)


class Json(TypeDecorator[Any]):
    """A list or an object, stored as canonical JSON; None is SQL's NULL."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:  # noqa: ARG002  # SQLAlchemy's signature
        """Return the value's canonical JSON."""
        return None if value is None else json_text(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:  # noqa: ARG002  # as above
        """Return the JSON's value."""
        return None if value is None else json.loads(value)


def json_text(value: object) -> str:
    """Return the text under which a value is stored.

    Raises:
        InvalidSetting: it is not JSON, or holds NaN or infinity. The value is not repeated.
    """
    try:
        return canonical(value)
    except (TypeError, ValueError, RecursionError):
        raise InvalidSetting("only JSON is stored: texts, whole and finite numbers, lists, objects") from None


def index_where(name: str, column: str, condition: str) -> Index:
    """Return an index of the few rows that a condition names; a query finds it by the same words (`literal_column`)."""
    return Index(name, column, sqlite_where=text(condition), postgresql_where=text(condition))


def one_of(column: str, values: Iterable[str]) -> str:
    """Return the condition of a CHECK that a column holds one of these words."""
    return f"{column} IN ({', '.join(repr(value) for value in sorted(values))})"


def strict_table(name: str, *parts: SchemaItem, **options: Any) -> Table:
    """Return a table in which SQLite enforces column types as PostgreSQL does."""
    return Table(name, metadata, *parts, sqlite_strict=True, **options)


def filled(kind: TypeEngine[Any] | type[TypeEngine[Any]], *names: str) -> list[Column[Any]]:
    """Return columns that are never NULL."""
    return [Column(name, kind, nullable=False) for name in names]


def optional(kind: TypeEngine[Any] | type[TypeEngine[Any]], *names: str) -> list[Column[Any]]:
    """Return columns that may be NULL."""
    return [Column(name, kind) for name in names]


# Rules.


def forbid(
    table: Table, name: str, *, on: Literal["INSERT", "UPDATE", "DELETE"], because: str, when: str = "TRUE"
) -> None:
    """Refuse a kind of change to a table, by a rule created together with the table.

    Args:
        name: of the rule, unique within the table.
        because: what the refusal says; no quotes and no percent signs.
        when: a condition over OLD and NEW, in SQL that both databases know (IS DISTINCT FROM is translated).
    """
    for dialect in ("sqlite", "postgresql"):
        for statement in rule_text(table.name, name, on=on, because=because, when=when, dialect=dialect):
            ddl = DDL(statement)  # type: ignore[no-untyped-call]  # SQLAlchemy left this one without types
            event.listen(table, "after_create", ddl.execute_if(dialect=dialect))


def rule_text(table: str, name: str, *, on: str, because: str, when: str, dialect: str) -> list[str]:
    """Return the SQL that makes a rule, on "sqlite" or "postgresql"; also for a migration that rebuilds a table."""
    rule = f"{table}_{name}"
    if dialect == "sqlite":
        # Before the statement, and so before the deletes of an INSERT OR REPLACE.
        when = when.replace(" IS DISTINCT FROM ", " IS NOT ").replace("TRUE", "1")
        return [f"CREATE TRIGGER {rule} BEFORE {on} ON {table} WHEN {when} BEGIN SELECT RAISE(ABORT, '{because}'); END"]
    raised = f"RAISE EXCEPTION '{because}' USING ERRCODE = 'integrity_constraint_violation';"
    made = [
        f"CREATE OR REPLACE FUNCTION {rule}() RETURNS trigger LANGUAGE plpgsql AS $$ "
        f"BEGIN IF {when} THEN {raised} END IF; RETURN {'OLD' if on == 'DELETE' else 'NEW'}; END $$",
        f"CREATE TRIGGER {rule} BEFORE {on} ON {table} FOR EACH ROW EXECUTE FUNCTION {rule}()",
    ]
    if on == "DELETE" and when == "TRUE":
        made += [
            f"CREATE OR REPLACE FUNCTION {rule}_all() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {raised} END $$",
            f"CREATE TRIGGER {rule}_all BEFORE TRUNCATE ON {table} FOR EACH STATEMENT EXECUTE FUNCTION {rule}_all()",
        ]
    return made


def stay(table: Table, columns: Iterable[str]) -> None:
    """Forbid changes of these columns after a row was written."""
    when = " OR ".join(f"NEW.{column} IS DISTINCT FROM OLD.{column}" for column in columns)
    forbid(table, "stay", on="UPDATE", when=when, because=f"what was written to {table.name} stays")


def remain(table: Table) -> None:
    """Forbid deleting rows of this table."""
    forbid(table, "remain", on="DELETE", because=f"rows of {table.name} are kept for ever")


def keep(table: Table, *, but: Collection[str] = ()) -> None:
    """Forbid deleting rows of this table, and changing them except in the columns `but`."""
    stay(table, [column.name for column in table.columns if column.name not in but])
    remain(table)


def set_once(column: str) -> str:
    """Return the condition that a column, empty at first, would change a second time."""
    return f"(OLD.{column} IS NOT NULL AND NEW.{column} IS DISTINCT FROM OLD.{column})"


def counted(*names: str) -> list[Column[Any]]:
    """Return columns of whole numbers that begin at 0."""
    return [Column(name, WHOLE, nullable=False, server_default=text("0")) for name in names]


NEVER_OVERHELD: Final = "held >= 0 AND (cap IS NULL OR spent + held <= cap)"

journal_owner = strict_table("journal_owner", Column("name", Text, primary_key=True))
"""One row in PostgreSQL: the process that started to write it last (`labeler.ledger.database`)."""

ledger_entries = strict_table(
    "ledger_entries",
    Column("seq", WHOLE, primary_key=True, autoincrement=False),
    *filled(Text, "at", "kind", "account", "level", "reservation_id"),
    Column("amount", WHOLE, nullable=False),
    *filled(Text, "detail", "previous_hash", "hash"),
    CheckConstraint("seq >= 1", name="seq"),
    CheckConstraint(one_of("kind", KINDS), name="kind"),
    CheckConstraint(one_of("level", ("instance", "agent")), name="level"),
    CheckConstraint("amount >= 0", name="amount"),
    Index(None, "account", "level", "seq"),
)

_APPEND_ONLY = "ledger entries are append-only"
forbid(ledger_entries, "stay", on="UPDATE", because=_APPEND_ONLY)
forbid(ledger_entries, "remain", on="DELETE", because=_APPEND_ONLY)
forbid(
    ledger_entries,
    "follow",
    on="INSERT",
    when="NEW.seq <> (SELECT coalesce(max(seq), 0) + 1 FROM ledger_entries)",
    because="ledger entries have no gaps",
)

ledger_accounts = strict_table(
    "ledger_accounts",
    Column("account", Text, primary_key=True),
    Column("level", Text, primary_key=True),
    Column("cap", WHOLE, nullable=True),
    *filled(WHOLE, "spent", "posted"),
    *counted("held", "alone", "written_off"),
    CheckConstraint(one_of("level", ("instance", "agent")), name="level"),
    CheckConstraint("cap IS NULL OR cap >= 0", name="cap"),
    CheckConstraint("spent >= 0 AND (cap IS NULL OR spent <= cap)", name="never_overspent"),
    CheckConstraint("posted >= 0 AND posted <= spent", name="posted"),
    CheckConstraint(NEVER_OVERHELD, name="never_overheld"),
    CheckConstraint("alone >= 0 AND written_off >= 0", name="standing"),
    sqlite_with_rowid=False,
)
"""Sums over the entries (spent, posted), and over the reservations that were not voided: the amount that they hold
without an entry (held), how many wrote the account off (written_off), and how many others charge it at this level alone
(alone)."""

ledger_reservations = strict_table(
    "ledger_reservations",
    Column("reservation_id", Text, primary_key=True),
    Column("state", Text, nullable=False),
    *filled(WHOLE, "first_seq", "charges"),
    Column("settled_seq", WHOLE, nullable=True),
    Column("held", Json, nullable=True),
    CheckConstraint("state IN ('reserved', 'posted', 'void')", name="state"),
    CheckConstraint("(state = 'reserved') = (settled_seq IS NULL)", name="settled"),
    index_where("ix_ledger_reservations_reserved", "reservation_id", "state = 'reserved'"),
    sqlite_with_rowid=False,
)

ledger_sums = strict_table(
    "ledger_sums",
    Column("seq", WHOLE, primary_key=True, autoincrement=False),
    Column("account", Text, primary_key=True),
    Column("level", Text, primary_key=True),
    Column("cap", WHOLE, nullable=True),
    *filled(WHOLE, "spent", "posted"),
    sqlite_with_rowid=False,
)
"""Every account as it stood right after some entries, so that no sum has to begin at the first entry."""
keep(ledger_sums)

tasks = strict_table(
    "tasks",
    Column("digest", Text, primary_key=True),
    Column("body", Text, nullable=False),
    Column("participants", Json, nullable=False),
    *filled(WHOLE, "max_queries", "next_query"),
    Column("created_at", Moment, nullable=False),
    Column("created_by", Text, nullable=False),
    CheckConstraint("next_query >= 0 AND next_query <= max_queries", name="queries"),
    Index(None, "created_at", "digest"),
    Index(None, "created_by", "created_at", "digest"),
)
keep(tasks, but=("next_query",))
forbid(
    tasks,
    "advance",
    on="UPDATE",
    when="NEW.next_query < OLD.next_query",
    because="a query of a task is given out once",
)

task_shares = strict_table(
    "task_shares",
    Column("task_digest", Text, ForeignKey("tasks.digest"), primary_key=True),
    Column("token_id", Text, primary_key=True),
    Column("shared_at", Moment, nullable=False),
    Index(None, "token_id"),
)

returned_queries = strict_table(
    "returned_queries",
    Column("task_digest", Text, primary_key=True),
    Column("first_query", WHOLE, primary_key=True, autoincrement=False),
    Column("num_queries", WHOLE, nullable=False),
    CheckConstraint("first_query >= 0 AND num_queries >= 1", name="range"),
)
stay(returned_queries, ("task_digest", "first_query", "num_queries"))
UNASKED: Final[dict[str, str]] = {
    "on": "INSERT",
    "when": "EXISTS (SELECT 1 FROM rounds JOIN jobs ON jobs.job_id = rounds.job_id "
    "WHERE jobs.task_digest = NEW.task_digest AND jobs.first_query < NEW.first_query + NEW.num_queries "
    "AND jobs.first_query + jobs.num_queries > NEW.first_query "
    "AND rounds.first_query < NEW.first_query + NEW.num_queries "
    "AND rounds.first_query + rounds.num_queries > NEW.first_query "
    f"AND (rounds.round_digest IS NOT NULL OR NOT ({one_of('jobs.state', FINISHED)})))",
    "because": "only queries that nobody was asked about come back",
}
forbid(returned_queries, "unasked", **UNASKED)  # type: ignore[arg-type]  # the kind of change is one of three
forbid(
    returned_queries,
    "given",
    on="INSERT",
    when="NOT EXISTS (SELECT 1 FROM tasks WHERE tasks.digest = NEW.task_digest "
    "AND tasks.next_query >= NEW.first_query + NEW.num_queries)",
    because="only queries that were given out come back",
)
forbid(
    returned_queries,
    "once",
    on="INSERT",
    when="EXISTS (SELECT 1 FROM returned_queries AS other WHERE other.task_digest = NEW.task_digest "
    "AND other.first_query < NEW.first_query + NEW.num_queries "
    "AND other.first_query + other.num_queries > NEW.first_query)",
    because="a query comes back once",
)

jobs = strict_table(
    "jobs",
    Column("job_id", Text, primary_key=True),
    Column("task_digest", Text, ForeignKey("tasks.digest"), nullable=False),
    *filled(Text, "name", "state"),
    *filled(WHOLE, "images", "num_queries", "first_query"),
    Column("strategy", Text, nullable=False),
    Column("count", WHOLE, nullable=True),
    Column("seed", WHOLE, nullable=False),
    Column("source", Text, nullable=False),
    *filled(Moment, "created_at", "updated_at", "expires_at"),
    Column("created_by", Text, nullable=False),
    Column("problem", Json, nullable=True),
    Column("version", WHOLE, nullable=False),
    CheckConstraint(one_of("state", JOB_STATES), name="state"),
    CheckConstraint(one_of("source", ("images", "features")), name="source"),
    CheckConstraint("images >= 0 AND num_queries >= 0 AND first_query >= 0 AND version >= 1", name="counts"),
    Index(None, "created_at", "job_id"),
    Index(None, "state", "created_at", "job_id"),
    Index(None, "created_by", "state", "created_at", "job_id"),
    Index(None, "task_digest", "first_query"),
    Index(None, "updated_at"),
)
keep(jobs, but=("name", "state", "images", "strategy", "count", "seed", "source", "updated_at", "problem", "version"))
forbid(jobs, "end", on="UPDATE", when=one_of("OLD.state", FINISHED), because="a finished job never changes")

idempotency_keys = strict_table(
    "idempotency_keys",
    Column("token_id", Text, primary_key=True),
    Column("key", Text, primary_key=True),
    Column("body_digest", Text, nullable=False),
    Column("job_id", Text, ForeignKey("jobs.job_id"), nullable=False),
)
keep(idempotency_keys)

rounds = strict_table(
    "rounds",
    Column("job_id", Text, ForeignKey("jobs.job_id"), primary_key=True),
    Column("number", WHOLE, primary_key=True, autoincrement=False),
    *filled(WHOLE, "first_query", "num_queries"),
    Column("state", Text, nullable=False),
    *optional(Text, "batch_digest", "round_digest"),
    Column("contributors", Json, nullable=True),
    Column("ledger_seq", WHOLE, nullable=True),
    UniqueConstraint("round_digest"),
    CheckConstraint("number >= 0 AND first_query >= 0 AND num_queries >= 1", name="counts"),
    CheckConstraint(one_of("state", ROUND_STATES), name="state"),
    CheckConstraint("(batch_digest IS NULL) = (round_digest IS NULL)", name="digests"),
    CheckConstraint("state = 'waiting' OR round_digest IS NOT NULL", name="asked"),
    CheckConstraint("(state IN ('agreed', 'posted', 'opened')) = (contributors IS NOT NULL)", name="agreed"),
    CheckConstraint("(state IN ('posted', 'opened')) = (ledger_seq IS NOT NULL)", name="posted"),
)


def _place(state: str) -> str:
    return "CASE " + state + "".join(f" WHEN '{one}' THEN {at}" for at, one in enumerate(ROUND_STATES)) + " END"


keep(rounds, but=("state", "batch_digest", "round_digest", "contributors", "ledger_seq"))
forbid(
    rounds,
    "once",
    on="UPDATE",
    when=" OR ".join(set_once(column) for column in ("batch_digest", "round_digest", "contributors", "ledger_seq")),
    because="what a round was fixed to stays for ever",
)
forbid(
    rounds,
    "forward",
    on="UPDATE",
    when=f"({_place('NEW.state')}) - ({_place('OLD.state')}) NOT IN (0, 1)",
    because="a round takes one step forward at a time",
)
forbid(
    rounds,
    "opened",
    on="UPDATE",
    when="NEW.state = 'opened' AND NOT EXISTS (SELECT 1 FROM releases "
    "WHERE releases.job_id = NEW.job_id AND releases.number = NEW.number)",
    because="a round is opened by storing its release",
)
forbid(
    rounds,
    "paid",
    on="UPDATE",
    when="NEW.state = 'posted' AND NOT EXISTS (SELECT 1 FROM ledger_entries WHERE ledger_entries.seq = NEW.ledger_seq "
    "AND ledger_entries.kind = 'post' AND ledger_entries.reservation_id = NEW.job_id || '/' || NEW.number)",
    because="a round is posted by an entry of the ledger that posts its charge",
)
forbid(
    rounds,
    "live",
    on="UPDATE",
    when=f"EXISTS (SELECT 1 FROM jobs WHERE jobs.job_id = NEW.job_id AND {one_of('jobs.state', FINISHED)})",
    because="a round of a finished job never changes",
)
forbid(rounds, "begin", on="INSERT", when="NEW.state <> 'waiting'", because="a round begins as waiting")


def _of_round(name: str, *parts: SchemaItem) -> Table:
    """Return a table with facts about each round."""
    return strict_table(
        name,
        Column("job_id", Text, primary_key=True),
        Column("number", WHOLE, primary_key=True, autoincrement=False),
        *parts,
        ForeignKeyConstraint(["job_id", "number"], ["rounds.job_id", "rounds.number"]),
    )


planned_batches = _of_round(
    "planned_batches",
    *filled(Text, "batch_digest", "round_digest"),
    Index(None, "round_digest"),
)
"""The planned questions of a waiting round. The step that asks makes them permanent. So a job that ends earlier uses up
no digest, and the same questions can be asked again in the same place."""
keep(planned_batches)

round_participants = _of_round(
    "round_participants",
    Column("verify_keys", Json, nullable=False),
)
keep(round_participants)

round_shares = _of_round(
    "round_shares",
)
keep(round_shares)

round_holdings = _of_round(
    "round_holdings",
    Column("tallier_id", Text, primary_key=True),
    Column("holdings", Json, nullable=False),
)

round_refusals = _of_round(
    "round_refusals",
    Column("agent_id", Text, primary_key=True),
    *filled(Text, "sentence", "kind"),
    CheckConstraint(one_of("kind", ("final", "passing")), name="kind"),
)

releases = _of_round(
    "releases",
    Column("data", LargeBinary, nullable=False),
)
keep(releases)
forbid(
    releases,
    "paid",
    on="INSERT",
    when="NOT EXISTS (SELECT 1 FROM rounds "
    "WHERE rounds.job_id = NEW.job_id AND rounds.number = NEW.number AND rounds.state = 'posted')",
    because="only a round that was paid for is released",
)

aggregate_shares = strict_table(
    "aggregate_shares",
    Column("round_digest", Text, ForeignKey("rounds.round_digest"), primary_key=True),
    Column("tallier_id", Text, primary_key=True),
    Column("data", LargeBinary, nullable=True),
    Column("data_digest", Text, nullable=False),
)
keep(aggregate_shares, but=("data",))
forbid(
    aggregate_shares,
    "dropped",
    on="UPDATE",
    when="NEW.data IS NOT NULL AND NEW.data IS DISTINCT FROM OLD.data",
    because="a sum is kept or dropped, never replaced",
)

job_answers = strict_table(
    "job_answers",
    Column("job_id", Text, ForeignKey("jobs.job_id"), primary_key=True),
    Column("agent_id", Text, primary_key=True),
    *filled(Text, "answer", "reason", "sentence"),
    Column("until", Moment, nullable=True),
    CheckConstraint(one_of("answer", ("willing", "declined", "later")), name="answer"),
    CheckConstraint("(answer = 'willing') = (until IS NOT NULL)", name="until"),
)
stay(job_answers, ("job_id", "agent_id"))

job_asked = strict_table(
    "job_asked",
    Column("job_id", Text, ForeignKey("jobs.job_id"), primary_key=True),
    Column("agents", Json, nullable=False),
)
keep(job_asked)

forgotten_jobs = strict_table(
    "forgotten_jobs",
    Column("job_id", Text, ForeignKey("jobs.job_id"), primary_key=True),
    Column("at", Moment, nullable=False),
    Column("because", Text, nullable=False),
    CheckConstraint(one_of("because", ("asked", "age")), name="because"),
)
keep(forgotten_jobs)
forbid(
    forgotten_jobs,
    "ended",
    on="INSERT",
    when=f"NOT EXISTS (SELECT 1 FROM jobs WHERE jobs.job_id = NEW.job_id AND {one_of('jobs.state', sorted(FINISHED))})",
    because="only a job that has ended is forgotten",
)

tokens = strict_table(
    "tokens",
    Column("token_id", Text, primary_key=True),
    *filled(Text, "name", "role"),
    Column("secret_digest", Text, nullable=False, unique=True),
    Column("created_at", Moment, nullable=False),
    Column("revoked_at", Moment, nullable=True),
    CheckConstraint(one_of("role", ROLES), name="role"),
)
keep(tokens, but=("revoked_at",))
forbid(tokens, "revoked", on="UPDATE", when=set_once("revoked_at"), because="a revoked token stays revoked")

parties = strict_table(
    "parties",
    Column("party_id", Text, primary_key=True),
    Column("role", Text, nullable=False),
    Column("tallier", WHOLE, nullable=True),
    Column("verify_key", Text, nullable=False, unique=True),
    Column("seal_key", Text, nullable=False, unique=True),
    Column("state", Text, nullable=False),
    Column("enrolled_at", Moment, nullable=False),
    Column("last_contact", Moment, nullable=True),
    Column("facts", Json, nullable=False),
    Column("journal_seq", WHOLE, nullable=False),
    Column("journal_hash", Text, nullable=False),
    CheckConstraint(one_of("role", ("agent", "tallier")), name="role"),
    CheckConstraint(one_of("state", ("active", "revoked")), name="state"),
    CheckConstraint("(role = 'tallier') = (tallier IS NOT NULL)", name="tallier"),
    CheckConstraint(f"tallier IS NULL OR tallier BETWEEN 0 AND {MAX_TALLIERS - 1}", name="number"),
    Index(
        "ix_parties_active_tallier",
        "tallier",
        unique=True,
        sqlite_where=text("state = 'active'"),
        postgresql_where=text("state = 'active'"),
    ),
)
keep(parties, but=("verify_key", "seal_key", "state", "last_contact", "facts", "journal_seq", "journal_hash"))
forbid(
    parties,
    "witness",
    on="UPDATE",
    when="NEW.journal_seq < OLD.journal_seq",
    because="the journal of a party never gets shorter",
)

party_keys = strict_table(
    "party_keys",
    Column("key", Text, primary_key=True),
    Column("party_id", Text, ForeignKey("parties.party_id"), nullable=False),
)
"""Every key that was ever enrolled."""
keep(party_keys)

party_heads = strict_table(
    "party_heads",
    Column("party_id", Text, ForeignKey("parties.party_id"), primary_key=True),
    Column("seq", WHOLE, nullable=False),
    Column("hash", Text, nullable=False),
    CheckConstraint("seq >= 1", name="seq"),
)
"""Head of a party's journal at its last answer; separate from heads in polls, because it changes with each answer."""
keep(party_heads, but=("seq", "hash"))
forbid(party_heads, "rise", on="UPDATE", when="NEW.seq <= OLD.seq", because="what a party has answered stays answered")

invitations = strict_table(
    "invitations",
    Column("invitation_id", Text, primary_key=True),
    *filled(Text, "party_id", "role"),
    Column("tallier", WHOLE, nullable=True),
    Column("is_rotation", WHOLE, nullable=False),
    Column("token_digest", Text, nullable=False, unique=True),
    Column("created_by", Text, nullable=False),
    *filled(Moment, "created_at", "expires_at"),
    *optional(Moment, "withdrawn_at", "used_at"),
    *optional(Text, "verify_key", "seal_key"),
    CheckConstraint(one_of("role", ("agent", "tallier")), name="role"),
    CheckConstraint("(role = 'tallier') = (tallier IS NOT NULL)", name="tallier"),
    CheckConstraint("is_rotation IN (0, 1)", name="rotation"),
    CheckConstraint("(used_at IS NULL) = (verify_key IS NULL)", name="used"),
    CheckConstraint("(verify_key IS NULL) = (seal_key IS NULL)", name="used_keys"),
    CheckConstraint("used_at IS NULL OR withdrawn_at IS NULL", name="one_end"),
)
keep(invitations, but=("withdrawn_at", "used_at", "verify_key", "seal_key"))
forbid(
    invitations,
    "once",
    on="UPDATE",
    when=" OR ".join(set_once(column) for column in ("withdrawn_at", "used_at", "verify_key", "seal_key")),
    because="an invitation is used once and withdrawn once",
)

sequences_sent = strict_table(
    "sequences_sent",
    Column("recipient", Text, primary_key=True),
    Column("reserved", WHOLE, nullable=False),
    CheckConstraint("reserved >= 0", name="reserved"),
)

sequences_taken = strict_table(
    "sequences_taken",
    Column("sender", Text, primary_key=True),
    Column("verify_key", Text, primary_key=True),
    Column("last", WHOLE, nullable=False),
    CheckConstraint("last >= 1", name="last"),
)
for _table, _column in ((sequences_sent, "reserved"), (sequences_taken, "last")):
    remain(_table)
    forbid(_table, "rise", on="UPDATE", when=f"NEW.{_column} <= OLD.{_column}", because="sequence numbers only go up")

answered_rounds = strict_table(
    "answered_rounds",
    Column("round_digest", Text, primary_key=True),
    *filled(Text, "shard_version", "reservation_id"),
    Column("ledger_seq", WHOLE, ForeignKey("ledger_entries.seq"), nullable=False),
    Column("num_queries", WHOLE, nullable=False),
    *filled(Text, "task_digest", "recipients"),
    UniqueConstraint("reservation_id"),
    UniqueConstraint("ledger_seq"),
    CheckConstraint("num_queries >= 1", name="queries"),
    Index(None, "task_digest"),
)
keep(answered_rounds)
forbid(
    answered_rounds,
    "paid",
    on="INSERT",
    when="NOT EXISTS (SELECT 1 FROM ledger_entries WHERE ledger_entries.seq = NEW.ledger_seq "
    "AND ledger_entries.kind = 'post' AND ledger_entries.reservation_id = NEW.reservation_id)",
    because="an answer is paid for by an entry of the ledger",
)

site_refusals = strict_table(
    "site_refusals",
    Column("digest", Text, primary_key=True),
    *filled(Text, "task_digest", "reason", "sentence"),
    *(Column(name, Text, nullable=False) for name in ("job_id", "name", "requester")),
    Column("refused_at", Moment, nullable=False),
    Index(None, "refused_at"),
)
"""What an agent refused by its policy or its ledger: the digest of a proposal or of a round, and the refusal sent."""
keep(site_refusals)

answered_sums = strict_table(
    "answered_sums",
    Column("ledger_seq", WHOLE, primary_key=True, autoincrement=False),
    Column("task_digest", Text, nullable=False),
    *filled(WHOLE, "queries", "of_task"),
    Index(None, "task_digest", "ledger_seq"),
)
"""The queries of all answered rounds up to each one, and of those of its task."""
keep(answered_sums)

task_approvals = strict_table(
    "task_approvals",
    Column("digest", Text, primary_key=True),
    *filled(Text, "body", "state"),
    Column("requested_at", Moment, nullable=False),
    Column("decided_at", Moment, nullable=True),
    CheckConstraint(one_of("state", ("waiting", "approved", "revoked")), name="state"),
    CheckConstraint("(state = 'waiting') = (decided_at IS NULL)", name="decided"),
)
stay(task_approvals, ("digest", "body", "requested_at"))

agent_rounds = strict_table(
    "agent_rounds",
    Column("round_digest", Text, ForeignKey("answered_rounds.round_digest"), primary_key=True),
    Column("state", Text, nullable=False),
    Column("kept_until", Moment, nullable=False),
    Column("answer", LargeBinary, nullable=True),
    CheckConstraint(one_of("state", ("charged", "stored", "erased")), name="state"),
    CheckConstraint("(state = 'stored') = (answer IS NOT NULL)", name="stored"),
    index_where("ix_agent_rounds_kept", "kept_until", "state <> 'erased'"),
)
keep(agent_rounds, but=("state", "answer"))
forbid(
    agent_rounds,
    "once",
    on="UPDATE",
    when="OLD.state = 'erased' OR NEW.state = 'charged' "
    "OR (OLD.answer IS NOT NULL AND NEW.answer IS NOT NULL AND NEW.answer IS DISTINCT FROM OLD.answer)",
    because="an answer is stored once and erased for ever",
)

proposal_answers = strict_table(
    "proposal_answers",
    Column("digest", Text, primary_key=True),
    *filled(Text, "job_id", "task_digest", "answer"),
    *filled(Moment, "until", "answered_at"),
    CheckConstraint(one_of("answer", ("willing", "declined")), name="answer"),
)
keep(proposal_answers, but=("until",))

promised_rounds = strict_table(
    "promised_rounds",
    Column("reservation_id", Text, primary_key=True),
    Column("digest", Text, ForeignKey("proposal_answers.digest"), nullable=False),
    Column("task_digest", Text, nullable=False),
    Column("num_queries", WHOLE, nullable=False),
    Column("amounts", Json, nullable=False),
    CheckConstraint("num_queries >= 1", name="queries"),
)
keep(promised_rounds)

told_amounts = strict_table(
    "told_amounts",
    Column("digest", Text, primary_key=True),
    Column("scale", Text, primary_key=True),
    Column("bound", WHOLE, primary_key=True),
    Column("amount", WHOLE, primary_key=True),
    Column("requester", Text, nullable=False),
    Column("told_at", Moment, nullable=False),
    Column("for_nothing", WHOLE, nullable=False),
    CheckConstraint("for_nothing IN (0, 1)", name="for_nothing"),
    CheckConstraint("for_nothing = 1 OR amount <= bound", name="covered"),
    Index(None, "scale", "bound", "amount"),
)
keep(told_amounts, but=("for_nothing",))

taken_by = strict_table(
    "taken_by",
    Column("reservation_id", Text, ForeignKey("ledger_reservations.reservation_id"), primary_key=True),
    Column("requester", Text, nullable=False),
    *filled(WHOLE, "instance_nano", "agent_nano", "life_nano"),
    CheckConstraint("instance_nano >= 0 AND agent_nano >= 0 AND life_nano >= 0", name="amounts"),
    Index(None, "requester"),
)
keep(taken_by)

requester_sums = strict_table(
    "requester_sums",
    Column("requester", Text, primary_key=True),
    *filled(WHOLE, "instance_nano", "agent_nano", "unbounded", "life_nano"),
)
"""The sums over what was taken by each requester and not given back; prices without a finite value are counted only."""

asked_by = strict_table(
    "asked_by",
    Column("task_digest", Text, primary_key=True),
    Column("requester", Text, primary_key=True),
    Column("first_at", Moment, nullable=False),
)
keep(asked_by)

answered_tasks = strict_table(
    "answered_tasks",
    Column("digest", Text, primary_key=True),
    Column("body", Text, nullable=False),
    Column("first_at", Moment, nullable=False),
)
keep(answered_tasks)

life_spends = strict_table(
    "life_spends",
    Column("digest", LargeBinary, primary_key=True),
    Column("spent", WHOLE, nullable=False),
    CheckConstraint("spent >= 0", name="spent"),
)
keep(life_spends, but=("spent",))
forbid(life_spends, "grow", on="UPDATE", when="NEW.spent < OLD.spent", because="what a record has spent only grows")

life_rounds = strict_table(
    "life_rounds",
    Column("seq", WHOLE, primary_key=True, autoincrement=False),
    Column("round_digest", Text, nullable=False, unique=True),
    Column("site_key", Text, nullable=False),
)
keep(life_rounds)

life_aside = strict_table(
    "life_aside",
    Column("account", Text, primary_key=True),
    Column("nano", WHOLE, nullable=False),
    CheckConstraint("nano >= 1", name="nano"),
)
keep(life_aside, but=("nano",))
forbid(life_aside, "grow", on="UPDATE", when="NEW.nano < OLD.nano", because="what was promised is not taken back")

life_closed = strict_table(
    "life_closed",
    Column("reason", Text, primary_key=True),
)
keep(life_closed)

tallier_rounds = strict_table(
    "tallier_rounds",
    Column("round_digest", Text, primary_key=True),
    Column("opened", LargeBinary, nullable=False),
    Column("state", Text, nullable=False),
    Column("contributors", Json, nullable=True),
    Column("aggregate", LargeBinary, nullable=True),
    CheckConstraint(one_of("state", ("open", "fixed", "forgotten")), name="state"),
    CheckConstraint("state <> 'open' OR (contributors IS NULL AND aggregate IS NULL)", name="open"),
    CheckConstraint("state <> 'fixed' OR (contributors IS NOT NULL AND aggregate IS NOT NULL)", name="fixed"),
    CheckConstraint("state <> 'forgotten' OR aggregate IS NULL", name="forgotten"),
    index_where("ix_tallier_rounds_kept", "round_digest", "state <> 'forgotten'"),
)
keep(tallier_rounds, but=("state", "contributors", "aggregate"))
forbid(
    tallier_rounds,
    "once",
    on="UPDATE",
    when=set_once("contributors")
    + " OR (OLD.state <> 'open' AND (NEW.state = 'open' OR NEW.contributors IS DISTINCT FROM OLD.contributors))"
    + " OR (OLD.state = 'forgotten' AND NEW.state <> 'forgotten')"
    + " OR (OLD.aggregate IS NOT NULL AND NEW.aggregate IS NOT NULL AND NEW.aggregate <> OLD.aggregate)",
    because="a round is summed once for ever",
)

tallier_shares = strict_table(
    "tallier_shares",
    Column("round_digest", Text, ForeignKey("tallier_rounds.round_digest"), primary_key=True),
    Column("agent_id", Text, primary_key=True),
    Column("state", Text, nullable=False),
    *optional(LargeBinary, "share", "sharing_id", "fingerprint"),
    CheckConstraint(one_of("state", ("held", "summed", "excluded", "dropped")), name="state"),
    CheckConstraint("(state = 'held') = (share IS NOT NULL)", name="held"),
    CheckConstraint("state = 'excluded' OR (sharing_id IS NOT NULL AND fingerprint IS NOT NULL)", name="known"),
    index_where("ix_tallier_shares_held", "round_digest", "state = 'held'"),
)
stay(tallier_shares, ("round_digest", "agent_id", "fingerprint", "sharing_id"))
remain(tallier_shares)
forbid(
    tallier_shares,
    "over",
    on="UPDATE",
    when="OLD.state <> 'held' AND NEW.state <> OLD.state",
    because="a share that was summed, excluded or dropped stays so",
)
forbid(
    tallier_shares,
    "late",
    on="INSERT",
    when="NEW.state = 'held' AND NOT EXISTS (SELECT 1 FROM tallier_rounds "
    "WHERE tallier_rounds.round_digest = NEW.round_digest AND tallier_rounds.state = 'open')",
    because="a round that was summed or forgotten takes no share",
)

erasable_home = strict_table(
    "erasable_home",
    Column("check_value", Text, primary_key=True),
)

write_probes = strict_table(
    "write_probes",
    Column("probe", WHOLE, primary_key=True, autoincrement=False),
    Column("writes", WHOLE, nullable=False),
    CheckConstraint("probe = 0 AND writes >= 1", name="one_row"),
)
