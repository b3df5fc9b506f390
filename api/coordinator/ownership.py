"""Ownership of tasks, jobs and ledger entries, and what other readers see of them.

    administrator   Everything.
    requester       Tasks that its token made or that were shared with it, and only jobs that its token submitted.
                    Budgets and the ledger, in which other requesters' jobs have no name.
    viewer          Budgets, the ledger, tasks, and jobs without any text or file name from their requester: no names,
                    no details of problems, no labels, no models.

A request for somebody else's thing gets the same answer as for one that does not exist, so a guessed or observed id
reveals nothing. Creators are token ids. A revoked token remains the creator, and administrators still see what it made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from api.schema import JobView, LedgerEntryView, LedgerPage, Role
from labeler.errors import NotAllowed
from labeler.ledger.database import Connection
from labeler.ledger.jobs import JobRecord, JobStore, no_such_job
from labeler.ledger.rounds import job_of
from labeler.ledger.tasks import TaskRecord, TaskStore, no_such_task

SOMEBODY = "another requester's job"
"""Replaces a reservation's name in the ledger for other requesters."""

_CHUNK = 200
_CHUNKS = 4
"""Chunks that one page of a search looks through; the next page goes on from there."""


@dataclass(frozen=True)
class Reader:
    """The token behind a request.

    Attributes:
        token_id: the id of that token.
    """

    token_id: str
    role: Role

    @property
    def is_admin(self) -> bool:
        """Return whether it is an administrator."""
        return self.role == "admin"

    @property
    def only_own(self) -> str | None:
        """Return the token id that lists are restricted to; None for a reader who may list everything."""
        return self.token_id if self.role == "requester" else None


@dataclass(frozen=True)
class Owners:
    """Looks up tasks and jobs that a reader may see."""

    tasks: TaskStore
    jobs: JobStore

    def task(self, reader: Reader, task_id: str) -> TaskRecord:
        """Return a task that the reader may see.

        Raises:
            NotFound: no such task, or neither the reader's nor shared with it.
        """
        record = self.tasks.get(task_id)
        if reader.role != "requester" or record.created_by == reader.token_id:
            return record
        if not self.tasks.is_shared(task_id, reader.token_id):
            raise no_such_task(task_id)
        return record

    def own_task(self, reader: Reader, task_id: str) -> TaskRecord:
        """Return a task that the reader may share with others.

        Raises:
            NotFound: see `task`.
            NotAllowed: it is only shared with the reader.
        """
        record = self.task(reader, task_id)
        if not reader.is_admin and record.created_by != reader.token_id:
            raise NotAllowed(
                f"task {task_id[:12]} was made with another token; only that token or an administrator's can share it"
            )
        return record

    def job(self, reader: Reader, job_id: str, *, connection: Connection | None = None) -> JobRecord:
        """Return a job that the reader may see.

        Raises:
            NotFound: no such job, or another token submitted it.
        """
        record = self.jobs.get(job_id, connection=connection)
        if reader.role == "requester" and record.created_by != reader.token_id:
            raise no_such_job(job_id)
        return record


def shown_to(reader: Reader, view: JobView) -> JobView:
    """Return a job as this reader sees it."""
    if reader.role != "viewer":
        return view
    problem = view.problem
    if problem is not None:
        members = {"type": problem.type, "title": problem.title, "status": problem.status}
        problem = type(problem)(**members, detail="only the job's requester sees the details")
    return view.model_copy(update={"name": "", "problem": problem})


def own_spenders(
    spenders: Iterable[tuple[str, int]], by: str, creators: Callable[[Sequence[str]], dict[str, str]]
) -> tuple[tuple[str, int], ...]:
    """Return the last spenders for one requester: without the names of others' reservations."""
    listed = list(spenders)
    made = creators([job_of(name) for name, _ in listed])
    return tuple((name if made.get(job_of(name), by) == by else SOMEBODY, amount) for name, amount in listed)


def ledger_for(
    reader: Reader,
    creators: Callable[[Sequence[str]], dict[str, str]],
    page: Callable[[int, int], LedgerPage],
    *,
    after: int,
    limit: int,
    is_search: bool,
) -> LedgerPage:
    """Return a page of the ledger as this reader sees it.

    A requester reads all amounts, accounts and times, because budgets are shared; jobs of others have no name. In a
    search, entries of others are left out, because a match would reveal their names. Then a page may hold fewer
    entries than asked for, or none, and still name the next one.

    Args:
        creators: job ids -> token ids.
        page: (after, limit) -> the page as an administrator sees it.
        is_search: whether the page holds only entries that match a text.
    """
    if reader.role != "requester":
        return page(after, limit)
    items: list[LedgerEntryView] = []
    for _ in range(_CHUNKS if is_search else 1):
        found = page(after, max(limit, _CHUNK) if is_search else limit)
        made = creators([job_of(entry.reservation_id) for entry in found.items])
        for entry in found.items:
            if made.get(job_of(entry.reservation_id), reader.token_id) == reader.token_id:
                items.append(entry)
            elif not is_search:
                items.append(entry.model_copy(update={"reservation_id": SOMEBODY, "detail": {}}))
        if len(items) >= limit:
            return LedgerPage(items=tuple(items[:limit]), next=str(items[limit - 1].seq))
        if found.next is None:
            return LedgerPage(items=tuple(items), next=None)
        after = int(found.next)
    return LedgerPage(items=tuple(items), next=str(after))
