"""A tallier's part in finding winners: one computation with the two others at a time, beside the conversation.

A computation is started when the coordinator asks, by a message to all three talliers. It runs in a thread, whose
process does the work (workers.winner.child), so that the tallier goes on taking mail. Asked for another round
meanwhile, it stops and turns to that one: the coordinator has given the first its turn already. What is computed is
a function of the sum that the journal keeps, so nothing of it is stored, and who dies begins again with the same.

Whether a failure is told as final decides over a round that is paid for. Only what would come out the same at every
attempt is: talliers that were told different things, and ballots that do not add up.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from dataclasses import dataclass, replace

from feature_store.keys import PartyKeys
from labeler.errors import Forged, LabelerError, ProtocolViolation, Unavailable, WrongDigest
from labeler.messages.rounds import OpenRound, Refusal
from labeler.tally import AggregateShare
from labeler.winner import Winner, winner_time_limit_s
from workers.tallier.peers import WinnerGroup
from workers.winner.engine import WinnerEngine, WinnerJob

log = logging.getLogger("labeler.tallier")

MEETING_LIMIT_S = 10.0
"""How long a tallier waits for the others to come to a job. All are asked at once; who comes later is asked again."""

MAX_ATTEMPTS = 10_000
"""Computations of one round while this process lives: more than fit into a day of waiting for the others in vain. Each
draws new masks, so that m of them tell at most m times what one does (workers.winner.engine)."""


@dataclass(frozen=True)
class Outcome:
    """What came of one computation.

    Attributes:
        opening: the round.
        answer: the winners, or why there are none.
    """

    opening: OpenRound
    answer: Winner | Refusal


class WinnerDesk:
    """Computes one round at a time; see the module. Used by one thread.

    Args:
        group: the three talliers, or None where this one's site has pinned no others.
        keys: of this tallier, which signs what it was told to compute.
        engine: computes with the others.
    """

    def __init__(self, group: WinnerGroup | None, keys: PartyKeys, *, engine: WinnerEngine) -> None:
        self._group = group
        self._keys = keys
        self._engine = engine
        self._current: _Computation | None = None
        self._attempts: Counter[str] = Counter()

    @property
    def facts(self) -> dict[str, str]:
        """What the coordinator is told at every poll: with which group this tallier can find winners, if any."""
        return {} if self._group is None else {"winner_group": self._group.digest}

    @property
    def is_busy(self) -> bool:
        """Whether a computation was begun and its outcome not taken."""
        return self._current is not None

    def begin(self, opening: OpenRound, aggregate: AggregateShare) -> bool:
        """Compute the winners of a sum; another round's computation is stopped.

        Where that is under way already it goes on, and where it then fails, it is begun again without a word: the
        others have been asked again too, and wait.

        Returns:
            Whether a computation was begun.

        Raises:
            Unavailable: no other talliers are pinned here.
            ProtocolViolation: the round has no winners, names this tallier by another number than its site does, or
                was computed too often.
        """
        current = self._current
        if current is not None and current.opening.round.digest == opening.round.digest:
            current.is_asked_again = True
            return False
        job = self._job(opening, aggregate)
        self.close()
        if self._attempts[job.job_id] >= MAX_ATTEMPTS:
            raise ProtocolViolation(f"the winners of this round were asked for {MAX_ATTEMPTS} times; it is given up")
        self._attempts[job.job_id] += 1
        self._current = _Computation(opening, aggregate, job, self._engine)
        return True

    def wait(self, seconds: float) -> None:
        """Wait a while for the computation that runs."""
        if self._current is not None:
            self._current.thread.join(seconds)

    def take(self) -> Outcome | None:
        """The outcome, once there is one."""
        current = self._current
        if current is None or current.answer is None:
            return None
        current.thread.join()
        self._current = None
        has_failed = isinstance(current.answer, Refusal) and not current.answer.is_final
        if has_failed and current.is_asked_again and self._attempts[current.opening.round.digest] < MAX_ATTEMPTS:
            self.begin(current.opening, current.aggregate)
            return None
        return Outcome(current.opening, current.answer)

    def close(self) -> None:
        """Stop what runs; its process is gone when this returns."""
        if self._current is not None:
            self._current.stop.set()
            self._current.thread.join()
            self._current = None

    def _job(self, opening: OpenRound, aggregate: AggregateShare) -> WinnerJob:
        terms, round, group = opening.round.terms, opening.round, self._group
        if terms is None:
            raise ProtocolViolation("a round that opens the histogram has no winners to compute")
        if group is None:
            raise Unavailable(
                "this tallier's site has pinned no other talliers, so it computes no winners: labeler tallier peers"
            )
        if opening.tallier != group.number:
            raise ProtocolViolation(
                f"the round names this tallier number {opening.tallier}, its own site number {group.number}; the "
                "administrator has to enrol it under the number it was made with"
            )
        job = WinnerJob(
            job_id=round.digest,
            agreement=aggregate.agreement,
            party=group.number,
            addresses=group.addresses,
            certificates=group.certificates,
            identity_path=group.identity_path,
            num_queries=round.num_queries,
            num_classes=round.num_classes,
            lowest=terms.lowest,
            highest=terms.highest,
            threshold=terms.threshold,
            contributors=tuple(sorted(aggregate.contributors)),
            checks_rows=aggregate.row_sums is not None,
            verify_keys=group.verify_keys,
            time_limit_s=winner_time_limit_s(round.num_queries, round.num_classes),
            meeting_limit_s=MEETING_LIMIT_S,
        )
        return replace(job, signature=self._keys.sign_statement(job.statement))


class _Computation:
    """One computation in its thread."""

    def __init__(
        self,
        opening: OpenRound,
        aggregate: AggregateShare,
        job: WinnerJob,
        engine: WinnerEngine,
    ) -> None:
        self.opening = opening
        self.stop = threading.Event()
        self.answer: Winner | Refusal | None = None
        self.is_asked_again = False
        self.aggregate = aggregate
        self._job = job
        self._engine = engine
        self.thread = threading.Thread(target=self._run, name="winner", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            labels = self._engine.winners(self._job, self.aggregate.words, self.stop, rows=self.aggregate.row_sums)
            self.answer = self.aggregate.winner(labels)
        except LabelerError as error:
            self.answer = refusal_of(error)
        except Exception as error:
            # Nothing of its words: they could quote a share. It is tried again, and the log tells where to look.
            log.error("winners could not be computed", extra={"problem": type(error).__name__})
            self.answer = refusal_of(Unavailable(f"the computation broke off ({type(error).__name__})"))


def refusal_of(error: LabelerError) -> Refusal:
    """How a failed computation is told: final only where every other attempt would fail in the same way."""
    passes = not isinstance(error, ProtocolViolation) or isinstance(error, Forged | WrongDigest)
    return replace(Refusal.of(error), is_final=not passes)
