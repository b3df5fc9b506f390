"""No requester closes a site for others by jobs that lead nowhere, and no search for a budget goes on for nothing."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from labeler.batching import round_charges
from labeler.errors import BudgetExceeded, LabelerError, PolicyRefusal
from labeler.ledger import promises as told
from labeler.messages.bodies import Proposal
from labeler.planning import price
from labeler.task import Task
from tests.workers.test_agent import policy_with
from tests.workers.test_requester_shares import KEYS, Site, task
from workers.agent.ledger import ShareUsedUp


class Searched(Site):
    """A site to which jobs are proposed that are answered or cancelled."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.promises = self.ledger._promises  # which knows what is promised without a look

    def allow(self, **budget: Any) -> None:
        self.parts.policy = policy_with(max_queries_per_day=10**9, **({"instance_epsilon": 1000.0} | budget))

    def ask(self, requester: str, *, queries: int = 4, nonce: str = "", sigma_votes: float = 40.0) -> Proposal | str:
        """Propose a job; the proposal where the site says yes, and else its sentence."""
        self.jobs += 1
        until = (self.parts.clock.now + timedelta(hours=1)).timestamp()
        asked = task(nonce or f"job-{self.jobs}", max_queries=queries, sigma_votes=sigma_votes)
        proposal = Proposal(f"job-{self.jobs}", asked, (queries,), KEYS, until, requester)
        policy, database = self.ledger.open_accounts(), self.parts.database
        with database.write() as connection:
            try:
                with database.attempt(connection):
                    self.ledger.promise_in(connection, policy, proposal)
            except (BudgetExceeded, ShareUsedUp) as error:
                self.ledger.decline(connection, policy, proposal, error)
                return str(error)
            except LabelerError as error:
                return str(error)
        return proposal

    def cancel(self, proposal: Proposal) -> None:
        self.promises.withdraw(proposal.job_id, self.parts.clock.now)

    def answer(self, proposal: Proposal) -> None:
        policy = self.ledger.open_accounts()
        with self.parts.database.write() as connection:
            self.ledger.charge_in(
                connection,
                policy,
                round_digest=proposal.digest,
                shard_version="1",
                charges=round_charges(proposal.task, proposal.num_queries),
                task=proposal.task,
                num_queries=proposal.num_queries,
                recipients=(("tallier-0", "a" * 64),),
            )

    def told(self, requester: str, *, queries: int = 4, sigma_votes: float = 40.0) -> str:
        """Return "covered", "not covered" or "refused", at no price."""
        found = self.ask(requester, queries=queries, sigma_votes=sigma_votes)
        if isinstance(found, Proposal):
            self.cancel(found)
            return "covered"
        return "not covered" if "are left. Last spenders" in found or "would take more" in found else "refused"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Searched]:
    made = Searched(tmp_path / "journal.db")
    made.allow()
    yield made
    made.parts.database.close()


def test_five_requesters_that_cancel_all_day_close_the_site_to_nobody(site: Searched) -> None:
    for number in range(150):
        assert site.told(f"mallory-{number % 5}") == "covered"
    honest = site.ask("ada")
    assert isinstance(honest, Proposal)
    site.answer(honest)
    assert site.spent() == price(honest.task).instance.charge_nano


def test_names_that_use_up_what_they_are_told_keep_only_themselves_from_more(site: Searched) -> None:
    for name in range(5):
        said = [site.told(f"mallory-{name}", queries=10 * (name * 12 + number + 1)) for number in range(12)]
        assert said == ["covered"] * told.MOST_OF_ONE + ["refused"] * 2
    assert site.told("mallory-0", queries=1000) == "refused"
    assert site.told("ada", queries=1000) == "covered", "another requester is told"
    assert site.told("mallory-0", queries=1000) == "covered", "what was told to one is no news"
    site.parts.clock.now += timedelta(days=1, seconds=1)
    assert site.told("mallory-0", queries=2000) == "covered"


def test_one_name_that_holds_many_jobs_open_and_cancels_them_all_closes_the_site_to_nobody(site: Searched) -> None:
    held = [site.ask("mallory", queries=1) for _ in range(told.MOST + 20)]
    for one in held:
        assert isinstance(one, Proposal)
        site.cancel(one)
    assert site.told("mallory", queries=1000) == "refused"
    assert [site.told("ada", queries=queries) for queries in (100, 121, 500)] == ["covered"] * 3


def test_whatever_names_a_coordinator_says_the_site_tells_no_more_in_all(site: Searched) -> None:
    said = [site.told(f"made up {number}", queries=number + 1) for number in range(told.MOST + 5)]
    assert said == ["covered"] * told.MOST + ["refused"] * 5
    assert site.told("ada", queries=told.MOST) == "covered", "it was covered for another name"


def test_a_search_for_the_cap_ends_far_from_it_and_what_it_tells_depends_on_no_secret_afterwards(
    tmp_path: Path,
) -> None:
    """Two sites whose caps differ within what is left of a search: from then on every answer is the same."""
    answers = []
    for number, epsilon in enumerate((100.0, 100.01)):
        site = Searched(tmp_path / f"{number}.db")
        site.allow(instance_epsilon=epsilon)
        low, high = 1, 1_000_000
        said = []
        for _ in range(40):
            middle = (low + high) // 2
            said.append(site.told("mallory", queries=middle, sigma_votes=100.0))
            if said[-1] == "covered":
                low = middle
            elif said[-1] == "not covered":
                high = middle
        assert said[told.MOST_OF_ONE :] == ["refused"] * (40 - told.MOST_OF_ONE)
        answers.append(said)
        site.parts.database.close()
    assert answers[0] == answers[1]


