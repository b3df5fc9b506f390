"""Every error this project raises on purpose, in one tree.

    LabelerError
    ├── InvalidSetting          a setting is outside its bounds             exit 2
    │   ├── InvalidTask         a task file or task message is malformed
    │   ├── UnsafeGrid          the noise grid is too coarse to prove anything
    │   ├── TooLarge            a message, file or image is larger than the limit
    │   └── IdempotencyMismatch an idempotency key was used for another request
    ├── BadData                 a file is not what it should be              exit 1
    │   ├── NotThere            a file or folder that was named is not there exit 2
    │   ├── DamagedShard        a shard's bytes do not match its manifest
    │   ├── MixedShards         shards that must agree (classes, backbone) do not
    │   ├── UnreadableImage     a file that should hold an image does not
    │   │   └── UnreadableFile  it cannot be read now, whatever it holds
    │   ├── IdenticalImages     private images are there more than once
    │   ├── NoUsableImage       no image of a source can be embedded
    │   ├── JournalBroken       the journal was edited, or its chain is broken
    │   ├── JournalBehind       the journal is older than an earlier copy of it
    │   └── UnsafeStorage       the storage does not keep what it says it keeps
    ├── PrivacyRefusal          doing it would void or exceed the guarantee  exit 1
    │   ├── BudgetExceeded      the price is higher than what is left
    │   ├── PolicyRefusal       the site's own policy does not allow it
    │   │   └── RefusedByPerson a person at the site has refused it
    │   └── UnsafeIndex         the index depends on private data
    ├── ProtocolViolation       a message breaks the rules of the round      exit 1
    │   ├── WrongDigest         it belongs to another task or round
    │   ├── WrongVersion        it is written in another version of the wire format
    │   ├── DuplicateAgent      an agent sent two different contributions
    │   ├── LateShare           it came after the sum of its round was made
    │   ├── Forged              its signature or seal is not valid
    │   ├── Replayed            its sequence number was seen before
    │   └── NotEnrolled         its sender is unknown, or its key was revoked
    ├── AccessRefused           the caller may not have it                   exit 1
    │   ├── NotAuthenticated    no token, or an unknown one
    │   └── NotAllowed          the token's role is not sufficient
    ├── NotFound                no object has that name                      exit 1
    │   └── Gone                it was there, and was deleted for good
    ├── NotReady                it exists, and is not in the state for this  exit 1
    ├── JobNotCompleted         a job of a service ended without labels      exit 1
    └── TryAgain                nothing is wrong with the request            exit 75
        ├── Interrupted         the user stopped it; it continues
        ├── QuorumNotReached    too few agents answered; nothing was opened
        ├── OutputInUse         another process works in the output folder
        ├── JournalInUse        another process holds the journal
        ├── AwaitingApproval    a person at the site has to approve first
        ├── SiteStopped         the site has stopped answering for now
        ├── RateLimited         too many requests for one token
        │   └── QuotaUsedUp     its uploads take as many bytes as one token may have
        └── Unavailable         a part of the service cannot be reached now
            └── StorageFull     there is no room left to keep it

A message says what was wrong, the bound, what was found and what to do next. It never holds a
vote, a share, a private label or a private feature.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar


class LabelerError(Exception):
    """The root: catch it to catch everything raised on purpose.

    Attributes:
        problem_type: the `type` of an RFC 9457 problem document: the name of its class or nearest ancestor in this
            module, in words with hyphens. It is stable, because these names are.
        exit_code: exit status of a command line (1 failed, 2 wrong usage, 75 try again). A command that refuses by
            itself and one whose service refuses end alike (`exit_code_of`).
    """

    problem_type: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1

    def __init_subclass__(cls) -> None:
        if cls.__module__ == __name__:
            cls.problem_type = re.sub(r"(?<!^)(?=[A-Z])", "-", cls.__name__).lower()
            _BY_TYPE[cls.problem_type] = cls


_BY_TYPE: dict[str, type[LabelerError]] = {LabelerError.problem_type: LabelerError}


def exit_code_of(problem_type: str) -> int | None:
    """Return the exit code of a refusal that a service names ("urn:labeler:problem:..."); None if no class has it."""
    name = problem_type.rpartition(":")[2]
    found = InvalidSetting if name == "invalid-request" else _BY_TYPE.get(name)
    return None if found is None else found.exit_code


class InvalidSetting(LabelerError, ValueError):
    """A setting is outside its bounds."""

    exit_code = 2


class InvalidTask(InvalidSetting):
    """A task file or a task message is malformed."""


class UnsafeGrid(InvalidSetting):
    """The noise grid is too coarse for the sum of shares to be a discrete Gaussian."""


class TooLarge(InvalidSetting):
    """A message, file or image is larger than the limit."""


class IdempotencyMismatch(InvalidSetting):
    """An idempotency key came again with another request."""


class BadData(LabelerError):
    """A file is not what it should be."""


class NotThere(BadData):
    """A file or folder that was named is not there: for a command line a wrong usage, as any other wrong argument."""

    exit_code = 2


class DamagedShard(BadData):
    """The bytes of a shard do not match its manifest."""


class MixedShards(BadData):
    """Shards that must agree on classes, backbone or dimension do not."""


class UnreadableImage(BadData):
    """A file that should hold an image does not."""


class UnreadableFile(UnreadableImage):
    """A file cannot be read at this moment, whatever it holds."""


class IdenticalImages(BadData):
    """Private images are there more than once, and nobody said what to do with them.

    Attributes:
        groups: for each image the names of its files, and its contradictions. For the site's own people: the
            message tells their number, and no name.
    """

    def __init__(self, message: str, *, groups: Sequence[tuple[tuple[str, ...], str]] = ()) -> None:
        super().__init__(message)
        self.groups = tuple(groups)


class NoUsableImage(BadData):
    """No image of a source can be embedded.

    Attributes:
        left_out: the name of each image and the reason. For the site's own people: of private images the message tells
            neither names nor reasons nor their number.
    """

    def __init__(self, message: str, *, left_out: Sequence[tuple[str, str]] = ()) -> None:
        super().__init__(message)
        self.left_out = tuple(left_out)


class JournalBroken(BadData):
    """The journal was edited or damaged: its chain of hashes does not hold."""


class JournalBehind(BadData):
    """The journal is older than what was already known of it, so charges are missing from it."""


class UnsafeStorage(BadData):
    """The storage does not keep what it says it keeps, so a charge could be lost."""


class PrivacyRefusal(LabelerError):
    """Going on would void or exceed a stated guarantee."""


class BudgetExceeded(PrivacyRefusal):
    """The price of what was asked is higher than what is left.

    Attributes:
        account: owner of the budget; empty if the refusal is about no single account.
        level: "instance" or "agent"; empty as above.
        asked: nano-units of mu^2.
        left: nano-units of mu^2.
        cap: nano-units of mu^2.
        last_spenders: (reservation id, nano-units) of the last charges, oldest first.
    """

    def __init__(
        self,
        message: str,
        *,
        account: str = "",
        level: str = "",
        asked: int = 0,
        left: int = 0,
        cap: int = 0,
        last_spenders: tuple[tuple[str, int], ...] = (),
    ) -> None:
        super().__init__(message)
        self.account = account
        self.level = level
        self.asked = asked
        self.left = left
        self.cap = cap
        self.last_spenders = last_spenders


class PolicyRefusal(PrivacyRefusal):
    """The policy of the site that owns the records does not allow it."""


class RefusedByPerson(PolicyRefusal):
    """A person at a site has refused the task."""


class UnsafeIndex(PrivacyRefusal):
    """The index depends on private data beyond the records themselves."""


class ProtocolViolation(LabelerError):
    """A message breaks the rules of the round."""


class WrongDigest(ProtocolViolation):
    """A message belongs to another task, batch or round."""


class WrongVersion(ProtocolViolation):
    """A message is written in another version of the wire format than is read here."""


class DuplicateAgent(ProtocolViolation):
    """One agent sent two different contributions to one round."""


class LateShare(ProtocolViolation):
    """A share came after the sum of its round was made."""


class Forged(ProtocolViolation):
    """The signature or the seal of a message does not hold."""


class Replayed(ProtocolViolation):
    """A message with this or a later sequence number was taken from its sender before."""


class NotEnrolled(ProtocolViolation):
    """The sender is unknown, or its key was revoked."""


class AccessRefused(LabelerError):
    """The caller may not have it."""


class NotAuthenticated(AccessRefused):
    """There is no token, or it is not known."""


class NotAllowed(AccessRefused):
    """The token's role is not sufficient."""


