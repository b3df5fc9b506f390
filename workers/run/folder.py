"""The output folder of a job: one owner at a time, every step durable, nothing half-written.

    OUT/
      .job/lock            held by the process that works here.
      .job/plan.json       what this folder is for: task digest, shard versions, batches.
      .job/journal.db      what was charged and opened (workers.run.labeling).
      .job/keys/           a key of each agent for each round that is not released yet; of each tallier, too, where
                           talliers add the noise (labeler.noise); many rounds are drawn at once.
      .job/released/       the models that were written here, with their privacy cards (feature_store.results.models).
      .job/answers/ROUND   what each agent answered, encrypted under its key; written once, when all have answered.
      pseudo_labels.parquet, report.json, report.html ...   written last, each by rename.

The rules are those of `labeler.rounds.agent`. Keys are durable before anything is computed with them, and the answers
of a round before anything of it is summed. Both are erased once its release is stored: the holder of a key can subtract
that agent's noise. A kill in between costs computing. What was not stored whole is computed again, under the same keys
and from the records that the plan names. A batch that was charged and whose keys are gone is refused.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from feature_store.results.evaluations import EVALUATION
from feature_store.results.models import RELEASED, ReleasedModels
from labeler.errors import BadData, LabelerError, StorageFull, TryAgain
from labeler.system.erasable import KeyFolder, lock_away, take_out
from labeler.system.files import exclusive, is_full, replace_file

PLAN_FORMAT: Final = "labeler-job/2"
JOURNAL_FILE: Final = "journal.db"
REPORT: Final = "report.json"
KEYS_FOLDER, ANSWERS_FOLDER = "keys", "answers"

_FOR_PEOPLE: Final = "task"
"""The task field by field in a plan; its digest identifies it, and this is for people."""

_KEYS_AT_ONCE: Final = 4096
_LENGTH_BYTES: Final = 8

Bodies = tuple[bytes, ...]


class JobFolder:
    """An output folder; see the module. Make one with `open_job_folder`."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.state = out / ".job"
        self._plan = self.state / "plan.json"
        self.released = ReleasedModels(self.state / RELEASED)

    def begin(self, plan: dict[str, Any]) -> None:
        """Record what this folder is for, or check that it is for the same.

        Raises:
            BadData: the folder belongs to a job with another plan.
        """
        if not self.check_same(plan):
            replace_file(self._plan, json.dumps({"format": PLAN_FORMAT, "plan": plan}, indent=1).encode())

    def check_same(self, plan: Mapping[str, Any]) -> bool:
        """Check that what is known of a plan so far is what this folder is for.

        Returns:
            True if it is for anything.

        Raises:
            BadData: the folder belongs to a job with another plan.
        """
        if not self._plan.exists():
            return False
        found, known = self._read_plan()
        differing = sorted(key for key in plan.keys() - {_FOR_PEOPLE} if known.get(key) != plan[key])
        if found != PLAN_FORMAT or differing:
            other, to_do = ("another, finished job", "read") if self.is_finished else ("another job", "continue")
            raise BadData(
                f"output folder {self.out} holds {other} (differs in: {', '.join(differing) or 'format'}); choose an "
                f"empty folder, or repeat that job's exact settings to {to_do} it"
            )
        return True

    @property
    def is_finished(self) -> bool:
        """True if the last file of a job is written here: all its answers are stored, and none is asked for again."""
        is_published = any((self.out / last).exists() for last in (REPORT, EVALUATION))
        return is_published and self._plan.exists() and (self.state / JOURNAL_FILE).exists()

    def questions(self) -> int | None:
        """Return the number of questions of the job that was started here; None where none was.

        Raises:
            BadData: the plan is damaged.
        """
        if not self._plan.exists():
            return None
        try:
            return int(self._read_plan()[1]["task"]["max_queries"])
        except (KeyError, TypeError, ValueError):
            raise BadData(f"the plan of {self.out} names no task; start again in an empty folder") from None

    def destroy_secrets(self) -> None:
        """Erase every key, and remove the answers."""
        if (self.state / KEYS_FOLDER).is_dir():
            keys = KeyFolder(self.state / KEYS_FOLDER)
            keys.erase_all(keys.names())
        for folder in (KEYS_FOLDER, ANSWERS_FOLDER):
            shutil.rmtree(self.state / folder, ignore_errors=True)

    def _read_plan(self) -> tuple[str, dict[str, Any]]:
        try:
            state = json.loads(self._plan.read_bytes())
            return str(state["format"]), dict(state["plan"])
        except (ValueError, KeyError, TypeError):
            raise BadData(
                f"the plan of {self.out} is damaged; start again in an empty folder, which is charged anew"
            ) from None


