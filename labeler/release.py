"""The two ends of a round: the shares that an agent sends, and the release that is opened from their sum.

**Contribution.** Checked ballots on the grid, plus the agent's noise share, split among the talliers. This is the last
place where anybody can see a ballot. Secret shares cannot be inspected later, so the agent itself refuses ballots
larger than its task allows. The price was computed for those bounds and covers nothing beyond them.

**Release.** `open_histogram` combines the talliers' sums and returns the noisy histogram. A winner release gives
one number per query. Let s_c be the noisy sum of class c, and T the threshold if the task has one.

    label(q) = the lowest c with s_c = max s,    or -1 if max s < T.

`open_winner` computes it from sums that are in one process. `agree_on_winners` takes the result that three talliers
have computed without combining their sums. A task names one kind, histogram or winner. The other kind is
refused, because nobody agreed to it.

**Abstaining and ties cost nothing extra.** Let h be the noisy histogram, for which the task's price is proved. For
neighboring data sets and every set E of histograms, P(h in E) <= exp(eps) P(h' in E) + delta.
label = f(h) for the fixed function f above, which looks at no data; T is public and part of the task. For
every set L of answers, {label in L} = {h in E} with E = f^-1(L), so the same inequality holds for L
(post-processing; Dwork and Roth 2014, Prop. 2.1). Nothing else is opened. A -1 does not even tell which class was best.

**Storage.** A release is stored in a row of the coordinator's journal, or in a file in the folder of a `labeler run`.
Both hold arrays and a header as safetensors bytes. Equal content gives equal bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from labeler.errors import (
    BadData,
    InvalidSetting,
    LabelerError,
    PrivacyRefusal,
    ProtocolViolation,
    QuorumNotReached,
    WrongDigest,
)
from labeler.methods import ReleaseKind
from labeler.methods.grid import check_answer, most_on_grid
from labeler.methods.reverse_knn import project
from labeler.noise import DiscreteGaussian, noise_share
from labeler.randomness import ByteSource, os_source
from labeler.sharing import ABSTAINED, ShareVector, Winner, WinnerTerms, split, unshard
from labeler.tally import (
    NONCE_BYTES,
    AggregateShare,
    BallotShare,
    InputShare,
    Round,
    coefficients,
    combine,
    misshapen,
    refuse_misshapen,
    split_ballots,
)
from labeler.task import Task


@dataclass(frozen=True, eq=False)
class Release:
    """The public result of a round. It is safe to store and show, because it contains noise and was paid for.

    Attributes:
        kind: histogram or winner.
        labels: int16, shape (num_queries,): the class with the most noisy votes, the lowest of equals; -1 if the
            task abstains.
        noisy_votes: float64, shape (num_queries, num_classes), the noisy sums in votes; None for winner.
        contributors: the agents summed.
        is_seeded: True for a simulation. A person who knows a contributor's seed can subtract its noise, so the
            privacy guarantee does not hold. It must be shown together with the labels.
    """

    kind: ReleaseKind
    labels: NDArray[np.int16]
    noisy_votes: NDArray[np.float64] | None
    contributors: frozenset[str]
    is_seeded: bool

    def __post_init__(self) -> None:
        if (self.noisy_votes is not None) != (self.kind == "histogram"):
            raise PrivacyRefusal("a histogram release carries noisy votes, a winner release none")


class WinnerEngine(Protocol):
    """Finds the winner of each query from the three talliers' shares of the noisy sums."""

    def winners(self, shares: Sequence[NDArray[np.uint64]], terms: WinnerTerms) -> NDArray[np.int16]:
        """Return the lowest class with the largest sum, or -1 if that is below the threshold, per query.

        Args:
            shares: residues of `terms.field`, one array per tallier in tallier order, shape (num_queries, num_classes).
            terms: the round's terms of the winner.

        Returns:
            Shape (num_queries,).

        Raises:
            ProtocolViolation: a sum lies beyond the range of the terms (if the engine can tell).
        """


