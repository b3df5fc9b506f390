"""The steps of a round, each within a write transaction: done once, and the same again changes nothing.

    waiting --set_asked--> asked --fix_contributors--> agreed --set_posted--> posted --store_release--> opened

The participants of a round and their keys are fixed before anybody is asked (`fix_participants`). So every tallier
always gets the same list, and a key that was changed later brings no share into a round that runs.

The contributors are fixed once and permanently: sums over two sets of one round differ by single ballots under the same
noise, so a party with both could subtract. The release is fixed once and permanently: two answers to one query would be
two draws of noise, paid for once. Rounds of a finished job take no step: their charge may have been given back.

Every step returns True if it changed something.

A tallier's single sum is fixed by the first that arrives (`AggregateStore`): another one of the same round would be
over other agents. When the release is stored the sums are dropped; their digests stay.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from sqlalchemy import Connection, Row, bindparam, func, select

from labeler.errors import InvalidSetting, NotFound, NotReady, PrivacyRefusal, ProtocolViolation
from labeler.ledger.database import Database, insert_rows, select_rows, update_rows
from labeler.ledger.ledger import WRITTEN_OFF
from labeler.ledger.lifetimes import SET_ASIDE
from labeler.ledger.schema import (
    FINISHED,
    JOB_STATES,
    aggregate_shares,
    jobs,
    ledger_entries,
    planned_batches,
    releases,
    round_holdings,
    round_participants,
    round_refusals,
    round_shares,
    rounds,
    tasks,
)
from labeler.task import Task, parse_task

UNFINISHED = jobs.c.state.in_(sorted(set(JOB_STATES) - FINISHED))
"""The condition that a job is not finished: by the states it may have, so that an index finds the few."""


def set_batches(connection: Connection, job_id: str, batches: Sequence[tuple[int, str, str]]) -> bool:
    """Tie rounds to the queries that were embedded; permanent once they are asked."""
    changed = False
    for number, batch_digest, round_digest in batches:
        row = _row(connection, job_id, number)
        known = _digests(connection, row)
        if known is not None:
            if known != (batch_digest, round_digest):
                raise PrivacyRefusal(
                    f"{_name(job_id, number)} was made of other queries, and stays that way: under one charge only one "
                    "batch is asked. Submit the job again"
                )
            continue
        _check_live(row)
        _check_no_twin(connection, row, round_digest)
        values = {"batch_digest": batch_digest, "round_digest": round_digest}
        insert_rows(connection, planned_batches, {"job_id": job_id, "number": number} | values)
        changed = True
    return changed


def fix_participants(connection: Connection, job_id: str, number: int, verify_keys: Mapping[str, str]) -> bool:
    """Fix which agents' shares a round takes and the key of each, once and permanently."""
    row = _row(connection, job_id, number)
    wanted = dict(verify_keys)
    if not wanted or not all(isinstance(key, str) and key for pair in wanted.items() for key in pair):
        raise InvalidSetting("the participants of a round are at least one agent, each with its verify key")
    known = select_rows(connection, round_participants, job_id=job_id, number=number).first()
    if known is not None:
        if known.verify_keys != wanted:
            raise PrivacyRefusal(
                f"the participants of {_name(job_id, number)} and their keys are fixed; a key that was changed since "
                "counts from the next round on"
            )
        return False
    _check_live(row)
    insert_rows(connection, round_participants, {"job_id": job_id, "number": number, "verify_keys": wanted})
    return True


def set_asked(connection: Connection, job_id: str, number: int) -> bool:
    """Record, before the first question leaves, that nobody can claim any more that nothing left."""
    row = _row(connection, job_id, number)
    if row.state != "waiting":
        return False
    _check_live(row)
    known = _digests(connection, row)
    if known is None:
        raise NotReady(f"{_name(job_id, number)} has no queries yet; they are embedded first")
    _check_no_twin(connection, row, known[1])
    return _step(connection, row, "asked", batch_digest=known[0], round_digest=known[1])


def note_share(connection: Connection, job_id: str, number: int) -> bool:
    """Record, before the first share is passed on, that no refusal proves any more that nothing left."""
    row = _row(connection, job_id, number)
    if select_rows(connection, round_shares, job_id=job_id, number=number).first() is not None:
        return False
    _check_live(row)
    insert_rows(connection, round_shares, {"job_id": job_id, "number": number})
    return True


