"""The reference is the definition: lowest class on ties, and -1 below the threshold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from labeler.errors import ProtocolViolation, Unavailable
from tests.oracles.winner_reference import ReferenceEngine, reference_winners
from tests.workers.winner.conftest import run_three, shares_of
from workers.winner.engine import WinnerJob

MakeJobs = Callable[..., list[WinnerJob]]

SUMS = np.array([[3, 3, 1], [-5, -4, -4], [0, 0, 0], [1, 2, 3]])


def test_ties_go_to_the_lowest_class(make_jobs: MakeJobs) -> None:
    job = make_jobs(4, 3)[0]
    assert reference_winners(shares_of(SUMS, job), field=job.field).tolist() == [0, 1, 0, 2]


def test_a_best_sum_below_the_threshold_abstains(make_jobs: MakeJobs) -> None:
    job = make_jobs(4, 3)[0]
    assert reference_winners(shares_of(SUMS, job), field=job.field, threshold=0).tolist() == [0, -1, 0, 2]
    assert reference_winners(shares_of(SUMS, job), field=job.field, threshold=3).tolist() == [0, -1, -1, 2]


def test_three_talliers_of_one_process_meet_in_the_reference_engine(make_jobs: MakeJobs) -> None:
    jobs = make_jobs(4, 3, threshold=1)
    outcomes = run_three(ReferenceEngine(), jobs, shares_of(SUMS, jobs[0]))
    assert [list(outcome) for outcome in outcomes if not isinstance(outcome, Exception)] == [[0, -1, -1, 2]] * 3


def test_talliers_with_different_jobs_are_refused_by_the_reference_engine_too(make_jobs: MakeJobs) -> None:
    jobs = make_jobs(4, 3)
    jobs[2] = replace(jobs[2], threshold=1)
    outcomes = run_three(ReferenceEngine(), jobs, shares_of(SUMS, jobs[0]))
    assert all(isinstance(outcome, ProtocolViolation) for outcome in outcomes)


def test_a_tallier_that_does_not_come_ends_the_job_of_the_others(make_jobs: MakeJobs) -> None:
    jobs = make_jobs(4, 3, time_limit_s=0.2)
    outcomes = run_three(ReferenceEngine(), jobs[:2], shares_of(SUMS, jobs[0])[:2])
    assert all(isinstance(outcome, Unavailable) for outcome in outcomes)
