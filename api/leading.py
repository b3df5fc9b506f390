"""Coordinators side by side: each is a candidate for the one lease, and follows whoever has it until it gets it.

    candidate   looks every third of a lease: takes it where nobody has it, renews it where it is its own
    leads       opens the journal as its owner, which ends the owner before, and serves everything
    follows     answers what is only read from the shared journal and home, and passes the rest on to who leads
    lost it     ends: whoever supervises it starts it again, as a candidate. From the moment at which its lease could be
                over by its own clock it answers nothing: what it remembers (tokens, jobs) may be another's to change

Only who leads drives jobs and writes: the ledger is one chain with one pen, and what the coordinator says to a party
carries rising numbers, so two that drive would only wait for each other. What others share is the work of answering.
No write of one that has lost its lease is kept, whatever it still tries (`feature_store.journal.leases`).
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from api.app import create_app
from api.coordinator.config import CoordinatorConfig
from api.coordinator.home_lock import owning_home
from api.coordinator.service import Coordinator
from api.passing_on import PassingOn, check_peer_url
from api.patience import Stopping
from api.refusals import refusal
from feature_store.journal.leases import Leases
from labeler.errors import JournalInUse, LabelerError, Unavailable

log = logging.getLogger("labeler.leading")

LOOKS = 3
"""In the time of one lease."""


@dataclass
class _Role:
    """An application and the coordinator behind it."""

    coordinator: Coordinator
    app: ASGIApp
    end_streams: Callable[[], None]


class SideBySide:
    """One of several coordinators; an ASGI application whose parts change when it begins to lead.

    Args:
        url: where the other coordinators reach this one.
        on_lost: called once where the lease is lost; the process has to end.

    Raises:
        JournalInUse: a coordinator that shares with nobody runs on this home.
        InvalidSetting: the journal is no PostgreSQL database, or the others would send tokens there in clear.
        Unavailable: it cannot be reached.
    """

    def __init__(self, settings: CoordinatorConfig, *, url: str, on_lost: Callable[[], None]) -> None:
        table = settings.side_by_side
        if table is None:
            raise Unavailable("[side_by_side] is not in the settings")
        check_peer_url(url)
        self._settings = settings
        self._lease_s = table.lease_s
        self._held = ExitStack()
        self._held.enter_context(owning_home(settings.home, side_by_side=True))
        self._leases = Leases(settings.journal, url=url, lease_s=table.lease_s)
        self._on_lost = on_lost
        self._stop = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._leader: _Role | None = None
        self._reader: _Role | None = None
        self._opening: threading.Thread | None = None
        self._until_s: float | None = None
        self._passing_on = PassingOn(delta=settings.delta, ca_file=table.ca_file)
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)
        self.failure: LabelerError | None = None
        """Why this process has to end."""

    @property
    def leads(self) -> bool:
        """Whether this process serves everything by itself."""
        return self._leader is not None

    @property
    def _has_lease(self) -> bool:
        """Whether the lease lasts, counted from before it was last asked for: nobody else leads yet."""
        until_s = self._until_s
        return until_s is not None and time.monotonic() < until_s

    def start(self) -> None:
        """Begin to look at the lease; the first look is over when this returns."""
        self._look()
        self._thread.start()

    def stop(self) -> None:
        """Stop whatever this process is, and let the next one begin."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=10.0)
        if self._opening is not None:
            self._opening.join(timeout=10.0)
        for role in (self._leader, self._reader):
            if role is not None:
                role.coordinator.stop()
        if self._until_s is not None:
            try:
                self._leases.give_back()
            except LabelerError as error:
                log.warning("the lease ends by itself", extra={"problem": error.problem_type})
        self._leases.close()
        self._held.close()

    def end_streams(self) -> None:
        """Let long answers end."""
        for role in (self._leader, self._reader):
            if role is not None:
                role.end_streams()

    # Requests.

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request by what this process is now."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        leader, reader = self._leader, self._reader
        if leader is not None and not self._has_lease:
            error = Unavailable("this coordinator may have lost its lease; another takes over. Ask again")
            await refusal(error, instance=scope["path"], delta=self._settings.delta)(scope, receive, send)
        elif leader is not None:
            await leader.app(scope, receive, send)
        elif reader is not None and is_only_read(scope):
            await reader.app(scope, receive, send)
        else:
            await self._passing_on(scope, receive, send)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        self._loop = asyncio.get_running_loop()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        self.end_streams()
        for role in (self._leader, self._reader):
            if role is not None:
                await role.coordinator.aclose()
        await self._passing_on.aclose()
        await send({"type": "lifespan.shutdown.complete"})

    # The lease; one thread.

    def _run(self) -> None:
        while not self._stop.wait(self._lease_s / LOOKS if self.leads else min(1.0, self._lease_s / LOOKS)):
            try:
                self._look()
            except Exception as error:
                # Whoever cannot say that it is there must not go on as if it could.
                log.exception("looking at the lease met a defect")
                self._end(Unavailable(f"the lease could not be looked at ({type(error).__name__}); start again"))

    def _look(self) -> None:
        asked_s = time.monotonic()
        try:
            if self._until_s is not None:
                if self._leases.renew():
                    self._until_s = asked_s + self._lease_s
                else:
                    self._lose("another coordinator may have it")
                return
            if self._leases.take():
                self._until_s = asked_s + self._lease_s
                self._opening = threading.Thread(target=self._lead, name="opening", daemon=True)
                self._opening.start()
                return
            holder = self._leases.holder()
            self._passing_on.to(None if holder is None or holder.owner == self._leases.owner else holder.url)
            if holder is not None and self._reader is None:
                self._read()
        except LabelerError as error:
            log.warning("the lease cannot be looked at", extra={"problem": error.problem_type})
            if self._until_s is not None and time.monotonic() >= self._until_s:
                self._lose("the database could not be reached until it ended")

    def _lose(self, why: str) -> None:
        self._until_s = None
        self._end(JournalInUse(f"this coordinator has lost its lease: {why}. Start it again; it will follow who leads"))

    def _end(self, failure: LabelerError) -> None:
        log.error("this coordinator ends", extra={"problem": failure.problem_type, "sentence": str(failure)})
        self.failure = failure
        self._stop.set()
        self._on_lost()

    def _lead(self) -> None:
        """Become the journal's owner and serve everything; while this takes its time, the lease is renewed."""
        self._passing_on.to(None)
        while not self._stop.is_set():
            try:
                coordinator = Coordinator.open(self._settings)
            except JournalInUse as error:
                # The lease of the one before is over, and its session is not: it hangs, or was cut off.
                if self._leases.end_owner():
                    continue
                self._end(error)  # somebody owns the journal who shares it with nobody
                return
            except LabelerError as error:
                self._end(error)
                return
            except Exception as error:
                # Else the lease would be renewed for ever by one that never leads.
                log.exception("opening the journal met a defect")
                self._end(Unavailable(f"the journal could not be opened ({type(error).__name__}); start again"))
                return
            if self._stop.is_set():
                coordinator.stop()
                return
            coordinator.start()
            self._leader = self._role(coordinator)
            log.info("this coordinator leads")
            return

    def _read(self) -> None:
        """Open journal and home for reading, once there is a journal to be read."""
        try:
            self._reader = self._role(Coordinator.open_for_reading(self._settings))
        except LabelerError as error:
            log.info("the journal cannot be read yet", extra={"problem": error.problem_type})
            return
        log.info("this coordinator follows")

    def _role(self, coordinator: Coordinator) -> _Role:
        app = create_app(coordinator)
        stopping = app.state.stopping = Stopping()

        def end_streams() -> None:
            if self._loop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(stopping.set)

        return _Role(coordinator, app, end_streams)


_READ = ("/v1/jobs", "/v1/tasks", "/v1/budget", "/v1/ledger", "/dashboard", "/api", "/openapi.json", "/healthz")
_MADE_WHEN_ASKED = ("/student", "/model", "/thumbnails")


def is_only_read(scope: Scope) -> bool:
    """Whether a request can be answered by who only reads journal and home.

    What is made when it is asked for (labels of all images, students, thumbnails) is made by who leads.
    """
    method, path = scope["method"], scope["path"]
    if (method, path) == ("POST", "/v1/jobs:estimate"):
        return True
    if method not in ("GET", "HEAD") or not path.startswith(_READ) or path.endswith(_MADE_WHEN_ASKED):
        return False
    return not path.endswith("/labels") or b"of=questions" in scope["query_string"]
