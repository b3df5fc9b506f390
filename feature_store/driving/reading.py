"""What a turn of the coordinator's driver reads: jobs that were woken or that messages are about, parties, mail."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from feature_store.driving.intake import Delivery
from feature_store.driving.live_jobs import LiveJobs
from feature_store.driving.loading import Loaded, Loader, parties_of
from feature_store.journal.chain import Head
from feature_store.journal.database import Connection
from feature_store.journal.parties import PartyRecord
from feature_store.mailbox import Mailbox
from labeler.errors import LabelerError, NotFound
from labeler.rounds.effects import Now, PartiesChanged, Party, Patience

REFRESH_S = 1.0
"""How often the journal is asked which jobs are unfinished, for wakes that were lost."""

_COUNTED_S = 0.5


class PartyBook(Protocol):
    """Who takes part: `feature_store.journal.parties.PartyStore`, or whoever has the parties in its own process."""

    @property
    def version(self) -> int:
        """Another one whenever a party has changed."""

    def all(self) -> Sequence[PartyRecord]:
        """Every party."""

    def answered(self, heads: Mapping[str, Head], *, connection: Connection) -> None:
        """Keep how far the journals are that agents' answers came from."""


class Reader:
    """See the module. Used by one thread."""

    def __init__(
        self, loader: Loader, parties: PartyBook, mailbox: Mailbox, live: LiveJobs, patience: Patience
    ) -> None:
        self._loader = loader
        self._parties = parties
        self._mailbox = mailbox
        self._live = live
        self.every_s = max(0.05, min(REFRESH_S, patience.ask_again_s))
        self.refreshed_s: float | None = None
        """When the journal was asked for unfinished jobs last, or could not be read."""
        self.parties: Mapping[str, Party] = {}
        """Who is enrolled, as read last."""
        self._version = -1
        self._counted: tuple[float, Mapping[str, int]] = (-_COUNTED_S, {})

    def refresh(self, now: Now, woken: dict[str, None]) -> None:
        """Wake jobs that are unfinished and not in memory, and those that are in memory and finished."""
        if self.refreshed_s is not None and now.steady_s - self.refreshed_s < self.every_s:
            return
        unfinished = self._loader.unfinished()
        self.refreshed_s = now.steady_s
        known = set(unfinished)
        woken.update(dict.fromkeys(job_id for job_id in unfinished if job_id not in self._live.jobs))
        woken.update(dict.fromkeys(job_id for job_id in self._live.jobs if job_id not in known))

    def party_news(self) -> PartiesChanged | None:
        """Who is enrolled now, where that has changed."""
        version = self._parties.version
        if version == self._version:
            return None
        parties = parties_of(self._parties.all())
        is_news = parties != self.parties
        self._version, self.parties = version, parties
        return PartiesChanged(parties) if is_news else None

    def one(self, job_id: str) -> Loaded | None:
        """A job as the journal has it."""
        return self._loader.load([job_id], self.parties).get(job_id)

    def reload(self, woken: Iterable[str], now: Now) -> list[Loaded]:
        """Woken jobs as the journal has them; a pause that a failure has earned is not shortened."""
        ready = []
        for job_id in woken:
            live = self._live.jobs.get(job_id)
            if live is not None and now.steady_s < live.not_before_s:
                self._live.deferred.add(job_id)
                continue
            self._live.deferred.discard(job_id)
            ready.append(job_id)
        return list(self._loader.load(ready, self.parties).values())

    def load_for(self, deliveries: Sequence[Delivery]) -> None:
        """Jobs that messages are about and that are not in memory: finished ones, or none at all."""
        missing: dict[str, None] = {}
        for delivery in deliveries:
            for message in delivery.messages:
                job_id = message.job_id
                digest = message.message.header.round_digest
                if not job_id and not self._live.is_known(digest):
                    try:
                        job_id = self._loader.job_of_round(digest)
                    except NotFound:
                        continue
                if job_id and job_id not in self._live.jobs:
                    missing[job_id] = None
        for job_id, found in self._loader.load(list(missing), self.parties).items():
            self._live.know(found)
            self._live.guests.append(job_id)

    def mail(self, now: Now) -> Mapping[str, int]:
        """How much mail waits with whom, as counted within the last half second."""
        if now.steady_s - self._counted[0] >= _COUNTED_S:
            try:
                counted: Mapping[str, int] = self._mailbox.all_pending(list(self.parties))
            except LabelerError:
                counted = {}
            self._counted = (now.steady_s, counted)
        return self._counted[1]
