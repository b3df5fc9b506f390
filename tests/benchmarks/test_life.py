"""The bench of votes for life on points that are easy: jobs are answered, images run out, and it can be repeated."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.accuracy import life
from benchmarks.accuracy.life import Federation, Images
from feature_store.rows import quantize
from labeler.accounting.lifetime import set_aside_nano
from labeler.budget import budget_for

CLASSES = ("a", "b", "c", "d")
DIMENSION = 32


def images(count: int, seed: int) -> Images:
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(0).normal(size=(len(CLASSES), DIMENSION))
    labels = (np.arange(count) % len(CLASSES)).astype(np.int64)
    return Images(quantize(centres[labels] + 0.4 * rng.normal(size=(count, DIMENSION))), labels)


def test_jobs_for_life_are_answered_as_well_as_fresh_ones_until_images_run_out(tmp_path: Path) -> None:
    found = Federation(CLASSES, tuple(images(400, seed) for seed in (1, 2, 3)), images(200, 4), ((0, 1), (2, 3)))
    shards = [life._shard(tmp_path / str(number), found, number) for number in range(3)]
    jobs = life._jobs(found, 0, near=life.NEAR)
    assert sorted(job.topic for job in jobs) == [0] * life.JOBS_EACH + [1] * life.JOBS_EACH
    budget = set_aside_nano(budget_for(1.0, life.DELTA))

    def right(name: str, vote_nano: float, votes: life.Votes) -> np.ndarray:
        return life._answered(found, shards, jobs, budget, vote_nano, tmp_path / name, votes=votes, draw=0)

    lasting = right("lasting", budget / life.JOBS_EACH, "asked")
    fresh = right("fresh", budget, "plain")
    assert np.abs(lasting - fresh).max() < 0.1
    assert np.array_equal(right("again", budget / life.JOBS_EACH, "asked"), lasting)
    # With one vote for a whole life the first job of each topic has the votes of all that follow.
    spent = right("once", budget, "asked")
    first = {job.topic: number for number, job in reversed(list(enumerate(jobs)))}
    assert min(spent[number] for number in first.values()) > 0.9
    assert np.mean([spent[number] for number in range(len(jobs)) if number not in first.values()]) < 0.9
