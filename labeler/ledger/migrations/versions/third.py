"""The third revision: what an agent's policy refused by itself."""

from __future__ import annotations

from alembic import op

from labeler.ledger.schema import policy_refusals

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Add the table; of earlier refusals nothing is known."""
    policy_refusals.create(op.get_bind())
