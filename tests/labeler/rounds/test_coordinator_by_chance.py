"""The coordinator's machine in every state that chance reaches, under events that keep to no order.

Malformed, foreign, contradictory ones; results of computations that nobody asked for, rounds with numbers that no job
has, an end of a job that ended otherwise, clocks that jump by years and run backwards. The machine never raises,
changes nothing in place, says the same twice, charges no round a second time, and a job that has ended stores nothing
more. What it stores and sends in which order, with crashes before and after each commit, is in tests/simulation.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from labeler.errors import BadData, ProtocolViolation, QuorumNotReached
from labeler.rounds import effects as fx
from labeler.rounds.coordinator import step
from labeler.rounds.effects import JobRun
from tests.labeler.rounds.test_coordinator import AGENTS, DEADLINE_S, TALLIERS, Table, parties, release, restarted

PARTIES = (*AGENTS, *TALLIERS)
ANYBODY = (*PARTIES, "stranger", "")
NUMBERS = (0, 0, 0, 1, 1, 2, -1, 5)
ENDS = ("completed", "failed", "refused", "expired")
SCHEDULES, STEPS, ASIDE = 60, 30, 3


def seen(run: JobRun) -> Any:
    """Everything of a job that something else could change in place."""
    rounds = [
        (one, dict(one.participants), {who: dict(held) for who, held in one.holdings.items()}, dict(one.refusals),
         dict(one.sums), dict(one.gone_at_s))
        for one in run.rounds
    ]  # fmt: skip
    return run.state, run.asked, dict(run.answers), dict(run.parties), dict(run.asked_at_s), dict(run.mail), rounds


def any_event(run: JobRun, draw: random.Random) -> fx.Event:
    """One event, with no regard to what was asked for."""
    digest = draw.choice([*(one.round_digest for one in run.rounds), "", "9" * 64])
    of = (digest, run.task.digest if draw.random() < 0.95 else "7" * 64)
    who, number, tallier = draw.choice(ANYBODY), draw.choice(NUMBERS), draw.choice(TALLIERS)
    said = fx.ProposalReply(
        draw.choice(("willing", "later", "declined")), "x", "no", draw.choice((None, DEADLINE_S, 0.0, 1e18))
    )
    changed = {
        one: draw.choice((None, fx.Party(one, TALLIERS.index(one) if one in TALLIERS else None, "9" * 64, "c" * 64)))
        for one in draw.sample((*AGENTS, *TALLIERS), draw.randrange(3))
    }
    batches = [(one.number, f"{one.number:064d}", f"{one.number + 50:064d}") for one in run.rounds]
    damaged = draw.choice((batches, batches, batches, batches[1:], batches + batches[:1], [(7, "0" * 64, "1" * 64)]))
    kind = draw.choice((run.task.release, run.task.release, "winner", "histogram"))
    stated = (draw.choice((digest, digest, "x")), TALLIERS.index(tallier))
    contributors = run.rounds[0].contributors if run.rounds else ()
    makers: tuple[Callable[[], fx.Event], ...] = (
        lambda: fx.Tick({who: draw.choice((0, 3, -1, 10**9))}),
        lambda: fx.Tick(),
        lambda: fx.PartiesChanged(parties(**changed)),
        lambda: fx.PartiesChanged(parties()),
        lambda: fx.JobAdmitted(),
        lambda: fx.QuestionsPrepared(tuple(damaged)),
        lambda: fx.BodiesMade(number),
        lambda: fx.ReplyCame(who, of[1], said),
        lambda: fx.ReplyCame(draw.choice(AGENTS), run.task.digest, fx.ProposalReply("willing", until_s=DEADLINE_S)),
        lambda: fx.ReplyCame(draw.choice(AGENTS), run.task.digest, fx.ProposalReply("willing", until_s=DEADLINE_S)),
        lambda: fx.ShareCame(*of, who, draw.choice(ANYBODY)),
        lambda: fx.AgentDone(*of, who),
        lambda: fx.HoldingsCame(*of, who, {one: draw.choice("56") * 32 for one in draw.sample(ANYBODY, 3)}),
        lambda: fx.HoldingsCame(*of, tallier, dict.fromkeys(AGENTS, "5" * 32)),
        lambda: fx.HoldingsCame(*of, tallier, dict.fromkeys(AGENTS, "5" * 32)),
        lambda: fx.RefusalCame(*of, who, draw.choice(("no", "\x00\x1b" * 500, "")), draw.random() < 0.3),
        lambda: fx.SumCame(*of, draw.choice((tallier, "stranger")), kind, stated, draw.choice((b"s", b"s", b"o"))),
        lambda: fx.TurnGranted(digest),
        lambda: fx.ReleaseKnown(number, release(contributors or AGENTS)),
        lambda: draw.choice((fx.Tick(), fx.JobFailed(draw.choice((BadData("x"), QuorumNotReached("y"))), number))),
        lambda: draw.choice((fx.Tick(), fx.Ended(draw.choice(("cancelled", "completed", "collecting", "queued"))))),
        lambda: fx.StepStored(),
        lambda: fx.StepStored(),
    )
    return draw.choice(makers)()


class Chance(Table):
    """A job and what happens to it: events as a driver brings them, restarts among them."""

    def __init__(self, draw: random.Random, release_kind: str) -> None:
        super().__init__(rounds=draw.choice((1, 2)), max_dropouts=draw.choice((0, 1)), release=release_kind)
        self.draw = draw
        self.reached: set[str] = set()

    def drive(self, event: fx.Event) -> None:
        """One event, and all that it leads to; afterwards the process may begin anew. A finished job is not read."""
        self.is_turn = True
        self.tell(event)
        if self.draw.random() < 0.1 and self.run.state not in ENDS:
            self.run, _ = restarted(self.run, self.now)

    def likely(self) -> list[fx.Event]:
        """Events of a driver, in any order."""
        draw = self.draw
        after_s = draw.choice((0.0, 5.0, 40.0))
        one = draw.choice(self.run.rounds)
        of = (one.round_digest or "9" * 64, self.run.task.digest)
        agent, tallier = draw.choice(AGENTS), draw.choice(TALLIERS)
        willing = fx.ProposalReply("willing", until_s=DEADLINE_S)
        answer = draw.choice((willing, *(fx.ProposalReply(word, "x", "no") for word in ("later", "declined"))))
        held = dict.fromkeys(draw.sample(AGENTS, draw.randrange(4)), draw.choice("55556") * 32)
        changed: dict[str, Any] = (
            {agent: fx.Party(agent, None, "9" * 64, "c" * 64, True)} if draw.random() < 0.5 else {}
        )
        changed |= dict.fromkeys(draw.sample(PARTIES, draw.randrange(2)))

        def tick() -> list[fx.Event]:
            self.steady_s += after_s
            self.wall_s += after_s
            return [fx.Tick()]

        def summed(who: str, data: bytes) -> fx.Event:
            return fx.SumCame(*of, who, self.run.task.release, (of[0], TALLIERS.index(who)), data)

        def everybody() -> list[fx.Event]:
            return [fx.Tick(), *(fx.ReplyCame(name, of[1], willing) for name in AGENTS)]

        def all_held() -> list[fx.Event]:
            return [fx.HoldingsCame(*of, name, dict.fromkeys(AGENTS, "5" * 32)) for name in TALLIERS]

        makers: tuple[Callable[[], list[fx.Event]], ...] = (
            tick,
            everybody,
            everybody,
            all_held,
            all_held,
            lambda: [summed(name, b"sum") for name in TALLIERS],
            lambda: [summed(tallier, draw.choice((b"sum", b"sum", b"other")))],
            lambda: [fx.ReplyCame(agent, of[1], answer)],
            lambda: [fx.ShareCame(*of, draw.choice((*AGENTS, "stranger")), tallier)],
            lambda: [fx.HoldingsCame(*of, tallier, held)],
            lambda: [fx.RefusalCame(*of, draw.choice(PARTIES), "no", draw.random() < 0.5)],
            lambda: [fx.PartiesChanged(parties(**changed))],
            lambda: [fx.JobFailed(draw.choice((BadData("x"), ProtocolViolation("y"))))] if draw.random() < 0.1 else [],
        )
        return draw.choice(makers)()

    def aside(self) -> None:
        """Events that keep to no order, from here on; whatever comes of them is forgotten."""
        run, draw = self.run, self.draw
        if draw.random() < 0.05:
            damaged: tuple[dict[str, Any], ...] = ({"participants": ()}, {"parties": {}}, {"rounds": ()})
            run = replace(run, **draw.choice(damaged))
        posted = {one.number for one in run.rounds if one.state in ("posted", "opened")}
        now = self.now
        for _ in range(ASIDE):
            later_s, jump_s = draw.choice((0.0, 0.0, 1.0, 40.0, -3.0)), draw.choice((0.0,) * 40 + (1e8, -1e6))
            now = fx.Now(now.wall_s + jump_s, now.steady_s + later_s)
            event, before = any_event(run, draw), seen(run)
            after, effects = step(run, event, now)
            again, same = step(run, event, now)
            assert seen(run) == before, f"{event} changed a job in place"
            assert again == after, f"{event} says another thing the second time"
            assert [type(one) for one in same] == [type(one) for one in effects]
            if any(isinstance(one, fx.RefuseMessage) for one in effects):
                assert len(effects) == 1
                assert after is run
            if run.state not in fx.UNFINISHED:
                assert after.state == run.state, f"{event} undoes an end"
                assert all(isinstance(one, fx.StoreReply) for one in effects if isinstance(one, fx.Store)), effects
            for one in effects:
                assert not (isinstance(one, fx.Post) and one.number in posted), "charged twice"
                assert not (isinstance(one, fx.StoreRelease) and one.number not in posted), "opened without a charge"
                assert not (isinstance(one, fx.AskForSums) and one.number not in posted), "a sum without a charge"
                posted |= {one.number} if isinstance(one, fx.Post) else set()
            restarted(after, now)
            self.reached |= {after.state, *(one.state for one in after.rounds)}
            run = after


@pytest.mark.parametrize("release_kind", ["histogram", "winner"])
def test_whatever_happens_in_whatever_order_the_rules_hold(release_kind: str) -> None:
    reached: set[str] = set()
    for seed in range(SCHEDULES):
        draw = random.Random(f"{release_kind} {seed}")
        chance = Chance(draw, release_kind)
        for _ in range(STEPS):
            for event in chance.likely():
                chance.drive(event)
            chance.aside()
        reached |= chance.reached
    wanted = {"queued", "collecting", "tallying", "completed", "failed", "refused", "cancelled"}
    assert wanted | {"waiting", "asked", "agreed", "posted", "opened"} <= reached
