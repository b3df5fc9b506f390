"""The tally: query batches, rounds, and adding up and opening shares of ballots.

A batch of public queries has a digest that ties every message of a round to it.


**The row check** proves that an agent's ballots have the right sums, without showing them to anybody. Talliers cannot
look into a share, so an agent could send a million votes where k are allowed. Ballots of knn and ensemble have rows of
a known sum once a column "not voted" is added: k votes, cast or not. That sum is linear, so it can be checked on
shares. It needs ballots without noise. Therefore an agent sends two sharings, ballots and noise, and a tallier adds
S * ballots + noise itself.

    tallier i, agent a, query q    x_i[a,q] = sum over the columns of its share of the row;  tallier 0 less k.
    all talliers together          x_0 + x_1 + x_2 = 0 for every query of an honest agent.
    1. each commits to a nonce     hash of 32 random bytes; the shares were fixed before.
    2. each reveals its nonce      r = uniform in GF(p)^Q, expanded from the hash of all nonces.
    3. each sends                  z_i[a] = sum over q of r_q x_i[a,q].
    4. z_0 + z_1 + z_2 = 0         for every agent; else nothing is opened and the round is void.

**Complete.** For an honest agent x_0 + x_1 + x_2 is zero for every q, hence so is every combination.

**Sound.** Let e_q be the error of row q of an agent, modulo p, and some e_j not zero. The r_q are uniform,
independent of each other and of e, which was fixed before any nonce was revealed. Whatever all r_q but r_j
are, the sum is zero for exactly one value of r_j, because e_j has an inverse. So the agent passes with
probability 1/p, below 2^-43 (a polynomial of degree 1: Schwartz 1980, Zippel 1979). r is uniform as far as
SHA-256 and AES look random; one honest tallier's nonce suffices.

**Hiding.** Shares of an honest agent's row are uniform given that they add up to k. So the x_i[a, .] are
uniform given that they add up to zero: they, and z, have the same distribution whatever the ballots are.

**Again.** A repetition with the same shares takes new nonces. That says no more: even all x_i say nothing of
the ballots of an honest agent.

**Limits.** The check does not find dishonest noise, nor counts below zero or above k that still sum to k. (Then a class
gets more than k votes and another, or "not voted", fewer than none.) Both move labels; neither reduces the privacy of
the others, whose noise is in the sum all the same. The check also needs talliers that follow the protocol. One that
lies about its z lets an agent pass whose errors it knows, or makes an honest agent fail. Numbers outside the range of
the sums are found later, independent of the sender (workers.winner.tournament).

**Sums.** The tallier's machine (labeler.rounds.tallier) decides, once per round, which agents may be summed; here is
the arithmetic. In a winner round everything is added in the prime field of its terms (labeler.sharing), so that
talliers can compute on the sums. If rows of ballots have a known total, ballots and noise come as two sharings. The
tallier adds S * ballots + noise, and keeps the row sums of each agent for the row check. Only after that check may
anything be opened.

Not checked here: the sender of a share (signatures), and whether a ballot is within bounds (shares
cannot be inspected; the agent checks, see labeler.release, and talliers check row totals).
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import InstanceOf, SkipValidation

from labeler.errors import InvalidSetting, PrivacyRefusal, ProtocolViolation
from labeler.noise import MAX_SHARE_SIGMA_GRID, MIN_SHARE_SIGMA_GRID, DiscreteGaussian
from labeler.randomness import KEY_BYTES, ByteSource, keyed_source
from labeler.sharing import SHARING_ID_BYTES, PrimeField, ShareVector, Winner, WinnerTerms, split
from labeler.task import Task
from labeler.untrusted import Contributors, Digest, Flag, strict, whole


@dataclass(frozen=True, eq=False)
class QueryBatch:
    """Quantized features of public queries, all asked in one round.

    Attributes:
        features: int16, shape (num_queries, dimension), made by the task's backbone.
        first_query: number of the first of them within the task, so that equal batches asked at
            different places of a task are different rounds.
        model: if a model is trained in steps, the public one that this step starts from (labeler.linear_model),
            float64 of shape (num_queries, num_classes).
    """

    features: NDArray[np.int16]
    first_query: int = 0
    model: NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        if self.features.dtype != np.int16 or self.features.ndim != 2 or not self.features.size:
            raise InvalidSetting(
                "a batch of queries must be an int16 array of shape (num_queries, dimension) with at least one entry; "
                f"found {self.features.dtype} of shape {self.features.shape}"
            )
        # A copy that nobody can change: the noise of a round is tied to the digest of exactly these numbers.
        frozen = self.features.astype("<i2", order="C", copy=True)
        frozen.setflags(write=False)
        object.__setattr__(self, "features", frozen)
        if self.model is not None:
            model = self.model.astype("<f8", order="C", copy=True)
            model.setflags(write=False)
            object.__setattr__(self, "model", model)

    @cached_property
    def digest(self) -> str:
        """Return SHA-256 over the place, the shapes and the bytes, including the model, in hexadecimal.

        Noise is drawn per digest. The same queries asked again in the same place give the same noise, any change gives
        new noise. So the key of a round never serves two ballots: everything in a batch that decides one is in its
        digest.
        """
        rows, columns = self.features.shape
        sha256 = hashlib.sha256(f"labeler-batch/1 {self.first_query} {rows} {columns}\n".encode())
        sha256.update(self.features.data)
        if self.model is not None:
            # After features, whose length the header states, so that no batch without a model has these bytes.
            sha256.update(f"model {' '.join(map(str, self.model.shape))}\n".encode())
            sha256.update(self.model.data)
        return sha256.hexdigest()

    def __len__(self) -> int:
        return len(self.features)


NONCE_BYTES = KEY_BYTES
"""Length of the nonce with which a tallier contributes to the choice of the combination."""

_LIMB_BITS = 16
_LIMBS = 64 // _LIMB_BITS


@dataclass(frozen=True, eq=False, repr=False)
class BallotShare:
    """One tallier's share of an agent's ballots, and separately of its noise. Secret; does not print.

    To a tallier it is one share: it has one sharing_id and one fingerprint, which bind both parts.

    Attributes:
        ballots: votes, shape (num_queries, num_classes + 1); the last column is "not voted".
        noise: grid units, shape (num_queries, num_classes).

    Raises:
        ProtocolViolation: shapes or fields of the two do not match.
    """

    ballots: ShareVector
    noise: ShareVector

    def __post_init__(self) -> None:
        shape = self.noise.shape
        if len(shape) != 2 or self.ballots.shape != (shape[0], shape[1] + 1):
            raise ProtocolViolation(
                "ballots have one column more than their noise, for votes not cast; "
                f"found shapes {self.ballots.shape} and {shape}"
            )
        if self.ballots.field is None or self.ballots.field != self.noise.field:
            raise ProtocolViolation("ballots and noise are shared in one prime field")
        if self.ballots.sharing_id == self.noise.sharing_id or self.ballots.is_seeded != self.noise.is_seeded:
            raise ProtocolViolation("ballots and noise are two sharings from one source, with ids of their own")

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the result: (num_queries, num_classes)."""
        return self.noise.shape

    @property
    def field(self) -> PrimeField | None:
        """Return the field in which both add up."""
        return self.noise.field

    @property
    def is_seeded(self) -> bool:
        """Return True if noise or masks came from a known seed."""
        return self.noise.is_seeded

    @property
    def sharing_id(self) -> bytes:
        """Return 16 bytes that bind both sharings: equal in all shares of the two splits and in no other."""
        content = b"labeler-ballot-sharing/1\n" + self.ballots.sharing_id + self.noise.sharing_id
        return hashlib.sha256(content).digest()[:SHARING_ID_BYTES]

    def fingerprint(self) -> bytes:
        """Return SHA-256 over everything in both: equal for a replay, different for any other."""
        content = b"labeler-ballot-share/1\n" + self.ballots.fingerprint() + self.noise.fingerprint()
        return hashlib.sha256(content).digest()

    def __repr__(self) -> str:
        return f"BallotShare(shape={self.shape}, <redacted>)"


