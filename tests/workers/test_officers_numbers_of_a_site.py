"""Every number that a site's officer reads, after any history, against a second computation from its ledger's rows.

A history is a sequence of jobs of every kind (with and without a bound for a person, of any size), of which some are
refused, some wait, some are withdrawn and some answered; then maybe a restore. (Records that are deleted touch no row.)
"""

from __future__ import annotations

import math
import sqlite3
from collections import Counter, defaultdict
from contextlib import closing
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from feature_store.results.evidence import render_page
from labeler.accounting.events import NANO
from labeler.budget import UNBOUNDED_NANO, say_epsilon, say_epsilon_left
from labeler.errors import BudgetExceeded, LabelerError
from labeler.ledger.agent_memory import AgentMemory
from labeler.ledger.evidence import EvidenceScope
from labeler.messages.bodies import RefusalBody
from labeler.task import Task
from tests.labeler.test_officers_numbers import of_a_person, voting
from tests.workers.test_agent import policy_with
from tests.workers.test_requester_shares import Site
from workers.agent.decisions import Admission
from workers.agent.driver import _told
from workers.agent.site import SiteConsole, answered_rounds
from workers.homes.evidence import make_evidence
from workers.homes.journals import accept_restored_journal
from workers.party.home import AgentConfig, create_agent_home

DELTA, CAP = 1e-5, 2.0

JOBS = st.tuples(
    st.builds(
        voting,
        st.sampled_from(["knn", "reverse-knn", "ensemble"]),
        st.sampled_from([1, 1, 2, 3, None]),
        st.sampled_from([9.0, 30.0, 200.0]),
        st.sampled_from([1, 5, 40]),
    ),
    st.sampled_from(["answered", "answered", "waiting", "withdrawn"]),
    st.sampled_from(["ada", "grace", ""]),
)


def delta_of(epsilon: float, mu: float) -> float:
    """Return delta of a Gaussian mechanism (Dong, Roth, Su 2022, corollary 2.13)."""
    return float(norm.cdf(-epsilon / mu + mu / 2) - math.exp(epsilon) * norm.cdf(-epsilon / mu - mu / 2))


def is_epsilon_of(epsilon: float | None, nano: int, *, tolerance: float = 1e-4) -> bool:
    """Return whether an epsilon bounds what mu^2 of `nano` told at DELTA, and is no larger than it must be."""
    if nano >= UNBOUNDED_NANO:
        return epsilon is None
    if epsilon is None or nano == 0:
        return epsilon == 0
    mu = math.sqrt(nano / NANO)
    return delta_of(epsilon, mu) <= DELTA < delta_of(max(0.0, epsilon * (1 - tolerance) - 1e-9), mu)


class History(Site):
    """A site's home, what was done there, and what it must show."""

    def __init__(self, home: Path) -> None:
        policy = policy_with(max_queries_per_day=90, instance_epsilon=CAP)
        config = AgentConfig(agent_id="a", coordinator_url="http://127.0.0.1:1", shard="none")
        create_agent_home(home, config, policy)
        super().__init__(home / "journal.db")
        self.home, self.policy = home, policy
        self.refused: list[str] = []
        self.answered: list[Task] = []
        self.admission = Admission(
            home,
            AgentMemory(self.database, self.journal),
            read_policy=lambda: policy,
            coordinator_key="0" * 64,
            clock=self.clock,
        )

    def run(self, task: Task, end: str, requester: str) -> None:
        asked = task.model_copy(update={"nonce": str(self.jobs), "name": f"task {self.jobs}"})
        proposal = self.next_proposal(requester, asked, queries=asked.max_queries)
        opened = self.durable.open_accounts()
        with self.database.write() as connection:  # as workers.agent.driver does
            try:
                with self.database.attempt(connection):
                    self.durable.promise_in(connection, opened, proposal)
            except LabelerError as error:
                if isinstance(error, BudgetExceeded):
                    self.durable.decline(connection, opened, proposal, error)
                sent = RefusalBody.of(_told(error))
                self.admission.note(proposal, sent, connection=connection)
                self.refused.append(sent.sentence)
                return
        if end == "answered":
            self.charge(asked, f"{self.jobs:064x}", asked.max_queries)
            self.answered.append(asked)
        elif end == "withdrawn":
            self.promises.withdraw(proposal.job_id, self.clock.now)


