"""Metrics for Prometheus: requests, jobs, budgets, messages and parties. Nothing in them depends on private records.

Request counters are kept here. Everything else is read from the coordinator at each scrape, so that after a restart the
metrics match the journal at once. Budgets are sums of prices, which do not depend on the records.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from labeler.errors import LabelerError

if TYPE_CHECKING:
    from api.coordinator.service import Coordinator

_log = logging.getLogger("labeler.metrics")
_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """The metrics of one app, in a separate registry.

    Args:
        coordinator: the source of everything but requests.
    """

    media_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, coordinator: Coordinator) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._requests = Counter(
            "labeler_http_requests",
            "Requests answered, by route template.",
            ("method", "route", "status"),
            registry=self._registry,
        )
        self._latency = Histogram(
            "labeler_http_request_seconds",
            "Seconds from the first byte of a request to the last of its answer.",
            ("method", "route"),
            buckets=_LATENCY_S,
            registry=self._registry,
        )
        self._registry.register(_Service(coordinator))

    def observe(self, *, method: str, route: str, status: int, seconds: float) -> None:
        """Count one request."""
        self._requests.labels(method, route, str(status)).inc()
        self._latency.labels(method, route).observe(seconds)

    def render(self) -> bytes:
        """Return the text that Prometheus reads."""
        return generate_latest(self._registry)


class _Service(Collector):
    """Reads the coordinator at every scrape; a part that cannot answer is left out and counted as missing."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        missing = GaugeMetricFamily("labeler_scrape_missing", "Parts that could not be read now.", labels=("part",))
        for part in (self._budgets, self._jobs, self._messages, self._parties):
            try:
                yield from list(part())
            except LabelerError as error:
                _log.warning("a part cannot be scraped", extra={"part": part.__name__, "reason": error.problem_type})
                missing.add_metric((part.__name__.removeprefix("_"),), 1)
        yield missing

    def _budgets(self) -> Iterator[Metric]:
        budget = self._coordinator.budget()
        yield GaugeMetricFamily("labeler_ledger_seq", "Sequence number of the last entry.", value=budget.head_seq)
        labels = ("account", "level")
        posted = GaugeMetricFamily("labeler_budget_posted_epsilon", "What was answered, at delta.", labels=labels)
        spent = GaugeMetricFamily(
            "labeler_budget_spent_epsilon", "What was answered, and all that waits, at delta.", labels=labels
        )
        more = GaugeMetricFamily("labeler_budget_left_epsilon", "The largest further job, at delta.", labels=labels)
        cap = GaugeMetricFamily("labeler_budget_cap_epsilon", "The cap, at delta.", labels=labels)
        left = GaugeMetricFamily("labeler_budget_left_ratio", "Part of the cap that is left (of mu^2).", labels=labels)
        for account in budget.accounts:
            name = (account.account, account.level)
            for family, value in (
                (posted, account.posted_epsilon),
                (spent, account.spent_epsilon),
                (more, account.left_epsilon),
                (cap, account.cap_epsilon),
                (left, account.left_fraction),
            ):
                if value is not None:
                    family.add_metric(name, value)
        yield from (posted, spent, more, cap, left)

    def _jobs(self) -> Iterator[Metric]:
        jobs = GaugeMetricFamily("labeler_jobs", "Jobs by state.", labels=("state",))
        for state, count in self._coordinator.job_counts().items():
            jobs.add_metric((state,), count)
        yield jobs

    def _messages(self) -> Iterator[Metric]:
        taken = CounterMetricFamily("labeler_messages_taken", "Messages of parties taken.", labels=("kind",))
        refused = CounterMetricFamily("labeler_messages_refused", "Messages refused, by reason.", labels=("reason",))
        for kind, count in dict(self._coordinator.mailroom.taken).items():
            taken.add_metric((kind,), count)
        for reason, count in dict(self._coordinator.mailroom.refused).items():
            refused.add_metric((reason,), count)
        yield from (taken, refused)

    def _parties(self) -> Iterator[Metric]:
        parties = self._coordinator.roster.party_list()
        live = GaugeMetricFamily("labeler_parties_live", "Parties heard from lately, by role.", labels=("role",))
        live.add_metric(("agent",), parties.live_agents)
        live.add_metric(("tallier",), parties.live_talliers)
        yield live
        yield GaugeMetricFamily("labeler_quorum", "1 while enough parties are live.", value=int(parties.has_quorum))
