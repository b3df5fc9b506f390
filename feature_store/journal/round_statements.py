"""The statements of a round's steps, each compiled once for a database (`prepared`).

They read and write what a column stores: JSON as canonical text, a list of contributors as text or NULL.
"""

from __future__ import annotations

from sqlalchemy import ColumnElement, Table, Text, bindparam, case, insert, literal_column, select, type_coerce, update
from sqlalchemy.sql import ClauseElement

from feature_store.journal.job_tables import (
    aggregate_shares,
    is_unfinished,
    jobs,
    live_round,
    planned_batches,
    releases,
    round_holdings,
    round_participants,
    round_shares,
    rounds,
)
from feature_store.journal.ledger_tables import ledger_entries


def _here(table: Table) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    return table.c.job_id == bindparam("of_job"), table.c.number == bindparam("of_number")


def _words(table: Table, *names: str) -> list[ColumnElement[str]]:
    """Columns as the texts that they store."""
    return [type_coerce(table.c[name], Text) for name in names]


def round_row() -> ClauseElement:
    """A round with the state of its job."""
    shown = (
        rounds.c.job_id, rounds.c.number, rounds.c.state, rounds.c.batch_digest, rounds.c.round_digest,
        type_coerce(rounds.c.contributors, Text), rounds.c.ledger_seq, jobs.c.state,
    )  # fmt: skip
    return select(*shown).join(jobs, jobs.c.job_id == rounds.c.job_id).where(*_here(rounds))


def plan_of() -> ClauseElement:
    """What a round that waits will ask."""
    return select(planned_batches.c.batch_digest, planned_batches.c.round_digest).where(*_here(planned_batches))


def add_plan() -> ClauseElement:
    """Tie a round that waits to its questions."""
    return insert(planned_batches)


def twin_asked() -> ClauseElement:
    """The job of a round that has a digest for good."""
    return select(rounds.c.job_id, rounds.c.number).where(rounds.c.round_digest == bindparam("digest"))


def twins_planned() -> ClauseElement:
    """The rounds of unfinished jobs that wait, and will have a digest."""
    return (
        select(rounds.c.job_id, rounds.c.number)
        .join(
            planned_batches,
            (planned_batches.c.job_id == rounds.c.job_id) & (planned_batches.c.number == rounds.c.number),
        )
        .join(jobs, jobs.c.job_id == rounds.c.job_id)
        .where(
            planned_batches.c.round_digest == bindparam("digest"),
            rounds.c.round_digest.is_(None),
            is_unfinished(),
        )
    )


def live_round_of() -> ClauseElement:
    """The round of a digest: for good, or by the plan of a job that is not finished."""
    is_it = live_round(bindparam("digest"))
    return select(rounds.c.job_id, rounds.c.number).where(is_it).order_by(rounds.c.job_id, rounds.c.number)


def state_of_live_round() -> ClauseElement:
    """How far it is."""
    return select(rounds.c.state).where(live_round(bindparam("digest")))


def unfinished_ids() -> ClauseElement:
    """Jobs that still have to be moved on, oldest first."""
    return select(jobs.c.job_id).where(is_unfinished()).order_by(jobs.c.created_at, jobs.c.job_id)


def participants_of() -> ClauseElement:
    """Whose shares a round takes."""
    return select(*_words(round_participants, "verify_keys")).where(*_here(round_participants))


def add_participants() -> ClauseElement:
    """Fix whose shares a round takes."""
    return insert(round_participants)


def ask() -> ClauseElement:
    """From waiting to asked."""
    waits = rounds.c.state == literal_column("'waiting'")
    digests: dict[str, ColumnElement[str]] = {
        name: bindparam(f"new_{name}") for name in ("batch_digest", "round_digest")
    }
    return update(rounds).where(*_here(rounds), waits).values(state=literal_column("'asked'"), **digests)


def agree() -> ClauseElement:
    """From asked to agreed."""
    asked = (rounds.c.state == literal_column("'asked'"), rounds.c.contributors.is_(None))
    who = bindparam("new_contributors", type_=Text)
    return update(rounds).where(*_here(rounds), *asked).values(state=literal_column("'agreed'"), contributors=who)


def post() -> ClauseElement:
    """From agreed to posted."""
    agreed = rounds.c.state == literal_column("'agreed'")
    seq: ColumnElement[int] = bindparam("new_seq", type_=rounds.c.ledger_seq.type)
    return update(rounds).where(*_here(rounds), agreed).values(state=literal_column("'posted'"), ledger_seq=seq)


def open_round() -> ClauseElement:
    """From posted to opened."""
    posted = rounds.c.state == literal_column("'posted'")
    return update(rounds).where(*_here(rounds), posted).values(state=literal_column("'opened'"))


def has_share() -> ClauseElement:
    """Whether a share of a round was passed on."""
    return select(round_shares.c.number).where(*_here(round_shares))


def add_share() -> ClauseElement:
    """Note that a share of a round is passed on."""
    return insert(round_shares)


def holdings_of() -> ClauseElement:
    """What a tallier said last of a round."""
    this = (*_here(round_holdings), round_holdings.c.tallier_id == bindparam("of_tallier"))
    return select(*_words(round_holdings, "holdings")).where(*this)


def add_holdings() -> ClauseElement:
    """Keep what a tallier says of a round for the first time."""
    return insert(round_holdings)


def change_holdings() -> ClauseElement:
    """Keep what a tallier says of a round in place of what it said before."""
    this = (*_here(round_holdings), round_holdings.c.tallier_id == bindparam("of_tallier"))
    return update(round_holdings).where(*this).values(holdings=bindparam("new_holdings", type_=Text))


def entry_of() -> ClauseElement:
    """What an entry of the ledger is about."""
    table = ledger_entries.c
    return select(table.kind, table.reservation_id).where(table.seq == bindparam("of_seq"))


def release_of() -> ClauseElement:
    """What a round released."""
    return select(releases.c.data).where(*_here(releases))


def add_release() -> ClauseElement:
    """Store what a round releases."""
    return insert(releases)


def drop_sums() -> ClauseElement:
    """Drop the sums of single talliers."""
    table = aggregate_shares
    this = (table.c.round_digest == bindparam("digest"), table.c.data.is_not(None))
    return update(table).where(*this).values(data=literal_column("NULL"))


def sum_digest() -> ClauseElement:
    """Of a tallier's sum of a round."""
    table = aggregate_shares.c
    this = (table.round_digest == bindparam("digest"), table.tallier_id == bindparam("of_tallier"))
    return select(table.data_digest).where(*this)


def add_sum() -> ClauseElement:
    """Keep a tallier's sum."""
    return insert(aggregate_shares)


def state_of_digest() -> ClauseElement:
    """The state of the round that has a digest for good."""
    return select(rounds.c.state).where(rounds.c.round_digest == bindparam("digest"))


def _stamp() -> dict[str, ColumnElement[object]]:
    now = bindparam("now", type_=Text)
    before = type_coerce(jobs.c.updated_at, Text)
    # A clock set back does not make a later version look older.
    return {"version": jobs.c.version + literal_column("1"), "updated_at": case((before < now, now), else_=before)}


def touch() -> ClauseElement:
    """Raise the version of a job that is not finished."""
    is_live = is_unfinished()
    return update(jobs).where(jobs.c.job_id == bindparam("of_job"), is_live).values(**_stamp())


def move() -> ClauseElement:
    """Change the state of a job that is in one of the states that are not final."""
    is_live = is_unfinished()
    this = (jobs.c.job_id == bindparam("of_job"), is_live)
    return update(jobs).where(*this).values(state=bindparam("new_state"), **_stamp())
