"""The task file of `labeler run`: a TOML file, documented field by field, unknown fields refused.

A task's fields are those of `labeler.task.Terms`. Every field with its default is listed in `docs/task-file.md` or
`docs/task-training.md`; a test compares them.

A job needs no file: `make_task_file` makes one of what was said on the command line or in Python. Where nobody said how
many questions to ask, public facts decide (`labeler.expectation.questions_for`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, cast

from pydantic import Field, ValidationError, model_validator

from labeler.errors import InvalidSetting, InvalidTask
from labeler.methods import METHODS
from labeler.methods.evaluate import MOST_BANDS, Layout
from labeler.rounds.effects import AskedStrategy, StudentKind
from labeler.settings import Loc, PlainNumbers, SettingsText, given, problems_of
from labeler.solving import QuestionChoice, WantedTask
from labeler.system.files import read_named
from labeler.task import PositiveFinite, Task, Terms, describe_validation

_ANY_CLASSES: Final = ("one", "two")
_MANY_QUERIES: Final = 100_000_000

MOST_SEED: Final = 2**32 - 1
"""Largest seed with which scikit-learn draws; a larger one would fail after the answers were paid for."""


class _Table(PlainNumbers):
    model_config = Terms.model_config


class TaskTable(WantedTask):
    """`[task]`: what is asked and how it is answered."""

    talliers: Literal[2, 3] = 3
    """2 or 3 parties that hold one share each; the winner needs 3."""
    grid_scale: int | None = None
    """Grid units per vote; chosen when absent."""


class QueriesTable(QuestionChoice):
    """`[queries]`: which of the public images are asked about. Costs no privacy."""

    @model_validator(mode="after")
    def _seed_clusters(self) -> QueriesTable:
        if self.strategy in ("clustered", "spectral") and self.seed > MOST_SEED:
            raise ValueError(f"seed is at most {MOST_SEED} where images are clustered, found {self.seed}")
        return self


class StudentTable(_Table):
    """`[student]`: what is trained on the answers. Costs no privacy."""

    kind: StudentKind | None = None
    """Which student labels all images (feature_store.students.student); planned when absent."""
    seed: Annotated[int, Field(ge=0, le=MOST_SEED)] = 0
    """Public seed of its training."""


class EvaluationTable(_Table):
    """`[evaluation]`: which numbers an evaluation of a model counts (method evaluate). Costs no privacy."""

    layout: Layout | None = None
    """What is counted: confusion (true and predicted class), classes (true class, right or wrong) or bands (right or
    wrong), each by bands of confidence. Default: the finest that is useful under the noise."""
    bands: Annotated[int, Field(ge=1, le=MOST_BANDS)] | None = None
    """How many bands of confidence, of equally many public images where their labels are with the model. Default: as
    many as are useful, five at most."""
    edges: Annotated[tuple[float, ...], Field(strict=False)] | None = None
    """Confidences between bands, ascending; instead of `bands`."""
    records: Annotated[int, Field(ge=1, le=2**60)] | None = None
    """Private images in all, as far as you know; helps to choose what is counted."""


class JobBudgetTable(_Table):
    """`[budget]`: the most that this run may cost; a run that costs more is refused before any agent is asked."""

    instance_epsilon: PositiveFinite | None = None
    """Cap on the instance-level epsilon at the task's delta."""
    agent_epsilon: PositiveFinite | None = None
    """The same at agent level."""


