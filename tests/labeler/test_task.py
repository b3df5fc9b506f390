"""Tasks: what is refused, and what the digest covers."""

from __future__ import annotations

import math

import pytest

from labeler.errors import InvalidTask, UnsafeGrid
from labeler.task import MIN_SHARE_SIGMA_GRID, Task, parse_task

FIELDS: dict[str, object] = {
    "name": "digits",
    "classes": ["zero", "one"],
    "k": 50,
    "sigma_votes": 25.0,
    "delta": 1e-4,
    "max_queries": 206,
    "agents": 3,
    "colluding_agents": 1,
}


def task(**changes: object) -> Task:
    return parse_task(FIELDS | changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sigma_votes": 0}, "sigma_votes: Input should be greater than 0"),
        ({"sigma_votes": -1.0}, "sigma_votes: Input should be greater than 0"),
        ({"sigma_votes": math.nan}, "sigma_votes: Input should be a finite number"),
        ({"sigma_votes": math.inf}, "sigma_votes: Input should be a finite number"),
        ({"delta": 0.0}, "delta: Input should be greater than 0"),
        ({"delta": 1.0}, "delta: Input should be less than 1"),
        ({"delta": math.nan}, "delta: Input should be a finite number"),
        ({"k": 0}, "k: Input should be greater than or equal to 1"),
        ({"classes": ["only"]}, "classes: Tuple should have at least 2 items"),
        ({"classes": ["a", "a"]}, "classes must be different"),
        ({"colluding_agents": 3}, "too few agents for the collusion stated"),
        ({"colluding_agents": 2, "max_dropouts": 1}, "too few agents for the collusion stated"),
        ({"sigma": 3}, "sigma: unknown field"),
        ({"method": "one-hot"}, "k must be 1"),
        ({"max_agent_records": 5}, "only means something for method reverse-knn"),
    ],
)
def test_a_field_out_of_bounds_is_refused_in_a_sentence(changes: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidTask, match=r"^task refused: ") as refusal:
        task(**changes)
    assert said in str(refusal.value)


def test_a_grid_too_coarse_to_prove_anything_is_refused() -> None:
    with pytest.raises(UnsafeGrid, match="Leave grid_scale out, or set it to 6 or more"):
        task(grid_scale=5)
    assert task(grid_scale=6).share_sigma_grid >= MIN_SHARE_SIGMA_GRID


def test_a_grid_finer_than_the_sampler_is_refused() -> None:
    with pytest.raises(UnsafeGrid, match="the exact sampler reaches 100000"):
        task(grid_scale=2**20)


def test_a_sum_that_could_wrap_is_refused() -> None:
    with pytest.raises(UnsafeGrid, match="could reach"):
        task(sigma_votes=0.001, agents=1_000_000, k=1_000_000)


def test_the_noise_of_colluders_and_dropouts_is_made_up_for_by_the_others() -> None:
    agreed = task(agents=10, colluding_agents=2, max_dropouts=3)
    assert agreed.noise_contributors == 5
    assert agreed.quorum == 7
    assert agreed.share_sigma_grid * math.sqrt(5) / agreed.scale == pytest.approx(25.0)
    assert agreed.total_sigma_votes == pytest.approx(25.0 * math.sqrt(2))


@pytest.mark.parametrize(
    "changes",
    [
        {field: value}
        for field, value in {"name": "x", "k": 51, "sigma_votes": 25.5, "delta": 1e-5, "nonce": "n"}.items()
    ]
    + [{"classes": ["one", "zero"]}, {"release": "winner"}, {"talliers": 2}, {"grid_scale": 29}],
)
def test_every_field_moves_the_digest(changes: dict[str, object]) -> None:
    assert task(**changes).digest != task().digest


def test_a_changed_copy_has_its_own_grid_and_digest() -> None:
    original = task()
    before = (original.scale, original.digest)
    copy = original.model_copy(update={"sigma_votes": 1.0})
    assert (copy.scale, copy.digest) == (task(sigma_votes=1.0).scale, task(sigma_votes=1.0).digest)
    assert (original.scale, original.digest) == before


def test_equal_tasks_have_equal_digests() -> None:
    assert task().digest == task().digest
    assert len(task().digest) == 64
