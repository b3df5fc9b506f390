"""Jobs from before there was the student `planned` label their images again as they did; new ones read answers well."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from feature_store.job_files.questions import StoredQuestions, read_stored_questions
from workers.jobs.folder import open_job_folder

PLAN = {"task": {"max_queries": 20, "colluding_agents": 1}, "batches": ["b"]}


def test_a_job_that_was_begun_before_keeps_its_student_and_its_questions(tmp_path: Path) -> None:
    with open_job_folder(tmp_path / "job") as folder:
        assert folder.usual_student() == "planned"
        assert folder.agreed("max_queries") is None
        folder.begin(PLAN)
        assert folder.usual_student() == "planned"
        assert folder.agreed("max_queries") == 20
        plan = folder.state / "plan.json"
        before = json.loads(plan.read_text())
        assert before.pop("student") == "planned"
        plan.write_text(json.dumps(before))
        folder.begin(PLAN)
        assert folder.usual_student() == "auto"


def test_stored_questions_say_which_student_and_those_from_before_the_one_of_then(tmp_path: Path) -> None:
    rows = np.ones((2, 4), dtype=np.int16)
    earlier = StoredQuestions(rows, np.array([-1, -1]), np.array([0, 1, 1]), None, "f", "b")
    assert b"student" not in earlier.to_bytes()
    for stored in (earlier, replace(earlier, student="planned")):
        path = tmp_path / stored.student
        path.write_bytes(stored.to_bytes())
        assert read_stored_questions(path).student == stored.student
    assert (tmp_path / "auto").read_bytes() != (tmp_path / "planned").read_bytes()
