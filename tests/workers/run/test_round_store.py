"""What the agents of one job keep: keys and answers of a round together, and nothing after its release."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import workers.run.preparation
from feature_store.shard import Shard
from labeler.driver import stepping
from labeler.errors import BadData
from labeler.release import Release
from labeler.system.erasable import KeyFolder
from labeler.system.faults import listening
from tests.run_journals import charges_of
from tests.workers.conftest import CLASSES
from workers.run.folder import RoundStore, open_job_folder
from workers.run.labeling import label
from workers.run.preparation import LabelingJob, prepare
from workers.run.task_file import TaskFile, TaskTable

ONE, OTHER = "a" * 64, "b" * 64
AGENTS = ("agent-0001", "agent-0002")
ANSWERS = {"agent-0001": (b"first", b"second"), "agent-0002": (b"", b"fourth" * 1000)}


@pytest.fixture
def kept(tmp_path: Path) -> RoundStore:
    return RoundStore(tmp_path, AGENTS)


def syncs_of(monkeypatch: pytest.MonkeyPatch, work: Callable[[], object]) -> int:
    found = []

    def counting(real: Callable[[int], None]) -> Callable[[int], None]:
        def sync(handle: int) -> None:
            found.append(handle)
            real(handle)

        return sync

    with monkeypatch.context() as counted:
        counted.setattr(os, "fsync", counting(os.fsync))
        work()
    return len(found)


def test_each_agent_has_a_key_of_its_own_for_each_round_also_after_a_restart(kept: RoundStore, tmp_path: Path) -> None:
    assert kept.keys(ONE) == {}
    kept.begin([ONE, OTHER])
    keys = [*kept.keys(ONE).values(), *kept.keys(OTHER).values()]
    assert len(set(keys)) == 4
    again = RoundStore(tmp_path, AGENTS)
    again.begin([ONE, OTHER])
    assert [*again.keys(ONE).values(), *again.keys(OTHER).values()] == keys


def test_answers_come_back_as_they_were_stored_and_the_first_stand(kept: RoundStore, tmp_path: Path) -> None:
    kept.begin([ONE, OTHER])
    assert kept.answers(ONE) is None
    kept.store(ONE, ANSWERS)
    kept.store(ONE, dict.fromkeys(AGENTS, (b"others",)))
    assert RoundStore(tmp_path, AGENTS).answers(ONE) == ANSWERS
    assert kept.answers(OTHER) is None
    assert "first" not in f"{kept!r} {kept}"


def test_nothing_is_left_of_a_round_that_is_erased(kept: RoundStore, tmp_path: Path) -> None:
    kept.begin([ONE, OTHER])
    kept.store(ONE, ANSWERS)
    keys = kept.keys(ONE)
    kept.erase([ONE])
    assert kept.keys(ONE) == {}
    assert kept.answers(ONE) is None
    left = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert not any(key[at : at + 8] in left for key in keys.values() for at in range(25))
    assert len(kept.keys(OTHER)) == 2


def test_the_syncs_of_a_round_do_not_grow_with_its_agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def syncs(count: int) -> list[int]:
        agents = [f"agent-{number:04d}" for number in range(count)]
        kept = RoundStore(tmp_path / str(count), agents)
        steps = (
            lambda: kept.begin([ONE, OTHER]),
            lambda: kept.store(ONE, dict.fromkeys(agents, (b"a",))),
            lambda: kept.erase([ONE]),
            lambda: kept.begin([OTHER]),
        )
        return [syncs_of(monkeypatch, step) for step in steps]

    assert syncs(2) == syncs(30) == [2, 2, 2, 0]


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data[:40], lambda _: b""])
def test_answers_that_were_damaged_are_refused(
    kept: RoundStore, tmp_path: Path, change: Callable[[bytes], bytes]
) -> None:
    kept.begin([ONE])
    kept.store(ONE, ANSWERS)
    path = tmp_path / "answers" / ONE
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(BadData):
        kept.answers(ONE)


def test_answers_whose_key_is_gone_are_refused(kept: RoundStore, tmp_path: Path) -> None:
    kept.begin([ONE])
    kept.store(ONE, ANSWERS)
    (tmp_path / "keys" / "keys.json").unlink()
    with pytest.raises(BadData, match=r"key of agent-0001 .* is gone"):
        RoundStore(tmp_path, AGENTS).answers(ONE)


# The whole job.


class Stopped(BaseException):
    """As if the process were killed."""


@pytest.fixture
def job(
    tmp_path: Path, make_shard: Callable[..., Shard], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., LabelingJob]:
    monkeypatch.setattr(workers.run.preparation, "BATCH_QUERIES", 4)
    shards = tuple(make_shard(f"agent-{number}", seed=number).path for number in range(2))
    public = make_shard("public", records=8, seed=9, public=True).path
    task = {"name": "t", "method": "knn", "k": 3, "sigma_votes": 5.0, "delta": 1e-5, "colluding_agents": 0}
    assert len(CLASSES) == 3

    def made(name: str, **changes: Any) -> LabelingJob:
        file = TaskFile(task=TaskTable.model_validate(task | changes))
        return LabelingJob(file=file, shards=shards, queries=public, out=tmp_path / name, engine="numpy")

    return made


def do(one: LabelingJob, opened: dict[str, Any]) -> list[Release]:
    """Do a job, and note whatever is opened, whether or not it comes to be stored."""
    together = stepping.open_histogram

    def noting(sums: Any, task: Any) -> Release:
        release = together(sums, task)
        seen = opened.setdefault(sums[0].round.digest, np.array(release.noisy_votes))
        assert np.array_equal(seen, release.noisy_votes), "a round was opened twice, under different noise"
        return release

    with pytest.MonkeyPatch.context() as patched, open_job_folder(one.out) as folder:
        patched.setattr(stepping, "open_histogram", noting)
        prepared = prepare(one, folder)
        folder.begin(prepared.plan())
        return [done.release for done in label(prepared, folder) if done.release is not None]


MODEL = {
    "method": "blind-average", "k": 1, "training": {"min_records": 20, "regularisation": 0.1}, "dishonest_talliers": 1,
}  # fmt: skip
"""One round, whatever is asked."""


@pytest.mark.parametrize(
    ("noise", "rounds", "step"),
    [
        ({}, 2, 3),
        pytest.param({}, 2, 1, marks=pytest.mark.long),
        pytest.param({"dishonest_talliers": 1}, 2, 1, marks=pytest.mark.long),
        pytest.param(MODEL, 1, 1, marks=pytest.mark.long),
    ],
    ids=["agents, every third moment", "agents", "talliers", "a model"],
)
def test_a_run_that_dies_at_any_moment_goes_on_with_the_same_noise_and_is_charged_once(
    job: Callable[..., LabelingJob], noise: dict[str, Any], rounds: int, step: int
) -> None:
    for stop_at in itertools.count(1, step):
        one, moments, opened = job(f"job-{stop_at}", **noise), itertools.count(1), {}

        def die(_: str, moments: Any = moments, stop_at: int = stop_at) -> None:
            if next(moments) == stop_at:
                raise Stopped

        try:
            with listening(die):
                do(one, opened)
            is_over = True
        except Stopped:
            is_over = False
        releases = do(one, opened)
        assert len(releases) == len(opened) == rounds
        for release, votes in zip(releases, opened.values(), strict=True):
            assert np.array_equal(release.noisy_votes, votes)
        assert len(charges_of(one.out)) == len(dict(charges_of(one.out))) == rounds
        assert not {"keys", "answers"} & {path.name for path in (one.out / ".job").iterdir()}
        if is_over:
            break
    assert stop_at > 12 * rounds, "there are more moments than that between two effects of a job"


def test_winners_under_the_talliers_noise_are_the_same_computed_securely_and_in_clear(
    job: Callable[..., LabelingJob],
) -> None:
    labels = []
    for engine in ("plain", "secure"):
        one = replace(job(engine, dishonest_talliers=1, release="winner"), seed=7, winner=engine)
        with open_job_folder(one.out) as folder:
            prepared = prepare(one, folder)
            folder.begin(prepared.plan())
            releases = [done.release for done in label(prepared, folder)]
        assert all(release is not None and release.is_seeded for release in releases)
        labels.append([release.labels.tolist() for release in releases if release is not None])
    assert labels[0] == labels[1]
    assert {len(one) for one in labels[0]} == {4}


def test_a_run_whose_talliers_keys_of_noise_are_gone_is_refused_and_never_noised_anew(
    job: Callable[..., LabelingJob],
) -> None:
    one, opened = job("job", dishonest_talliers=1), {}

    def die(*_: object) -> None:
        raise Stopped

    with pytest.MonkeyPatch.context() as patched, open_job_folder(one.out) as folder:
        patched.setattr(stepping, "open_histogram", die)
        prepared = prepare(one, folder)
        folder.begin(prepared.plan())
        with pytest.raises(Stopped):
            label(prepared, folder)
    keys = KeyFolder(one.out / ".job" / "keys")
    mine = [name for name in keys.names() if name.startswith("tallier-1.")]
    assert len(mine) == 2, "one for each round"
    keys.erase_all(mine)
    with pytest.raises(BadData, match="the key of tallier-1 for a batch that was charged is gone"):
        do(one, opened)
    assert opened == {}


def test_a_run_of_one_small_batch_needs_few_syncs_and_commits(
    job: Callable[..., LabelingJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten syncs of files, however many agents there are; and the journal's commits: the job, who is asked, whose
    shares are summed, the charge, the release."""
    monkeypatch.setattr(workers.run.preparation, "BATCH_QUERIES", 1000)
    moments: list[str] = []
    with listening(moments.append):
        assert syncs_of(monkeypatch, lambda: do(job("job"), {})) <= 10
    assert moments.count("committed") <= 6, "one of them is empty: the journal is opened"