class InProcessWinner:
    """Reference engine: **combines the noisy sums inside this process**, then keeps only the winners.

    It computes what a secure computation among the talliers must compute, and tests compare the two. Anybody
    who can read this process's memory sees the noisy histogram, for which the stated price holds too.
    """

    def winners(self, shares: Sequence[NDArray[np.uint64]], terms: WinnerTerms) -> NDArray[np.int16]:
        """See `WinnerEngine.winners`."""
        sums = unshard(shares, field=terms.field)
        _check_range(sums, terms.lowest, terms.highest)
        winners: NDArray[np.int16] = np.argmax(sums, axis=1).astype(np.int16)
        if terms.threshold is not None:
            winners[sums.max(axis=1) < terms.threshold] = ABSTAINED
        return winners


def open_histogram(aggregate_shares: Sequence[AggregateShare], task: Task) -> Release:
    """Open the noisy sum of a round.

    The guarantee is the one that the task's price states, with noise of at least `task.sigma_votes` per entry that
    nobody can subtract. It has three conditions. At most `task.colluding_agents` contributors pool what they know. Not
    all talliers pool what they know. Each tallier sums a round once (labeler.tally).

    Args:
        aggregate_shares: one per tallier of the task, in any order.

    Raises:
        PrivacyRefusal: the task releases only winners.
        QuorumNotReached: fewer contributors than the task's quorum.
        WrongDigest: a share is of another round or task.
        ProtocolViolation: a tallier is missing or appears twice, or talliers summed different agents or shares. Or
            there are more contributors than the task has agents, or the sum is too large for their contributions.
    """
    _check_kind(task, "histogram")
    first = _check_shares(aggregate_shares, task)
    sums, largest = unshard([share.words for share in aggregate_shares]), largest_sum(task, len(first.contributors))
    _check_range(sums, -largest, largest)
    # The winner comes from the integers: dividing first could turn a lead of one unit into a tie.
    labels = np.argmax(sums, axis=1).astype(np.int16)
    return Release(
        kind="histogram",
        labels=labels,
        noisy_votes=sums / np.float64(task.scale),
        contributors=first.contributors,
        is_seeded=any(share.is_seeded for share in aggregate_shares),
    )


def open_winner(
    aggregate_shares: Sequence[AggregateShare], task: Task, *, engine: WinnerEngine | None = None
) -> Release:
    """Check the rows of all ballots, then open the winner of each query and nothing else.

    Args:
        aggregate_shares: one per tallier of the task, in any order.
        engine: how the talliers find the winner; the in-process reference if None.

    Raises:
        PrivacyRefusal: the task releases the histogram.
        QuorumNotReached, WrongDigest: as for `open_histogram`.
        ProtocolViolation: as for `open_histogram`, or ballots have other sums than the task allows.
    """
    _check_kind(task, "winner")
    first = _check_shares(aggregate_shares, task)
    ordered = sorted(aggregate_shares, key=lambda share: share.tallier)
    terms = first.round.terms
    if terms is None:
        raise WrongDigest("a round without terms of the winner has no winner")
    if terms.row_total is not None:
        refuse_misshapen(_misshapen(ordered, terms))
    winners = (engine or InProcessWinner()).winners([share.words for share in ordered], terms)
    return _winner_release([share.winner(winners.astype(np.int16)) for share in ordered], first.round, task)


def agree_on_winners(answers: Sequence[Winner], round: Round, task: Task) -> Release:
    """Return the release of a round from the answers of all talliers.

    An honest tallier computes only over the contributors and sharings that all three talliers agreed on. So if one of
    the three is honest, equal answers are answers to one sum. One tallier with a different answer voids the round. A
    tallier that deviates inside the computation can change labels (workers.winner.engine).

    Args:
        answers: one per tallier, in any order.
        round: the round they were asked for.

    Raises:
        PrivacyRefusal: the task releases the histogram.
        WrongDigest: the round belongs to another task, or an answer to another round.
        QuorumNotReached: fewer contributors than the task's quorum.
        ProtocolViolation: a tallier is missing or appears twice, or its answer differs from the others or is no class.
    """
    _check_kind(task, "winner")
    check_round(round, task)
    ordered = sorted(answers, key=lambda answer: answer.tallier)
    if [answer.tallier for answer in ordered] != list(range(task.talliers)):
        raise ProtocolViolation(f"a winner needs the answers of all {task.talliers} talliers, each once")
    for answer in ordered:
        if answer.round_digest != round.digest:
            raise WrongDigest(f"tallier {answer.tallier} answered another round than it was asked for")
    _check_equal(ordered)
    _check_count(ordered[0].contributors, task)
    return _winner_release(ordered, round, task)


