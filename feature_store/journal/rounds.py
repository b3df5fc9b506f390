"""The steps of a round, each within a write transaction: done once, and the same again changes nothing.

    waiting --set_asked--> asked --fix_contributors--> agreed --set_posted--> posted --store_release--> opened

Whose shares are taken, and under which key, is fixed before anybody is asked (`fix_participants`): every tallier is
told the same however often it is told, and a key that was changed later brings no share into a round that runs.

Who contributes is fixed once for ever: sums over two sets of one round differ by single ballots under the same noise,
so whoever saw both could subtract. What is released is fixed once for ever: two answers to one query would be two
draws of noise, paid for once. Rounds of a finished job take no step: their charge may have been given back.

Every step returns True where it changed something.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from sqlalchemy import Connection, insert, select, update

from feature_store.journal import round_statements as sql
from feature_store.journal.aggregates import drop_sums
from feature_store.journal.columns import json_text
from feature_store.journal.job_tables import (
    FINISHED,
    ROUND_STATES,
    round_refusals,
)
from feature_store.journal.prepared import Parameter, Prepared
from labeler.errors import InvalidSetting, NotFound, NotReady, PrivacyRefusal, ProtocolViolation


def set_batches(connection: Connection, job_id: str, batches: Sequence[tuple[int, str, str]]) -> bool:
    """Tie rounds to the queries that were embedded; for good once they are asked."""
    changed = False
    for number, batch_digest, round_digest in batches:
        row = _row(connection, job_id, number)
        known = row.digests or _plan(connection, row)
        if known is not None:
            if known != (batch_digest, round_digest):
                raise PrivacyRefusal(
                    f"{_name(job_id, number)} was made of other queries, and stays that way: under one charge only one "
                    "batch is asked. Submit the job again"
                )
            continue
        _check_live(row)
        _check_no_twin(connection, row, round_digest)
        sql.ADD_PLAN.run(connection, job_id=job_id, number=number, batch_digest=batch_digest, round_digest=round_digest)
        changed = True
    return changed


def fix_participants(connection: Connection, job_id: str, number: int, verify_keys: Mapping[str, str]) -> bool:
    """Fix whose shares a round takes and the key of each, once for ever."""
    row = _row(connection, job_id, number)
    wanted = dict(verify_keys)
    if not wanted or not all(isinstance(key, str) and key for pair in wanted.items() for key in pair):
        raise InvalidSetting("the participants of a round are at least one agent, each with its verify key")
    known = sql.PARTICIPANTS_OF.first(connection, job_id=job_id, number=number)
    if known is not None:
        if json.loads(known[0]) != wanted:
            raise PrivacyRefusal(
                f"the participants of {_name(job_id, number)} and their keys are fixed; a key that was changed since "
                "counts from the next round on"
            )
        return False
    _check_live(row)
    sql.ADD_PARTICIPANTS.run(connection, job_id=job_id, number=number, verify_keys=json_text(wanted))
    return True


def set_asked(connection: Connection, job_id: str, number: int) -> bool:
    """Durable before the first question leaves: from here on nobody can say that nothing left."""
    row = _row(connection, job_id, number)
    if _reached(row, "asked"):
        return False
    _check_live(row)
    known = row.digests or _plan(connection, row)
    if known is None:
        raise NotReady(f"{_name(job_id, number)} has no queries yet; they are embedded first")
    _check_no_twin(connection, row, known[1])
    return _step(connection, row, sql.ASK, batch_digest=known[0], round_digest=known[1])


def note_share(connection: Connection, job_id: str, number: int) -> bool:
    """Durable before the first share is passed on: from here on no refusal proves that nothing left."""
    row = _row(connection, job_id, number)
    if sql.HAS_SHARE.first(connection, job_id=job_id, number=number) is not None:
        return False
    _check_live(row)
    sql.ADD_SHARE.run(connection, job_id=job_id, number=number)
    return True


def report_holdings(
    connection: Connection, job_id: str, number: int, tallier_id: str, holdings: Mapping[str, str | bytes]
) -> bool:
    """Keep what a tallier says it holds, in place of what it said before."""
    _row(connection, job_id, number)
    written = {agent: value.hex() if isinstance(value, bytes) else value for agent, value in holdings.items()}
    if not all(isinstance(value, str) and len(value) == 32 for value in written.values()):
        raise ProtocolViolation("a tallier reports one sharing id of 16 bytes for each agent it holds a share of")
    said = json_text(written)
    known = sql.HOLDINGS_OF.first(connection, job_id=job_id, number=number, tallier_id=tallier_id)
    if known is None:
        sql.ADD_HOLDINGS.run(connection, job_id=job_id, number=number, tallier_id=tallier_id, holdings=said)
    elif known[0] == said:
        return False
    else:
        sql.CHANGE_HOLDINGS.run(connection, job_id=job_id, number=number, tallier_id=tallier_id, holdings=said)
    return True


def report_refusal(
    connection: Connection, job_id: str, number: int, agent_id: str, sentence: str, is_final: bool
) -> bool:
    """Keep why an agent does not answer; a final refusal is not taken back by one that passes."""
    row = _row(connection, job_id, number)
    table = round_refusals
    this = (table.c.job_id == job_id) & (table.c.number == row.number) & (table.c.agent_id == agent_id)
    news = {"sentence": sentence, "kind": "final" if is_final else "passing"}
    known = connection.execute(select(table.c.sentence, table.c.kind).where(this)).first()
    if known is None:
        connection.execute(insert(table), {"job_id": job_id, "number": number, "agent_id": agent_id} | news)
        return True
    if (known.kind == "final" and not is_final) or dict(known._mapping) == news:
        return False
    connection.execute(update(table).where(this).values(**news))
    return True


def fix_contributors(connection: Connection, job_id: str, number: int, contributors: Collection[str]) -> bool:
    """Fix who is summed, once for ever."""
    row = _row(connection, job_id, number)
    wanted = sorted(set(contributors))
    if len(wanted) != len(contributors) or not wanted:
        raise InvalidSetting("the contributors of a round are at least one agent, each named once")
    if row.contributors is not None:
        known = json.loads(row.contributors)
        if known != wanted:
            raise PrivacyRefusal(
                f"the contributors of {_name(job_id, number)} are fixed ({len(known)} agents, now "
                f"{len(wanted)} others were named); two sums of one round would differ by single ballots"
            )
        return False
    _check_live(row)
    if row.state != "asked":
        raise NotReady(f"{_name(job_id, number)} is {row.state}; contributors are agreed on after agents were asked")
    return _step(connection, row, sql.AGREE, contributors=json_text(wanted))


def set_posted(connection: Connection, job_id: str, number: int, ledger_seq: int) -> bool:
    """Note the ledger's entry that posted the charge; only then a tallier may be asked for its sum."""
    row = _row(connection, job_id, number)
    if row.ledger_seq is not None:
        if row.ledger_seq != ledger_seq:
            raise ProtocolViolation(
                f"{_name(job_id, number)} was posted by entry {row.ledger_seq} of the ledger, not {ledger_seq}"
            )
        return False
    _check_live(row)
    if row.state != "agreed":
        raise NotReady(f"{_name(job_id, number)} is {row.state}; it is posted after its contributors were fixed")
    entry = sql.ENTRY_OF.first(connection, seq=ledger_seq)
    if entry is None or entry != ("post", f"{job_id}/{number}"):
        raise PrivacyRefusal(
            f"entry {ledger_seq} of the ledger does not post the charge of {_name(job_id, number)}; post the "
            f"reservation {job_id}/{number} in the same transaction"
        )
    return _step(connection, row, sql.POST, seq=ledger_seq)


