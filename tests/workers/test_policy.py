"""The site's policy: every field is documented and required, and whatever it does not allow is refused by name."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from feature_store.rows import quantize
from labeler.accounting.lifetime import vote_nano
from labeler.budget import budget_for
from labeler.errors import AwaitingApproval, PolicyRefusal
from labeler.messages.bodies import Ask, TallierKey
from labeler.planning import price
from labeler.solving import solve_sigma
from labeler.system.keys import PartyKeys
from labeler.tally import QueryBatch
from tests.labeler.tasks import make_task
from tests.workers.builders import policy_of
from workers.agent.policy import (
    AllowTable,
    BudgetTable,
    CoordinatorTable,
    Policy,
    policy_toml,
    read_policy,
)

DOCUMENT = (Path(__file__).parents[2] / "docs" / "policy.md").read_text()
TABLES = {"budget": BudgetTable, "allow": AllowTable, "coordinator": CoordinatorTable}
COORDINATOR = PartyKeys.generate().public
TALLIERS = {f"tallier-{number}": PartyKeys.generate().public for number in range(3)}
FINGERPRINT = "f" * 64


def policy(*, budget: dict[str, Any] | None = None, **changes: Any) -> Policy:
    usual = {
        "talliers": {name: keys.seal_key for name, keys in TALLIERS.items()}, "verify_key": COORDINATOR.verify_key,
        "backbones": [FINGERPRINT], "methods": ["knn"], "max_queries_per_day": 10,
    }  # fmt: skip
    return policy_of(budget={"instance_epsilon": 2.0} | (budget or {}), **(usual | changes))


def ask(*, queries: int = 4, talliers: dict[str, str] | None = None, talliers_of: int = 3, **changes: Any) -> Ask:
    seal_keys = {name: keys.seal_key for name, keys in TALLIERS.items()} | (talliers or {})
    fields = {"classes": ["a", "b"], "sigma_votes": 4.0, "delta": 1e-5, "backbone_fingerprint": FINGERPRINT}
    task = make_task(**(fields | {"talliers": talliers_of} | changes))
    features = quantize(np.random.default_rng(1).normal(size=(queries, 8)))
    keys = tuple(
        TallierKey(name, key, TALLIERS[name].verify_key if name in TALLIERS else PartyKeys.generate().public.verify_key)
        for name, key in list(seal_keys.items())[-talliers_of:]
    )
    return Ask(task, QueryBatch(features), keys, expires_at=2e9)


def check(policy: Policy, asked: Ask, *, is_approved: bool = False) -> None:
    policy.check(asked, coordinator_key=COORDINATOR.verify_key, is_approved=is_approved)


@pytest.mark.parametrize("name", TABLES)
def test_every_field_is_documented_and_every_documented_field_exists(name: str) -> None:
    rows = next(part for part in re.split(r"^## ", DOCUMENT, flags=re.M) if part.startswith(f"`[{name}]`"))
    assert set(re.findall(r"^\| `(\w+)`", rows, flags=re.M)) == set(TABLES[name].model_fields)
    # Without a bound for a person, or votes for life, a policy says what it said before there could be any.
    optional = {field for field, info in TABLES[name].model_fields.items() if not info.is_required()}
    assert optional <= {"person_epsilon", "life_epsilon", "max_noise_talliers", "life_job_share", "per_requester"}


def test_every_table_is_documented() -> None:
    assert set(re.findall(r"^## `\[(\w+)\]`", DOCUMENT, flags=re.M)) == set(Policy.model_fields)


def test_the_documented_example_a_bound_for_a_person_and_unusual_names_survive_being_written(tmp_path: Path) -> None:
    example = re.search(r"```toml\n(.*?)```", DOCUMENT, flags=re.S)
    assert example is not None
    odd = policy(talliers={'he said "no" \\ \n [x] ü': "a" * 64})
    for one in (Policy.model_validate(tomllib.loads(example[1])), policy(person_epsilon=0.7), odd):
        (tmp_path / "policy.toml").write_text(policy_toml(one))
        assert read_policy(tmp_path / "policy.toml") == one


def test_what_a_task_costs_a_person_is_bounded_at_the_sites_own_delta() -> None:
    asked = ask(records_per_person=2, sigma_votes=200.0, k=5)
    at_site = price(asked.task.model_copy(update={"delta": 1e-5})).person
    assert at_site is not None
    check(policy(person_epsilon=at_site.epsilon), asked)
    with pytest.raises(PolicyRefusal, match=r"allow.person_epsilon: .* per person \(delta 1e-05\), and epsilon"):
        check(policy(person_epsilon=at_site.epsilon * 0.999), asked)
    # A task that states itself at a generous delta is judged at the site's.
    generous = ask(records_per_person=2, sigma_votes=200.0, k=5, delta=0.1)
    stated = price(generous.task).person
    assert stated is not None
    assert stated.epsilon < at_site.epsilon * 0.9
    with pytest.raises(PolicyRefusal, match=r"allow\.person_epsilon"):
        check(policy(person_epsilon=stated.epsilon), generous)


def test_a_task_with_a_finite_price_at_its_own_delta_alone_is_refused() -> None:
    """Its mu^2 would be charged, and at the site's smaller delta nothing is proved."""
    asked = ask(k=20, sigma_votes=2.0, delta=1e-2)
    check(policy(), asked)  # the site promises nothing for a whole agent
    with pytest.raises(PolicyRefusal, match=r"budget\.delta.*1e-05 \(agent level\).*0\.01"):
        check(policy(budget={"agent_epsilon": 900.0}), asked)
    check(policy(budget={"agent_epsilon": 900.0, "delta": 1e-2}), asked)


