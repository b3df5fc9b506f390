"""What is kept of a job and of its rounds, as frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, get_args

from feature_store.journal.columns import check_moment, json_text
from feature_store.journal.job_tables import FINISHED, JOB_STATES, ROUND_STATES
from feature_store.journal.joining import cursor_text
from labeler.errors import InvalidSetting
from labeler.rounds.effects import JobState as JobState
from labeler.rounds.effects import RoundState as RoundState

Source = Literal["images", "features"]


@dataclass(frozen=True)
class JobRecord:
    """A labelling job.

    Attributes:
        task_digest: of the task it asks queries of.
        name: for people.
        state: how far it is; the last five of JobState are final.
        images: how many were sent.
        num_queries: how many are asked.
        first_query: number of the first of them within the task.
        strategy: how queries are chosen among the images.
        count: how many, where the strategy needs it.
        seed: of the choice.
        source: what was sent.
        created_at, updated_at, expires_at: with a time zone.
        created_by: token id.
        problem: RFC 9457, why it ended; None while nothing is wrong.
        version: goes up at every change.

    Raises:
        InvalidSetting: the state is unknown, a number is negative, or a time has no time zone.
    """

    job_id: str
    task_digest: str
    name: str
    state: JobState
    images: int
    num_queries: int
    first_query: int
    strategy: str
    count: int | None
    seed: int
    source: Source
    created_at: datetime
    updated_at: datetime
    expires_at: datetime
    created_by: str
    problem: dict[str, Any] | None = None
    version: int = 1

    def __post_init__(self) -> None:
        if self.state not in JOB_STATES:
            raise InvalidSetting(f"a job is {', '.join(JOB_STATES)}; found {self.state!r}")
        if self.source not in get_args(Source):
            raise InvalidSetting(f"the source of a job is images or features, found {self.source!r}")
        if min(self.images, self.num_queries, self.first_query) < 0 or self.version < 1:
            raise InvalidSetting("images, num_queries and first_query of a job are at least 0, its version at least 1")
        for at in (self.created_at, self.updated_at, self.expires_at):
            check_moment(at)
        json_text(self.problem)

    @property
    def is_finished(self) -> bool:
        """Whether it never changes again."""
        return self.state in FINISHED

    @property
    def cursor(self) -> str:
        """The position of this job in a list; the next page begins after it."""
        return cursor_text(self.created_at, self.job_id)


@dataclass(frozen=True)
class RoundCharge:
    """The charge of one round in the ledger.

    Attributes:
        state: reserved, then posted or void (given back).
        seq: number of the first entry of that state.
    """

    state: Literal["reserved", "posted", "void"]
    seq: int


@dataclass(frozen=True)
class RoundRecord:
    """One batch of a job.

    Attributes:
        number: 0, 1, 2, ... within the job.
        first_query: number of its first query within the task.
        state: waiting > asked > agreed > posted > opened.
        batch_digest, round_digest: empty until the queries are embedded, and until the model is known that a step of
            training asks with; then the same as long as the job lasts, and for ever once they were asked.
        contributors: the agents that are summed, sorted; empty until agreed on, then for ever the same.
        holdings: tallier id -> agent id -> sharing id in hexadecimal, as last reported.
        refusals: agent id -> its reason.
        final_refusals: those agents among them that will not answer when asked again.
        ledger_seq: the entry that posted the charge.
        participants: agent id -> key its shares must be signed with; empty until it is fixed, then for ever the same.
        has_shares: whether a share of it was passed on to a tallier, or was about to be.
        charge: what became of its charge, as the ledger has it; None where nothing was reserved.
    """

    job_id: str
    number: int
    first_query: int
    num_queries: int
    state: RoundState = "waiting"
    batch_digest: str = ""
    round_digest: str = ""
    contributors: tuple[str, ...] = ()
    holdings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    refusals: Mapping[str, str] = field(default_factory=dict)
    final_refusals: frozenset[str] = frozenset()
    ledger_seq: int | None = None
    participants: Mapping[str, str] = field(default_factory=dict)
    has_shares: bool = False
    charge: RoundCharge | None = None

    def __post_init__(self) -> None:
        if self.state not in ROUND_STATES:
            raise InvalidSetting(f"a round is {', '.join(ROUND_STATES)}; found {self.state!r}")
        if self.number < 0 or self.first_query < 0 or self.num_queries < 1:
            raise InvalidSetting("a round has a number and first query of at least 0, and at least 1 query")


@dataclass(frozen=True)
class Idempotency:
    """What a requester calls one request by, so that sending it twice makes one job.

    Attributes:
        token_id: whose key it is.
        key: of the requester's choosing.
        body_digest: of the request, so that another one under the same key is found out.
        job_id: the job it made.
    """

    token_id: str
    key: str
    body_digest: str
    job_id: str


def check_rounds(job: JobRecord, rounds: list[RoundRecord]) -> None:
    """Refuse rounds that are not a job's: each query of the job belongs to exactly one of them.

    Raises:
        InvalidSetting: a round of another job, one that has begun, or queries left out, twice or beyond the job's.
    """
    following = job.first_query
    for number, one in enumerate(rounds):
        if one.job_id != job.job_id or one.number != number or one.state != "waiting":
            raise InvalidSetting("the rounds of a new job are its own, numbered from 0, and waiting")
        if one.first_query != following:
            raise InvalidSetting("the rounds of a job follow each other: each query belongs to exactly one")
        following += one.num_queries
    if rounds and following != job.first_query + job.num_queries:
        raise InvalidSetting(
            f"the rounds of a job hold its {job.num_queries} queries, found {following - job.first_query}"
        )
    if not rounds and not job.is_finished:
        raise InvalidSetting("a job that is not finished has at least one round")
