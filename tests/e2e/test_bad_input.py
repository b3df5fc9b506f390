"""Bad input: a clear sentence, the right exit code, and nothing half-written."""

from __future__ import annotations

import json
import math
import shutil

import pytest


def refused(result, out, *, code: int, said: str) -> None:
    assert result.code == code, result
    assert said in result.err
    assert "Traceback" not in result.err
    assert not out.exists()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"sigma_votes": 0}, "sigma_votes: must be more than 0"),
        ({"sigma_votes": math.inf}, "sigma_votes: must be a finite number"),
        ({"delta": 0}, "delta: must be more than 0"),
        ({"grid_scale": 5}, "the guarantee needs at least 100"),
        ({"colluding_agents": 2}, "too few agents for the collusion stated"),
        ({"k": 151}, "more than the records of 2 of 2 shards"),
        ({"sigm": 3}, "task.sigm: unknown field"),
        ({"classes": ["no"]}, "classes: must have at least 2 entries"),
        ({"abstain_below": 9}, "whoever has the histogram sees its best noisy count"),
    ],
)
def test_a_bad_task_is_refused(labeler, federation, tmp_path, fields, said) -> None:
    task = federation.task_file(tmp_path, **fields)
    out = tmp_path / "job"
    refused(labeler("run", task, *federation.run_arguments, "--out", out), out, code=2, said=said)


def test_a_private_shard_is_never_asked_about(labeler, federation, tmp_path) -> None:
    out = tmp_path / "job"
    one, other = federation.agents
    arguments = (federation.task_file(tmp_path), "--shard", one, "--queries", other, "--out", out)
    refused(labeler("run", *arguments), out, code=2, said="private images must never be asked about")


def test_a_shard_given_twice_is_refused(labeler, federation, tmp_path) -> None:
    copy = tmp_path / "copy.shard"
    shutil.copytree(federation.agents[0], copy)
    for second in (federation.agents[0], copy):
        out = tmp_path / "job"
        arguments = (federation.task_file(tmp_path), *federation.run_arguments, "--shard", second, "--out", out)
        refused(labeler("run", *arguments), out, code=2, said="hold the same records")


def test_a_job_over_its_budget_is_refused_with_the_price(labeler, federation, tmp_path) -> None:
    out = tmp_path / "job"
    task = federation.task_file(tmp_path, more="[budget]\ninstance_epsilon = 0.5")
    result = labeler("run", task, *federation.run_arguments, "--out", out)
    refused(result, out, code=1, said="at instance level (delta 0.0001) and its budget allows 0.5")


@pytest.mark.parametrize("engine", ["hnsw", "cagra"])
def test_an_index_that_depends_on_other_records_is_refused(labeler, federation, tmp_path, engine) -> None:
    arguments = (federation.task_file(tmp_path), *federation.run_arguments, "--out", tmp_path / "job")
    result = labeler("run", *arguments, "--engine", engine)
    assert result.code == 1
    assert "graph" in result.err


def test_a_plan_has_its_documented_shape(labeler) -> None:
    setting = {"--queries": 206, "--sigma": 25, "--delta": 1e-4, "--agents": 3, "--colluding-agents": 1}
    arguments = ["--method", "knn", "--k", 50, *(part for option in setting.items() for part in option)]
    plan = json.loads(labeler("plan", *arguments, "--json").out)
    assert round(plan["instance"]["epsilon"], 4) == 2.9757
    assert round(plan["as_in_paper"]["instance"]["epsilon"], 4) == 3.8143
    assert plan["agent"]["epsilon"] > 500
    assert plan["delta"] == 1e-4
    assert plan["noise_share_sigma"] == pytest.approx(25 / math.sqrt(2))


def test_a_plan_counts_on_one_participant_and_says_for_whom_it_holds(labeler) -> None:
    setting = ["plan", "--method", "reverse-knn", "--epsilon", 0.5, "--solve", "sigma", "--delta", 1e-5]
    usual = json.loads(labeler(*setting, "--agents", 2, "--json").out)
    assert usual["colluding_agents"] == 1
    assert usual["instance"]["participant_epsilon"] == usual["instance"]["epsilon"] <= 0.5
    said = labeler(*setting, "--agents", 2, "--colluding-agents", 0)
    assert "own noise: then epsilon is 0.730 per private image" in " ".join(said.out.split())
    refused = labeler("plan", "--sigma", 3, "--agents", 2, "--max-dropouts", 1)
    assert refused.code == 2
    assert "say --colluding-agents = 0" in refused.err


def test_a_plan_states_a_person_where_records_of_one_person_are_bounded(labeler) -> None:
    setting = ["plan", "--method", "reverse-knn", "--queries", 20, "--sigma", 8, "--agents", 3]
    plan = json.loads(labeler(*setting, "--records-per-person", 2, "--json").out)
    free = json.loads(labeler(*setting, "--json").out)
    assert "person" not in free
    assert plan["person"]["records_per_person"] == 2
    assert plan["person"]["mu"] == pytest.approx(2 * free["instance"]["mu"])
    assert plan["instance"]["mu"] == pytest.approx(math.sqrt(2) * free["instance"]["mu"])
    assert set(plan["as_in_paper"]) == {"instance", "person", "agent"}
    said = labeler(*setting, "--records-per-person", 2).out
    assert "per person" in said
    assert "of which at most 2 vote" in " ".join(said.split())
    solving = [*setting[:3], "--records-per-person", 2, "--epsilon", 0.5, "--solve", "sigma", "--level", "person"]
    solved = json.loads(labeler(*solving, "--json").out)
    assert 0.49 < solved["person"]["epsilon"] <= 0.5
    refused = labeler(*setting[:3], "--epsilon", 0.5, "--solve", "sigma", "--level", "person")
    assert refused.code == 2
    assert "--records-per-person" in refused.err


@pytest.mark.parametrize(("wanted", "key"), [("sigma", "sigma_votes"), ("queries", "queries")])
def test_a_plan_finds_the_setting_for_a_price(labeler, wanted, key) -> None:
    given = ["--solve", "queries", "--sigma", 20, "--method", "knn"] if wanted == "queries" else []
    plan = json.loads(labeler("plan", "--epsilon", 1, *given, "--json").out)
    assert 0.95 < plan["instance"]["epsilon"] <= 1
    assert plan[key] > 1
