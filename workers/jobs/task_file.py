"""The task file of `labeler run`: a TOML file, documented field by field, unknown fields refused.

Every field with its default is listed in `docs/task-file.md`; a test holds the two together.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from labeler.collusion import resolve_colluding_agents
from labeler.errors import InvalidSetting, InvalidTask
from labeler.jobs import AskedStrategy, check_selection
from labeler.methods import METHODS, Method, ReleaseKind
from labeler.refused_fields import Loc, problems_of
from labeler.settings_text import SettingsText
from labeler.solving import solve_sigma
from labeler.task import PositiveFinite, Task, Training, parse_task

_ANY_CLASSES: Final = ("one", "two")
_MANY_QUERIES: Final = 100_000_000

StudentKind = Literal[
    "planned",
    "auto",
    "averaged",
    "followed",
    "pooled",
    "blended",
    "matched",
    "centred",
    "discriminant",
    "prototypes",
    "spreading",
    "linear-probe",
]


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class LifeTable(_Table):
    """`[task.life]`: every image votes from a budget for its whole life; of a service only, whose agents remember.

    Attributes:
        least_similarity: the least cosine between an image and a question at which it votes.
        asked_classes: only images of these classes vote, and pay for it; of all when absent.
        budget_nano: what an image may ever spend; all that the federation has set aside when absent.
    """

    least_similarity: Annotated[float, Field(ge=-1, le=1, allow_inf_nan=False)]
    asked_classes: tuple[str, ...] | None = None
    budget_nano: Annotated[int, Field(ge=1)] | None = None


class TaskTable(_Table):
    """`[task]`: what is asked and how it is answered.

    Attributes:
        name: for people.
        method: how an agent answers; see labeler.methods.
        k: neighbours that vote: records per query (knn) or queries per record (reverse-knn).
        sigma_votes: the noise nobody can subtract, in votes; or give `epsilon` instead.
        epsilon: the instance-level price wanted; the noise is solved for it.
        delta: failure probability of the guarantee.
        release: "histogram" (noisy sums) or "winner" (only the class that won).
        colluding_agents: participants that may know their own noise, because they read the release or collude, without
            weakening the guarantee; 1 when absent, or 0 where one agent takes part.
        max_dropouts: agents that may fail to answer before nothing is opened.
        max_agent_records: public bound on an agent's records, for a finite agent-level price of
            reverse-knn. An agent with more votes with some of them, which doubles the instance-level charge.
        ballot_radius: each agent draws its whole ballot onto a ball of this radius, in votes, for a finite agent-level
            price of reverse-knn; `labeler plan` proposes one.
        records_per_person: at most so many records of one person vote at each agent, which states a price for a person.
        attributes_per_record: for how many of the attributes that it has a record votes at most, where shards hold
            attributes; for all when absent.
        life: votes for life: the table `[task.life]`.
        training: how agents train, for methods whose price depends on it: the table `[task.training]`.
        abstain_below: winner only: a query whose best noisy sum is below this many votes stays without an answer.
        talliers: 2 or 3 parties that hold one share each; the winner needs 3.
        dishonest_talliers: where the three talliers add the noise, how many of them may be dishonest.
        grid_scale: grid units per vote; chosen when absent.
        classes: public class names in label order; taken from the shards' manifests when absent.
    """

    name: str
    method: Method = "knn"
    k: int = 1
    sigma_votes: PositiveFinite | None = None
    epsilon: PositiveFinite | None = None
    delta: float
    release: ReleaseKind = "histogram"
    colluding_agents: int | None = None
    max_dropouts: int = 0
    max_agent_records: int | None = None
    ballot_radius: int | None = None
    records_per_person: int | None = None
    attributes_per_record: int | None = None
    life: LifeTable | None = None
    training: Training | None = None
    abstain_below: int | None = None
    talliers: Literal[2, 3] = 3
    dishonest_talliers: Literal[1, 2] | None = None
    grid_scale: int | None = None
    classes: tuple[str, ...] | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> TaskTable:
        if (self.sigma_votes is None) == (self.epsilon is None):
            raise ValueError("give exactly one of sigma_votes (the noise) and epsilon (the price to solve it for)")
        return self


class QueriesTable(_Table):
    """`[queries]`: which of the public images are asked about. Costs no privacy.

    Attributes:
        strategy: "all", "random", "clustered" (one question per cluster of public images), or "spectral" (the same,
            along the graph of their nearest neighbours).
        count: how many to ask; required except for "all".
        seed: public seed of the choice.
    """

    strategy: AskedStrategy = "all"
    count: Annotated[int, Field(ge=1)] | None = None
    seed: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _count_is_given(self) -> QueriesTable:
        check_selection(self.strategy, self.count)
        return self


class StudentTable(_Table):
    """`[student]`: what is trained on the answers. Costs no privacy.

    Attributes:
        kind: which student; see feature_store.students.student. When absent "planned", or "auto" for a job that was
            begun before there was "planned", so that it gives the same labels again.
        seed: public seed of its training.
    """

    kind: StudentKind | None = None
    seed: Annotated[int, Field(ge=0)] = 0


class BudgetTable(_Table):
    """`[budget]`: the most that this run may cost; it is refused before anybody is asked if it costs more.

    Attributes:
        instance_epsilon: cap on the instance-level epsilon at the task's delta.
        agent_epsilon: cap on the agent-level epsilon at the task's delta.
    """

    instance_epsilon: PositiveFinite | None = None
    agent_epsilon: PositiveFinite | None = None


class TaskFile(_Table):
    """A whole task file."""

    task: TaskTable
    queries: QueriesTable = QueriesTable()
    student: StudentTable = StudentTable()
    budget: BudgetTable = BudgetTable()

    @model_validator(mode="after")
    def _nothing_is_chosen_for_a_model(self) -> TaskFile:
        if METHODS[self.task.method].asks_for_a_model and self.queries != QueriesTable():
            raise ValueError(
                f"leave [queries] out for method {self.task.method}: agents are asked for a model, which labels every "
                "public image"
            )
        return self

    @property
    def axes(self) -> int | None:
        """Along how many public axes a linear model looks; None for features as they are."""
        return None if self.task.training is None else self.task.training.axes

    @property
    def steps(self) -> int:
        """In how many rounds a model is trained; else 1."""
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
        agreed_colluding_agents: int | None = None,
        has_attributes: bool = False,
    ) -> Task:
        """Fill in what the shards and the queries decide, and solve for sigma where a price was given.

        Args:
            classes, agents, num_queries, fingerprint, nonce: of the task.
            agreed_colluding_agents: what an interrupted job was begun with; it counts where the file does not say.
            has_attributes: whether the shards hold attributes, any number per record.

        Raises:
            InvalidTask: a field is out of bounds, or no sigma reaches the price; or it is of votes for life.
        """
        if self.task.life is not None:
            raise InvalidTask(
                "task.life: votes for life are cast by agents whose journals remember what each image has spent, and a "
                "run ends with its folder; submit this file to a service (labeler submit)"
            )
        if self.task.attributes_per_record is not None and not has_attributes:
            raise InvalidTask(
                "task.attributes_per_record: the shards hold one class per record; leave it out, or embed the images "
                "with a table of attributes (labeler embed --attributes)"
            )
        fields = self.task.model_dump(exclude={"epsilon"}, exclude_none=True)
        if has_attributes:
            fields.setdefault("attributes_per_record", len(self.task.classes or classes))
        fields |= {
            "classes": self.task.classes or classes,
            "agents": agents,
            "max_queries": num_queries,
            "backbone_fingerprint": fingerprint,
            "nonce": nonce,
            "colluding_agents": resolve_colluding_agents(
                agreed_colluding_agents if self.task.colluding_agents is None else self.task.colluding_agents,
                agents=agents,
                max_dropouts=self.task.max_dropouts,
                method=self.task.method,
                dishonest_talliers=self.task.dishonest_talliers,
            ),
        }
        if self.task.epsilon is not None:
            draft = parse_task(fields | {"sigma_votes": 1.0})
            fields["sigma_votes"] = solve_sigma(draft, self.task.epsilon)
        return parse_task(fields)


def read_task_file(path: Path) -> TaskFile:
    """Read and check a task file.

    Raises:
        InvalidTask: it cannot be read, is no TOML, or a field is unknown, missing or out of bounds.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InvalidTask(f"cannot read task file {path}: {error.strerror}") from None
    try:
        text = SettingsText.of(data, f"task file {path.name}")
        file = text.check(TaskFile)
        _check_values(text, file.task)
    except InvalidSetting as error:
        raise InvalidTask(str(error)) from None
    return file


def _check_values(text: SettingsText, table: TaskTable) -> None:
    """Refuse, with its line, what no task may say, whatever shards and questions it meets later."""
    fields = table.model_dump(exclude={"epsilon"}, exclude_none=True)
    if table.life is not None:
        # What the federation has set aside, and its classes, are not known here.
        fields["life"] = {"budget_nano": 1} | fields["life"]
        fields["life"].pop("asked_classes", None)
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
    """The field that a sentence about several begins with, which is the one to look at; none where it names none."""
    word = sentence.split(" ", 1)[0].rstrip(",:").split(".")
    return tuple(word) if word[0] in TaskTable.model_fields else ()
