"""The case of a seed: the parties, the jobs and how often what goes wrong. Everything is drawn before it begins.

Rates are drawn per schedule, most of them 0: a schedule in which everything fails at once finds less than many in which
two or three things do (swarm testing: Groce, Zhang, Eide, Chen, Regehr 2012).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from labeler.methods import ReleaseKind
from tests.simulation.homes import Shape
from tests.simulation.ways import Way

_WAYS: tuple[Way, ...] = ("neighbours",) * 6 + ("attributes", "records", "steps", "steps")
_LATER_WAYS: tuple[Way, ...] = ("models", "weights")
_LATEST_WAYS: tuple[Way, ...] = ("lives", "lives", "heads")


@dataclass(frozen=True)
class JobPlan:
    """One job.

    Attributes:
        sizes: queries of each of its rounds.
        deadline_s: after which it expires.
        at_step: of the schedule at which it is submitted.
        cancel_after: steps after that at which it is cancelled; None: never.
    """

    sizes: tuple[int, ...]
    deadline_s: float
    at_step: int
    cancel_after: int | None


@dataclass(frozen=True)
class Rates:
    """Chances: of one step of the schedule (from `kill` on), or of one message (the first five).

    Attributes:
        lose: a message to the coordinator never comes, or mail is never delivered.
        lose_answer: it comes, and its sender does not learn that.
        double: it comes twice.
        hold: mail is delivered later, after what was sent behind it.
        outage: the mailbox does not answer.
        kill: somebody dies before the next step.
        arm: somebody dies within its next effects.
        empty: the mailbox loses everything.
        replay: an old message comes again.
        rekey: an agent's keys are changed.
        records: an agent's records are changed.
        policy: an agent's policy is changed.
        leap: much time passes.
        full: somebody's disk is full for the next commits.
        back: the wall clock of everybody is set back.
    """

    lose: float = 0.0
    lose_answer: float = 0.0
    double: float = 0.0
    hold: float = 0.0
    outage: float = 0.0
    kill: float = 0.0
    arm: float = 0.0
    empty: float = 0.0
    replay: float = 0.0
    rekey: float = 0.0
    records: float = 0.0
    policy: float = 0.0
    leap: float = 0.0
    full: float = 0.0
    back: float = 0.0


@dataclass(frozen=True)
class Case:
    """A schedule before it runs.

    Attributes:
        seed: which.
        agents, talliers: how many.
        release: of every task.
        max_dropouts: of every task.
        absent: agents that are never there.
        capped: agents whose own budget covers only a few rounds.
        unnamed: agents whom the last tallier's site does not name, so that it opens no round with them.
        jobs: in order of their submission.
        steps: after which nothing goes wrong any more.
        rates: of what goes wrong.
        dishonest_talliers: of every task: talliers add the noise; None: the agents do.
        way: what every task asks for.
        away: an agent, and for how many steps it is not there once it was first asked; nothing reaches it meanwhile.
        shorter: the first agent has one record less: the other of two neighboring worlds.
    """

    seed: int
    agents: int
    talliers: int
    release: ReleaseKind
    max_dropouts: int
    absent: tuple[int, ...]
    capped: tuple[int, ...]
    jobs: tuple[JobPlan, ...]
    steps: int
    rates: Rates
    dishonest_talliers: int | None = None
    way: Way = "neighbours"
    unnamed: tuple[int, ...] = ()
    away: tuple[int, int] | None = None
    shorter: bool = False

    @property
    def shape(self) -> Shape:
        """Of the federation it runs on."""
        return Shape(self.agents, self.talliers, self.release, self.max_dropouts, self.dishonest_talliers, self.way)

    @property
    def has_reasons_to_wait(self) -> bool:
        """Return whether a job may have to wait for its deadline, or is cancelled before; all else only costs time."""
        rates = self.rates
        is_cancelled = any(one.cancel_after is not None for one in self.jobs)
        return bool(self.absent or self.capped or rates.policy or rates.rekey or rates.leap or is_cancelled)

    @property
    def neighbour(self) -> Case:
        """The same without one record."""
        return replace(self, shorter=True)


def source(seed: int, purpose: str) -> random.Random:
    """Return what a schedule draws from; decides nothing that is secret."""
    return random.Random(f"labeler-simulation/1 {seed} {purpose}")


def case_of(seed: int) -> Case:
    """The case of a seed."""
    draw = source(seed, "case")
    # Most are small: what a small one finds is found ten times as fast, and is easier to read.
    is_small = draw.random() < 0.8
    release: ReleaseKind = "winner" if draw.random() < 0.2 else "histogram"
    agents = draw.choice((2, 2, 3) if is_small else (2, 3, 3))
    max_dropouts = draw.choice((0, 1, 1)) if agents == 3 else 0
    steps = draw.choice((10, 16, 24) if is_small else (40, 80))
    jobs = tuple(_job(draw, steps) for _ in range(draw.choice((1, 1, 1, 2) if is_small else (1, 2, 2, 3))))
    talliers = 3 if release == "winner" else draw.choice((2, 2, 2, 3))
    # Drawn apart, each separately, so that a seed stands for the schedule for which it stood before.
    way = source(seed, "way").choice(_WAYS) if release == "histogram" else "neighbours"
    trained = source(seed, "trained models")
    if release == "histogram" and way == "neighbours" and trained.random() < 0.3:
        way = trained.choice(_LATER_WAYS)
    latest = source(seed, "lives and heads")
    if release == "histogram" and way in ("neighbours", "records") and latest.random() < 0.3:
        way = latest.choice(_LATEST_WAYS)
    if way == "lives" and len(jobs) == 1:
        # What images have spent shows in the next job.
        jobs += (_job(latest, steps),)
    gone = source(seed, "away")
    is_gone = gone.random() < (0.5 if way == "steps" and max_dropouts else 0.1)
    rates, later, named = _rates(draw), source(seed, "later"), source(seed, "agents that are named")
    if later.random() < 0.3:
        rates = replace(rates, full=later.choice((0.1, 0.3)))
    if later.random() < 0.15:
        rates = replace(rates, back=later.choice((0.03, 0.1)))
    return Case(
        seed=seed,
        agents=agents,
        talliers=talliers,
        release=release,
        max_dropouts=max_dropouts,
        absent=(draw.randrange(agents),) if draw.random() < 0.12 else (),
        capped=(draw.randrange(agents),) if draw.random() < 0.15 else (),
        jobs=jobs,
        steps=steps,
        rates=rates,
        # Heads carry the noise of those who trained them, and no other.
        dishonest_talliers=source(seed, "noise").choice((None, 1, 1, 2)) if talliers == 3 and way != "heads" else None,
        way=way,
        unnamed=(named.randrange(agents),) if named.random() < 0.05 else (),
        away=(gone.randrange(agents), gone.choice((6, 12, 20))) if is_gone else None,
    )


def _job(draw: random.Random, steps: int) -> JobPlan:
    return JobPlan(
        sizes=draw.choice(((1,), (1,), (2,), (1, 1), (2, 1))),
        deadline_s=draw.choice((600.0, 600.0, 600.0, 40.0)),
        at_step=draw.choice((0, 0, 0, draw.randrange(max(1, steps // 2)))),
        cancel_after=draw.randrange(steps) if draw.random() < 0.15 else None,
    )


def _rates(draw: random.Random) -> Rates:
    def rate(chance: float, *values: float) -> float:
        return draw.choice(values) if draw.random() < chance else 0.0

    return Rates(
        lose=rate(0.35, 0.05, 0.3),
        lose_answer=rate(0.35, 0.05, 0.3),
        double=rate(0.3, 0.1, 0.4),
        hold=rate(0.3, 0.1, 0.4),
        outage=rate(0.15, 0.05, 0.2),
        kill=rate(0.35, 0.05, 0.15),
        arm=rate(0.6, 0.1, 0.25),
        empty=rate(0.25, 0.03, 0.1),
        replay=rate(0.25, 0.1, 0.3),
        rekey=rate(0.2, 0.05, 0.1),
        records=rate(0.4, 0.05, 0.15),
        policy=rate(0.15, 0.06),
        leap=rate(0.2, 0.03, 0.08),
    )
