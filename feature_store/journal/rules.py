"""Rules that the database itself keeps, whatever program writes to it.

What is once for ever (the contributors of a round, a release, a tallier's sum) is checked in Python, where the error
can say what to do next, and once more by a trigger here, where no defect of a caller can pass it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Literal

from sqlalchemy import DDL, Table, event

_RULES = "rules"


def forbid(
    table: Table, name: str, *, on: Literal["INSERT", "UPDATE", "DELETE"], because: str, when: str = "TRUE"
) -> None:
    """Refuse a kind of change to a table; made together with the table.

    Args:
        name: of the rule, unique within the table.
        because: what the refusal says; no quotes and no percent signs.
        when: a condition over OLD and NEW, in SQL that both databases know (IS DISTINCT FROM is translated).
    """
    rule = f"{table.name}_{name}"
    sqlite_when = when.replace(" IS DISTINCT FROM ", " IS NOT ").replace("TRUE", "1")
    sqlite = [
        f"CREATE TRIGGER {rule} BEFORE {on} ON {table.name} WHEN {sqlite_when} "
        f"BEGIN SELECT RAISE(ABORT, '{because}'); END"
    ]
    raised = f"RAISE EXCEPTION '{because}' USING ERRCODE = 'integrity_constraint_violation';"
    row = "OLD" if on == "DELETE" else "NEW"
    postgresql = [
        f"CREATE OR REPLACE FUNCTION {rule}() RETURNS trigger LANGUAGE plpgsql AS $$ "
        f"BEGIN IF {when} THEN {raised} END IF; RETURN {row}; END $$",
        f"CREATE TRIGGER {rule} BEFORE {on} ON {table.name} FOR EACH ROW EXECUTE FUNCTION {rule}()",
    ]
    if on == "DELETE" and when == "TRUE":
        postgresql += [
            f"CREATE OR REPLACE FUNCTION {rule}_all() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {raised} END $$",
            f"CREATE TRIGGER {rule}_all BEFORE TRUNCATE ON {table.name} "
            f"FOR EACH STATEMENT EXECUTE FUNCTION {rule}_all()",
        ]
    for statement in sqlite:
        add_rule(table, "sqlite", statement)
    for statement in postgresql:
        add_rule(table, "postgresql", statement)


def add_rule(table: Table, dialect: Literal["sqlite", "postgresql"], statement: str) -> None:
    """Give a table a statement that is run when it was made, on one database; the statement makes a trigger."""
    table.info.setdefault(_RULES, []).append((dialect, statement))
    event.listen(table, "after_create", _ddl(statement).execute_if(dialect=dialect))


def rules_of(table: Table, dialect: str) -> list[str]:
    """The statements that make the rules of a table, in order."""
    return [statement for wanted, statement in table.info.get(_RULES, []) if wanted == dialect]


def remain(table: Table) -> None:
    """Rows of this table are never deleted."""
    forbid(table, "remain", on="DELETE", because=f"rows of {table.name} are kept for ever")


def stay(table: Table, columns: Iterable[str]) -> None:
    """These columns never change after a row was written."""
    forbid(
        table,
        "stay",
        on="UPDATE",
        when=" OR ".join(f"NEW.{column} IS DISTINCT FROM OLD.{column}" for column in columns),
        because=f"what was written to {table.name} stays",
    )


def keep(table: Table, *, but: Collection[str] = ()) -> None:
    """Rows of this table are never deleted, and never change except in the columns `but`."""
    stay(table, [column.name for column in table.columns if column.name not in but])
    remain(table)


def set_once(column: str) -> str:
    """The condition that a column which was empty at first would change a second time."""
    return f"(OLD.{column} IS NOT NULL AND NEW.{column} IS DISTINCT FROM OLD.{column})"


def _ddl(statement: str) -> DDL:
    return DDL(statement)  # type: ignore[no-untyped-call]  # SQLAlchemy left this one without types
