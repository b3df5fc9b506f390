"""The coordinator's machine under any event in any reachable state: malformed, foreign, contradictory, at any moment.

`test_coordinator_by_chance.py` drives it as a driver does. Here nobody keeps to any order: results come of
computations that nobody asked for, rounds have numbers that no job has, an end is said of a job that ended otherwise,
clocks jump by years and run backwards. It never raises, changes nothing in place, says the same twice, and a job that
has ended stores nothing more.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from labeler.errors import BadData, QuorumNotReached
from labeler.rounds import effects as fx
from labeler.rounds.coordinator import step
from labeler.rounds.effects import JobRun
from tests.labeler.rounds.test_coordinator import AGENTS, DEADLINE_S, TALLIERS, Table, parties, release, restarted

ANYBODY = (*AGENTS, *TALLIERS, "stranger", "")
NUMBERS = (0, 0, 0, 1, 1, 2, -1, 5)
SCHEDULES, STEPS = 120, 30


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
        lambda: fx.Admitted(),
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
        lambda: fx.Opened(number, release(contributors or AGENTS)),
        lambda: draw.choice((fx.Tick(), fx.Failed(draw.choice((BadData("x"), QuorumNotReached("y"))), number))),
        lambda: draw.choice((fx.Tick(), fx.Ended(draw.choice(("cancelled", "completed", "collecting", "queued"))))),
        lambda: fx.Stored(),
        lambda: fx.Stored(),
    )
    return draw.choice(makers)()


@pytest.mark.parametrize("release_kind", ["histogram", "winner"])
def test_any_event_in_any_state_raises_nothing_and_changes_nothing_in_place(release_kind: str) -> None:
    reached = set()
    for seed in range(SCHEDULES):
        draw = random.Random(f"{release_kind} {seed}")
        table = Table(rounds=draw.choice((1, 2)), release=release_kind, max_dropouts=draw.choice((0, 1)))
        for said in (table.tick, partial(table.say, **dict.fromkeys(AGENTS, "yes")), partial(table.hold, *AGENTS),
                     partial(table.sum, *TALLIERS))[: draw.randrange(5)]:  # fmt: skip
            said()
        run = table.run
        if run.state == "collecting" and draw.random() < 0.5:  # agreed on, and not durable yet
            for tallier in TALLIERS:
                held = dict.fromkeys(AGENTS, "5" * 32)
                came = fx.HoldingsCame(run.rounds[0].round_digest, run.task.digest, tallier, held)
                run, _ = step(run, came, table.now)
        if draw.random() < 0.1:
            run = replace(run, **draw.choice(({"participants": ()}, {"parties": {}}, {"rounds": ()})))  # type: ignore[arg-type]
        wall_s, steady_s = table.wall_s, 0.0
        posted = {one.number for one in table.effects if isinstance(one, fx.Post)}
        for _ in range(STEPS):
            steady_s += draw.choice((0.0, 0.0, 1.0, 40.0, -3.0))
            wall_s += draw.choice((0.0,) * 40 + (1e8, -1e6))
            now, event, before = fx.Now(wall_s, steady_s), any_event(run, draw), seen(run)
            after, effects = step(run, event, now)
            again, same = step(run, event, now)
            assert seen(run) == before, f"{event} changed a job in place"
            assert again == after, f"{event} says another thing the second time"
            assert [type(one) for one in same] == [type(one) for one in effects]
            if any(isinstance(one, fx.Refuse) for one in effects):
                assert len(effects) == 1
                assert after is run
            stores = [one for one in effects if isinstance(one, fx.Store)]
            if run.state not in fx.UNFINISHED:
                assert after.state == run.state, f"{event} undoes an end"
                assert all(isinstance(one, fx.StoreReply) for one in stores), f"{stores} after the end"
            for one in effects:
                assert not (isinstance(one, fx.Post) and one.number in posted), "charged twice"
                assert not (isinstance(one, fx.StoreRelease) and one.number not in posted), "opened without a charge"
                assert not (isinstance(one, fx.AskForSums) and one.number not in posted), "a sum without a charge"
                posted |= {one.number} if isinstance(one, fx.Post) else set()
            restarted(after, now)
            reached |= {after.state, *(one.state for one in after.rounds)}
            run = after
    wanted = {"queued", "collecting", "tallying", "completed", "failed", "refused", "cancelled"}
    assert wanted | {"waiting", "asked", "agreed", "posted", "opened"} <= reached