def split_ballots(
    ballots: NDArray[np.int64],
    noise: NDArray[np.int64],
    *,
    row_total: int,
    num_talliers: int,
    source: ByteSource,
    field: PrimeField,
) -> tuple[BallotShare, ...]:
    """Split ballots, with votes not cast, and noise: one share of both per tallier.

    Args:
        ballots: votes, int64, shape (num_queries, num_classes), checked (labeler.release.check_ballots).
        noise: grid units, int64, of that shape.
        row_total: k: the sum of each row, votes not cast included.
        num_talliers: as for `labeler.sharing.split`.
        source: secret source of the agent; 64 bytes are consumed.
        field: the field of addition.

    Raises:
        InvalidSetting: types or shapes differ, or a row casts more than `row_total`.
    """
    not_voted = np.int64(row_total) - ballots.sum(axis=1, keepdims=True)
    if ballots.shape != noise.shape or not_voted.min() < 0:
        raise InvalidSetting(f"ballots and noise must have one shape, and rows of at most {row_total} votes")
    rows = split(np.hstack([ballots, not_voted]), num_talliers=num_talliers, source=source, field=field)
    noises = split(noise, num_talliers=num_talliers, source=source, field=field)
    return tuple(BallotShare(*pair) for pair in zip(rows, noises, strict=True))


