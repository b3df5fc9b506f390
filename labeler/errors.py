"""Every error this project raises on purpose, in one tree.

    LabelerError
    ├── InvalidSetting          a setting is outside its bounds             exit 2
    │   ├── InvalidTask         a task file or task message is malformed
    │   └── UnsafeGrid          the noise grid is too coarse to prove anything
    ├── BadData                 a file is not what it should be              exit 1
    │   ├── DamagedShard        a shard's bytes do not match its manifest
    │   ├── MixedShards         shards that must agree (classes, backbone) do not
    │   └── UnreadableImage     a file that should hold an image does not
    ├── PrivacyRefusal          doing it would void or exceed the guarantee  exit 1
    │   ├── BudgetExceeded      the price is higher than what is left
    │   └── UnsafeIndex         the index depends on private data
    ├── ProtocolViolation       a message breaks the rules of the round      exit 1
    │   ├── WrongDigest         it belongs to another task or round
    │   └── DuplicateAgent      an agent sent two different contributions
    └── TryAgain                nothing is wrong with the request            exit 75
        ├── Interrupted         the user stopped it; it continues
        ├── QuorumNotReached    too few agents answered; nothing was opened
        └── OutputInUse         another process works in the output folder

A message says what was wrong, the bound, what was found and what to do next. It never holds a
vote, a share, a private label or a private feature.
"""

from __future__ import annotations

from typing import ClassVar


class LabelerError(Exception):
    """The root: catch it to catch everything raised on purpose.

    Attributes:
        problem_type: stable slug, the `type` of an RFC 9457 problem document.
        exit_code: what a command line ends with (1 failed, 2 wrong usage, 75 try again).
    """

    problem_type: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1


class InvalidSetting(LabelerError, ValueError):
    """A setting is outside its bounds."""

    problem_type = "invalid-setting"
    exit_code = 2


class InvalidTask(InvalidSetting):
    """A task file or a task message is malformed."""

    problem_type = "invalid-task"


class UnsafeGrid(InvalidSetting):
    """The noise grid is too coarse for the sum of shares to be a discrete Gaussian."""

    problem_type = "unsafe-grid"


class BadData(LabelerError):
    """A file is not what it should be."""

    problem_type = "bad-data"


class DamagedShard(BadData):
    """The bytes of a shard do not match its manifest."""

    problem_type = "damaged-shard"


class MixedShards(BadData):
    """Shards that must agree on classes, backbone or dimension do not."""

    problem_type = "mixed-shards"


class UnreadableImage(BadData):
    """A file that should hold an image does not."""

    problem_type = "unreadable-image"


class PrivacyRefusal(LabelerError):
    """Going on would void or exceed a stated guarantee."""

    problem_type = "privacy-refusal"


class BudgetExceeded(PrivacyRefusal):
    """The price of what was asked is higher than what is left."""

    problem_type = "budget-exceeded"


class UnsafeIndex(PrivacyRefusal):
    """The index depends on private data beyond the records themselves."""

    problem_type = "unsafe-index"


class ProtocolViolation(LabelerError):
    """A message breaks the rules of the round."""

    problem_type = "protocol-violation"


class WrongDigest(ProtocolViolation):
    """A message belongs to another task, batch or round."""

    problem_type = "wrong-digest"


class DuplicateAgent(ProtocolViolation):
    """One agent sent two different contributions to one round."""

    problem_type = "duplicate-agent"


class TryAgain(LabelerError):
    """Nothing is wrong with the request; later it may go through."""

    problem_type = "try-again"
    exit_code = 75


class Interrupted(TryAgain):
    """The user stopped the work; the same command continues it."""

    problem_type = "interrupted"


class QuorumNotReached(TryAgain):
    """Too few agents answered, so nothing was opened."""

    problem_type = "quorum-not-reached"


class OutputInUse(TryAgain):
    """Another process is working in the output folder."""

    problem_type = "output-in-use"
