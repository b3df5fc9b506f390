"""A task: what all parties agree on before anybody answers.

The task fixes everything the privacy price depends on. It is immutable, and its digest (SHA-256 of its canonical JSON)
is in every message. An agent answers only the task it has checked, and a tallier adds only ballots of the same task.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidationInfo,
    model_serializer,
    model_validator,
)

from labeler.errors import InvalidTask
from labeler.methods import DEFAULT_METHOD, DEFAULT_RELEASE, METHODS, Method, MethodName, ReleaseKind, check, grid
from labeler.noise import (
    TALLIERS,
    NoiseBy,
    noise_reach,
)
from labeler.setting import DEFAULT_DELTA, MOST_AXES, PLAIN
from labeler.setting import Level as Level
from labeler.setting import Life as Life
from labeler.setting import Sampled as Sampled
from labeler.setting import StatedLevel as StatedLevel
from labeler.setting import Training as Training
from labeler.settings import PlainNumbers, one_spelling
from labeler.settings import describe_validation as describe_validation

if TYPE_CHECKING:
    from labeler.sharing import WinnerTerms

LEAST_SIGMA_VOTES = 1e-6
"""Less noise than this hides nothing, and its grid would exceed the range of ordinary numbers."""

MOST_CLASSES: Final = 32_000
"""Most classes of a task, and most attributes of a record: labels are signed 16-bit integers."""

PositiveFinite = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Sigma = Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False)]


def _check_printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("only printable characters: no line break, no tab and no other control character")
    return text


Printable = Annotated[str, AfterValidator(_check_printable)]
"""A text that people read in terminals and logs, where a control character could rewrite its surroundings."""


def can_name_a_class(name: str) -> bool:
    """Return whether a task can ask about a class of this name: printable, without spaces around it."""
    return bool(name) and name.isprintable() and name == name.strip()


Neighbors = Annotated[int, Field(ge=1, le=1_000_000)]
Delta = Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)]
Queries = Annotated[int, Field(ge=1, le=100_000_000)]
Participants = Annotated[int, Field(ge=1, le=1_000_000)]
Absent = Annotated[int, Field(ge=0, le=1_000_000)]
Votes = Annotated[int, Field(ge=1, le=2**40)]
OffsetShare = Annotated[float, Field(ge=0, le=0.5, allow_inf_nan=False)]
Classes = Annotated[tuple[Printable, ...], Field(min_length=2, max_length=MOST_CLASSES)]


def _default_k(given: Mapping[str, Any]) -> int:
    method = given.get("method")  # missing where it was refused
    return 1 if method is None else METHODS[method].default_k


def _none_if_plain(training: Training | None, info: ValidationInfo) -> Training | None:
    """A task that names the learner of a task without training is that task, with its digest."""
    method = info.data.get("method")  # missing where it was refused
    is_plain = training is not None and training.learner == PLAIN and method and PLAIN in METHODS[method].learners
    return None if is_plain else training


class Terms(PlainNumbers):
    """The terms of a task that a requester chooses, each said once: its type, bounds, default and words.

    Every way to ask takes them from here: task files and REST (`labeler.solving.WantedTask`), prices on the command
    line and in Python (`workers.plan.PlanRequest`), and the task itself. `--help`, the OpenAPI document and the Python
    reference show these words.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, use_attribute_docstrings=True)

    method: MethodName = DEFAULT_METHOD
    """How agents answer: knn is kNN-DPFL of the papers, ensemble AE-DPFL, blind-average DP-Helmet, aux-distill
    FedAUXfdp (FedD without scores), federated DP-FedSGD, DP-FedAvg and PriFedSync; reverse-knn is ours
    (labeler.methods)."""
    k: Neighbors = Field(default_factory=_default_k)
    """Neighbors that vote: records per query (knn), or queries per record (reverse-knn). Default: 1; 5 for knn. Public,
    the same for every agent; 1 for every other method."""
    delta: Delta = DEFAULT_DELTA
    """Failure probability of the guarantee."""
    release: ReleaseKind = DEFAULT_RELEASE
    """What is opened: the noisy histogram or its winner."""
    colluding_agents: Absent | None = None
    """How many agents may collude or read the release without weakening the guarantee. Default: 1, or 0 for one agent;
    all but one if talliers add the noise."""
    max_dropouts: Absent = 0
    """How many agents may fail to answer before nothing is opened."""
    max_agent_records: Votes | None = None
    """Public bound on the records one agent votes with (reverse-knn), which makes the agent-level price finite. An
    agent that holds more votes with the first ones."""
    records_per_person: Votes | None = None
    """At most this many records of one person vote, which gives a price per person. They are those with the smallest
    record ids, which are random; an agent can answer only if its shard knows the person of each record."""
    offset_share: OffsetShare | None = None
    """reverse-knn: the part of the price for which each site finds its own offset; 0 for none. That is how far its
    images lie from the questions on average, under noise. It is taken off each image before it votes. Default: where
    an epsilon is given, public facts choose it (labeler.expectation.offset_for), else none."""
    attributes_per_record: Annotated[int, Field(ge=1, le=MOST_CLASSES)] | None = None
    """knn, ensemble: classes are attributes, and a record, or an agent's model, votes for at most this many (tau). It
    has any number of them, and votes for the first tau that it has, in the order of the classes
    (labeler.methods.knn.attribute_ballots). Public."""
    group_size: Votes | None = None
    """Epsilon is also stated for any this many records of all sites together. No cap and no names of persons are
    needed, and noise and charge stay the same (labeler.accounting.events)."""
    training: Annotated[Training | None, AfterValidator(_none_if_plain)] = None
    """How an agent fits the model that it answers with (blind-average, aux-distill, federated; or ensemble, whose
    default is a linear head)."""
    dishonest_talliers: Literal[1, 2] | None = None
    """How many of three talliers may be dishonest, if they add the noise and the agents add none (labeler.noise). Then
    `colluding_agents` changes nothing."""


