"""Operations of talliers do not depend on the shares they hold, so they need no clock: each instruction is compared."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from labeler.randomness import os_source
from labeler.sharing import ShareVector, WinnerTerms, field_for, split
from labeler.tally import BallotShare, Round, add_shares, split_ballots
from tests.operations import difference, operations
from tests.workers.winner.conftest import shares_of
from tests.workers.winner.test_tournament import computed
from workers.winner.engine import WinnerJob

MakeJobs = Callable[..., list[WinnerJob]]
Integers = NDArray[np.int64]

AGENTS, QUERIES, CLASSES, K = 4, 6, 5, 3
TERMS = WinnerTerms(scale=10, lowest=-4_000, highest=4_200, row_total=K, threshold=None)
WORLDS = {"nobody votes": 0, "one wins": 1, "all tie": 2, "one vote more": 3}


def _ballots(world: int) -> Integers:
    votes = np.zeros((AGENTS, QUERIES, CLASSES), dtype=np.int64)
    if world in (1, 3):
        votes[..., 2] = K
    if world == 2:
        votes[..., :K] = 1
    if world == 3:
        votes[0, 0] = [1, 0, K - 1, 0, 0]
    return votes


def _sum_of_a_tallier(release: str, world: int) -> Callable[[], object]:
    """Adding up at tallier 1 of three."""
    terms = TERMS if release == "winner" else None
    round_ = Round("a" * 64, "b" * 64, QUERIES, CLASSES, quorum=AGENTS, terms=terms)
    shares: dict[str, ShareVector | BallotShare] = {}
    for number, votes in enumerate(_ballots(world)):
        if terms is None:
            shares[f"agent-{number}"] = split(votes * 10, num_talliers=3, source=os_source())[1]
        else:
            noise = np.full((QUERIES, CLASSES), 7, dtype=np.int64)
            parts = split_ballots(votes, noise, row_total=K, num_talliers=3, source=os_source(), field=terms.field)
            shares[f"agent-{number}"] = parts[1]
    return lambda: add_shares(1, round_, shares)


@pytest.mark.parametrize("release", ["histogram", "winner"])
def test_what_a_tallier_adds_up_it_adds_up_in_the_same_steps(release: str) -> None:
    first, *others = [operations(_sum_of_a_tallier(release, world)) for world in WORLDS.values()]
    assert len(first) > 100
    for other in others:
        assert not difference(first, other)


@pytest.mark.parametrize("classes", [2, CLASSES])
@pytest.mark.parametrize("threshold", [None, 300])
def test_winners_are_found_in_the_same_steps_whatever_the_sums_are(
    make_jobs: MakeJobs, monkeypatch: pytest.MonkeyPatch, classes: int, threshold: int | None
) -> None:
    """Three talliers in one thread, with the same masks in every world; the dealer's work among it."""
    jobs = make_jobs(QUERIES, classes, lowest=TERMS.lowest, highest=TERMS.highest, threshold=threshold)
    assert jobs[0].field == field_for(TERMS.lowest, TERMS.highest)
    computed(jobs, shares_of(np.zeros((QUERIES, classes), dtype=np.int64), jobs[0]))  # what is made once, is made
    seen = []
    for world in WORLDS.values():
        shares = shares_of(_ballots(world).sum(axis=0)[:, :classes] * 100, jobs[0])
        with monkeypatch.context() as patched:
            patched.setattr(os, "urandom", lambda count: bytes(range(7, 7 + count)))
            seen.append(operations(lambda shares=shares: computed(jobs, shares)))  # type: ignore[misc]  # bound now
    first, *others = seen
    assert len(first) > 1000
    for other in others:
        assert not difference(first, other)


def test_a_branch_on_a_share_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from labeler import tally

    plain = tally._sum

    def hurried(one: NDArray[np.uint64], other: NDArray[np.uint64], field: object) -> NDArray[np.uint64]:
        found: NDArray[np.uint64] = plain(one, other, field)  # type: ignore[arg-type]
        return np.flip(np.flip(found)) if found[0, 0] % 2 else found

    monkeypatch.setattr(tally, "_sum", hurried)
    worlds = [operations(_sum_of_a_tallier("histogram", 0)) for _ in range(24)]
    assert any(difference(worlds[0], other) for other in worlds[1:])
