"""What goes wrong around a running federation is refused or outlived in words: nothing lost, nothing paid twice."""

from __future__ import annotations

import json
import shutil
import signal
import tomllib
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from api.client import Client
from api.schema import PartyRequest
from feature_store.shard import MARK_NAME
from tests.e2e.service.conftest import Service
from tests.e2e.service.harm import (
    AGENTS,
    EVERYBODY,
    journal_rows,
    new_task,
    paid_at_instance_level,
    paused,
    policy,
    posted,
    redis_of,
    spent_at,
    spent_at_sites,
    started,
    submit,
)
from tests.forked_command import run_forked
from tests.processes import wait_until
from workers.homes.journals import backup_home

pytestmark = pytest.mark.slow


@pytest.fixture
def client(service: Service) -> Any:
    with service.client() as client:
        yield client


# Redis


def test_redis_emptied_in_the_middle_of_a_round_costs_time_and_nothing_else(
    service: Service, client: Client, digit_features: Any
) -> None:
    task = new_task(client, "redis emptied")
    before, own = posted(client), spent_at_sites(service)
    with redis_of(service) as store, paused(service.pid("tallier-0")):
        job = submit(client, task, digit_features)
        wait_until(lambda: all(spent > own[name] for name, spent in spent_at_sites(service).items()), what="answers")
        store.flushall()
    done = client.wait(job.job_id)
    assert done.state == "completed"
    charge = done.price.instance_charge_nano
    assert paid_at_instance_level(client, before) == dict.fromkeys(EVERYBODY, charge)
    # Asked twice, every site has answered twice the same, and paid once.
    assert {name: spent - own[name] for name, spent in spent_at_sites(service).items()} == dict.fromkeys(AGENTS, charge)


def test_redis_that_may_evict_is_refused_at_the_start_and_named_while_running(
    service: Service, client: Client, tmp_path: Path
) -> None:
    backup_home(service.home / "coordinator", tmp_path / "copy")
    with redis_of(service) as store:
        store.config_set("maxmemory-policy", "allkeys-lru")
        try:
            code, said = run_forked("serve", "--home", tmp_path / "copy", "--port", 0)
            ready = client.readiness()
        finally:
            store.config_set("maxmemory-policy", "noeviction")
    assert code == 1
    assert "maxmemory-policy 'allkeys-lru'" in said
    assert "set maxmemory-policy to noeviction" in said
    assert not ready.ready
    failing = {one.name: one.detail for one in ready.checks if not one.ok}
    assert "set maxmemory-policy to noeviction" in failing["redis"]
    wait_until(lambda: client.readiness().ready, what="redis to be well again")


# Policies of sites


@pytest.mark.parametrize(
    ("pattern", "line", "reason"),
    [
        ("^instance_epsilon = .*", "instance_epsilon = 0.0001", "agent:agent-1"),
        ("^methods = .*", 'methods = ["reverse-knn"]', "allow.methods: the site's policy allows reverse-knn, and knn"),
    ],
    ids=["epsilon", "method"],
)
def test_what_a_site_does_not_allow_ends_the_job_with_its_reason(
    service: Service, client: Client, digit_features: Any, pattern: str, line: str, reason: str
) -> None:
    task = new_task(client, "beyond a site's policy")
    before, own, said = posted(client), spent_at_sites(service), words_of_the_others(service)
    with policy(service.home / "agents" / "agent-1", pattern, line):
        done = client.wait(submit(client, task, digit_features).job_id)
    assert done.state == "refused"
    assert done.problem is not None
    assert done.problem.type.endswith("quorum-not-reached")
    assert "1 of 3 agents will not take part" in done.problem.detail
    assert reason in done.declined["agent-1"]
    assert done.rounds[0].state == "not-asked"
    # Nobody was asked, so nobody is charged: not here, and at no site.
    assert paid_at_instance_level(client, before) == {}
    # One no ends the job. Another site may say its yes behind that, and is told to give back what it has set aside.
    later = [count + 1 for count in said]
    wait_until(lambda: words_of_the_others(service) == later, what="the word of the other sites")
    wait_until(lambda: spent_at_sites(service) == own, what="the other sites to give back what they had set aside")


