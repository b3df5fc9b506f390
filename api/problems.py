"""Refusals as problem documents (RFC 9457): a stable type, a title and a status for every error of the tree.

`type` is "urn:labeler:problem:" and the error's `problem_type`. Clients decide by it; `detail` is for people. A refusal
for budget has further members: whose account, at which level, what was asked, what is left, and who spent last.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from labeler import errors
from labeler.budget import epsilon_spent
from labeler.errors import BudgetExceeded, LabelerError

TYPE_PREFIX = "urn:labeler:problem:"

PROBLEMS: dict[type[LabelerError], tuple[int, str]] = {
    errors.LabelerError: (500, "The service could not do this"),
    errors.InvalidSetting: (422, "A setting is outside its bounds"),
    errors.InvalidTask: (422, "The task cannot be made"),
    errors.UnsafeGrid: (422, "The noise grid is too coarse to prove anything"),
    errors.TooLarge: (413, "This is larger than is taken"),
    errors.IdempotencyMismatch: (422, "The idempotency key belongs to another request"),
    errors.BadData: (422, "The data is not what it should be"),
    errors.DamagedShard: (500, "A shard is damaged"),
    errors.MixedShards: (409, "Agents do not agree on classes or backbone"),
    errors.UnreadableImage: (422, "An image cannot be read"),
    errors.IdenticalImages: (422, "Private images are there more than once"),
    errors.JournalBroken: (503, "The journal does not hold"),
    errors.JournalBehind: (503, "The journal is older than what is known of it"),
    errors.UnsafeStorage: (503, "The storage could lose a charge"),
    errors.PrivacyRefusal: (403, "This would void the privacy guarantee"),
    errors.BudgetExceeded: (409, "The privacy budget does not cover this"),
    errors.PolicyRefusal: (403, "The policy of a site does not allow this"),
    errors.UnsafeIndex: (403, "The index depends on private data"),
    errors.ProtocolViolation: (409, "A message breaks the rules of the round"),
    errors.WrongDigest: (409, "A message belongs to another task or round"),
    errors.WrongVersion: (409, "A message is written in another version of the wire format"),
    errors.DuplicateAgent: (409, "An agent sent two different contributions"),
    errors.LateShare: (409, "A share came after the sum of its round was made"),
    errors.Forged: (403, "The signature or seal does not hold"),
    errors.Replayed: (409, "The message was taken before"),
    errors.NotEnrolled: (403, "The sender is not enrolled"),
    errors.AccessRefused: (403, "Access refused"),
    errors.NotAuthenticated: (401, "A known token is needed"),
    errors.NotAllowed: (403, "The role of the token does not reach this far"),
    errors.NotFound: (404, "There is nothing of that name"),
    errors.Gone: (410, "It was deleted for good"),
    errors.NotReady: (409, "It is not in the state for this"),
    errors.JobNotCompleted: (409, "The job ended without labels"),
    errors.TryAgain: (503, "Later this may go through"),
    errors.Interrupted: (503, "The work was stopped; it continues"),
    errors.QuorumNotReached: (503, "Too few agents answered"),
    errors.OutputInUse: (503, "Another process is at work here"),
    errors.JournalInUse: (503, "Another process holds the journal"),
    errors.AwaitingApproval: (503, "A person at a site has to approve first"),
    errors.SiteStopped: (503, "A site has stopped answering for now"),
    errors.RateLimited: (429, "Too many requests"),
    errors.Unavailable: (503, "A part of the service cannot be reached now"),
    errors.StorageFull: (507, "There is no room left to keep it"),
}
"""Status and title by class; a class that is not listed has those of its parent."""


class KeptRefusal(Exception):
    """The cause of a refusal that is told again: the problem document as it was kept with the refused job."""

    def __init__(self, problem: Mapping[str, Any]) -> None:
        super().__init__("kept with the refused job")
        self.problem = dict(problem)


def status_of(error: LabelerError) -> int:
    """The HTTP status of an error."""
    return _row(error)[0]


def problem_of(error: LabelerError, *, delta: float | None = None, job_id: str = "") -> dict[str, Any]:
    """The problem document of an error, as JSON types.

    Args:
        delta: at which a refusal for budget states its epsilons; left out where none is known.
        job_id: the job that was refused, where there is one.
    """
    if isinstance(error.__cause__, KeptRefusal):
        return error.__cause__.problem
    status, title = _row(error)
    problem: dict[str, Any] = {
        "type": TYPE_PREFIX + error.problem_type,
        "title": title,
        "status": status,
        "detail": str(error),
    }
    if job_id:
        problem["job_id"] = job_id
    if isinstance(error, BudgetExceeded) and error.account:
        problem |= _budget_members(error, delta)
    return problem


def refusal_of(problem: Mapping[str, Any]) -> BudgetExceeded:
    """The refusal for budget that a kept problem document tells of; `problem_of` gives that document back."""
    error = BudgetExceeded(
        str(problem["detail"]),
        account=str(problem.get("account", "")),
        level=str(problem.get("level", "")),
        asked=int(problem.get("asked_nano") or 0),
        left=int(problem.get("left_nano") or 0),
        cap=int(problem.get("cap_nano") or 0),
        last_spenders=tuple(
            (str(entry["reservation_id"]), int(entry["amount_nano"])) for entry in problem.get("last_spenders", ())
        ),
    )
    error.__cause__ = KeptRefusal(problem)
    return error


def _row(error: LabelerError) -> tuple[int, str]:
    return next(PROBLEMS[kind] for kind in type(error).__mro__ if kind in PROBLEMS)


def _budget_members(error: BudgetExceeded, delta: float | None) -> dict[str, Any]:
    # A charge is at least one nano-unit: nothing asked means that no finite charge exists.
    members: dict[str, Any] = {
        "account": error.account,
        "level": error.level,
        "asked_nano": error.asked or None,
        "left_nano": error.left,
        "cap_nano": error.cap,
        "last_spenders": [{"reservation_id": name, "amount_nano": amount} for name, amount in error.last_spenders],
    }
    if delta is not None:
        members |= {
            "delta": delta,
            "asked_epsilon": epsilon_spent(error.asked, delta) if error.asked else None,
            "left_epsilon": epsilon_spent(error.left, delta),
            "cap_epsilon": epsilon_spent(error.cap, delta),
        }
    return members
