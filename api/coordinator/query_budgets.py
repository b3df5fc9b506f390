"""The budget of every query of the service's jobs: `labeler.query_budgets` over the journal, read in pages.

    /v1/budget/queries   newest job first, and in a job its last question first;
    label files          the same columns, stored with a job's answers and from then on read there.

A charge is what the ledger's entry says, and a total is what the federation's account had posted right after it. So a
row never changes, and jobs of earlier versions have rows, too. Only the prices of winners take long to compute. A
process computes them once per kind of task, from the moment a job is submitted, and `prices/` keeps them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from api.coordinator.config import CoordinatorConfig
from api.coordinator.ownership import Owners, Reader
from api.coordinator.stores import Stores
from api.fair_pool import FairPool
from api.schema import QueryBudgetPage, QueryBudgetView
from feature_store.results.job_process import JobProcess
from feature_store.results.questions import LABELS, read_parquet
from labeler.errors import InvalidSetting, Unavailable
from labeler.ledger.jobs import JobRecord, RoundRecord
from labeler.ledger.ledger import Ledger
from labeler.ledger.rounds import FEDERATION
from labeler.query_budgets import COLUMNS, ChargedRounds, query_budgets
from labeler.release import release_from_bytes
from labeler.rounds.effects import ABSTAINED_LABEL, AnswerStatus
from labeler.setting import LEVELS, Level
from labeler.task import Task

WAIT_S = 3.0
"""How long a request waits for prices of winners until it is told to retry: reads share few threads."""

PRICES = "prices"
"""Folder of a home with the prices of winners, a file per kind of task."""

LOOKED_THROUGH = 200
"""Most jobs without any row that one page looks through; the next one goes on from there."""

_NAMES = ("query_id", "source", "status")


class RunningPrices:
    """The prices C(1), C(2), ... of tasks whose questions have running shares: computed once per kind, and kept."""

    def __init__(self, home: Path) -> None:
        self._folder = home / PRICES
        self._pool = FairPool("prices of questions", threads=1)
        self._process = JobProcess()
        self._is_stopping = False

    def want(
        self, task: Task, queries: int, *, by: str, is_needed: Callable[[], bool] = lambda: True
    ) -> Future[None] | None:
        """Start computing the prices of up to `queries` questions; None if there is nothing to do.

        Args:
            by: the requester, whose turn it takes.
            is_needed: asked when the turn comes.
        """
        if self._read(task, queries) is not None:
            return None
        piece = partial(self._make, task, queries, is_needed)
        return self._pool.submit(by, piece, key=f"{self._path(task).name} {queries}")

    def get(self, task: Task, queries: int, *, by: str, wait_s: float) -> Mapping[Level, Sequence[int]]:
        """Return `labeler.query_budgets.running_prices` of at least `queries` questions.

        Raises:
            Unavailable: they take longer than a request waits.
        """
        made = self.want(task, queries, by=by)
        if made is not None:
            with suppress(TimeoutError, CancelledError):
                made.result(wait_s)
        found = self._read(task, queries)
        if found is None:
            raise Unavailable("the price of each of the job's questions is being computed; ask again in a moment")
        return found

    def stop(self) -> None:
        """End the process; missing prices are computed at the next request."""
        self._is_stopping = True
        self._pool.stop(wait_s=0)
        self._process.end()

    def _read(self, task: Task, queries: int) -> Mapping[Level, Sequence[int]] | None:
        if not queries or task.traits.share_kind(task) != "running":
            return {}
        with suppress(OSError, ValueError, KeyError, TypeError):
            kept = json.loads(self._path(task).read_bytes())
            prices: dict[Level, list[int]] = kept["prices"]
            if kept["queries"] >= queries and all(_are_running(prices[level], queries) for level in prices):
                return {level: prices[level] for level in LEVELS if level in prices}
        return None

    def _make(self, task: Task, queries: int, is_needed: Callable[[], bool]) -> None:
        if self._read(task, queries) is not None or not is_needed():
            return
        self._folder.mkdir(mode=0o700, exist_ok=True)
        of = {"task": task.model_dump(mode="json"), "queries": queries}
        order = {"prices": {"path": str(self._path(task)), "of": of}}
        for _ in range(2):
            # The process may have ended by design, after long idling; so try once more.
            code = self._process.carry_out(json.dumps(order).encode(), is_over=lambda: self._is_stopping)
            if code is not None or self._is_stopping:
                return

    def _path(self, task: Task) -> Path:
        return self._folder / f"{hashlib.sha256(task.kind.encode()).hexdigest()}.json"


def _are_running(prices: Sequence[object], queries: int) -> bool:
    """Return whether these may be running prices of `queries` questions; a damaged file is replaced."""
    whole = [price for price in prices if type(price) is int]
    return queries <= len(whole) == len(prices) and all(0 <= one <= other for one, other in pairwise([0, *whole]))


class JobBudgets:
    """Computes the budget of every query of a job from its ledger entries."""

    def __init__(self, config: CoordinatorConfig, stores: Stores, prices: RunningPrices) -> None:
        self._config = config
        self._stores = stores
        self.prices = prices

    def is_ready(self, job: JobRecord) -> bool:
        """Return whether `columns` need not wait; start what is missing, unless the job ends without a charge."""
        task, rounds = self._read(job)
        is_needed = partial(self._may_be_charged, job.job_id)
        return self.prices.want(task, _largest(rounds), by=job.created_by, is_needed=is_needed) is None

    def _may_be_charged(self, job_id: str) -> bool:
        job = self._stores.jobs.get(job_id)
        return not job.is_finished or bool(_paid(self._stores.jobs.rounds(job_id)))

    def of_job(self, job: JobRecord) -> dict[str, list[Any]]:
        """As `columns`, of a job whose task and rounds are read here."""
        return self.columns(job, *self._read(job))

    def columns(
        self, job: JobRecord, task: Task, rounds: Sequence[RoundRecord], *, wait_s: float = WAIT_S
    ) -> dict[str, list[Any]]:
        """Return the columns of `labeler.query_budgets.COLUMNS` for each row of a job's labels.

        Raises:
            Unavailable: they take longer than a request waits.
        """
        prices = self.prices.get(task, _largest(_paid(rounds)), by=job.created_by, wait_s=wait_s)
        charged = charged_rounds(rounds, self._stores.ledger)
        found = query_budgets(task, charged, rows=_rows(job), prices=prices)
        return found.columns(FEDERATION, self._config.delta)

    def _read(self, job: JobRecord) -> tuple[Task, list[RoundRecord]]:
        with self._stores.database.read() as connection:
            task = self._stores.tasks.get(job.task_digest, connection=connection).task
            return task, self._stores.jobs.rounds(job.job_id, connection=connection)


def charged_rounds(rounds: Sequence[RoundRecord], ledger: Ledger) -> list[ChargedRounds]:
    """Return what the federation was charged for a job's rounds; 0 for those given back or not yet final."""
    found = []
    for seq, together in groupby(rounds, key=lambda one: 0 if one.charge is None else one.charge.seq):
        same = list(together)
        # The federation's entries, one a level, are the first of a reservation.
        last, amounts = seq + len(LEVELS) - 1, {}
        if same[0].charge is not None and same[0].charge.state == "posted":
            entries = ledger.entries(after=seq - 1, limit=len(LEVELS), account=FEDERATION)
            amounts = {entry.level: entry.amount for entry in entries if entry.seq <= last}
        nano: dict[Level, int] = {level: amounts.get(level, 0) for level in LEVELS}
        spent = ledger.posted_at(last, account=FEDERATION) if seq else {}
        after: dict[Level, int] = {level: spent.get((FEDERATION, level), 0) for level in LEVELS}
        found.append(ChargedRounds(tuple(one.num_queries for one in same), nano, after))
    return found


