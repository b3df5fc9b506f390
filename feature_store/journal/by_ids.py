"""Statements about several rows at once, by a list of ids that is one parameter.

An IN with as many parameters as ids is another text each time: it is compiled, and planned, anew. Here the ids travel
as one JSON list, so a look at one job and at two hundred is the same statement, compiled once for a database.

Several of them can be asked `Together`: one statement, whose answer is one row.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import Connection

from feature_store.journal.prepared import Prepared

_IDS = {
    "sqlite": "(SELECT value FROM json_each(:ids))",
    "postgresql": "(SELECT jsonb_array_elements_text(CAST(:ids AS jsonb)))",
}

# What each database calls a list of lists made of rows.
_LISTS = {
    "sqlite": "json_group_array(json_array({columns}))",
    "postgresql": "CAST(coalesce(json_agg(json_build_array({columns})), '[]') AS text)",
}


class ByIds:
    """One such statement; made once, at a module's top.

    Args:
        template: SQL that both databases read, with {ids} where the ids stand, as in "WHERE job_id IN {ids}". Values
            come back as the columns store them: whole numbers, texts and bytes.
    """

    def __init__(self, template: str) -> None:
        self.template = template
        self._by_dialect = {dialect: Prepared(template.replace("{ids}", ids)) for dialect, ids in _IDS.items()}

    def all(self, connection: Connection, ids: Collection[str]) -> list[tuple[Any, ...]]:
        """Every row it finds."""
        if not ids:
            return []
        return self._by_dialect[connection.dialect.name].all(connection, ids=json.dumps(list(ids)))


class Together:
    """Several statements about the same ids in one: a single moment of the database, and a single row.

    A thread that reads SQLite gives the interpreter's lock away at each row, and stands in line for it again: where
    others compute, that is most of what a look at five tables takes.

    Args:
        parts: each statement and how many columns it has, none of them bytes.
    """

    def __init__(self, *parts: tuple[ByIds, int]) -> None:
        self._by_dialect = {dialect: Prepared(_together(parts, dialect)) for dialect in _IDS}

    def all(self, connection: Connection, ids: Collection[str]) -> list[list[list[Any]]]:
        """The rows of each part, in the order of the parts; within one in no order."""
        row = self._by_dialect[connection.dialect.name].first(connection, ids=json.dumps(list(ids)))
        return [json.loads(rows) for rows in row or ()]


def _together(parts: Sequence[tuple[ByIds, int]], dialect: str) -> str:
    tables, lists = [], []
    for number, (part, count) in enumerate(parts):
        columns = ", ".join(f"c{place}" for place in range(count))
        tables.append(f"part{number} ({columns}) AS ({part.template.replace('{ids}', _IDS[dialect])})")
        lists.append(f"(SELECT {_LISTS[dialect].format(columns=columns)} FROM part{number})")
    return f"WITH {', '.join(tables)} SELECT {', '.join(lists)}"  # templates of this package's modules
