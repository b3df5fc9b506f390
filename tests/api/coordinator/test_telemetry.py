"""Spans tell ids and counts that any viewer may read, nothing else.

Long, because the SDK is installed by `make test-long` alone: where it is there, redis-py loads it at every start.
"""

from __future__ import annotations

import pytest

from api.coordinator.telemetry import PUBLIC, JobSpans, spans_of_environment
from tests.api.conftest import House
from tests.api.coordinator.site import AGENTS, TALLIERS, Site

pytest.importorskip("opentelemetry.sdk", reason="`make test-long` installs the extra telemetry")
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

pytestmark = pytest.mark.long

ATTRIBUTES = frozenset(
    "labeler." + name
    for name in ("job_id", "task_digest", "method", "release", "state", "agents", "queries", "rounds", "round",
                 "contributors")
)  # fmt: skip
"""Written out here again: who adds one to the code has to say so in this file, and think of who reads it."""


@pytest.fixture
def watched(house: House) -> tuple[Site, InMemorySpanExporter]:
    """A driver that completes jobs, and what was exported of it."""
    site, exporter = Site(house), InMemorySpanExporter()
    provider = TracerProvider(resource=Resource({}))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    site.driver.observe = JobSpans(provider.get_tracer("test"), clock=house.clock)
    return site, exporter


def complete(site: Site) -> str:
    job = site.asked()
    site.hold(job)
    site.deliver(*(site.summed(number, job) for number in range(3)))
    site.thread.tick()
    assert site.state(job) == "completed"
    return job.job_id


def test_nothing_but_the_allowed_attributes_leaves(watched: tuple[Site, InMemorySpanExporter]) -> None:
    site, exporter = watched
    job_id = complete(site)
    one, whole = exporter.get_finished_spans()
    assert (one.name, whole.name) == ("labeler.round", "labeler.job")
    record = site.house.jobs.get(job_id)
    for span in (one, whole):
        assert set(span.attributes or {}) <= ATTRIBUTES == PUBLIC
        assert not span.events
        assert not span.links
        assert span.parent is None
        assert not span.resource.attributes
        assert span.status.description is None
        assert (span.attributes or {})["labeler.job_id"] == job_id
        assert (span.attributes or {})["labeler.task_digest"] == record.task_digest
        assert (span.start_time or 0) <= (span.end_time or 0)
    assert (whole.attributes or {})["labeler.state"] == "completed"
    assert (one.attributes or {})["labeler.contributors"] == len(AGENTS)
    written = one.to_json() + whole.to_json()
    assert not any(name in written for name in (*AGENTS, *TALLIERS, "tok-1", "cat"))


def test_a_backend_that_fails_costs_spans_and_no_job(house: House) -> None:
    class Broken:
        def start_span(self, *_: object, **__: object) -> None:
            raise RuntimeError("no")

    site = Site(house)
    site.driver.observe = JobSpans(Broken(), clock=house.clock)  # type: ignore[arg-type]
    complete(site)


@pytest.mark.process
def test_spans_go_out_by_their_own_provider_with_the_name_of_the_service_alone(house: House) -> None:
    spans = spans_of_environment(clock=house.clock)
    made = spans._tracer.start_span("x")
    assert dict(made.resource.attributes) == {"service.name": "private-labeler"}  # type: ignore[attr-defined]
