"""Sampled training through `labeler run` on real digits: its model, its price and one charge, the same again."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from feature_store.results.models import read_model
from feature_store.shard import Shard
from labeler.accounting.sampled import IntegerSampled
from labeler.budget import epsilon_spent
from labeler.methods.sensitivity import integer_event
from labeler.planning import price
from labeler.task import Task, parse_task
from tests.run_journals import charges_of
from workers.run import parties as parties_of_a_run

STEPS = 12
TASK = f"""
[task]
name = "steps"
method = "federated"
sigma_votes = 1.0
delta = 1e-5

[task.training]
min_records = 150
regularisation = 1e-4
iterations = {STEPS}
radius = 60.0

[task.training.sampled]
rate = 0.25
learning_rate = 4.0
momentum = 0.5
"""


def task_file(folder: Path, text: str = TASK) -> Path:
    path = folder / "steps.toml"
    path.write_text(text)
    return path


def test_a_model_trained_in_steps_labels_images_and_all_of_it_is_charged_with_the_first_step(
    labeler, federation, tmp_path
) -> None:
    out = tmp_path / "job"
    summary = federation.run(labeler, task_file(tmp_path), out, "--seed", 1, *federation.scored)
    assert summary["labels"]["accuracy"] > 0.85
    assert summary["student"]["accuracy"] > 0.8
    task = parse_task(json.loads((out / ".job" / "plan.json").read_text())["plan"]["task"])
    assert task.max_queries == STEPS * 65
    event = integer_event(task, "instance", task.max_queries)
    assert isinstance(event, IntegerSampled)
    assert event.rounds == STEPS
    charged = [amount for _, amount in charges_of(out)]
    # The certified pair of all steps, and the least there is for each further one.
    assert charged == [event.charge_nano] + [1] * (STEPS - 1)
    assert epsilon_spent(sum(charged), task.delta) == pytest.approx(summary["privacy"]["instance"]["epsilon"], rel=1e-4)
    assert summary["privacy"]["instance"]["epsilon"] < 0.6 * unsampled(task)
    table = pq.read_table(out / "pseudo_labels.parquet")
    assert len(table) == 120
    assert table["noisy_votes"].null_count == 120
    # The file that leaves labels as the job did.
    model = read_model(out / "model.safetensors")
    public = Shard.open(federation.root / "public.shard")
    given = dict(zip(table["source"].to_pylist(), table["label"].to_pylist(), strict=True))
    probabilities = model.predict_proba(public.features[public.rows])
    assert sorted(probabilities.argmax(axis=1).tolist()) == sorted(given.values())
    assert "takes part in it with a chance of 0.25" in model.card["one_record"]


def unsampled(task: Task) -> float:
    fields = task.model_dump(exclude={"grid_scale"})
    fields["training"]["sampled"]["rate"] = 1.0
    return price(parse_task(fields)).instance.epsilon


@pytest.mark.long
def test_a_run_killed_between_steps_goes_on_with_the_same_samples_and_no_second_charge(
    labeler, federation, tmp_path, monkeypatch
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    task = task_file(tmp_path)
    federation.run(labeler, task, whole, "--seed", 7)
    killed = {"n": 0}
    step = parties_of_a_run._step

    def dies_in_the_middle(*arguments: object) -> object:
        killed["n"] += 1
        if killed["n"] == 2 * 5 + 2:  # the second agent's answer in the sixth step
            raise KeyboardInterrupt
        return step(*arguments)

    monkeypatch.setattr(parties_of_a_run, "_step", dies_in_the_middle)
    result = labeler("run", task, *federation.run_arguments, "--out", broken, "--json", "--seed", 7)
    assert result.code != 0
    monkeypatch.undo()
    assert (before := charges_of(broken))
    federation.run(labeler, task, broken, "--seed", 7)
    after = charges_of(broken)
    assert after[: len(before)] == before
    assert sum(amount > 1 for _, amount in after) == 1
    assert (broken / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


@pytest.mark.long
def test_agents_as_the_unit_are_sampled_whole(labeler, federation, tmp_path) -> None:
    text = TASK.replace("sigma_votes = 1.0", "sigma_votes = 2.0").replace(
        "[task.training.sampled]", '[task.training.sampled]\nunit = "agent"\nlocal_steps = 5'
    ).replace("rate = 0.25", "rate = 0.5")  # fmt: skip
    summary = federation.run(labeler, task_file(tmp_path, text), tmp_path / "job", "--seed", 1)
    privacy = summary["privacy"]
    # Two agents and this much noise label next to nothing: what is shown is what it costs, and that it ends.
    assert 0 < privacy["agent"]["epsilon"] < privacy["instance"]["epsilon"]
    assert "secret samples" in privacy["agent"]["method"]


def test_an_audit_attacks_steps_that_sample_records_and_refuses_those_that_sample_agents(labeler, tmp_path) -> None:
    out = tmp_path / "audit"
    attack = ("--adversary", "poisoned-chosen", "--runs", 2, "--noise-seed", 1, "--out", out)
    few = TASK.replace(f"iterations = {STEPS}", "iterations = 2")
    result = labeler("audit", task_file(tmp_path, few), *attack, "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out)["facts"]["task"]["max_queries"] == 2 * 65
    by_agent = few.replace("rate = 0.25", 'rate = 0.25\nunit = "agent"')
    result = labeler("audit", task_file(tmp_path, by_agent), *attack)
    assert result.code == 2
    assert "no adversary was made for other levels, units or views" in " ".join(result.err.split())


def test_a_plan_prices_steps_and_says_of_whom_a_coin_is_tossed(labeler) -> None:
    arguments = ("plan", "--method", "federated", "--queries", 5, "--steps", 20, "--rate", 0.2, "--sigma", 4, "--json")
    by_record, by_agent = (
        json.loads(labeler(*arguments, "--unit", unit).out) for unit in ("record", "agent")
    )  # fmt: skip
    assert by_record["queries"] == 100
    assert by_record["instance"]["epsilon"] < by_agent["instance"]["epsilon"]
    assert by_agent["agent"]["epsilon"] < by_agent["instance"]["epsilon"]
    assert (by_record["unit"], by_agent["unit"]) == (
        "times what one record can change",
        "times what one agent can change",
    )
    assert "An agent moves a step by at most one clip" in " ".join(
        labeler(*arguments[:-1], "--unit", "agent").out.split()
    )
    alone = labeler("plan", "--method", "federated", "--queries", 5, "--steps", 20, "--sigma", 4)
    assert alone.code == 2
    assert "--steps and --rate go together" in alone.err


def test_a_site_of_a_run_predicts_with_its_own_model_beside_the_released_one(labeler, federation, tmp_path) -> None:
    text = TASK + "\n[task.training.personal]\nalpha = {}\n"
    found = {}
    for alpha in (1.0, 0.5):
        out = tmp_path / f"job-{alpha}"
        federation.run(labeler, task_file(tmp_path, text.format(alpha)), out, "--seed", 1)
        model, images = out / "model.safetensors", federation.root / "test"
        site = ("--shard", federation.agents[0], "--model", model, "--backbone", "pixels:8")
        result = labeler("agent", "predict", images, *site, "--out", tmp_path / f"{alpha}.parquet", "--json")
        assert result.code == 0, result.err
        found[alpha] = result.document["accuracy"]
        if alpha == 1.0:
            shared = labeler("predict", model, images, "--json").document["accuracy"]
            assert found[alpha] == pytest.approx(shared)
    assert found[0.5] >= found[1.0] - 0.02