class QueryBudgetPages:
    """Pages of budgets by query."""

    def __init__(self, config: CoordinatorConfig, stores: Stores, owners: Owners, budgets: JobBudgets) -> None:
        self._config = config
        self._stores = stores
        self._owners = owners
        self._budgets = budgets

    def page(self, job_id: str | None, after: str | None, limit: int, *, reader: Reader) -> QueryBudgetPage:
        """Return the budgets of queries, newest first: of one job, or of all jobs that the reader may see.

        A question has a row once its round's charge is final, and one that was given back has a share of 0. The list
        of all jobs passes over those whose prices are being computed and names them: no requester delays others.

        Args:
            after: `next` of the page before.

        Raises:
            NotFound: there is no such job, or the reader may not see it.
            InvalidSetting: `after` is no such text.
            Unavailable: prices of the one job's winners take longer than a request waits.
        """
        items: list[QueryBudgetView] = []
        waiting: list[str] = []
        below: int | None = None
        job: JobRecord | None = None
        if after is not None:
            at, _, number = after.partition("~")
            if not number.isascii() or not number.isdigit() or len(number) > 12 or at != (job_id or at):
                raise InvalidSetting(
                    "`after` is the `next` of a page of the same list; leave it out for the first page"
                )
            job, below = self._owners.job(reader, at), int(number)
        elif job_id is not None:
            job = self._owners.job(reader, job_id)
        for looked in range(LOOKED_THROUGH):
            if job is not None:
                try:
                    rows = self._rows(job, below, limit - len(items), reader=reader)
                except Unavailable:
                    if job_id is not None:
                        raise
                    rows = []
                    waiting.append(job.job_id)
                items += rows
                below = rows[-1].number if rows else 0
                if len(items) == limit or (looked == LOOKED_THROUGH - 1 and job_id is None):
                    is_end = job_id is not None and below == 0
                    following_page = None if is_end else _cursor(job, below)
                    return QueryBudgetPage(items=tuple(items), waiting=tuple(waiting), next=following_page)
            if job_id is not None:
                break
            following = self._stores.jobs.list(
                after=None if job is None else job.cursor, limit=1, created_by=reader.only_own
            )
            if not following:
                break
            job, below = following[0], None
        return QueryBudgetPage(items=tuple(items), waiting=tuple(waiting), next=None)

    def _rows(self, job: JobRecord, below: int | None, limit: int, *, reader: Reader) -> list[QueryBudgetView]:
        """Return rows of a job with numbers below a number, the last ones first."""
        end = _rows(job) if below is None else min(below, _rows(job))
        if not end:
            return []
        with self._stores.database.read() as connection:
            task = self._stores.tasks.get(job.task_digest, connection=connection).task
        table = self._table(job)
        if table is not None and set(COLUMNS) <= set(table.schema.names):
            start = max(0, end - limit)
            shown = table.slice(start, end - start).to_pylist()
            numbers = list(range(start, end))
        else:
            rounds = self._stores.jobs.rounds(job.job_id)
            columns = self._budgets.columns(job, task, rounds, wait_s=0.0)  # lists are read in turn
            numbers = [number for number in _settled(job, rounds, task) if number < end][-limit:]
            named = self._named(job, rounds, table)
            shown = [
                {name: named[name][number] for name in _NAMES} | {name: columns[name][number] for name in COLUMNS}
                for number in numbers
            ]
        if reader.role == "viewer":  # it reads no name of a file
            shown = [
                row | {"query_id": _generic(number), "source": None} for row, number in zip(shown, numbers, strict=True)
            ]
        about = {"job_id": job.job_id, "release": task.release}
        views = [
            QueryBudgetView.model_validate(row | about | {"number": number})
            for row, number in zip(shown, numbers, strict=True)
        ]
        return views[::-1]

    def _table(self, job: JobRecord) -> pa.Table | None:
        """Return the columns about names and budgets in a job's stored answers; None if there are none."""
        if job.state != "completed":
            return None
        path = self._config.home / "jobs" / job.job_id / LABELS
        for columns in ((*_NAMES, *COLUMNS), _NAMES):  # files of earlier versions have no budgets
            with suppress(OSError, pa.ArrowException, KeyError):
                return read_parquet(path, columns=columns)
        return None

    def _named(self, job: JobRecord, rounds: Sequence[RoundRecord], table: pa.Table | None) -> dict[str, list[Any]]:
        """Return the names and the status of each row; where files are gone, names are numbers alone."""
        if table is not None:
            return {name: table[name].to_pylist() for name in _NAMES}
        statuses: list[str] = []
        for one in rounds:
            stored = self._stores.jobs.release(job.job_id, one.number) if one.state == "opened" else None
            if stored is None:
                statuses += [AnswerStatus.FAILED_QUORUM] * one.num_queries
            else:
                abstained = release_from_bytes(stored).labels == ABSTAINED_LABEL
                statuses += np.where(abstained, AnswerStatus.ABSTAINED, AnswerStatus.ANSWERED).tolist()
        count = _rows(job)
        if job.strategy == "weights":
            answered = job.state == "completed"
            statuses = [AnswerStatus.ANSWERED if answered else AnswerStatus.FAILED_QUORUM] * count
        return {"query_id": [_generic(number) for number in range(count)], "source": [None] * count, "status": statuses}


def _cursor(job: JobRecord, below: int) -> str:
    return f"{job.job_id}~{below}"


def _generic(number: int) -> str:
    return f"query-{number:06d}"


def _paid(rounds: Sequence[RoundRecord]) -> list[RoundRecord]:
    return [one for one in rounds if one.charge is not None and one.charge.state == "posted"]


def _largest(rounds: Sequence[RoundRecord]) -> int:
    return max((one.num_queries for one in rounds), default=0)


def _rows(job: JobRecord) -> int:
    """Return the number of rows of a job's labels: its questions, or its images where a model was asked for."""
    return job.images if job.strategy == "weights" else job.num_queries


def _settled(job: JobRecord, rounds: Sequence[RoundRecord], task: Task) -> list[int]:
    """Return the numbers of the rows whose charge is final."""
    finals = [job.is_finished or (one.charge is not None and one.charge.state != "reserved") for one in rounds]
    if task.traits.share_kind(task) == "shared":
        return list(range(_rows(job))) if any(finals) else []
    start = rounds[0].first_query if rounds else 0
    return [
        number
        for one, is_final in zip(rounds, finals, strict=True)
        if is_final
        for number in range(one.first_query - start, one.first_query - start + one.num_queries)
    ]
