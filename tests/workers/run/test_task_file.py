"""Task files: every field is documented, unknown ones are refused, a price is solved into noise."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from labeler.errors import InvalidTask
from labeler.planning import price
from labeler.setting import Sampled
from labeler.solving import LifeRequest
from labeler.task import Task, Training
from workers.run.task_file import (
    EvaluationTable,
    JobBudgetTable,
    QueriesTable,
    StudentTable,
    TaskFile,
    TaskTable,
    read_task_file,
)

DOCS = Path(__file__).parents[3] / "docs"
DOCUMENT = (DOCS / "task-file.md").read_text() + "\n" + (DOCS / "task-training.md").read_text()
TABLES = {
    "task": TaskTable,
    "task.lifetime_budget": LifeRequest,
    "task.training": Training,
    "task.training.sampled": Sampled,
    "queries": QueriesTable,
    "student": StudentTable,
    "evaluation": EvaluationTable,
    "budget": JobBudgetTable,
}


@pytest.mark.parametrize("name", TABLES)
def test_every_field_is_documented_with_its_default_and_every_documented_field_exists(name: str) -> None:
    sections = re.split(r"^## ", DOCUMENT, flags=re.M)
    section = next(part for part in sections if part.startswith(f"`[{name}]`"))
    said = dict(re.findall(r"^### `(\w+)`\n\n\*((?:Required|Default|Give|In place)[^*]*)", section, flags=re.M))
    fields = TABLES[name].model_fields
    assert sorted(said) == sorted(fields)
    for field, model in fields.items():
        assert model.description or field in Task.model_fields, field
        if not (model.is_required() or model.default_factory or model.default is None):
            first = said[field].split("`")[1]
            assert tomllib.loads(f"x = {first}")["x"] == model.default, field


def test_the_documented_example_is_a_task() -> None:
    example = re.search(r"```toml\n(.*?)```", DOCUMENT, flags=re.S)
    assert example is not None
    file = TaskFile.model_validate(tomllib.loads(example[1]))
    task = file.resolve(classes=("a", "b"), agents=3, num_queries=30, fingerprint="f", nonce="")
    assert 0.49 < price(task).instance.epsilon <= 0.5


def test_a_run_casts_no_votes_for_life_and_says_where_they_are_cast() -> None:
    life = {"least_similarity": 0.5, "asked_classes": ("cat",)}
    task = {"name": "x", "method": "reverse-knn", "delta": 1e-5, "sigma_votes": 3.0, "lifetime_budget": life}
    file = TaskFile.model_validate({"task": task})
    with pytest.raises(InvalidTask, match="labeler submit"):
        file.resolve(classes=("cat", "dog"), agents=3, num_queries=30, fingerprint="f", nonce="")


FOUR = "[task]\nname='x'\ndelta=1e-4\nsigma_votes=3\n"
"""Four lines that are right."""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[task]\nname='x'\ndelta=1e-4\nsigma_votes=3\nsigma=2", "task.sigma: unknown field"),
        ("[task]\nname='x'\ndelta=1e-4", "exactly one of sigma_votes"),
        ("[task]\nname='x'\ndelta=1e-4\nsigma_votes=3\nepsilon=1", "exactly one of sigma_votes"),
        ("[task]\nname='x'\ndelta=1e-4\nsigma_votes=nan", "task.sigma_votes: must be a finite number"),
        ("[task]\nname='x'\ndelta=1e-4\nsigma_votes=3\n[queries]\nstrategy='random'", "needs count"),
        (FOUR + "[queries]\nstrategy='spectral'", "strategy 'spectral' needs count"),
        (FOUR + "[queries]\nstrategy='spectral'\ncount=501", "at most 500 groups, found count 501"),
        (FOUR + "[queries]\nstrategy='clustered'\ncount=2\nseed=4294967296", "seed is at most 4294967295"),
        (FOUR + "[queries]\nseed=9223372036854775808", "queries.seed: must be less than 9223372036854775808"),
        (FOUR + "[student]\nseed=4294967296", "student.seed: must be at most 4294967295"),
        (FOUR + "[queries]\ncount=0x" + "f" * 9000, "queries.count: must be at most 100000000"),
        ("[task\n", "task.toml is not valid TOML: line 1, column 6"),
        (
            "[task]\nname='x'\nmethod='knn'\nsigma_votes=3\n[task.lifetime_budget]\nleast_similarity=0.5",
            "lifetime_budget only means something for method reverse-knn",
        ),
        (
            FOUR + "metod='knn'",
            "line 5, column 1: task.metod: unknown field; did you mean method?",
        ),
        (FOUR + " method='kn'", "line 5, column 2: task.method: must be"),
        (FOUR + "method='reverse_knn'", "did you mean 'reverse-knn'?"),
        (
            FOUR + "k=0",
            "line 5, column 1: task.k: must be",
        ),
        (
            "[task]\nname='x'\nk=2\ndelta=1e-4\nepsilon=3\nmethod='ensemble'",
            "line 3, column 1: task.k: k must be 1 for",
        ),
        ("[task]\nname='x'\ndelta=2\nepsilon=3", "line 3, column 1: task.delta: must be less than 1"),
        ("[task]\nsigma_votes=3\n[queries]\ncount=0", "line 1, column 1: task.name: is missing"),
        ("[task]\nname='x'\nsigma_votes=3\n[queries]\ncount=0", "line 5, column 1: queries.count: must be"),
        (
            "[task]\nname='x'\ndelta=1e-4\nepsilon=3\nclasses=['a','a']",
            "line 5, column 1: task.classes: classes must be",
        ),
        ("[extra]\n", "extra: unknown field"),
    ],
)
def test_a_bad_file_is_refused_in_a_sentence(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "task.toml"
    path.write_text(text)
    with pytest.raises(InvalidTask, match=re.escape(said)):
        read_task_file(path)


@pytest.mark.parametrize("wrong", ["name=''", "name='x'\nmethod='kn'"])
def test_a_refused_field_adds_no_sentence_about_a_default_that_follows_from_it(tmp_path: Path, wrong: str) -> None:
    (tmp_path / "task.toml").write_text(f"[task]\nsigma_votes=3\n{wrong}")
    with pytest.raises(InvalidTask) as refused:
        read_task_file(tmp_path / "task.toml")
    assert "task.k" not in str(refused.value)


def test_a_missing_file_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(InvalidTask, match="cannot read task file"):
        read_task_file(tmp_path / "none.toml")


@pytest.mark.parametrize(("agents", "found"), [(1, 0), (2, 1), (3, 1)])
def test_one_participant_may_know_its_noise_unless_the_file_says_otherwise(agents: int, found: int) -> None:
    public = {"classes": ("a", "b"), "agents": agents, "num_queries": 30, "fingerprint": "f", "nonce": ""}
    silent = TaskFile(task=TaskTable(name="t", epsilon=0.5, delta=1e-5))
    assert silent.resolve(**public).colluding_agents == found
    said = TaskFile(task=TaskTable(name="t", epsilon=0.5, delta=1e-5, colluding_agents=0))
    assert said.resolve(**public).colluding_agents == 0


def test_two_agents_of_which_one_may_be_missing_need_a_word_on_collusion() -> None:
    public = {"classes": ("a", "b"), "agents": 2, "num_queries": 30, "fingerprint": "f", "nonce": ""}
    with pytest.raises(InvalidTask, match="lower max_dropouts to 0, or say colluding_agents = 0"):
        TaskFile(task=TaskTable(name="t", sigma_votes=9.0, delta=1e-5, max_dropouts=1)).resolve(**public)
    said = TaskTable(name="t", sigma_votes=9.0, delta=1e-5, max_dropouts=1, colluding_agents=0)
    assert TaskFile(task=said).resolve(**public).noise_contributors == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name = 'x'\nepsilon = 0.5", "line 1, column 1: name is a field of [task] and stands under no heading"),
        ("count = 3\n" + FOUR, "line 1, column 1: count is a field of [queries] and stands under no heading"),
        ("[queries]\ncount = 3", "it has no [task]; write the line [task]"),
        ("", "it has no [task]; write the line [task]"),
        ("task = 3", "write the line [task] once, in single brackets"),
        ("[[task]]\nname = 'x'", "write the line [task] once, in single brackets"),
        (FOUR + "[[queries]]\ncount = 3", "write the line [queries] once, in single brackets"),
    ],
)
def test_a_missing_heading_is_named_with_the_line_to_write(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "task.toml").write_text(text)
    with pytest.raises(InvalidTask, match=re.escape(said)):
        read_task_file(tmp_path / "task.toml")
