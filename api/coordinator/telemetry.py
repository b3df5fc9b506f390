"""Optional spans of jobs and rounds for OpenTelemetry: public ids and counts, nothing else.

A span is made when a job or a round has ended, from the state machine's record. So none is open across a crash, and no
message, error or text of a party enters one. Its attributes are those of `PUBLIC`, which any token of the service may
read already. A failing span processor or exporter loses spans but never a turn. Spans reveal durations: their receiver
sees when rounds ended, as every viewer of the service does.

The extra `telemetry` installs the SDK; OpenTelemetry's variables (OTEL_EXPORTER_OTLP_ENDPOINT) set the destination.
"""

from __future__ import annotations

import logging
from datetime import datetime
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

from labeler.errors import InvalidSetting
from labeler.rounds.effects import UNFINISHED, JobRun, RoundRun
from labeler.system.clock import Clock

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

log = logging.getLogger("labeler.telemetry")

PUBLIC: Final = frozenset(
    {
        "labeler.job_id",
        "labeler.task_digest",
        "labeler.method",
        "labeler.release",
        "labeler.state",
        "labeler.agents",
        "labeler.queries",
        "labeler.rounds",
        "labeler.round",
        "labeler.contributors",
    }
)
"""Every attribute that a span may have."""

_MOST_OPEN: Final = 10_000


class JobSpans:
    """Watches jobs as their steps become durable; called by the driver's thread alone."""

    def __init__(self, tracer: Tracer, *, clock: Clock) -> None:
        self._tracer = tracer
        self._clock = clock
        self._begun: dict[tuple[str, int | None], datetime] = {}

    def __call__(self, before: JobRun, after: JobRun) -> None:
        """Record a durable step of a job."""
        try:
            self._job(before, after)
        except Exception:
            log.warning("a span could not be made", exc_info=False)

    def _job(self, before: JobRun, after: JobRun) -> None:
        now = self._clock()
        if len(self._begun) < _MOST_OPEN:
            self._begun.setdefault((after.job_id, None), now)
        for old, new in zip(before.rounds, after.rounds, strict=True):
            if old.state == "waiting" and new.state != "waiting":
                self._begun[after.job_id, new.number] = now
            if old.state != "opened" and new.state == "opened":
                self._end("labeler.round", after, now, new)
        if before.state in UNFINISHED and after.state not in UNFINISHED:
            self._end("labeler.job", after, now, None)
            for key in [key for key in self._begun if key[0] == after.job_id]:
                del self._begun[key]

    def _end(self, name: str, job: JobRun, now: datetime, one: RoundRun | None) -> None:
        begun = self._begun.pop((job.job_id, None if one is None else one.number), now)
        attributes: dict[str, str | int] = {
            "labeler.job_id": job.job_id,
            "labeler.task_digest": job.task.digest,
            "labeler.method": job.task.method,
            "labeler.release": job.task.release,
            "labeler.agents": len(job.participants),
            "labeler.queries": job.num_queries if one is None else one.num_queries,
        }
        if one is None:
            attributes |= {"labeler.state": job.state, "labeler.rounds": len(job.rounds)}
        else:
            attributes |= {"labeler.round": one.number, "labeler.contributors": len(one.contributors)}
        # It has no parent and no context leaves: a round and its job are linked only by the job's id.
        span = self._tracer.start_span(name, attributes=attributes, start_time=_nanoseconds(begun))
        span.end(end_time=_nanoseconds(now))


def spans_of_environment(*, clock: Clock) -> JobSpans:
    """Return spans that are exported as the environment variables say.

    Raises:
        InvalidSetting: the extra `telemetry` is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as missing:
        raise InvalidSetting(
            f"telemetry otlp needs the package {missing.name}; add the extra: private-labeler[telemetry]"
        ) from None
    # Not Resource.create, which adds facts about the machine and its environment.
    provider = TracerProvider(resource=Resource({"service.name": "private-labeler"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return JobSpans(provider.get_tracer("private-labeler", version("private-labeler")), clock=clock)


def _nanoseconds(at: datetime) -> int:
    return int(at.timestamp() * 1e9)
