"""A round that waits until its shares are erased ends its job: charged once, nothing opened, nobody waits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from labeler.driver.sending import SUM_GRACE_S
from labeler.methods import ReleaseKind
from labeler.system.faults import listening
from tests.simulation.campaign import memory_folder
from tests.simulation.case import JobPlan, Rates, case_of
from tests.simulation.homes import Templates
from tests.simulation.world import COORDINATOR, World

DEADLINE_S = 600.0


def until_posted(world: World) -> None:
    """Everybody takes turns until a charge is posted; then the coordinator dies, and what it asked for is lost."""
    world._requests(None)
    (job,) = world._jobs
    for _ in range(20):
        for name in world._names():
            world._turn(name)
            if any(one.state == "posted" for one in world.witness._coordinator.rounds(job.job_id)):
                world._bury(COORDINATOR)
                world.mailbox.empty()
                return
        world._pass(0.5)
    pytest.fail("no charge was posted")


@pytest.mark.parametrize("release", ["histogram", "winner"])
def test_a_round_whose_turn_comes_after_its_shares_are_erased_ends_its_job(release: ReleaseKind) -> None:
    plan = JobPlan(sizes=(2, 1), deadline_s=DEADLINE_S, at_step=0, cancel_after=None)
    quiet = replace(case_of(0), max_dropouts=0, absent=(), capped=(), rates=Rates())
    case = replace(quiet, agents=2, talliers=3, release=release, way="neighbours", jobs=(plan,))
    with memory_folder() as folder:
        shape = case.shape
        template = Templates(folder / "templates").of(shape)
        world = World(case, template, folder)
        try:
            with listening(world._moment):
                until_posted(world)
                world._pass(DEADLINE_S + SUM_GRACE_S + 1)
                for name in template.talliers:
                    world._turn(name)
                for _ in range(10):
                    world._all_turns(everybody=True)
                    world._pass(0.5)
                world.witness.check_end()
            assert world.witness.states == ("failed",)
            rounds = world.witness._coordinator.rounds(world._jobs[0].job_id)
            assert [one.state for one in rounds] == ["posted", "asked"], "nothing was opened"
            (problem,) = {world.witness._coordinator.jobs[world._jobs[0].job_id].problem["detail"]}
            assert "erased its shares" in problem
        finally:
            world.close()
