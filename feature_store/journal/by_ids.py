"""Statements about several rows at once, by a list of ids that is one parameter.

An IN with as many parameters as ids is another text each time: it is compiled, and planned, anew. Here the ids travel
as one JSON list, so a look at one job and at two hundred is the same statement, compiled once for a database.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from sqlalchemy import Connection, text
from sqlalchemy.sql import ClauseElement

from feature_store.journal.prepared import prepared

_IDS = {
    "sqlite": "(SELECT value FROM json_each(:ids))",
    "postgresql": "(SELECT jsonb_array_elements_text(CAST(:ids AS jsonb)))",
}


class ByIds:
    """One such statement; made once, at a module's top.

    Args:
        template: SQL that both databases read, with {ids} where the ids stand, as in "WHERE job_id IN {ids}". Values
            come back as the columns store them: whole numbers, texts and bytes.
    """

    def __init__(self, template: str) -> None:
        self._makes = {dialect: self._make(template.replace("{ids}", ids)) for dialect, ids in _IDS.items()}

    def all(self, connection: Connection, ids: Collection[str]) -> list[tuple[Any, ...]]:
        """Every row it finds."""
        if not ids:
            return []
        make = self._makes[connection.dialect.name]
        return prepared(make, connection.dialect).all(connection, ids=json.dumps(list(ids)))

    @staticmethod
    def _make(written: str) -> Any:
        def make() -> ClauseElement:
            return text(written)

        return make
