"""What agents say of a job before anybody is asked, and who is asked then, as the coordinator keeps it.

job_answers     agent -> willing until, declined, or later; the last thing it said
job_asked       the agents that a job asks, fixed once for ever before the first question leaves
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from sqlalchemy import CheckConstraint, Column, Connection, ForeignKey, Table, Text, func, insert, select, update

from feature_store.journal.columns import Json, Moment, check_moment, one_of
from feature_store.journal.database import Database, metadata
from feature_store.journal.job_tables import FINISHED, JOB_TABLES, jobs, rounds
from feature_store.journal.joining import reading, writing
from feature_store.journal.rules import remain, stay
from labeler.errors import InvalidSetting, PrivacyRefusal

Answer = Literal["willing", "declined", "later"]

job_answers = Table(
    "job_answers",
    metadata,
    Column("job_id", Text, ForeignKey("jobs.job_id"), primary_key=True),
    Column("agent_id", Text, primary_key=True),
    Column("answer", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("sentence", Text, nullable=False),
    Column("until", Moment, nullable=True),
    CheckConstraint(one_of("answer", ("willing", "declined", "later")), name="answer"),
    CheckConstraint("(answer = 'willing') = (until IS NOT NULL)", name="until"),
    sqlite_strict=True,
)
stay(job_answers, ("job_id", "agent_id"))

job_asked = Table(
    "job_asked",
    metadata,
    Column("job_id", Text, ForeignKey("jobs.job_id"), primary_key=True),
    Column("agents", Json, nullable=False),
    sqlite_strict=True,
)
stay(job_asked, ("job_id", "agents"))
remain(job_asked)


@dataclass(frozen=True)
class AgentAnswer:
    """What one agent said last.

    Attributes:
        answer: "willing"; "declined", for good; "later", where it may be proposed again.
        reason: `problem_type` of its refusal; empty for a yes.
        sentence: for people; empty for a yes.
        until: how long a yes holds.
    """

    answer: Answer
    reason: str = ""
    sentence: str = ""
    until: datetime | None = None


class WillingnessStore:
    """See the module. Every method that writes can join a transaction by `connection`.

    Args:
        database: the coordinator's journal.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        database.create(*JOB_TABLES, job_answers, job_asked)

    def answers(self, job_id: str, *, connection: Connection | None = None) -> dict[str, AgentAnswer]:
        """Agent id -> what it said last."""
        return self.answers_of([job_id], connection=connection).get(job_id, {})

    def answers_of(
        self, job_ids: Collection[str], *, connection: Connection | None = None
    ) -> dict[str, dict[str, AgentAnswer]]:
        """Job id -> agent id -> what it said last; jobs of which nobody has said anything are left out."""
        found: dict[str, dict[str, AgentAnswer]] = {}
        query = select(job_answers).where(job_answers.c.job_id.in_(list(job_ids)))
        with reading(self._database, connection) as joined:
            for row in joined.execute(query):
                said = AgentAnswer(row.answer, row.reason, row.sentence, row.until)
                found.setdefault(row.job_id, {})[row.agent_id] = said
        return found

    def report(self, job_id: str, agent_id: str, said: AgentAnswer, *, connection: Connection | None = None) -> bool:
        """Keep what an agent says, in place of what it said before; whether that is news."""
        table = job_answers
        this = (table.c.job_id == job_id) & (table.c.agent_id == agent_id)
        values: dict[str, Any] = {
            "answer": said.answer,
            "reason": said.reason,
            "sentence": said.sentence,
            "until": None if said.until is None else check_moment(said.until),
        }
        with writing(self._database, connection) as joined:
            known = joined.execute(select(table).where(this)).first()
            if known is None:
                joined.execute(insert(table), {"job_id": job_id, "agent_id": agent_id} | values)
                return True
            if all(known._mapping[name] == value for name, value in values.items()):
                return False
            joined.execute(update(table).where(this).values(**values))
            return True

    def asked(self, job_id: str, *, connection: Connection | None = None) -> tuple[str, ...] | None:
        """The agents that a job asks; None while that is open, and in jobs of versions that asked everybody."""
        with reading(self._database, connection) as joined:
            found = joined.execute(select(job_asked.c.agents).where(job_asked.c.job_id == job_id)).scalar()
        return None if found is None else tuple(found)

    def asked_of(self, job_ids: Collection[str], *, connection: Connection | None = None) -> dict[str, tuple[str, ...]]:
        """`asked` of several jobs at once; those in which it is open are left out."""
        query = select(job_asked.c.job_id, job_asked.c.agents).where(job_asked.c.job_id.in_(list(job_ids)))
        with reading(self._database, connection) as joined:
            return {row.job_id: tuple(row.agents) for row in joined.execute(query)}

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
                joined.execute(insert(job_asked), {"job_id": job_id, "agents": list(agents)})

    def unasked_since(self, token_id: str, moment: datetime, *, connection: Connection | None = None) -> int:
        """How many jobs of a token, submitted since then, got answers of agents and ended before anybody was asked."""
        answered = select(job_answers.c.job_id).where(job_answers.c.job_id == jobs.c.job_id).exists()
        asked = select(rounds.c.job_id).where(rounds.c.job_id == jobs.c.job_id, rounds.c.state != "waiting").exists()
        query = select(func.count()).where(
            jobs.c.created_by == token_id,
            jobs.c.created_at >= check_moment(moment),
            jobs.c.state.in_(sorted(FINISHED)),
            answered,
            ~asked,
        )
        with reading(self._database, connection) as joined:
            return int(joined.execute(query).scalar_one())


Answers = Mapping[str, AgentAnswer]
