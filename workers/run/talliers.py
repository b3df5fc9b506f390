"""The talliers of a run: objects of this process, each with the machine that it has as a process of its own.

They are in memory only (labeler.rounds.tallier says what has to be durable, and why). What a tallier holds of a round
is what the agents have stored of it, durably and before a tallier has any of it; so a run that goes on hands it over
again, and the sum is the same. So is the noise, where talliers add it: its key lies beside the agents'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from labeler.ledger.chain import Head
from labeler.messages.bodies import OpenRound, SumRequest, aggregate_to_bytes, winner_to_bytes
from labeler.noise import noise_source
from labeler.randomness import ByteSource
from labeler.release import WinnerEngine, open_winner
from labeler.rounds import tallier as machine
from labeler.rounds.effects import HoldingsCame, JobRun, SumCame
from labeler.rounds.tallier import Came, Site, TallierEffect, TallierEvent, TallierRound
from labeler.sharing import ShareVector
from labeler.tally import AggregateShare, BallotShare, InputShare, add_shares, misfit_of
from labeler.task import Task

_NOW: Final = 0.0
"""No time passes: nothing expires in a process that waits for nobody."""


@dataclass
class _Desk:
    """One tallier in one round.

    Attributes:
        opening: the round, and which tallier it is.
        shares: those it holds, by agent; gone once they are summed.
        aggregate: its sum, once it was asked for.
    """

    opening: OpenRound
    state: TallierRound
    shares: dict[str, ShareVector | BallotShare] = field(default_factory=dict)
    aggregate: AggregateShare | None = None


class RunTalliers:
    """See the module.

    Args:
        names: of the talliers, in order.
        engine: how they find the winner of each query; None puts their sums together in this process.
        noise_key: (tallier, digest of a round): what it draws its noise of the round from, where talliers add it.
        is_seeded: such keys came from a known seed.
    """

    def __init__(
        self,
        task: Task,
        names: Sequence[str],
        engine: WinnerEngine | None,
        *,
        noise_key: Callable[[str, str], bytes],
        is_seeded: bool,
    ) -> None:
        self._task = task
        self._names = tuple(names)
        self._engine = engine
        self._noise_key = noise_key
        self._is_seeded = is_seeded
        self._desks: dict[int, list[_Desk]] = {}

    def knows(self, number: int) -> bool:
        """Whether a round is open, or summed, here."""
        return number in self._desks

    def open(self, job: JobRun, number: int) -> None:
        """Have every tallier open a round."""
        one = job.rounds[number]
        self._desks[number] = []
        for index in range(len(self._names)):
            opening = OpenRound(
                round=job.round_value(one),
                tallier=index,
                participants=one.participants,
                expires_at=job.expires_at_s,
            )
            desk = _Desk(opening, TallierRound(one.round_digest))
            _step(desk, machine.Opened(opening, Site()))
            self._desks[number].append(desk)

    def take(self, number: int, shares: Sequence[InputShare]) -> None:
        """Hand the shares of one agent over, one to each tallier.

        Raises:
            LabelerError: a tallier does not take its share.
        """
        for desk, sent in zip(self._desks[number], shares, strict=True):
            share = sent.share
            misfit = misfit_of(share, desk.opening.round)
            came = Came(sent.agent_id, share.sharing_id, share.fingerprint(), misfit)
            if any(isinstance(one, machine.Hold) for one in _step(desk, machine.SharesCame((came,)))):
                desk.shares[sent.agent_id] = share

    def holds(self, number: int) -> frozenset[str]:
        """Agents whose shares of a round are held."""
        return frozenset(self._desks[number][0].state.sharing_ids)

    def holdings(self, job: JobRun, number: int) -> list[HoldingsCame]:
        """What each tallier says that it holds of a round."""
        return [
            HoldingsCame(
                round_digest=desk.state.round_digest,
                task_digest=job.task.digest,
                tallier_id=name,
                holdings={agent: sharing.hex() for agent, sharing in desk.state.sharing_ids.items()},
            )
            for name, desk in zip(self._names, self._desks[number], strict=True)
        ]

    def sums(self, job: JobRun, number: int, names: Sequence[str], head: Head) -> list[SumCame]:
        """What each tallier that is asked answers: its sum, or the winners that they have found together.

        Raises:
            LabelerError: a tallier does not sum these contributors; the winners cannot be found.
        """
        desks = self._desks[number]
        request = SumRequest(frozenset(job.rounds[number].contributors), ledger_seq=head.seq, ledger_hash=head.hash)
        for name, desk in zip(self._names, desks, strict=True):
            for effect in _step(desk, machine.SumAsked(request, Site())):
                if isinstance(effect, machine.Add):
                    held = {agent: desk.shares[agent] for agent in effect.contributors}
                    noise = self._noise(name, desk.state.round_digest, effect.contributors)
                    desk.aggregate = add_shares(desk.opening.tallier, desk.opening.round, held, noise=noise)
                    desk.shares.clear()
                    _step(desk, machine.Added())
        answers = self._answers([desk.aggregate for desk in desks if desk.aggregate is not None])
        return [
            SumCame(
                round_digest=desk.state.round_digest,
                task_digest=job.task.digest,
                tallier_id=name,
                kind=self._task.release,
                stated=(desk.state.round_digest, desk.opening.tallier),
                data=answer,
            )
            for name, desk, answer in zip(self._names, desks, answers, strict=True)
            if name in names
        ]

    def forget(self, number: int) -> None:
        """A round is opened; nobody misses anything of it."""
        self._desks.pop(number, None)

    def _noise(self, name: str, round_digest: str, contributors: frozenset[str]) -> ByteSource | None:
        if self._task.noise_by == "agents":
            return None
        key = self._noise_key(name, round_digest)
        return noise_source(key, round_digest, contributors, is_seeded=self._is_seeded)

    def _answers(self, sums: Sequence[AggregateShare]) -> list[bytes]:
        if self._task.release == "histogram":
            return [aggregate_to_bytes(one) for one in sums]
        labels = open_winner(sums, self._task, engine=self._engine).labels
        return [winner_to_bytes(one.winner(labels)) for one in sums]


def _step(desk: _Desk, event: TallierEvent) -> tuple[TallierEffect, ...]:
    """One event; what the machine refuses is raised."""
    desk.state, effects = machine.step(desk.state, event, _NOW)
    for effect in effects:
        if isinstance(effect, machine.Refuse):
            raise effect.error
    return effects
