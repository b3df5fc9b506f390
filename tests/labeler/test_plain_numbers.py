"""Where a number is wanted, a text that reads like one and a truth value are refused, in tasks and over REST."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from api.schema import JobRequest, LabelsRequest, Selection, TaskRequest
from labeler.errors import InvalidTask
from labeler.setting import Life, Training
from labeler.task import parse_task
from workers.run.task_file import TaskFile

WANTED = {"name": "t", "method": "knn", "delta": 1e-5, "sigma_votes": 25.0}
TASK: dict[str, Any] = {**WANTED, "classes": ["a", "b"], "agents": 3, "max_queries": 9}
JOB = {"task_id": "0" * 64}


@pytest.mark.parametrize("bad", ["5", "1.0", True, False, "", "nan"])
@pytest.mark.parametrize(
    ("model", "given", "field"),
    [
        (TaskRequest, {**WANTED, "max_queries": 9}, "k"),
        (TaskRequest, {**WANTED, "max_queries": 9}, "delta"),
        (TaskRequest, {**WANTED, "max_queries": 9}, "dishonest_talliers"),
        (Selection, {"strategy": "random", "count": 3}, "seed"),
        (JobRequest, JOB, "deadline_s"),
        (Training, {"min_records": 5, "regularisation": 0.1}, "clip_norm"),
        (Life, {"budget_nano": 5, "least_similarity": 0.5}, "least_similarity"),
    ],
)
def test_what_is_no_number_is_refused(model: type[BaseModel], given: dict[str, Any], field: str, bad: Any) -> None:
    """true was taken for 1, and so were a task's k and its number of colluders."""
    model.model_validate(given)
    with pytest.raises(ValidationError, match="number is needed"):
        model.model_validate(given | {field: bad})


@pytest.mark.parametrize("bad", ["1.0", True])
@pytest.mark.parametrize("model", [JobRequest, LabelsRequest])
def test_a_vector_holds_numbers(model: type[BaseModel], bad: Any) -> None:
    model.model_validate({**JOB, "backbone_fingerprint": "f", "features": [[1, 0.5]]})
    with pytest.raises(ValidationError, match="features"):
        model.model_validate({**JOB, "backbone_fingerprint": "f", "features": [[1, bad]]})


def test_a_task_and_its_file_say_numbers_too() -> None:
    assert parse_task(TASK | {"k": 3}).k == 3
    for bad in ("3", True):
        with pytest.raises(InvalidTask, match="k: a number is needed here"):
            parse_task(TASK | {"k": bad})
        with pytest.raises(ValidationError, match="number is needed"):
            TaskFile.model_validate({"task": WANTED | {"k": bad}})


def test_what_may_be_a_text_stays_one() -> None:
    asked = TaskRequest.model_validate({**WANTED, "max_queries": 9, "name": "5", "backbone_fingerprint": "7"})
    assert (asked.name, asked.backbone_fingerprint, asked.sigma_votes) == ("5", "7", 25.0)
