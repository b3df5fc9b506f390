"""What an audit is of, and what a student's labels look like to an adversary."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from labeler.errors import InvalidTask
from tests.workers.audit.conftest import audited_task
from workers.audit.adversaries import ADVERSARIES, QUERIES, Surroundings, read_task

FILE = '[task]\nname = "t"\nmethod = "knn"\nk = 3\nsigma_votes = 5.0\ndelta = 1e-5\n'


def test_a_task_file_a_runs_folder_and_a_services_answer_name_the_task(tmp_path: Path) -> None:
    stored = audited_task()
    file, folder, answer = tmp_path / "task.toml", tmp_path / "job", tmp_path / "task.json"
    file.write_text(FILE)
    (folder / ".job").mkdir(parents=True)
    (folder / ".job" / "plan.json").write_text(json.dumps({"plan": {"task": stored.model_dump(mode="json")}}))
    answer.write_text(json.dumps({"task_id": "1", "task": stored.model_dump(mode="json")}))
    made = read_task(file, agents=4, queries=None, classes=("a", "b"))
    assert (made.agents, made.max_queries, made.colluding_agents, made.classes) == (4, QUERIES, 1, ("a", "b"))
    for path in (folder, answer):
        assert read_task(path, agents=None, queries=None, classes=()) == stored
    with pytest.raises(InvalidTask, match="leave --agents and --queries out"):
        read_task(answer, agents=2, queries=None, classes=())
    with pytest.raises(InvalidTask, match="cannot be read"):
        read_task(tmp_path / "nothing.json", agents=None, queries=None, classes=())


def test_a_task_about_attributes_is_read_and_attacked(tmp_path: Path, around: Callable[..., Surroundings]) -> None:
    stored = audited_task(attributes_per_record=2)
    (tmp_path / "task.json").write_text(json.dumps(stored.model_dump(mode="json")))
    task = read_task(tmp_path / "task.json", agents=None, queries=None, classes=())
    attack = ADVERSARIES["poisoned-chosen"].prepare(around(task))
    assert attack.trial(0, present=True) != attack.trial(0, present=False)


@pytest.mark.parametrize("release", ["histogram", "winner"])
def test_a_students_labels_are_attacked_as_well(
    release: str, around: Callable[..., Surroundings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.audit.adversaries.LEARNING_RUNS", 2)
    task = audited_task(max_queries=12, release=release)
    attack = ADVERSARIES["natural"].prepare(around(task, view="student"))
    scores = [attack.trial(number, present=bool(number % 2)) for number in range(4)]
    assert np.isfinite(scores).all()
    assert len(set(scores)) > 1
