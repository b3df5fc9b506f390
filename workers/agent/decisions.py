"""What people at a site decide about their agent: approve a task, refuse it with a reason, stop answering, go on.

Decisions are small files in the agent's home, because the agent owns its journal while it runs; it looks at them before
every charge (workers.agent.admission). What was charged before is answered all the same: after a charge an answer, or
its absence, would tell something that nobody paid for.

    approved/DIGEST     empty: a person has approved this task
    refused/DIGEST      {"reason", "at"}: a person has refused it; told to whoever asks. Both: refused
    stopped             {"reason", "at"}: nothing new is answered

A file that cannot be read decides as if it could: refused, stopped, in no words.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from labeler.errors import InvalidSetting, LabelerError, PolicyRefusal, SiteStopped
from labeler.system.files import replace_file, sync_folder

APPROVED_FOLDER = "approved"
STOPPED_FILE = "stopped"
REFUSED_FOLDER = "refused"
MAX_REASON = 300
_MAX_BYTES = 8 * 1024
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Decision:
    """A no of a person.

    Attributes:
        reason: in their words, told to whoever asks; empty where they gave none.
        at: when, ISO 8601; empty where the file does not say.
    """

    reason: str
    at: str


def approve(home: Path, digest: str) -> None:
    """Let the agent answer a task; a refusal from before is taken back."""
    folder = home / APPROVED_FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    replace_file(folder / _checked(digest), b"", mode=0o600)
    _remove(home / REFUSED_FOLDER / digest)


def revoke_approval(home: Path, digest: str) -> None:
    """Take an approval back; what was charged stays answered."""
    _remove(home / APPROVED_FOLDER / _checked(digest))


def is_approved(home: Path, digest: str) -> bool:
    """Whether a person has approved a task, whatever else was decided."""
    return (home / APPROVED_FOLDER / _checked(digest)).is_file()


def refuse(home: Path, digest: str, reason: str) -> None:
    """Refuse a task for good, or until somebody approves it after all.

    Args:
        reason: at most MAX_REASON printable characters; whoever asks is told.

    Raises:
        InvalidSetting: no reason, a long one, or one with control characters; or the digest is none.
    """
    if not reason.strip():
        raise InvalidSetting("say in a few words why, since whoever asks is told: --reason")
    folder = home / REFUSED_FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    # First the no, so that no moment lies between in which neither holds.
    _write(folder / _checked(digest), reason)
    revoke_approval(home, digest)


def refused(home: Path, digest: str) -> Decision | None:
    """The refusal of a task, or None."""
    return _read(home / REFUSED_FOLDER / _checked(digest))


def stop(home: Path, reason: str = "") -> Decision:
    """Answer nothing new from now on; works while the agent runs, which looks before every charge.

    Raises:
        InvalidSetting: the reason is long, or has control characters.
    """
    _write(home / STOPPED_FILE, reason)
    return stopped(home) or Decision(reason, "")


def resume(home: Path) -> None:
    """Answer again; jobs that waited meanwhile and whose deadline has not passed go on."""
    _remove(home / STOPPED_FILE)


def stopped(home: Path) -> Decision | None:
    """Whether and why the site has stopped; None while it answers."""
    return _read(home / STOPPED_FILE)


def objection(home: Path, digest: str) -> LabelerError | None:
    """What people have against answering a task now, as the error that whoever asks is told; None: nothing."""
    no = refused(home, digest)
    if no is not None:
        return PolicyRefusal(f"a person at the site has refused task {digest[:12]}" + _because(no))
    no = stopped(home)
    if no is not None:
        return SiteStopped("the site has stopped answering for now; it is asked again by itself" + _because(no))
    return None


def _because(no: Decision) -> str:
    return f": {no.reason}" if no.reason else ""


def _write(path: Path, reason: str) -> None:
    said = " ".join(reason.split(" ")).strip()
    if len(said) > MAX_REASON or not said.isprintable():
        raise InvalidSetting(f"a reason has at most {MAX_REASON} printable characters on one line; found {len(said)}")
    at = datetime.now(UTC).isoformat(timespec="seconds")
    replace_file(path, json.dumps({"reason": said, "at": at}).encode() + b"\n", mode=0o600)


def _read(path: Path) -> Decision | None:
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(_MAX_BYTES))
        reason, at = str(content["reason"]), str(content["at"])
        if len(reason) <= MAX_REASON and len(at) <= MAX_REASON and (reason + at).isprintable():
            return Decision(reason, at)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    return Decision("", "")


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
    if path.parent.is_dir():
        sync_folder(path.parent)


def _checked(digest: str) -> str:
    if not _DIGEST.fullmatch(digest):
        raise InvalidSetting("a task is named by its whole digest, 64 hexadecimal digits; see `labeler agent waiting`")
    return digest
