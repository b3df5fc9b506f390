"""What agents say of a job before anybody is asked, and who is asked then, as the coordinator keeps it.

job_answers     agent -> willing until, declined, or later; the last thing it said
job_asked       the agents that a job asks, fixed once for ever before the first question leaves
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import (
    CheckConstraint,
    Column,
    Connection,
    ForeignKey,
    Text,
    insert,
)

from feature_store.journal.by_ids import ByIds
from feature_store.journal.chain import time_text
from feature_store.journal.columns import Json, Moment, json_text, one_of
from feature_store.journal.database import Database, strict_table
from feature_store.journal.job_tables import JOB_TABLES
from feature_store.journal.joining import reading, writing
from feature_store.journal.prepared import Parameter, Prepared
from feature_store.journal.rules import keep, stay
from labeler.errors import InvalidSetting, PrivacyRefusal
from labeler.rounds.effects import Said

job_answers = strict_table(
    "job_answers",
    Column("job_id", Text, ForeignKey("jobs.job_id"), primary_key=True),
    Column("agent_id", Text, primary_key=True),
    Column("answer", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("sentence", Text, nullable=False),
    Column("until", Moment, nullable=True),
    CheckConstraint(one_of("answer", ("willing", "declined", "later")), name="answer"),
    CheckConstraint("(answer = 'willing') = (until IS NOT NULL)", name="until"),
)
stay(job_answers, ("job_id", "agent_id"))

job_asked = strict_table(
    "job_asked",
    Column("job_id", Text, ForeignKey("jobs.job_id"), primary_key=True),
    Column("agents", Json, nullable=False),
)
keep(job_asked)

ANSWERS = ByIds("SELECT job_id, agent_id, answer, reason, sentence, until FROM job_answers WHERE job_id IN {ids}")
_ASKED = ByIds("SELECT job_id, agents FROM job_asked WHERE job_id IN {ids}")


_ANSWER_OF = Prepared(
    "SELECT answer, reason, sentence, until FROM job_answers WHERE job_id = :job_id AND agent_id = :agent_id"
)
_ADD_ANSWER = Prepared(insert(job_answers))
_CHANGE_ANSWER = Prepared(
    "UPDATE job_answers SET answer = :answer, reason = :reason, sentence = :sentence, until = :until "
    "WHERE job_id = :job_id AND agent_id = :agent_id"
)
_UNPAID = ("refused", "failed", "cancelled", "expired")
_UNASKED = Prepared(f"""
SELECT count(*) FROM jobs WHERE created_by = :by AND created_at >= :since AND {one_of("state", _UNPAID)}
AND EXISTS (SELECT 1 FROM job_answers WHERE job_answers.job_id = jobs.job_id)
AND NOT EXISTS (SELECT 1 FROM rounds WHERE rounds.job_id = jobs.job_id AND rounds.state != 'waiting')""")
_ADD_ASKED = Prepared(insert(job_asked))


_DAY, _MINUTE = timedelta(days=1), timedelta(minutes=1)
_FAR = 1000
"""More jobs than a token ends in a minute, by the limit on its requests."""

_MOST_COUNTED = 10_000


class WillingnessStore:
    """See the module. Every method that writes can join a transaction by `connection`."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._counted: dict[str, tuple[datetime, int]] = {}
        database.create(*JOB_TABLES, job_answers, job_asked)

    def answers(self, job_id: str, *, connection: Connection | None = None) -> dict[str, Said]:
        """Agent id -> what it said last."""
        return self.answers_of([job_id], connection=connection).get(job_id, {})

    def answers_of(
        self, job_ids: Collection[str], *, connection: Connection | None = None
    ) -> dict[str, dict[str, Said]]:
        """Job id -> agent id -> what it said last; jobs of which nobody has said anything are left out."""
        with reading(self._database, connection) as joined:
            return answers_in(ANSWERS.all(joined, job_ids))

    def report(self, job_id: str, agent_id: str, said: Said, *, connection: Connection | None = None) -> bool:
        """Keep what an agent says, in place of what it said before; whether that is news."""
        until = None if said.until_s is None else time_text(datetime.fromtimestamp(said.until_s, UTC))
        values: dict[str, Parameter] = {
            "answer": said.answer, "reason": said.reason, "sentence": said.sentence, "until": until
        }  # fmt: skip
        with writing(self._database, connection) as joined:
            known = _ANSWER_OF.first(joined, job_id=job_id, agent_id=agent_id)
            if known == tuple(values.values()):
                return False
            keep = _ADD_ANSWER if known is None else _CHANGE_ANSWER
            keep.run(joined, job_id=job_id, agent_id=agent_id, **values)
            return True

    def asked(self, job_id: str, *, connection: Connection | None = None) -> tuple[str, ...] | None:
        """The agents that a job asks; None while that is open, and in jobs of versions that asked everybody."""
        return self.asked_of([job_id], connection=connection).get(job_id)

    def asked_of(self, job_ids: Collection[str], *, connection: Connection | None = None) -> dict[str, tuple[str, ...]]:
        """`asked` of several jobs at once; those in which it is open are left out."""
        with reading(self._database, connection) as joined:
            return {job_id: tuple(json.loads(agents)) for job_id, agents in _ASKED.all(joined, job_ids)}

    def fix_asked(self, job_id: str, agents: Collection[str], *, connection: Connection | None = None) -> None:
        """Fix whom a job asks, once for ever.

        Raises:
            InvalidSetting: nobody.
            PrivacyRefusal: others were fixed before.
        """
        if not agents:
            raise InvalidSetting("a job asks at least one agent")
        with writing(self._database, connection) as joined:
            known = self.asked(job_id, connection=joined)
            if known is not None and known != tuple(agents):
                raise PrivacyRefusal(f"whom job {job_id!r} asks is fixed, and their charges with it")
            if known is None:
                _ADD_ASKED.run(joined, job_id=job_id, agents=json_text(list(agents)))

    def unasked_lately(self, token_id: str, now: datetime, *, most: int, connection: Connection | None = None) -> int:
        """How many jobs of a token of the last 24 hours got answers of agents and ended before anybody was asked.

        Args:
            now: when the next one is submitted.
            most: a count that is more than `_FAR` below may be a minute old.
        """
        known = self._counted.get(token_id)
        if known is not None and known[0] <= now < known[0] + _MINUTE and known[1] < most - _FAR:
            return known[1]
        with reading(self._database, connection) as joined:
            (found,) = _UNASKED.first(joined, by=token_id, since=time_text(now - _DAY)) or (0,)
        if len(self._counted) >= _MOST_COUNTED:
            self._counted.clear()
        self._counted[token_id] = (now, int(found))
        return int(found)


Answers = Mapping[str, Said]


def answers_in(rows: Iterable[Sequence[Any]]) -> dict[str, dict[str, Said]]:
    """Job id -> agent id -> what it said last, out of rows of `ANSWERS`."""
    found: dict[str, dict[str, Said]] = {}
    for job_id, agent_id, answer, reason, sentence, until in rows:
        until_s = None if until is None else datetime.fromisoformat(until).timestamp()
        found.setdefault(job_id, {})[agent_id] = Said(answer, reason, sentence, until_s)
    return found