def store_release(connection: Connection, job_id: str, number: int, data: bytes) -> bool:
    """Store what was opened, once for ever, and drop the talliers' single sums."""
    row = _row(connection, job_id, number)
    known = read_release(connection, job_id, number)
    if known is not None:
        if known != data:
            raise PrivacyRefusal(
                f"{_name(job_id, number)} was released before with other content; a round is opened once. Nothing was "
                "stored: find out who computed the second answer"
            )
        return False
    _check_live(row)
    if row.state != "posted":
        raise NotReady(f"{_name(job_id, number)} is {row.state}; only a round whose charge is posted is released")
    sql.ADD_RELEASE.run(connection, job_id=job_id, number=number, data=data)
    _step(connection, row, sql.OPEN_ROUND)
    drop_sums(connection, row.round_digest or "")
    return True


def read_release(connection: Connection, job_id: str, number: int) -> bytes | None:
    """What was released, or None."""
    found = sql.RELEASE_OF.first(connection, job_id=job_id, number=number)
    return None if found is None else bytes(found[0])


def _plan(connection: Connection, row: _Row) -> tuple[str, str] | None:
    found = sql.PLAN_OF.first(connection, job_id=row.job_id, number=row.number)
    return None if found is None else (found[0], found[1])


def _check_no_twin(connection: Connection, row: _Row, round_digest: str) -> None:
    """Refuse a round that is another one's twin: asked before, or waiting to be."""
    for twins in (sql.TWIN_ASKED, sql.TWINS_PLANNED):
        for job_id, number in twins.all(connection, digest=round_digest):
            if (job_id, number) != (row.job_id, row.number):
                raise PrivacyRefusal(
                    f"{_name(row.job_id, row.number)} would be the same as one of job {job_id!r}: its noise would be "
                    "the same again. Take queries of the task that were not asked yet"
                )


class _Row(NamedTuple):
    """A round as it is stored, with the state of its job."""

    job_id: str
    number: int
    state: str
    batch_digest: str | None
    round_digest: str | None
    contributors: str | None
    ledger_seq: int | None
    job_state: str

    @property
    def digests(self) -> tuple[str, str] | None:
        """What it asks for good; None while it waits."""
        return None if self.round_digest is None else (self.batch_digest or "", self.round_digest)


def _row(connection: Connection, job_id: str, number: int) -> _Row:
    row = sql.ROUND_ROW.first(connection, job_id=job_id, number=number)
    if row is None:
        raise NotFound(f"there is no {_name(job_id, number)}")
    return _Row(*row)


def _step(connection: Connection, row: _Row, step: Prepared, **values: Parameter) -> bool:
    """Change a round only where it still is as it was read; whoever comes second is told."""
    if step.run(connection, job_id=row.job_id, number=row.number, **values) != 1:
        raise NotReady(f"{_name(row.job_id, row.number)} was changed at the same time; look again")
    return True


def _reached(row: _Row, state: str) -> bool:
    return ROUND_STATES.index(row.state) >= ROUND_STATES.index(state)


def _check_live(row: _Row) -> None:
    if row.job_state in FINISHED:
        raise NotReady(
            f"job {row.job_id!r} is {row.job_state}, and its rounds take no further step: their charge may have been "
            "given back. Submit a new job"
        )


def _name(job_id: str, number: int) -> str:
    return f"round {number} of job {job_id!r}"