class NotFound(LabelerError):
    """No object has that name."""


class Gone(NotFound):
    """It was there, and was deleted for good."""


class JobNotCompleted(LabelerError):
    """A job of a service ended without labels: failed, refused, cancelled or expired."""


class NotReady(LabelerError):
    """It exists, and is not in the state in which this can be done."""


class TryAgain(LabelerError):
    """The request is fine, and may succeed later."""

    exit_code = 75


class Interrupted(TryAgain):
    """The user stopped the work; the same command continues it."""


class QuorumNotReached(TryAgain):
    """Too few agents answered, so nothing was opened."""


class OutputInUse(TryAgain):
    """Another process is working in the output folder."""


class JournalInUse(TryAgain):
    """Another process holds the journal."""


class AwaitingApproval(TryAgain):
    """A person at the site has to approve the task first."""


class SiteStopped(TryAgain):
    """The people of a site have stopped their agent from answering anything new, until they let it go on."""


class RateLimited(TryAgain):
    """Too many requests came with one token."""


class QuotaUsedUp(RateLimited):
    """One token's uploads, kept and arriving, take as many bytes as they may."""


class Unavailable(TryAgain):
    """A part of the service cannot be reached now."""


class StorageFull(Unavailable):
    """There is no room left to keep it; once there is, the same request goes through."""