def test_with_a_bound_for_a_person_a_task_without_one_is_refused_and_without_a_bound_nobody_looks() -> None:
    with pytest.raises(PolicyRefusal, match="a task without records_per_person, so no bound"):
        check(policy(person_epsilon=1000.0), ask())
    check(policy(), ask(records_per_person=10**6))
    # Noise too small for this many records: nothing can be proved; the price is infinite, not a number.
    with pytest.raises(PolicyRefusal, match="and no bound was asked for"):
        check(policy(person_epsilon=1000.0), ask(records_per_person=10**9, k=10**6, sigma_votes=1.0))


def test_what_the_policy_allows_passes() -> None:
    check(policy(), ask())
    check(policy(approval=True), ask(), is_approved=True)
    check(policy(tasks=[ask().task.digest]), ask())
    check(policy(max_queries_per_day=4), ask())
    check(policy(max_noise_contributors=1), ask(colluding_agents=2))
    check(policy(max_noise_talliers=2), ask(dishonest_talliers=1))
    check(policy(max_noise_talliers=1, max_noise_contributors=1), ask(dishonest_talliers=2))


@pytest.mark.parametrize(
    ("allowed", "asked", "said"),
    [
        ({"backbones": []}, ask, "allow.backbones: the site's policy allows none"),
        ({"backbones": ["0" * 64]}, ask, "allow.backbones: the site's policy allows 0000"),
        ({"tasks": []}, ask, "allow.tasks: the site's policy allows none"),
        ({"tasks": ["1" * 64]}, ask, "allow.tasks"),
        ({"methods": ["knn"]}, lambda: ask(method="reverse-knn"), "allow.methods: the site's policy allows knn"),
        ({}, lambda: ask(release="winner"), "allow.releases: the site's policy allows histogram, and winner was asked"),
        ({"releases": []}, ask, "allow.releases: the site's policy allows none"),
        (
            {"max_queries_per_day": 3},
            ask,
            "allow.max_queries_per_day: the site's policy allows 3, and 4 at once",
        ),
        (
            {"max_noise_contributors": 2},
            ask,
            "allow.max_noise_contributors: the site's policy allows noise divided among 2 agents, and noise divided "
            "among 3 was asked for",
        ),
        (
            {},
            lambda: ask(dishonest_talliers=2),
            "allow.max_noise_talliers: the site's policy allows no task whose noise the talliers add, and noise "
            "divided among 1 talliers was asked for",
        ),
        ({"max_noise_talliers": 1}, lambda: ask(dishonest_talliers=1), "allow.max_noise_talliers"),
        ({}, lambda: ask(agents=2000), "and noise divided among 2000 was asked for"),
        ({}, lambda: ask(agents=2000, colluding_agents=1990, max_dropouts=6), "and noise divided among 4 was asked"),
        ({"talliers": {}}, ask, "talliers: the site's policy allows none, and tallier-0"),
        (
            {},
            lambda: ask(talliers_of=2),
            "talliers: the site's policy allows shares among all of tallier-0, tallier-1, tallier-2, and shares among "
            "tallier-1, tallier-2 only was asked for",
        ),
        ({}, lambda: ask(talliers={"stranger": "9" * 64}), "talliers: the site's policy allows tallier-0, tallier-1"),
        ({}, lambda: ask(talliers={"tallier-1": "9" * 64}), "talliers.tallier-1: the site's policy allows the key"),
        ({"verify_key": "2" * 64}, ask, "coordinator.verify_key"),
    ],
)
def test_what_it_does_not_allow_is_refused_by_the_name_of_the_field(
    allowed: dict[str, Any], asked: Callable[[], Ask], said: str
) -> None:
    with pytest.raises(PolicyRefusal, match=re.escape(said)):
        check(policy(**allowed), asked())


