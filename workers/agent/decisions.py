"""Decisions of the people of a site about their agent, and the admission of a task by them and by the policy.

Decisions are small files in the agent's home, because the agent owns its journal while it runs; it reads them before
every charge. A charged round is answered anyway: after a charge an answer, or its absence, would tell something that
nobody paid for. Nothing of a record takes part, so a refusal says nothing of any.

    approved/DIGEST     empty: a person has approved this task.
    refused/DIGEST      {"reason", "at"}: a person has refused it; the asker sees the reason. Both: refused.
    stopped             {"reason", "at"}: nothing new is answered.

A file that cannot be read decides as if it could: refused, stopped, in no words.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from labeler.errors import (
    AwaitingApproval,
    BudgetExceeded,
    InvalidSetting,
    PolicyRefusal,
    PrivacyRefusal,
    ProtocolViolation,
    RefusedByPerson,
    SiteStopped,
    Unavailable,
)
from labeler.ledger.agent_memory import AgentMemory
from labeler.ledger.database import Connection
from labeler.ledger.promises import SiteRefusal
from labeler.messages.bodies import Ask, Proposal, RefusalBody
from labeler.system.clock import Clock
from labeler.system.files import replace_file, sync_folder
from workers.agent.policy import Policy

log = logging.getLogger("labeler.agent")

APPROVED_FOLDER = "approved"
STOPPED_FILE = "stopped"
REFUSED_FOLDER = "refused"
MAX_REASON = 300
_MAX_BYTES = 8 * 1024
_BY_RULE = {one.problem_type for one in (PrivacyRefusal, PolicyRefusal, BudgetExceeded)}
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Decision:
    """A no of a person.

    Attributes:
        reason: in their words, sent to the asker; empty where they gave none.
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
    """True if a person has approved a task, whatever else was decided."""
    return (home / APPROVED_FOLDER / _checked(digest)).is_file()


def refuse(home: Path, digest: str, reason: str) -> None:
    """Refuse a task for good, or until somebody approves it after all.

    Args:
        reason: at most MAX_REASON printable characters; sent to the asker.

    Raises:
        InvalidSetting: no reason, a long one, or one with control characters; or the digest is none.
    """
    if not reason.strip():
        raise InvalidSetting("give a reason in a few words (--reason); the requester reads it")
    folder = home / REFUSED_FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    # First the no, so that at every moment one of the two holds.
    _write(folder / _checked(digest), reason)
    revoke_approval(home, digest)


def refused(home: Path, digest: str) -> Decision | None:
    """Return the refusal of a task, or None."""
    return _read(home / REFUSED_FOLDER / _checked(digest))


def stop(home: Path, reason: str = "") -> Decision:
    """Answer nothing new from now on; works while the agent runs, which checks before every charge.

    Raises:
        InvalidSetting: the reason is long, or has control characters.
    """
    _write(home / STOPPED_FILE, reason)
    return stopped(home) or Decision(reason, "")


def resume(home: Path) -> None:
    """Answer again; jobs that waited meanwhile and whose deadline has not passed continue."""
    _remove(home / STOPPED_FILE)


def stopped(home: Path) -> Decision | None:
    """Return the site's stop with its reason; None while it answers."""
    return _read(home / STOPPED_FILE)


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


class Admission:
    """The verdict of the site's policy and its people on a task, asked or only proposed.

    Args:
        read_policy: reads the policy as it is now.
        coordinator_key: with which signatures are checked.
    """

    def __init__(
        self,
        home: Path,
        memory: AgentMemory,
        *,
        read_policy: Callable[[], Policy],
        coordinator_key: str,
        clock: Clock,
    ) -> None:
        self._home = home
        self._memory = memory
        self._read_policy = read_policy
        self._coordinator_key = coordinator_key
        self._clock = clock

    def check(self, asked: Ask | Proposal, *, is_charged: bool = False) -> None:
        """Refuse what the policy does not allow, what people have refused, and what still needs their approval.

        Args:
            is_charged: its price was taken before. Then people were asked before, and their later decisions apply only
                to new rounds: after a charge the agent answers.

        Raises:
            ProtocolViolation: it has expired.
            PolicyRefusal: see Policy.check; or a person has refused the task.
            SiteStopped: the site answers nothing new for now.
            AwaitingApproval: a person has to approve the task; it waits for one from now on.
        """
        task = asked.task
        if asked.expires_at < self._clock().timestamp():
            raise ProtocolViolation(f"the {'ask' if isinstance(asked, Ask) else 'proposal'} has expired")
        approved = is_approved(self._home, task.digest)
        if approved != self._memory.is_approved(task.digest):
            # The journal follows the folder, so that a list of waiting tasks shows decisions.
            self._memory.follow(task, self._clock(), is_approved=approved)
        if not is_charged:
            if (no := refused(self._home, task.digest)) is not None:
                self._memory.follow(task, self._clock(), is_approved=False)
                raise RefusedByPerson(f"a person at the site has refused task {task.digest[:12]}" + _because(no))
            if (no := stopped(self._home)) is not None:
                raise SiteStopped(
                    "the site has stopped answering for now; the coordinator asks it again automatically" + _because(no)
                )
        try:
            policy = self._read_policy()
            policy.check(asked, coordinator_key=self._coordinator_key, is_approved=approved or is_charged)
        except AwaitingApproval:
            self._memory.request(task, self._clock())
            if isinstance(asked, Proposal):
                self._memory.note_requester(task.digest, asked.requester, self._clock())
            raise
        except PolicyRefusal as error:
            try:
                self.note(asked, RefusalBody.of(error))
            except Unavailable:  # a full disk: refused all the same
                log.warning("a refusal could not be kept", extra={"task_digest": task.digest})
            raise

    def note(self, asked: Ask | Proposal, sent: RefusalBody, *, connection: Connection | None = None) -> None:
        """Keep a refusal by the policy or the ledger for the site's people, in the words that are sent.

        Args:
            connection: the transaction that decides it; then both are durable, or neither.
        """
        if sent.reason not in _BY_RULE:
            return
        job_id, requester = (asked.job_id, asked.requester) if isinstance(asked, Proposal) else ("", "")
        digest = asked.digest if isinstance(asked, Proposal) else asked.round.digest
        task, at = asked.task, self._clock()
        no = SiteRefusal(task.digest, job_id, task.name, requester, sent.reason, sent.sentence, at)
        self._memory.note_refusal(no, digest, connection=connection)