def _misshapen(ordered: Sequence[AggregateShare], terms: WinnerTerms) -> tuple[str, ...]:
    """Run the row check of labeler.tally inside this process, where talliers need not commit to their nonces."""
    first, source = ordered[0], os_source()
    nonces = [source.bytes(NONCE_BYTES) for _ in ordered]
    factors = coefficients(nonces, agreement=first.agreement, num_queries=first.round.num_queries, field=terms.field)
    parts = [combine(share.row_sums, factors, terms.field) for share in ordered if share.row_sums is not None]
    return misshapen(parts, sorted(first.contributors), terms.field)


def _winner_release(answers: Sequence[Winner], round: Round, task: Task) -> Release:
    labels = answers[0].labels
    least = 0 if task.abstain_below is None else ABSTAINED
    if labels.shape != (round.num_queries,) or labels.min() < least or labels.max() >= task.num_classes:
        raise ProtocolViolation("the winners that came back are not one class of the task per query")
    return Release(
        kind="winner",
        labels=labels,
        noisy_votes=None,
        contributors=answers[0].contributors,
        is_seeded=any(answer.is_seeded for answer in answers),
    )


def _check_equal(answers: Sequence[Winner]) -> None:
    """Refuse answers that differ, and name the tallier that differs."""
    content = [(answer.contributors, answer.sharings_digest, answer.labels.tobytes()) for answer in answers]
    if all(one == content[0] for one in content):
        return
    alone = [answer.tallier for answer, one in zip(answers, content, strict=True) if content.count(one) == 1]
    who = f"tallier {alone[0]} answered differently from the others" if len(alone) == 1 else "no two talliers agree"
    raise ProtocolViolation(
        f"the talliers do not answer the same: {who}; the round is void. A tallier that follows the protocol cannot "
        "differ: look at its version and its log, and submit the task again"
    )


def _check_kind(task: Task, kind: ReleaseKind) -> None:
    if task.release != kind:
        raise PrivacyRefusal(f"this task releases the {task.release}; opening the {kind} was not agreed to")


def _check_shares(aggregate_shares: Sequence[AggregateShare], task: Task) -> AggregateShare:
    if sorted(share.tallier for share in aggregate_shares) != list(range(task.talliers)):
        raise ProtocolViolation(
            f"opening needs the sums of all {task.talliers} talliers, each once; found {len(aggregate_shares)}"
        )
    first = aggregate_shares[0]
    for share in aggregate_shares:
        check_round(share.round, task)
        if share.round != first.round:
            raise WrongDigest("the talliers' sums belong to different rounds")
        if share.contributors != first.contributors:
            raise ProtocolViolation("the talliers summed different agents; nothing can be opened")
        if share.sharings_digest != first.sharings_digest:
            raise ProtocolViolation("the talliers summed shares of different splits; nothing can be opened")
        if share.words.shape != (first.round.num_queries, first.round.num_classes):
            raise ProtocolViolation("a tallier's sum does not have the shape of the round")
    _check_count(first.contributors, task)
    return first


def _check_count(contributors: frozenset[str], task: Task) -> None:
    if len(contributors) < task.quorum:
        raise QuorumNotReached(f"{len(contributors)} agents were summed, the quorum is {task.quorum}")
    if len(contributors) > task.agents:
        raise ProtocolViolation(f"{len(contributors)} agents were summed, the task has {task.agents}")


def _check_range(sums: NDArray[np.int64], lowest: int, highest: int) -> None:
    # A damaged share, or a share of another split, spreads the sum over all words. This check almost surely detects it.
    if sums.min() < lowest or sums.max() > highest:
        raise ProtocolViolation(
            "the opened sums lie beyond what contributions of this task can add up to, so a share was damaged or not "
            "made for this round; the round is void"
        )


RELEASE_VERSION = "labeler-release/1"