def row_sums(ballots: NDArray[np.uint64], field: PrimeField) -> NDArray[np.uint64]:
    """Return the sum of each row of a share of ballots, in the field.

    Args:
        ballots: residues, shape (num_queries, num_classes + 1).

    Returns:
        uint64, shape (num_queries,).
    """
    # Halves of 32 bits can be summed without wrapping around: there are fewer than 2^32 columns.
    modulus = np.uint64(field.modulus)
    upper = (ballots >> np.uint64(32)).sum(axis=1, dtype=np.uint64) % modulus
    lower = (ballots & np.uint64(2**32 - 1)).sum(axis=1, dtype=np.uint64) % modulus
    return field.add(field.times(upper, 2**32), lower)


def commitment(nonce: bytes, *, agreement: str, tallier: int) -> bytes:
    """Return what a tallier sends before its nonce: SHA-256 that fixes the nonce and reveals nothing of it.

    Args:
        nonce: 32 bytes of the operating system, new for every attempt.
        agreement: of the aggregates (`AggregateShare.agreement`), so that no value of another round matches.
        tallier: index of the tallier, so that no other tallier can copy the commitment.

    Raises:
        ProtocolViolation: the nonce has another length.
    """
    _check_nonce(nonce)
    return hashlib.sha256(f"labeler-row-check-nonce/1 {agreement} {tallier}\n".encode() + nonce).digest()


def check_commitment(committed: bytes, nonce: bytes, *, agreement: str, tallier: int) -> None:
    """Refuse a nonce that differs from its tallier's commitment.

    Raises:
        ProtocolViolation: another nonce; the row check must stop.
    """
    if not hmac.compare_digest(committed, commitment(nonce, agreement=agreement, tallier=tallier)):
        raise ProtocolViolation(
            f"tallier {tallier} revealed another nonce than it had committed to; the rows are not checked with it"
        )


def coefficients(nonces: Sequence[bytes], *, agreement: str, num_queries: int, field: PrimeField) -> NDArray[np.uint64]:
    """Return the random combination r: uniform in the field, known to nobody before all nonces are revealed.

    Args:
        nonces: of all talliers, in tallier order, each checked against its commitment.
        agreement: of the aggregates.
        num_queries: number of coefficients.

    Returns:
        uint64, shape (num_queries,).

    Raises:
        ProtocolViolation: fewer than two nonces, or one of another length.
    """
    if len(nonces) < 2:
        raise ProtocolViolation(f"the combination of a row check takes the nonces of all talliers, found {len(nonces)}")
    for nonce in nonces:
        _check_nonce(nonce)
    key = hashlib.sha256(f"labeler-row-check/1 {agreement}\n".encode() + b"".join(nonces)).digest()
    return field.uniform(keyed_source(key, is_seeded=False), num_queries)


