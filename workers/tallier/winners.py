"""A tallier's part in finding winners: one computation with the two others at a time, alongside its mail.

The coordinator asks all three talliers for the winners of the rounds that are due. Each begins a computation with all
that it was asked for. Rounds that the others were not asked for yet wait for the next one. It runs in a thread, so that
the tallier keeps taking mail. If more is asked while the others do not come, it starts over with all of it;
otherwise the next computation starts when this one has ended. A computation is a function of the sums that the journal
keeps. So nothing of it is stored, and a tallier that dies starts over with the same sums.

A failure reported as final ends a round that is paid for. Only what would come out the same at every attempt is final:
talliers that were told different things, and ballots that do not add up. Anything else is first retried here for a
while, because three talliers that are asked at once do not hear of it at once. Then it is reported.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from labeler.errors import Forged, LabelerError, ProtocolViolation, Unavailable, WrongDigest
from labeler.messages.bodies import OpenRound, RefusalBody
from labeler.sharing import Winner, winner_time_limit_s
from labeler.system.keys import PartyKeys
from labeler.tally import AggregateShare
from workers.tallier.peers import WinnerGroup
from workers.winner.engine import Outcome, TallierWinnerEngine, WinnerJob, WinnerOrder

log = logging.getLogger("labeler.tallier")

MEETING_LIMIT_S = 10.0
"""Seconds that a tallier waits for the others to come to a job. All are asked at once; a late one is asked again."""

MAX_ATTEMPTS = 10_000
"""Computations of one round while this process lives: more than fit into a day of waiting for absent others. Each
draws new masks and tells a tallier that follows the protocol nothing. For one that does not, the attempts end
(workers.winner.engine).
"""

MAX_AT_ONCE = 64
"""Rounds of one computation; the coordinator does not ask for more at a time (labeler.rounds.queues)."""

_IN_VAIN_S = 0.5
"""Seconds that it waits for the others before it restarts with what it was asked for since. Talliers that restarted at
once could do so without end, while more and more is asked for.
"""

_PAUSE_S = 0.25
"""Seconds before what failed for the time being is tried again here."""


class WinnerRounds:
    """The rounds whose winners this tallier computes; see the module. Used by one thread.

    Args:
        group: the three talliers, or None where this one's site has pinned no others.
        keys: of this tallier; it signs what it was asked to compute.
        patience_s: how long after it was asked for a round is tried again here; None for `MEETING_LIMIT_S`.
    """

    def __init__(
        self,
        group: WinnerGroup | None,
        keys: PartyKeys,
        *,
        engine: TallierWinnerEngine,
        patience_s: float | None = None,
    ) -> None:
        self._group = group
        self._keys = keys
        self._engine = engine
        self._patience_s = patience_s
        self._asked: dict[str, _Asked] = {}
        self._current: _Computation | None = None
        self._attempts: Counter[str] = Counter()

    @property
    def facts(self) -> dict[str, str]:
        """Facts for every poll to the coordinator: the group with which this tallier can find winners, if any."""
        return {} if self._group is None else {"winner_group": self._group.digest}

    @property
    def is_busy(self) -> bool:
        """True while there is a round whose outcome was not taken."""
        return bool(self._asked)

    def ask(self, opening: OpenRound, aggregate: AggregateShare) -> bool:
        """Put a round among those that `begin` computes; the same one again is tried for longer.

        Returns:
            True unless it was among them already.

        Raises:
            Unavailable: no other talliers are pinned here.
            ProtocolViolation: the round has no winners, names this tallier by another number than its site does, or was
                computed too often.
        """
        digest = opening.round.digest
        known = self._asked.get(digest)
        if known is not None:
            known.since_s = time.monotonic()
            return False
        job = self._job(opening, aggregate)
        if self._attempts[digest] >= MAX_ATTEMPTS:
            raise ProtocolViolation(f"the winners of this round were asked for {MAX_ATTEMPTS} times; it is given up")
        order = WinnerOrder(job, aggregate.words, aggregate.row_sums)
        self._asked[digest] = _Asked(opening, aggregate, order, time.monotonic())
        return True

    def begin(self) -> None:
        """Compute what was asked for: at once where nothing is computed or the others do not come, else next."""
        current = self._current
        if current is not None:
            is_waiting = current.found is None and not current.met.is_set()
            in_vain = is_waiting and time.monotonic() - current.began_s > _IN_VAIN_S
            if not in_vain or set(current.digests) >= set(self._asked):
                return
            self._stop()
        wanted = list(self._asked)[:MAX_AT_ONCE]
        if not wanted:
            return
        self._current = _Computation(wanted, [self._asked[digest].order for digest in wanted], self._engine)

    def wait(self, seconds: float) -> None:
        """Wait a while for the computation that runs."""
        if self._current is not None:
            self._current.thread.join(seconds)

    def take(self) -> list[tuple[OpenRound, Winner | RefusalBody]]:
        """Take the rounds that have ended, each with its winners or why there are none.

        What is left, or failed for the time being, is started again.
        """
        current = self._current
        if current is None:
            return []
        if current.found is None:
            self.begin()
            return []
        current.thread.join()
        self._current = None
        ended: list[tuple[OpenRound, Winner | RefusalBody]] = []
        for digest, found in zip(current.digests, current.found, strict=True):
            asked = self._asked[digest]
            # No attempt counts for a round that another tallier was not asked for, or while one was missing: nothing
            # was sent.
            self._attempts[digest] += current.met.is_set() and not isinstance(found, WrongDigest)
            answer = refusal_of(found) if isinstance(found, LabelerError) else asked.aggregate.winner(found)
            if isinstance(answer, RefusalBody) and not answer.is_final and self._has_patience(asked):
                continue
            del self._asked[digest]
            ended.append((asked.opening, answer))
        if self._asked:
            if not ended:
                time.sleep(_PAUSE_S)
            self.begin()
        return ended

    def close(self) -> None:
        """Stop what runs, and forget what was asked for."""
        self._stop()
        self._asked.clear()

    def _has_patience(self, asked: _Asked) -> bool:
        patience_s = MEETING_LIMIT_S if self._patience_s is None else self._patience_s
        is_young = time.monotonic() - asked.since_s < patience_s
        return is_young and self._attempts[asked.opening.round.digest] < MAX_ATTEMPTS

    def _stop(self) -> None:
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


@dataclass(eq=False)
class _Asked:
    """A round that was asked for, the time of the last request, and what this tallier brings to it."""

    opening: OpenRound
    aggregate: AggregateShare
    order: WinnerOrder
    since_s: float


class _Computation:
    """One computation in its thread; `found` is there once it has ended."""

    def __init__(self, digests: Sequence[str], orders: Sequence[WinnerOrder], engine: TallierWinnerEngine) -> None:
        self.digests = digests
        self.stop = threading.Event()
        self.met = threading.Event()
        self.found: list[Outcome] | None = None
        self.began_s = time.monotonic()
        self._orders = orders
        self._engine = engine
        self.thread = threading.Thread(target=self._run, name="winner", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.found = self._engine.winners(self._orders, self.stop, met=self.met)
        except Exception as error:
            # The error's words are left out: they could quote a share. It is tried again, and the log tells where to
            # look.
            log.error("winners could not be computed", extra={"problem": type(error).__name__})
            problem = Unavailable(f"the computation broke off ({type(error).__name__})")
            self.found = [problem for _ in self._orders]


def refusal_of(error: LabelerError) -> RefusalBody:
    """Return how a failed computation is reported: final only where every other attempt would fail in the same way."""
    passes = not isinstance(error, ProtocolViolation) or isinstance(error, Forged | WrongDigest)
    return replace(RefusalBody.of(error), is_final=not passes)