def report_holdings(
    connection: Connection, job_id: str, number: int, tallier_id: str, holdings: Mapping[str, str | bytes]
) -> None:
    """Store which shares a tallier reports to hold, in place of its earlier report."""
    written = {agent: value.hex() if isinstance(value, bytes) else value for agent, value in holdings.items()}
    if not all(isinstance(value, str) and len(value) == 32 for value in written.values()):
        raise ProtocolViolation("a tallier reports one sharing id of 16 bytes for each agent it holds a share of")
    news, this = {"holdings": written}, {"job_id": job_id, "number": number, "tallier_id": tallier_id}
    if not update_rows(connection, round_holdings, news, **this):
        _row(connection, job_id, number)  # NotFound, if there is no such round
        insert_rows(connection, round_holdings, this | news)


def report_refusal(
    connection: Connection, job_id: str, number: int, agent_id: str, sentence: str, is_final: bool
) -> bool:
    """Store why an agent does not answer; a temporary refusal does not replace a final one."""
    this = {"job_id": job_id, "number": number, "agent_id": agent_id}
    news = {"sentence": sentence, "kind": "final" if is_final else "passing"}
    known = select_rows(connection, round_refusals, **this).first()
    if known is None:
        _row(connection, job_id, number)  # NotFound, if there is no such round
        insert_rows(connection, round_refusals, this | news)
    elif (not is_final and known.kind == "final") or dict(known._mapping) == this | news:
        return False
    else:
        update_rows(connection, round_refusals, news, **this)
    return True


def fix_contributors(connection: Connection, job_id: str, number: int, contributors: Collection[str]) -> bool:
    """Fix which agents are summed, once and permanently."""
    row = _row(connection, job_id, number)
    wanted = sorted(set(contributors))
    if len(wanted) != len(contributors) or not wanted:
        raise InvalidSetting("the contributors of a round are at least one agent, each named once")
    if row.contributors is not None:
        known = row.contributors
        if known != wanted:
            raise PrivacyRefusal(
                f"the contributors of {_name(job_id, number)} are fixed ({len(known)} agents, now "
                f"{len(wanted)} others were named); two sums of one round would differ by single ballots"
            )
        return False
    _check_live(row)
    if row.state != "asked":
        raise NotReady(f"{_name(job_id, number)} is {row.state}; contributors are agreed on after agents were asked")
    return _step(connection, row, "agreed", contributors=wanted)


def set_posted(connection: Connection, job_id: str, number: int, ledger_seq: int) -> bool:
    """Note the ledger's entry that posted the charge; only afterwards may a tallier be asked for its sum."""
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
    entry = select_rows(connection, ledger_entries, seq=ledger_seq).first()
    if entry is None or (entry.kind, entry.reservation_id) != ("post", reservation_id(job_id, number)):
        raise PrivacyRefusal(
            f"entry {ledger_seq} of the ledger does not post the charge of {_name(job_id, number)}; post the "
            f"reservation {reservation_id(job_id, number)} in the same transaction"
        )
    return _step(connection, row, "posted", ledger_seq=ledger_seq)


def store_release(connection: Connection, job_id: str, number: int, data: bytes) -> bool:
    """Store the release, once and permanently, and drop the talliers' single sums."""
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
    insert_rows(connection, releases, {"job_id": job_id, "number": number, "data": data})
    _step(connection, row, "opened")
    update_rows(connection, aggregate_shares, {"data": None}, round_digest=row.round_digest)
    return True


def read_release(connection: Connection, job_id: str, number: int) -> bytes | None:
    """Return the release, or None."""
    found = select_rows(connection, releases, job_id=job_id, number=number).first()
    return None if found is None else bytes(found.data)


def live_round(connection: Connection, round_digest: str) -> Sequence[Row[Any]]:
    """Return the rounds with a digest: permanent, or planned by a job that is not finished."""
    asked = connection.execute(_ASKED, {"digest": round_digest}).all()
    return [*asked, *connection.execute(_PLANNED, {"digest": round_digest})]


