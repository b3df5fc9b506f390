"""The radius that a plan proposes: from public images alone, below what agents' ballots are long."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from typer.testing import CliRunner

from feature_store.rows import quantize
from feature_store.shard_writer import ShardWriter
from feature_store.students.labeling import propose_radius
from labeler.errors import InvalidSetting
from labeler.randomness import seeded_source
from workers.commands.catalog import app
from workers.plan import PlanRequest, make_plan, solve_request, with_radius

CLASSES = tuple("abcd")


def groups(count: int) -> NDArray[np.int16]:
    """Images around four directions that have nothing in common."""
    rng = np.random.default_rng(0)
    return quantize(np.eye(8)[np.arange(count) % 4] + 0.02 * rng.normal(size=(count, 8)))


def test_it_is_half_the_length_of_a_ballot_of_as_many_records() -> None:
    """100 records of four pure groups at four questions: about 25 in each, centered a length of 43."""
    assert propose_radius(groups(200), questions=4, num_classes=4, k=1, records=100) in (21, 22)
    assert propose_radius(groups(200), questions=4, num_classes=4, k=1, records=1) == 1


def test_finer_questions_make_ballots_shorter_and_more_votes_make_them_longer() -> None:
    coarse, fine, twice = (
        propose_radius(groups(400), questions=questions, num_classes=4, k=k, records=400)
        for questions, k in ((4, 1), (16, 1), (16, 2))
    )
    assert fine < coarse
    assert twice > fine


def test_too_few_public_images_are_refused() -> None:
    with pytest.raises(InvalidSetting, match="20 public images"):
        propose_radius(groups(8), questions=20, num_classes=4, k=1, records=10)


def request(**changes: object) -> PlanRequest:
    fields = {
        "method": "reverse-knn", "k": 1, "max_queries": 4, "delta": 1e-5, "agents": 10, "colluding_agents": 1,
        "max_dropouts": 0, "ballot_radius": "auto",
    }  # fmt: skip
    level = changes.pop("level", "agent")
    return PlanRequest(
        fields | changes, classes=4, sigma=None, epsilon=0.5, solve="sigma", level=level, records=1000,  # type: ignore[arg-type]
    )  # fmt: skip


def public(path: Path) -> Path:
    with ShardWriter(
        path, classes=CLASSES, fingerprint="b", dimension=8, public=True, random_bytes=seeded_source(b"ids").bytes
    ) as writer:
        writer.append(groups(200), np.full(200, -1, np.int16), [f"{number}.png" for number in range(200)])
        writer.finish()
    return path


def test_a_plan_proposes_a_radius_and_solves_the_noise_of_a_whole_agent_for_it(tmp_path: Path) -> None:
    shard = public(tmp_path / "public")
    document = make_plan(request(), public=shard)
    assert document["ballot_radius"] in (21, 22)
    assert document["agent"]["epsilon"] <= 0.5
    assert document["instance"]["epsilon"] < 0.02
    found = with_radius(request(), shard)
    assert solve_request(found).ballot_radius == document["ballot_radius"]


def test_a_radius_that_was_named_is_kept_and_one_without_images_is_refused() -> None:
    assert make_plan(request(ballot_radius=7), public=None)["ballot_radius"] == 7
    with pytest.raises(InvalidSetting, match="public images"):
        make_plan(request(), public=None)
    assert "ballot_radius" not in make_plan(request(ballot_radius=None, level="instance"), public=None)


def test_the_command_says_the_radius_that_it_proposed(tmp_path: Path) -> None:
    shard = public(tmp_path / "public")
    arguments = (
        "plan --method reverse-knn --queries 4 --classes 4 --agents 10 --delta 1e-5 --records 1000 --level agent"
    )
    asked = [*arguments.split(), "--epsilon", "0.5", "--solve", "sigma", "--queries-shard", str(shard)]
    found = CliRunner().invoke(app, [*asked, "--ballot-radius", "auto"])
    assert found.exit_code == 0, found.output
    assert "onto a ball of 2" in found.output
    refused = CliRunner().invoke(app, [*asked, "--ballot-radius", "far"])
    assert refused.exit_code != 0