@contextmanager
def open_job_folder(out: Path) -> Iterator[JobFolder]:
    """Own an output folder while working in it.

    Raises:
        OutputInUse: another process works there.
        BadData: it cannot be made or written.
        StorageFull: there is no room for it.
    """
    if out.exists() and not out.is_dir():
        raise BadData(f"the output is to be a folder, and {out} is a file; choose another place")
    if out.exists() and not (out / ".job").exists() and any(out.iterdir()):
        raise BadData(f"output folder {out} is not empty and holds no job of ours; choose an empty folder")
    missing = [folder for folder in (out / ".job", out, *out.parents) if not folder.exists()]
    try:
        (out / ".job").mkdir(mode=0o700, parents=True, exist_ok=True)
        with exclusive(out / ".job" / "lock", f"output folder {out}"):
            try:
                yield JobFolder(out)
            except LabelerError as error:
                # Only the owner may clean up, and only after a refusal: an interrupted job is continued.
                if missing and not isinstance(error, TryAgain) and not (out / ".job" / "plan.json").exists():
                    _remove_unused(out, missing)
                raise
    except OSError as error:
        why = f"cannot write to output folder {out}: {error.strerror or error}"
        if is_full(error):
            raise StorageFull(f"{why}. Make room, then give the same command again: it continues there") from None
        raise BadData(why) from None


def _remove_unused(out: Path, made: list[Path]) -> None:
    """Leave no trace of a job that was refused: remove what was made for it, innermost folder first."""
    shutil.rmtree(out / ".job", ignore_errors=True)
    for folder in made[1:]:
        try:
            folder.rmdir()
        except OSError:
            return


class RoundStore:
    """Keys and answers of one job: of all its parties together, in few syncs. See the module.

    Args:
        state: folder of the job's state; private to its owner.
        talliers: names of those that draw noise; none where the agents add it.
        secrets: the key of every round, by agent and by tallier that draws noise, of a job that is seeded.
    """

    def __init__(
        self,
        state: Path,
        agents: Sequence[str],
        *,
        talliers: Sequence[str] = (),
        secrets: Mapping[str, bytes] | None = None,
    ) -> None:
        self._agents = tuple(sorted(agents))
        self._parties = (*self._agents, *talliers)
        self._keys = KeyFolder(state / KEYS_FOLDER)
        self._answers = state / ANSWERS_FOLDER
        self._secrets = dict(secrets or {})

    def __repr__(self) -> str:
        return f"RoundStore(agents={len(self._agents)}, <secret>)"

    def begin(self, rounds: Sequence[str]) -> None:
        """Draw the keys of rounds, as many of the first ones as are drawn at once, durably before this returns."""
        at_once = rounds[: max(1, _KEYS_AT_ONCE // len(self._agents))]
        drawn = [name for name in self._parties if name not in self._secrets]
        if wanted := [_name(party, one) for one in at_once for party in drawn]:
            self._keys.draw_all(wanted)

    def keys(self, round_digest: str) -> dict[str, bytes]:
        """Return the key of each agent that has one."""
        found = {agent: self._key(agent, round_digest) for agent in self._agents}
        return {agent: key for agent, key in found.items() if key is not None}

    def tallier_key(self, tallier: str, round_digest: str) -> bytes:
        """Return the key from which a tallier draws its noise of a round.

        Raises:
            BadData: it is gone. Other noise around the same votes would be a second answer.
        """
        key = self._key(tallier, round_digest)
        if key is None:
            raise BadData(
                f"the key of {tallier} for a batch that was charged is gone, so its noise cannot be replayed; start "
                "again in an empty folder, which is charged anew"
            )
        return key

    def answers(self, round_digest: str) -> dict[str, Bodies] | None:
        """Return what each agent had answered: one body per tallier; None where the answers were not stored.

        Raises:
            BadData: they were changed, or their keys are gone.
        """
        try:
            data = (self._answers / round_digest).read_bytes()
        except FileNotFoundError:
            return None
        locked = []
        while data:
            end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "big")
            locked.append(data[_LENGTH_BYTES:end])
            data = data[end:]
        if len(locked) != len(self._agents):
            raise BadData(f"the answers of {len(self._agents)} agents are damaged; start again in an empty folder")
        return {agent: self._open(agent, round_digest, one) for agent, one in zip(self._agents, locked, strict=True)}

    def store(self, round_digest: str, answers: Mapping[str, Bodies]) -> None:
        """Store the answers of all agents, durably; what was stored first stays."""
        if (self._answers / round_digest).exists():
            return
        keys = self.keys(round_digest)
        locked = [lock_away(keys[agent], round_digest, answers[agent]) for agent in self._agents]
        self._answers.mkdir(mode=0o700, parents=True, exist_ok=True)
        data = b"".join(len(one).to_bytes(_LENGTH_BYTES, "big") + one for one in locked)
        replace_file(self._answers / round_digest, data, mode=0o600)

    def erase(self, rounds: Sequence[str]) -> None:
        """Erase keys and answers of rounds whose releases are stored; nothing opens what is left of the answers."""
        self._keys.erase_all([_name(party, one) for one in rounds for party in self._parties])
        for one in rounds:
            (self._answers / one).unlink(missing_ok=True)

    def _key(self, party: str, round_digest: str) -> bytes | None:
        return self._secrets.get(party) or self._keys.read(_name(party, round_digest))

    def _open(self, agent: str, round_digest: str, locked: bytes) -> Bodies:
        key = self._key(agent, round_digest)
        if key is None:
            raise BadData(f"the key of {agent} for an answer that was stored is gone; start again in an empty folder")
        return take_out(key, round_digest, locked)


def _name(party: str, round_digest: str) -> str:
    return f"{party}.{round_digest}"