def combine(sums: NDArray[np.uint64], factors: NDArray[np.uint64], field: PrimeField) -> NDArray[np.uint64]:
    """Return one tallier's z: for each agent the sum of its row sums, each times its coefficient, in the field.

    Args:
        sums: the tallier's row sums, residues, shape (agents, num_queries) (`AggregateShare.row_sums`).
        factors: the coefficients, residues, shape (num_queries,).

    Returns:
        uint64, shape (agents,). It may be sent to everybody: see the module.

    Raises:
        ProtocolViolation: shapes do not match, or a word is not a residue.
    """
    if sums.ndim != 2 or factors.shape != sums.shape[1:]:
        raise ProtocolViolation(f"row sums of shape {sums.shape} do not go with {factors.shape} coefficients")
    field.check(sums, "a row sum")
    field.check(factors, "a coefficient")
    # Exact: products of 16-bit parts stay below 2^32, and there are fewer than 2^32 queries to add up.
    totals = [0] * len(sums)
    parts = [_limb(factors, place) for place in range(_LIMBS)]
    for place in range(_LIMBS):
        limbs = _limb(sums, place)
        for other, part in enumerate(parts):
            for agent, product in enumerate((limbs @ part).tolist()):
                totals[agent] += product << (_LIMB_BITS * (place + other))
    return np.array([total % field.modulus for total in totals], dtype=np.uint64)


def misshapen(combinations: Sequence[NDArray[np.uint64]], agents: Sequence[str], field: PrimeField) -> tuple[str, ...]:
    """Return the agents whose rows have wrong sums; empty if there are none.

    Args:
        combinations: output of `combine` at each tallier, one array per tallier.
        agents: their agents, in the order of the rows: sorted.

    Raises:
        ProtocolViolation: arrays of another shape or type, or of fewer than two talliers.
    """
    if len(combinations) < 2 or any(part.shape != (len(agents),) for part in combinations):
        raise ProtocolViolation("a row check compares one number per agent of every tallier")
    for part in combinations:
        field.check(part, "a combination of row sums")
    totals = field.total(combinations)
    return tuple(agent for agent, total in zip(agents, totals.tolist(), strict=True) if total)


def refuse_misshapen(agents: Sequence[str]) -> None:
    """Void a round in which rows do not add up.

    Raises:
        ProtocolViolation: names the agents, if there are any.
    """
    if agents:
        named = ", ".join(repr(agent) for agent in agents[:10]) + (" and others" if len(agents) > 10 else "")
        raise ProtocolViolation(
            f"the ballots of {len(agents)} agents do not sum to what their task allows: {named}; nothing is opened and "
            "the round is void. An agent of another version or a dishonest one sent them, or a tallier changed them: "
            "find out which, and submit the task again without it"
        )


def _limb(words: NDArray[np.uint64], place: int) -> NDArray[np.uint64]:
    return (words >> np.uint64(_LIMB_BITS * place)) & np.uint64(2**_LIMB_BITS - 1)


def _check_nonce(nonce: bytes) -> None:
    if not isinstance(nonce, bytes) or len(nonce) != NONCE_BYTES:
        raise ProtocolViolation(f"the nonce of a row check has {NONCE_BYTES} bytes")


MAX_TALLIERS = 3


@strict("a round")
class Round:
    """One batch of one task, asked of all agents; its digest ties every message to it.

    Attributes:
        task_digest: of the task (SHA-256, hexadecimal); it fixes k, sigma, scale, classes and parties.
        batch_digest: of the batch of queries (SHA-256, hexadecimal).
        quorum: fewest contributors for which anything is opened.
        terms: how talliers find the winners; None if the histogram is opened.
        tallier_sigma_grid: parameter of the noise that each tallier adds to each sum, grid units; None if the
            agents add the noise. Agents compare it with their task (`labeler.release.check_round`). So a coordinator
            that tells a tallier of less noise names another round, to which no agent sends a share.

    Raises:
        ProtocolViolation: a digest is not SHA-256 in hexadecimal, or a number is below 1.
        InvalidSetting: the noise is outside of the sampler's range.
    """

    task_digest: Digest
    batch_digest: Digest
    num_queries: Annotated[int, whole(1)]
    num_classes: Annotated[int, whole(1)]
    quorum: Annotated[int, whole(1)]
    terms: InstanceOf[WinnerTerms] | None = None
    tallier_sigma_grid: float | None = None

    def __post_init__(self) -> None:
        sigma = self.tallier_sigma_grid
        if sigma is not None and not MIN_SHARE_SIGMA_GRID <= sigma <= MAX_SHARE_SIGMA_GRID:
            raise InvalidSetting(
                f"the noise that talliers add has a parameter of {MIN_SHARE_SIGMA_GRID:g} to "
                f"{MAX_SHARE_SIGMA_GRID:,.0f} grid units, found {sigma:g}"
            )

    @cached_property
    def digest(self) -> str:
        """Return SHA-256 over all fields, in hexadecimal."""
        fields: list[Any] = [
            self.task_digest, self.batch_digest, self.num_queries, self.num_classes, self.quorum,
        ]  # fmt: skip
        if self.terms is not None:
            fields.append(asdict(self.terms))
        if self.tallier_sigma_grid is not None:
            fields.append({"tallier_sigma_grid": float(self.tallier_sigma_grid)})
        return hashlib.sha256(b"labeler-round/1\n" + json.dumps(fields, sort_keys=True).encode()).hexdigest()


