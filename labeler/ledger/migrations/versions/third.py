"""The third revision: what an agent refused by its policy or its ledger."""

from __future__ import annotations

from alembic import op

from labeler.ledger.schema import site_refusals

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Add the table; of earlier refusals nothing is known."""
    site_refusals.create(op.get_bind())
