"""Whose a task, a job and an entry of the ledger is, and what others see of it.

    administrator   everything
    requester       tasks that its token made or that were shared with it; jobs that its token submitted, nobody else's,
                    whoever's task they ask; budgets and the ledger, where jobs of others have no name
    viewer          budgets, the ledger, tasks, and jobs without what their requester wrote or may have named a file
                    after: no names, no details of problems, no labels, no models

What belongs to somebody else is answered as what does not exist, in the same words, so that an id that was guessed
or seen somewhere tells nothing. Creators are token ids; one stays the creator when the token is revoked, and then
administrators see what it made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from api.schema import JobView, LedgerEntryView, LedgerPage, Role
from labeler.errors import NotAllowed
from labeler.ledger.database import Connection
from labeler.ledger.jobs import JobRecord, JobStore, no_such_job
from labeler.ledger.tasks import TaskRecord, TaskShares, TaskStore, no_such_task

SOMEBODY = "another requester's job"
"""Stands for a reservation in the ledger as other requesters see it."""

_CHUNK = 200


@dataclass(frozen=True)
class Reader:
    """Who asks.

    Attributes:
        token_id: of the token the request came with.
    """

    token_id: str
    role: Role

    @property
    def is_admin(self) -> bool:
        """Whether it is an administrator."""
        return self.role == "admin"

    @property
    def only_own(self) -> str | None:
        """The token whose things alone are listed; None for whoever sees a list of everything."""
        return self.token_id if self.role == "requester" else None


@dataclass(frozen=True)
class Owners:
    """Looks up what a reader may have."""

    tasks: TaskStore
    jobs: JobStore
    shares: TaskShares

    def task(self, reader: Reader, task_id: str, *, connection: Connection | None = None) -> TaskRecord:
        """A task that the reader may see.

        Raises:
            NotFound: there is none, or it is neither the reader's nor shared with it.
        """
        record = self.tasks.get(task_id, connection=connection)
        if reader.role != "requester" or record.created_by == reader.token_id:
            return record
        if not self.shares.has(task_id, reader.token_id, connection=connection):
            raise no_such_task(task_id)
        return record

    def own_task(self, reader: Reader, task_id: str) -> TaskRecord:
        """A task of which the reader decides with whom it is shared.

        Raises:
            NotFound: see `task`.
            NotAllowed: it is only shared with the reader.
        """
        record = self.task(reader, task_id)
        if not reader.is_admin and record.created_by != reader.token_id:
            raise NotAllowed(
                f"task {task_id[:12]} was made with another token; only that one, or an administrator, shares it"
            )
        return record

    def job(self, reader: Reader, job_id: str, *, connection: Connection | None = None) -> JobRecord:
        """A job that the reader may see.

        Raises:
            NotFound: there is none, or another token submitted it.
        """
        record = self.jobs.get(job_id, connection=connection)
        if reader.role == "requester" and record.created_by != reader.token_id:
            raise no_such_job(job_id)
        return record


def shown_to(reader: Reader, view: JobView) -> JobView:
    """A job as this reader sees it."""
    if reader.role != "viewer":
        return view
    problem = view.problem
    if problem is not None:
        members = {"type": problem.type, "title": problem.title, "status": problem.status}
        problem = type(problem)(**members, detail="the details are for whoever submitted the job")
    return view.model_copy(update={"name": "", "problem": problem})


def own_spenders(
    spenders: Iterable[tuple[str, int]], by: str, creators: Callable[[Sequence[str]], dict[str, str]]
) -> tuple[tuple[str, int], ...]:
    """Who spent last, as told to one requester: reservations of others without their names."""
    listed = list(spenders)
    made = creators([_job_of(name) for name, _ in listed])
    return tuple((name if made.get(_job_of(name), by) == by else SOMEBODY, amount) for name, amount in listed)


def ledger_for(
    reader: Reader,
    creators: Callable[[Sequence[str]], dict[str, str]],
    page: Callable[[int, int], LedgerPage],
    *,
    after: int,
    limit: int,
    is_search: bool,
) -> LedgerPage:
    """A page of the ledger as this reader sees it.

    A requester reads amounts, accounts and times of everything, because budgets are everybody's; jobs of others bear
    no name. Where it searches, entries of others are left out: whether a text occurs in them would tell their names.

    Args:
        creators: job ids -> token ids.
        page: (after, limit) -> the page as an administrator sees it.
        is_search: whether the page holds only what matches a text.
    """
    if reader.role != "requester":
        return page(after, limit)
    items: list[LedgerEntryView] = []
    while True:
        found = page(after, max(limit, _CHUNK) if is_search else limit)
        made = creators([_job_of(entry.reservation_id) for entry in found.items])
        for entry in found.items:
            if made.get(_job_of(entry.reservation_id), reader.token_id) == reader.token_id:
                items.append(entry)
            elif not is_search:
                items.append(entry.model_copy(update={"reservation_id": SOMEBODY, "detail": {}}))
        if len(items) >= limit or found.next is None:
            break
        after = int(found.next)
    items = items[:limit]
    return LedgerPage(items=tuple(items), next=str(items[-1].seq) if len(items) == limit else None)


def _job_of(reservation_id: str) -> str:
    return reservation_id.partition("/")[0]