@pytest.mark.parametrize(
    ("allowed", "asked"),
    [
        ({"max_noise_contributors": 2}, {}),
        ({"max_noise_contributors": 3}, {"agents": 2000, "colluding_agents": 1990, "max_dropouts": 6}),
        ({"max_noise_talliers": 1}, {"dishonest_talliers": 1}),
        ({"methods": ["knn"]}, {"method": "reverse-knn"}),
        ({}, {"release": "winner"}),
        ({"max_noise_contributors": 1}, {"agents": 4, "colluding_agents": 1}),
    ],
)
def test_the_field_that_a_refusal_names_passes_with_the_value_that_it_names(
    allowed: dict[str, Any], asked: dict[str, Any]
) -> None:
    with pytest.raises(PolicyRefusal) as refused:
        check(policy(**allowed), ask(**asked))
    named = re.search(r"set (\w+) to ([\w-]+)", str(refused.value))
    assert named is not None, refused.value
    value = int(named[2]) if named[2].isdecimal() else named[2]
    check(policy(**allowed), ask(**asked | {named[1]: value}))
    if named[1] == "colluding_agents":
        with pytest.raises(PolicyRefusal, match="colluding_agents"):
            check(policy(**allowed), ask(**asked | {named[1]: int(value) - 1}))


def test_the_epsilon_that_a_refusal_per_person_names_passes() -> None:
    strict = policy(person_epsilon=0.4)
    fields = {"records_per_person": 3, "sigma_votes": 20.0}
    with pytest.raises(PolicyRefusal, match=r"make a task of epsilon [\d.]+ per image or less") as refused:
        check(strict, ask(**fields))
    named = re.search(r"of epsilon ([\d.]+) per image", str(refused.value))
    assert named is not None
    sigma = solve_sigma(ask(**fields).task, float(named[1]))
    check(strict, ask(**fields | {"sigma_votes": sigma}))
    with pytest.raises(PolicyRefusal):
        check(strict, ask(**fields | {"sigma_votes": sigma * 0.97}))


def test_a_task_waits_for_a_person_only_when_everything_else_is_in_order() -> None:
    with pytest.raises(AwaitingApproval, match=ask().task.digest):
        check(policy(approval=True), ask())
    with pytest.raises(PolicyRefusal):
        check(policy(approval=True, methods=[]), ask())


def test_more_neighbours_than_a_shard_could_have_are_not_refused() -> None:
    """A refusal of k depends on the number of records, and would reveal it."""
    check(policy(), ask(k=1_000_000))