class TaskFile(_Table):
    """A whole task file."""

    task: TaskTable
    queries: QueriesTable = QueriesTable()
    student: StudentTable = StudentTable()
    evaluation: EvaluationTable = EvaluationTable()
    budget: JobBudgetTable = JobBudgetTable()

    @model_validator(mode="after")
    def _tables_go_with_the_method(self) -> TaskFile:
        why = METHODS[self.task.method].no_choice
        if why and (self.queries != QueriesTable() or (self.evaluates and self.student != StudentTable())):
            tables = "[queries] and [student]" if self.evaluates else "[queries]"
            raise ValueError(f"leave {tables} out for method {self.task.method}: {why}")
        if not self.evaluates and self.evaluation != EvaluationTable():
            raise ValueError(f"[evaluation] is only for method evaluate; found {self.task.method}")
        return self

    @property
    def evaluates(self) -> bool:
        """True if the job scores a model and labels no image."""
        return METHODS[self.task.method].labels is None

    @property
    def axes(self) -> int | None:
        """The number of public axes of a linear model; None for features as they are."""
        return None if self.task.training is None else self.task.training.axes

    @property
    def chooses_axes(self) -> bool:
        """True if public facts choose that number (`labeler.expectation.axes_for`)."""
        return self.task.training is not None and self.task.training.learner == "means" and self.axes is None

    @property
    def steps(self) -> int:
        """The number of rounds in which a model is trained; else 1."""
        training = self.task.training
        return 1 if training is None or training.sampled is None else training.iterations

    def resolve(
        self,
        *,
        classes: tuple[str, ...],
        agents: int,
        num_queries: int,
        fingerprint: str,
        nonce: str,
        has_attributes: bool = False,
    ) -> Task:
        """Fill in what the shards and the queries decide, and solve for sigma where a price was given.

        Args:
            has_attributes: whether the shards hold attributes, any number per record.

        Raises:
            InvalidTask: a field is out of bounds, or no sigma reaches the price; or it is of votes for life.
        """
        if self.task.lifetime_budget is not None:
            raise InvalidTask(
                "task.lifetime_budget: votes for life are cast by agents whose journals remember what each image has "
                "spent, and a run ends with its folder; submit this file to a service (labeler submit)"
            )
        if self.task.attributes_per_record is not None and not has_attributes:
            raise InvalidTask(
                "task.attributes_per_record: the shards hold one class per record; leave it out, or embed the images "
                "with a table of attributes (labeler embed --attributes)"
            )
        decided: dict[str, Any] = {
            "classes": self.task.classes or classes,
            "max_queries": num_queries,
            "backbone_fingerprint": fingerprint,
            "nonce": nonce,
        }
        if has_attributes and self.task.attributes_per_record is None:
            decided["attributes_per_record"] = len(decided["classes"])
        return self.task.settled(decided, agents=agents)


def read_task_file(path: Path) -> TaskFile:
    """Read and check a task file.

    Raises:
        InvalidTask: it cannot be read, is no TOML, or a field is unknown, missing or out of bounds.
    """
    try:
        data = read_named(path)
    except OSError as error:
        raise InvalidTask(f"cannot read task file {path}: {error.strerror}") from None
    try:
        text = SettingsText.of(data, f"task file {path.name}")
        _check_headings(text)
        file = text.check(TaskFile)
        _check_values(text, file.task)
    except InvalidSetting as error:
        raise InvalidTask(str(error)) from None
    return file


def _check_headings(text: SettingsText) -> None:
    """Refuse a file that lacks a heading, with the line to write: its fields then seem to be unknown ones."""
    astray = [
        (text.place((name,)), name, table)
        for name in text.fields.keys() - TaskFile.model_fields.keys()
        for table, field in TaskFile.model_fields.items()
        if name in cast(type[_Table], field.annotation).model_fields
    ]
    if astray:
        place, name, table = min(astray, key=lambda one: (one[0].line if one[0] else 0, one[1]))
        raise InvalidTask(
            f"{text.name} refused: {place}: {name} is a field of [{table}] and stands under no heading; write the line "
            f"[{table}] above it"
        )
    if "task" not in text.fields and text.fields.keys() <= TaskFile.model_fields.keys():
        raise InvalidTask(
            f'{text.name} refused: it has no [task]; write the line [task], and below it a name ("digits") and what '
            "the job may cost (epsilon = 0.5). docs/task-file.md has a whole file"
        )
    for table in TaskFile.model_fields:
        if not isinstance(text.fields.get(table, {}), dict):
            raise InvalidTask(
                f"{text.name} refused: {text.place((table,))}: {table} is a table; write the line [{table}] once, in "
                "single brackets, and its fields below it"
            )


