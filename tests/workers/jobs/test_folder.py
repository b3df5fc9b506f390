"""Output folders: one owner, durable steps, no trace of a refused job, secrets that end with the job."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from labeler.errors import BadData, InvalidSetting, OutputInUse, PrivacyRefusal
from labeler.release import Release
from workers.jobs.folder import open_job_folder

PLAN = {"task_digest": "abc", "seed": None}


def test_a_folder_has_one_owner_at_a_time(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from workers.jobs.folder import open_job_folder\n"
    code += "with open_job_folder(Path(sys.argv[1])) as f: f.begin({}); print('mine', flush=True); sys.stdin.read()"
    owner = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "job")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "mine\n"
        with pytest.raises(OutputInUse, match="another process"), open_job_folder(tmp_path / "job"):
            pass
    finally:
        owner.kill()
        owner.communicate()
    with open_job_folder(tmp_path / "job"):
        pass


def test_a_folder_with_foreign_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("important")
    with pytest.raises(BadData, match="not empty and holds no job"), open_job_folder(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_job_that_is_refused_leaves_no_trace(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting), open_job_folder(tmp_path / "a" / "b"):
        raise InvalidSetting("no")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_keeps_its_plan(tmp_path: Path) -> None:
    with open_job_folder(tmp_path / "job") as folder:
        folder.begin(PLAN)
    with open_job_folder(tmp_path / "job") as folder:
        folder.begin(PLAN)
        with pytest.raises(BadData, match=r"holds another job \(differs in: task_digest\)"):
            folder.begin(PLAN | {"task_digest": "def"})


def test_a_charge_is_one_entry_however_often_it_is_posted(tmp_path: Path) -> None:
    with open_job_folder(tmp_path / "job") as folder:
        folder.begin(PLAN)
        assert [folder.post({"id": name}) for name in ("one", "two", "one")] == [1, 2, 1]
        assert [entry["id"] for entry in folder.ledger()] == ["one", "two"]


def test_a_charge_for_other_contributors_is_refused(tmp_path: Path) -> None:
    with open_job_folder(tmp_path / "job") as folder:
        folder.begin(PLAN)
        folder.post({"id": "one", "contributors": ["a", "b"]})
        with pytest.raises(PrivacyRefusal, match="another set of agents"):
            folder.post({"id": "one", "contributors": ["a"]})


def test_a_refused_latecomer_leaves_the_owner_alone(tmp_path: Path) -> None:
    with open_job_folder(tmp_path / "job"):
        with pytest.raises(OutputInUse), open_job_folder(tmp_path / "job"):
            pass
        assert (tmp_path / "job" / ".job" / "lock").exists()


def test_an_interruption_before_the_plan_keeps_what_was_made(tmp_path: Path) -> None:
    def work() -> None:
        with open_job_folder(tmp_path / "job"):
            (tmp_path / "job" / ".job" / "checkpoint").write_text("half a backbone")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    assert (tmp_path / "job" / ".job" / "checkpoint").exists()


DIGEST = "a" * 64


@pytest.mark.parametrize("damaged", [bytes(32), b"short"])
def test_a_damaged_secret_of_an_older_version_is_refused(tmp_path: Path, damaged: bytes) -> None:
    with open_job_folder(tmp_path / "job") as folder:
        folder.begin(PLAN)
        (tmp_path / "job" / ".job" / "secrets").mkdir()
        (tmp_path / "job" / ".job" / "secrets" / "agent-1").write_bytes(damaged)
        with pytest.raises(BadData, match="is damaged"):
            folder.rounds(["agent-1"])


def test_a_folder_that_an_older_version_began_goes_on_with_its_secret(tmp_path: Path) -> None:
    with open_job_folder(tmp_path / "job") as folder:
        folder.begin(PLAN)
        path = tmp_path / "job" / ".job" / "secrets" / "agent-1"
        path.parent.mkdir()
        path.write_bytes(b"s" * 32)
        folder.post({"id": "one"})
        rounds = folder.rounds(["agent-1"])
        folder.check_replayable("one", DIGEST, rounds, ["agent-1"])
        assert rounds.keys(DIGEST) == {"agent-1": b"s" * 32}
        folder.destroy_secrets()
        assert not path.exists()


def test_keys_and_answers_are_private_and_destroyed_with_the_job(tmp_path: Path) -> None:
    state = tmp_path / "job" / ".job"
    with open_job_folder(tmp_path / "job") as folder:
        folder.begin(PLAN)
        rounds = folder.rounds(["agent-1", "agent-2"])
        rounds.begin([DIGEST])
        rounds.store(DIGEST, {"agent-1": (b"what it answered",), "agent-2": (b"what the other answered",)})
        found = [path for name in ("keys", "answers") for path in (state / name).rglob("*") if path.is_file()]
        assert len(found) == 2
        assert all(path.stat().st_mode & 0o077 == 0 for path in found)
        assert not any(b"answered" in path.read_bytes() for path in found)
        folder.destroy_secrets()
        assert not {"keys", "answers"} & {path.name for path in state.iterdir()}


def test_a_job_whose_noise_cannot_be_replayed_is_refused(tmp_path: Path) -> None:
    with open_job_folder(tmp_path / "job") as folder:
        folder.begin(PLAN)
        rounds = folder.rounds(["agent-1", "agent-2"])
        folder.check_replayable("one", DIGEST, rounds, ["agent-1", "agent-2"])
        rounds.begin([DIGEST])
        folder.post({"id": "one"})
        folder.check_replayable("one", DIGEST, rounds, ["agent-1", "agent-2"])
        folder.destroy_secrets()
        with pytest.raises(BadData, match=r"key of agent-1 .* cannot be replayed"):
            folder.check_replayable("one", DIGEST, folder.rounds(["agent-1", "agent-2"]), ["agent-1", "agent-2"])


@pytest.mark.parametrize("votes", [None, np.array([[1.5, -0.5]])])
def test_a_release_is_read_back_as_it_was_stored(tmp_path: Path, votes: np.ndarray | None) -> None:
    kind = "winner" if votes is None else "histogram"
    release = Release(kind, np.array([0], np.int16), votes, frozenset({"a", "b"}), True)
    with open_job_folder(tmp_path / "job") as folder:
        folder.begin(PLAN)
        assert folder.stored_release(0) is None
        folder.store_release(0, release)
        back = folder.stored_release(0)
    assert back is not None
    assert (back.kind, back.contributors, back.is_seeded) == (kind, release.contributors, True)
    assert back.labels.tolist() == [0]
    assert (back.noisy_votes is None) == (votes is None)
    if votes is not None:
        assert np.array_equal(back.noisy_votes, votes)