def test_a_share_that_is_used_up_is_told_as_seldom_and_of_made_up_names_too(site: Searched) -> None:
    charge = price(task()).instance.charge_nano
    cap = site.parts.policy.budget.cap("instance")
    assert cap is not None
    site.allow(per_requester=50 * charge / cap)
    said = Counter(site.told(f"made up {number}", queries=4 * (500 - number)) for number in range(200))
    assert said == {"not covered": told.MOST, "refused": 200 - told.MOST}
    assert site.told("ada", queries=3000) == "not covered", "as follows from what was told"


def test_a_round_that_was_never_proposed_is_no_way_round(site: Searched) -> None:
    """Asks that are not covered tell as much as proposals: also of them a day has a hundred."""
    site.allow(instance_epsilon=1.0)
    policy, database, said = site.ledger.open_accounts(), site.parts.database, Counter[str]()
    for number in range(told.MOST_OF_ONE + 5):
        asked: Task = task(sigma_votes=0.5 + number / 100, max_queries=4, nonce="ask")
        charges = round_charges(asked, 4)
        with database.write() as connection:
            try:
                with database.attempt(connection):
                    site.ledger.charge_in(
                        connection,
                        policy,
                        round_digest=f"{number:064x}",
                        shard_version="1",
                        charges=charges,
                        task=asked,
                        num_queries=4,
                        recipients=(("tallier-0", "a" * 64),),
                    )
            except BudgetExceeded:
                site.ledger.decline_ask(connection, policy, f"{number:064x}", asked, 4, charges)
                said["not covered"] += 1
            except PolicyRefusal:
                said["refused"] += 1
    assert said == {"not covered": told.MOST_OF_ONE, "refused": 5}


def test_what_was_told_is_known_after_a_restart_and_a_cap_that_was_changed_is_another_secret(tmp_path: Path) -> None:
    first = Searched(tmp_path / "journal.db")
    first.allow()
    for number in range(told.MOST_OF_ONE):
        assert first.told("ada", queries=number + 1) == "covered"
    first.parts.database.close()
    again = Searched(tmp_path / "journal.db")
    again.jobs = 100
    again.allow()
    assert again.told("ada", queries=100) == "refused"
    again.allow(instance_epsilon=999.0)
    assert again.told("ada", queries=100) == "covered"
    again.parts.database.close()


def soak(site: Searched, jobs: int, *, sizes: tuple[int, ...], seed: int = 24) -> Counter[str]:
    """An hour of twenty requesters, each with up to four jobs under way, who cancel 7 in 100; how each was answered."""
    drawn, said = random.Random(seed), Counter[str]()
    under_way: list[Proposal] = []
    for _ in range(jobs):
        found = site.ask(f"requester {drawn.randrange(20)}", queries=drawn.choice(sizes), sigma_votes=2000.0)
        said["covered" if isinstance(found, Proposal) else found] += 1
        if isinstance(found, Proposal):
            under_way.append(found)
        while len(under_way) > drawn.randrange(80):
            ended = under_way.pop(drawn.randrange(len(under_way)))
            if drawn.random() < 0.07:
                site.cancel(ended)
            else:
                site.answer(ended)
        site.parts.clock.now += timedelta(seconds=3600 / jobs)
    return said


def with_room(path: Path, **budget: float) -> Searched:
    """A site whose budget covers a soak."""
    made = Searched(path)
    made.allow(**budget)
    return made


@pytest.mark.parametrize(
    ("jobs", "sizes"),
    [
        (800, (8,)),
        (800, (1, 8, 64, 500)),
        pytest.param(6_000, (1, 8, 64, 500, 5000), marks=[pytest.mark.long, pytest.mark.timeout(900)]),
    ],
)
def test_an_hour_of_twenty_requesters_who_cancel_seven_in_a_hundred_refuses_nobody(
    tmp_path: Path, jobs: int, sizes: tuple[int, ...]
) -> None:
    site = with_room(tmp_path / "journal.db")
    assert soak(site, jobs, sizes=sizes) == {"covered": jobs}
    assert site.promises.open_queries() > 0
    site.parts.database.close()


@pytest.mark.long
def test_the_same_hour_where_each_requester_has_a_share(tmp_path: Path) -> None:
    site = with_room(tmp_path / "journal.db", per_requester=0.5)
    assert soak(site, 500, sizes=(1, 8, 64)) == {"covered": 500}
    site.parts.database.close()


def test_a_large_job_that_waited_and_was_cancelled_leaves_room_for_small_ones(tmp_path: Path) -> None:
    """While it was promised every other yes was about more than is taken afterwards."""
    site = with_room(tmp_path / "journal.db")
    large = site.ask("grace", queries=100_000, sigma_votes=2000.0)
    assert isinstance(large, Proposal)
    assert soak(site, 300, sizes=(8,)) == {"covered": 300}
    site.cancel(large)
    assert soak(site, 300, sizes=(8,), seed=25) == {"covered": 300}
    site.parts.database.close()
