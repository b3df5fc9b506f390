"""No requester uses up what a site gives to all: its jobs take at most its share, by the agent's own journal."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from labeler.accounting.lifetime import job_nano
from labeler.batching import round_charges
from labeler.errors import PolicyRefusal
from labeler.ledger.promises import PromiseStore
from labeler.messages.bodies import Proposal, TallierKey
from labeler.planning import price
from labeler.task import Task
from tests.labeler.tasks import make_task
from tests.workers.test_agent import DurableParts, policy_with
from workers.agent.ledger import DurableLedger
from workers.agent.policy import policy_toml, read_policy
from workers.agent.site import policy_in_words, shares_taken
from workers.party.home import AgentConfig, create_agent_home

KEYS = tuple(TallierKey(f"tallier-{number}", f"{number + 1:064x}", f"{number + 7:064x}") for number in range(3))
LIFE = {"budget_nano": 4_000_000, "least_similarity": -1.0}


def task(nonce: str = "", **changes: Any) -> Task:
    fields = {"classes": ("cat", "dog"), "k": 1, "sigma_votes": 40.0, "delta": 1e-5, "max_queries": 4}
    return make_task(**(fields | {"backbone_fingerprint": "backbone", "nonce": nonce} | changes))


class Site:
    """An agent's ledger, and jobs that are proposed to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.parts = DurableParts(path)
        self.promises = PromiseStore(self.parts.database, self.parts.journal)
        self.jobs = 0

    @property
    def ledger(self) -> DurableLedger:
        return self.parts.ledger.ledger

    def allow(self, **budget: Any) -> None:
        self.parts.policy = policy_with(max_queries_per_day=10_000, **budget)

    def propose(self, requester: str, asked: Task | None = None, *, sizes: tuple[int, ...] = (4,)) -> str:
        self.jobs += 1
        until = (self.parts.clock.now + timedelta(hours=1)).timestamp()
        job_id = f"job-{self.jobs}"
        proposal = Proposal(job_id, asked or task(job_id), sizes, KEYS, until, requester)
        policy = self.ledger.open_accounts()
        with self.parts.database.write() as connection:
            self.ledger.promise_in(connection, policy, proposal)
        return job_id

    def charge(self, asked: Task, digest: str) -> None:
        policy = self.ledger.open_accounts()
        with self.parts.database.write() as connection:
            self.ledger.charge_in(
                connection,
                policy,
                round_digest=digest,
                shard_version="1",
                charges=round_charges(asked, 4),
                task=asked,
                num_queries=4,
                recipients=(("tallier-0", "a" * 64),),
            )

    def spent(self) -> int:
        return self.parts.journal.balance("agent:a", "instance").spent


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path / "journal.db")
    yield made
    made.parts.database.close()


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
    site.promises.withdraw(job_id, site.parts.clock.now)
    paid = task("paid")
    site.propose("ada", paid)
    site.charge(paid, "f" * 64)
    site.parts.clock.now += timedelta(days=400)
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
    site.parts.database.close()
    again = Site(site.path)
    again.jobs = site.jobs
    again.allow(per_requester=share_of(2.5, charge, again))
    with pytest.raises(PolicyRefusal, match="per_requester"):
        again.propose("ada")
    again.propose("grace")
    again.parts.database.close()


def test_a_requester_takes_a_share_of_what_images_have_for_life(site: Site) -> None:
    lasting = task(method="reverse-knn", lifetime_budget=LIFE | {"budget_nano": 10**8})
    most = job_nano(lasting)
    site.allow(instance_epsilon=30.0, life_epsilon=8.0)
    total = site.parts.policy.budget.life_nano
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
    inside.parts.policy = policy
    inside.propose("")
    for _ in range(2):
        inside.propose("ada")
    inside.parts.database.close()
    assert [(name, round(part, 6)) for name, part in shares_taken(home)] == [("ada", 0.5), ("", 0.25)]
    (home / "policy.toml").write_text(policy_toml(policy_with()))
    assert shares_taken(home) == []