def words_of_the_others(service: Service) -> list[int]:
    """How many proposals each agent but the first has given its word on."""
    return [journal_rows(service.home / "agents" / name, "proposal_answers") for name in AGENTS[1:]]


def test_a_task_waits_for_the_person_at_one_site_and_is_answered_after_approval(
    service: Service, client: Client, digit_features: Any, labeler: Any
) -> None:
    home = service.home / "agents" / "agent-1"
    task = new_task(client, "awaits a person")
    before, own = posted(client), spent_at(home)
    with policy(home, "^approval = .*", "approval = true"):
        job = submit(client, task, digit_features)
        awaited = lambda: [(one.agent_id, one.reason) for one in client.job(job.job_id).waiting_for]  # noqa: E731
        wait_until(lambda: awaited() == [("agent-1", "approval")], what="the job to wait for a person at one site")
        shown = client.job(job.job_id)
        assert (shown.state, shown.rounds[0].refused) == ("queued", {})
        assert "waiting for approval by a person at agent-1" in shown.stage
        waiting = json.loads(labeler("agent", "waiting", "--home", home, "--json").out)
        assert [(one["task_id"], one["name"]) for one in waiting] == [(task.task_id, "awaits a person")]
        assert spent_at(home) == own
        assert labeler("agent", "approve", task.task_id[:12], "--home", home).code == 0
        done = client.wait(job.job_id)
        assert json.loads(labeler("agent", "waiting", "--home", home, "--json").out) == []
    assert done.state == "completed"
    assert done.rounds[0].answered == AGENTS
    assert paid_at_instance_level(client, before) == dict.fromkeys(EVERYBODY, done.price.instance_charge_nano)


# Agents that come and go


def test_an_agent_enrolled_later_takes_part_and_catches_up_after_it_was_away(
    service: Service, client: Client, digit_features: Any, labeler: Any, tmp_path: Path
) -> None:
    home, first = tmp_path / "agent-4", service.home / "agents" / "agent-1"
    shard = first / tomllib.loads((first / "agent.toml").read_text())["shard"]
    # As if the images were embedded again: a shard that is marked answers for one home.
    shutil.copytree(shard, tmp_path / "own.shard", ignore=shutil.ignore_patterns(MARK_NAME))
    arguments = (
        "--id",
        "agent-4",
        "--coordinator",
        service.url,
        "--shard",
        tmp_path / "own.shard",
        "--engine",
        "numpy",
    )
    made = labeler("agent", "init", "--home", home, *arguments)
    assert made.code == 0, made.err
    shutil.copy2(first / "policy.toml", home / "policy.toml")
    public = json.loads((home / "keys.public.json").read_text())
    fields = {name: public[name] for name in ("party_id", "role", "verify_key", "seal_key")}
    client.enrol(PartyRequest(**fields))
    with ExitStack() as held:
        held.callback(client.revoke_party, "agent-4")
        with started(tmp_path / "agent-4.log", "agent", "run", "--home", home) as process:
            wait_until(lambda: is_live(client, "agent-4"), what="the new agent")
            task = new_task(client, "with a new agent", max_queries=12, colluding_agents=1)
            done = client.wait(submit(client, task, digit_features).job_id)
            assert done.state == "completed"
            assert done.rounds[0].answered == (*AGENTS, "agent-4")
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=300) == 0
        job = submit(client, task, digit_features[6:])
        stage = "waiting for 1 of 4 agents to say whether they will: agent-4"
        wait_until(lambda: stage in client.job(job.job_id).stage, what="the others")
        with started(tmp_path / "agent-4.log", "agent", "run", "--home", home):
            again = client.wait(job.job_id)
    assert again.state == "completed"
    assert again.rounds[0].answered == (*AGENTS, "agent-4")
    assert spent_at(home) == done.price.instance_charge_nano + again.price.instance_charge_nano


def is_live(client: Client, party_id: str) -> bool:
    return any(one.party_id == party_id and one.is_live for one in client.parties().parties)
