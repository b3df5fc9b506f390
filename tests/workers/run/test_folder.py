"""Output folders: one owner, and no trace of a refused job."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from labeler.errors import BadData, InvalidSetting, OutputInUse, StorageFull
from workers.run.folder import open_job_folder

PLAN = {"task_digest": "abc", "seed": None}


@pytest.mark.process
def test_a_folder_has_one_owner_at_a_time(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from workers.run.folder import open_job_folder\n"
    code += "with open_job_folder(Path(sys.argv[1])) as f: f.begin({}); print('mine', flush=True); sys.stdin.read()"
    owner = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "job")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "mine\n"
        with pytest.raises(OutputInUse, match="another process"), open_job_folder(tmp_path / "job"):
            pass
        assert (tmp_path / "job" / ".job" / "lock").exists()
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


def test_a_full_disk_means_try_again_and_every_other_error_does_not(tmp_path: Path) -> None:
    for number, found in ((errno.ENOSPC, StorageFull), (errno.EDQUOT, StorageFull), (errno.EACCES, BadData)):
        with pytest.raises(found, match="cannot write to output folder") as said, open_job_folder(tmp_path / "job"):
            raise OSError(number, "no")
        assert said.value.exit_code == (75 if found is StorageFull else 1)


def test_an_interruption_before_the_plan_keeps_what_was_made(tmp_path: Path) -> None:
    def work() -> None:
        with open_job_folder(tmp_path / "job"):
            (tmp_path / "job" / ".job" / "checkpoint").write_text("half a backbone")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    assert (tmp_path / "job" / ".job" / "checkpoint").exists()
