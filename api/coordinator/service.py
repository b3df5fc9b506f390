"""The coordinator: all state and work of one process, behind the calls that routes make.

This module connects the parts: the journal and its stores, the mailbox, the keys, the threads. Each part is
documented in its own module. No HTTP appears here. Routes about results, parties, prices, messages and readiness call
`results`, `roster`, `estimates`, `mailroom` and `health`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import shutil
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import ExitStack, suppress
from functools import partial

from anyio import to_thread

from api.coordinator import submission
from api.coordinator.budgets import Budgets, ledger_page, open_accounts, signed_evidence
from api.coordinator.config import CoordinatorConfig
from api.coordinator.coordinator_thread import CoordinatorThread
from api.coordinator.estimates import Estimates, Prices
from api.coordinator.invitations import Invitations
from api.coordinator.mailroom import Mailroom
from api.coordinator.ownership import Owners, Reader, ledger_for, shown_to
from api.coordinator.query_budgets import JobBudgets, QueryBudgetPages, RunningPrices
from api.coordinator.results import Results
from api.coordinator.retention import RetentionThread
from api.coordinator.roster import Health, Roster
from api.coordinator.stores import RoomProbe, Stores, clear_incoming, own_keys, owning_home
from api.coordinator.tasks import create_task, task_view
from api.coordinator.telemetry import spans_of_environment
from api.coordinator.uploads import Upload
from api.coordinator.views import ViewCache, read_views, with_progress
from api.limits import Uploads
from api.schema import (
    FINISHED,
    BudgetView,
    JobPage,
    JobRequest,
    JobState,
    JobView,
    LedgerPage,
    QueryBudgetPage,
    TaskPage,
    TaskRequest,
    TaskView,
)
from feature_store.results.evidence import SignedEvidence
from feature_store.results.questions import UPLOAD
from labeler.driver.mail import Mailbox
from labeler.driver.mail_redis import RedisMailbox
from labeler.errors import NotAuthenticated, NotFound, TryAgain
from labeler.ledger.evidence import EvidenceScope
from labeler.ledger.rounds import agent_account
from labeler.ledger.tasks import TaskRecord
from labeler.rounds.effects import Patience
from labeler.system.clock import Clock
from labeler.system.clock import now_utc as utc_now
from labeler.system.faults import fault_point
from labeler.system.keys import PartyKeys

log = logging.getLogger("labeler.coordinator")

WATCH_S = 2.0
"""Watchers of a job query SQL at least this often, so they work without Redis."""

LEAST_BETWEEN_S = 0.25
"""Shortest pause between two reported changes, except for the end: a small job makes eight changes in less."""


class Coordinator:
    """See the module. `start` begins its threads, `stop` ends them and closes everything.

    Calls about a job or a task raise NotFound if it does not exist or the reader may not see it.

    Args:
        stores: the journal, already checked.
        mailbox: Redis; it need not answer yet.
    """

    def __init__(
        self, config: CoordinatorConfig, stores: Stores, keys: PartyKeys, mailbox: Mailbox, *, clock: Clock = utc_now
    ) -> None:
        self.config = config
        self.stores = stores
        self.tokens = stores.tokens
        self.ledger = stores.ledger
        self._views = ViewCache(stores)
        self._keys = keys
        self._mailbox = mailbox
        self._clock = clock
        self._stopping = threading.Event()
        self._owned = ExitStack()
        self._query_budgets = JobBudgets(config, stores, RunningPrices(config.home))
        self._owners = Owners(stores.tasks, stores.jobs)
        self.results = Results(config, stores, self._owners, self._query_budgets)
        self.uploads = Uploads(config.limits.max_token_bytes, free=lambda: shutil.disk_usage(config.home).free)
        self._retention = RetentionThread(config, stores, self.results, on_ended=self.uploads.release)
        for kept in self._retention.uploads():
            self.uploads.keep(*kept)
        self._turns = CoordinatorThread(
            home=config.home,
            stores=self.stores,
            keys=keys,
            mailbox=mailbox,
            patience=Patience(patience_s=config.timing.patience_s, ask_again_s=config.timing.ask_again_s),
            backbone_of=config.backbone,
            max_pixels=config.limits.max_pixels,
            max_job_pixels=config.limits.max_job_pixels,
            requester_of=stores.tokens.name_of,
        )
        self.driver = self._turns.driver
        if config.telemetry == "otlp":
            self.driver.observe = spans_of_environment(clock=clock)
        self.mailroom = Mailroom(
            keys=keys,
            stores=self.stores,
            mailbox=mailbox,
            post_office=self._turns.post_office,
            deliver=self.driver.deliver,
            relays=self.driver.relays,
        )
        self.prices = Prices()
        self._submissions = submission.Submissions(config, stores, self._owners, self.prices, self._taken)
        self._budgets = Budgets(stores.ledger, config.delta)
        self._query_budget_pages = QueryBudgetPages(config, stores, self._owners, self._query_budgets)
        self.estimates = Estimates(config, stores, self._owners, self.prices, self._budgets)
        self.invitations = Invitations(
            config,
            stores.database,
            stores.parties,
            keys,
            open_accounts=lambda agent_id: open_accounts(stores.ledger, config, [agent_id]),
            clock=clock,
        )
        self.roster = Roster(config, stores, keys.public, self.mailroom.witnesses, self.invitations, clock=clock)
        self.health = Health(
            config,
            stores.ledger,
            witnesses=self.mailroom.witnesses,
            roster=self.roster,
            mailbox=mailbox,
            room=RoomProbe(config.home, stores.database).check,
            waiting_for_embedder=lambda: self._turns.questions.waiting_for_embedder,
        )

    @classmethod
    def open(cls, config: CoordinatorConfig, *, clock: Clock = utc_now, mailbox: Mailbox | None = None) -> Coordinator:
        """Open everything in a home; keys are made at the first start.

        Args:
            mailbox: None for Redis, as the settings say.

        Raises:
            JournalInUse: another coordinator runs on this home, or on its journal.
            JournalBroken, JournalBehind, UnsafeStorage: the journal cannot be trusted.
            UnsafeStorage: Redis may evict what it holds.
            InvalidSetting: the keys that parties pinned are missing, or the upload path is not a folder.
        """
        with ExitStack() as owned:
            # Before anything else: a second coordinator must not touch the first one's work in progress.
            owned.enter_context(owning_home(config.home))
            clear_incoming(config.home)
            stores = Stores.open(config, clock=clock)
            owned.callback(stores.database.close)
            keys = own_keys(config.home, is_known=bool(stores.parties.list()))
            mailbox = RedisMailbox(config.redis_url) if mailbox is None else mailbox
            if isinstance(mailbox, RedisMailbox) and not mailbox.is_guarded:
                log.warning(
                    "redis_url names a TCP port without a password: whoever reaches it reads and writes the mail; name "
                    "a socket of mode 700 (docs/deploy.md), or a password"
                )
            try:
                mailbox.check()
            except TryAgain:
                # Redis may come later; until then /readyz says what is missing.
                log.warning("redis cannot be reached yet")
            coordinator = cls(config, stores, keys, mailbox, clock=clock)
            coordinator._owned = owned.pop_all()
        return coordinator

    def start(self) -> None:
        """Start processing jobs."""
        self._turns.start()
        self._retention.start()

    def stop(self) -> None:
        """Finish the current step and close everything. Jobs continue at the next start."""
        self._stopping.set()
        self._turns.stop()
        self._retention.stop()
        self.prices.stop()
        self.results.stop()
        self._query_budgets.prices.stop()
        self._mailbox.close()
        self.stores.database.close()
        self._owned.close()

    async def aclose(self) -> None:
        """Close connections that belong to the event loop; call it there, before `stop`."""
        await self._mailbox.aclose()

    @property
    def is_stopping(self) -> bool:
        """Return whether `stop` was called."""
        return self._stopping.is_set()

    # Tasks and prices.

    def create_task(self, request: TaskRequest, *, by: str) -> TaskView:
        """See api.coordinator.tasks."""
        nonce = secrets.token_hex(16)
        record = create_task(request, by=by, config=self.config, stores=self.stores, nonce=nonce)
        return task_view(record)

    def task(self, task_id: str, *, reader: Reader) -> TaskView:
        """Return one task."""
        return self._task_views([self._owners.task(reader, task_id)], reader)[0]

    def tasks(self, after: str | None, limit: int, *, reader: Reader) -> TaskPage:
        """Return a page of tasks that this reader may see, newest first."""
        found = self.stores.tasks.list(after=after, limit=limit, open_to=reader.only_own)
        following = found[-1].cursor if len(found) == limit else None
        return TaskPage(items=self._task_views(found, reader), next=following)

    def share_task(self, task_id: str, token_id: str, *, reader: Reader) -> TaskView:
        """Let another token submit into a task.

        Raises:
            NotFound: there is no such task, or no token that could use it.
            NotAllowed: the task is another's.
        """
        record = self._owners.own_task(reader, task_id)
        if not self.tokens.is_active(token_id):
            raise NotFound(f"there is no active token {token_id[:100]!r}; its holder finds its id at /v1/whoami")
        self.stores.tasks.share(record.digest, token_id)
        return self._task_views([record], reader)[0]

    def unshare_task(self, task_id: str, token_id: str, *, reader: Reader) -> TaskView:
        """Stop a token from submitting more jobs into a task; its earlier jobs stay its own. Raises as `share_task`."""
        record = self._owners.own_task(reader, task_id)
        self.stores.tasks.unshare(record.digest, token_id)
        return self._task_views([record], reader)[0]

    # Jobs.

    def submit(
        self, request: JobRequest, upload: Upload | None, *, reader: Reader, idempotency_key: str | None = None
    ) -> JobView:
        """Reserve the price of a job and queue it; see api.coordinator.submission.

        Raises:
            BudgetExceeded: an account does not cover it; the refusal is stored as a refused job.
            JournalBehind: charges are missing from the journal, so no bound can be promised.
        """
        self.health.check_trusted()
        return self._submissions.submit(request, upload, reader=reader, idempotency_key=idempotency_key)

    def _taken(self, job_id: str, token_id: str) -> None:
        fault_point("coordinator.reserved")
        path = self.config.home / "jobs" / job_id / UPLOAD
        with suppress(FileNotFoundError):
            self.uploads.keep(job_id, token_id, path.stat().st_size)
        if not path.exists():  # the job has ended meanwhile
            self.uploads.release(job_id)
        self.driver.wake(job_id)
        self._query_budgets.is_ready(self.stores.jobs.get(job_id))

    def job(self, job_id: str, *, reader: Reader) -> JobView:
        """Return one job."""
        with self.stores.database.read() as connection:
            found = self._owners.job(reader, job_id, connection=connection)
            view = self._views.view(found, connection=connection)
        return shown_to(reader, with_progress(view, self.config.home))

    def jobs(
        self, after: str | None, limit: int, states: Collection[JobState] | None = None, *, reader: Reader
    ) -> JobPage:
        """Return a page of jobs that this reader may see, newest first, in a fixed number of statements."""
        found = self.stores.jobs.list(after=after, limit=limit, states=states, created_by=reader.only_own)
        following = found[-1].cursor if len(found) == limit else None
        views = (with_progress(view, self.config.home) for view in read_views(found, self.stores))
        items = tuple(shown_to(reader, view) for view in views)
        return JobPage(items=items, next=following)

    def job_counts(self) -> Counter[str]:
        """Count unfinished jobs by state."""
        return Counter(job.state for job in self.stores.jobs.unfinished())

    def cancel(self, job_id: str, *, reader: Reader) -> JobView:
        """Stop a job; asked queries stay charged, the others return to their task."""
        self._owners.job(reader, job_id)
        view = submission.cancel(job_id, stores=self.stores)
        self.driver.wake(job_id)
        self._turns.questions.withdraw(job_id)
        self._retention.wake()
        return view

    def forget(self, job_id: str, *, reader: Reader) -> JobView:
        """Delete an ended job's upload and results; its charges and digests stay. See api.coordinator.retention.

        Raises:
            NotReady: it has not ended.
        """
        self._owners.job(reader, job_id)
        self._retention.forget(job_id)
        return self.job(job_id, reader=reader)

    async def events(
        self, job_id: str, after: str, *, reader: Reader, within_s: float = math.inf
    ) -> AsyncIterator[tuple[str, JobView]]:
        """Yield a job at once, and again at every change, until it is finished or the reader's token is revoked.

        Args:
            after: version last seen, as text; the same version is sent again only where its preparation gets on.
            reader: its token is checked before every event and at every tick, so a revocation ends open streams.
            within_s: the stream ends after this many seconds. Every wait in it ends by then, so no caller has to cancel
                one. A library may take a cancellation for its own error, and wait again.
        """
        seen, stage = after, ""
        position, until_s = "", time.monotonic() + within_s
        while not self.is_stopping:
            is_open, view = await to_thread.run_sync(self._changed, job_id, seen, reader)
            if not is_open:
                return
            if view is not None:
                is_known = str(view.version) == seen and stage in ("", view.stage)
                seen, stage = str(view.version), view.stage
                if not is_known or view.state in FINISHED:
                    yield seen, view
                if view.state in FINISHED:
                    return
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return
            try:
                position = await self._next_change(job_id, position, min(WATCH_S, left_s))
            except TryAgain:
                await asyncio.sleep(min(WATCH_S, left_s))

    async def _next_change(self, job_id: str, position: str, wait_s: float) -> str:
        """Wait for a job to change, then briefly for more changes unless it has ended; return the event position.

        Raises:
            TryAgain: no change is reported now.
        """
        until_s = time.monotonic() + min(LEAST_BETWEEN_S, wait_s)
        events = await self._mailbox.watch(job_id, position, wait_s)
        while events:
            position = events[-1][0]
            left_s = until_s - time.monotonic()
            if left_s <= 0 or any(has_ended for _, has_ended in events):
                break
            events = await self._mailbox.watch(job_id, position, left_s)
        return position

    def _changed(self, job_id: str, seen: str, reader: Reader) -> tuple[bool, JobView | None]:
        """Return whether the reader may keep watching, and the job if it may have changed since `seen`, or has ended.

        If nothing changed, this reads two rows, whatever the number of batches.
        """
        if not self.tokens.is_active(reader.token_id):
            return False, None
        job = self._owners.job(reader, job_id)
        if str(job.version) == seen and job.state not in (*FINISHED, "queued"):
            return True, None
        return True, shown_to(reader, with_progress(self._views.view(job), self.config.home))

    def check_token(self, reader: Reader) -> None:
        """Refuse a token that was revoked after its request arrived.

        Raises:
            NotAuthenticated: it was revoked.
        """
        if not self.tokens.is_active(reader.token_id):
            raise NotAuthenticated("the token was revoked while its request was under way; ask with another one")

    # Budgets.

    def budget(self, agent_id: str | None = None) -> BudgetView:
        """Return every account, or those of one agent.

        Raises:
            NotFound: there is no such agent.
        """
        account = None if agent_id is None else agent_account(agent_id)
        return self._budgets.view(account=account)

    def query_budgets(self, job_id: str | None, after: str | None, limit: int, *, reader: Reader) -> QueryBudgetPage:
        """Return a page of budgets by query; see api.coordinator.query_budgets."""
        return self._query_budget_pages.page(job_id, after, limit, reader=reader)

    def ledger_page(
        self, after: int, limit: int, account: str | None, search: str | None, *, reader: Reader
    ) -> LedgerPage:
        """Return ledger entries, oldest first; api.coordinator.ownership hides other requesters' names."""
        return ledger_for(
            reader,
            self.stores.jobs.creators,
            partial(ledger_page, self.ledger, account=account, search=search),
            after=after,
            limit=limit,
            is_search=search is not None,
        )

    def evidence(self, wanted: EvidenceScope) -> SignedEvidence:
        """Return signed evidence of questions and charges from the verified journal; see api.coordinator.budgets."""
        return signed_evidence(
            wanted, database=self.stores.database, keys=self._keys, delta=self.config.delta, clock=self._clock
        )

    def _task_views(self, records: Sequence[TaskRecord], reader: Reader) -> tuple[TaskView, ...]:
        digests = [record.digest for record in records]
        shares, returned = self.stores.tasks.shared_with(digests), self.stores.tasks.returned(digests)
        return tuple(
            task_view(
                record,
                returned=returned[record.digest],
                shared_with=shares[record.digest] if reader.is_admin or record.created_by == reader.token_id else (),
            )
            for record in records
        )


__all__ = ["Coordinator", "Stores", "utc_now"]
