"""A task that says little is the same task at every door: REST, task files, notebooks and the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import labeler as notebook
from api.coordinator.tasks import describe_task
from api.schema import TaskRequest
from labeler.errors import InvalidTask
from labeler.methods import DEFAULT_METHOD, METHODS
from labeler.planning import price
from labeler.task import Task, parse_task
from tests.api.conftest import CLASSES, FINGERPRINT, House
from tests.command_line import Labeler, labeler
from tests.workers.builders import shard_of_rows
from workers.run.task_file import read_task_file

__all__ = ["labeler"]

QUESTIONS = 20
FILE = '[task]\nname = "same"\nepsilon = 5.0\n{method}\n[queries]\nstrategy = "clustered"\ncount = 20\n'


def shards(folder: Path) -> tuple[list[Path], Path]:
    """Three private shards and a public one, as the three agents of the house would hold them."""
    rng = np.random.default_rng(0)
    centers = rng.normal(size=(len(CLASSES), 16))
    made = []
    for name in ("a", "b", "c", "public"):
        labels = (np.arange(60) % len(CLASSES)).astype(np.int16)
        rows = centers[labels] + 0.3 * rng.normal(size=(60, 16))
        own = None if name == "public" else labels
        shard_of_rows(folder / name, rows, own, classes=CLASSES, fingerprint=FINGERPRINT, max_records=None)
        made.append(folder / name)
    return made[:3], made[3]


def task_of(job: Path) -> Task:
    """The task of a finished job here, without what makes it one of a kind."""
    fields = json.loads((job / "report.json").read_text())["task"]
    fields.pop("digest")
    return parse_task(fields | {"nonce": ""})


@pytest.mark.parametrize("method", [None, "knn"])
def test_the_same_few_words_are_the_same_task_at_every_door(
    house: House, labeler: Labeler, tmp_path: Path, method: str | None
) -> None:
    said = {} if method is None else {"method": method}
    request = TaskRequest.model_validate({"name": "same", "epsilon": 5.0, "max_queries": QUESTIONS} | said)
    asked, _ = describe_task(request, config=house.config, parties=house.parties)
    path = tmp_path / "task.toml"
    path.write_text(FILE.format(method="" if method is None else f'method = "{method}"'))
    file = read_task_file(path)
    written = file.resolve(classes=CLASSES, agents=3, num_queries=QUESTIONS, fingerprint=FINGERPRINT, nonce="")
    # A submitted file becomes a request, of which every field but the participants' is there.
    sent = TaskRequest.model_validate(
        file.task.model_dump(exclude_none=True, exclude={"talliers"}) | {"max_queries": 20}
    )
    (a, b, c), public = shards(tmp_path)
    notebook.run([a, b, c], public, tmp_path / "same", epsilon=5.0, queries=QUESTIONS, quiet=True, **said)
    done = labeler("run", path, *(f"--shard={one}" for one in (a, b, c)), "--images", public, "--out", tmp_path / "cli")
    assert done.code == 0, done.err

    assert {one.digest for one in (asked, written, task_of(tmp_path / "same"), task_of(tmp_path / "cli"))} == {
        asked.digest
    }
    assert sent == request
    assert asked.method == (method or DEFAULT_METHOD)
    assert asked.k == METHODS[asked.method].default_k

    options = [] if method is None else ["--method", method]
    planned = labeler("plan", "--epsilon", 5.0, "--json", *options).document
    assert (planned["method"], planned["k"], planned["queries"]) == (asked.method, asked.k, QUESTIONS)
    assert planned["sigma_votes"] == asked.sigma_votes
    assert planned["instance"]["epsilon"] == price(asked).instance.epsilon
    assert notebook.plan(epsilon=5.0, **said).document == planned


def test_a_stored_task_names_its_method_and_is_read_as_no_other() -> None:
    """What an earlier version stored is a task of the method that it named; one without a method is refused."""
    fields = {"name": "t", "classes": ["a", "b"], "sigma_votes": 9.0, "delta": 1e-5, "max_queries": 8, "agents": 3}
    assert "method" in parse_task(fields | {"method": "knn"}).model_dump(mode="json")
    with pytest.raises(InvalidTask, match="method: is missing"):
        parse_task(fields)
