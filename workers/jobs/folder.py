"""The output folder of a job: one owner at a time, every step durable, nothing half-written.

    OUT/
      .job/lock          held by the process that works here
      .job/plan.json     what this folder is for: task digest, shard versions, batches
      .job/journal.db    what was charged and opened (workers.jobs.run_journal)
      .job/keys/         a key of each agent for each batch that is not released yet; erased when it is
      .job/answers/      what the agents answered, encrypted under those keys; erased with them
      pseudo_labels.parquet, report.json, report.html ...   written last, each by rename

A resumed run replays what was stored, bit for bit. The keys are made before anything is opened, and a batch that was
charged and whose keys are gone is refused. When a batch is released its keys are erased: whoever holds one can subtract
that agent's noise.

A folder of the version before had charges in its plan and a file for each release; they are taken over into the
journal, in one transaction, and only then forgotten here (`earlier`, `forget_earlier`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from feature_store.durable import exclusive, replace_file
from feature_store.erasable import KeyFolder, erase_file
from feature_store.job_files.releases import release_from_bytes, release_from_npz
from labeler.batch import QueryBatch
from labeler.errors import BadData, LabelerError, TryAgain
from labeler.release import Release
from workers.jobs.kept_rounds import ANSWERS_FOLDER, EARLIER_FOLDER, KEYS_FOLDER
from workers.jobs.run_journal import EarlierRound

PLAN_FORMAT = "labeler-job/2"
EARLIER_FORMAT = "labeler-job/1"
"""Of the version that kept charges in the plan; a program of that version refuses a plan of this one."""

RELEASES_FOLDER = "releases"
_FOR_PEOPLE = "task"
"""In a plan, the task field by field. Its digest, beside it, stands for it: fields that a later version added do not
change the digest of a task that does not use them, and so do not make another job of it."""


class JobFolder:
    """See the module's docstring. Make one with `open_job_folder`."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.state = out / ".job"

    def begin(self, plan: dict[str, Any]) -> None:
        """Record what this folder is for, or check that it is for the same.

        Raises:
            BadData: the folder belongs to a job with another plan.
        """
        if self.check_same(plan):
            return
        self._write_state({"format": PLAN_FORMAT, "plan": plan})

    def check_same(self, plan: Mapping[str, Any]) -> bool:
        """Check that what is known of a plan so far is what this folder is for; whether it is for anything.

        Raises:
            BadData: the folder belongs to a job with another plan.
        """
        if not (self.state / "plan.json").exists():
            return False
        found = self._read_state()
        known = found.get("plan", {})
        differing = sorted(key for key in plan.keys() - {_FOR_PEOPLE} if known.get(key) != plan[key])
        if found.get("format") not in (PLAN_FORMAT, EARLIER_FORMAT) or differing:
            raise BadData(
                f"output folder {self.out} holds another job (differs in: {', '.join(differing) or 'format'}); "
                "choose an empty folder, or repeat that job's exact settings to continue it"
            )
        return True

    def agreed(self, field: Literal["max_queries", "colluding_agents"]) -> int | None:
        """What the task of the job that was begun here says; None where none was.

        The default of colluding_agents changed once, and an interrupted job goes on with what all parties agreed on.

        Raises:
            BadData: the plan is damaged.
        """
        if not (self.state / "plan.json").exists():
            return None
        try:
            return int(self._read_state()["plan"]["task"][field])
        except (KeyError, TypeError, ValueError):
            raise BadData(f"the plan of {self.out} names no task; start again in an empty folder") from None

    def destroy_secrets(self) -> None:
        """Erase every key there is, and what older versions kept: their noise secrets and models."""
        if (self.state / KEYS_FOLDER).is_dir():
            keys = KeyFolder(self.state / KEYS_FOLDER)
            keys.erase_all(keys.names())
        for path in sorted((self.state / EARLIER_FOLDER).rglob("*")):
            if path.is_file():
                erase_file(path)
        for folder in (KEYS_FOLDER, EARLIER_FOLDER, "models", ANSWERS_FOLDER):
            shutil.rmtree(self.state / folder, ignore_errors=True)

    def earlier(self, batches: Sequence[QueryBatch]) -> dict[int, EarlierRound]:
        """Rounds that the version before charged in this folder, by number; none where it did not work here.

        Args:
            batches: of the job, whose plan this folder has.

        Raises:
            BadData: the plan or a release is damaged.
        """
        state = self._read_state()
        if state["format"] != EARLIER_FORMAT:
            return {}
        charged = {entry["id"]: entry for entry in state["ledger"]}
        return {
            number: EarlierRound(
                charges=charged[batch.digest]["charge_nano"],
                contributors=tuple(charged[batch.digest]["contributors"]),
                release=self._earlier_release(number),
            )
            for number, batch in enumerate(batches)
            if batch.digest in charged
        }

    def forget_earlier(self) -> None:
        """What `earlier` told is in the journal, durably."""
        state = self._read_state()
        if state["format"] == EARLIER_FORMAT:
            self._write_state({"format": PLAN_FORMAT, "plan": state["plan"]})
        shutil.rmtree(self.state / RELEASES_FOLDER, ignore_errors=True)

    def _earlier_release(self, batch: int) -> Release | None:
        path = self.state / RELEASES_FOLDER / f"{batch:06d}.safetensors"
        if path.exists():
            return release_from_bytes(path.read_bytes())
        earlier = path.with_suffix(".npz")
        return release_from_npz(earlier.read_bytes()) if earlier.exists() else None

    def _write_state(self, state: Mapping[str, Any]) -> None:
        replace_file(self.state / "plan.json", json.dumps(state, indent=1).encode())

    def _read_state(self) -> dict[str, Any]:
        try:
            state: dict[str, Any] = json.loads((self.state / "plan.json").read_bytes())
        except ValueError:
            state = {}
        if not isinstance(state, dict) or not {"format", "plan"} <= state.keys():
            raise BadData(f"the plan of {self.out} is damaged; start again in an empty folder, which is charged anew")
        return state


@contextmanager
def open_job_folder(out: Path) -> Iterator[JobFolder]:
    """Own an output folder while working in it.

    Raises:
        OutputInUse: another process works there.
        BadData: it cannot be made or written.
    """
    if out.exists() and not out.is_dir():
        raise BadData(f"the output is to be a folder, and {out} is a file; choose another place")
    if out.exists() and not (out / ".job").exists() and any(out.iterdir()):
        raise BadData(f"output folder {out} is not empty and holds no job of ours; choose an empty folder")
    missing = [folder for folder in (out / ".job", out, *out.parents) if not folder.exists()]
    try:
        (out / ".job").mkdir(mode=0o700, parents=True, exist_ok=True)
        # Models and secrets lie below; a folder of an earlier version was open to everybody on the machine.
        (out / ".job").chmod(0o700)
        with exclusive(out / ".job" / "lock", f"output folder {out}"):
            try:
                yield JobFolder(out)
            except LabelerError as error:
                # Only the owner may clean up, and only a refusal: what an interruption leaves is continued.
                if missing and not isinstance(error, TryAgain) and not (out / ".job" / "plan.json").exists():
                    _remove_unused(out, missing)
                raise
    except OSError as error:
        raise BadData(f"cannot write to output folder {out}: {error.strerror or error}") from None


def _remove_unused(out: Path, made: list[Path]) -> None:
    """Leave no trace of a job that was refused: remove what was made for it, innermost folder first."""
    shutil.rmtree(out / ".job", ignore_errors=True)
    for folder in made[1:]:
        try:
            folder.rmdir()
        except OSError:
            return