def arrays_to_bytes(arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> bytes:
    """Return a safetensors file with sorted metadata, because the library's order differs between processes."""
    data = save({name: np.ascontiguousarray(one) for name, one in arrays.items()}, dict(metadata))
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[8 + size :]


def arrays_from_bytes(data: bytes) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Return the arrays of a safetensors file, and its metadata.

    Raises:
        ValueError: it is damaged.
    """
    try:
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        return load(data), dict(header.get("__metadata__", {}))
    except (SafetensorError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"no arrays ({type(error).__name__})") from None


def release_to_bytes(release: Release) -> bytes:
    """Return a release in its stored form; equal releases are equal bytes."""
    arrays: dict[str, NDArray[Any]] = {"labels": release.labels.astype(np.int16)}
    if release.noisy_votes is not None:
        arrays["noisy_votes"] = release.noisy_votes.astype(np.float64)
    about = {
        "version": RELEASE_VERSION,
        "kind": release.kind,
        "contributors": sorted(release.contributors),
        "is_seeded": release.is_seeded,
    }
    return arrays_to_bytes(arrays, {"release": json.dumps(about, sort_keys=True, separators=(",", ":"))})


def release_from_bytes(data: bytes) -> Release:
    """Return a release from its stored bytes.

    Raises:
        BadData: they are damaged, or of another version.
    """
    try:
        arrays, metadata = arrays_from_bytes(data)
        about = json.loads(metadata["release"])
        labels, votes = arrays["labels"], arrays.get("noisy_votes")
        if about["version"] != RELEASE_VERSION or labels.dtype != np.int16 or labels.ndim != 1:
            raise ValueError
        if votes is not None and (
            votes.dtype != np.float64 or votes.ndim != 2 or len(votes) != len(labels) or not np.isfinite(votes).all()
        ):
            raise ValueError
        return Release(
            kind=about["kind"],
            labels=labels,
            noisy_votes=votes,
            contributors=frozenset(str(agent) for agent in about["contributors"]),
            is_seeded=bool(about["is_seeded"]),
        )
    except (ValueError, KeyError, TypeError, LabelerError):
        raise BadData("a stored release is damaged, or of another version; restore the journal from a backup") from None


def largest_sum(task: Task, num_contributors: int) -> int:
    """Return the largest magnitude, in grid units, that a noisy sum of valid contributions can have in a histogram."""
    most, shares = most_on_grid(task), task.traits.noise_shares(task, num_contributors)
    return num_contributors * most + (shares and shares * DiscreteGaussian(task.share_sigma_grid).reach)


def check_ballots(ballots: NDArray[np.int64], task: Task) -> None:
    """Refuse ballots beyond what the task's price was computed for.

    Allowed per agent: knn, 0 to k votes per class and at most k per query (k t for attributes). ensemble: at most one
    vote per query. reverse-knn: each record votes once at each of its k nearest queries; if the task has
    `max_agent_records`, at most that many votes per query and k times as many in the batch. blind-average: weights
    whose norm is at most the learner's bound. aux-distill: at least 0, and at most 1 in a row.

    Args:
        ballots: counts of votes, shape (num_queries, num_classes); grid units if the method does not count.

    Raises:
        InvalidSetting: the array is not int64 of that shape, or has more queries than the task.
        PrivacyRefusal: an entry, a query or the batch exceeds its bound.
    """
    if ballots.dtype != np.int64 or ballots.ndim != 2 or ballots.shape[1] != task.num_classes:
        raise InvalidSetting(
            f"ballots must be int64 of shape (num_queries, {task.num_classes}); "
            f"found {ballots.dtype} of shape {ballots.shape}"
        )
    if not 1 <= len(ballots) <= task.max_queries:
        raise InvalidSetting(f"a batch of this task has 1 to {task.max_queries} queries, found {len(ballots)}")
    check_answer(ballots, task)


def on_grid(ballots: NDArray[np.int64], task: Task) -> NDArray[np.int64]:
    """Return checked ballots in grid units, projected or clipped if the task says so; numbers are on the grid already.

    If the task has a ball, counts are projected onto it (labeler.methods.reverse_knn).

    Counts are clipped at M = `task.vote_clip`, so that every sum fits its field. Clipping does not enlarge the
    difference between neighboring data sets: for any two counts |min(x, M) - min(y, M)| <= |x - y|, cell by cell. So
    the sum of squares does not grow and the price of the task holds. M is public: it follows from the task alone.

    Args:
        ballots: int64 counts that `check_ballots` accepts: the whole batch, shape (num_queries, num_classes).
    """
    clip, radius = task.vote_clip, task.ballot_radius
    if radius is None:
        votes = ballots if clip is None else np.minimum(ballots, np.int64(clip))
        return votes * np.int64(task.traits.grid_units(task))
    drawn = project(ballots, radius=radius, scale=task.scale)
    return drawn if clip is None else np.clip(drawn, -clip * task.scale, clip * task.scale)


def contribution(ballots: NDArray[np.int64], task: Task, *, source: ByteSource) -> NDArray[np.int64]:
    """Check ballots, convert them to the grid (`on_grid`) and add this agent's noise share: S * ballots + noise.

    If a method does not count votes, its numbers are on the grid already. No noise is added here if the numbers contain
    the agent's own noise already. Nor is it added here if the talliers add the noise. Then the result is the bare
    ballot, which must leave only in secret shares.

    Otherwise noise is added to every entry, whatever the ballots are. The noise depends on the source alone. So one
    source must never serve two different ballots: the two results would reveal the difference of the ballots. Derive
    the source from the digests of task and batch, store what was sent, and on a retry send the stored copy.

    Args:
        ballots: int64 counts, shape (num_queries, num_classes); see `check_ballots`.
        source: the agent's secret source for this batch.

    Returns:
        Grid units, int64, shape (num_queries, num_classes). Secret: one noise share alone protects too little.

    Raises:
        InvalidSetting: wrong type, shape or number of queries.
        PrivacyRefusal: ballots beyond the task's bounds.
    """
    check_ballots(ballots, task)
    numbers = on_grid(ballots, task)
    return numbers + noise_share(task, source, len(ballots)) if task.agents_add_shares else numbers


def input_shares(
    ballots: NDArray[np.int64], task: Task, round: Round, *, agent_id: str, source: ByteSource
) -> tuple[InputShare, ...]:
    """Return everything an agent sends in one round: one input share per tallier.

    If talliers check rows (the round's terms have a row total), ballots and noise are shared separately. The sums
    are still those of `contribution`: S * ballots + noise, with the same noise.

    Equal arguments and an equal source give equal shares, so a retry counts once. The shares and the release
    also say whether the source is seeded.

    Args:
        ballots: int64 counts, shape (num_queries, num_classes).
        round: the round; it must be of this task.
        source: the agent's secret source for this round; nothing has been drawn from it yet.

    Raises:
        WrongDigest: the round belongs to another task, or has another number of queries, classes or agents.
        InvalidSetting: wrong type, shape or number of queries.
        PrivacyRefusal: ballots beyond the task's bounds.
    """
    check_round(round, task)
    if len(ballots) != round.num_queries:
        raise WrongDigest(f"ballots are for {len(ballots)} queries, the round has {round.num_queries}")
    terms, among = round.terms, task.talliers
    shares: list[ShareVector | BallotShare]
    if terms is None or terms.row_total is None:
        values = contribution(ballots, task, source=source)
        shares = [*split(values, num_talliers=among, source=source, field=None if terms is None else terms.field)]
    else:
        check_ballots(ballots, task)
        # If the talliers add the noise, the agent shares zeros in its place.
        noise = noise_share(task, source, len(ballots)) if task.agents_add_shares else np.zeros_like(ballots)
        total, field = terms.row_total, terms.field
        shares = [*split_ballots(ballots, noise, row_total=total, num_talliers=among, source=source, field=field)]
    return tuple(InputShare(agent_id, tallier, round.digest, share) for tallier, share in enumerate(shares))


def check_round(round: Round, task: Task) -> None:
    """Refuse a round that is not of this task.

    Raises:
        WrongDigest: digest, classes, quorum, terms of the winner or the talliers' noise differ from the task's.
    """
    expected = (task.digest, task.num_classes, task.quorum)
    if (round.task_digest, round.num_classes, round.quorum) != expected:
        raise WrongDigest(
            f"the round is of task {round.task_digest[:12]!r} with {round.num_classes} classes and quorum "
            f"{round.quorum}; expected {task.digest[:12]!r}, {task.num_classes} and {task.quorum}"
        )
    if round.terms != task.winner_terms:
        raise WrongDigest(f"the round states other terms of the winner than its task {task.digest[:12]!r} has")
    if round.tallier_sigma_grid != task.tallier_sigma_grid:
        raise WrongDigest(f"the round states other noise of the talliers than its task {task.digest[:12]!r} has")
