"""No requester uses up what a site gives to all: its jobs take at most its share, by the agent's own journal.

No requester closes a site for others by jobs that lead nowhere, and no search for a budget goes on for nothing.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from labeler.accounting.lifetime import job_nano
from labeler.batching import round_charges
from labeler.errors import BudgetExceeded, LabelerError, PolicyRefusal
from labeler.ledger import promises as told
from labeler.ledger.database import Connection, open_database
from labeler.messages.bodies import Proposal, TallierKey
from labeler.planning import price
from labeler.task import Task
from tests.labeler.tasks import make_task
from tests.workers.journal_store import DurableSite
from tests.workers.test_agent import policy_with
from workers.agent.ledger import ShareUsedUp
from workers.agent.policy import Policy, policy_toml, read_policy
from workers.agent.site import policy_in_words, shares_taken
from workers.party.home import AgentConfig, create_agent_home

KEYS = tuple(TallierKey(f"tallier-{number}", f"{number + 1:064x}", f"{number + 7:064x}") for number in range(3))
LIFE = {"budget_nano": 4_000_000, "least_similarity": -1.0}


def task(nonce: str = "", **changes: Any) -> Task:
    fields = {"classes": ("cat", "dog"), "k": 1, "sigma_votes": 40.0, "delta": 1e-5, "max_queries": 4}
    return make_task(**(fields | {"backbone_fingerprint": "backbone", "nonce": nonce} | changes))


class Site(DurableSite):
    """An agent's ledger, and jobs that are proposed to it."""

    def __init__(self, path: Path) -> None:
        database = open_database(path, anchor=path.with_suffix(".head"), allow_unsynced=True)
        super().__init__(database, policy_with())
        self.path = path
        self.jobs = 0

    def allow(self, **budget: Any) -> None:
        self.policy = policy_with(max_queries_per_day=10_000, **budget)

    def next_proposal(self, requester: str, asked: Task | None = None, *, queries: int = 4) -> Proposal:
        self.jobs += 1
        until = (self.clock.now + timedelta(hours=1)).timestamp()
        job_id = f"job-{self.jobs}"
        return Proposal(job_id, asked or task(job_id), (queries,), KEYS, until, requester)

    def propose(self, requester: str, asked: Task | None = None) -> str:
        proposal = self.next_proposal(requester, asked)
        policy = self.durable.open_accounts()
        with self.database.write() as connection:
            self.durable.promise_in(connection, policy, proposal)
        return proposal.job_id

    def charge(self, asked: Task, digest: str, queries: int = 4) -> None:
        policy = self.durable.open_accounts()
        with self.database.write() as connection:
            self.charge_in(connection, policy, asked, digest, queries)

    def charge_in(self, connection: Connection, policy: Policy, asked: Task, digest: str, queries: int = 4) -> None:
        charges, recipients = round_charges(asked, queries), (("tallier-0", "a" * 64),)
        named = {"round_digest": digest, "shard_version": "1", "recipients": recipients}
        self.durable.charge_in(connection, policy, charges=charges, task=asked, num_queries=queries, **named)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path / "journal.db")
    yield made
    made.database.close()


def share_of(jobs: float, charge: int, site: Site) -> float:
    """Return the share that covers this number of jobs of a price."""
    cap = policy_with().budget.cap("instance")
    assert cap is not None
    return jobs * charge / cap


def test_one_requester_takes_its_share_and_another_still_has_its_own(site: Site) -> None:
    charge = price(task()).instance.charge_nano
    site.allow(per_requester=share_of(2.5, charge, site))
    site.propose("ada")
    site.propose("ada")
    with pytest.raises(PolicyRefusal, match=r"budget.per_requester: .* the jobs of 'ada' would take more") as refused:
        site.propose("ada")
    assert str(charge) not in str(refused.value), "how much is left is nobody's business"
    site.propose("grace")
    assert site.spent() == 3 * charge


def test_what_is_given_back_counts_for_nobody_and_what_was_paid_for_ever(site: Site) -> None:
    charge = price(task()).instance.charge_nano
    site.allow(per_requester=share_of(1.5, charge, site))
    job_id = site.propose("ada")
    site.promises.withdraw(job_id, site.clock.now)
    paid = task("paid")
    site.propose("ada", paid)
    site.charge(paid, "f" * 64)
    site.clock.now += timedelta(days=400)
    with pytest.raises(PolicyRefusal, match="per_requester"):
        site.propose("ada")
    assert site.spent() == charge


def test_jobs_of_which_nobody_says_who_asks_share_one_share(site: Site) -> None:
    charge = price(task()).instance.charge_nano
    site.allow(per_requester=share_of(2.5, charge, site))
    site.propose("")
    site.charge(task("never proposed"), "e" * 64)
    with pytest.raises(PolicyRefusal, match="all jobs without a named requester"):
        site.propose("")
    with pytest.raises(PolicyRefusal, match="all jobs without a named requester"):
        site.charge(task("neither was this"), "d" * 64)
    site.propose("ada")


