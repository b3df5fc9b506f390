"""The tables of jobs, their rounds and what was released, and the rules the database keeps about them.

jobs                one row per job; a finished one never changes
idempotency_keys    (token, key) -> the job it made, for ever
planned_batches     what a round that waits will ask
rounds              batches of a job; each step forward, none back, what was fixed stays fixed
round_participants  whose shares a round takes, and the key each signs with; fixed before anybody is asked
round_holdings      what each tallier last reported to hold
round_refusals      agents that do not answer, and why
releases            what was opened, once for ever
aggregate_shares    sums of single talliers, until the release is stored
"""

from __future__ import annotations

from typing import get_args

from sqlalchemy import (
    CheckConstraint,
    Column,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    LargeBinary,
    Table,
    Text,
    UniqueConstraint,
)
from sqlalchemy.schema import SchemaItem

from feature_store.journal.columns import WHOLE, Json, Moment, one_of
from feature_store.journal.database import strict_table
from feature_store.journal.ledger_tables import LEDGER_TABLES
from feature_store.journal.rules import forbid, keep, set_once
from feature_store.journal.tasks import tasks
from labeler.rounds.effects import FINISHED as FINISHED
from labeler.rounds.effects import JobState, RoundState

JOB_STATES = get_args(JobState)
ROUND_STATES = get_args(RoundState)

jobs = strict_table(
    "jobs",
    Column("job_id", Text, primary_key=True),
    Column("task_digest", Text, ForeignKey("tasks.digest"), nullable=False),
    Column("name", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("images", WHOLE, nullable=False),
    Column("num_queries", WHOLE, nullable=False),
    Column("first_query", WHOLE, nullable=False),
    Column("strategy", Text, nullable=False),
    Column("count", WHOLE, nullable=True),
    Column("seed", WHOLE, nullable=False),
    Column("source", Text, nullable=False),
    Column("created_at", Moment, nullable=False),
    Column("updated_at", Moment, nullable=False),
    Column("expires_at", Moment, nullable=False),
    Column("created_by", Text, nullable=False),
    Column("problem", Json, nullable=True),
    Column("version", WHOLE, nullable=False),
    CheckConstraint(one_of("state", JOB_STATES), name="state"),
    CheckConstraint(one_of("source", ("images", "features")), name="source"),
    CheckConstraint("images >= 0 AND num_queries >= 0 AND first_query >= 0 AND version >= 1", name="counts"),
    Index(None, "created_at", "job_id"),
    Index(None, "state"),
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
    Column("first_query", WHOLE, nullable=False),
    Column("num_queries", WHOLE, nullable=False),
    Column("state", Text, nullable=False),
    Column("batch_digest", Text, nullable=True),
    Column("round_digest", Text, nullable=True),
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
    """A table of what is known of each round."""
    return strict_table(
        name,
        Column("job_id", Text, primary_key=True),
        Column("number", WHOLE, primary_key=True, autoincrement=False),
        *parts,
        ForeignKeyConstraint(["job_id", "number"], ["rounds.job_id", "rounds.number"]),
    )


planned_batches = _of_round(
    "planned_batches",
    Column("batch_digest", Text, nullable=False),
    Column("round_digest", Text, nullable=False),
    Index(None, "round_digest"),
)
"""What a round that waits will ask; it becomes the round's own, for good, in the step that asks. So of a job that ends
before, no digest is used up, and the same questions can be asked again in the same place."""
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
    Column("sentence", Text, nullable=False),
    Column("kind", Text, nullable=False),
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

JOB_TABLES = (
    *LEDGER_TABLES,
    tasks,
    jobs,
    idempotency_keys,
    rounds,
    planned_batches,
    round_participants,
    round_shares,
    round_holdings,
    round_refusals,
    releases,
    aggregate_shares,
)
"""With the ledger's, which the rules above look into."""