def round_of(task: Task, batch: QueryBatch) -> Round:
    """Return the round in which a task's batch is answered."""
    return round_with(task, batch.digest, len(batch))


def round_with(task: Task, batch_digest: str, num_queries: int) -> Round:
    """Return the round of a batch of which only digest and size are known."""
    return Round(
        task_digest=task.digest,
        batch_digest=batch_digest,
        num_queries=num_queries,
        num_classes=task.num_classes,
        quorum=task.quorum,
        terms=task.winner_terms,
        tallier_sigma_grid=task.tallier_sigma_grid,
    )


@dataclass(frozen=True, eq=False)
class InputShare:
    """One agent's message to one tallier: its share of ballots plus noise, or of ballots and of noise.

    Attributes:
        tallier: index of the recipient, from 0.
        round_digest: the round it belongs to.
        share: the secret share, shape (num_queries, num_classes); two separate shares if the round's terms have a
            row total.
    """

    agent_id: str
    tallier: int
    round_digest: str
    share: ShareVector | BallotShare

    def __post_init__(self) -> None:
        if not 1 <= len(self.agent_id) <= 200:
            raise ProtocolViolation(f"an agent_id has 1 to 200 characters, found {len(self.agent_id)}")


@strict("an aggregate share", eq=False)
class AggregateShare:
    """One tallier's share of the noisy sum over the contributors. Secret until all are combined; does not print.

    Attributes:
        tallier: index of the tallier.
        contributors: the agents summed.
        sharings_digest: SHA-256 over (agent, sharing_id) of the contributors; equal at all talliers, or
            shares of different splits were summed.
        words: uint64, shape (num_queries, num_classes), read-only; residues in a winner round.
        is_seeded: True if any contributor's noise or masks came from a known seed, or this tallier's noise.
        row_sums: the row sums of each contributor's ballots (agents sorted) at this tallier, uint64 residues,
            shape (contributors, num_queries), read-only. Tallier 0 has subtracted the row total, so those of all
            talliers add up to zero. None if rows are not checked.
    """

    tallier: Annotated[int, whole(0, 2)]
    round: InstanceOf[Round]
    contributors: Contributors
    sharings_digest: Digest
    words: SkipValidation[NDArray[np.uint64]]
    is_seeded: Flag
    row_sums: SkipValidation[NDArray[np.uint64] | None] = None

    def __post_init__(self) -> None:
        terms = self.round.terms
        if (self.row_sums is not None) != (terms is not None and terms.row_total is not None):
            raise ProtocolViolation("an aggregate share holds row sums where its round checks rows, and nowhere else")
        shapes = {
            "words": (self.round.num_queries, self.round.num_classes),
            "row_sums": (len(self.contributors), self.round.num_queries),
        }
        for name, shape in shapes.items():
            if (array := getattr(self, name)) is None:
                continue
            if array.shape != shape:
                raise ProtocolViolation(f"{name} of an aggregate share must have shape {shape}, found {array.shape}")
            if terms is not None:
                terms.field.check(array, f"{name} of an aggregate share")
            frozen = array.copy()
            frozen.setflags(write=False)
            object.__setattr__(self, name, frozen)

    @cached_property
    def agreement(self) -> str:
        """Return SHA-256 over round, contributors and their sharings, in hexadecimal; talliers compare it before a
        winner.

        The round's digest covers task, batch and terms, so equal agreements mean shares of one sum and one rule.
        """
        content = [self.round.digest, sorted(self.contributors), self.sharings_digest]
        return hashlib.sha256(b"labeler-agreement/1\n" + json.dumps(content).encode()).hexdigest()

    def winner(self, labels: NDArray[np.int16]) -> Winner:
        """Return this tallier's answer, once the talliers have opened the labels of this sum."""
        return Winner(
            tallier=self.tallier,
            round_digest=self.round.digest,
            contributors=self.contributors,
            sharings_digest=self.sharings_digest,
            labels=labels,
            is_seeded=self.is_seeded,
        )

    def __repr__(self) -> str:
        return f"AggregateShare(tallier={self.tallier}, contributors={len(self.contributors)}, <redacted>)"


