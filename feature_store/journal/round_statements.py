"""The statements of a round's steps. They read and write what a column stores: JSON as canonical text."""

from __future__ import annotations

from sqlalchemy import insert

from feature_store.journal.columns import one_of
from feature_store.journal.job_tables import (
    FINISHED,
    aggregate_shares,
    planned_batches,
    releases,
    round_holdings,
    round_participants,
    round_shares,
)
from feature_store.journal.prepared import Prepared

_HERE = "job_id = :job_id AND number = :number"
_UNFINISHED = f"NOT {one_of('jobs.state', FINISHED)}"
# The round of a digest: for good, or by the plan of a job that is not finished.
_LIVE = f"""(rounds.round_digest = :digest OR rounds.round_digest IS NULL AND EXISTS (
    SELECT 1 FROM planned_batches AS planned JOIN jobs ON jobs.job_id = planned.job_id
    WHERE planned.round_digest = :digest AND planned.job_id = rounds.job_id AND planned.number = rounds.number
    AND {_UNFINISHED}))"""
# A clock set back does not make a later version look older.
_STAMP = "version = version + 1, updated_at = CASE WHEN updated_at < :now THEN :now ELSE updated_at END"

ROUND_ROW = Prepared(
    "SELECT rounds.job_id, rounds.number, rounds.state, batch_digest, round_digest, contributors, ledger_seq, "
    "jobs.state AS job_state FROM rounds JOIN jobs ON jobs.job_id = rounds.job_id "
    "WHERE rounds.job_id = :job_id AND rounds.number = :number"
)
PLAN_OF = Prepared(f"SELECT batch_digest, round_digest FROM planned_batches WHERE {_HERE}")
ADD_PLAN = Prepared(insert(planned_batches))
TWIN_ASKED = Prepared("SELECT job_id, number FROM rounds WHERE round_digest = :digest")
TWINS_PLANNED = Prepared(f"""
SELECT rounds.job_id, rounds.number FROM rounds
JOIN planned_batches AS planned ON planned.job_id = rounds.job_id AND planned.number = rounds.number
JOIN jobs ON jobs.job_id = rounds.job_id
WHERE planned.round_digest = :digest AND rounds.round_digest IS NULL AND {_UNFINISHED}""")
LIVE_ROUND_OF = Prepared(f"SELECT job_id, number FROM rounds WHERE {_LIVE} ORDER BY job_id, number")
STATE_OF_LIVE_ROUND = Prepared(f"SELECT state FROM rounds WHERE {_LIVE}")
UNFINISHED_IDS = Prepared(f"SELECT job_id FROM jobs WHERE {_UNFINISHED} ORDER BY created_at, job_id")
PARTICIPANTS_OF = Prepared(f"SELECT verify_keys FROM round_participants WHERE {_HERE}")
ADD_PARTICIPANTS = Prepared(insert(round_participants))
ASK = Prepared(
    "UPDATE rounds SET state = 'asked', batch_digest = :batch_digest, round_digest = :round_digest "
    f"WHERE {_HERE} AND state = 'waiting'"
)
AGREE = Prepared(
    "UPDATE rounds SET state = 'agreed', contributors = :contributors "
    f"WHERE {_HERE} AND state = 'asked' AND contributors IS NULL"
)
POST = Prepared(f"UPDATE rounds SET state = 'posted', ledger_seq = :seq WHERE {_HERE} AND state = 'agreed'")
OPEN_ROUND = Prepared(f"UPDATE rounds SET state = 'opened' WHERE {_HERE} AND state = 'posted'")
HAS_SHARE = Prepared(f"SELECT number FROM round_shares WHERE {_HERE}")
ADD_SHARE = Prepared(insert(round_shares))
HOLDINGS_OF = Prepared(f"SELECT holdings FROM round_holdings WHERE {_HERE} AND tallier_id = :tallier_id")
ADD_HOLDINGS = Prepared(insert(round_holdings))
CHANGE_HOLDINGS = Prepared(f"UPDATE round_holdings SET holdings = :holdings WHERE {_HERE} AND tallier_id = :tallier_id")
ENTRY_OF = Prepared("SELECT kind, reservation_id FROM ledger_entries WHERE seq = :seq")
RELEASE_OF = Prepared(f"SELECT data FROM releases WHERE {_HERE}")
ADD_RELEASE = Prepared(insert(releases))
DROP_SUMS = Prepared("UPDATE aggregate_shares SET data = NULL WHERE round_digest = :digest AND data IS NOT NULL")
SUM_DIGEST = Prepared(
    "SELECT data_digest FROM aggregate_shares WHERE round_digest = :digest AND tallier_id = :tallier_id"
)
ADD_SUM = Prepared(insert(aggregate_shares))
STATE_OF_DIGEST = Prepared("SELECT state FROM rounds WHERE round_digest = :digest")
TOUCH = Prepared(f"UPDATE jobs SET {_STAMP} WHERE job_id = :job_id AND {_UNFINISHED}")
CHANGE = Prepared(
    f"UPDATE jobs SET state = :state, problem = coalesce(:problem, problem), {_STAMP} "
    "WHERE job_id = :job_id AND state = :before"
)
MOVE = Prepared(f"UPDATE jobs SET state = :state, {_STAMP} WHERE job_id = :job_id AND {_UNFINISHED}")
