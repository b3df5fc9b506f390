"""Whether a turn waits for more of one step: only while somebody else is expected whose answer the job needs."""

from __future__ import annotations

from typing import Any

from labeler.rounds import effects as fx
from labeler.rounds.awaited import expects_more
from tests.labeler.rounds.test_coordinator import AGENTS, DEADLINE_S, TALLIERS, Table


def expects(table: Table, *events: Any) -> bool:
    return expects_more(table.run, events, wall_s=table.wall_s)


def event(table: Table, kind: type[Any], *more: Any) -> Any:
    return kind(table.run.rounds[0].round_digest, table.run.task.digest, *more)


def willing(table: Table, agent: str) -> fx.Answered:
    return fx.Answered(agent, table.run.task.digest, fx.Said("willing", until_s=DEADLINE_S))


def test_of_those_who_may_be_willing_all_are_expected() -> None:
    table = Table()
    table.tick()
    first, second, third = (willing(table, agent) for agent in AGENTS)
    assert expects(table, first)
    assert expects(table, first, second)
    assert not expects(table, first, second, third)
    table.say(east="yes")
    assert not expects(table, second, third)


def test_shares_wait_for_those_of_the_other_agents_and_leave_with_the_last() -> None:
    table = Table().asked()
    shares = [event(table, fx.ShareCame, agent, "t0") for agent in AGENTS]
    done = [event(table, fx.AgentDone, agent) for agent in AGENTS]
    assert expects(table, shares[0], done[0])
    assert not expects(table, *shares, *done)
    table.message(fx.AgentDone, AGENTS[0])
    assert expects(table, shares[1], done[1])
    assert not expects(table, *shares[1:], *done[1:]), "the first has been taken before"
    assert expects(table, *shares), "none of them has said that these are all"


def test_an_agent_that_refused_or_is_gone_is_not_waited_for() -> None:
    table = Table().asked()
    done = [event(table, fx.AgentDone, agent) for agent in AGENTS[:2]]
    assert expects(table, *done)
    table.message(fx.RefusalCame, AGENTS[2], "its policy", True)
    assert not expects(table, *done)


def test_talliers_are_waited_for_until_each_holds_what_was_sent() -> None:
    table = Table().asked()
    for agent in AGENTS:
        table.message(fx.AgentDone, agent)
    whole = dict.fromkeys(AGENTS, "5" * 32)
    part = dict.fromkeys(AGENTS[:1], "5" * 32)
    reports = [event(table, fx.HoldingsCame, tallier, whole) for tallier in TALLIERS]
    assert expects(table, *reports[:2])
    assert not expects(table, *reports)
    assert expects(table, *reports[:2], event(table, fx.HoldingsCame, TALLIERS[2], part))


def test_sums_are_taken_together() -> None:
    table = Table().posted()
    kind = table.run.task.release
    sums = [event(table, fx.SumCame, one, kind, ("x", place), b"sum") for place, one in enumerate(TALLIERS)]
    assert expects(table, *sums[:2])
    assert not expects(table, *sums)


def test_nothing_waits_that_says_something_else() -> None:
    table = Table().asked()
    done = event(table, fx.AgentDone, AGENTS[0])
    assert expects(table, done)
    for other in (
        event(table, fx.RefusalCame, AGENTS[1], "its policy", True),
        willing(table, AGENTS[1]),
        fx.AgentDone("9" * 64, table.run.task.digest, AGENTS[1]),
        event(table, fx.SumCame, TALLIERS[0], "histogram", ("x", 0), b"sum"),
    ):
        assert not expects(table, done, other), other
    over = Table().posted()
    over.sum(*TALLIERS)
    assert over.run.state == "completed"
    assert not expects(over, event(over, fx.AgentDone, AGENTS[0]))
