"""The first revision: the tables as the schema makes them of an empty journal. There is nothing before it."""

from __future__ import annotations

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Not called: a new journal is made at the newest revision."""
