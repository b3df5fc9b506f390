"""Run by Alembic: revisions change a journal within the transaction of whoever upgrades it."""

from __future__ import annotations

from alembic import context

context.configure(connection=context.config.attributes["connection"], transactional_ddl=False)
context.run_migrations()
