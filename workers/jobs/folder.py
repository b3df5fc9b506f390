"""The output folder of a job: one owner at a time, every step durable, nothing half-written.

    OUT/
      .job/lock          held by the process that works here
      .job/plan.json     what this folder is for: task digest, shard versions, batches, ledger
      .job/keys/         a key of each agent for each batch that is not released yet; erased when it is
      .job/answers/      what the agents answered, encrypted under those keys; erased with them
      .job/releases/     one file per batch that was opened
      pseudo_labels.parquet, report.json, report.html ...   written last, each by rename

A resumed run replays what was stored, bit for bit. The keys are made before anything is opened, and a batch that was
charged and whose keys are gone is refused. When a batch is released its keys are erased: whoever holds one can subtract
that agent's noise.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from feature_store.durable import exclusive, replace_file
from feature_store.erasable import KeyFolder, erase_file
from feature_store.job_files.releases import release_from_bytes, release_from_npz, release_to_bytes
from labeler.errors import BadData, LabelerError, PrivacyRefusal, TryAgain
from labeler.release import Release
from workers.jobs.kept_rounds import ANSWERS_FOLDER, EARLIER_FOLDER, KEYS_FOLDER, KeptRounds

PLAN_FORMAT = "labeler-job/1"
_FOR_PEOPLE = "task"
"""In a plan, the task field by field. Its digest, beside it, stands for it: fields that a later version added do not
change the digest of a task that does not use them, and so do not make another job of it."""


class JobFolder:
    """See the module's docstring. Make one with `open_job_folder`."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self._state = out / ".job"

    def begin(self, plan: dict[str, Any]) -> None:
        """Record what this folder is for, or check that it is for the same.

        Raises:
            BadData: the folder belongs to a job with another plan.
        """
        if self.check_same(plan):
            return
        path = self._state / "plan.json"
        replace_file(path, json.dumps({"format": PLAN_FORMAT, "plan": plan, "ledger": []}, indent=1).encode())

    def check_same(self, plan: Mapping[str, Any]) -> bool:
        """Check that what is known of a plan so far is what this folder is for; whether it is for anything.

        Raises:
            BadData: the folder belongs to a job with another plan.
        """
        if not (self._state / "plan.json").exists():
            return False
        found = self._read_state()
        known = found.get("plan", {})
        differing = sorted(key for key in plan.keys() - {_FOR_PEOPLE} if known.get(key) != plan[key])
        if found.get("format") != PLAN_FORMAT or differing:
            raise BadData(
                f"output folder {self.out} holds another job (differs in: {', '.join(differing) or 'format'}); "
                "choose an empty folder, or repeat that job's exact settings to continue it"
            )
        return True

    def agreed_colluding_agents(self) -> int | None:
        """What the job that was begun here counts on; None where none was.

        The default of a task file changed once, and an interrupted job goes on with what all parties agreed on.

        Raises:
            BadData: the plan is damaged.
        """
        if not (self._state / "plan.json").exists():
            return None
        try:
            return int(self._read_state()["plan"]["task"]["colluding_agents"])
        except (KeyError, TypeError, ValueError):
            raise BadData(f"the plan of {self.out} names no task; start again in an empty folder") from None

    def rounds(self, agents: Sequence[str], *, secrets: Mapping[str, bytes] | None = None) -> KeptRounds:
        """What the agents keep of the batches that are not released yet.

        Args:
            agents: their ids.
            secrets: the key of every round, by agent, of a job that is seeded.

        Raises:
            BadData: an earlier version's secret is damaged.
        """
        return KeptRounds(self._state, agents, secrets=secrets)

    def check_replayable(self, batch_digest: str, round_digest: str, rounds: KeptRounds, agents: Sequence[str]) -> None:
        """Refuse a batch that was charged and whose noise cannot be replayed.

        Raises:
            BadData: the key of an agent is gone; other noise around the same votes would be a second answer.
        """
        if all(entry["id"] != batch_digest for entry in self.ledger()):
            return
        missing = sorted(set(agents) - rounds.keys(round_digest).keys())
        if missing:
            raise BadData(
                f"the key of {missing[0]} for a batch that was charged is gone from {self.out}, so its noise cannot "
                "be replayed; start again in an empty folder, which is charged anew"
            )

    def destroy_secrets(self) -> None:
        """Erase every key there is, and what older versions kept: their noise secrets and models."""
        if (self._state / KEYS_FOLDER).is_dir():
            keys = KeyFolder(self._state / KEYS_FOLDER)
            keys.erase_all(keys.names())
        for path in sorted((self._state / EARLIER_FOLDER).rglob("*")):
            if path.is_file():
                erase_file(path)
        for folder in (KEYS_FOLDER, EARLIER_FOLDER, "models", ANSWERS_FOLDER):
            shutil.rmtree(self._state / folder, ignore_errors=True)

    def ledger(self) -> list[dict[str, Any]]:
        """Charges posted so far, oldest first."""
        entries: list[dict[str, Any]] = self._read_state()["ledger"]
        return entries

    def post(self, entry: dict[str, Any]) -> int:
        """Append a charge, durably, before what it pays for is opened. The same entry twice is one.

        Returns:
            The entry's sequence number, from 1.

        Raises:
            PrivacyRefusal: an entry of that id stands for something else, for example other contributors: two sums of
                one round under the same noise would differ by single ballots.
        """
        path = self._state / "plan.json"
        state = self._read_state()
        for number, known in enumerate(state["ledger"], start=1):
            if known["id"] == entry["id"] and known != entry:
                raise PrivacyRefusal(
                    "this batch was charged before for another set of agents or another price; opening it again would "
                    "release the difference. Start again in an empty folder, which is charged anew"
                )
            if known["id"] == entry["id"]:
                return number
        state["ledger"].append(entry)
        replace_file(path, json.dumps(state, indent=1).encode())
        return len(state["ledger"])

    def stored_release(self, batch: int) -> Release | None:
        """What batch number `batch` opened, if it did."""
        path = self._release_path(batch)
        if path.exists():
            return release_from_bytes(path.read_bytes())
        earlier = path.with_suffix(".npz")  # Of a version that had a codec of its own for this folder.
        return release_from_npz(earlier.read_bytes()) if earlier.exists() else None

    def store_release(self, batch: int, release: Release) -> None:
        """Keep what a batch opened, by rename."""
        path = self._release_path(batch)
        path.parent.mkdir(exist_ok=True)
        replace_file(path, release_to_bytes(release))

    def _read_state(self) -> dict[str, Any]:
        try:
            state: dict[str, Any] = json.loads((self._state / "plan.json").read_bytes())
        except ValueError:
            state = {}
        if not isinstance(state, dict) or not {"format", "plan", "ledger"} <= state.keys():
            raise BadData(f"the plan of {self.out} is damaged; start again in an empty folder, which is charged anew")
        return state

    def _release_path(self, batch: int) -> Path:
        return self._state / "releases" / f"{batch:06d}.safetensors"


@contextmanager
def open_job_folder(out: Path) -> Iterator[JobFolder]:
    """Own an output folder while working in it.

    Raises:
        OutputInUse: another process works there.
        BadData: it cannot be made or written.
    """
    if out.exists() and not (out / ".job").exists() and (not out.is_dir() or any(out.iterdir())):
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