def test_caps_are_the_whole_numbers_of_the_ledger() -> None:
    assert policy().budget.cap("instance") == budget_for(2.0, 1e-5)
    assert policy().budget.cap("agent") is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[budget\n", "not valid TOML"),
        ("", "is missing"),
        (policy_toml(policy()) + "x = 1\n", "unknown field"),
        (policy_toml(policy()).replace("max_queries_per_day = 10\n", ""), "allow.max_queries_per_day: is missing"),
        (
            policy_toml(policy()).replace("max_noise_contributors = 3\n", ""),
            "allow.max_noise_contributors: is missing",
        ),
        (policy_toml(policy()).replace("contributors = 3", "contributors = 0"), "allow.max_noise_contributors"),
        (policy_toml(policy()).replace("approval = false", 'approval = "no"'), "allow.approval"),
        (policy_toml(policy()).replace('agent_epsilon = "unlimited"', "agent_epsilon = inf"), "budget.agent_epsilon"),
        (policy_toml(policy()).replace("instance_epsilon = 2.0", "instance_epsilon = -1"), "budget.instance_epsilon"),
        (policy_toml(policy()).replace("instance_epsilon = 2.0", "instance_epsilon = true"), "budget.instance_epsilon"),
    ],
)
def test_a_file_that_is_no_policy_allows_nothing(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "policy.toml").write_text(text)
    with pytest.raises(PolicyRefusal, match=re.escape(said)):
        read_policy(tmp_path / "policy.toml")


def test_a_file_that_is_missing_or_no_text_allows_nothing(tmp_path: Path) -> None:
    with pytest.raises(PolicyRefusal, match="cannot be read"):
        read_policy(tmp_path / "policy.toml")
    (tmp_path / "policy.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(PolicyRefusal, match="not valid TOML"):
        read_policy(tmp_path / "policy.toml")


def test_two_talliers_with_one_key_are_one_party_and_refused(tmp_path: Path) -> None:
    text = policy_toml(policy()).replace(TALLIERS["tallier-1"].seal_key, TALLIERS["tallier-0"].seal_key)
    (tmp_path / "policy.toml").write_text(text)
    with pytest.raises(PolicyRefusal, match="two talliers have one key"):
        read_policy(tmp_path / "policy.toml")


def life_task(*, k: int, budget_nano: int) -> Ask:
    life = {"budget_nano": budget_nano, "least_similarity": -1.0}
    return ask(method="reverse-knn", k=k, sigma_votes=10.0, max_queries=4, lifetime_budget=life)


def test_no_job_may_take_more_of_an_images_life_than_the_site_says() -> None:
    most = BudgetTable(instance_epsilon=1.0, agent_epsilon="unlimited", delta=1e-5, life_epsilon=1.0)
    assert most.life_nano is not None
    of_one = vote_nano(life_task(k=1, budget_nano=10**9).task)
    quarter = math.floor(most.life_nano / 4)
    fits = min(quarter // of_one, 4)
    assert 1 <= fits < 4, "so that one more vote is too many"
    bounded = policy(methods=("reverse-knn",), life_job_share=0.25).model_copy(update={"budget": most})
    assert Policy.model_validate(tomllib.loads(policy_toml(bounded))) == bounded
    check(bounded, life_task(k=fits, budget_nano=most.life_nano))
    with pytest.raises(
        PolicyRefusal, match=r"allow\.life_job_share: .* share of 0\.25.*raise sigma_votes .*-fold in a new task"
    ):
        check(bounded, life_task(k=fits + 1, budget_nano=most.life_nano))
    # What B the task itself names changes nothing; and a policy that says nothing of it is as it was.
    with pytest.raises(PolicyRefusal, match="life_job_share"):
        check(bounded, life_task(k=fits + 1, budget_nano=(fits + 1) * of_one))
    silent = bounded.model_copy(update={"allow": bounded.allow.model_copy(update={"life_job_share": None})})
    check(silent, life_task(k=4, budget_nano=most.life_nano))
    assert "life_job_share" not in policy_toml(silent)
