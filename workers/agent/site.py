"""What the people of a site see of their agent: its own ledger, and the tasks that wait for them.

Both are read from the agent's journal without disturbing an agent that runs.
"""

from __future__ import annotations

import math
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from feature_store.journal.agent_memory import AgentMemory
from feature_store.journal.database import Database, open_database
from feature_store.journal.ledger import Ledger
from feature_store.journal.unpriced import accounts_charged_without
from labeler.accounting.gaussian import epsilon_of_delta
from labeler.budget import NANO, UNBOUNDED_NANO
from labeler.errors import NotReady
from labeler.planning import price
from workers.agent.policy import read_policy
from workers.party.home import ANCHOR_FILE, JOURNAL_FILE, POLICY_FILE, is_approved, read_agent_config

_MARGIN = 1e-7


def site_budget(home: Path) -> list[dict[str, Any]]:
    """Every account of an agent's own ledger, in nano-units of mu^2 and as epsilon at the policy's delta.

    A spent epsilon is None where something was answered that has no finite price at that level.

    Raises:
        JournalBroken, JournalBehind: the ledger cannot be trusted.
        PolicyRefusal: the policy, which says at which delta, cannot be read.
    """
    read_agent_config(home)
    limits = read_policy(home / POLICY_FILE).budget
    caps = {"instance": limits.instance_epsilon, "agent": limits.agent_epsilon}
    delta = limits.delta
    with closing(_look(home)) as database:
        balances = Ledger(database, clock=_now).balances()
        with database.read() as connection:
            unpriced = accounts_charged_without("agent", connection)
    return [
        {
            "account": one.account,
            "level": one.level,
            "delta": delta,
            "cap_nano": one.cap,
            "spent_nano": one.spent,
            "left_nano": one.left,
            "cap_epsilon": None if caps[one.level] == "unlimited" else caps[one.level],
            "spent_epsilon": None
            if (one.level == "agent" and one.account in unpriced) or one.spent >= UNBOUNDED_NANO
            else epsilon_of(one.spent, delta),
        }
        for one in balances
    ]


def waiting_tasks(home: Path) -> list[dict[str, Any]]:
    """Tasks that wait for a person's approval, oldest first, and what each would cost (None: no finite price).

    The price is for noise of `sigma_votes`, which needs `noise_contributors` agents that are real and honest.

    Raises:
        NotReady: the agent has not run yet, so it has been asked nothing.
    """
    read_agent_config(home)
    with closing(_look(home)) as database:
        waiting = AgentMemory(database, Ledger(database, clock=_now)).waiting()
    found = []
    for digest, task, asked_at in waiting:
        if is_approved(home, digest):
            continue
        cost = price(task)
        found.append(
            {
                "task_id": digest,
                "name": task.name,
                "method": task.method,
                "queries": task.max_queries,
                "agents": task.agents,
                "colluding_agents": task.colluding_agents,
                "holds_against": cost.holds_against,
                "noise_contributors": task.noise_contributors,
                "sigma_votes": task.sigma_votes,
                "instance_epsilon": cost.instance.to_json()["epsilon"],
                "person_epsilon": None if cost.person is None else cost.person.to_json()["epsilon"],
                "records_per_person": task.records_per_person,
                "agent_epsilon": cost.agent.to_json()["epsilon"],
                "delta": task.delta,
                "asked_at": asked_at.isoformat(timespec="seconds"),
            }
        )
    return found


def epsilon_of(nano: int, delta: float) -> float:
    """What a sum of charges amounts to, at a delta; the margin is that of `labeler.budget.budget_for`."""
    if nano == 0:
        return 0.0
    mu = math.nextafter(math.sqrt(nano / NANO), math.inf)
    return epsilon_of_delta(delta * (1 - _MARGIN), mu) / (1 - _MARGIN)


def _look(home: Path) -> Database:
    if not (home / JOURNAL_FILE).exists():
        raise NotReady(f"the agent of {home} has no journal yet; start it once")
    return open_database(home / JOURNAL_FILE, anchor=home / ANCHOR_FILE, read_only=True)


def _now() -> datetime:
    return datetime.now(UTC)