class NamedTerms(Terms):
    """Terms of a task with a name, and not only of a price."""

    name: Annotated[Printable, Field(min_length=1, max_length=200)]
    """For people; part of the digest."""
    ballot_radius: Votes | None = None
    """Longest ballot R, in votes (reverse-knn): each agent draws its whole ballot, centered, onto a ball of this radius
    (labeler.methods.reverse_knn). Public. The agent-level price is finite with far less noise than under
    `max_agent_records`."""
    abstain_below: Annotated[int, Field(ge=0, le=2**40)] | None = None
    """Winner only: a query whose best noisy sum is below this many votes gets the answer -1."""


_WRITTEN: Final = (
    "name", "classes", "method", "k", "sigma_votes", "delta", "max_queries", "release", "agents", "colluding_agents",
    "max_dropouts", "max_agent_records", "ballot_radius", "records_per_person", "attributes_per_record",
    "lifetime_budget", "training", "abstain_below", "talliers", "dishonest_talliers", "grid_scale",
)  # fmt: skip
"""The order in which a task has always been written: metadata of files and names of caches have its bytes."""


class Task(NamedTerms):
    """One labeling task: `Terms`, and what else all parties agree on."""

    model_config = ConfigDict(str_strip_whitespace=True)

    classes: Classes
    """Public list of class names, in label order. Never read from private data."""
    method: MethodName
    """A task names it; a request need not (labeler.solving)."""
    k: Neighbors = 1
    offset_share: Annotated[OffsetShare | None, AfterValidator(lambda share: share or None)] = None
    sigma_votes: Sigma
    """Standard deviation, in votes, of the noise on one coordinate of the sum, without noise that somebody can
    subtract. This much remains if `colluding_agents` pool what they know and `max_dropouts` are gone. For methods that
    answer with real numbers the unit is the largest change by one record (labeler.methods). Then sigma is the noise
    multiplier."""
    delta: Delta
    max_queries: Queries
    """Most queries asked in this task; the price is for all of them. For blind-average it is the number of rows of the
    model's weights: one per entry of a feature, and one for the intercept. For federated it is that number of rows for
    each of the steps."""
    agents: Participants
    """N, number of participating agents."""
    colluding_agents: Absent = 0
    lifetime_budget: Life | None = None
    """reverse-knn only: each record votes within a budget for its whole life, at queries that are near enough. That
    budget is the price, however many such tasks there are (labeler.accounting.lifetime)."""
    talliers: Literal[2, 3] = 3
    """How many parties hold one secret share of each ballot; the winner needs 3."""
    grid_scale: Votes | None = None
    """Grid units per vote (S). Chosen from sigma when absent."""
    backbone_fingerprint: Printable = ""
    """The backbone that made every feature, private and public."""
    nonce: Printable = ""
    """Makes two otherwise equal tasks different, so that each draws its own noise."""

    @model_validator(mode="before")
    @classmethod
    def _means_have_axes(cls, given: Any) -> Any:
        # The rows that class means are asked for are their axes and the center; a record has length one along axes.
        training = given.get("training") if isinstance(given, dict) else None
        fields = training.model_dump() if isinstance(training, Training) else training
        if not isinstance(fields, dict) or fields.get("learner") != "means" or fields.get("axes") is not None:
            return given
        rows = given.get("max_queries")
        axes = min(rows - 1, MOST_AXES) if isinstance(rows, int) and rows > 1 else 1
        return {**given, "training": {**fields, "axes": axes}}

    @model_validator(mode="after")
    def _check(self) -> Task:
        if self.sigma_votes < LEAST_SIGMA_VOTES:
            raise ValueError(f"sigma_votes must be at least {LEAST_SIGMA_VOTES:g} votes, found {self.sigma_votes:g}")
        if len(set(map(one_spelling, self.classes))) != len(self.classes):
            raise ValueError("classes must be different from each other")
        if any(not name for name in self.classes):
            raise ValueError("a class name must not be empty")
        check(self)
        if self.release == "winner" and self.talliers != 3:
            raise ValueError(
                "talliers must be 3 for release winner: of two, one dishonest tallier is no minority, so that nothing "
                "they compute together stays hidden from it. Use 3 talliers, or release the histogram"
            )
        if self.abstain_below is not None and self.release != "winner":
            raise ValueError(
                "abstain_below only means something for release winner: whoever has the histogram sees its best "
                "noisy count, and can leave a query unanswered without asking for it here"
            )
        self._check_who_adds_noise()
        return self

    def _check_who_adds_noise(self) -> None:
        if self.dishonest_talliers is not None:
            if self.talliers != TALLIERS:
                raise ValueError(
                    f"talliers must be {TALLIERS} where they add the noise (dishonest_talliers): of two, of which one "
                    "may be dishonest, the other would add all of it. Use 3 talliers, or leave dishonest_talliers out"
                )
            if self.agents - self.max_dropouts < 1 or self.colluding_agents > self.agents:
                raise ValueError(
                    f"{self.max_dropouts} dropouts and {self.colluding_agents} colluding agents of {self.agents}: at "
                    "least one agent must contribute, and no more can collude than there are"
                )
            return
        if self.agents - self.colluding_agents - self.max_dropouts < 1:
            raise ValueError(
                f"too few agents for the collusion stated: of {self.agents}, {self.colluding_agents} may collude and "
                f"{self.max_dropouts} may drop out, which can leave no agent whose noise they cannot subtract; "
                f"add agents, or lower colluding_agents or max_dropouts: together at most {self.agents - 1}"
            )

    @model_serializer(mode="wrap")
    def _leave_out_what_is_not_asked(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # A task without such a field is written, and hashed, as it was before the field existed.
        later = {
            "records_per_person", "ballot_radius", "attributes_per_record", "lifetime_budget", "dishonest_talliers",
            "offset_share", "group_size",
        }  # fmt: skip
        fields: dict[str, Any] = dump(self)
        return {
            name: fields[name]
            for name in (*_WRITTEN, *fields)
            if name in fields and not (name in later and fields[name] is None)
        }

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Task:  # noqa: ARG002  # pydantic's signature; everything here is immutable
        """Return a validated copy: pydantic's own would keep the cached grid and digest of the original task."""
        return Task.model_validate(self.model_dump() | dict(update or {}))

    @property
    def a_record_may_be_replaced(self) -> bool:
        """Return whether records are capped. Under a cap, a record that leaves may let in one that never voted."""
        return self.max_agent_records is not None or self.records_per_person is not None

    @property
    def traits(self) -> Method:
        """Return the public properties of the task's method."""
        return METHODS[self.method]

    @property
    def sampled(self) -> Sampled | None:
        """Return the terms of a model that is trained in steps over secret samples; None for other tasks."""
        return None if self.training is None else self.training.sampled

    @property
    def steps(self) -> int:
        """Return the number of rounds of a sampled training, each based on the earlier ones; 1 for other tasks."""
        return 1 if self.training is None or self.sampled is None else self.training.iterations

    @property
    def rows(self) -> int:
        """Return the number of queries in each of the `steps` rounds."""
        return self.max_queries // self.steps

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def votes_of_a_record(self) -> int:
        """Return t, the most classes for which one record votes at a query: one, or `attributes_per_record`."""
        return 1 if self.attributes_per_record is None else min(self.attributes_per_record, self.num_classes)

    @property
    def quorum(self) -> int:
        """Return the fewest contributing agents for which anything is opened."""
        return self.agents - self.max_dropouts

    @property
    def noise_contributors(self) -> int:
        """Return h = N - colluding_agents - max_dropouts: contributors whose noise the adversary certainly does not
        know.

        It is 1 if each agent's own noise is enough for its price, since no other party knows any of it. If the talliers
        add the noise, it is the number of honest talliers.
        """
        if not self.noise_parties:
            return 1
        if self.dishonest_talliers is not None:
            return self.talliers - self.dishonest_talliers
        return self.agents - self.colluding_agents - self.max_dropouts

    @property
    def noise_by(self) -> NoiseBy:
        """Return "agents" or "talliers", whichever add the noise."""
        return "agents" if self.dishonest_talliers is None else "talliers"

    @property
    def noise_parties(self) -> int:
        """Return the number of noise shares in a sum to which every agent contributed; 0 if noise is in each answer."""
        return self.traits.noise_shares(self, self.agents)

    @property
    def agents_add_shares(self) -> bool:
        """Return whether each agent adds a share of the noise to its answer, which others can pool."""
        return self.noise_parties > 0 and self.noise_by == "agents"

    @property
    def tallier_sigma_grid(self) -> float | None:
        """Return the parameter of each tallier's noise on each number, in grid units; None if agents add it."""
        return None if self.noise_by == "agents" else self.share_sigma_grid

    @cached_property
    def scale(self) -> int:
        """Return S, grid units per vote.

        Raises:
            UnsafeGrid: a noise share would have a standard deviation below 100 grid units, or a sum
                could leave the range in which addition modulo 2^64 is ordinary addition.
        """
        return grid.scale_of(self)

    @property
    def noise_reach(self) -> int:
        """Return the largest magnitude of one party's noise on one count, in grid units."""
        return noise_reach(self.share_sigma_grid)

    @cached_property
    def vote_clip(self) -> int | None:
        """Return the limit to which an agent clips each count of its ballots, in votes; None if none is needed.

        With reverse-knn an agent may cast any number of votes for one class at one query, and a sum of such
        counts fits no field. So for the winner each count is cut at the largest number with which every sum
        fits. It follows from the task alone and is the same for every agent. Cutting costs no privacy
        (labeler.methods.reverse_knn). It costs accuracy if it binds: if one agent has more votes than that for
        two classes, both get equally many from it.
        """
        return grid.vote_clip(self)

    @cached_property
    def winner_terms(self) -> WinnerTerms | None:
        """Return the terms that talliers need to find the winners; None if the histogram is released.

        The range holds for a sum over any of the N agents, so dropouts do not matter. Each agent has 0 to M votes in a
        cell (-M to M on a ball), where M is `vote_clip` or k. The noise of each party stays within its reach.
        """
        return grid.winner_terms(self)

    @property
    def share_sigma_grid(self) -> float:
        """Return the standard deviation of one party's noise share, in grid units: S * sigma / sqrt(h)."""
        return self.scale * self.sigma_votes / math.sqrt(self.noise_contributors)

    @property
    def total_sigma_votes(self) -> float:
        """Return the standard deviation of the actual noise in a sum of all agents: sigma * sqrt(N / h).

        It is sigma if each agent's own noise is in its answer, and sigma * sqrt(3 / h) if the talliers add it.
        """
        return self.sum_sigma_votes(self.agents)

    def sum_sigma_votes(self, contributors: int) -> float:
        """Return the standard deviation of the actual noise in a sum over `contributors` agents."""
        shares = self.traits.noise_shares(self, contributors)
        return self.sigma_votes * math.sqrt(shares / self.noise_contributors) if shares else self.sigma_votes

    @cached_property
    def kind(self) -> str:
        """Return every field but name and nonce, as JSON. Tasks of one kind cost the same."""
        return self.model_dump_json(exclude={"name", "nonce"})

    @cached_property
    def digest(self) -> str:
        """Return SHA-256 over the canonical JSON of every field, in hexadecimal.

        Newer fields are included only if they are given: tasks without them keep their digest.
        """
        fields = self.model_dump(mode="json") | {"scale": self.scale}
        for later in ("abstain_below", "training"):
            if fields[later] is None:
                del fields[later]
        canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(b"labeler-task/1\n" + canonical.encode()).hexdigest()


def parse_task(fields: object) -> Task:
    """Validate a mapping (from TOML or JSON) into a task.

    Raises:
        InvalidTask: one sentence per field that is unknown, missing or out of bounds.
        UnsafeGrid: see Task.scale.
    """
    try:
        task = Task.model_validate(fields)
    except ValidationError as error:
        raise InvalidTask(describe_validation(error, "task", model=Task)) from None
    _ = task.scale
    return task