def make_task_file(
    fields: Mapping[str, Any],
    *,
    shards: Sequence[Path],
    images: Path,
    out: Path,
    queries: int | None = None,
    strategy: AskedStrategy = "clustered",
    student: StudentKind | None = None,
) -> TaskFile:
    """Make the task file of a job that was asked for without one.

    Args:
        fields: of `[task]`; None stands for the field's default, and the name is that of the output folder.
        shards, images, out: of the job.
        queries: how many questions to ask. If None, an unfinished job in the folder decides, else public facts.
        strategy: how clusters of public images are found.
        student: which student labels all images; None for the usual one.

    Raises:
        InvalidTask: a field is unknown, missing or out of bounds.
    """
    table = {"name": out.name} | given(fields)
    tables: dict[str, Any] = {"task": table, "student": {} if student is None else {"kind": student}}
    try:
        file = TaskFile.model_validate({"task": table})
        if METHODS[file.task.method].no_choice is None:
            count = _advised_questions(file, shards, images, out) if queries is None else queries
            tables["queries"] = {"strategy": "all"} if count is None else {"strategy": strategy, "count": count}
        return TaskFile.model_validate(tables)
    except ValidationError as error:
        raise InvalidTask(describe_validation(error, "task", model=TaskFile)) from None


def _advised_questions(file: TaskFile, shards: Sequence[Path], images: Path, out: Path) -> int | None:
    """Return how many questions an unfinished job in this folder asks, else what public facts advise; None asks about
    all.
    """
    from feature_store.shard import Shard
    from labeler.expectation import questions_for
    from workers.run.folder import JobFolder

    if not shards:
        return None
    public = len(Shard.open(images, verify=False)) if (images / "manifest.json").exists() else None
    count = JobFolder(out).questions()
    if count is None:
        first = Shard.open(shards[0], verify=False)
        classes = tuple(file.task.classes or first.classes)
        asked = file.resolve(
            classes=classes,
            agents=len(shards),
            num_queries=2 * len(classes) + file.task.k,
            fingerprint=first.fingerprint,
            nonce="",
            has_attributes=first.has_attributes,
        )
        count = questions_for(asked, public_images=public)
    return count if public is None or count < public else None


def _check_values(text: SettingsText, table: TaskTable) -> None:
    """Refuse, with its line, what no task may say, whatever shards and questions it meets later."""
    fields = table.model_dump(exclude={"epsilon"}, exclude_none=True)
    if table.lifetime_budget is not None:
        # The federation's set-aside budget and its classes are not known here.
        fields["lifetime_budget"] = {"budget_nano": 1} | fields["lifetime_budget"]
        for unknown in ("asked_classes", "epsilon"):
            fields["lifetime_budget"].pop(unknown, None)
    whole = {
        "classes": _ANY_CLASSES,
        "sigma_votes": 1.0,
        "agents": max(table.colluding_agents or 0, 0) + max(table.max_dropouts, 0) + 2,
        "max_queries": _MANY_QUERIES,
        **({"max_queries": 2 * table.training.iterations} if table.training and table.training.sampled else {}),
    }
    try:
        Task.model_validate(whole | fields)
    except ValidationError as error:
        problems = [(loc or _named_first(sentence), sentence) for loc, sentence in problems_of(error, model=Task)]
        raise text.refuse([(("task", *loc), sentence) for loc, sentence in problems]) from None


def _named_first(sentence: str) -> Loc:
    """Return the field that a sentence about several begins with, the one to fix; none where it names none."""
    word = sentence.split(" ", 1)[0].rstrip(",:").split(".")
    return tuple(word) if word[0] in TaskTable.model_fields else ()
