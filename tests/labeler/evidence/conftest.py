"""Facts of two jobs of one task, as a coordinator's journal holds them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from labeler.batching import round_charges
from labeler.evidence.derive import derive, software
from labeler.evidence.document import (
    AccountCharge,
    AccountFacts,
    AgentRefusal,
    Evidence,
    Job,
    Journal,
    JournalFacts,
    RoundFacts,
    Scope,
    TaskFacts,
)
from labeler.setting import LEVELS
from labeler.task import Task
from tests.labeler.tasks import make_task

AGENTS = ("east", "north", "west")


task_with = partial(
    make_task, name="animals", classes=["cat", "dog", "owl"], k=5, sigma_votes=40.0, delta=1e-5, colluding_agents=1
)


def round_of(task: Task, *, number: int = 0, first: int = 0, questions: int = 20, entry: int = 20) -> RoundFacts:
    """A round that was charged, summed and released."""
    amounts = round_charges(task, questions)
    accounts = ("federation", *(f"agent:{name}" for name in AGENTS))
    return RoundFacts(
        number=number,
        first_question=first,
        questions=questions,
        charge="posted",
        posted_entry=entry,
        posted_at=f"2027-03-0{number + 1}T12:00:00.000000Z",
        charges=tuple(
            AccountCharge(account=account, level=level, nano=nano)
            for account in accounts
            for level, nano in amounts.items()
        ),
        contributors=AGENTS,
        round_digest=f"{entry:064x}",
        release_digest=f"{entry + 1:064x}",
    )


def facts_of(task: Task, *rounds: RoundFacts) -> JournalFacts:
    job = Job(
        job_id="job_1",
        state="completed",
        submitted_at="2027-03-01T09:00:00.000000Z",
        questions=sum(one.questions for one in rounds),
        asked=AGENTS,
        rounds=rounds,
    )
    declined = AgentRefusal(
        agent="north", said="declined", reason="policy-refusal", sentence="our policy allows k up to 3"
    )
    refused = Job(job_id="job_2", state="refused", problem="quorum-not-reached", questions=5, refusals=(declined,))
    spent = [(f"agent:{name}", level) for name in AGENTS for level in LEVELS]
    prices = [round_charges(task, one.questions) for one in rounds]
    total = {level: sum(one.get(level, 0) for one in prices) for level in LEVELS}
    return JournalFacts(
        scope=Scope(party="coordinator", party_id="coordinator", task=task.digest),
        journal=Journal(
            entries=60,
            head="ab" * 32,
            read_at="2027-04-01T00:00:00.000000Z",
            last_entry_at="2027-03-09T00:00:00.000000Z",
        ),
        delta="0.00001",
        tasks=(
            TaskFacts(
                digest=task.digest,
                task=task.model_dump(mode="json"),
                participants=AGENTS,
                created_at="2027-02-28T00:00:00.000000Z",
                jobs=(job, refused),
            ),
        ),
        accounts=tuple(
            AccountFacts.model_validate(
                {"account": name, "level": level, "cap_nano": None, "posted_nano": total[level], "reserved_nano": 0}
            )
            for name, level in spent
        ),
    )


def charging(task: Task, nano: Callable[[int], int]) -> JournalFacts:
    """Facts of a job of one round, whose every charge is what `nano` makes of the price."""
    whole = round_of(task)
    charges = tuple(one.model_copy(update={"nano": nano(one.nano)}) for one in whole.charges)
    return facts_of(task, whole.model_copy(update={"charges": charges}))


def with_first_round(facts: JournalFacts, **changes: object) -> JournalFacts:
    """The same facts, but for some of the first round."""
    job = facts.tasks[0].jobs[0]
    rounds = (job.rounds[0].model_copy(update=changes), *job.rounds[1:])
    edited = facts.tasks[0].model_copy(update={"jobs": (job.model_copy(update={"rounds": rounds}),)})
    return facts.model_copy(update={"tasks": (edited,)})


@pytest.fixture
def task() -> Task:
    return task_with()


@pytest.fixture
def evidence(task: Task) -> Evidence:
    return derive(facts_of(task, round_of(task), round_of(task, number=1, first=20, entry=40)), software("0.1.0"))
