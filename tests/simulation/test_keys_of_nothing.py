"""A key that was drawn for something that a full disk did not keep opens nothing, and is gone without a restart."""

from __future__ import annotations

from dataclasses import replace

import pytest

from labeler.system.faults import listening
from tests.simulation.campaign import memory_folder
from tests.simulation.case import JobPlan, Rates, case_of
from tests.simulation.homes import Templates
from tests.simulation.subject import service
from tests.simulation.world import SETTLE_S, World

DEADLINE_S = 600.0


def keys_of(world: World, name: str) -> list[str]:
    return [key for key in world.witness._journals()[name].keys.names() if key != "home"]


def until_a_key_is_drawn(world: World, name: str) -> set[str]:
    """Everybody takes turns until one of them draws a key: from that moment on its disk keeps nothing of the turn."""
    world._requests(None)
    drawn: set[str] = set()

    def moment(what: str) -> None:
        if what == "keys kept" and world._stack[-1:] == [name]:
            world._full[name] = 100
            drawn.update(keys_of(world, name))
        world._moment(what)

    with listening(moment):
        for _ in range(20):
            for one in world._names():
                world._turn(one)
                if world._full.pop(name, 0):
                    world.mailbox.empty()
                    return drawn
            world._pass(0.5)
    pytest.fail(f"{name} drew no key")


def test_a_charge_that_a_full_disk_did_not_keep_leaves_no_key_behind() -> None:
    name = "north"
    plan = JobPlan(sizes=(1,), deadline_s=DEADLINE_S, at_step=0, cancel_after=None)
    quiet = replace(case_of(0), max_dropouts=0, absent=(), capped=(), rates=Rates(), way="neighbours")
    case = replace(quiet, agents=2, talliers=2, release="histogram", dishonest_talliers=None, jobs=(plan,))
    subject = service()
    with memory_folder() as folder:
        (folder / "templates").mkdir()
        world = World(case, Templates(folder / "templates", subject.complete).of(case.shape), folder, subject)
        try:
            drawn = until_a_key_is_drawn(world, name)
            with listening(world._moment):
                assert len(drawn) == 1, "a key is durable before its charge is"
                assert keys_of(world, name) == list(drawn)
                assert not any(
                    sender == name and kind == "input-share" for _, _, sender, _, kind, _ in world.witness.wire
                )
                world._as_coordinator(lambda coordinator: coordinator.cancel(world._jobs[0].job_id))
                living = world._alive[name]
                world._turn(name)
                assert keys_of(world, name) == [], "its next turn has nothing to keep, and erases it"
                world._pass(DEADLINE_S + SETTLE_S)
                for _ in range(10):
                    world._all_turns(everybody=True)
                    world._pass(0.5)
                world.witness.check_end()
            assert world._alive[name] is living, "it was never started again"
            assert world.witness.states == ("cancelled",)
        finally:
            world.close()