# Built once: building a statement costs several times as much as running it.
_ROUND = (
    select(rounds, jobs.c.state.label("job_state"))
    .join(jobs, jobs.c.job_id == rounds.c.job_id)
    .where(rounds.c.job_id == bindparam("of_job"), rounds.c.number == bindparam("of_number"))
)
_ASKED = select(rounds).where(rounds.c.round_digest == bindparam("digest"))
# No index may begin with the rounds without a digest: every round that was never asked is one.
_PLANNED = (
    select(rounds)
    .join(jobs, jobs.c.job_id == rounds.c.job_id)
    .join(
        planned_batches, (planned_batches.c.job_id == rounds.c.job_id) & (planned_batches.c.number == rounds.c.number)
    )
    .where(
        planned_batches.c.round_digest == bindparam("digest"),
        func.coalesce(rounds.c.round_digest, "") == "",
        UNFINISHED,
    )
    .order_by(rounds.c.job_id, rounds.c.number)
)


def _row(connection: Connection, job_id: str, number: int) -> Row[Any]:
    """Return a round as it is stored, with the state of its job."""
    row = connection.execute(_ROUND, {"of_job": job_id, "of_number": number}).first()
    if row is None:
        raise NotFound(f"there is no {_name(job_id, number)}")
    return row


def _digests(connection: Connection, row: Row[Any]) -> tuple[str, str] | None:
    """Return the batch and round digests: permanent, or as planned; None before the queries are known."""
    if row.round_digest is not None:
        return (row.batch_digest, row.round_digest)
    found = select_rows(connection, planned_batches, job_id=row.job_id, number=row.number).first()
    return None if found is None else (found.batch_digest, found.round_digest)


def _check_no_twin(connection: Connection, row: Row[Any], round_digest: str) -> None:
    """Refuse a round whose twin was asked before, or waits to be."""
    for twin in live_round(connection, round_digest):
        if (twin.job_id, twin.number) != (row.job_id, row.number):
            raise PrivacyRefusal(
                f"{_name(row.job_id, row.number)} would be the same as one of job {twin.job_id!r}: its noise would be "
                "the same again. Take queries of the task that were not asked yet"
            )


def _step(connection: Connection, row: Row[Any], state: str, **values: Any) -> bool:
    """Change a round only if it is still as it was read; a caller that comes second gets an error."""
    still = {"job_id": row.job_id, "number": row.number, "state": row.state}
    if update_rows(connection, rounds, {"state": state} | values, **still) != 1:
        raise NotReady(f"{_name(row.job_id, row.number)} was changed at the same time; look again")
    return True


def _check_live(row: Row[Any]) -> None:
    if row.job_state in FINISHED:
        raise NotReady(
            f"job {row.job_id!r} is {row.job_state}, and its rounds take no further step: their charge may have been "
            "given back. Submit a new job"
        )


FEDERATION: Final = "federation"
"""The account of the whole federation, at the coordinator."""


def agent_account(agent_id: str) -> str:
    """Return the name of an agent's account, in its own journal and in the coordinator's."""
    return f"agent:{agent_id}"


def reservation_id(job_id: str, number: int) -> str:
    """Return the ledger's name for the charge of one round."""
    return f"{job_id}/{number}"


def proposed_id(job_id: str) -> str:
    """Return the ledger's name for a job's worst case, until the asked agents are known."""
    return f"{job_id}/proposed"


def job_of(name: str) -> str:
    """Return the job that a reservation of a round, or of a whole job, is for."""
    return name.partition("/")[0]


def _name(job_id: str, number: int) -> str:
    return f"round {number} of job {job_id!r}"


