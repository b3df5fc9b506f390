"""The tables of a tallier, and the rules the database keeps about them.

tallier_rounds      open > fixed > forgotten; the set of agents summed is written once and stays
tallier_shares      held > summed | excluded | dropped; only a held one has its bytes
"""

from __future__ import annotations

from sqlalchemy import CheckConstraint, Column, ForeignKey, LargeBinary, Text

from feature_store.journal.columns import Json, one_of
from feature_store.journal.database import strict_table
from feature_store.journal.rules import forbid, keep, remain, set_once, stay

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
    Column("share", LargeBinary, nullable=True),
    Column("sharing_id", LargeBinary, nullable=True),
    Column("fingerprint", LargeBinary, nullable=True),
    CheckConstraint(one_of("state", ("held", "summed", "excluded", "dropped")), name="state"),
    CheckConstraint("(state = 'held') = (share IS NOT NULL)", name="held"),
    CheckConstraint("state = 'excluded' OR (sharing_id IS NOT NULL AND fingerprint IS NOT NULL)", name="known"),
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
