"""Where a number is wanted, a text that reads like one and a truth value are refused, in tasks and over REST."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from api.schema import JobRequest, LabelsRequest, Selection, TaskRequest
from labeler.setting import Life, Training
from labeler.settings import _numbers_of
from labeler.task import Task
from workers.plan import PlanRequest
from workers.run.task_file import TaskTable

WANTED = {"name": "t", "method": "knn", "delta": 1e-5, "sigma_votes": 25.0}
TASK: dict[str, Any] = {**WANTED, "classes": ["a", "b"], "agents": 3, "max_queries": 9}
JOB = {"task_id": "0" * 64}


GOOD: dict[type[BaseModel], dict[str, Any]] = {
    TaskRequest: {**WANTED, "max_queries": 9},
    TaskTable: WANTED,
    Task: TASK,
    PlanRequest: {"sigma": 25.0},
    Selection: {"strategy": "random", "count": 3},
    JobRequest: JOB,
    Training: {"min_records": 5, "regularisation": 0.1},
    Life: {"budget_nano": 5, "least_similarity": 0.5},
}


@pytest.mark.parametrize(("model", "field"), [(model, name) for model in GOOD for name in sorted(_numbers_of(model))])
def test_what_is_no_number_is_refused_in_every_field_of_every_model(model: type[BaseModel], field: str) -> None:
    """true was taken for 1, and so were a task's k and its number of colluders."""
    model.model_validate(GOOD[model])
    for bad in ("5", "1.0", True, False, "", "nan"):
        with pytest.raises(ValidationError, match="number is needed"):
            model.model_validate(GOOD[model] | {field: bad})


def test_the_models_of_a_task_have_its_numbers() -> None:
    assert {"k", "delta", "dishonest_talliers", "max_dropouts"} <= _numbers_of(TaskRequest) & _numbers_of(PlanRequest)


@pytest.mark.parametrize("bad", ["1.0", True])
@pytest.mark.parametrize("model", [JobRequest, LabelsRequest])
def test_a_vector_holds_numbers(model: type[BaseModel], bad: Any) -> None:
    model.model_validate({**JOB, "backbone_fingerprint": "f", "features": [[1, 0.5]]})
    with pytest.raises(ValidationError, match="features"):
        model.model_validate({**JOB, "backbone_fingerprint": "f", "features": [[1, bad]]})


def test_what_may_be_a_text_stays_one() -> None:
    asked = TaskRequest.model_validate({**WANTED, "max_queries": 9, "name": "5", "backbone_fingerprint": "7"})
    assert (asked.name, asked.backbone_fingerprint, asked.sigma_votes) == ("5", "7", 25.0)