class AggregateStore:
    """All sums of talliers that wait to be combined. Secret until then: never printed."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def put(
        self,
        round_digest: str,
        tallier_id: str,
        data: bytes,
        *,
        is_kept: bool = True,
        connection: Connection | None = None,
    ) -> None:
        """Store one tallier's sum; the same bytes again change nothing, also after they were dropped.

        Args:
            is_kept: False if the round is opened in this transaction: only the digest is stored, and the sum never
                reaches the disk.

        Raises:
            NotFound: there is no such round.
            NotReady: its charge is not posted yet.
            PrivacyRefusal: this tallier has sent another sum of this round.
        """
        digest = hashlib.sha256(data).hexdigest()
        with self._database.writing(connection) as joined:
            known = select_rows(joined, aggregate_shares, round_digest=round_digest, tallier_id=tallier_id).first()
            if known is not None and known.data_digest == digest:
                return
            if known is not None:
                raise PrivacyRefusal(
                    f"tallier {tallier_id!r} has sent another sum of round {round_digest[:12]!r}; a round is summed "
                    "once, so the second is refused for ever. Find out why its journal forgot the first"
                )
            asked = next(iter(live_round(joined, round_digest)), None)
            if asked is None:
                raise NotFound(f"there is no round {round_digest[:12]!r}")
            if asked.state != "posted":
                raise NotReady(
                    f"round {round_digest[:12]!r} is {asked.state}; a sum is taken while its round is posted only"
                )
            row = {"round_digest": round_digest, "tallier_id": tallier_id, "data_digest": digest}
            insert_rows(joined, aggregate_shares, row | {"data": data if is_kept else None})

    def of_all(
        self, round_digests: Collection[str], *, connection: Connection | None = None
    ) -> dict[str, dict[str, bytes]]:
        """Return round -> tallier id -> its sum, of those that have arrived and were not dropped."""
        found: dict[str, dict[str, bytes]] = {}
        if not round_digests:
            return found
        with self._database.reading(connection) as joined:
            for row in select_rows(joined, aggregate_shares, round_digest=list(round_digests)):
                if row.data is None:
                    continue
                found.setdefault(row.round_digest, {})[row.tallier_id] = bytes(row.data)
        return found


_AT_ONCE: Final = 500


class PostedRounds:
    """The number of rounds of a task and a size that each account of a coordinator was charged for, for good.

    Entries of a ledger only come, so each call reads those since the last one. `labeler.batching.person_spent` adds
    up what they cost a person. What is set aside for votes for life released nothing, and a write-off is known by its
    account (`Ledger.written_off`); every other charge that belongs to no known round counts as one of an unknown task.
    """

    def __init__(self) -> None:
        self._seq = 0
        self._counts: dict[str, dict[tuple[str, int], int]] = {}
        self._tasks: dict[str, Task | None] = {}

    def read(self, connection: Connection) -> dict[str, list[tuple[Task | None, int, int]]]:
        """Return (task, queries, rounds) by account; the task is None where it is not known."""
        entry = ledger_entries.c
        query = select(entry.seq, entry.account, entry.reservation_id)
        new: dict[tuple[str, str], None] = {}
        last = self._seq
        for row in connection.execute(query.where(entry.seq > last, entry.kind == "post").order_by(entry.seq)):
            last = row.seq
            # Both levels of a charge have an entry, of one transaction, and so has a part that was held.
            key = (row.account, str(row.reservation_id).removesuffix("/held"))
            if not key[1].startswith((WRITTEN_OFF, f"{SET_ASIDE}/")):
                new[key] = None
        known = self._rounds_of(sorted({name for _, name in new}), connection)
        for account, name in new:
            counts = self._counts.setdefault(account, {})
            priced = known.get(name, ("", 1))
            counts[priced] = counts.get(priced, 0) + 1
        self._seq = last
        return {
            account: [(self._task(digest, connection), queries, many) for (digest, queries), many in counts.items()]
            for account, counts in self._counts.items()
        }

    def _rounds_of(self, names: Sequence[str], connection: Connection) -> dict[str, tuple[str, int]]:
        job_ids = sorted({job_of(name) for name in names})
        found: dict[str, tuple[str, int]] = {}
        for start in range(0, len(job_ids), _AT_ONCE):
            query = (
                select(rounds.c.job_id, rounds.c.number, rounds.c.num_queries, jobs.c.task_digest)
                .join(jobs, jobs.c.job_id == rounds.c.job_id)
                .where(rounds.c.job_id.in_(job_ids[start : start + _AT_ONCE]))
            )
            for row in connection.execute(query):
                found[reservation_id(row.job_id, row.number)] = (row.task_digest, row.num_queries)
        return found

    def _task(self, digest: str, connection: Connection) -> Task | None:
        if digest not in self._tasks:
            body = connection.execute(select(tasks.c.body).where(tasks.c.digest == digest)).scalar()
            self._tasks[digest] = None if body is None else parse_task(json.loads(body))
        return self._tasks[digest]
