"""A job states its bounds, and its digest changes with everything the talliers must agree on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from labeler.errors import InvalidSetting
from tests.workers.winner.conftest import HIGHEST, LOWEST
from workers.winner.engine import Address, WinnerJob

MakeJobs = Callable[..., list[WinnerJob]]


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"num_classes": 1}, "2 to"),
        ({"num_classes": 40_000}, "2 to"),
        ({"num_queries": 0}, "at least 1 query"),
        ({"num_queries": 2**31}, "smaller batches"),
        ({"lowest": 1}, "contain zero"),
        ({"highest": 2**21}, "smaller grid_scale"),
    ],
)
def test_settings_outside_their_bounds_are_refused(make_jobs: MakeJobs, changed: dict[str, Any], match: str) -> None:
    job = make_jobs(2, 3)[0]
    with pytest.raises(InvalidSetting, match=match):
        replace(job, **changed)


def test_two_talliers_are_refused_with_the_reason(make_jobs: MakeJobs) -> None:
    job = make_jobs(2, 3)[0]
    with pytest.raises(InvalidSetting, match="one alone could open everything"):
        replace(job, addresses=job.addresses[:2], certificates=job.certificates[:2])


def test_two_talliers_with_one_certificate_are_refused(make_jobs: MakeJobs) -> None:
    job = make_jobs(2, 3)[0]
    with pytest.raises(InvalidSetting, match="same certificate"):
        replace(job, certificates=(job.certificates[0], job.certificates[1], job.certificates[1]))
    with pytest.raises(InvalidSetting, match="PEM"):
        replace(job, certificates=(*job.certificates[:2], "no certificate"))


@pytest.mark.parametrize(
    ("host", "port"), [("0.0.0.0", 1), ("::", 1), ("", 1), ("127.0.0.1", 0), ("127.0.0.1", 70_000)]
)
def test_an_address_is_one_host_and_one_port(host: str, port: int) -> None:
    with pytest.raises(InvalidSetting, match=r"address|port"):
        Address(host, port)


def test_the_digest_binds_all_that_must_be_equal_and_nothing_else(make_jobs: MakeJobs) -> None:
    jobs = make_jobs(2, 3)
    assert len({job.digest for job in jobs}) == 1
    assert replace(jobs[0], time_limit_s=1.0).digest == jobs[0].digest
    changes: list[dict[str, Any]] = [
        {"job_id": "other"},
        {"agreement": "1" * 64},
        {"num_queries": 3},
        {"num_classes": 4},
        {"lowest": LOWEST - 1},
        {"highest": HIGHEST + 1},
        {"threshold": 0},
        {"certificates": (*jobs[0].certificates[1:], jobs[0].certificates[0])},
    ]
    digests = {replace(jobs[0], **changed).digest for changed in changes}
    assert len(digests) == len(changes)
    assert jobs[0].digest not in digests


def test_the_field_is_the_smallest_that_holds_a_masked_difference(make_jobs: MakeJobs) -> None:
    job = make_jobs(2, 3)[0]
    assert job.comparison_bits == 16
    assert job.field.bits == 16 + 41 + 2
    assert replace(job, threshold=10**9).clipped_threshold == HIGHEST + 1
    assert replace(job, threshold=-(10**9)).clipped_threshold == LOWEST
    assert job.clipped_threshold is None
