"""One job of the winner release as a tallier sees it, and what an engine that computes it promises.

**What is computed.** For each query q, with s_c the noisy sum of class c (the sum of all contributors'
contributions, which only the three talliers together hold):

    winner(q) = the lowest c with s_c = max s,    or -1 where a threshold T is given and max s < T.

The rule for ties is part of the mechanism. The winner is a function of the noisy sums alone, so it is
covered by what they cost, and so is abstaining: the comparison with T is one more function of the same
noisy sums, of which only the value above is opened (post-processing, Dwork and Roth 2014, Prop. 2.1).

**Against whom.** Three talliers of whom at most one is dishonest, who reads everything that reaches it
but follows the protocol. It learns the winners, and otherwise nothing: what it sees is uniform and independent
of every sum (workers.winner.comparison). Two who pool what they hold learn the noisy sums, whose price stands
beside that of the winners (`histogram_epsilon`). One of the three deals the randomness of the two others and sees
nothing that they open. Which one makes no difference to whom one has to trust: any two of the three together could
open everything, with a dealer or without, and no one alone.

An engine is deterministic: the same shares give the same winners, so a job that failed is tried again
with the very same shares, and only with those. Each attempt draws new masks, so that many of them show no more than
one. Attempts are counted all the same, and end (workers.tallier.winners), because of what follows.

A dishonest tallier that does not follow the protocol can put in other shares at each attempt, and see from
the winners how the noisy sums compare with what it added. By enough attempts it learns noisy sums, as two
talliers do who pool what they hold: again no more than the price that stands beside, and one more reason to count.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from labeler.errors import InvalidSetting, LabelerError
from labeler.sharing import PrimeField, comparison_bits, field_for
from labeler.task import MOST_CLASSES
from workers.winner.certificates import fingerprint

NUM_PARTIES: Final = 3
"""Talliers of a winner job. With two, one dishonest tallier would be a majority, and nothing stays secret."""

ABSTAINED: Final = -1
"""The answer where the best noisy sum is below the threshold."""

PROTOCOL_VERSION: Final = "labeler-winner/3"

_MAX_ENTRIES = 2**31


@dataclass(frozen=True)
class Address:
    """Where a tallier listens for the two others during a job."""

    host: str
    port: int

    def __post_init__(self) -> None:
        if not self.host or self.host in ("0.0.0.0", "::", "*"):
            raise InvalidSetting("a tallier listens on one configured address, never on all of them; name the host")
        if not 1 <= self.port <= 65_535:
            raise InvalidSetting(f"a port lies between 1 and 65535, found {self.port}")


@dataclass(frozen=True)
class WinnerJob:
    """One job at one of its three talliers. Nothing in it is secret; the share comes beside it.

    Attributes:
        job_id: the same at all three, of no other job; at most 200 characters.
        agreement: SHA-256 in hexadecimal over everything else the talliers must agree on: the round, its
            contributors and their sharings. Shares of different sets add up to noise, and are not added.
        party: which tallier this is, 0 to 2.
        addresses: where the talliers listen, in tallier order (tallier 0 only connects).
        certificates: of the talliers, PEM, in tallier order: no other certificate is accepted.
        identity_path: key and certificate of this tallier, as `issue_certificate` wrote them.
        num_queries: rows of the shares.
        num_classes: columns of the shares, at least 2.
        lowest: the smallest a noisy sum can be, in grid units; at most 0. Fixes the field with `highest`.
        highest: the largest a noisy sum can be, in grid units.
        threshold: abstain where the best noisy sum is below it, in grid units; None never abstains.
        contributors: agents whose shares were added, sorted. Compared in full, so that an error can say who differs.
        checks_rows: whether the rows of each contributor are checked before anything is opened (labeler.tally).
        verify_keys: Ed25519 keys of the talliers, in tallier order, with which each has signed `digest`; empty asks
            for no signatures.
        signature: this tallier's own over `digest`, in hexadecimal (`WinnerJob.statement`).
        time_limit_s: the job is over after this long, whatever happens.
        meeting_limit_s: it is over after this long unless all talliers have come to it.

    Raises:
        InvalidSetting: a number is outside its bounds, or the sums are too wide for a field.
    """

    job_id: str
    agreement: str
    party: int
    addresses: tuple[Address, ...]
    certificates: tuple[str, ...]
    identity_path: Path
    num_queries: int
    num_classes: int
    lowest: int
    highest: int
    threshold: int | None = None
    contributors: tuple[str, ...] = ()
    checks_rows: bool = False
    verify_keys: tuple[str, ...] = ()
    signature: str = ""
    time_limit_s: float = 120.0
    meeting_limit_s: float = 120.0

    def __post_init__(self) -> None:
        if not 1 <= len(self.job_id) <= 200:
            raise InvalidSetting(f"a job_id has 1 to 200 characters, found {len(self.job_id)}")
        if len(self.agreement) != 64:
            raise InvalidSetting("the agreement of a winner job is a SHA-256 in hexadecimal (64 digits)")
        if not len(self.addresses) == len(self.certificates) == NUM_PARTIES:
            raise InvalidSetting(
                f"a winner is computed by {NUM_PARTIES} talliers, found {len(self.addresses)} addresses and "
                f"{len(self.certificates)} certificates; with two talliers one alone could open everything"
            )
        if not 0 <= self.party < NUM_PARTIES:
            raise InvalidSetting(f"party must be 0 to {NUM_PARTIES - 1}, found {self.party}")
        if len(set(self.fingerprints)) != NUM_PARTIES:
            raise InvalidSetting("two talliers have the same certificate; each needs one of its own")
        if not 2 <= self.num_classes <= MOST_CLASSES or self.num_queries < 1:
            raise InvalidSetting(
                f"a winner job has at least 1 query and 2 to {MOST_CLASSES} classes; "
                f"found {self.num_queries} and {self.num_classes}"
            )
        if self.num_queries * self.num_classes > _MAX_ENTRIES:
            raise InvalidSetting(f"a winner job has at most {_MAX_ENTRIES} entries; ask in smaller batches")
        if len(self.verify_keys) not in (0, NUM_PARTIES):
            raise InvalidSetting(f"a winner job names the keys of all {NUM_PARTIES} talliers, or of none")
        if self.checks_rows and not self.contributors:
            raise InvalidSetting("a winner job that checks rows names the agents whose rows they are")
        if not self.meeting_limit_s > 0:
            raise InvalidSetting("a winner job needs a meeting limit above 0 s")
        if not (math.isfinite(self.time_limit_s) and self.time_limit_s > 0):
            raise InvalidSetting("a winner job needs a time limit above 0 s")
        _ = self.field

    @cached_property
    def field(self) -> PrimeField:
        """Where the shares are added up; also what agents split in."""
        return field_for(self.lowest, self.highest)

    @property
    def comparison_bits(self) -> int:
        """l: every difference compared lies in [-2^l, 2^l)."""
        return comparison_bits(self.lowest, self.highest)

    @property
    def is_duel(self) -> bool:
        """Whether the sign of one difference is the winner: two classes and no threshold."""
        return self.num_classes == 2 and self.threshold is None

    @property
    def clipped_threshold(self) -> int | None:
        """The threshold, moved next to the range of the sums where it lies outside: the answers stay the same."""
        return None if self.threshold is None else min(max(self.threshold, self.lowest), self.highest + 1)

    @cached_property
    def fingerprints(self) -> tuple[str, ...]:
        """SHA-256 of each pinned certificate, in tallier order."""
        return tuple(fingerprint(certificate) for certificate in self.certificates)

    @cached_property
    def parameters(self) -> dict[str, Any]:
        """All that must be equal at the three talliers; compared before anything else is sent."""
        return {
            "version": PROTOCOL_VERSION,
            "job_id": self.job_id,
            "agreement": self.agreement,
            "num_queries": self.num_queries,
            "num_classes": self.num_classes,
            "lowest": self.lowest,
            "highest": self.highest,
            "modulus": self.field.modulus,
            "threshold": self.threshold,
            "certificates": list(self.fingerprints),
            "contributors": list(self.contributors),
            "checks_rows": self.checks_rows,
        }

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the parameters, in hexadecimal."""
        canonical = json.dumps(self.parameters, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(canonical.encode()).hexdigest()

    @property
    def statement(self) -> bytes:
        """What a tallier signs: that it was told to do exactly this job, over exactly these contributors."""
        return f"labeler-winner-job/1 {self.digest}".encode()

    def check_share(self, share: NDArray[np.uint64], rows: NDArray[np.uint64] | None = None) -> None:
        """Refuse what is not this tallier's summed share, with the row sums of each contributor where they are checked.

        Raises:
            InvalidSetting: another shape.
            ProtocolViolation: not uint64, or a word that is no residue.
        """
        if share.shape != (self.num_queries, self.num_classes):
            raise InvalidSetting(
                f"the share has shape {share.shape}, the job's is {self.num_queries, self.num_classes}"
            )
        self.field.check(share, "a summed share")
        if (rows is not None) != self.checks_rows:
            raise InvalidSetting("row sums come with a winner job that checks rows, and with no other")
        if rows is not None:
            if rows.shape != (len(self.contributors), self.num_queries):
                raise InvalidSetting(
                    f"row sums have shape {rows.shape}, the job's is {len(self.contributors), self.num_queries}"
                )
            self.field.check(rows, "a row sum")


@dataclass(frozen=True, eq=False, repr=False)
class WinnerOrder:
    """A job and what this tallier brings to it. Secret; does not print.

    Attributes:
        job: equal at all three but for `party`, `identity_path`, `signature` and the limits.
        share: this tallier's share of the noisy sums, residues of `job.field`, shape (num_queries, num_classes).
        rows: what this tallier's share of each contributor's rows sums to (`AggregateShare.row_sums`), where the
            job checks rows.

    Raises:
        InvalidSetting: a shape is not that of the job.
        ProtocolViolation: a share is not of its field.
    """

    job: WinnerJob
    share: NDArray[np.uint64]
    rows: NDArray[np.uint64] | None = None

    def __post_init__(self) -> None:
        self.job.check_share(self.share, self.rows)


Outcome = NDArray[np.int16] | LabelerError
"""The winner of each query (or -1), shape (num_queries,), equal at all three talliers; or why there are none."""


class WinnerEngine(Protocol):
    """Computes the winners of jobs together with the engines of the two other talliers."""

    def winners(
        self,
        orders: Sequence[WinnerOrder],
        stop: threading.Event | None = None,
        *,
        met: threading.Event | None = None,
    ) -> list[Outcome]:
        """Take part in one computation; the same call runs at the two other talliers at the same time.

        Only jobs that all three were given, alike, are computed; one that fails spoils no other.

        Args:
            orders: one or more, of different jobs of the same talliers.
            met: set once all three are there; which jobs are computed is decided then.

        Returns:
            What came of each order. `Unavailable`: another tallier cannot be reached, died or was too slow, or the job
            was stopped; it may be tried again with the same share. `WrongDigest`: another tallier was not given it, or
            not yet. `ProtocolViolation`: the talliers were given different jobs, one sent what the protocol does not
            allow, the rows of an agent do not sum to what they must, or a sum is out of its range.
        """
        ...