def sums(journal: Path) -> dict[str, Counter[str]]:
    """Return nano-units by level and state, read from the rows of the ledger by their words alone."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    with closing(sqlite3.connect(journal)) as database:
        rows = database.execute("SELECT kind, level, amount FROM ledger_entries").fetchall()
    for kind, level, amount in rows:
        found[level][kind] += amount
    return found


@settings(deadline=None, max_examples=10)
@given(st.lists(JOBS, max_size=8), st.booleans())
def test_every_number_of_the_page_follows_from_the_rows_of_the_ledger(
    jobs: list[tuple[Task, str, str]], is_restored: bool
) -> None:
    with TemporaryDirectory() as folder:
        history = History(Path(folder) / "home")
        for job in jobs:
            history.run(*job)
        history.durable.open_accounts()
        history.database.close()
        home = history.home
        if is_restored:
            accept_restored_journal(home, reason="the disk was lost")
        shown: dict[str, Any] = SiteConsole(home).overview()
        assert shown["problems"] == []
        ledger = sums(home / "journal.db")
        for one in shown["budget"]:
            of_level = ledger[one["level"]]
            posted = of_level["post"]
            waits = of_level["reserve"] - posted - of_level["void"]
            assert (one["posted_nano"], one["spent_nano"]) == (posted, posted + waits)
            if is_restored and one["cap_nano"] is None:  # nobody knows what was charged and forgotten
                assert (one["posted_epsilon"], one["words"]) == (None, "no bound on what was answered")
                continue
            assert is_epsilon_of(one["posted_epsilon"], posted)
            assert is_epsilon_of(one["spent_epsilon"], posted + waits)
            if one["cap_nano"] is None:
                assert one["left_epsilon"] is None
                continue
            left = one["cap_nano"] - posted - waits
            assert one["left_nano"] == left >= 0
            assert delta_of(CAP, math.sqrt(one["cap_nano"] / NANO)) <= DELTA
            # A job of the printed number fits, and one a thousandth larger does not.
            if one["left_epsilon"]:
                assert delta_of(one["left_epsilon"] * 1.001 + 1e-6, math.sqrt(left / NANO)) < DELTA
                assert delta_of(one["left_epsilon"] * 0.999, math.sqrt(left / NANO)) > DELTA * 0.9
            end = f"one more job of up to {say_epsilon_left(one['left_epsilon'])}"
            assert one["words"].endswith(end if one["left_epsilon"] else "nothing is left")
            assert one["words"].startswith(f"at most {say_epsilon(one['posted_epsilon'])} so far")
            assert ("if all that waits is answered" in one["words"]) == bool(waits)
        person = shown["person"]
        if is_restored or any(task.records_per_person is None for task in history.answered):
            assert (person["person_nano"], person["person_epsilon"]) == (None, None)
            assert person["reason"]
        else:
            table = sum((of_a_person(task, task.max_queries) for task in history.answered), Fraction(0)) * NANO
            assert table <= person["person_nano"] <= table * Fraction(1001, 1000) + len(history.answered)
            assert is_epsilon_of(person["person_epsilon"], person["person_nano"])
        assert sorted(one["sentence"] for one in shown["refused"]) == sorted(history.refused)
        rounds = answered_rounds(home)
        assert [one["task_id"] for one in rounds] == [task.digest for task in history.answered]
        assert all(is_epsilon_of(one["instance_epsilon"], one["instance_nano"]) for one in rounds)
        document = make_evidence(home, EvidenceScope()).evidence
        assert document.person is not None
        said = None if document.person.epsilon is None else float(document.person.epsilon)
        assert (said is None) == (person["person_epsilon"] is None)
        assert said is None or math.isclose(said, person["person_epsilon"], rel_tol=1e-4, abs_tol=1e-9)
        refusals = [one.sentence for task in document.facts.tasks for job in task.jobs for one in job.refusals]
        assert sorted(refusals) == sorted(history.refused)
        page = render_page(document)
        assert all(one["words"] in page for one in shown["budget"])