def test_a_share_that_was_promised_is_paid_when_the_policy_is_narrower_by_then(site: Site) -> None:
    asked = task("asked")
    site.allow(per_requester=1.0)
    site.propose("ada", asked)
    site.allow(per_requester=1e-9)
    site.charge(asked, "f" * 64)
    with pytest.raises(PolicyRefusal, match="per_requester"):
        site.propose("ada")


def test_a_share_is_kept_in_the_journal_also_while_no_policy_asks_for_one(site: Site) -> None:
    charge = price(task()).instance.charge_nano
    site.allow()
    site.propose("ada")
    site.propose("ada")
    site.database.close()
    again = Site(site.path)
    again.jobs = site.jobs
    again.allow(per_requester=share_of(2.5, charge, again))
    with pytest.raises(PolicyRefusal, match="per_requester"):
        again.propose("ada")
    again.propose("grace")
    again.database.close()


def test_a_requester_takes_a_share_of_what_images_have_for_life(site: Site) -> None:
    lasting = task(method="reverse-knn", lifetime_budget=LIFE | {"budget_nano": 10**8})
    most = job_nano(lasting)
    site.allow(instance_epsilon=30.0, life_epsilon=8.0)
    total = site.policy.budget.life_nano
    assert total is not None
    site.allow(instance_epsilon=30.0, life_epsilon=8.0, per_requester=2.5 * most / total)
    asked = [lasting.model_copy(update={"nonce": str(number)}) for number in range(3)]
    site.propose("ada", asked[0])
    site.propose("ada", asked[1])
    with pytest.raises(PolicyRefusal, match="per_requester"):
        site.propose("ada", asked[2])
    site.propose("grace", asked[2])


def test_people_read_what_one_requester_may_take(tmp_path: Path) -> None:
    lines = policy_in_words(policy_with(per_requester=0.25))
    assert "One requester may take at most 25 % of each of these; the coordinator says who asks." in lines
    path = tmp_path / "policy.toml"
    path.write_text("[budget]\nper_requester = 1.5\n")
    with pytest.raises(PolicyRefusal, match="per_requester"):
        read_policy(path)


def test_people_see_how_much_of_its_share_each_requester_has_taken(site: Site, tmp_path: Path) -> None:
    charge = price(task()).instance.charge_nano
    home = tmp_path / "home"
    policy = policy_with(per_requester=share_of(4.0, charge, site), max_queries_per_day=10_000)
    create_agent_home(home, AgentConfig(agent_id="a", coordinator_url="http://127.0.0.1:1", shard="none"), policy)
    inside = Site(home / "journal.db")
    inside.policy = policy
    inside.propose("")
    for _ in range(2):
        inside.propose("ada")
    inside.database.close()
    assert [(name, round(part, 6)) for name, part in shares_taken(home)] == [("ada", 0.5), ("", 0.25)]
    (home / "policy.toml").write_text(policy_toml(policy_with()))
    assert shares_taken(home) == []


# Jobs that lead nowhere, and searches for a budget


class Searched(Site):
    """A site to which jobs are proposed that are answered or cancelled."""

    def allow(self, **budget: Any) -> None:
        self.policy = policy_with(max_queries_per_day=10**9, **({"instance_epsilon": 1000.0} | budget))

    def ask(self, requester: str, *, queries: int = 4, sigma_votes: float = 40.0) -> Proposal | str:
        """Propose a job; the proposal where the site says yes, and else its sentence."""
        asked = task(f"job-{self.jobs + 1}", max_queries=queries, sigma_votes=sigma_votes)
        proposal = self.next_proposal(requester, asked, queries=queries)
        policy, database = self.durable.open_accounts(), self.database
        with database.write() as connection:
            try:
                with database.attempt(connection):
                    self.durable.promise_in(connection, policy, proposal)
            except (BudgetExceeded, ShareUsedUp) as error:
                self.durable.decline(connection, policy, proposal, error)
                return str(error)
            except LabelerError as error:
                return str(error)
        return proposal

    def cancel(self, proposal: Proposal) -> None:
        self.promises.withdraw(proposal.job_id, self.clock.now)

    def answer(self, proposal: Proposal) -> None:
        self.charge(proposal.task, proposal.digest, proposal.num_queries)

    def told(self, requester: str, *, queries: int = 4, sigma_votes: float = 40.0) -> str:
        """Return "covered", "not covered" or "refused", at no price."""
        found = self.ask(requester, queries=queries, sigma_votes=sigma_votes)
        if isinstance(found, Proposal):
            self.cancel(found)
            return "covered"
        return "not covered" if "are left. Last spenders" in found or "would take more" in found else "refused"