def add_shares(
    index: int, round: Round, shares: Mapping[str, ShareVector | BallotShare], *, noise: ByteSource | None = None
) -> AggregateShare:
    """Return one tallier's share of the sum over exactly these agents. The caller decides whether they may be summed.

    Args:
        index: number of the tallier, from 0.
        round: the round; every share fits it (`misfit_of`).
        shares: agent id -> its share.
        noise: source of this tallier's noise (`labeler.noise.noise_source`), if the round says that talliers
            add it.

    Raises:
        PrivacyRefusal: the talliers add noise in this round and no source is given, or they add none and one is
            given.
    """
    if (noise is None) != (round.tallier_sigma_grid is None):
        raise PrivacyRefusal(
            "a tallier adds noise in exactly those rounds that say so; nothing is summed without the noise that was "
            "promised"
        )
    terms = round.terms
    field = None if terms is None else terms.field
    total = np.zeros((round.num_queries, round.num_classes), dtype=np.uint64)
    votes, sums = total.copy(), []
    for agent in sorted(shares):
        share = shares[agent]
        if isinstance(share, BallotShare) and field is not None:
            ballots = share.ballots.expand()
            votes = field.add(votes, ballots[:, :-1])
            sums.append(row_sums(ballots, field))
            total = field.add(total, share.noise.expand())
        elif isinstance(share, ShareVector):
            total = _sum(total, share.expand(), field)
    if noise is not None and round.tallier_sigma_grid is not None:
        drawn = DiscreteGaussian(round.tallier_sigma_grid).sample(noise, total.shape)
        total = _sum(total, drawn.view(np.uint64) if field is None else field.encode(drawn), field)
    rows = None
    if terms is not None and terms.row_total is not None:
        total = terms.field.add(total, terms.field.times(votes, terms.scale))
        rows = np.stack(sums)
        if index == 0:
            rows = terms.field.subtract(rows, np.full_like(rows, terms.row_total))
    sharings = sorted((agent, share.sharing_id.hex()) for agent, share in shares.items())
    return AggregateShare(
        tallier=index,
        round=round,
        contributors=frozenset(shares),
        sharings_digest=hashlib.sha256(b"labeler-sharings/1\n" + json.dumps(sharings).encode()).hexdigest(),
        words=total,
        is_seeded=any(share.is_seeded for share in shares.values()) or (noise is not None and noise.is_seeded),
        row_sums=rows,
    )


def misfit_of(share: ShareVector | BallotShare, round: Round) -> str:
    """Return why a share cannot be one of this round; empty if it can."""
    terms, expected = round.terms, (round.num_queries, round.num_classes)
    if share.shape != expected:
        return f"has shape {share.shape}, the round's is {expected}"
    if share.field != (None if terms is None else terms.field):
        return "is not shared where the round adds up: modulo 2^64 for a histogram, in a prime field for the winner"
    if isinstance(share, BallotShare) != (terms is not None and terms.row_total is not None):
        return "must hold ballots and noise apart where the round checks rows, and together where it does not"
    return ""


def _sum(one: NDArray[np.uint64], other: NDArray[np.uint64], field: PrimeField | None) -> NDArray[np.uint64]:
    return one + other if field is None else field.add(one, other)