@pytest.fixture
def searched(tmp_path: Path) -> Iterator[Searched]:
    made = Searched(tmp_path / "journal.db")
    made.allow()
    yield made
    made.database.close()


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little is told in all, so that a test that uses it up is short."""
    monkeypatch.setattr(told, "MOST", 20)


def test_five_requesters_that_cancel_all_day_close_the_site_to_nobody(searched: Searched, few: None) -> None:
    for number in range(2 * told.MOST):
        assert searched.told(f"mallory-{number % 5}") == "covered"
    honest = searched.ask("ada")
    assert isinstance(honest, Proposal)
    searched.answer(honest)
    assert searched.spent() == price(honest.task).instance.charge_nano


def test_names_that_use_up_what_they_are_told_keep_only_themselves_from_more(searched: Searched) -> None:
    for name in range(5):
        said = [searched.told(f"mallory-{name}", queries=10 * (name * 12 + number + 1)) for number in range(12)]
        assert said == ["covered"] * told.MOST_OF_ONE + ["refused"] * 2
    assert searched.told("mallory-0", queries=1000) == "refused"
    assert searched.told("ada", queries=1000) == "covered", "another requester is told"
    assert searched.told("mallory-0", queries=1000) == "covered", "what was told to one is no news"
    searched.clock.now += timedelta(days=1, seconds=1)
    assert searched.told("mallory-0", queries=2000) == "covered"


def test_one_name_that_holds_many_jobs_open_and_cancels_them_all_closes_the_site_to_nobody(
    searched: Searched, few: None
) -> None:
    held = [searched.ask("mallory", queries=1) for _ in range(told.MOST + 20)]
    for one in held:
        assert isinstance(one, Proposal)
        searched.cancel(one)
    assert searched.told("mallory", queries=1000) == "refused"
    assert [searched.told("ada", queries=queries) for queries in (100, 121, 500)] == ["covered"] * 3


def test_whatever_names_a_coordinator_says_the_site_tells_no_more_in_all(searched: Searched, few: None) -> None:
    said = [searched.told(f"made up {number}", queries=number + 1) for number in range(told.MOST + 5)]
    assert said == ["covered"] * told.MOST + ["refused"] * 5
    assert searched.told("ada", queries=told.MOST) == "covered", "it was covered for another name"


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
        site.database.close()
    assert answers[0] == answers[1]


def test_a_share_that_is_used_up_is_told_as_seldom_and_of_made_up_names_too(searched: Searched, few: None) -> None:
    charge = price(task()).instance.charge_nano
    cap = searched.policy.budget.cap("instance")
    assert cap is not None
    searched.allow(per_requester=50 * charge / cap)
    said = Counter(searched.told(f"made up {number}", queries=4 * (500 - number)) for number in range(50))
    assert said == {"not covered": told.MOST, "refused": 50 - told.MOST}
    assert searched.told("ada", queries=3000) == "not covered", "as follows from what was told"


def test_a_round_that_was_never_proposed_is_no_way_round(searched: Searched) -> None:
    """Asks that are not covered tell as much as proposals: also of them a day has a hundred."""
    searched.allow(instance_epsilon=1.0)
    policy, database, said = searched.durable.open_accounts(), searched.database, Counter[str]()
    for number in range(told.MOST_OF_ONE + 5):
        asked: Task = task(sigma_votes=0.5 + number / 100, max_queries=4, nonce="ask")
        with database.write() as connection:
            try:
                with database.attempt(connection):
                    searched.charge_in(connection, policy, asked, f"{number:064x}")
            except BudgetExceeded:
                searched.durable.decline_ask(connection, policy, f"{number:064x}", asked, 4, round_charges(asked, 4))
                said["not covered"] += 1
            except PolicyRefusal:
                said["refused"] += 1
    assert said == {"not covered": told.MOST_OF_ONE, "refused": 5}


def test_what_was_told_is_known_after_a_restart_and_a_cap_that_was_changed_is_another_secret(tmp_path: Path) -> None:
    first = Searched(tmp_path / "journal.db")
    first.allow()
    for number in range(told.MOST_OF_ONE):
        assert first.told("ada", queries=number + 1) == "covered"
    first.database.close()
    again = Searched(tmp_path / "journal.db")
    again.jobs = 100
    again.allow()
    assert again.told("ada", queries=100) == "refused"
    again.allow(instance_epsilon=999.0)
    assert again.told("ada", queries=100) == "covered"
    again.database.close()


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
        site.clock.now += timedelta(seconds=3600 / jobs)
    return said


def test_an_hour_of_twenty_requesters_who_cancel_seven_in_a_hundred_refuses_nobody(searched: Searched) -> None:
    assert soak(searched, 800, sizes=(1, 8, 64, 500)) == {"covered": 800}
    assert searched.promises.open_queries() > 0


def test_a_large_job_that_waited_and_was_cancelled_leaves_room_for_small_ones(searched: Searched) -> None:
    """While it was promised every other yes was about more than is taken afterwards."""
    large = searched.ask("grace", queries=100_000, sigma_votes=2000.0)
    assert isinstance(large, Proposal)
    assert soak(searched, 300, sizes=(8,)) == {"covered": 300}
    searched.cancel(large)
    assert soak(searched, 300, sizes=(8,), seed=25) == {"covered": 300}
